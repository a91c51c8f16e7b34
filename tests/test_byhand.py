"""benchmarks/byhand.py: the script and its changed copy by turns, with nothing but a clock."""

import json
import re
import sys

import pytest

import byhand
from helpers import ROOT, assert_one_line, run, run_forked

SCRIPT = ROOT / "benchmarks" / "byhand.py"
TRAIN = """\
import sys
import time

import torch

import report  # its own module, not ours

open("log.txt", "a").write("started")
loader = torch.utils.data.DataLoader(torch.ones(600, 2))
model = torch.nn.Linear(2, 2)
optimizer = report.optimizer_of(model)
for step, batch in zip(range(int(sys.argv[1])), loader):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    time.sleep(0.001 if optimizer.defaults["fused"] else 0.05)
"""
REPORT = """\
import torch


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what whatif's --json says of the script, as if it had proved fused."""
    folder = tmp_path_factory.mktemp("byhand") / "mine"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "report.py").write_text(REPORT)
    words = "--only", "fused", "--minutes", 0.1, "--json", folder / "found.json"
    run(sys.executable, ROOT / "whatif", *words, "train.py", 600, cwd=folder)
    document = json.loads((folder / "found.json").read_text())
    (folder / "log.txt").unlink()
    row = dict(techniques=["fused"], name="fused", speedup=1.5, low=1.4, high=1.6, n=6)
    row |= dict(memory=None, verdict="faster")
    return folder, document | {
        "rows": [row, row | dict(techniques=["batch x2"], name="batch x2")],
        "forecast": [dict(techniques=["fused"], speedup=None, low=1.4, high=1.5)],
        "proof": dict(
            proved=True, techniques=["fused"], extras=[], why="", speedup=1.5, low=1.45, high=1.55
        ),
    }


def timed(found, *options, **changes):
    folder, document = found
    (folder / "found.json").write_text(json.dumps(document | changes))
    words = "found.json", "--runs", 1, "--first", 2, "--steps", 5, *options
    done = run_forked(SCRIPT, *words, "--result_dir", folder / "out", cwd=folder)
    return done, json.loads((folder / "out" / "byhand.json").read_text())


def test_both_sides_are_timed(found):
    """A step of the copy sleeps a fiftieth of the script's; the folder itself stays as it is."""
    folder, _ = found
    done, (one,) = timed(found)
    assert done.returncode == 0, done.stdout + done.stderr
    (hand,) = one["hands"]
    assert (hand["set"], hand["data"]) == ("fused", "as loaded")
    assert len(hand["before"]) == len(hand["after"]) == 1
    assert max(hand["before"]) < 21 and min(byhand.gained(hand)) > 2
    assert "windows" not in one["found"] and "facts" not in one["found"]
    assert (folder / "train.py").read_text() == TRAIN and [*folder.parent.iterdir()] == [folder]
    assert (folder / "report.py").read_text() == REPORT and not (folder / "log.txt").exists()
    page = (folder / "out" / "byhand.md").read_text()
    assert "| fused | 1.50x ±0.10 | 6 |  | faster |" in page
    assert "| fused | as loaded | 1.40x to 1.50x | 1.50x ±0.05 |" in page


