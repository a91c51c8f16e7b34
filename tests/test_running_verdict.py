"""How running.sh decides whether a technique gains, on made-up speeds."""

import math
import random

import pytest

import calibration
import ratios
import report
import running
import runs
from helpers import MACHINE
from records import Training, Verdict
from whatif import stats

OPTIONS = dict(model="conv11", width=16, image_size=32, batch_size=100, epochs=5, dataset="digits")


def runs_of(*speeds, start=0, step=2, noise=0.01):
    """Return runs at every `step` of time; their five epochs scatter by `noise`."""
    return [
        dict(
            number=start + step * i,
            images_per_second=speed,
            rates=[speed * (1 + part * noise) for part in (-1, -0.5, 0, 0.5, 1)],
        )
        for i, speed in enumerate(speeds)
    ]


def compare(runs, others):
    """Return the estimate as only these runs tell it."""
    return ratios.compare(runs, others, ratios.doubt_of([runs, others]))


def told(estimate):
    """Return the verdict of running.sh."""
    return running.VERDICTS[stats.verdict(estimate, ratios.CLEAR, stats.ADVISED)].value


@pytest.mark.parametrize(
    "speeds, others, settled, word",
    [
        ((150,), (100,), True, "faster"),
        ((50,), (100,), True, "slower"),
        ((110,), (100,), False, "not clear"),
        ((90,), (100,), False, "not clear"),
        ((110, 111), (100, 101), True, "faster"),
        ((90, 91), (100, 101), True, "slower"),
        ((105, 95), (100, 100), False, "not clear"),
        ((104, 108, 99, 102), (100, 100, 100, 100), False, "no difference"),
        ((103, 103, 103, 103), (100, 100, 100, 100), True, "faster"),
        ((100.2, 99.9, 100), (100, 100, 100), True, "no difference"),
        ((101.5, 101.5, 101.5, 101.5), (100, 100, 100, 100), True, "no difference"),
    ],
)
def test_verdicts(speeds, others, settled, word):
    found = compare(runs_of(*speeds, start=1), runs_of(*others))
    assert told(found) == word and ratios.is_settled(found) == settled


def test_each_run_is_compared_with_the_other_set_at_its_time():
    drifting = runs_of(100, 80, 60)
    found = ratios.compare(runs_of(135, 105, start=1), drifting, doubt=0.01)
    assert math.isclose(found.speedup, 1.5) and found.spread < 0.05
    assert [
        compare(runs_of(90, start=start), drifting).speedup for start in (-1, 0, 0.5, 3, 9)
    ] == [0.9, 0.9, 90 / 95, 90 / 70, 1.5]


def test_epochs_that_scatter_make_a_ratio_uncertain():
    steady, loose = (
        compare(runs_of(110, 110, start=1, noise=noise), runs_of(100, 100)).spread
        for noise in (0.01, 0.2)
    )
    assert steady < 0.02 < 0.1 < loose
    assert ratios.scatter([5]) == 0 and ratios.scatter([5, 5, 5]) == 0
    assert ratios.scatter([5.02, 5, 5.01, 2, 4.99]) < 0.005  # one odd window


def test_what_is_known_of_a_machine_decides_how_far_one_run_counts():
    """Nothing; two runs; seven, without and with a stall; a machine that jumps."""
    same = [100, 101, 100, 101, 100, 101, 100]
    nothing, two, seven, stall, jumps = (
        ratios.doubt_of(runs_of(*speeds) for speeds in sets)
        for sets in ([], [[100, 101]], [same], [[*same, 30], [100, 101]], [[100, 150]])
    )
    assert nothing is None and 0.18 < two < 0.2
    assert 0.03 < seven < 0.04 and 0.03 < stall < 0.04 and jumps > 1


def test_a_technique_that_does_nothing_is_rarely_called_a_gain():
    random.seed(1)
    words = []
    for _ in range(400):
        one, other = (
            runs_of(*(random.gauss(100, 3) for _ in range(4)), start=start) for start in (1, 0)
        )
        for n in (2, 3, 4):
            found = compare(one[:n], other[:n])
            if ratios.is_settled(found):
                break
        words.append(told(found))
    assert words.count("faster") < 0.08 * len(words)


