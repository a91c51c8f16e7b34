"""Techniques join edited copies of train.py, or are refused, or warned of, as edits.py says."""

import functools
import json
import time

import pytest

import compose
import layout
from edits import ALL, EDITS, edited, join, mistakes
from forked_runs import Scripts
from helpers import ROOT, run_forked
from whatif import run, techniques
from whatif.write import patch

SMALL = ["--image_size", "16", "--steps", "2"]
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
    for module, name in (compose, "find_origin"), (layout, "relaid"):  # of the same texts
        monkeypatch.setattr(module, name, functools.cache(getattr(module, name)))
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
def test_an_edit_verified(tmp_path):
    """DDP counts only its share of the guesses. `python benchmarks/edits.py` verifies all."""
    (tmp_path / "small.py").write_text(f"""\
import sys

sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import edits

edits.OPTIONS_OF_ALL += {SMALL}  # it takes a third of the time
sys.exit(edits.main())
""")
    words = ["--edit", "F1 from a confusion matrix", "--technique", "DDP", "--jobs", 1]
    done = run_forked(tmp_path / "small.py", *words)
    assert done.returncode == 0 and "WRONG WITHOUT A WORD | 0 |" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "joined, --verify names what differs | 1 |" in done.stdout


# ------------------------------------------------------------------------------ whatif --write
WRITTEN = (
    ("amp bfloat16", "channels_last", "fused", "workers"),
    ("amp float16", "fused"),
    ("compile",),
)


def losses_of(folder, edit, digits, words):
    """Train a copy for two epochs of four steps; return the losses."""
    words = [*words]
    if edit.name != "constants in place of options":
        words += ["--epochs", 2, "--result_dir", folder / "runs"]
        words += ["--steps", 4] if edit.name != "option steps removed" else []
    done = run_forked(folder / "my_train.py", *words, cwd=folder, env=dict(DIGITS=str(digits)))
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / "runs" / "my_train.json").read_text())
    return [epoch["loss"] for epoch in record["epochs"]]


def facts_of(folder, words, monkeypatch):
    """Return what whatif has seen of a copy."""
    scripts = Scripts(folder, monkeypatch)
    session = scripts.session("my_train.py", *words, only=["fused"])
    spec = dict(window=0.02, deadline=time.time() + 60, rounds=1, seconds=0.1)
    result = run.run_once(session.command, session.spec("turns", **spec), 60)
    session.take(result)
    assert session.facts() and not result.get("faults"), result
    return json.loads(json.dumps(session.facts(), default=list))


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_what_whatif_writes_trains_alike(name, digits, tmp_path, monkeypatch):
    """Each technique is refused with a reason, or the changed copy trains as the copy does."""
    edit = EDITS[name]
    words = [digits if word == "" else word for word in edit.words()]
    if name == "constants in place of options":
        words = []
    monkeypatch.setenv("DIGITS", str(digits))
    (tmp_path / "my_train.py").write_bytes(edited(edit).encode())
    plain = losses_of(tmp_path, edit, digits, words)
    facts = facts_of(tmp_path, words + ["--epochs", 60] * bool(words), monkeypatch)
    for names in WRITTEN:
        seen = facts | dict(device="cuda" if "amp float16" in names else facts["device"])
        why = techniques.reasons(seen, techniques.NAMES)
        names = tuple(each for each in names if each not in why)
        made = patch.make(seen, names, dict(workers=2, keeps=True), str(tmp_path))
        assert {*made.techniques(), *made.reasons} >= {*names} and all(made.reasons.values())
        copy = tmp_path / "_".join(names).replace(" ", "-")
        copy.mkdir()
        (copy / "my_train.py").write_bytes(edited(edit).encode())
        for path, text in zip(made.changed, made.files.values()):
            (copy / path).write_bytes(text)
        after = losses_of(copy, edit, digits, words + made.words())
        assert after == pytest.approx(plain, rel=0.05), made.techniques()
