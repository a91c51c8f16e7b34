"""Is one set of techniques faster than another? The verdict on runs that were made by turns.

A run is {"number": its place in time, "images_per_second": its median, "rates": images/s of each
epoch}.
"""

import math
import statistics

PAYS = 1.02  # a smaller gain makes no difference
ONE_RUN = 0.2  # the least uncertainty of a single comparison
STEADY = 0.005  # the least standard deviation of a ratio
STUDENT = 12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36  # Student's t of 95 % for 2, 3, ... runs


def scatter(rates):
    """Return the standard error of the median of `rates`, divided by it; 0 for one rate."""
    error = 1.25 * statistics.stdev(rates) / len(rates) ** 0.5 if len(rates) > 1 else 0
    return error / statistics.median(rates)


def compare(runs, others):
    """Return (how many times as fast `runs` are as `others`, the uncertainty of 95 %).

    Each run is compared with the nearest one of `others`, since a machine's speed drifts. The
    uncertainty is that of the ratios (Student's t) or of the epochs in the runs, whichever is
    larger; of few ratios, at most their range and what a single one may be off.
    """
    ratios, scatters = [], []
    for run in runs:
        other = min(others, key=lambda each: abs(each["number"] - run["number"]))
        ratios.append(run["images_per_second"] / other["images_per_second"])
        scatters.append(math.hypot(scatter(run["rates"]), scatter(other["rates"])))
    ratio, n, least = statistics.median(ratios), len(runs), max(STEADY, statistics.fmean(scatters))
    if n == 1:
        return ratio, ratio * max(2 * least, ONE_RUN)
    error = max(2 * ratio * least, STUDENT[min(n, 8) - 2] * statistics.stdev(ratios))
    most = max(max(ratios) - ratio, ratio - min(ratios)) + ratio * ONE_RUN / n ** 0.5
    return ratio, min(error / n ** 0.5, most)


def is_settled(ratio, spread, n):
    """Return whether more runs would hardly change the verdict; one run alone settles nothing."""
    return n > 1 and (abs(ratio - 1) > spread or abs(ratio - 1) + spread < PAYS - 1)


def verdict(ratio, spread):
    """Return "faster", "slower" or, within the spread or below 2 %, "no difference"."""
    if abs(ratio - 1) < max(spread, PAYS - 1):
        return "no difference"
    return "faster" if ratio > 1 else "slower"
