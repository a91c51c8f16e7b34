"""Intervals, verdicts, losses and forecasts of whatif, on simulated measurements."""

import math
import random
import statistics
from types import SimpleNamespace

import pytest

from whatif import confirm, forecast, stats
from whatif.stats import Estimate, Verdict, Window

FAST = ("fast",)


def windows(n, speedup=1.0, noise=0.02, seed=0, drift=lambda at: 1.0, stalls=()):
    """Return n windows of a set by turns with plain ones; those numbered in `stalls` are halved."""
    draw = random.Random(seed)
    return [
        Window(
            FAST if i % 2 else (),
            100
            * (speedup if i % 2 else 1)
            * drift(i)
            * draw.lognormvariate(0, noise)
            * (0.5 if i in stalls else 1),
            float(i),
        )
        for i in range(2 * n + 1)
    ]


def estimate(*args, **options):
    return stats.estimates(windows(*args, **options))[FAST]


def scattered(draw, n, middle=1.0, noise=0.02):
    return stats.estimate([middle * draw.lognormvariate(0, noise) for _ in range(n)])


# ------------------------------------------------------------------------------ windows
def test_a_window_is_compared_with_its_two_neighbours():
    some = [
        Window((), 100, 0),
        Window(FAST, 150, 1),
        Window((), 144, 2),
        Window(("b",), 72, 3),
        Window((), 100, 4),
        Window(FAST, 100, 5),
    ]
    assert stats.ratios_of(some) == {FAST: [150 / 120], ("b",): [0.6]}
    assert stats.ratios_of(reversed(some)) == stats.ratios_of(some)  # their times count
    # a window was thrown away: the plain one before it is still a neighbour of the next
    assert stats.ratios_of(some[:1] + some[3:]) == {("b",): [0.72]}


def test_there_is_no_interval_below_six_windows():
    assert (estimate(5).low, estimate(5).spread, estimate(5).n) == (None, None, 5)
    six = estimate(6)
    assert (six.low, six.high) == (min(six.ratios), max(six.ratios))
    assert stats.verdict(estimate(5, speedup=3), 0.03) is Verdict.OPEN


def test_one_stall_of_the_machine_does_not_widen_the_interval_for_ever():
    """A window with the set, or a plain one, which is the neighbour of two, runs at half speed."""
    for stall in (5, 6):
        spreads = [estimate(n, 1.1, stalls=[stall]).spread for n in (6, 15)]
        assert spreads[0] > 0.1 and spreads[1] < 0.03
        assert stats.verdict(estimate(15, 1.1, stalls=[stall]), 0.03) is Verdict.FASTER
    assert estimate(15, 1.1, stalls=[5, 12, 21]).spread < 0.04


@pytest.mark.parametrize(
    "drift",
    [
        lambda at: 1 - 0.01 * at,
        lambda at: 1 + 0.3 * math.sin(at / 8),
        lambda at: 0.7 + 0.6 * (at > 15),
    ],
    ids=["slower", "swings", "jumps"],
)
def test_drift_of_the_machine_is_not_in_the_ratio(drift):
    found = [estimate(15, 1.2, 0.005, seed, drift) for seed in range(200)]
    assert sum(each.low <= 1.2 <= each.high for each in found) > 185
    assert all(abs(each.speedup - 1.2) < 0.015 and each.spread < 0.03 for each in found)


@pytest.mark.parametrize("n", [6, 9, 15, 17, 40])
def test_the_interval_holds_the_true_speedup(n):
    """In 95 % of all cases and more, with noise of whatever kind."""
    draw = random.Random(n)
    kinds = [
        lambda: draw.lognormvariate(0, 0.1),
        lambda: draw.choice([0.5, 0.99, 1, 1.01, 1.02]),
        lambda: 1 - draw.expovariate(5) + math.log(2) / 5,
    ]
    for noise in kinds:
        found = [stats.estimate([noise() for _ in range(n)]) for _ in range(1000)]
        assert sum(each.low <= 1 <= each.high for each in found) > 940
    # without any assumption: the binomial says so
    out = stats.left_out(n)
    tail = sum(math.comb(n, k) for k in range(out + 1)) / 2**n
    assert 2 * tail <= 0.05 < 2 * (tail + math.comb(n, out + 1) / 2**n)


def test_noise_does_not_make_a_set_seem_slower():
    found = [estimate(40, noise=0.3, seed=seed).speedup for seed in range(60)]
    assert abs(statistics.fmean(found) - 1) < 0.02


