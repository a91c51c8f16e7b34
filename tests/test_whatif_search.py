"""The search of whatif, on tables of true speedups with noise, and a fake clock."""

import itertools
import math
import random

import pytest

from whatif import search, stats
from whatif.search import Search, Step, Turn
from whatif.stats import Estimate, Verdict, Window

GPU = [
    "amp bfloat16",
    "amp float16",
    "channels_last",
    "fused",
    "cudnn",
    "tf32",
    "compile",
    "compile reduce-overhead",
    "batch 2",
]
CPU = ["amp bfloat16", "channels_last", "fused", "compile"]


def resnet(one):
    """Return the speedup of a set of GPU, about as measured with ResNet-50."""
    has = {word for name in one for word in name.split()}
    images = "channels_last" in has
    amp = {"bfloat16": 1.5 if images else 1.11, "float16": 1.85 if images else 1.36}
    return math.prod(
        [
            *(gain for name, gain in amp.items() if name in has),
            (1.05 if "compile" in has else 1.42) if images else 1,
            {"compile": 1.67}.get("compile" if "compile" in has else "", 1),
            1.002 if "reduce-overhead" in has else 1,
            1.05 if "batch" in has else 1,
        ]
    )


def product(**gains):
    return lambda one: math.prod(gains.get(name.split()[0], 1) for name in one)


def found_by(one, true, noise=0.002, seed=0, failed=(), stalls=0.0, seconds=math.inf, drift=0.0):
    """Let a Search measure until it is done or time ends.

    A window takes 0.75 s, a set that is compiled for the first time 25 more. Return (its best
    set, the estimates, [(moment, set) of the first window of each], seconds, windows of sets).
    """
    draw, windows, begun, now = random.Random(seed), [], {}, 0.0

    def take(techniques):
        nonlocal now
        if techniques not in begun:
            now += 25 * any(name.startswith("compile") for name in techniques)
            begun[techniques] = now
        now += 0.75
        rate = true(techniques) * draw.lognormvariate(0, noise) * (1 + drift * now)
        windows.append(Window(techniques, rate * (0.5 if draw.random() < stalls else 1), now))

    take(())
    while now < seconds and (wanted := one.wanted(stats.estimates(windows), failed)):
        assert len(windows) < 3000 and len({*wanted}) == len(wanted) and () not in wanted
        draw.shuffle(wanted)
        for techniques in wanted:
            take(techniques)
            take(())
    estimates = stats.estimates(windows)
    del begun[()]
    return one.best(estimates, failed), estimates, begun, now, len(windows) // 2


# ------------------------------------------------------------------------------ the right set
def test_on_a_gpu_the_sum_is_reached_within_two_minutes():
    one = Search(GPU)
    best, estimates, begun, seconds, n = found_by(one, resnet)
    assert best == ("amp float16", "channels_last", "compile")
    singles = [(name,) for name in one.cheap]
    assert list(begun)[:6] == sorted(singles, key=begun.get)
    assert begun["amp float16", "channels_last"] < 75 and begun[best] + 9 < 120
    # every row has its verdict after six windows, and no more were spent
    assert {estimates[row].n for row in estimates} == {6} and n == 6 * len(estimates)
    assert not any(one.verdict(row, estimates) is Verdict.OPEN for row in estimates)
    assert sum("compile" in " ".join(row) for row in estimates) <= search.MOST_COSTLY
    shown = {(name,) for name in GPU if name not in one.costly}
    assert shown <= {*estimates} and not {*best} & {"batch 2"}


@pytest.mark.parametrize("noise, stalls", [(0.02, 0), (0.02, 0.03), (0.06, 0.03)])
def test_on_a_cpu_with_noise_and_stalls(noise, stalls):
    true, right, windows = product(amp=0.5, channels_last=1.3, fused=1, compile=0.8), 0, []
    for seed in range(10):
        one = Search(CPU, margin=stats.MARGIN_CPU)
        best, estimates, begun, seconds, n = found_by(one, true, noise, seed, stalls=stalls)
        right += best == ("channels_last",)
        windows.append(n)
        assert estimates["amp bfloat16",].n == 6  # a verdict that is clear gets no more windows
        assert not any("amp bfloat16" in row for row in estimates if len(row) > 1)
    assert right >= 9 and sorted(windows)[5] <= {0.02: 42, 0.06: 70}[noise]


