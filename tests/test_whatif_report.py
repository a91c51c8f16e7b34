"""What whatif prints, and what it writes to the file of --json, of a result."""

import dataclasses
import json
import math
import sys

import pytest

from helpers import AMP_OPTION
from whatif import report
from whatif.measured import Measured
from whatif.parts import of_watched, only_steps
from whatif.report import FASTER, OPEN, SAME, SLOWER, Result, Row

LOADER = dict(
    at="train.py:20",
    text="loader = DataLoader(data, 32)",
    library="",
    workers=0,
    pin=False,
    length=100,
    persistent=False,
    repeats=False,
    batch=32,
    can_grow=True,
    name="loader",
    method="fork",
    shuffles=False,
    arguments={},
    driver="",
    entry={},
)
MODEL = dict(
    name="model",
    local="model",
    kind="Net",
    at="train.py:31",
    text="output = model(images)",
    library="",
    statement="output = model(images)",
    target="output",
    is_tensor=True,
    role="trains",
    above=dict(at="train.py:22", text="optimizer = SGD(model.parameters())"),
    is_wrapped=False,
    bare="",
    before=None,
    own_to=False,
    device="cuda",
    autocast="",
    driver="",
    entry={},
    made={},
    calls=["train.py:31"],
)
OPTIMIZER = dict(
    kind="SGD",
    at="train.py:22",
    text="optimizer = SGD(model.parameters())",
    library="",
    fused=None,
    foreach=None,
    can_fuse=True,
    name="optimizer",
    arguments={},
    driver="",
    entry={},
)
FACTS = dict(
    models=[MODEL],
    optimizers=[OPTIMIZER],
    loaders=[LOADER],
    training=[0],
    device="cuda",
    seen=["image", "convolution", "no set_epoch"],
    gpu="H100",
    cores=16,
    processes=1,
    torch="2.14.1",
    python="3.11",
    capability=9,
    memory=80e9,
    peak=3e9,
    busy=0.035,
    kernels={"products": 0.7, "memory": 0.3},
    lines=[("train.py:40", "print(loss.item())")],
)
BASELINE = dict(rate=812.4, n=24, memory=3.21e9, step_seconds=0.0394, data_time=0.03)
BEST = ("amp bfloat16", "channels_last", "compile")


def result(**changes):
    return Result(
        "train.py",
        ["--epochs", "3"],
        "samples",
        FACTS,
        BASELINE,
        **dict(
            dict(
                rows=[
                    Row(("amp bfloat16",), 1.52, 1.51, 1.54, 12, FASTER, memory=int(2.01e9)),
                    Row(("fused",), 1.001, 0.99, 1.01, 8, SAME),
                    Row(("cudnn",), 0.9, 0.88, 0.92, 6, SLOWER),
                    Row(("tf32",), 1.05, 0.9, 1.2, 6, OPEN, needs=40),
                    Row(("compile",), n=2, note="2 windows with a skipped step were thrown away"),
                    Row(BEST, 2.1, 2.08, 2.13, 10, FASTER),
                ],
                best=BEST,
                extra=dict(workers=8, times=2),
            )
            | changes
        ),
    )


def text_of(**changes):
    return report.text_of(result(**changes))


def test_a_baseline_that_changes_is_told():
    """As of a host whose speed changes while nothing else does."""

    def told(**more):
        one = dataclasses.replace(result(), baseline=BASELINE | more)
        return " ".join(report.text_of(one).split())

    assert "baseline:" not in told() and "baseline:" not in told(low=790, high=820)
    found = told(low=9512, high=12480)
    assert "eight of ten of its windows had 9,512 to 12,480 samples/s" in found


def test_the_windows_of_the_baseline_that_are_told_leave_out_the_ends():
    one = Measured({"fused"})
    one.windows = [dict(names=(), rate=rate, seconds=1, steps=1) for rate in range(1, 10)]
    assert one.baseline()["low"] is None  # too few
    one.windows += [dict(names=(), rate=rate, seconds=1, steps=1) for rate in (0.001, 9.5, 1e6)]
    found = one.baseline()
    assert 0.1 < found["low"] < 3 and 8 < found["high"] < 1e6


