"""Techniques join edited copies of train.py, or are refused, or warned of, as edits.py says."""

import functools

import pytest
from edits import ALL, EDITS, edited, join, mistakes
from helpers import ROOT, run_forked

import compose


def test_every_edit_applies_and_compiles():
    assert len(EDITS) >= 60
    for edit in EDITS.values():
        compile(edited(edit), edit.name, "exec")
        names = f"{edit.refused} {edit.said} {edit.differs} {edit.either} {edit.start}".split()
        assert set(names) <= {*ALL, "all"}, edit.name


@pytest.mark.fault(70, 76)
def test_joins_are_refused_or_warned_of(rng, tmp_path, monkeypatch):
    """A twelfth of the edits, by chance, with every technique."""
    monkeypatch.setattr(compose, "find_origin", functools.cache(compose.find_origin))
    path, wrong = tmp_path / "my_train.py", []
    for edit in rng.sample([*EDITS.values()], len(EDITS) // 12):
        text = edited(edit).encode()
        for technique in set(ALL) - set(edit.start.split()):
            path.write_bytes(text)
            outcome, hazards = join(path, technique)
            if mistake := mistakes(edit, technique, outcome, hazards, merge_only=True):
                wrong.append(f"{mistake}: {edit.name} + {technique}: {hazards}")
            assert outcome != "refused" or path.read_bytes() == text
    assert not wrong, "\n".join(wrong)


@pytest.mark.fault(76)
def test_an_edit_verified(rng):
    """One, by chance, with two techniques. `python tests/edits.py` verifies all."""
    techniques = rng.sample(sorted(set(ALL) - {"compile"}), 2)  # compile takes long
    done = run_forked(ROOT / "tests" / "edits.py", "--edit", rng.choice([*EDITS]),
               "--technique", *techniques, "--jobs", 1)
    assert done.returncode == 0 and "WRONG WITHOUT A WORD | 0 |" in done.stdout, (
        done.stdout + done.stderr)