@pytest.mark.parametrize(
    "low, high, on_gpu, on_cpu",
    [
        (1.001, 1.01, "faster", "faster"),
        (0.8, 0.99, "slower", "slower"),
        (0.98, 1.02, "not significant", "not significant"),
        (0.96, 1.02, "open", "not significant"),
        (0.98, 1.04, "open", "not significant"),
        (0.95, 1.2, "open", "open"),
        (None, None, "open", "open"),
    ],
)
def test_three_verdicts(low, high, on_gpu, on_cpu):
    found = Estimate((low + high) / 2 if low else 1.5, low, high, 6)
    assert stats.verdict(found, stats.MARGIN_GPU).value == on_gpu
    assert stats.verdict(found, stats.MARGIN_CPU).value == on_cpu


def test_only_two_per_cent_and_more_are_advised():
    assert not stats.gains(Estimate(1.015, 1.01, 1.02, 6))
    assert not stats.gains(Estimate(1.3, 0.99, 1.6, 6)) and not stats.gains(estimate(5, 2))
    assert stats.gains(Estimate(1.021, 1.001, 1.04, 6))


def test_a_set_that_does_nothing_is_rarely_advised():
    """It is looked at after each window, until a verdict is reached: that adds to 5 %."""
    told = []
    for seed in range(200):
        some = windows(60, noise=0.05, seed=seed)
        found = (stats.estimates(some[:end])[FAST] for end in range(13, 122, 2))
        told.append(
            next(
                each for each in found if stats.verdict(each, stats.MARGIN_CPU) is not Verdict.OPEN
            )
        )
    assert sum(map(stats.gains, told)) < 0.08 * len(told)


def test_how_many_windows_an_open_row_needs():
    assert stats.windows_needed(None, 0.03) == 6
    assert stats.windows_needed(stats.estimate([1, 2]), 0.03) == 4
    assert stats.windows_needed(Estimate(1.2, 1.1, 1.3, 8), 0.03) == 0
    # ±20 % has to become ±10 %, by either way: four times as many
    assert stats.windows_needed(Estimate(1.0, 0.8, 1.2, 10), 0.1) == 30
    assert stats.windows_needed(Estimate(1.1, 0.9, 1.3, 10), 0.03) == 30
    # and it is about right
    needed = []
    for seed in range(40):
        draw = random.Random(seed)
        ratios = [draw.lognormvariate(0, 0.1) for _ in range(200)]
        found = stats.estimate(ratios[:12])
        if more := stats.windows_needed(found, 0.03):
            taken = next(
                (
                    n
                    for n in range(13, 200)
                    if stats.verdict(stats.estimate(ratios[:n]), 0.03) is not Verdict.OPEN
                ),
                200,
            )
            needed.append(more / (taken - 12))
    assert 0.3 < statistics.median(needed) < 5


# ------------------------------------------------------------------------------ set to set
def test_the_ratio_of_two_sets_holds_the_true_one():
    draw, found = random.Random(3), []
    for n, m in ((6, 6), (6, 12), (20, 9)) * 250:
        found.append(stats.quotient(scattered(draw, n, 2.6, 0.1), scattered(draw, m, 2.0, 0.1)))
    assert sum(each.low <= 1.3 <= each.high for each in found) > 0.94 * len(found)
    assert found[0].n == 6 and stats.quotient(found[0], None) is found[0]


def test_the_ratio_of_two_sets_by_windows_in_turn_with_the_same_plain_ones():
    """Sets next to each other share a plain window; the interval holds all the same."""
    held = 0
    for seed in range(300):
        draw = random.Random(seed)
        some = [
            Window(
                ((), ("a",), (), ("b",))[i % 4],
                (1, 1.5, 1, 1.6)[i % 4] * draw.lognormvariate(0, 0.05),
                i,
            )
            for i in range(33)
        ]
        found = stats.estimates(some)
        ratio = stats.quotient(found["b",], found["a",])
        held += ratio.low <= 1.6 / 1.5 <= ratio.high
    assert held > 0.94 * 300


def test_the_ratio_of_two_sets_survives_a_stall():
    draw = random.Random(1)
    one, other = scattered(draw, 10, 1.5), scattered(draw, 10, 1.4)
    stalled = stats.estimate([0.7, *one.ratios[1:]])
    assert stats.quotient(stalled, other).spread < 2 * stats.quotient(one, other).spread < 0.06
    too_few = stats.quotient(one, scattered(draw, 5))
    assert too_few.low is None and too_few.n == 5


