"""Measure what it costs to reach an accuracy: whole trainings, plain and with techniques.

    python benchmarks/accuracy.py DATASET [--set "cache amp"] ... [--seeds 0 1 2] [-- OPTION ...]

The rows are train.py and each --set: what stands behind compose.sh, with options of its own. Each
trains once with every seed, by turns. OPTIONs of train.py go to all rows. A run is a process, timed
from its start to its end. It starts without compiled code, except in the rows of --kept.
Writes RESULT_DIR/accuracy.json and .md.
"""

import collections
import functools
import itertools
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import peers
import records
import report
import runs
from options import split

TRAIN = peers.ROOT / "src" / "train.py"
TOLERANCE = 0.005  # without the goal, a set whose top-1 is lower by more is not called the best
HEAD = (
    "| training | runs | top-1: median (least to most) | warm-up s | training s | to {1} | "
    "s until {0} | to {1} | whole run s | to {1} | images/s | peak GB |"
)
NOTES = [
    "- warm-up s: from the end of the imports to that of the first epoch: decoding images for "
    "the cache, compiling",
    "- training s: all epochs after the first, without validation",
    "- s until {0}: the warm-up and the training until an epoch ends with this top-1",
    "- whole run s: a process from its start to its end: imports, warm-up, training, "
    "validation, checkpoints",
    "- images/s: the median of a run's epochs after the first; of several runs, their median",
    "- kept: finds code that an earlier run has compiled, if the set compiles; other rows compile "
    "in each run",
]
DECODED = (
    "- kept rows with cache also find the images that an earlier run has decoded (--cache_dir)"
)

# scaling.py's rows have the variables of their runs, and more keys in the record: `gpus` is one
Row = collections.namedtuple(
    "Row", "name techniques command code compiled variables more", defaults=[{}, {}]
)


# ------------------------------------------------------------------------------ one run
def row_of(text, compiled, options, folder):
    """Return the Row of a set; its own options come last, so that they win over `options`."""
    techniques, script, own = peers.joined(text, folder)
    runs.check_options(script, [*options, *own], "accuracy.py")
    more = {}
    if compiled == "kept" and "cache" in techniques:
        own, more = [*own, "--cache_dir", folder / "decoded"], {"decoded": "kept"}
    return Row(
        text.strip() + ", kept" * (compiled == "kept"),
        techniques,
        [script, *options, *own],
        folder / "compiled" / peers.file_name(text),
        compiled,
        more=more,
    )


def seconds_to(goal, warmup_seconds, epochs):
    """Return the seconds of warm-up and training until an epoch ends with this top-1, or None."""
    ends = itertools.accumulate((epoch["seconds"] for epoch in epochs[1:]), initial=warmup_seconds)
    return next((end for end, epoch in zip(ends, epochs) if epoch["val_top1"] >= goal), None)


def train(row, seed, goal, processes, folder, end):
    """Train a row once; return its run, or {"error", "log"} if it failed.

    Raises TimeoutExpired if it does not end before `end`.
    """
    place, log, status = folder / "run", folder / f"{peers.file_name(row.name)}_{seed}.log", None
    for path in [place] if row.compiled == "kept" else [place, row.code]:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    words, variables = runs.launched(row.command[0], row.more.get("gpus", processes))
    variables |= dict(
        TORCHINDUCTOR_CACHE_DIR=str(row.code),
        TRITON_CACHE_DIR=str(row.code / "triton"),
        **row.variables,
    )
    command = [*words, *row.command[1:], "--seed", seed, "--result_dir", place]
    limit, lines = end - time.monotonic(), []
    log.unlink(missing_ok=True)

    def watch(line, seconds):
        if line and line.startswith("epoch "):
            lines.append(seconds)
        if seconds > limit:
            raise subprocess.TimeoutExpired(row.name, limit)

    try:
        status, wall = runs.follow([*map(str, command)], log, watch, variables)
    finally:
        if status != 0 and row.compiled == "new":  # some of the compiled code may be missing
            shutil.rmtree(row.code, ignore_errors=True)
    if status:
        return {"error": runs.failure(status, log)[2]["error"], "log": str(log)}
    record = runs.read_record(place / f"{row.command[0].stem}.json")
    epochs = [
        {key: epoch[key] for key in ("loss", "val_top1", "seconds")} for epoch in record["epochs"]
    ]
    keys = "warmup_seconds", "val_top1", "images_per_second", "peak_memory_bytes"
    return dict(
        seed=seed,
        wall_seconds=wall,
        **{key: record[key] for key in keys},
        training_seconds=sum(epoch["seconds"] for epoch in epochs[1:]),
        seconds_to_goal=seconds_to(goal, record["warmup_seconds"], epochs),
        parts=records.Parts.written(record, lines, wall),
        epochs=epochs,
    )