# ------------------------------------------------------------------------------ a staircase
def session_of(
    speed_of,
    monkeypatch,
    runs=4,
    minutes=math.inf,
    epochs=5,
    seconds_of=lambda techniques, ran: 10,
    data_wait=0.01,
    table=running.Table,
    **details,
):
    """Return (a Table whose runs are made up, the list of sets it has run).

    `speed_of(techniques, number)` gives images/s of a run, `seconds_of(techniques, ran)` how long
    it takes.
    """
    ran, clock = [], [0]

    def made_up(techniques, options, folder, processes, check, server):
        speed, seconds = speed_of(techniques, len(ran)), seconds_of(techniques, ran)
        ran.append(" ".join(techniques))
        clock[0] += seconds
        epoch = dict(images_per_second=speed, seconds=1000 / speed, data_wait=data_wait)
        number = int(options[options.index("--epochs") + 1])
        return (
            "ok",
            0,
            dict(
                epochs=[epoch] * number,
                options=OPTIONS,
                images_per_second=speed,
                train_seconds=1,
                val_top1=0.9,
                warmup_seconds=1,
                peak_memory_bytes=None,
                lines=[seconds / 5 * i for i in range(1, number + 1)],
                wall_seconds=seconds,
            )
            | details,
        )

    monkeypatch.setattr(running, "run", made_up)
    monkeypatch.setattr(running, "options_of", lambda techniques, options: options)
    monkeypatch.setattr(running.time, "monotonic", lambda: clock[0])
    common = dict(machine=MACHINE, processes=1, left_out={}, date="", command="")
    session = table([], epochs, runs, minutes, 60 * minutes, None, common)
    session.attempt("single", "plain", [])
    return session, ran


def climb(session, *names):
    best = session.climb([("compute", [name]) for name in names], [])
    return best, {row.column: row for row in session.rows}


GAINS = dict(good=1.5, little=1.04, nothing=1, bad=0.6)


def product_of(gains, noise=(1,)):
    """Return a speed_of: 100 times the gains of a set's techniques; runs differ by `noise`."""
    return lambda names, number: (
        100 * noise[number % len(noise)] * math.prod(gains[name] for name in names)
    )


def test_one_run_is_enough_where_runs_do_not_differ(monkeypatch):
    session, ran = session_of(product_of(GAINS), monkeypatch)
    best, rows = climb(session, *GAINS)
    assert best.techniques == ["good", "little"]
    assert ran == ["", "", "good", "good little", "good little nothing", "bad good little"]
    session.confirm()  # two runs of what was kept
    assert ran[6:] == ["", "good little", "good"]
    assert [(name, row.n, row.verdict.value, row.kept) for name, row in rows.items() if row.n] == [
        ("+good", 2, "faster", True),
        ("+little", 2, "faster", True),
        ("+nothing", 1, "no difference", False),
        ("+bad", 1, "slower", False),
    ]
    assert [run["number"] for run in rows["plain"].runs] == [1, 2, 7]
    assert report.warning(session.rows) == ""
    table = report.markdown(session.rows)
    assert "| +nothing | 156 | 1.56x ±0.02 | 1.00x ±" in table and " | no difference |" in table


def test_by_turns_until_it_is_settled(monkeypatch):
    gains = dict(slow=0.8, equal=1, near=0.99, large=1.15)
    session, ran = session_of(product_of(gains, (1, 1.03, 0.98)), monkeypatch)
    best, rows = climb(session, *gains)
    # `equal` seems to gain on top of `large` once; the baseline runs along the way
    assert ran[:8] == ["", "", "slow", "equal", "near", "large", "equal large", ""]
    assert ran[8:] == [f"equal large{more}" for more in (" near", " slow", "", " near")]
    session.confirm()
    # each row stands below the row that it was added to
    assert [(row.column, report.verdict(row)) for row in session.rows[1:]] == [
        ("+slow", "slower"),
        ("+equal", "tried again"),
        ("+near", "tried again"),
        ("+large", "kept"),
        ("+equal", "kept, no difference"),
        ("+near", "slower"),
        ("+slow", "slower"),
    ]
    assert best is session.rows[5] and report.fastest(session.rows) is session.rows[4]
    # what is not settled runs again, beside the set that it was added to
    assert session.rows[5].n == 4 and ran[-2:] == ["equal large", "large"]


def test_what_was_kept_and_gains_no_longer_says_so(monkeypatch):
    """`lucky` was fast in its first run only."""
    session, ran = session_of(
        lambda names, number: 110 if names and number < 3 else 100, monkeypatch
    )
    _, rows = climb(session, "lucky")
    session.confirm()
    assert ran == ["", "", "lucky", *["", "lucky"] * 3]
    assert rows["+lucky"].kept and rows["+lucky"].ratio == 1
    assert report.verdict(rows["+lucky"]) == "kept, no difference"
    assert report.color("kept, no difference") != report.color("kept")