def test_the_table():
    lines = text_of().splitlines()
    assert lines[9] == "  compile: 2 windows with a skipped step were thrown away"
    table = [line.split("  ") for line in lines[1:9]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in table]
    assert cells == [
        ["set", "speedup (95 %)", "n", "GPU GB", "verdict"],
        ["baseline", "1", "24", "3.21", "812 samples/s, data time 3%"],
        ["amp bfloat16", "1.52x ±0.02", "12", "2.01", "faster"],
        ["fused", "1.00x ±0.01", "8", "-", "not significant"],
        ["cudnn", "0.90x ±0.02", "6", "-", "slower"],
        ["tf32", "1.05x ±0.15", "6", "-", "open: about 40 s more"],
        ["compile", "-", "2", "-", "open"],
        ["amp bfloat16 + channels_last + compile", "2.10x ±0.03", "10", "-", "faster"],
    ]
    assert len({line.index("verdict" if "verdict" in line else "812") for line in lines[1:3]}) == 1


@pytest.mark.parametrize(
    "low, high, shown",
    [
        (None, None, "1.05x"),
        (-math.inf, math.inf, "1.05x ±?"),
        (1, 1.2, "1.05x ±0.15"),
        (1.01, 1.2, "1.05x +0.15 -0.04"),
        (1.01, math.inf, "1.05x ±?"),
        (1.02, 1.09, "1.05x ±0.04"),
    ],
)
def test_intervals(low, high, shown):
    assert report.times(1.05, low, high) == shown


def test_reasons_stand_below_the_table():
    text = text_of(
        failed={("compile", "amp float16"): "CUDA out of memory", "batch": "CUDA out of memory"},
        excluded={"tf32": "this GPU has no TF32", "workers": "already there"},
        not_tried={"batch": "no time was left for it by turns (--minutes)"},
        by_turns=False,
        notes=["The script is FSDP."],
    )
    assert "\nFailed\n  compile + amp float16, batch: CUDA out of memory\n" in text
    assert (
        "\nNot possible, or there already\n  tf32: this GPU has no TF32\n  workers: already there\n"
    ) in text
    assert "Each set ran in a process of its own.\nThe script is FSDP.\n" in text
    none = text_of(rows=[], best=(), by_turns=False, notes=["The script is FSDP."])
    assert "Each set ran" not in none and "The script is FSDP." in none
    assert text.endswith("Not tried\n  batch: no time was left for it by turns (--minutes)")


def test_what_to_write_is_the_best_sets():
    text = text_of()
    _, advised = text.split("\nWhat to write\n")
    assert [line.strip() for line in advised.splitlines() if line[:3].strip()] == [
        *BEST,
        "Together, amp bfloat16 + channels_last + compile: 2.10x ±0.03",
    ]
    assert "\n  compile\n        above train.py:22  optimizer = SGD(model.parameters())\n" in text
    assert "What to write" not in text_of(best=())
    # it is said above why what is faster is not advised
    assert not {"Nothing", "Only"} & {line.split(" ")[0] for line in text_of(best=()).splitlines()}
    assert text_of(best=(), rows=[Row(("fused",), 1.1, 0.9, 1.3, 6, OPEN)]).endswith(
        "for certain as yet: give it more --minutes."
    )
    assert text_of(best=(), rows=[Row(("fused",), 1.0, 0.99, 1.01, 8, SAME)]).endswith(
        "Nothing is faster."
    )
    rest = dict(not_tried={"compile": "no time was left for it by turns (--minutes)"})
    assert "Nothing is faster for certain as yet: give it more --minutes.\n" in text_of(
        best=(), rows=[Row(("fused",), 1.0, 0.99, 1.01, 8, SAME)], **rest
    )
    assert "Only a larger batch is faster for certain as yet, which" in text_of(
        best=(), rows=[Row(("batch x2",), 1.9, 1.8, 2.0, 8, FASTER)], **rest
    )
    assert text_of(best=(), rows=[Row(("batch x2",), 1.9, 1.8, 2.0, 8, FASTER)]).endswith(
        "Only a larger batch is faster, which is another training."
    )


def test_an_option_of_the_script_is_the_advice():
    made = result(best=("amp bfloat16",))
    made.facts = FACTS | dict(options=[AMP_OPTION])
    assert "        your script has an option: --amp\n" in report.text_of(made)
    assert report.record(made)["options"] == {"amp bfloat16": ["--amp"]}


def test_where_the_first_seconds_went():
    spent = dict(began=6.0, next=0.5, steps=2.5, waiting=1.0, aside=0.0)
    text = text_of(parts=spent)
    assert (
        "\nWhere the script's first 10 s went\n  SSSSSSSSSSSSSSSSSSSSSSSSNN==========....\n"
        "  S start to the end of the first step 60%, N up to three more steps 5%, = steps 25%, "
        ". waiting for\n  data 10%, V validation, stalls, other work between steps 0%\n"
    ) in text
    assert report.record(result(parts=spent))["parts"] == spent
    assert "Where the script's" not in text_of()


