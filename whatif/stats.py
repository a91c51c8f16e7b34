"""Ratios, intervals and verdicts.

docs/verdicts.md tells the same in words.

Every interval has a coverage of at least 95 %. There are two kinds of measurements:

- windows by turns in one process: `ratios_of`, `estimate`, `quotient`
- pairs of whole processes, to confirm a set: `of_pairs`

tools/ratios.py has a third kind, runs of whole processes that are close in time.
"""

import bisect
import dataclasses
import enum
import functools
import itertools
import math
import statistics

COVERAGE = 0.95  # of every interval
LEAST_WINDOWS = 6  # with five, the range of all has a coverage of only 94 %
LEAST_PAIRS = 3  # of whole processes
ADVISED = 1.02  # a smaller speedup is neither advised nor kept in a set
MARGIN_GPU, MARGIN_CPU = 0.03, 0.10  # "not significant": the whole interval lies so close to 1
LEAST_LOSSES = 50  # steps whose losses are compared
LEAST_PLAIN = 4  # plain runs with which losses are compared
LOSS_STEADY = 0.005  # the least standard deviation of a mean loss, as a share of it
LOST = 0.1  # a run in which a larger share of the losses is not finite has no mean loss


# ------------------------------------------------------------------------------ estimates
@dataclasses.dataclass(frozen=True)
class Estimate:
    """How many times as fast one thing is as another, with an interval of 95 %.

    `low` and `high` are None while there are too few measurements for an interval. `ratios` are
    the single measurements, where the estimate comes from windows.
    """

    speedup: float
    low: float | None
    high: float | None
    n: int
    ratios: tuple = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def spread(self):
        """Return half the width of the interval; None without one."""
        return None if self.low is None else (self.high - self.low) / 2


class Verdict(enum.Enum):
    """What an estimate says; the value is the word in tables."""

    FASTER = "faster"
    SLOWER = "slower"
    NOT_SIGNIFICANT = "not significant"
    OPEN = "open"


def verdict(estimate, margin, least=1.0):
    """Return the verdict on an estimate.

    FASTER or SLOWER: the interval excludes 1. NOT_SIGNIFICANT: the whole interval lies within
    1 ± `margin`. OPEN: more measurements are needed. With `least` above 1, a speedup that differs
    less than this from 1 is never called faster or slower.
    """
    if estimate is None or estimate.low is None:
        return Verdict.OPEN
    if abs(estimate.speedup - 1) >= least - 1:
        if estimate.low > 1:
            return Verdict.FASTER
        if estimate.high < 1:
            return Verdict.SLOWER
    if 1 - margin <= estimate.low and estimate.high <= 1 + margin:
        return Verdict.NOT_SIGNIFICANT
    return Verdict.OPEN


def gains(estimate):
    """Return whether something is clearly faster, by 2 % or more: this is advised and kept."""
    return verdict(estimate, 0, ADVISED) is Verdict.FASTER


def is_clear(estimate):
    """Return whether the interval of an estimate excludes 1; None has no interval."""
    return verdict(estimate, 0) in (Verdict.FASTER, Verdict.SLOWER)


def windows_needed(estimate, margin):
    """Return about how many more windows an estimate needs until its verdict; 0 if it has one.

    An interval narrows with the square root of n. It has to end at 1, or inside the margin,
    whichever comes first.
    """
    if estimate is None or estimate.low is None:
        return LEAST_WINDOWS - (estimate.n if estimate else 0)
    if verdict(estimate, margin) is not Verdict.OPEN:
        return 0
    away = abs(estimate.speedup - 1)
    allowed = max(away, margin - away)  # at least half the margin
    return max(1, math.ceil(estimate.n * ((estimate.spread / allowed) ** 2 - 1)))


# ------------------------------------------------------------------------------ windows by turns
@dataclasses.dataclass(frozen=True)
class Window:
    """Some seconds of training with a set of techniques; () is the script as it is.

    `rate` is work divided by all of the time, stalls included; `at` is the window's place in time.
    """

    techniques: tuple
    rate: float
    at: float


