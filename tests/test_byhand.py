"""benchmarks/byhand.py: the script and its changed copy by turns, with nothing but a clock."""

import json

import byhand
from helpers import ROOT, run_forked

SCRIPT = ROOT / "benchmarks" / "byhand.py"
TRAIN = """\
import sys
import time

import torch

import report  # its own module, not ours

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""
DIFF = """\
--- a/train.py
+++ b/train.py
@@ -11,4 +11,4 @@
     optimizer.zero_grad()
     model(torch.ones(1, 2)).sum().backward()
     optimizer.step()
-    time.sleep(0.05)
+    time.sleep(0.001)
"""


def document(**changes):
    """Return what whatif --write --json gives, as far as it is read."""
    row = dict(techniques=["fused"], name="fused", speedup=1.5, low=1.4, high=1.6, n=6)
    return {
        "script": "train.py",
        "arguments": ["60"],
        "command": "python whatif --write fast.patch train.py 60",
        "date": "2026-11-28",
        "machine": dict(gpu=None, cores=2, torch="2.14.1"),
        "unit": "steps",
        "baseline": dict(rate=20.0, n=8, memory=None),
        "rows": [dict(row, memory=None, verdict="faster")],
        "best": ["fused"],
        "forecast": [dict(techniques=["fused"], speedup=None, low=1.4, high=1.5)],
        "seconds": {"start": 2.0},
        "patch": dict(diff=DIFF, command=None),
        "proof": dict(proved=True, techniques=["fused"], speedup=1.5, low=1.45, high=1.55),
        "windows": [1, 2, 3],
    } | changes


def timed(folder, **changes):
    (folder / "train.py").write_text(TRAIN)
    (folder / "report.py").write_text("")
    (folder / "found.json").write_text(json.dumps(document(**changes)))
    words = "found.json", "--runs", 2, "--first", 2, "--steps", 5, "--result_dir", folder / "out"
    done = run_forked(SCRIPT, *words, cwd=folder)
    return done, json.loads((folder / "out" / "byhand.json").read_text())


def test_both_sides_are_timed_by_turns(tmp_path):
    """A step of the copy sleeps a fiftieth of the script's; the script itself stays as it is."""
    folder = tmp_path / "mine"
    folder.mkdir()
    done, (one,) = timed(folder)
    (hand,) = one["hands"]
    assert len(hand["before"]) == len(hand["after"]) == 2 and hand["set"] == "fused"
    assert max(hand["before"]) < 21 and min(byhand.gained(hand)) > 2
    assert "windows" not in one["found"]
    assert (folder / "train.py").read_text() == TRAIN and [*tmp_path.iterdir()] == [folder]
    page = (folder / "out" / "byhand.md").read_text()
    assert "| fused | 1.50x ±0.10 | 6 |  | faster |" in page
    assert "| fused | as loaded | 1.40x to 1.50x | 1.50x ±0.05 |" in page


def test_what_cannot_be_timed_is_told(tmp_path):
    for k, (changes, told) in enumerate(
        [
            (dict(proof=None), "whatif has proved no change"),
            (dict(patch=dict(diff=DIFF.replace("ones", "zeros"), command=None)), "does not apply"),
            (dict(arguments=["3"]), "status 0"),  # ends before seven steps
        ]
    ):
        folder = tmp_path / str(k) / "mine"
        folder.mkdir(parents=True)
        done, (one,) = timed(folder, **changes)
        assert done.returncode == 1 and told in done.stdout and not one["hands"], done.stdout