def test_each_set_is_timed_on_kept_batches(found, tmp_path, monkeypatch):
    folder, document = found
    monkeypatch.chdir(folder)
    monkeypatch.setattr(byhand, "rate_of", lambda words, copy, kept, _: 1 + kept)
    (tmp_path / "found.json").write_text(json.dumps(document))
    words = tmp_path / "found.json", "--each", "--result_dir", tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["byhand.py", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        byhand.main()
    (one,) = json.loads((tmp_path / "out" / "byhand.json").read_text())
    assert not end.value.code and [(hand["data"], hand["after"]) for hand in one["hands"]] == [
        ("as loaded", [1] * 3),
        ("kept", [1 + byhand.KEPT] * 3),
    ]
    assert "| fused | kept | 1.50x |  |" in (tmp_path / "out" / "byhand.md").read_text()


def test_the_clock_repeats_batches(tmp_path):
    (tmp_path / "train.py").write_text("""\
import torch

weight = torch.ones(1, requires_grad=True)
optimizer = torch.optim.SGD([weight])
for number in torch.utils.data.DataLoader(range(9)):
    print(int(number), end=" ")
    optimizer.step()
""")
    done = run_forked(byhand.CLOCK, 2, 5, 3, "train.py", cwd=tmp_path)
    steps, told = done.stdout.splitlines()
    assert steps == "0 1 2 0 1 2 0 " and re.fullmatch(r"by hand: \S+ steps/s", told), done.stderr


def test_the_sides_take_turns(found, monkeypatch):
    folder, document = found
    asked, rates = [], iter(range(1, 7))

    def rate_of(words, copy, *_):
        asked.append("after" if "fused=True" in (copy / "report.py").read_text() else "before")
        return next(rates)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(byhand, "rate_of", rate_of)
    hand = byhand.measure(document, ["fused"], 0, byhand.parse(["found.json"]))
    assert asked == ["before", "after", "after", "before", "before", "after"]
    assert (hand["before"], hand["after"]) == ([1, 4, 5], [2, 3, 6])


def test_what_cannot_be_timed_is_told(found):
    facts = found[1]["facts"]
    optimizers = [dict(each, fused=True) for each in facts["optimizers"]]
    for changes, told in [
        (dict(proof=None), "whatif has proved nothing"),
        (dict(facts=facts | {"optimizers": optimizers}), "fused: already there"),
    ]:
        done, (one,) = timed(found, **changes)
        assert done.returncode == 1 and told in done.stdout and not one["hands"], done.stdout


@pytest.mark.parametrize(
    "code, told",
    [
        ("", "before: it ended before 7 steps of its own process"),
        ("print(7); [][1]", "before: IndexError: list index out of range"),
    ],
)
def test_a_script_that_ends_too_soon(code, told, found, tmp_path, monkeypatch):
    folder, document = found
    monkeypatch.chdir(folder)
    monkeypatch.setattr(byhand, "CLOCK", tmp_path / "clock.py")
    (tmp_path / "clock.py").write_text(code)
    with pytest.raises(RuntimeError, match=told):
        byhand.measure(document, ["fused"], 0, byhand.parse("x --first 2 --steps 5".split()))


def test_what_is_no_record_of_a_script_is_refused(found, tmp_path):
    folder, document = found
    path = tmp_path / "found.json"
    for text, told in [
        ("{", f"{path} is no record of whatif --json"),
        ("[1]", f"{path} is no record of whatif --json"),
        (json.dumps(document | dict(script="package.train")), "no script package.train here: "),
    ]:
        path.write_text(text)
        done = run_forked(SCRIPT, path, "--result_dir", tmp_path / "out", cwd=folder)
        assert_one_line(done, 2, told)
    done = run_forked(SCRIPT, path, "--first", 0, cwd=folder)
    assert done.returncode == 2 and "--first: invalid positive value: '0'" in done.stderr


def test_the_changed_copy_of_any_set(found):
    """Workers are as many as whatif has advised; a file outside of the folder is no copy's."""
    folder, document = found
    document = document | dict(loader=dict(enough=dict(workers=2)))
    words, files = byhand.changed(document, ["fused", "workers"], folder)
    assert words == ["train.py", "600"] and b"num_workers=2" in files["train.py"]
    assert b"fused=True" in files["report.py"]
    above = json.loads(json.dumps(document).replace("report.py", "../report.py"))
    with pytest.raises(RuntimeError, match="files outside of"):
        byhand.changed(above, ["fused"], folder / "sub")


def test_a_record_takes_several_scripts(found):
    timed(found, "--name", "a", proof=None)
    _, record = timed(found, "--name", "b", "--add", proof=None)
    assert [one["name"] for one in record] == ["a", "b"]
    _, record = timed(found, "--name", "a", "--add", proof=None)
    assert [one["name"] for one in record] == ["b", "a"]
