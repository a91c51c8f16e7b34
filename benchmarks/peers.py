"""Compare this project with its peers: the same training or reading by each, on this machine.

    python benchmarks/peers.py train DATASET [--best "SET"] ... [--ends RECORD ...]
                                     [--examples DIR] [-- OPTION ...]
    python benchmarks/peers.py load DATASET [-- OPTION ...]

Every row is run --runs times, by turns. SET is what stands behind compose.sh, with options that
only its techniques have; RECORD is a running.json, for a row of the set that its staircase ended
in; DIR is a clone of pytorch/examples. OPTIONs go to every row: those of train.py or loader.py.
Writes RESULT_DIR/peers.json and .md; a row that fails says why.
"""

import argparse
import collections
import fnmatch
import functools
import json
import re
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from folders import ROOT

import compose
import records
import report
import runs
from options import split

HERE = Path(__file__).resolve().parent
PACKAGES = "lightning", "pytorch-lightning", "accelerate", "spdl"
EXAMPLE = "imagenet/main.py"  # of pytorch/examples
SWITCHES = "Lightning + 16-mixed benchmark compile"
REFERENCES = {"train": SWITCHES, "load": "loader.py"}  # ratios are to these, or the first row

# what a reader has to know of the rows with these names
NOTES = {
    "train": [
        (
            "*",
            "All rows have the same images, batch, crops, model, first weights, SGD, learning "
            "rates, loading processes and pinned memory; bytes go to the GPU and become floats "
            "there.",
        ),
        ("*cache*", "Rows with cache decode each image once, the others in every epoch."),
        ("Lightning*", "Lightning has no progress bar and no logger."),
        (
            EXAMPLE,
            "imagenet/main.py is unmodified: 1,000 classes, its own weight decay and "
            "learning rates, whole epochs, floats from the loading processes, a wait for "
            "the GPU in each step, and validation of the center of a larger image.",
        ),
    ],
    "load": [
        (
            "*",
            "All rows read every picture once an epoch and bring it to the GPU, if there is one; "
            "--workers counts processes or threads. They resize, crop at random and flip.",
        ),
        (
            "DALI + image_random_crop",
            "DALI's own example decodes a random part of each picture and gives floats.",
        ),
        ("SPDL", "SPDL crops the center and does not flip."),
    ],
}

# A row is one contestant. `command` lacks the options that all rows get; `why_not` skips the row.
Row = collections.namedtuple("Row", "name precision command why_not", defaults=[""])


# ------------------------------------------------------------------------------ the rows
def joined(text, folder):
    """Return (techniques, script, options) of a SET; compose.py makes the script."""
    words = text.replace(",", " ").split()
    own = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    script = folder / f"{'_'.join(['train', *words[:own]])}.py"
    try:
        script.write_text(compose.join(words[:own]), *compose.UTF8)
    except RuntimeError as error:
        runs.refuse(f"{Path(sys.argv[0]).name}: error: {error}")
    return words[:own], script, words[own:]


def ends(paths):
    """Return {SET: in words, how many of these records of running.sh ended in it}."""
    sets = []
    for path in paths:
        rows = records.read(path, "running")
        last = report.fastest(rows)
        sets += [" ".join([*last.techniques, report.own_words(last, rows[0])]).strip()]
    return {
        text: f"the end of {count} of {len(sets)} staircases"
        for text, count in collections.Counter(sets).most_common()
    }


def training_rows(args, options, folder, gpus):
    """Return the rows of `train`."""
    half = "float16" if gpus else "bfloat16"
    lightning = [HERE / "lightning_train.py"]
    precision = "16-mixed" if gpus else "bf16-mixed"
    switches = [*lightning, "--precision", precision, "--benchmark", "--compile"]
    graphs = [*switches, "--compile_mode", "reduce-overhead"]
    short = "fp16" if gpus else "bf16"
    accelerate = [HERE / "accelerate_train.py", "--mixed_precision", short]
    rows = [Row("train.py", "float32", [ROOT / "src" / "train.py"])]
    ended = ends(args.ends)
    for text in ["amp channels_last", *args.best, *ended]:
        names, script, own = joined(text, folder)
        name = " + ".join(filter(None, ["train.py", " ".join(names + own)])) + (
            f", {ended[text]}" if text in ended else ""
        )
        rows += [Row(name, half if "amp" in names else "float32", [script, *own])]
    rows += [
        Row("Lightning", "float32", lightning),
        Row(SWITCHES, half, switches),
        Row(f"{SWITCHES}=reduce-overhead", half, graphs),
        Row(f"accelerate + {short}", half, accelerate),
    ]
    return [*rows, examples_row(args, options, folder, gpus)] if args.examples else rows