def ratios_of(windows):
    """Return {set: [ratio of each of its windows to the mean of its two plain neighbours]}.

    The neighbours are the last plain window before it and the next one after it, so that the
    ratio does not contain the drift of the machine. Their geometric mean is taken: with the
    arithmetic one, noise makes every set seem slower. A window that lacks a neighbour is left out.
    """
    ordered = sorted(windows, key=lambda window: window.at)
    plain = [window for window in ordered if not window.techniques]
    moments = [window.at for window in plain]
    ratios = {}
    for window in ordered:
        after = bisect.bisect(moments, window.at)
        if window.techniques and 0 < after < len(plain):
            base = math.sqrt(plain[after - 1].rate * plain[after].rate)
            ratios.setdefault(window.techniques, []).append(window.rate / base)
    return ratios


@functools.cache
def left_out(n):
    """Return how many of n ordered values are left out at either end of the median's interval.

    The median of a distribution lies below the k-th smallest of n values with the probability
    that fewer than k of n coins show heads: no assumption about the distribution is needed. None
    if even the range of all values has too small a coverage.
    """
    below, k = 0.0, 0
    while below + (term := math.comb(n, k) / 2**n) <= (1 - COVERAGE) / 2:
        below, k = below + term, k + 1
    return k - 1 if k else None


def estimate(ratios):
    """Return the Estimate of the median of ratios, with an interval of order statistics."""
    ordered, n = sorted(ratios), len(ratios)
    out = left_out(n)
    low, high = (None, None) if n < LEAST_WINDOWS else (ordered[out], ordered[n - 1 - out])
    return Estimate(statistics.median(ordered), low, high, n, tuple(ratios))


def estimates(windows):
    """Return {set: its Estimate relative to the script as it is} of all windows until now."""
    return {techniques: estimate(ratios) for techniques, ratios in ratios_of(windows).items()}


@functools.cache
def rank_sum_out(n, m):
    """Return how many of the n * m ordered quotients are left out at either end; -1: too few.

    These counts are exact: the number of orders of n and m values in which u pairs are inverted
    is the coefficient of q^u in the Gaussian binomial of n + m over n. For many values it is the
    normal distribution.
    """
    if n * m > 2500:
        deviation = (n * m * (n + m + 1) / 12) ** 0.5
        return int(n * m / 2 - statistics.NormalDist().inv_cdf((1 + COVERAGE) / 2) * deviation) - 1
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):  # times 1 - q^(m + i)
            counts[u] -= counts[u - m - i]
        for u in range(i, n * m + 1):  # divided by 1 - q^i
            counts[u] += counts[u - i]
    most = (1 - COVERAGE) / 2 * math.comb(n + m, n)
    return bisect.bisect_right(list(itertools.accumulate(counts)), most) - 1


def quotient(one, other):
    """Return the Estimate of how many times as fast one set of windows is as another.

    Both are measured relative to their own plain neighbours, so drift is in neither, and they
    need not come from the same rounds: a set that has its verdict gets no more windows. Each ratio
    of one is divided by each of the other. The estimate is the median of these quotients, the
    interval the one that belongs to the rank sum test of Wilcoxon, Mann and Whitney (Hodges and
    Lehmann, 1963). It assumes that the logarithms scatter alike in both sets, in whatever
    distribution. Sets next to each other share a plain window, which makes the true interval
    narrower, not wider. Against the pairs of the i-th windows it needs half as many windows.
    `other` None is the script as it is.
    """
    if other is None:
        return one
    n = min(one.n, other.n)
    quotients = sorted(a / b for a in one.ratios for b in other.ratios)
    low = high = None
    if n >= LEAST_WINDOWS:
        out = rank_sum_out(one.n, other.n)
        low, high = quotients[out], quotients[-1 - out]
    return Estimate(statistics.median(quotients), low, high, n)


# ------------------------------------------------------------------------------ Student's t
def within(t, df):
    """Return the probability that Student's t with `df` degrees of freedom is within ±t.

    These are the finite sums for whole numbers of df (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    angle = math.atan(t / df**0.5)
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if df % 2 else (1.0, 0.0)
    for i in range(1 + df % 2, df, 2):  # the factors are 1/2, 3/4, ... or 2/3, 4/5, ...
        total += term
        term *= cosine**2 * i / (i + 1)
    return 2 / math.pi * (angle + sine * total) if df % 2 else sine * total


@functools.cache
def student(df):
    """Return Student's t of 95 % for any number of degrees of freedom: 12.71 for 1."""
    low, high = 0.0, 13.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, df) < COVERAGE else (low, middle)
    return low


