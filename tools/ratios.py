"""How many times as fast runs of running.sh are: whole processes that are close in time."""

import itertools
import math
import statistics

from whatif import stats

MOVED = 1.1  # if runs of the same script differ more, the report says so
WAITS = 0.2  # above this share, waiting for data hides what other techniques gain
CLEAR = 0.1  # the widest "no difference"
ONE_RUN = 0.2  # the uncertainty of one comparison while nothing has run twice
STEADY = 0.005  # the least standard deviation of a ratio


def scatter(rates):
    """Return the standard error of the median of `rates`, divided by it; 0 for one rate.

    It uses the median deviation, so that one odd rate, as at an epoch's start, does not count.
    """
    middle = statistics.median(rates)
    deviation = 2 * statistics.median(abs(rate - middle) for rate in rates)  # 1.48 for many
    return 1.25 * deviation / len(rates) ** 0.5 / middle


def doubt_of(sets):
    """Return the uncertainty of 95 % of the ratio of two single runs, as a share of it.

    `sets` are lists of runs of the same script. It is estimated from the changes between
    successive runs of a set: by their median, so that a stall does not count, and Student's t. Of
    few changes it is at most ONE_RUN, or twice what was seen; without any it is None.
    """
    changes = [
        abs(math.log(statistics.median(run["rates"]) / statistics.median(before["rates"])))
        for runs in sets
        for before, run in itertools.pairwise(runs)
    ]
    if not changes:
        return None
    seen = 1.48 * statistics.median(changes)  # the standard deviation of normal numbers
    return min(stats.student(min(len(changes), 7)) * seen, max(ONE_RUN, 2 * seen))


def compare(runs, others, doubt=None):
    """Return the Estimate of how many times as fast `runs` are as `others`.

    A run is {"number": its place in time, "rates": its speeds}. A machine's speed drifts, so each
    is compared with `others` at its time: in proportion between their last run before it and the
    next one after it. The uncertainty of one comparison is `doubt` (doubt_of; ONE_RUN if unknown),
    or twice what the rates or the ratios scatter if that is larger.
    """
    ratios, scatters, used = [], [], set()
    for run in runs:
        at = run["number"]
        first = ([each for each in others if each["number"] <= at] or others[:1])[-1]
        last = ([each for each in others if each["number"] >= at] or others[-1:])[0]
        begin, end = first["number"], last["number"]
        share = (at - begin) / (end - begin) if end > begin else 0
        rate, before, after = (statistics.median(one["rates"]) for one in (run, first, last))
        ratios.append(rate / ((1 - share) * before + share * after))
        nearest = last if share > 0.5 else first
        scatters.append(math.hypot(scatter(run["rates"]), scatter(nearest["rates"])))
        used |= {begin, end}
    ratio, n = statistics.median(ratios), len(ratios)
    apart = statistics.stdev(ratios) / ratio if n > 1 else 0
    most = max(
        2 * max(STEADY, statistics.fmean(scatters)), 2 * apart, ONE_RUN if doubt is None else doubt
    )
    spread = ratio * most * ((1 / n + 1 / min(n, len(used))) / 2) ** 0.5
    return stats.Estimate(ratio, ratio - spread, ratio + spread, n, tuple(ratios))


def is_settled(found):
    """Return whether more runs would hardly change the verdict on an estimate."""
    return stats.verdict(found, stats.ADVISED - 1) is not stats.Verdict.OPEN


def seems_to_gain(found):
    """Return whether a set of whole runs is kept: its only run gains, or all do for certain.

    One run is enough at first, so that a few minutes find a fast set.
    """
    return found.speedup >= stats.ADVISED if found.n == 1 else stats.gains(found)