def test_rank_sums_are_those_of_the_tables():
    """The critical values of U for 5 %, two-sided (Mann and Whitney)."""
    for (n, m), critical in {
        (4, 4): 0,
        (5, 5): 2,
        (6, 6): 5,
        (6, 9): 10,
        (8, 8): 13,
        (10, 10): 23,
        (20, 20): 127,
        (3, 3): -1,
    }.items():
        assert stats.rank_sum_out(n, m) == stats.rank_sum_out(m, n) == critical
    assert stats.rank_sum_out(50, 51) - stats.rank_sum_out(50, 50) in range(15, 26)  # normal


# ------------------------------------------------------------------------------ processes
def test_students_t_is_that_of_the_tables():
    for df, t in {
        1: 12.706,
        2: 4.303,
        3: 3.182,
        4: 2.776,
        5: 2.571,
        10: 2.228,
        30: 2.042,
        100: 1.984,
        1001: 1.962,
    }.items():
        assert abs(stats.student(df) - t) < 0.001


def test_whole_processes_are_compared_in_pairs():
    assert stats.of_pairs([100, 110], [150, 165]).low is None
    found = stats.of_pairs([100, 120, 80], [150, 182, 119])  # the machine changes, not the ratio
    assert abs(found.speedup - 1.5) < 0.01 and found.n == 3 and 1.4 < found.low < found.high < 1.6
    draw, held = random.Random(0), 0
    for _ in range(1000):
        plain = [draw.lognormvariate(0, 0.05) for _ in range(4)]
        pairs = stats.of_pairs(plain, [1.2 * draw.lognormvariate(0, 0.05) for _ in plain])
        held += pairs.low <= 1.2 <= pairs.high
    assert 930 < held < 970


def test_a_run_that_stalls_does_not_widen_nine_pairs():
    stalled = [stats.of_pairs([100] * n, [40, *[119, 121] * 4][:n]) for n in (8, 9)]
    assert stalled[0].low < 1 and stalled[1].low == 1.19 and stalled[1].high == 1.21
    draw, held = random.Random(0), 0
    for _ in range(1000):
        plain = [draw.lognormvariate(0, 0.05) for _ in range(9)]
        pairs = stats.of_pairs(plain, [1.2 * draw.lognormvariate(0, 0.05) for _ in plain])
        held += pairs.low <= 1.2 <= pairs.high
    assert 935 < held


# ------------------------------------------------------------------------------ losses
def losses(level, steps=100, seed=0, noise=0.1):
    draw = random.Random(seed)
    return [level * (1 + math.exp(-i / 20)) * draw.lognormvariate(0, noise) for i in range(steps)]


def means(*runs):
    return stats.mean_losses(runs)


def test_losses_that_differ_run_by_run_are_not_called_changed():
    """At a high learning rate any two runs differ by 20 %: so do a plain run and one with amp."""
    changed = 0
    for seed in range(200):
        draw = random.Random(seed)
        every = means(*(losses(draw.lognormvariate(0, 0.2), seed=draw.random()) for _ in range(6)))
        changed += stats.changes_training(every[:4], every[4:]).changes
    assert changed < 0.08 * 200


def test_a_broken_training_is_called_changed():
    plain = means(*(losses(0.5 * (1 + 0.02 * i), seed=i) for i in range(4)))
    broken = means(losses(2.3, seed=9))
    told = stats.changes_training(plain, broken)
    assert told.changes and told.low < 0.52 < told.high < told.mean
    assert "outside" in told.why and "4 plain runs" in told.why
    same = means(losses(0.53, seed=8), losses(0.5, seed=7))
    assert not stats.changes_training(plain, same).changes


def test_a_script_that_fixes_its_seeds_is_not_called_changed_by_rounding():
    assert not stats.changes_training([2.0] * 4, [2.004]).changes
    assert stats.changes_training([2.0] * 4, [2.3]).changes


def test_the_interval_of_losses_is_the_one_written_down():
    plain = [1.0, 1.2, 0.9, 1.1, 1.3]
    told = stats.changes_training(plain, [1.4, 1.6])
    half = 2.776 * statistics.stdev(plain) * (1 / 2 + 1 / 5) ** 0.5
    assert abs(told.high - (1.1 + half)) < 1e-3 and abs(told.low - (1.1 - half)) < 1e-3
    assert told.changes == (told.mean > told.high)


def test_losses_of_the_same_steps_are_compared():
    long, short, little = losses(1, 300), losses(1, 80), losses(1, 40)
    one, other, none = stats.mean_losses([long, short, little])
    assert one == other == statistics.fmean(long[40:80])
    assert none is None and stats.mean_losses([little, little]) == [None, None]