def test_what_holds_it_back():
    text = text_of()
    assert "  The device: the GPU works in 89% of a step; a step takes 39.4 ms and its" in text
    assert "70% of the GPU's time goes into convolutions and products." in text.replace("\n ", "")
    assert "make the host wait for the GPU:\n    train.py:40  print(loss.item())\n" in text
    assert "train.py:20: a DataLoader without workers" in text
    assert "DistributedSampler without set_epoch" in text
    told = {
        "Data: ": (FACTS, BASELINE | dict(data_time=0.6)),
        "The host, which": (FACTS | dict(busy=0.01), BASELINE),
        "The host or the GPU; ": (FACTS | dict(busy=None), BASELINE),
        "The device's memory": (FACTS | dict(kernels={"memory": 0.9, "products": 0.1}), BASELINE),
        "The CPU, which computes": (FACTS | dict(device="cpu"), BASELINE),
        "Unknown": (FACTS, {}),
    }
    for begin, (facts, baseline) in told.items():
        assert report.held_back_by(facts, baseline).startswith(begin)
    # kept batches count where kernels were timed, not the slower first steps that were watched
    slow = BASELINE | dict(step_seconds=10 * BASELINE["step_seconds"])
    told = report.held_back_by(FACTS, slow | dict(compute_seconds=BASELINE["step_seconds"]))
    assert told.startswith("The device") and "a step takes 39.4 ms" in told
    assert report.held_back_by(FACTS, slow).startswith("The host")


def test_the_loader_of_the_script_may_pin_itself():
    loader = dict(as_is=dict(workers=2, pinned=True))
    row = dict(workers=2, rate=9.0, pinned=True)
    assert report.loader_row(row, loader).endswith("  9.0 batches/s  (as it is)")
    assert "as it is" not in report.loader_row(row | dict(workers=1), loader)


def test_loader_forecast_confirmation_and_losses():
    loader = dict(
        as_is=dict(workers=2, batch=32),
        notes=["OpenCV keeps 16 threads in each worker"],
        rows=[
            dict(workers=0, rate=1.0),
            dict(workers=2, rate=25.39, rough=True),
            dict(workers=4, rate=None, reason="RuntimeError: no"),
            dict(workers=8, rate=99.0, pinned=True),
        ],
        between=dict(as_is=3.2, persistent=0.05),
        summary="8 workers keep up",
        shares=[dict(what="decoding", share=0.61), dict(what="collating", share=0.2)],
        lines=[dict(at="data.py:9", text="image = Image.open(path)", share=0.5)],
    )
    text = text_of(
        loader=loader,
        forecast=[
            dict(techniques=BEST, speedup=1.9, low=None, high=None, how="longer"),
            dict(techniques=BEST[:1], speedup=1.5, low=1.2, high=1.8, how="range"),
            dict(techniques=BEST[:2], speedup=1.05, low=1.0496, high=1.0504, how="range"),
        ],
        confirmation=dict(
            techniques=BEST,
            speedup=1.7,
            low=1.65,
            high=1.76,
            n=4,
            confirmed=True,
            off="loading took 12 ms more",
            options=dict(words=["--amp", "--channels-last"], speedup=1.6, why=""),
        ),
        losses=[
            dict(
                techniques=BEST,
                changes=True,
                why="its mean loss 9 lies outside 1 to 2",
                culprit="compile",
            ),
            dict(techniques=BEST[:1], changes=None, why="losses could not be seen", culprit=""),
        ],
    )
    for line in (
        "  no workers           1.0 batches/s, 32.0 samples/s",
        "  2 workers            25.4 batches/s, 812 samples/s  (as it is, of few batches)",
        "  4 workers            RuntimeError: no",
        "  8 workers, pinned    99.0 batches/s, 3,168 samples/s",
        "  between epochs: 3.2 s, with persistent_workers=True 50 ms",
        "  A worker's time: decoding 61%, collating 20%",
        "     50%  data.py:9  image = Image.open(path)",
        "  8 workers keep up",
        "  OpenCV keeps 16 threads in each worker",
        "  amp bfloat16 + channels_last + compile: 1.90x (the longer of compute and loading)",
        "  amp bfloat16: 1.20x to 1.80x (loading and steps share the cores)",
        "  amp bfloat16 + channels_last: 1.05x (loading and steps share the cores)",
        "  by the script's own --amp --channels-last: 1.60x in one whole run",
        "  This finds a broken training, not a slightly worse one.",
    ):
        assert f"\n{line}\n" in text, line
    joined = " ".join(text.split())
    assert (
        "compile: 1.70x ±0.06 in whole runs with real loading (n=4). The forecast was off: "
        "loading took 12 ms more"
    ) in joined
    assert (
        "this changes the training: its mean loss 9 lies outside 1 to 2. Without compile it "
        "does not"
    ) in joined
    assert "amp bfloat16: it cannot be said whether it changes the training: losses" in joined
    text = text_of(
        confirmation=dict(
            techniques=BEST,
            speedup=None,
            low=None,
            high=None,
            n=0,
            confirmed=False,
            why="time was over",
            off="",
        )
    )
    assert "\nNot confirmed\n" in text and "compile: not confirmed; time was over" in text