def examples_row(args, options, folder, gpus):
    """Return the row of pytorch/examples' imagenet/main.py, with train/ and val/ in links."""
    script, why_not = args.examples.resolve() / "imagenet" / "main.py", ""
    if options["model"] == "conv11":
        why_not = "it trains models of torchvision only"
    elif (options["image_size"], options["augment"]) != (224, "resized"):
        why_not = "it does only what --image_size 224 --augment resized asks for"
    data = folder / "imagenet"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    for link, names in (("train", ("train", "training")), ("val", ("val", "test", "testing"))):
        found = [args.DATASET / name for name in names if (args.DATASET / name).is_dir()]
        (data / link).symlink_to((found or [args.DATASET / link])[0].resolve())
    words = ["--arch", options["model"], "--lr", options["lr"], "--print-freq", 1]
    words += ["--batch-size", options["batch_size"], "--epochs", options["epochs"]]
    words += ["--workers", options["workers"], *["--gpu", 0] * bool(gpus)]
    return Row(EXAMPLE, "float32", [script, *words, data], why_not)


LOADING = [
    Row("loader.py", "", [ROOT / "src" / "loader.py"]),
    Row("loader_DALI.py", "", [ROOT / "src" / "loader_DALI.py"]),
    Row("DALI + resize crop flip", "", [HERE / "dali_plain.py"]),
    Row("DALI + image_random_crop", "", [HERE / "dali_plain.py", "--random_crop"]),
    Row("SPDL", "", [HERE / "spdl_load.py"]),
]


def chosen(rows, patterns, driver):
    """Return the rows with a name of --only; exit 2 if there is none."""
    found = [row for row in rows if any(fnmatch.fnmatchcase(row.name, name) for name in patterns)]
    if not found:
        names = "; ".join(row.name for row in rows)
        runs.refuse(f"{driver}: error: --only: the rows are: {names}")
    return found


# ------------------------------------------------------------------------------ one run
def examples_record(log, batch_size):
    """Return the record of a run of imagenet/main.py, by the seconds that it prints for each step.

    The last step of an epoch is left out, since its batch may be smaller.
    """
    text, seconds = log.read_text(), {}
    for epoch, took in re.findall(r"^Epoch: \[(\d+)\].*?\tTime +([\d.]+)", text, re.MULTILINE):
        seconds.setdefault(epoch, []).append(float(took))
    top1 = re.findall(r"^ \* +Acc@1 ([\d.]+)", text, re.MULTILINE)
    epochs = []
    for steps, percent in zip(seconds.values(), top1):
        steps = steps[:-1] or steps
        epochs.append(
            dict(
                seconds=sum(steps),
                val_top1=float(percent) / 100,
                images_per_second=batch_size * len(steps) / sum(steps),
            )
        )
    speeds = [each["images_per_second"] for each in epochs[1:] or epochs]
    return dict(
        epochs=epochs, images_per_second=statistics.median(speeds), val_top1=epochs[-1]["val_top1"]
    )


def file_name(text):
    """Return `text` as the name of a file."""
    return re.sub("[^A-Za-z0-9.]+", "_", text)


def timed(command, log, limit, **details):
    """Run `command` to its end, its output in the file `log`; return (status, its seconds).

    Raises TimeoutExpired after `limit` seconds. `details` are of subprocess.Popen.
    """
    command, begin = [str(word) for word in command], time.monotonic()
    with open(log, "w") as output:
        print("$", shlex.join(command), file=output, flush=True)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **details,
        )
        try:
            return process.wait(limit), time.monotonic() - begin
        except BaseException:
            runs.stop(process)
            raise


