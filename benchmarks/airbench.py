"""Time the published script of airbench, the record for 94 % on CIFAR-10, on the same pictures.

    python benchmarks/airbench.py SCRIPT DATASET [--trainings 4] [--result_dir DIR]

SCRIPT is one of a clone of github.com/KellerJordan/cifar10-airbench, which runs as it is, on a GPU.
DATASET has CIFAR-10's pictures in train/<class>/* and test/<class>/* or val/<class>/*: they are
written in the two files that SCRIPT reads. It trains again and again: after --trainings it is
stopped. Its own columns tell the seconds of a training and the top-1, by test-time augmentation.
Whole run: from the command to the end of the first training, with imports, reading and compiling.
Writes DIR/airbench.json and .md.
"""

import functools
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torchvision.transforms import v2 as transforms

import peers
import records
import report
import runs

HEAD = (
    "| script | trainings | top-1: median (least to most) | without augmented tests | training s | "
    "whole run s, first training |"
)


def write_pictures(dataset, folder):
    """Write train.pt and test.pt as airbench reads them: uint8 images (N, 32, 32, 3), labels (N,).

    Raises OSError if `dataset` has no pictures, or others than 32 x 32.
    """
    train = runs.module_of(peers.ROOT / "src" / "train.py")
    folder.mkdir()
    for names, name in (("train training", "train"), ("val valid validation test testing", "test")):
        found = train.open_folder(dataset, names, transforms.PILToTensor())
        images = [image.permute(1, 2, 0) for image, _ in found]
        sizes = {tuple(image.shape) for image in images}
        if sizes != {(32, 32, 3)}:
            raise OSError(f"{found.root}: pictures have to be 32 x 32, not {sorted(sizes)[:3]}")
        content = dict(
            images=torch.stack(images), labels=torch.tensor(found.targets), classes=found.classes
        )
        torch.save(content, folder / f"{name}.pt")


# ------------------------------------------------------------------------------ the run
def cells_of(line):
    """Return the cells of a line of the script's table, or []."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if "|" in line else []


def training_of(line, columns):
    """Return {top1, plain_top1, seconds} of a line that ends a training, or None.

    `columns` are the cells of the table's first line. The last one has the seconds.
    """
    found = dict(zip(columns, cells_of(line)))
    if found.get("epoch") != "eval":
        return None
    return dict(
        top1=float(found["tta_val_acc"]),
        plain_top1=float(found["val_acc"]),
        seconds=float(found[columns[-1]]),
    )


class Enough(Exception):
    """Enough was measured, or time is up."""


def measure(script, count, folder, log, limit):
    """Run `script` in `folder` until it has trained `count` times; return its trainings.

    Each has `wall_seconds`, since the script's start. A training for warming up is not one of them:
    its first line has "warmup" in place of a number. Raises RuntimeError with the script's error.
    """
    found, columns, is_warmup = [], [], [False]

    def watch(line, seconds):
        cells = cells_of(line or "")
        if cells[:2] == ["run", "epoch"]:
            columns[:] = cells
        elif cells and cells[0]:
            is_warmup[0] = cells[0] == "warmup"
        if (one := training_of(line or "", columns)) and not is_warmup[0]:
            found.append(one | dict(wall_seconds=seconds))
            runs.say(f"{one['seconds']:.2f} s of training, top-1 {one['top1']:.2%}")
        if len(found) == count or seconds > limit:
            raise Enough

    log.unlink(missing_ok=True)
    command = ["env", "-C", str(folder), sys.executable, "-u", str(script)]
    try:
        code, _ = runs.follow(command, log, watch)
    except Enough:
        code = 0
    if code or not found:
        error = runs.failure(code, log)[2]["error"] if code else f"no training in {limit:.0f} s"
        raise RuntimeError(error)
    return found


# ------------------------------------------------------------------------------ the table
def markdown(record):
    """Return the page of a record."""
    (row,) = record
    if row["status"] != "ok":
        line = [row["name"], "0", report.problem(records.Row.read(row))]
    else:
        both = [
            peers.spread([100 * run[key] for run in row["runs"]], "{:.2f}%")
            for key in ("top1", "plain_top1")
        ]
        line = [
            row["name"],
            str(len(row["runs"])),
            *both,
            peers.spread([run["seconds"] for run in row["runs"]], "{:.2f}"),
            f"{row['runs'][0]['wall_seconds']:.1f}",
        ]
    parts = [
        report.table(HEAD, [line]),
        "The script is unmodified, and made for this data set alone: its network, its augmentation "
        "and its optimizer's settings were tuned for it. It reads all pictures decoded from one "
        "file, and averages the scores of each test picture's mirrored and moved copies. Training "
        "s is what it prints itself: all epochs and the test, without reading and compiling.",
        report.setting(records.Row.read(row)),
    ]
    return report.text_of(parts)


def shows(record):
    """Return (machine, workload, what the record shows, date), each in a few words."""
    (row,), about = record, records.Row.read(record[0])
    told = "it failed"
    if row["status"] == "ok":
        seconds, top1 = (
            statistics.median(run[key] for run in row["runs"]) for key in ("seconds", "top1")
        )
        told = f"{row['name']}: {top1:.2%} in {seconds:.2f} s of training"
    return report.place(about), "airbench's own script, CIFAR-10", told, about.date


write = functools.partial(report.save, markdown)


# ------------------------------------------------------------------------------ the driver
def parse(arguments):
    """Return the options of this script."""
    parser = peers.parser_of("airbench.py", __doc__)
    add = parser.add_argument
    add("SCRIPT", type=Path)
    add("DATASET", type=Path)
    add("--trainings", type=int, default=4, help="stop after so many (default: 4)")
    add("--minutes", type=float, default=10, help="stop then in any case (default: 10)")
    return parser.parse_args(arguments)


def main():
    args = parse(sys.argv[1:])
    stem = args.result_dir.resolve() / "airbench"
    _lock = runs.folder_of_its_own(stem, "airbench.py")  # held until the process ends
    row = dict(
        runs.setting("python benchmarks/airbench.py"),
        name=args.SCRIPT.name,
        techniques=[],
        options={},
        status="ok",
        runs=[],
    )
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(args.DATASET, Path(folder) / "cifar10")
        log, limit = stem / f"{args.SCRIPT.stem}.log", 60 * args.minutes
        try:
            row["runs"] = measure(args.SCRIPT.resolve(), args.trainings, folder, log, limit)
        except RuntimeError as error:
            row |= dict(status="fail", error=str(error), log=str(log))
    write([row], args.result_dir / "airbench")
    print(markdown([row]))
    sys.exit(row["status"] != "ok")


if __name__ == "__main__":
    runs.guarded(main, "airbench.py")