def test_no_line_is_wide_and_a_stop_is_told():
    text = text_of(
        failed={"compile": "a long reason " * 20},
        stopped=True,
        seconds=dict(start=11.2, compute=95, loader=1e-6),  # no time for the loader
    )
    assert text.startswith("\nStopped: this table is not finished.\n")
    assert text.endswith("Time: start 11.2 s, compute 83.8 s")
    assert max(map(len, text.splitlines())) <= 100  # of what is not the user's


def test_the_record_is_json_without_nan(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["whatif", "train.py"])
    made = result(
        failed={BEST: "out of memory"},
        losses=[dict(techniques=BEST, changes=True, why="", mean=math.nan)],
    )
    made.rows.append(Row(("batch",), math.nan, -math.inf, math.inf))
    text = json.dumps(report.record(made), allow_nan=False)
    record = json.loads(text)
    assert record["version"] == 1 and record["command"] == "python whatif train.py"
    assert record["best"] == [*BEST] and record["machine"]["gpu"] == "H100"
    assert record["rows"][0] == dict(
        name="amp bfloat16",
        techniques=["amp bfloat16"],
        speedup=1.52,
        low=1.51,
        high=1.54,
        n=12,
        verdict="faster",
        needs=None,
        memory=2010000000,
        note="",
    )
    assert record["rows"][-1]["speedup"] is None and record["losses"][0]["mean"] is None
    assert record["failed"] == {"amp bfloat16 + channels_last + compile": "out of memory"}
    assert {*record["advice"]} == {*BEST} and record["options"] == {}
    assert record["host_waits"] == [dict(at="train.py:40", text="print(loss.item())")]


def test_a_step_with_its_share_of_what_is_done_now_and_then():
    told = report.held_back_by(FACTS | dict(device="cpu"), BASELINE | dict(cycle=5))
    assert told.endswith(
        "a step takes 39.4 ms, with its share of what is done every 5 steps, and its data time is 3%."
    )


STEP = dict(seconds=2.0, steps=40, wait=0.4, whole=2.5, began=100.0, next=0.12, other=0.0)
STEP |= dict(gaps=[0.04] * 43, set_up=3, compiled=False, cycle=1)  # 0.5 s of validation


@pytest.mark.parametrize(
    "changes, compute, parts, cycle",
    [
        ({}, 0.04, [0.12, 1.6, 0.4, 0.5], 1),
        ({}, 0.008, [0.12, 1.6, 0.4, 0.5], 1),  # workers take the cores from all steps alike
        # an evaluation of 60 s before the second step; that step may only have been compiled
        (dict(next=60.08, gaps=[60.0, *[0.04] * 42]), 0.04, [0.12, 1.6, 0.4, 60.46], 1),
        (
            dict(next=60.08, gaps=[60.0, *[0.04] * 42], compiled=True),
            0.04,
            [60.08, 1.6, 0.4, 0.5],
            1,
        ),
        # and after each second step, as long as it is watched
        (
            dict(seconds=32.0, whole=32.5, gaps=[0.04] * 33 + [0.04, 6.04] * 5, cycle=2),
            0.04,
            [0.12, 1.6, 0.4, 30.5],
            1,
        ),
        # always: it is in the steps on kept batches too
        (
            dict(seconds=22.0, whole=22.5, gaps=[0.04] * 3 + ([0.04] * 7 + [4.04]) * 5, cycle=8),
            0.54,
            [0.12, 21.6, 0.4, 0.5],
            8,
        ),
    ],
    ids=["steps", "slow steps", "once", "compiled", "every second", "always"],
)
def test_what_lies_between_two_steps_is_no_step(changes, compute, parts, cycle):
    found = only_steps(STEP | changes, compute)
    told = of_watched(found, 94.0)
    assert [*told.values()] == pytest.approx([6.0, *parts]) and found["cycle"] == cycle
    assert [*told] == ["began", "next", "steps", "waiting", "aside"]