def test_ratios_to_the_same_run_are_not_independent():
    four = runs_of(110, 110, 110, 110, start=1, step=0.1)
    apart, shared = (
        ratios.compare(four, others, doubt=0.1).spread
        for others in (runs_of(100, 100, 100, 100, start=0.95, step=0.1), runs_of(100))
    )
    assert math.isclose(apart, 1.1 * 0.1 / 2) and math.isclose(shared, 1.1 * 0.1 * (5 / 8) ** 0.5)


def test_few_sets_keep_what_does_nothing(monkeypatch):
    """Eight techniques that do nothing, where runs differ by 1 %: few seem to gain."""
    kept = []
    for seed in range(40):
        noise = random.Random(seed)
        session, _ = session_of(lambda *_: 100 * math.exp(noise.gauss(0, 0.01)), monkeypatch)
        climb(session, *"abcdefgh")
        session.confirm()
        kept += [report.verdict(row) for row in session.rows if row.kept]
    assert len(kept) < 0.1 * 40 * 8 and kept.count("kept") < 0.02 * 40 * 8


def test_time_that_is_left_goes_into_more_runs(monkeypatch):
    table = running.TimedTable
    session, ran = session_of(product_of(GAINS), monkeypatch, minutes=3, table=table)
    _, rows = climb(session, *GAINS)
    session.confirm()
    # the set with fewer runs of each pair, the least sure pair first
    assert sorted(ran[6:]) == sorted(["good little", "good"] * 3 + [""] * 2)
    assert [rows[name].n for name in ("+good", "+little", "+bad")] == [4, 4, 1]


def test_in_the_end_each_row_is_judged_by_all_runs(monkeypatch):
    """The machine gets 2 % slower with each run."""
    session, ran = session_of(
        lambda names, number: 0.98**number * product_of(GAINS)(names, 0), monkeypatch
    )
    _, rows = climb(session, "good", "bad")
    assert math.isclose(rows["+bad"].ratio, 0.6 * 0.98)
    session.confirm()
    session.close()
    assert ran == ["", "", "good", "bad good", "", "good", ""]
    assert math.isclose(rows["+bad"].ratio, 0.6, rel_tol=0.001)


@pytest.mark.parametrize("status", ["fail", "skip"])
def test_a_later_run_that_does_not_end_well_is_told(status, monkeypatch, tmp_path):
    session, _ = session_of(product_of(GAINS), monkeypatch)
    climb(session, "good")
    monkeypatch.setattr(
        running, "run", lambda *_: (status, 1, {"error": "RuntimeError: no memory", "log": "a.log"})
    )
    session.confirm()
    session.repeat(session.rows[0])
    table, why = report.markdown(session.rows), f"{status.upper()}: RuntimeError: no memory"
    assert f"a later run: {why} (log: a.log)" in table
    assert table.startswith(f"**A later run of the baseline did not end well** ({why}")
    monkeypatch.setattr(runs.signal, "signal", lambda *_: None)
    # the children of this process are those that other tests fork
    monkeypatch.setattr(runs.psutil.Process, "children", lambda *_, **__: [])
    with pytest.raises(SystemExit) as end:
        runs.conclude(session.rows, report.write, tmp_path / "running", None)
    assert end.value.code == (status == "fail")


def test_a_baseline_that_was_disturbed(monkeypatch):
    """Its first run is slow: what does nothing is not kept, and the table tells that it moved."""
    session, ran = session_of(lambda _, number: 20 if number == 0 else 100, monkeypatch)
    best, rows = climb(session, "nothing", "either")
    assert best is session.rows[0] and rows["+nothing"].verdict is Verdict.NO_DIFFERENCE
    assert session.rows[0].images_per_second == 100
    assert "it trained 20 images/s and then 100" in report.warning(session.rows)
    # a machine that gets slower bit by bit spoils nothing
    session, ran = session_of(
        lambda names, number: (150 if names else 100) * 0.98**number, monkeypatch
    )
    best, rows = climb(session, "good")
    assert best.techniques == ["good"] and abs(rows["+good"].ratio - 1.5) < 0.05
    assert report.warning(session.rows) == ""