def test_drift_does_not_matter():
    best, *_ = found_by(Search(GPU), resnet, drift=0.01, noise=0.005, seed=4)
    assert best == ("amp float16", "channels_last", "compile")


def test_a_technique_that_gains_only_on_top_of_others_is_found():
    """fused does nothing alone; with amp and compile the optimizer is a tenth of a step."""

    def true(one):
        gain = product(amp=2, compile=1.5)(one)
        return gain * (1.1 if "fused" in one and gain > 2 else 1)

    best, estimates, *_ = found_by(Search(["amp", "fused", "cudnn", "compile"]), true)
    assert best == ("amp", "fused", "compile")
    # first all that is left, then what is in it, one by one, and no more once nothing is missing
    assert ("amp", "fused", "cudnn", "compile") in estimates
    assert ("amp", "cudnn", "compile") not in estimates


def test_what_does_nothing_is_not_kept():
    one = Search(["amp", "channels_last", "fused", "tf32"])
    best, estimates, begun, *_ = found_by(one, product(amp=1.5, channels_last=1.012), 0.001)
    assert best == ("amp",) and one.verdict(("channels_last",), estimates) is Verdict.FASTER
    assert list(begun)[4:] == [("amp", "channels_last", "fused", "tf32")]  # once, all together
    assert found_by(one, product())[0] == () and found_by(one, product(amp=0.5, fused=0.9))[0] == ()


def test_the_right_one_of_a_kind():
    one = Search(["amp bfloat16", "amp float16", "compile", "compile reduce-overhead"])

    def true(techniques):
        return math.prod(
            {
                "amp bfloat16": 1.5,
                "amp float16": 1.6,
                "compile": 1.2,
                "compile reduce-overhead": 1.4,
            }[name]
            for name in techniques
        )

    best, estimates, *_ = found_by(one, true)
    assert best == ("amp float16", "compile reduce-overhead")
    assert all(len({*map(search.kind, row)}) == len(row) for row in estimates)
    assert ("amp bfloat16", "compile") not in estimates


# ------------------------------------------------------------------------------ when things fail
@pytest.mark.parametrize(
    "failed, right",
    [
        ([("amp float16",)], ("amp bfloat16", "channels_last", "compile")),
        ([("compile",), ("compile reduce-overhead",)], ("amp float16", "channels_last")),
        ([("amp float16", "channels_last")], ("amp bfloat16", "channels_last", "compile")),
        ([(name,) for name in GPU], ()),
    ],
)
def test_sets_of_techniques_that_failed_are_out(failed, right):
    best, estimates, *_ = found_by(Search(GPU), resnet, failed=failed)
    assert best == right
    assert not any({*bad} <= {*row} for bad in failed for row in estimates)


def test_a_set_that_fails_later_is_out_at_once():
    """It ran out of memory after some of its windows."""
    one, some = Search(GPU), {(name,): resnet((name,)) for name in GPU}
    estimates = {
        row: stats.estimate([speed + i / 1e4 for i in range(6)]) for row, speed in some.items()
    }
    assert one.wanted(estimates) == [("amp float16", "channels_last")]
    estimates["amp float16", "channels_last"] = stats.estimate([2.6, 2.6])
    assert one.best(estimates) == ("compile",)  # until the sum has its interval
    assert one.wanted(estimates, [("amp float16", "channels_last")]) != one.wanted(estimates)
    assert one.best(estimates, [(name,) for name in one.costly]) == ("channels_last",)


@pytest.mark.parametrize("seconds", [1, 20, 75, 90, 125, 180])
def test_when_time_ends_early_the_best_that_is_known_counts(seconds):
    best, estimates, begun, *_ = found_by(Search(GPU), resnet, seconds=seconds)
    known = [row for row, found in estimates.items() if found.n >= 6 and "batch 2" not in row]
    assert best in [(), *known] and (not best or stats.gains(estimates[best]))
    assert resnet(best) >= max(map(resnet, known), default=1) / 1.02


# ------------------------------------------------------------------------------ windows
def test_what_is_hopeless_does_not_hold_up_the_sum_and_gets_its_verdict_later():
    one = Search(CPU, margin=stats.MARGIN_CPU)
    _, estimates, *_ = found_by(one, product(amp=0.3, channels_last=1.5, compile=1.2))
    assert one.verdict(("amp bfloat16",), estimates) is Verdict.SLOWER
    early = {
        (name,): stats.estimate([0.3, 0.31, 0.3] if "amp" in name else [1.0] * 3)
        for name in CPU
        if name != "compile"
    }
    assert one.wanted(early) == [("channels_last",), ("fused",)]