def test_losses_that_are_not_finite_are_said():
    good = [losses(1, seed=i) for i in range(4)]
    once, lost = [*good[0]], good[1][:60] + [math.nan] * 40
    once[70] = math.inf
    single, broken = stats.mean_losses([once, lost])
    assert math.isfinite(single) and math.isnan(broken)
    told = stats.changes_training(means(*good), means(lost))
    assert told.changes and "not finite in 1 of its 1 runs" in told.why
    assert stats.changes_training(means(*good), means(once)).changes is False
    # if the script's own are not finite either, that proves nothing
    told = stats.changes_training(means(*good, lost), means(lost))
    assert told.changes is None and "1 of 5 plain runs have losses that are not finite" in told.why
    assert stats.changes_training(means(lost, *good), means(good[2])).changes is False
    few = stats.changes_training(means(*good[:3]), means(lost[:0] + good[1]))
    assert few.changes is None and few.why.startswith("3 plain runs and 1 of the set can be ")
    assert stats.changes_training([1.0], [1.0]).why.startswith("1 plain run and 1 of the set can ")


# ------------------------------------------------------------------------------ forecast
def test_a_step_takes_the_longer_or_the_sum():
    assert (
        forecast.forecast(0.1, 0.3, prefetches=False).low
        == forecast.forecast(0.1, 0.3, prefetches=False).high
        == 0.4
    )
    hidden, waiting = forecast.forecast(0.3, 0.1, 0.02), forecast.forecast(0.1, 0.3, 0.02)
    assert hidden.low == hidden.high == waiting.low == 0.32
    assert hidden.waits == pytest.approx((0, 0)) and waiting.waits == pytest.approx((0.2, 0.2))
    assert forecast.between_steps(100, 500, 80) == pytest.approx(0.04)


def test_where_cores_are_shared_it_is_a_range():
    shared = forecast.forecast(0.3, 0.2, shares_cores=True)
    assert (shared.low, shared.high) == (0.3, 0.5)
    narrow = forecast.forecast(0.3, 0.2, shares_cores=True, beside=(0.36, 0.25))
    assert (narrow.low, narrow.high) == (0.3, 0.36)
    assert forecast.forecast(0.3, 0.2, shares_cores=True, beside=(0.9, 0.2)).high == 0.5
    fast = forecast.forecast(0.1, 0.2, shares_cores=True)
    assert forecast.speedup(shared, fast) == pytest.approx((1.5, 5 / 3))


def test_what_does_not_train_stays():
    plain, fast = (forecast.forecast(seconds, 0.01, 0.1) for seconds in (0.2, 0.1))
    assert forecast.speedup(plain, fast) == pytest.approx((1.5, 1.5))


@pytest.mark.parametrize(
    "confirmed, parts",
    [
        ((0.21, 0.0, 0.02), []),
        ((0.40, 0.2, 0.02), ["loading"]),
        ((0.40, 0.0, 0.02), ["compute"]),
        ((0.40, 0.0, 0.22), ["between"]),
        ((0.40, 0.1, 0.12), ["loading", "between"]),
        ((0.12, 0.0, 0.02), ["compute"]),
    ],
)
def test_which_part_of_a_forecast_was_off(confirmed, parts):
    found = forecast.parts_off(forecast.forecast(0.18, 0.1, 0.02), forecast.Confirmed(*confirmed))
    assert sorted(part for part, _ in found) == sorted(parts)


@pytest.mark.parametrize("rate, is_proposed", [(10.24, False), (12.0, True)])
def test_other_workers_are_proposed_only_if_loading_is_clearly_faster(rate, is_proposed):
    """The loader by itself is measured once, and two measurements differ by some percent."""
    loader = dict(workers=20, threaded=False)
    session = SimpleNamespace(
        only=["workers"],
        estimates=dict,
        baseline=lambda: dict(compute_seconds=0.05),
        facts=lambda: dict(device="cuda", cores=64, loaders=[loader], training=[0]),
        found=dict(
            loading=dict(rate=9.97, as_is=loader, enough=dict(workers=16, rate=rate)),
            watched=dict(steps=40, batches=1.0, whole=4.0, seconds=4.0),
        ),
    )
    names = confirm.Outlook(session).with_workers(("fused",))
    assert names == (("fused", "workers") if is_proposed else ("fused",))
    assert session.found["workers"] == (16 if is_proposed else 0)


def test_losses_of_no_runs_are_not_called_short():
    assert confirm.loss_of(("fused",), [], [])["why"] == "there are no whole runs of both"
    short = [dict(losses=[1.0] * 10)]
    assert confirm.loss_of(("fused",), short, short)["why"] == "runs made fewer than 50 steps"