def test_first_tries_come_before_second_runs(monkeypatch):
    names = ["a", "b", "c", "d"]
    session, ran = session_of(lambda techniques, _: 100 + len(techniques), monkeypatch, minutes=1.7)
    climb(session, *names)
    assert ran == ["", "", *names, "", "a"]
    session, ran = session_of(lambda *_: 100, monkeypatch, runs=1)
    climb(session, *names)
    assert ran == ["", *names]


def test_what_was_left_out_is_tried_on_a_faster_set_before_that_runs_again(monkeypatch):
    """amp gains nothing until the model is compiled, and time is short."""

    def speed_of(names, number):
        return (
            100
            * (1.3 if "cache" in names else 1)
            * (
                {2: 2, 1: 1.3}.get(len({"amp", "compile"} & {*names}), 1)
                if "compile" in names
                else 1
            )
        )

    session, ran = session_of(speed_of, monkeypatch, minutes=1.9)
    best, _ = climb(session, "cache", "amp", "compile", "fused")
    assert ran[:4] == ["", "", "cache", "amp cache"]
    assert ran[4:] == ["cache compile", "amp cache compile", "amp cache compile fused"]
    assert best.techniques == ["amp", "cache", "compile"]


def test_while_steps_wait_loading_comes_first(monkeypatch):
    """What waits for data cannot show what other techniques gain."""
    gains = dict(fast=1.3, cache=1.2, slow=0.9)
    session, ran = session_of(product_of(gains), monkeypatch, data_wait=0.4)
    session.climb([("compute", ["fast"]), ("data", ["cache"]), ("compute", ["slow"])], [])
    assert ran[:5] == ["", "", "cache", "cache fast", "cache fast slow"]


def test_a_list_is_tried_to_its_end_on_each_set(monkeypatch):
    """cache and DALI gain nothing until the steps are faster; then DALI gains more."""

    def speed_of(names, number):
        return min(
            100 * (2 if "fast" in names else 1),
            180 if "DALI" in names else 130 if "cache" in names else 120,
        )

    session, ran = session_of(speed_of, monkeypatch)
    best = session.climb([("data", ["cache", "DALI"]), ("compute", ["fast"])], [])
    assert ran == ["", "", "cache", "DALI", "fast", "cache fast", "DALI fast"]
    assert best.techniques == ["DALI", "fast"]
    assert [report.verdict(row) for row in session.rows if row.on == ["fast"]] == [
        "gains less",
        "kept",
    ]


def test_what_gains_in_its_first_run_is_kept_and_the_table_says_how_sure_that_is(monkeypatch):
    noise = 1, 1.04, 0.98
    session, ran = session_of(product_of(dict(a=1.1, b=1), noise), monkeypatch, minutes=0.9)
    best, rows = climb(session, "a", "b")
    assert ran == ["", "a", "a b"] and best is rows["+a"]
    assert [report.verdict(rows[name]) for name in ("+a", "+b")] == ["kept, ran once", "ran once"]
    session.deadline += 100
    session.confirm()
    assert report.verdict(best) == "kept" and best.n > 1


def test_a_run_is_given_up_when_it_takes_far_longer_not_when_it_stalls(monkeypatch):
    session, _ = session_of(lambda *_: 100, monkeypatch)  # the baseline took 10 s

    def judged(lines, until, message):
        def stalled(techniques, options, folder, processes, check, server):
            check(lines, until)
            with pytest.raises(runs.GiveUp, match=message):
                check(lines, until + 1)
            return "skip", 0, {"error": ""}

        monkeypatch.setattr(running, "run", stalled)
        assert session.measure(["a"])[0] == "skip"

    judged([], 330, "given up after 331 s, in epoch 1 of 5")  # three times 10 s, and five minutes
    judged([200], 224, "given up after 225 s, in epoch 2 of 5")  # three times 8 s after the first
    # a minute less those 10 s, and 15 s for the baseline's last run
    session, _ = session_of(lambda *_: 100, monkeypatch, minutes=1)
    judged([], 35, r"time: cut off after 36 s, so that all fits into 1 minutes \(--minutes\)")


# ------------------------------------------------------------------------------ a quick table
QUICK = dict(cache=1.2, channels_last=1.36, amp=1.86, compile=1.35, fused=1.05)


