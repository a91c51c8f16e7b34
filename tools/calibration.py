"""Time some steps of a script before its runs, to say how many steps and epochs they get."""

import math
import re

from runs import refuse

SECONDS = 5  # the least training to compare in a run: with less, all runs get more epochs, ...
LONGEST = 30  # ... unless a run would then take longer than this after its start
SHARE = 30  # with a limit of time, the baseline takes at most this part of it after its start
QUICK_SHARE = 20  # ... or this part, if few sets run
LEAST_STEPS = 5  # an epoch is not made shorter than this
STEPS = (LEAST_STEPS, 8 * LEAST_STEPS)  # so many are timed, the second number ...
ENOUGH = 0.5  # ... only if the first takes less than these seconds


def calibrate(run, options, log):
    """Return the seconds of a step, the steps of an epoch, and the seconds from epoch to epoch.

    The latter are validation and checkpoint. `run(options)` trains two epochs, with its output in
    `log`, and returns (status, exit code, record with "lines"). A step takes for ever if `run` gave
    up at once. Return None if it does not end well: the baseline's run will tell why.
    """
    given = re.findall(r"--steps?[ =](\d+)", " ".join(options))
    whole, found = int(given[-1]) if given else math.inf, (math.inf, math.inf, 0)
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
        batch, seconds = record["options"]["batch_size"], record["epochs"][-1]["seconds"]
        whole = min(whole, int(images[1].replace(",", "")) // batch)
        steps, (first, second) = min(steps, whole), record["lines"]
        found = seconds / steps, whole, max(0, second - first - seconds)
        if seconds > ENOUGH or steps == whole:
            break
    return found


def fit(step, whole, between, epochs, minutes, is_compared, share=SHARE):
    """Return the steps of an epoch (None: all), the epochs of all runs, and a line about a change.

    `epochs` and `minutes` are what the user gave, the first three are of `calibrate`. Short epochs
    become more if `is_compared`. The baseline's run takes at most 1 / `share` of the minutes.
    """
    most = max(60 * minutes / share, SECONDS)
    takes = epochs * (whole * step + between)
    if takes > most:
        seconds = most / epochs
        steps = max(LEAST_STEPS, int(max(seconds - between, seconds / 2) / step))
        if steps < whole:
            told = (
                f"a run would take {f'{takes:.0f} s' if takes < math.inf else 'too much'} of the "
                f"{minutes:g} minutes, so all epochs end after {steps} steps (--steps)"
            )
            return steps, epochs, told
    more = int(min(1 + math.ceil(SECONDS / (whole * step)), min(most, LONGEST) / takes * epochs))
    if not is_compared or more <= epochs:
        return None, epochs, ""
    told = f"epochs are short, so all runs have {more}: more to compare (not with --runs 1)"
    return None, more, told
