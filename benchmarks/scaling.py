"""Measure sets of techniques on 1, 2 and 4 GPUs: images/s, and how well they scale.

    python benchmarks/scaling.py DATASET --set "cache amp" ... [--gpus 1 2 4] [-- OPTION ...]

A row is a set on so many GPUs: one GPU trains what `compose.sh SET` prints, more train it with DDP.
OPTIONs of train.py go to all rows, those in a SET to its rows. --batch_size and --workers are of ONE
GPU: k GPUs get k times as many, and train as many steps (weak scaling). Without --workers each GPU
gets an equal share of the cores, by the largest number of --gpus. Every row runs --runs times, by
turns; each turn has another seed. Without GPUs each is a process on the CPU.
Writes RESULT_DIR/scaling.json and .md.
"""

import functools
import os
import statistics
import sys
import time
from pathlib import Path

import accuracy
import peers
import records
import report
import runs
from options import split

GPUS = 1, 2, 4
HEAD = (
    "| set | GPUs | runs | images/s: median (least to most) | to one GPU | "
    "efficiency: median (least to most) | top-1: median (least to most) | peak GB, first GPU |"
)


# ------------------------------------------------------------------------------ the rows
def variables_of(gpus, most, machine):
    """Return the variables of a run: the first of the GPUs, and threads for each process."""
    found = {"OMP_NUM_THREADS": str(max(1, machine["cores"] // most))}
    if machine["gpus"]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        found["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:gpus])
    return found


def steps_of(values, images, most):
    """Return the steps of an epoch: as many as there are for the most GPUs, or --steps."""
    return min(values.steps or images, max(1, images // (most * values.batch_size)))


def row_of(text, gpus, most, options, parser, images, machine, folder):
    """Return the Row of a set on so many GPUs; `most` is the largest number of --gpus."""
    techniques, script, own = peers.joined("DDP " * (gpus > 1) + text, folder)
    if gpus == 1 and {"DP", "DDP"} & {*techniques}:
        runs.refuse(f"scaling.py: error: --set {text}: rows of several GPUs get DDP anyway")
    words = [*options, *own]
    runs.check_options(script, words, "scaling.py")
    one, _ = parser.parse_known_args(words)  # the rest are options of techniques
    scaled = dict(
        batch_size=gpus * one.batch_size,
        workers=gpus * one.workers,
        steps=steps_of(one, images, most),
    )
    code = folder / "compiled" / peers.file_name(text)
    code.mkdir(parents=True, exist_ok=True)  # the first run compiles, and later ones find it here
    return accuracy.Row(
        f"{text}, GPUs: {gpus}",
        techniques,
        [script, *words, *(word for key in scaled for word in (f"--{key}", scaled[key]))],
        code,
        "kept",
        variables_of(gpus, most, machine),
        dict(set=text, gpus=gpus),
    )


def turns(rows, count):
    """Return [(seed, row), ...]: every row once in each turn, every second turn from the last."""
    return [(turn, row) for turn in range(count) for row in rows[:: -1 if turn % 2 else 1]]


# ------------------------------------------------------------------------------ the table
def ratios(row, record):
    """Return the images/s of the runs of a row divided by those of one GPU in the same turn."""
    alone = {
        run["seed"]: run["images_per_second"]
        for each in record
        if (each["set"], each["gpus"], each["status"]) == (row["set"], 1, "ok")
        for run in each["runs"]
    }
    return [
        run["images_per_second"] / alone[run["seed"]] for run in row["runs"] if run["seed"] in alone
    ]


def cells(row, record):
    """Return the cells of a row."""
    count, found = len(row["runs"]), ratios(row, record)
    start = [row["set"], str(row["gpus"]), str(count)]
    if row["status"] != "ok":
        return [*start, report.problem(records.Row.read(row))]
    speeds, top1, memory = (
        [run[key] for run in row["runs"]]
        for key in ("images_per_second", "val_top1", "peak_memory_bytes")
    )
    some = f", {len(found)} of {count} runs" if len(found) < count else ""
    percent = [100 * ratio / row["gpus"] for ratio in found]
    return [
        *start,
        peers.spread(speeds),
        f"{statistics.median(found):.2f}x" if found else "",
        peers.spread(percent, "{:.0f}%") + some if found and row["gpus"] > 1 else "",
        peers.spread([100 * each for each in top1], "{:.2f}%"),
        f"{max(memory) / 1e9:.1f}" if any(memory) else "",
    ]


def markdown(record):
    """Return the page of a record."""
    first, about = record[0], records.Row.read(record[0])
    options, sets = first["options"], list(dict.fromkeys(row["set"] for row in record))
    ordered = sorted(record, key=lambda row: (sets.index(row["set"]), row["gpus"]))
    commands = dict.fromkeys(row["command"] for row in record)
    parts = [
        report.table(HEAD, [cells(row, record) for row in ordered]),
        f"{report.recipe(about)}, --augment {options['augment']}, --lr {options['lr']:g}, "
        f"--workers {options['workers']}. Batch and workers are of one GPU: k GPUs get k times as "
        "many, with the same steps and learning rate (weak scaling). One GPU trains without DDP, "
        "more train with it.",
        "Images/s of a run is the median of its epochs after the first. Each is divided by that of "
        "one GPU in the same turn: `to one GPU` is the median of these ratios, and efficiency is "
        "the ratio divided by the GPUs. The rows took turns, every second turn in reverse order, "
        "and each turn had another seed.",
    ]
    if not first["machine"]["gpus"]:
        parts.append(
            "There is no GPU here: a GPU in this table is a process on the CPU (gloo), and the "
            "processes share the cores. This shows that the command works, not what GPUs gain."
        )
    also = [f"- Also: `{each}`" for each in commands if each != first["command"]]
    stopped = [row.get("stopped") for row in record]
    return report.text_of([*parts, report.setting(about), also], stopped)


def shows(record):
    """Return (machine, workload, what the record shows, date), each in a few words."""
    about, told = records.Row.read(record[0]), "no set ended well on several GPUs and on one"
    good = [
        row for row in record if row["gpus"] > 1 and row["status"] == "ok" and ratios(row, record)
    ]
    if good:
        speed = functools.partial(accuracy.median, key="images_per_second")
        best = max(good, key=lambda row: (row["gpus"], speed(row)))
        ratio, unit = statistics.median(ratios(best, record)), "GPUs"
        if not best["machine"]["gpus"]:
            unit = "processes"
        told = (
            f"{best['set']}: {speed(best):,.0f} images/s on {best['gpus']} {unit}, {ratio:.2f}x "
            f"one, efficiency {ratio / best['gpus']:.0%}"
        )
    return report.place(about), f"{report.recipe(about)}, weak scaling", told, about.date


write = functools.partial(report.save, markdown)


# ------------------------------------------------------------------------------ the driver
def parse(arguments):
    """Return (options of this script, those behind the --)."""
    own, others = split(arguments)
    parser = peers.parser_of("scaling.py", __doc__)
    add = parser.add_argument
    add("DATASET", type=Path)
    add("--set", action="append", required=True, help="techniques, and options of their own")
    add("--gpus", type=int, nargs="+", help="how many; without it those of 1, 2 and 4 there are")
    add("--runs", type=int, default=3, help="runs of each row (default: 3)")
    add("--minutes", type=float, default=float("inf"), help="what does not fit is left out")
    add("--add", action="store_true", help="go on with the record that is there")
    return parser.parse_args(own), others


def counts(wanted, machine):
    """Return the numbers of GPUs, or of processes if there is no GPU; exit 2 if they are wrong."""
    there = machine["gpus"] or machine["cores"]
    found = sorted({*(wanted or [count for count in GPUS if count <= there])})
    most = machine["gpus"] or max(there, *found)
    if wrong := [count for count in found if not 0 < count <= most]:
        runs.refuse(f"scaling.py: error: --gpus: from 1 to {most}, not {wrong[0]}")
    return found


def main():
    started = time.monotonic()
    args, options = parse(sys.argv[1:])
    options += ["--dataset", str(args.DATASET.absolute())]  # a link keeps its name in the table
    common = runs.setting("python benchmarks/scaling.py")
    machine = common["machine"]
    gpus = counts(args.gpus, machine)
    most = gpus[-1]
    train = runs.module_of(accuracy.TRAIN)
    parser = train.build_parser()
    parser.set_defaults(workers=max(1, machine["cores"] // most))
    one = parser.parse_args(options)
    images = len(train.open_folder(one.dataset, "train training", None))
    values = vars(one) | dict(steps=steps_of(one, images, most), dataset=str(one.dataset))
    for key in ("result_dir", "seed", "resume"):  # these are this script's own
        del values[key]
    common["options"] = values
    stem = args.result_dir / "scaling"
    _lock = runs.folder_of_its_own(stem.resolve(), "scaling.py")  # held until the process ends
    rows = [
        row_of(text, count, most, options, parser, images, machine, stem.resolve())
        for text in args.set
        for count in gpus
    ]
    end = started + 60 * args.minutes
    accuracy.carry_out(turns(rows, args.runs), common, args.add, stem, end, write)


if __name__ == "__main__":
    runs.guarded(main, "scaling.py")