def test_more_windows_go_only_where_the_verdict_is_open():
    wide, narrow = [0.85, 0.9, 1, 1.1, 1.2, 1.3], [0.99, 1, 1, 1, 1, 1.01]
    one = Search(["a", "b", "c"])
    estimates = {
        ("a",): stats.estimate(wide),
        ("b",): stats.estimate(narrow),
        ("c",): stats.estimate(narrow),
    }
    assert one.wanted(estimates) == [("a",)]
    estimates["a",] = stats.estimate(narrow)
    assert one.wanted(estimates) == [] and one.best(estimates) == ()


def test_a_set_is_kept_only_if_it_is_clearly_faster_than_without_its_last_technique():
    """Both are clearly faster than the script as it is."""
    one = Search(["a", "b"])
    estimates = {
        ("a",): stats.estimate([1.45, 1.5, 1.5, 1.5, 1.5, 1.55]),
        ("b",): stats.estimate([1.03, 1.03, 1.03, 1.03, 1.03, 1.04]),
        ("a", "b"): stats.estimate([1.4, 1.5, 1.55, 1.55, 1.6, 1.7]),
    }
    assert one.best(estimates) == ("a",)
    assert one.wanted(estimates) == [("a", "b"), ("a",)]  # both get windows until it is clear
    estimates["a", "b"] = stats.estimate([1.6, 1.62, 1.6, 1.61, 1.6, 1.63])
    assert one.best(estimates) == ("a", "b")


def test_the_same_estimates_give_the_same_answer():
    one, two = Search(GPU), Search(GPU)
    _, estimates, *_ = found_by(one, resnet, seconds=90)
    shuffled = dict(random.Random(1).sample(sorted(estimates.items()), len(estimates)))
    assert one.wanted(estimates) == one.wanted(estimates) == two.wanted(shuffled)
    assert one.best(estimates) == two.best(shuffled)


def test_compile_is_tried_a_handful_of_times():
    """Even if the best set without it changes."""
    names = [*"abcde", "compile", "compile max-autotune"]
    for seed in range(3):
        _, estimates, *_ = found_by(
            Search(names),
            lambda one: math.prod({"compile": 1.1}.get(name, 1.03) for name in one),
            0.02,
            seed,
        )
        compiled = [row for row in estimates if any(name.startswith("compile") for name in row)]
        assert 2 < len(compiled) <= search.MOST_COSTLY


# ------------------------------------------------------------------------------ what comes next
def test_what_is_due_on_top_of_a_set():
    """Of two kinds, x and y; `a` is in the set, so its kind x is out."""
    kinds = dict(zip("abcdefghi", "xxyzuvwrr"))
    gain, loss, none = (Estimate(ratio, ratio - 0.1, ratio + 0.1, 4) for ratio in (1.4, 0.7, 1.03))
    steps = {
        "b": Step((), gain),
        "d": Step((), loss),
        "e": Step((), gain),
        "f": Step(("a",), gain),
        "g": Step(("a",), none),
        "h": Step(("a",), loss, is_settled=True),
        "a": Step((), gain),
    }
    told = search.due(("a",), list("abcdefghi"), steps, kinds.get)
    assert told == [
        (Turn.REST, "i"),
        (Turn.GAINS, "e"),
        (Turn.GAINS, "f"),
        (Turn.NEW, "c"),
        (Turn.AGAIN, "d"),
        (Turn.OPEN, "g"),
    ]
    assert search.due(("a",), list("abcdefghi"), steps, kinds.get, first="cdg", last="e") == [
        (Turn.NEW, "c"),
        (Turn.REST, "i"),
        (Turn.GAINS, "f"),
        (Turn.GAINS, "e"),
        (Turn.AGAIN, "d"),
        (Turn.OPEN, "g"),
    ]
    steps["c"], steps["i"] = Step(failed=True), Step(("a",), rate=90.0)
    assert [name for _, name in search.due(("a",), list("aci"), steps, kinds.get)] == ["i"]
    orders = {
        tuple(search.due(("a",), names, steps, kinds.get)[-1])
        for names in itertools.permutations("adg")
    }
    assert orders == {(Turn.OPEN, "g")}
