"""Techniques join edited copies of train.py, or are refused, or warned of, as edits.py says."""

import functools

import pytest

import compose
from edits import ALL, EDITS, edited, join, mistakes
from helpers import ROOT, run_forked

# each outcome, and a copy that has a technique already
TEN = [
    "own module",
    "scores in a dict",
    "own Dataset from a table",
    "train_one_epoch()",
    "validation loss",
    "validation loss, mended",
    "a log file",
    "clipping the norm",
    "amp first, a hook of the optimizer later",
    "optimizer renamed",
]


def test_every_edit_applies_and_compiles():
    assert len(EDITS) >= 60
    for edit in EDITS.values():
        compile(edited(edit), edit.name, "exec")
        names = f"{edit.refused} {edit.said} {edit.differs} {edit.either} {edit.start}".split()
        assert set(names) <= {*ALL, "all"}, edit.name


@pytest.mark.fault("join that is refused", "clean merge that is wrong")
def test_joins_are_refused_or_warned_of(tmp_path, monkeypatch):
    """Ten edits with every technique. `python benchmarks/edits.py --merge` joins all."""
    monkeypatch.setattr(compose, "find_origin", functools.cache(compose.find_origin))
    path, wrong = tmp_path / "my_train.py", []
    for edit in map(EDITS.get, TEN):
        text = edited(edit).encode()
        for technique in set(ALL) - set(edit.start.split()):
            path.write_bytes(text)
            outcome, hazards = join(path, technique)
            if mistake := mistakes(edit, technique, outcome, hazards, merge_only=True):
                wrong.append(f"{mistake}: {edit.name} + {technique}: {hazards}")
            assert outcome != "refused" or path.read_bytes() == text
    assert not wrong, "\n".join(wrong)


@pytest.mark.fault("clean merge that is wrong")
def test_an_edit_verified():
    """DDP counts only its share of the guesses. `python benchmarks/edits.py` verifies all."""
    words = ["--edit", "F1 from a confusion matrix", "--technique", "DDP", "--jobs", 1]
    done = run_forked(ROOT / "benchmarks" / "edits.py", *words)
    assert done.returncode == 0 and "WRONG WITHOUT A WORD | 0 |" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "joined, --verify names what differs | 1 |" in done.stdout