# ------------------------------------------------------------------------------ pairs of processes
def of_pairs(plain, rates):
    """Return the Estimate of whole processes by turns; `plain` and `rates` are their rates.

    The i-th of both ran one after the other. Swap the order from pair to pair, so that a steady
    drift cancels. The interval is Student's of the logarithms of the ratios. Once one of order
    statistics leaves a pair out at either end, it is that: a run that stalls once would widen
    Student's for long.
    """
    ratios = [rate / base for base, rate in zip(plain, rates)]
    logs, n = [math.log(ratio) for ratio in ratios], len(ratios)
    if n >= LEAST_WINDOWS and left_out(n):
        return estimate(ratios)
    middle, low, high = statistics.fmean(logs), None, None
    if n >= LEAST_PAIRS:
        half = student(n - 1) * statistics.stdev(logs) / n**0.5
        low, high = math.exp(middle - half), math.exp(middle + half)
    return Estimate(math.exp(middle), low, high, n, tuple(ratios))


# ------------------------------------------------------------------------------ losses
def mean_losses(runs):
    """Return the mean loss of each run, given the runs' losses step by step, of the same steps.

    All are cut to the shortest run that has at least 50 losses. The last half of them counts,
    because the first steps are alike in every training. The mean of a shorter run is None. Losses
    that are not finite are left out; if they are more than a tenth, or the last one, it is NaN.
    """
    steps = min((len(run) for run in runs if len(run) >= LEAST_LOSSES), default=0)
    found = []
    for run in runs:
        compared = run[steps // 2 : steps]
        finite = [loss for loss in compared if math.isfinite(loss)]
        is_lost = len(compared) - len(finite) > LOST * len(compared) or (
            compared and not math.isfinite(compared[-1])
        )
        found.append(
            None
            if not steps or len(run) < steps
            else math.nan
            if is_lost
            else statistics.fmean(finite)
        )
    return found


@dataclasses.dataclass(frozen=True)
class LossVerdict:
    """Whether a set changes the training; None: it cannot be said. `why` is a clause for a report.

    `low` and `high` are the interval in which the mean of the set's runs would lie, and `mean` is
    where it lies.
    """

    changes: bool | None
    why: str
    mean: float | None = None
    low: float | None = None
    high: float | None = None


def changes_training(plain_means, set_means):
    """Return the LossVerdict on a set of k runs beside n plain runs, all with seeds of their own.

    The set changes the training if the mean of its mean losses lies outside of
    m ± t(n - 1; 95 %) * s * sqrt(1/k + 1/n), with mean m and standard deviation s of the plain
    runs. Plain runs that agree (a script may fix seeds that nobody can shift) do not show how far
    another rounding leads, so s is at least half a per cent of m. This finds a broken training,
    not a slightly worse one.
    """
    plain, mine = (
        [mean for mean in means if math.isfinite(mean)] for means in (plain_means, set_means)
    )
    lost_plain, lost = len(plain_means) - len(plain), len(set_means) - len(mine)
    told = f"{lost_plain} of {len(plain_means)} plain runs have losses that are not finite"
    if lost and not lost_plain:
        return LossVerdict(
            True,
            f"losses are not finite in {lost} of its {len(set_means)} runs, "
            "and finite in the script as it is",
        )
    notes = [told] * bool(lost_plain) + [f"so have {lost} of its {len(set_means)} runs"] * bool(
        lost
    )
    if len(plain) < LEAST_PLAIN or not mine:
        notes.append(
            f"{len(plain)} plain run{'s' * (len(plain) != 1)} and {len(mine)} of the set can be "
            f"compared; {LEAST_PLAIN} and 1 are needed"
        )
        return LossVerdict(None, "; ".join(notes))
    n, k, m, mean = len(plain), len(mine), statistics.fmean(plain), statistics.fmean(mine)
    s = max(statistics.stdev(plain), LOSS_STEADY * abs(m))
    half = student(n - 1) * s * (1 / k + 1 / n) ** 0.5
    changes = abs(mean - m) > half
    notes.append(
        f"its mean loss {mean:.4g} lies {'outside' if changes else 'within'} "
        f"{m - half:.4g} to {m + half:.4g}, where that of {n} plain runs leads"
    )
    return LossVerdict(changes, "; ".join(notes), mean, m - half, m + half)