# ------------------------------------------------------------------------------ the table
def median(row, key):
    """Return the median of the runs of a row; None if the row failed or a run has none."""
    values = [run[key] for run in row["runs"]] if row["status"] == "ok" else [None]
    return None if None in values else statistics.median(values)


def ratio(row, base, key):
    """Return '5.10x': how many times less a row takes than `base`; '' if one has no median."""
    one, other = median(row, key), median(base, key)
    return f"{other / one:.2f}x" if one and other else ""


def base_of(record):
    """Return the row that all ratios are to: the plain training, or the first without one."""
    return next((row for row in record if row["name"] == "plain"), record[0])


def cells(row, base):
    """Return the cells of a row."""
    count = len(row["runs"])
    if row["status"] != "ok":
        return [row["name"], str(count), report.problem(records.Row.read(row))]
    found = {
        key: [run[key] for run in row["runs"] if run[key] is not None]
        for key in row["runs"][0]
        if key not in ("epochs", "parts")
    }
    reached, memory = found["seconds_to_goal"], found["peak_memory_bytes"]
    some = f", {len(reached)} of {count} runs" if len(reached) < count else ""
    return [
        row["name"],
        str(count),
        peers.spread([100 * top1 for top1 in found["val_top1"]], "{:.2f}%"),
        f"{median(row, 'warmup_seconds'):.1f}",
        peers.spread(found["training_seconds"], "{:.1f}"),
        ratio(row, base, "training_seconds"),
        peers.spread(reached, "{:.1f}") + some if reached else "never",
        ratio(row, base, "seconds_to_goal"),
        peers.spread(found["wall_seconds"], "{:.1f}"),
        ratio(row, base, "wall_seconds"),
        f"{median(row, 'images_per_second'):,.0f}",
        f"{max(memory) / 1e9:.1f}" if any(memory) else "",
    ]


def parts_of(record):
    """Return {a row's name: {part: seconds}}: the medians of its runs."""
    found = {
        row["name"]: [run["parts"] for run in row["runs"] if run.get("parts")] for row in record
    }
    return {
        name: {part: statistics.median(run[part] for run in each) for part in each[0]}
        for name, each in found.items()
        if each
    }


def markdown(record):
    """Return the page of a record."""
    first, goal, base = record[0], f"{100 * record[0]['goal']:g}%", base_of(record)
    name = "plain" if base["name"] == "plain" else "the first row"
    about = records.Row.read(first)
    has_kept = any(row["compiled"] == "kept" for row in record)
    commands = dict.fromkeys(row["command"] for row in record)
    return report.text_of(
        [
            report.table(HEAD.format(goal, name), [cells(row, base) for row in record]),
            f"{report.recipe(about)}, --augment {first['options']['augment']}, --lr "
            f"{first['options']['lr']:g}. Each run of a row has another seed; the rows took turns.",
            [note.format(goal) for note in (NOTES if has_kept else NOTES[:-1])]
            + [DECODED] * any(row.get("decoded") == "kept" for row in record),
            report.parts_table(parts_of(record)),
            report.setting(about),
            [f"- Also: `{each}`" for each in commands if each != first["command"]],
        ],
        [row.get("stopped") for row in record],
    )


def shows(record):
    """Return (machine, workload, what the record shows, date), each in a few words."""
    base, what = base_of(record), "the first training did not end well"
    if base["status"] == "ok":
        alike = base["compiled"], "ok"
        good = [row for row in record if (row["compiled"], row["status"]) == alike]
        key, goal = "seconds_to_goal", f"until {100 * record[0]['goal']:g}%"
        if not median(base, key):
            key, goal = "wall_seconds", "over the whole run"
            good = [
                row
                for row in good
                if median(row, "val_top1") >= median(base, "val_top1") - TOLERANCE
            ]
        best = min((row for row in good if median(row, key)), key=lambda row: median(row, key))
        what = (
            f"{best['name']}: {ratio(best, base, key)} {goal}, "
            f"{ratio(best, base, 'training_seconds')} in training, top-1 "
            f"{median(best, 'val_top1'):.2%} against {median(base, 'val_top1'):.2%}"
        )
    about = records.Row.read(record[0])
    return report.place(about), report.recipe(about), what, about.date


write = functools.partial(report.save, markdown)


# ------------------------------------------------------------------------------ the driver
def parse(arguments):
    """Return (options of this script, those behind the --)."""
    own, others = split(arguments)
    parser = peers.parser_of("accuracy.py", __doc__)
    add = parser.add_argument
    add("DATASET", type=Path)
    add("--set", action="append", default=[], help="a row of these techniques")
    add("--kept", action="append", default=[], metavar="SET", help="the same, with compiled code")
    add(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help="every row runs with each (default: 0 1 2)",
    )
    add(
        "--goal",
        type=float,
        default=0.93,
        help="the table has the seconds until this top-1 (default: 0.93)",
    )
    add("--only", nargs="+", default=["*"], metavar="NAME", help="rows of these names; * is any")
    add("--minutes", type=float, default=float("inf"), help="what does not fit is left out")
    add("--add", action="store_true", help="go on with the record that is there")
    return parser.parse_args(own), others


