"""Time some steps of a script before its runs, to say how long these are.

Where time is short, that is the steps of an epoch, the images of its validation, or more epochs.
"""

import math
import os
import re
import shutil
from pathlib import Path

from runs import cores, refuse

SECONDS = 5  # the least training to compare in a run: with less, all runs get more epochs, ...
LONGEST = 30  # ... unless a run would then take longer than this after its start
SHARE = 60  # with a limit of time, the baseline takes at most this part of it after its start
QUICK_SHARE = 20  # ... or this part, if few sets run
LEAST_STEPS = 5  # an epoch is not made shorter than this
STEPS = (LEAST_STEPS, 8 * LEAST_STEPS)  # so many are timed, the second number ...
ENOUGH = 0.5  # ... only if the first takes less than these seconds
VALIDATED = 250  # images of the validation for each core, while that is timed
VALIDATION = 4  # a validation that is cut takes at most this part of its epoch
FOLDERS = "val", "valid", "validation", "test", "testing"  # where train.py looks for it


def fewer(dataset, folder, most):
    """Return (a dataset with about `most` of the validation images of `dataset`, how many, of all).

    It is made in `folder`, of links to the training images as they are and to validation images of
    each class. It is `dataset` itself if that has no more, or (dataset, 0, 0) if this cannot be
    made, as where the folders are not what a script takes: it will tell.
    """
    from torchvision.datasets import ImageFolder  # takes seconds

    try:
        if folder.exists():  # of an earlier call
            shutil.rmtree(folder)
        train = [name for name in ("train", "training") if (dataset / name).is_dir()]
        names = [name for name in FOLDERS if (dataset / name).is_dir()]
        whole = ImageFolder(dataset / names[0])
        trained = {each.name for each in os.scandir(dataset / train[0]) if each.is_dir()}
        if trained != {*whole.classes} or any(name[0] == "." for name in trained):
            return dataset, 0, 0
        if len(whole) <= most:
            return dataset, len(whole), len(whole)
        made = folder / dataset.resolve().name
        return made, linked(whole, dataset, made, train[0], names[0], most), len(whole)
    except (OSError, RuntimeError, IndexError):
        return dataset, 0, 0


def linked(whole, dataset, made, train, validation, most):
    """Make the folder of `fewer`; return how many validation images it has, one of each class."""
    made.mkdir(parents=True)
    (made / train).symlink_to((dataset / train).resolve())
    copied = Path(f"{dataset.resolve()}_train.lmdb")  # by train_LMDB.py
    if copied.exists():
        (made.parent / copied.name).symlink_to(copied)
    files, count = {name: [] for name in whole.classes}, 0
    for path, label in whole.samples:
        files[whole.classes[label]].append(Path(path))
    for name, every in files.items():
        kept = max(1, round(len(every) * most / len(whole)))
        (made / validation / name).mkdir(parents=True)
        for number in range(kept):
            file = every[number * len(every) // kept]
            (made / validation / name / f"{number}{file.suffix}").symlink_to(file.resolve())
        count += kept
    return count


def calibrate(run, options, log):
    """Return the seconds of a step, steps of an epoch, seconds of validation and of a checkpoint.

    `run(options)` trains two epochs, with its output in `log`, and returns (status, exit code,
    record with "lines"). A step takes for ever if `run` gave up at once. Return None if it does not
    end well: the baseline's run will tell why.
    """
    given = re.findall(r"--steps?[ =](\d+)", " ".join(options))
    whole, found = int(given[-1]) if given else math.inf, (math.inf, math.inf, 0, 0)
    for steps in STEPS:
        steps = min(steps, whole)
        status, code, record = run([*options, "--steps", str(steps)])
        if code == 2:  # wrong use is the same for every script
            refuse(record["error"])
        if (status, code) == ("skip", 0):
            return found
        images = re.search(r"parameters, ([\d,]+) images", log.read_text(errors="replace"))
        if status != "ok" or len(record["lines"]) != 2 or not images:
            return None
        batch, last = record["options"]["batch_size"], record["epochs"][-1]
        seconds, validation = last["seconds"], last.get("val_seconds", 0)
        whole = min(whole, int(images[1].replace(",", "")) // batch)
        steps, (first, second) = min(steps, whole), record["lines"]
        aside = max(0, second - first - seconds - validation)
        found = seconds / steps, whole, validation, aside
        if seconds > ENOUGH or steps == whole:
            break
    return found


def fit(found, epochs, minutes, is_compared, share=SHARE):
    """Return the steps of an epoch (None: all), the epochs of all runs, the part of its validation.

    The fourth is a line about a change, to be ended by that of the validation. `found` is what `calibrate` returns, `epochs` and `minutes`
    are what the user gave. Short epochs become more if `is_compared`. The baseline's run takes at
    most 1 / `share` of the minutes.
    """
    step, whole, validation, aside = found
    most = max(60 * minutes / share, SECONDS)
    takes = epochs * (whole * step + validation + aside)
    if takes > most:
        seconds = most / epochs
        part = min(1.0, seconds / VALIDATION / max(validation, 1e-9))
        between = part * validation + aside
        steps = max(LEAST_STEPS, int(max(seconds - between, seconds / 2) / step))
        if steps < whole or part < 1:
            told = (
                f"a run would take {f'{takes:.0f} s' if takes < math.inf else 'too much'} of the "
                f"{minutes:g} minutes, so "
            )
            if steps >= whole:
                return None, epochs, part, told
            return steps, epochs, part, f"{told}all epochs end after {steps} steps (--steps)"
    more = int(min(1 + math.ceil(SECONDS / (whole * step)), min(most, LONGEST) / takes * epochs))
    if not is_compared or more <= epochs:
        return None, epochs, 1.0, ""
    told = f"epochs are short, so all runs have {more}: more to compare (not with --runs 1)"
    return None, more, 1.0, told


def shorten(run, options, folder, limits):
    """Return (options of all runs, their epochs, on how many images they validate, a line or "").

    `options` begin with --dataset and its path. `folder` has the log train.log, and gets links to
    fewer images if validation is cut; else the third is None. `run` is that of `calibrate`,
    `limits` are those of `fit`, the epochs first.
    """
    word, path, *options = options
    dataset, links, timed, of, fast = Path(path), folder / "fewer", 0, 0, path
    if not any(each.split("=")[0] == "--lmdb" for each in options):  # for later runs, of all images
        fast, timed, of = fewer(dataset, links, VALIDATED * cores())
    found = calibrate(run, [word, str(fast), *options], folder / "train.log")
    if not found:
        return [word, path, *options], limits[0], None, ""
    step, whole, validation, aside = found
    if of:
        found = step, whole, validation * of / timed, aside
    else:  # it cannot be cut
        found = step, whole, 0, validation + aside
    steps, epochs, part, told = fit(found, *limits)
    validated = None
    if of:
        made, count, _ = fewer(dataset, links, part * of)
        if 0 < count < of:
            path, validated = str(made), f"{count:,} of {of:,} images"
            told += f"{' and ' * bool(steps)}validation takes {validated}"
    if told.endswith("so "):
        told = ""  # each class keeps an image, and has no more
    return [word, path, *options, *["--steps", str(steps)] * bool(steps)], epochs, validated, told