def quick_session(monkeypatch, minutes, seed=1, scatter=0.01, **more):
    """Return (a TimedTable, the sets it has run) as on an H100; compile takes a minute once."""
    noise, product = random.Random(seed), product_of(QUICK)

    def speed_of(techniques, number):  # what waits for data scatters most
        return product(techniques, 0) * noise.gauss(1, scatter * (1 if techniques else 3))

    def seconds_of(techniques, ran):
        if "compile" in techniques:
            return 15 if "compile" in " ".join(ran) else 60
        return 8 if "amp" in techniques else 10 if "cache" in techniques else 15

    return session_of(
        speed_of,
        monkeypatch,
        minutes=minutes,
        seconds_of=seconds_of,
        table=running.TimedTable,
        **more,
    )


def finish(session, names):
    """Run a staircase to its end; return its rows by column."""
    _, rows = climb(session, *names)
    session.confirm()
    session.close()
    return rows


def test_a_quick_table_has_verdicts_in_its_five_minutes(monkeypatch):
    spreads = []
    for seed in range(20):
        session, ran = quick_session(monkeypatch, 4.5, seed)  # 15 s each to calibrate, to close
        rows = finish(session, QUICK)
        assert running.time.monotonic() <= session.deadline
        assert ran[:4] == ["", "", "cache", "cache channels_last"]
        best = "amp cache channels_last"
        assert ran[4:7] == [best, f"{best} compile", f"{best} compile fused"]
        assert all(rows[f"+{name}"].kept for name in QUICK)
        assert all(rows[f"+{name}"].verdict is Verdict.FASTER for name in [*QUICK][:4])
        assert sum("compile" in names for names in ran) >= 5  # of two sets
        assert min(rows[f"+{name}"].n for name in QUICK) >= 2 and rows["+cache"].n >= 3
        spreads += [rows[f"+{name}"].spread / rows[f"+{name}"].ratio for name in QUICK]
    assert sum(spread <= 0.05 for spread in spreads) > 0.9 * len(spreads)


def test_of_a_quick_table_what_is_open_runs_again_too(monkeypatch):
    """`equal` is settled after one run, because all runs until then are alike; later it is not."""
    noise, gains = random.Random(1), product_of(dict(large=1.5, equal=1))
    session, ran = session_of(
        lambda names, number: gains(names, 0) * (1 if number < 4 else noise.gauss(1, 0.02)),
        monkeypatch,
        minutes=30,
        table=running.TimedTable,
    )
    _, rows = climb(session, "large", "equal")
    assert ran == ["", "", "large", "equal large"] and rows["+equal"].settled
    session.confirm()
    assert not rows["+equal"].kept and rows["+equal"].n == rows["+large"].n == 4


def test_of_a_quick_table_the_least_sure_pair_runs_until_each_set_has_its_runs(monkeypatch):
    session, ran = quick_session(monkeypatch, 30)
    rows = finish(session, QUICK)
    assert {row.n for name, row in rows.items() if name != "plain"} == {4}
    assert len(ran) == 5 * 4 + 5  # and the baseline, with its last run
    session, ran = quick_session(monkeypatch, 30, runs=1)
    finish(session, QUICK)
    assert len(ran) == 1 + 5 + 1


def test_a_quick_table_starts_no_run_that_does_not_fit(monkeypatch):
    """A set counts with its own seconds, without those of compiling."""
    session, ran = quick_session(monkeypatch, 30)
    _, rows = climb(session, *QUICK)
    left = session.time_left()
    session.deadline -= left - 17
    assert session.fits(rows["+amp"]) and session.fits(rows["+compile"])
    session.deadline -= 7
    assert session.fits(rows["+amp"]) and not session.fits(rows["+compile"])
    before = len(ran)
    session.confirm()
    assert ran[before:] == ["amp cache channels_last"]


def test_a_later_run_that_fails_is_not_tried_again_in_a_quick_table(monkeypatch):
    session, ran = quick_session(monkeypatch, 30)
    _, rows = climb(session, *QUICK)
    measure = session.measure

    def failing(techniques):
        found = measure(techniques)
        return ("fail", 1, {"error": "no memory"}) if "fused" in techniques else found

    monkeypatch.setattr(session, "measure", failing)
    before = len(ran)
    session.confirm()
    assert sum("fused" in names for names in ran[before:]) == 1
    assert rows["+fused"].failed and rows["+compile"].n == 4


