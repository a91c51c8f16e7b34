"""From compute and loading, each measured by itself, to what a step of the script takes.

All times are seconds a step; loading is seconds a batch as the loop gets it, from all workers.
"""

import dataclasses

APART = 0.10  # a confirmed step that differs more from its forecast is explained
PARTS = ("compute", "loading", "between")


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a step takes: between `low` and `high`, which are equal where nothing is shared.

    `between` is what the script does between steps (validation, saves, rollouts, the time between
    epochs), divided by its steps. It is a part of `low` and `high`; techniques do not change it.
    """

    compute: float
    loading: float
    between: float
    low: float
    high: float

    @property
    def waits(self):
        """Return (the least, the most) seconds a step that the loop waits for data."""
        return tuple(
            max(0.0, whole - self.compute - self.between) for whole in (self.low, self.high)
        )


@dataclasses.dataclass(frozen=True)
class Confirmed:
    """What whole processes showed: a step, and how much of it was waiting and time between."""

    step: float
    waiting: float
    between: float = 0.0


def forecast(compute, loading=0.0, between=0.0, prefetches=True, shares_cores=False, beside=None):
    """Return the Forecast of a step.

    With workers or a thread that prefetches (`prefetches`), loading goes on while a step computes:
    a step takes the longer of both. Without, it takes their sum. Where workers and training share
    cores, each slows the other down, and it lies between the two. `beside` narrows that range: it
    is (compute, loading) measured while the loader ran as fast as it could beside training on kept
    batches. A real step takes no longer than the longer of these, because the one that is ahead
    waits and leaves its cores to the other.
    """
    low, high = max(compute, loading), compute + loading
    if not prefetches:
        low = high
    elif not shares_cores:
        high = low
    elif beside:
        high = min(high, max(low, *beside))
    return Forecast(compute, loading, between, low + between, high + between)


def between_steps(seconds, steps, step_seconds):
    """Return what goes by between steps, a step: of a whole watched run of so many seconds.

    `step_seconds` is all the time in steps, waiting for data included.
    """
    return max(0.0, seconds - step_seconds) / steps if steps else 0.0


def speedup(plain, best):
    """Return (the least, the most) that a set gains in the script as a whole, by two Forecasts.

    How far loading and compute are in each other's way is the same in both, so both lie at the
    same point of their ranges, and the ends of the ranges give the ends of the speedup.
    """
    return tuple(sorted((plain.low / best.low, plain.high / best.high)))


def outside(value, low, high):
    """Return how far a value lies outside of a range, with its sign; 0 within it."""
    return value - high if value > high else min(0.0, value - low)


def parts_off(forecast, confirmed):
    """Return [(part, seconds), ...]: why a Confirmed step differs from its Forecast.

    [] if it differs by no more than 10 %. Otherwise these are the parts of PARTS that account for
    a third or more of the difference, the largest first, with the seconds a step that each took
    beyond its forecast, or less than that (below 0).
    """
    off = outside(confirmed.step, forecast.low, forecast.high)
    if abs(off) <= APART * (forecast.low if off < 0 else forecast.high):
        return []
    computed = confirmed.step - confirmed.waiting - confirmed.between
    found = {
        "compute": computed - forecast.compute,
        "loading": outside(confirmed.waiting, *forecast.waits),
        "between": confirmed.between - forecast.between,
    }
    return sorted(
        ((part, found[part]) for part in PARTS if found[part] * off >= off * off / 3),
        key=lambda each: -abs(each[1]),
    )