def run(row, options, batch_size, folder, limit):
    """Run a row once. Return (status, its record or {"error"}, with "log" if it failed)."""
    if row.why_not:
        return "skip", {"error": row.why_not}
    place, log = folder / "run", folder / f"{file_name(row.name)}.log"
    shutil.rmtree(place, ignore_errors=True)  # of the run before this one
    place.mkdir()
    is_example = row.name == EXAMPLE
    common = [] if is_example else [*options, "--result_dir", place]
    try:
        code, seconds = timed([sys.executable, "-u", *row.command, *common], log, limit, cwd=place)
    except subprocess.TimeoutExpired:
        return "fail", {"error": f"cut off after {limit:.0f} s (--seconds)", "log": str(log)}
    if code:
        status, _, details = runs.failure(code, log)
        return status, details
    record = (
        examples_record(log, batch_size)
        if is_example
        else runs.read_record(place / f"{row.command[0].stem}.json")
    )
    return "ok", record | {"wall_seconds": seconds}


# ------------------------------------------------------------------------------ the table
def spread(values, form="{:,.0f}"):
    """Return 'median (least to most)'."""
    return f"{form} ({form} to {form})".format(statistics.median(values), min(values), max(values))


def cells(of_it, reference):
    """Return the cells of a row; `of_it` has its runs, `reference` the speeds to compare with."""
    first, trains = of_it[0], of_it[0]["work"] == "train"
    start = [first["name"], *([first["precision"]] if trains else [])]
    if bad := [row for row in of_it if row["status"] != "ok"]:
        return [*start, report.problem(records.Row.read(bad[0]))]
    speeds = [row["images_per_second"] for row in of_it]
    ratio = statistics.median(speeds) / statistics.median(reference) if reference else 0
    top1 = [spread([100 * row["val_top1"] for row in of_it], "{:.2f}%")] if trains else []
    wall = statistics.median(row["wall_seconds"] for row in of_it)
    return [
        *start,
        spread(speeds),
        f"{ratio:.2f}x" if ratio else "",
        *top1,
        f"{wall:.1f} s",
        str(len(of_it)),
    ]


def reference_of(rows):
    """Return (the name of the row that ratios are to, what a table calls it)."""
    name = REFERENCES[rows[0]["work"]]
    is_there = any(row["name"] == name for row in rows)
    return (name, name) if is_there else (rows[0]["name"], "the first row")


def markdown(rows):
    """Return the tables of a record."""
    first, about, names = rows[0], records.Row.read(rows[0]), {}
    for row in rows:
        names.setdefault(row["name"], []).append(row)
    reference, called = reference_of(rows)
    speeds = [row["images_per_second"] for row in names[reference] if row["status"] == "ok"]
    head = ["images/s: median (least to most)", f"to {called}", "whole run", "runs"]
    if first["work"] == "train":
        heads = ["training", "precision", *head[:2], "top-1", *head[2:]]
    else:
        heads = ["loading", *head]
    parts = [
        report.table(
            f"| {' | '.join(heads)} |", [cells(of_it, speeds) for of_it in names.values()]
        ),
        f"{report.recipe(about)}. Images/s of a run is the median of its epochs after the "
        "first, timed from edge to edge with the GPU synchronised. The rows took turns. The "
        "whole run is a process from its start to its end: imports, compiling and validation "
        "included.",
        " ".join(note for name, note in NOTES[first["work"]] if fnmatch.filter(names, name)),
    ]
    if first["machine"]["gpus"] and first["work"] == "train":
        parts.append(
            "TF32 in all rows, as PyTorch sets it: convolutions {}, matrix products {}.".format(
                *first["tf32"]
            )
        )
    return report.text_of([*parts, report.setting(about)], [row.get("stopped") for row in rows])


def best(rows):
    """Return this project's fastest row and its ratio to the reference, in words."""
    (reference, called), speeds = reference_of(rows), {}
    for row in rows:
        if row["status"] == "ok":
            speeds.setdefault(row["name"], []).append(row["images_per_second"])
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    ours = [name for name in medians if name.startswith(("train.py", "loader"))]
    if not ours or reference not in medians:
        return f"no ratio to {called}"
    name = max(ours, key=medians.get)
    return f"{name}: {medians[name] / medians[reference]:.2f}x {called}"


def shows(rows):
    """Return (machine, workload, what it shows, date), as tools/report.py asks for."""
    first = records.Row.read(rows[0])
    return report.place(first), report.workload(first), best(rows), first.date


write = functools.partial(report.save, markdown)


# ------------------------------------------------------------------------------ the driver
def conclude(rows, write, stem, interrupted):
    """Write and print what rows there are, and end the driver."""
    if rows and interrupted:
        rows[-1]["stopped"] = interrupted
    has_failed = any(row["status"] == "fail" for row in rows)
    runs.end(functools.partial(write, rows) if rows else None, stem, interrupted, has_failed)