@pytest.mark.parametrize(
    "step, images, options, ran, found",
    [
        (0.2, 1000, [], [5], (0.2, 10, 2, 3)),
        (0.01, 5050, [], [5, 40], (0.01, 50, 2, 3)),
        (0.01, 300, [], [5], (0.01, 3, 2, 3)),  # shorter than five steps
        (0.01, 5000, ["--steps", "9", "--steps=30"], [5, 30], (0.01, 30, 2, 3)),
    ],
)
def test_some_steps_of_the_baseline_are_timed(step, images, options, ran, found, tmp_path):
    taken = []

    def made_up(words):
        taken.append(int(words[-1]))
        (tmp_path / "log").write_text(f"train: 4 parameters, {images:,} images, 2 classes, cpu\n")
        seconds = step * min(taken[-1], images // 100)
        return (
            "ok",
            0,
            dict(
                options=dict(batch_size=100),
                epochs=[dict(seconds=9), dict(seconds=seconds, val_seconds=2)],
                lines=[20, 20 + seconds + 2 + 3],
            ),
        )

    told = calibration.calibrate(made_up, options, tmp_path / "log")
    assert taken == ran and told == pytest.approx(found)


def test_a_calibration_that_fails_leaves_all_as_it_is(tmp_path, capsys):
    (tmp_path / "log").write_text("")
    for answer in (
        ("skip", 1, {"error": "no package"}),
        ("fail", 1, {"error": "none"}),
        ("ok", 0, dict(epochs=[dict(seconds=1)], lines=[1, 2])),
    ):
        assert calibration.calibrate(lambda _: answer, [], tmp_path / "log") is None
    (tmp_path / "log").write_text("train: 1 parameters, 999 images, 2 classes, cpu")
    answers = iter(
        [
            ("ok", 0, dict(options=dict(batch_size=9), lines=[1, 3], epochs=[dict(seconds=0.1)])),
            ("skip", 0, {}),
        ]
    )
    assert calibration.calibrate(lambda _: next(answers), [], tmp_path / "log") == pytest.approx(
        (0.02, 111, 0, 1.9)
    )
    given_up = calibration.calibrate(lambda _: ("skip", 0, {}), [], tmp_path / "log")
    steps, epochs, part, told = calibration.fit(given_up, 3, 5, True)
    assert (steps, epochs, part) == (
        5,
        3,
        1,
    ) and "a run would take too much of the 5 minutes" in told
    with pytest.raises(SystemExit) as end:
        calibration.calibrate(lambda _: ("skip", 2, {"error": "no data"}), [], tmp_path / "log")
    assert end.value.code == 2 and capsys.readouterr().err == "no data\n"


# ------------------------------------------------------------------------------ pay-back
def test_when_a_warm_up_pays_back():
    def row(speed, warmup, *techniques, **details):
        epoch = dict(images_per_second=speed, seconds=1000 / speed, data_wait=0)
        return Training(
            row="staircase",
            techniques=techniques,
            epochs=[epoch] * 5,
            options=OPTIONS,
            images_per_second=speed,
            warmup_seconds=warmup,
            val_top1=0.9,
            column="".join(f"+{name}" for name in techniques),
            **details,
        )

    base, compiled = row(100, 10), row(200, 30, "compile", on=[], kept=True)
    # 10 steps are an epoch; then each step saves half a second of 20
    assert report.pays_back(compiled, base) == "50 steps"
    assert report.pays_back(row(200, 9, "amp"), base) == "the first epoch"
    assert report.pays_back(row(101, 9, "amp"), base) == "never"
    assert (report.whole(base), report.whole(compiled)) == (50, 50)
    slow = row(300, 60, "amp", "compile", on=["compile"], kept=True)
    text = "\n".join(report.staircase([base, compiled, slow]))
    assert "Fastest per step, of what was kept: `./compose.sh amp compile > my_train.py`" in text
    assert (
        "- Fastest over the whole of 5 epochs, with warm-up:\n  `src/train.py`, the baseline,\n"
        "  50.0 s without validation; the fastest per step takes 73.3 s"
    ) in text
    compiled.update(ratio=0.95, spread=0.02)  # as more runs told
    text = "\n".join(report.staircase([base, compiled, slow]))
    assert "my_train.py` (faster in its first run only: compile)" in text
    # of the baseline the median warm-up counts, of others the first, which may compile
    seconds = [
        dict(number=i, images_per_second=100, rates=[100], warmup_seconds=each)
        for i, each in enumerate((30, 4, 5))
    ]
    assert report.warmup(row(100, 30, runs=seconds)) == 5
    assert report.warmup(row(100, 30, "compile", runs=seconds)) == 30
