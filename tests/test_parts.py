"""Where the time of a run goes: the parts, their shares and bars, in every table."""

import pytest

import accuracy
import report
from records import Parts
from test_report import good
from whatif import parts

EPOCHS = [
    dict(seconds=6, data_wait=0.5, val_seconds=1, save_seconds=0.5),
    dict(seconds=4, data_wait=0.25, val_seconds=1, save_seconds=0.5),
    dict(seconds=4, data_wait=0.75, val_seconds=2, save_seconds=1),
]
# 3 s of start, 2 s of an index, 6 s of steps, of which 4 s in the first, 1 s of validation
RECORD = dict(epochs=EPOCHS, warmup_seconds=8, first_step_seconds=4)
LINES = [12, 17.75, 24.5]
FOUND = dict(
    start=3,
    prepare=2,
    first_step=4,
    steps=6,
    waiting=4,
    validation=4,
    checkpoints=2,
    between=0.5,
    end=0.5,
)


def test_the_parts_of_a_run_are_all_of_its_seconds():
    found = Parts.written(RECORD, LINES, 26)
    assert found == pytest.approx(FOUND) and sum(found.values()) == pytest.approx(26)
    decoding = dict(RECORD, first_step_seconds=2)  # then 1 s of 4 is waiting
    assert Parts.written(decoding, LINES, 26) == pytest.approx(
        dict(FOUND, first_step=2, steps=7, waiting=5)
    )
    one = Parts.written(dict(RECORD, epochs=EPOCHS[:1]), LINES[:1], 13)
    assert one == dict(
        start=3,
        prepare=2,
        first_step=4,
        steps=2,
        waiting=0,
        validation=1,
        checkpoints=0.5,
        between=0,
        end=0.5,
    )


@pytest.mark.parametrize(
    "record, lines",
    [
        (dict(RECORD, first_step_seconds=None), LINES),
        (RECORD, LINES[1:]),
        (dict(RECORD, epochs=[dict(seconds=6, data_wait=0.5)]), LINES[:1]),
    ],
    ids=["an older script", "a resumed run", "no validation"],
)
def test_a_record_that_lacks_some_has_no_parts(record, lines):
    assert Parts.written(record, lines, 26) is None


@pytest.mark.parametrize(
    "seconds, width, shown",
    [
        (dict(start=1, steps=2, waiting=1), 8, "SS====.."),
        (dict(start=1, steps=999), 10, "=" * 10),
        (dict(steps=1, waiting=1, end=1), 4, "==.E"),
        (dict(next=0, steps=0), 4, ""),
        ({}, 4, ""),
    ],
)
def test_a_bar_has_a_sign_for_each_share(seconds, width, shown):
    assert parts.bar(seconds, width) == shown


def test_shares_and_legend():
    assert parts.shares(dict(steps=3, start=1)) == dict(start="25%", steps="75%")
    assert parts.legend(["start", "steps"]) == "S imports and start, = steps"
    assert parts.legend(dict(steps=3), dict(steps="75%")) == "= steps 75%"


def row_of(speed, *techniques, found=FOUND, **details):
    runs = [dict(number=1, images_per_second=speed, rates=[speed], warmup_seconds=8, parts=found)]
    return good(speed, techniques=[*techniques], runs=runs, **dict(row="single") | details)


def test_tables_of_running_show_them(tmp_path):
    rows = [
        row_of(100, column="plain", import_seconds=7.46),
        row_of(200, "amp", column="+amp", on=[], kept=True, found=None),
    ]
    text = report.markdown(rows)
    line = (
        "| baseline | 26.0 s | 12% | 8% | 15% | 23% | 15% | 15% | 8% | 2% | 2% | "
        "`SSSSSPPPFFFFFF=========......VVVVVVCCCBE` |"
    )
    assert line in text and "| amp | " not in text
    assert "F first step, compiling, = steps, . waiting for data" in text
    assert "one that you start takes 7.5 s longer to start" in text
    report.write(rows, tmp_path / "running")
    report.chart([row_of(100, column="plain", found=None)], tmp_path / "without.png")
    heights = [
        int.from_bytes((tmp_path / f"{name}.png").read_bytes()[20:24], "big")
        for name in ("running", "without")
    ]
    assert heights[0] > heights[1]
    assert "whole run" not in report.markdown([row_of(100, column="plain", found=None)])


def test_accuracy_shows_the_medians_of_its_runs():
    runs = [dict(parts=dict(start=each, steps=8)) for each in (1, 2, 9)]
    record = [
        dict(name="plain", runs=runs),
        dict(name="amp", runs=[dict(parts=None)]),
        dict(name="older", runs=[{}]),
    ]
    assert accuracy.parts_of(record) == {"plain": dict(start=2, steps=8)}