def parser_of(name, description):
    """Return a parser for a benchmark's own options, which has --result_dir."""
    parser = argparse.ArgumentParser(
        name,
        allow_abbrev=False,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    told = "folder of the record (default: runs)"
    parser.add_argument("--result_dir", type=Path, default=Path("runs"), help=told)
    return parser


def parse(arguments):
    """Return (options of this script, those behind the --)."""
    own, others = split(arguments)
    parser = parser_of("peers.py", __doc__)
    add = parser.add_argument
    add("WORK", choices=["train", "load"])
    add("DATASET", type=Path)
    add("--best", action="append", default=[], metavar="SET", help="a row of these techniques")
    add("--ends", type=Path, nargs="+", default=[], metavar="RECORD", help="rows of these sets")
    add("--examples", type=Path, help="folder that holds imagenet/main.py of pytorch/examples")
    add("--only", nargs="+", default=["*"], metavar="NAME", help="rows of these names; * is any")
    add("--runs", type=int, default=3, help="runs of each row (default: 3)")
    add("--seconds", type=float, default=300, help="most seconds of one run (default: 300)")
    add("--minutes", type=float, default=float("inf"), help="no run starts after these")
    add("--add", action="store_true", help="add to the record that is there")
    return parser.parse_args(own), others


def earlier(path, common, keys, driver):
    """Return the record that --add goes on with; exit 1 if it has another machine, options, ..."""
    record = json.loads(path.read_text())
    if other := [key for key in keys if record[0][key] != common[key]]:
        sys.exit(f"{driver}: error: --add: {path} has another {' and '.join(other)}")
    record[-1].pop("stopped", None)
    return record


def main():
    started = time.monotonic()
    args, options = parse(sys.argv[1:])
    options += ["--dataset", str(args.DATASET.absolute())]  # a link keeps its name in the table
    baseline = ROOT / "src" / {"train": "train.py", "load": "loader.py"}[args.WORK]
    parser = runpy.run_path(str(baseline))["build_parser"]()
    parser.prog = "peers.py"
    values = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(parser.parse_args(options)).items()
        if key != "result_dir"
    }
    if args.WORK == "load" and any(
        values[key] != parser.get_default(key) for key in ("samples", "split", "pair", "cold")
    ):
        parser.error("the other libraries have no --samples, --split, --pair and --cold")
    folder = args.result_dir.resolve() / "peers"
    _lock = runs.folder_of_its_own(folder, "peers.py")  # held until the process ends
    stem = args.result_dir / "peers"

    import torch

    common = dict(
        runs.setting("python benchmarks/peers.py", *PACKAGES),
        work=args.WORK,
        options=values,
        tf32=[
            "on" if on else "off"
            for on in (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
        ],
    )
    rows = (
        LOADING
        if args.WORK == "load"
        else training_rows(args, values, folder, common["machine"]["gpus"])
    )
    rows = chosen(rows, args.only, "peers.py")
    done, bad, interrupted = [], set(), ""
    if args.add and (path := stem.with_suffix(".json")).exists():
        rerun = {row.name for row in rows}  # of these, what did not end well before does not count
        done = [
            each
            for each in earlier(path, common, ("machine", "work", "options"), "peers.py")
            if each["status"] == "ok" or each["name"] not in rerun
        ]
    try:
        for turn, row in [(turn, row) for turn in range(1, args.runs + 1) for row in rows]:
            if row.name in bad:
                continue
            if done and time.monotonic() - started > 60 * args.minutes:
                done[-1]["stopped"] = f"Ended in turn {turn} of {args.runs} (--minutes)."
                break
            runs.say(f"[{turn}/{args.runs}] {row.name}")
            status, details = run(row, options, values["batch_size"], folder, args.seconds)
            about = dict(name=row.name, precision=row.precision, status=status)
            done.append(details | common | about)
            if status == "ok":
                runs.say(f"        {details['images_per_second']:,.0f} images/s")
            else:
                bad.add(row.name)
                runs.say(f"        {report.problem(records.Row.read(done[-1]))}")
            write(done, stem)
    except runs.Stopped as reason:
        interrupted = f"Stopped by {reason} in turn {turn} of {args.runs}."
    shutil.rmtree(folder / "run", ignore_errors=True)
    conclude(done, write, stem, interrupted)


if __name__ == "__main__":
    runs.guarded(main, "peers.py")