def measure(entry, row, seed, processes, folder, end):
    """Train a row once more, add the run to `entry` of the record, and return what to say.

    Raises TimeoutExpired if it does not end before `end`, or if it took longer before.
    """
    left = end - time.monotonic()
    if left <= max((run["wall_seconds"] for run in entry["runs"]), default=0):
        raise subprocess.TimeoutExpired(row.name, left)
    turns, is_new = [row], not row.code.exists()
    if row.compiled == "kept" and (is_new or row.more and not (folder / "decoded").exists()):
        first = row._replace(command=[*row.command, "--epochs", 1])  # it does not count
        turns = [first._replace(compiled="new") if is_new else first, row]
    for turn in turns:
        run = train(turn, seed, entry.get("goal", float("inf")), processes, folder, end)
        if "error" in run:
            entry |= {**run, "status": "fail"}
            return report.problem(records.Row.read(entry))
    for key in ("error", "log"):  # of an earlier try
        entry.pop(key, None)
    entry |= {"status": "ok", "runs": [*entry["runs"], run]}
    return (
        f"{run['images_per_second']:,.0f} images/s, top-1 {run['val_top1']:.2%}, "
        f"{run['training_seconds']:.1f} s of training, {run['wall_seconds']:.1f} s in all"
    )


def measure_all(record, jobs, common, stem, end, write):
    """Add the runs of `jobs`, which are (seed, Row), to the record and write it after each."""
    left_out, failed = [], set()
    folder, processes = stem.resolve(), common["machine"]["gpus"] or 2
    for seed, row in jobs:
        entry = next((each for each in record if each["name"] == row.name), None) or dict(
            common,
            name=row.name,
            techniques=row.techniques,
            compiled=row.compiled,
            **row.more,
            runs=[],
        )
        if row.name in failed or seed in [run["seed"] for run in entry["runs"]]:
            continue
        runs.say(f"seed {seed}: {row.name}")
        try:
            runs.say(f"        {measure(entry, row, seed, processes, folder, end)}")
        except subprocess.TimeoutExpired:
            runs.say("        left out: it does not fit in --minutes")
            left_out.append(f"{row.name} (seed {seed})")
            continue
        if entry not in record:
            record.append(entry)
        if entry["status"] != "ok":
            failed.add(row.name)
        write(record, stem)
    if left_out and record:
        record[-1]["stopped"] = f"Left out, did not fit in --minutes: {'; '.join(left_out)}."


def carry_out(jobs, common, add, stem, end, write):
    """Run the jobs, go on with the record that is there if `add` says so, and end the driver."""
    path, stopped, record = stem.with_suffix(".json"), "", []
    if add and path.exists():
        keys = [key for key in ("machine", "options", "goal") if key in common]
        record = peers.earlier(path, common, keys, f"{stem.name}.py")
    try:
        measure_all(record, jobs, common, stem, end, write)
    except runs.Stopped as reason:
        stopped = f"Stopped by {reason}."
    shutil.rmtree(stem.resolve() / "run", ignore_errors=True)
    peers.conclude(record, write, stem, stopped)


def main():
    started = time.monotonic()
    args, options = parse(sys.argv[1:])
    options += ["--dataset", str(args.DATASET.absolute())]  # a link keeps its name in the table
    values = vars(runpy.run_path(str(TRAIN))["build_parser"]().parse_args(options))
    values["dataset"] = str(values["dataset"])
    stem = args.result_dir / "accuracy"
    folder = stem.resolve()
    _lock = runs.folder_of_its_own(folder, "accuracy.py")  # held until the process ends
    rows = [
        Row("plain", [], [TRAIN, *options], folder / "compiled" / "plain", "new"),
        *(row_of(text, "new", options, folder) for text in args.set),
        *(row_of(text, "kept", options, folder) for text in args.kept),
    ]
    rows = peers.chosen(rows, args.only, "accuracy.py")
    jobs = [(seed, row) for seed in args.seeds for row in rows]
    for key in ("result_dir", "seed", "resume"):  # these are this script's own
        del values[key]
    common = dict(runs.setting("python benchmarks/accuracy.py"), options=values, goal=args.goal)
    carry_out(jobs, common, args.add, stem, started + 60 * args.minutes, write)


if __name__ == "__main__":
    runs.guarded(main, "accuracy.py")
