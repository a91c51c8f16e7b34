"""running.sh as a user runs it: tables, failures, limits of time, Ctrl-C, wrong use.

Most tests run stand-ins for the training scripts: they take no time, and their record says how fast
they are, so nothing here depends on the machine.
"""

import itertools
import json
import math
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from torchvision import datasets

import calibration
import compose
import running
import runs
from helpers import (
    ROOT,
    TECHNIQUES,
    Forked,
    assert_one_line,
    change,
    flags,
    processes_of,
    run,
    run_forked,
    start,
    wait_until,
)
from records import Training
from whatif import machine

CELLS = [
    (row, column)
    for row in ("single", "DP", "DDP")
    for column in ("plain", "+cudnn", "+amp", "+cudnn +amp")
]
EXCLUSIVE = [("+DALI", "+LMDB", "+cache"), ("+DDP", "+DP")]
ALL = ["--with", "DP", "--with", "cudnn", "--with", "amp", "--with", "compile"]
QUICK = ["--", *flags(steps=1, batch_size=40, width=4, workers=0, image_size=16)]
GAINS = dict(amp=1.5, channels_last=1.25, compile=1.3, cudnn=1.25, fused=0.5, profile=1)
EXTRAS = dict(
    amp='parser.add_argument("--amp_dtype", default="float16")',
    compile='parser.add_argument("--compile_mode", default="default")',
    DALI='sys.exit("train_DALI.py: error: DALI is not installed: pip install nvidia-dali")',
    profile='"torch.profiler"',
)
STAND_IN = """
import argparse
import json
import os
import sys
import time
from pathlib import Path


def build_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", type=Path)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.01)
    parser.add_argument("--images", type=int)  # with it, an epoch has its true seconds
    parser.add_argument("--result_dir", type=Path)

    amp_option = 0

    compile_option = 0

    return parser


def main():
    # ------ options
    script = Path(__file__).stem
    args = build_parser().parse_args()

    # ------ data
    data = 1

    # ------ model
    amp = 1

    channels_last = 1

    compile = 1

    cudnn = 1

    fused = 1

    profile = 1

    parallel = 1

    # ------ training
    rank = int(os.environ.get("RANK", 0))
    if rank == 0:
        print(f"{script}: 1 parameters, {args.images or 30} images, 10 classes, cpu", flush=True)
    speed = 1000 * data * amp * channels_last * compile * cudnn * fused * parallel
    for epoch in range(args.epochs):
        time.sleep(args.steps * args.pause)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs}  loss 1.0  {speed} images/s", flush=True)
    seconds = args.steps * args.pause if args.images else 10000 / speed
    epochs = [dict(images_per_second=speed, seconds=seconds, data_wait=0.1)] * args.epochs
    options = dict(vars(args), model="conv11", width=16, image_size=32)
    record = dict(script=script, options=options, environment=dict(torch="2", device="cpu"),
                  parameters=1, epochs=epochs, images_per_second=speed, val_top1=0.9,
                  train_seconds=1000 / speed, warmup_seconds=1, peak_memory_bytes=None)
    if rank == 0:
        (args.result_dir / f"{script}.json").write_text(json.dumps(record, default=str))


main() if __name__ == "__main__" else None
"""


@pytest.fixture
def stand_ins(project):
    """A copy of the project whose training scripts are stand-ins."""
    for path in (project / "src").glob("train*.py"):
        path.unlink()
    (project / "src" / "train.py").write_text(STAND_IN)
    gains = [(name, name, gain) for name, gain in GAINS.items()]
    gains += [
        ("DALI", "data", 1.1),
        ("LMDB", "data", 1.2),
        ("cache", "data", 1.4),
        ("DP", "parallel", 0.9),
        ("DDP", "parallel", 1.6),
    ]
    for name, seam, gain in gains:
        text, extra = STAND_IN, EXTRAS.get(name, "")
        if "add_argument" in extra:
            text = text.replace(
                f"    {name}_option = 0", f"    # new #\n    # an option\n    {extra}"
            )
            extra = ""
        about = f"this is {name}" + ", DataParallel(net)" * (seam == "parallel")
        lines = ["# new #", f"# {about}", extra, f"{seam} = {gain}"]
        text = text.replace(f"    {seam} = 1\n", "".join(f"    {line}\n" for line in lines if line))
        (project / "src" / f"train_{name}.py").write_text(text)
    return project


@pytest.fixture
def data(tmp_path):
    """A folder that stands for a data set."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def drive(project, *words, **options):
    return run_forked(project / "tools" / "running.py", *words, **options)


def with_torchrun(project, more=""):
    """Have torchrun start DDP's stand-in, as it starts the real one; it takes seconds."""
    change(
        project / "src" / "train_DDP.py",
        "parallel = 1.6",
        f'"init_process_group"\n    parallel = 1.6{more}',
    )


def keep_techniques(project, *names):
    """Remove the stand-ins of all other techniques."""
    for path in (project / "src").glob("train_*.py"):
        if path.stem.removeprefix("train_") not in names:
            path.unlink()


def rows_of(folder):
    return json.loads((folder / "running.json").read_text())


def assert_staircase(baseline, steps, left_out=()):
    """Each step adds one technique to the fastest set so far; of a choice at most one is kept."""
    assert {row["column"] for row in steps} == {
        f"+{name}"
        for name in (*GAINS, "DALI", "LMDB", "cache", "DP", "DDP")
        if name not in ("profile", *left_out)
    }
    best, left = baseline, list(steps)
    while left:
        on = left[0]["on"]
        assert on == best["techniques"]
        choice = next(
            ({*each} for each in EXCLUSIVE if left[0]["column"] in each), {left[0]["column"]}
        )
        tried = list(itertools.takewhile(lambda row: row["column"] in choice, left))
        left = left[len(tried) :]
        for row in tried:
            assert row["row"] == "staircase" and row["on"] == on
            assert row["techniques"] == sorted([*on, row["column"][1:]])
        good = [row for row in tried if row["status"] == "ok"]
        top = max(good, key=lambda row: row["images_per_second"], default=None)
        pays = bool(top) and top["images_per_second"] >= 1.02 * best["images_per_second"]
        assert [row["kept"] for row in tried] == [pays and row is top for row in tried]
        best = top if pays else best


# ------------------------------------------------------------------------------ tables
@pytest.mark.fault(
    "brackets in the path", "no GPU or no DALI", "another folder or a link", "old results"
)
def test_all_rows_from_another_folder_through_a_link(stand_ins, tmp_path):
    results = stand_ins / "results"
    (results / "running").mkdir(parents=True)
    (results / "running" / "train_old.json").write_text("{}")
    (results / "running.md").write_text("old")
    (tmp_path / "a [set] of *").mkdir()
    link = tmp_path / "link.sh"
    link.symlink_to(stand_ins / "running.sh")
    # options for those that have them
    options = ["--", "--compile_mode", "reduce-overhead", "--amp_dtype=bfloat16"]
    done = run(link, "2", "a [set] of *", "--runs", "1", *ALL, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(results)
    assert (rows[0]["row"], rows[0]["column"]) == ("single", "plain")
    steps = [row for row in rows if row["row"] == "staircase"]
    assert_staircase(rows[0], steps)
    assert [(row["row"], row["column"]) for row in rows if row not in steps] == CELLS
    assert len(rows[0]["runs"]) == 2  # once more at the end
    (dali,) = [row for row in steps if row["column"] == "+DALI"]
    assert dali["status"] == "skip" and "pip install" in dali["error"]
    # what did not pay is tried again after others have been kept
    assert [row["kept"] for row in steps if row["column"] == "+fused"] == [False, False]
    best = [row for row in steps if row["kept"]][-1]["techniques"]
    assert best == ["DDP", "amp", "cache", "channels_last", "compile", "cudnn"]
    table = (results / "running.md").read_text()
    assert table.strip() in done.stdout and "old" not in table and "speed changed" not in table
    assert f"`./compose.sh {' '.join(best)} > my_train.py`" in table
    assert "| +DALI | SKIP: train_DALI.py: error: " in table
    assert re.search(
        r"\| single \| 1.00 s \(1.00x\) \| 0.80 s \(1.25x ±0.\d\d\) \| 0.67 s "
        r"\(1.50x ±",
        table,
    )
    assert f"torchvision {version('torchvision')}, Python " in table and "`./running.sh 2 " in table
    assert (results / "running.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (results / "running" / "train_old.json").exists()  # not its own to delete
    for row in rows:
        if row["status"] != "ok":
            continue
        # the joined script, its record and its log are there to open
        name = "_".join(["train", *row["techniques"]])
        assert row["script"] == name and row["options"]["epochs"] == 2
        assert row["options"].get("amp_dtype") == ("bfloat16" if "amp" in name else None)
        text = (results / "running" / f"{name}.py").read_text()
        assert all(f"# this is {technique}" in text for technique in row["techniques"])
        log = (results / "running" / f"{name}.log").read_text()
        assert "epoch 2/2" in log and "%|" not in log and "\r" not in log
        assert ("--compile_mode reduce-overhead" in log) == ("compile" in name)
    # a log shows when a run starts, each epoch and the result; no line is written over
    starts = re.findall(r"^\[ ?(\d+)/\d+\] ", done.stdout, re.M)
    assert [*map(int, starts)] == [*range(1, len(rows) + 1)]
    assert "        epoch 1/2  loss" in done.stdout and "\r" not in done.stdout


def test_the_real_scripts(project, digits, tmp_path):
    words = [
        word
        for name in TECHNIQUES
        if name not in ("DP", "DDP", "profile")
        for word in ("--without", name)
    ]
    words += flags(runs=1, part="staircase", result_dir=tmp_path / "r")
    done = drive(project, "2", digits, *words, *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "r")
    assert [(row["row"], row["column"], row["status"]) for row in rows] == [
        ("single", "plain", "ok"),
        ("staircase", "+DDP", "ok"),
    ]
    for row in rows:
        assert row["options"]["epochs"] == 2 and row["options"]["steps"] == 1
        assert row["machine"]["cores"] and row["machine"]["packages"]["torch"] == version("torch")
    assert "There is no GPU here" in done.stdout and "Left out: DP, because" in done.stdout
    assert "epoch 2/2" in (tmp_path / "r" / "running" / "train_DDP.log").read_text()


def test_sets_run_until_the_verdict_holds(stand_ins, data):
    change(stand_ins / "src" / "train_cudnn.py", "cudnn = 1.25", "cudnn = 1")
    keep_techniques(stand_ins, "amp", "cudnn", "fused")
    done = drive(stand_ins, "2", data, "--with", "amp", "--with", "cudnn", "--part", "staircase")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(stand_ins / "results")
    assert [(row["column"], row.get("n"), row.get("verdict")) for row in rows] == [
        ("plain", None, None),
        ("+amp", 2, "faster"),
        ("+cudnn", 1, "no difference"),
        ("+fused", 1, "slower"),
    ]
    assert [row.get("kept") for row in rows[1:]] == [True, False, False]
    base, amp, cudnn, fused = (row["runs"] for row in rows)
    assert (len(base), len(amp), len(cudnn), len(fused)) == (4, 2, 1, 1)
    numbers = [run["number"] for runs in (base, amp, cudnn, fused) for run in runs]
    assert sorted(numbers) == [*range(1, 9)]
    assert all(run["rates"] == [1500] and run["wall_seconds"] > 0 for run in amp)
    table = (stand_ins / "results" / "running.md").read_text()
    assert "| +cudnn | 1,500 | 1.50x ±0.01 | 1.00x ±0.01 | 1 |  | 90.00% | no difference |" in table
    assert "| train_amp | 2 | 1,500 (1,500 to 1,500) |" in table
    assert done.stdout.count("        again amp: 0.67 s  1,500 images/s") == 1


def test_the_order_of_the_staircase(stand_ins, monkeypatch):
    monkeypatch.setattr(compose, "ROOT", stand_ins)
    techniques = {path.stem.removeprefix("train_") for path in stand_ins.glob("src/train_*.py")}
    monkeypatch.setattr(compose, "TECHNIQUES", sorted(techniques))

    def stairs(gpus, left_out):
        return [tuple(names) for _, names in running.stairs_of(gpus, techniques - {*left_out})]

    first = [("channels_last",), ("amp",), ("cache", "DALI", "LMDB"), ("compile",)]
    rest = [("cudnn",), ("fused",)]
    assert stairs(0, ["DP"]) == [*first, *rest, ("DDP",)]
    assert stairs(4, []) == [("DDP", "DP"), *first, *rest]
    assert stairs(2, ["LMDB", "cache", "DALI"]) == [("DDP", "DP"), *first[:2], first[3], *rest]


def test_techniques_are_tried_again_and_loading_comes_first_where_steps_wait():
    def row(techniques, wait):
        return Training(techniques=techniques, epochs=[dict(data_wait=wait)] * 3)

    def due(*args):
        return [name for _, name in running.due(*args)]

    data, both = ["DALI", "cache"], ["DDP", "DP"]
    stairs = [("compute", ["amp"]), ("data", data), ("compute", ["compile"]), ("parallel", both)]
    assert due(stairs, {}, row([], 0.15)) == ["amp", *data, "compile", *both]
    assert due(stairs, {}, row([], 0.25)) == [*data, "amp", "compile", *both]

    def tried(ratio, on=(), settled=False, status="ok", n=2):
        return Training(
            ratio=ratio,
            spread=0.2,
            on=[*on],
            settled=settled,
            status=status,
            n=n,
            images_per_second=100,
        )

    # a list is tried to its end; what seems to gain comes before what was never tried
    last = {"amp": tried(1.5), "DALI": tried(1.1)}
    assert due(stairs, last, row([], 0.15)) == ["cache", "amp", "compile", *both, "DALI"]
    last["DALI"] = tried(1.1, n=1)  # in its first run
    assert due(stairs, last, row([], 0.15)) == ["cache", "amp", "DALI", "compile", *both]
    last["DALI"] = tried(1.1)
    # what did not pay is due again after others have been kept, but not what cannot run
    last |= {
        "cache": tried(1.6, status="fail"),
        "compile": tried(0.9, settled=True),
        "DP": tried(1.2),
        "DDP": tried(1, settled=True),
    }
    assert due(stairs, last, row([], 0.15)) == ["amp", "DP", "DALI"]
    assert due(stairs, last, row(["amp"], 0.15)) == ["DALI", "compile", *both]
    # what was slower comes last, but before what already ran beside the set kept last
    last |= {"DALI": tried(0.5), "compile": tried(1.1, on=["amp"])}
    assert due(stairs, last, row(["amp"], 0.15)) == [*both, "DALI", "compile"]


def test_left_out_without_a_gpu(stand_ins, data):
    reasons = running.reasons_to_leave_out(dict(gpus=0, bfloat16=False))
    assert {"DP", "cudnn", "amp"} <= reasons.keys() and "no bfloat16" in reasons["amp"]
    assert "amp" not in running.reasons_to_leave_out(dict(gpus=0, bfloat16=True))
    done = drive(stand_ins, "1", data, "--without", "amp")
    assert done.returncode == 0, done.stderr
    assert "Only DDP. No staircase: it needs 2 EPOCHS or more" in done.stdout
    for name in ("DP", "cudnn"):
        assert f"Left out: {name}, because {reasons[name]}. --with {name} tries it" in done.stdout
    assert [(row["row"], row["column"]) for row in rows_of(stand_ins / "results")] == [
        ("single", "plain"),
        ("DDP", "plain"),
    ]
    table = (stand_ins / "results" / "running.md").read_text()
    assert f"cudnn, because {reasons['cudnn']}" in table and "take 2 or more" in table


def test_a_quick_table_on_a_gpu_leaves_out_what_takes_its_time(stand_ins, data):
    change(
        stand_ins / "tools" / "running.py", '"digits"]', '"digits", "--train", "9", "--val", "9"]'
    )
    change(stand_ins / "tools" / "runs.py", "torch.cuda.device_count()", "1")
    words = ["--with", "compile", "--runs", "2", "--", "--batch_size", "10"]
    done = drive(stand_ins, "2", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(stand_ins / "results")
    columns = "plain +channels_last +amp +cache +compile +fused".split()
    assert [row["column"] for row in rows] == columns
    assert [len(row["runs"]) for row in rows] == [3, 2, 2, 2, 2, 1]  # those of a TimedTable
    table = (stand_ins / "results" / "running.md").read_text()
    assert running.QUICK.keys() <= {*TECHNIQUES}
    for name in running.QUICK.keys() - {"graphs"}:  # which has no stand-in
        why = running.QUICK[name]
        assert f"Left out: {name}, because {why}. --with {name} tries it." in done.stdout
        assert f"{name}, because {why}; " in table
    assert f"Left out: the grid, because {running.GRID}. --part all adds it." in done.stdout
    assert f"; the grid, because {running.GRID}." in table
    done = drive(stand_ins, "2", data, *words)  # with a dataset as ever
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(stand_ins / "results")
    assert {"+DALI", "+LMDB", "+cudnn"} <= {row["column"] for row in rows}
    assert [(row["row"], row["column"]) for row in rows if row["row"] == "single"] == CELLS[:4]


@pytest.mark.parametrize(
    "words, gpus, cells, added",
    [
        ([], 1, [], []),
        ([], 2, [], ["DDP", "DP"]),
        (["--with", "cudnn"], 1, [], ["cudnn"]),
        (["--part", "all"], 1, ["+amp"], []),
        (["--part", "all"], 2, ["+amp", *["plain", "+amp"] * 2], ["DDP", "DP"]),
    ],
)
def test_what_a_quick_table_tries(words, gpus, cells, added):
    args, _ = running.parse(["5", "--with", "compile", *words])
    _, found, stairs, left_out = running.plan(args, dict(gpus=gpus, bfloat16=True), True)
    assert [column for _, column, _ in found] == cells
    assert sorted(name for _, names in stairs for name in names) == sorted(
        ["amp", "cache", "channels_last", "compile", "fused", *added]
    )
    assert ("the grid" in left_out) == (not cells)
    for other in (["--part", "cells"], []):  # a single epoch has no staircase
        args, _ = running.parse(["5" if other else "1", *other])
        _, found, stairs, left_out = running.plan(args, dict(gpus=1, bfloat16=True), True)
        assert [column for _, column, _ in found] == ["+amp"] and not stairs
        assert "the grid" not in left_out


@pytest.mark.parametrize(
    "flags, expected",
    [("avx2 avx512f avx512_bf16", True), ("avx2 amx_bf16", True), ("avx2 avx512f", False)],
)
def test_bfloat16_of_a_cpu(flags, expected, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path: f"processor : 0\nflags : {flags}\n")
    assert runs.has_bfloat16() == expected


@pytest.mark.fault("loss not finite", "one variant fails")
def test_failing_variants_leave_rows_and_the_others_run(stand_ins, data):
    with_torchrun(stand_ins)
    change(stand_ins / "src" / "train_amp.py", "amp = 1.5", "amp = no_such_name")
    words = "train_cudnn.py: error: the loss stops being finite at epoch 1, step 1"
    change(stand_ins / "src" / "train_cudnn.py", "cudnn = 1.25", f"sys.exit({words!r})")
    done = drive(stand_ins, "1", data, "--part", "cells", *ALL, "--without", "DP")
    assert done.returncode == 1, done.stdout + done.stderr
    rows = rows_of(stand_ins / "results")
    assert [row["status"] for row in rows] == ["ok"] + ["fail"] * 3 + ["ok"] + ["fail"] * 3
    table = (stand_ins / "results" / "running.md").read_text()
    for row in rows:
        if row["status"] == "fail":
            word = "no_such_name" if "amp" in row["techniques"] else "finite at epoch 1, step 1"
            assert row["log"] in table and word in Path(row["log"]).read_text()
            assert word in row["error"] or row["row"] == "DDP"  # torchrun tells less
    assert table.count("FAIL |") == 6


@pytest.mark.fault("one variant fails")
def test_techniques_that_cannot_be_joined_are_a_failure(stand_ins, data):
    change(
        stand_ins / "src" / "train_DDP.py",
        "    amp = 1\n",
        "    # new #\n    # this excludes amp\n    amp = 2\n",
    )
    done = drive(stand_ins, "1", data, "--with", "amp")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL: DDP and amp exclude each other: both change the same lines" in done.stdout
    assert [
        (row["row"], row["column"], row["status"]) for row in rows_of(stand_ins / "results")
    ] == [
        ("single", "plain", "ok"),
        ("single", "+amp", "ok"),
        ("DDP", "plain", "ok"),
        ("DDP", "+amp", "fail"),
    ]


def test_a_table_says_that_the_baseline_moved(stand_ins, data):
    moved = "speed = (1000 if args.result_dir.joinpath('second').exists() else 1300) *"
    change(stand_ins / "src" / "train.py", "speed = 1000 *", moved)
    change(
        stand_ins / "src" / "train.py",
        "    options = dict(",
        "    if args.steps == 3:  # the steps that are timed before are 5\n"
        "        args.result_dir.joinpath('second').touch()\n    options = dict(",
    )
    keep_techniques(stand_ins, "DDP")
    done = drive(stand_ins, "2", data, "--part", "cells")
    assert done.returncode == 0, done.stderr
    table = (stand_ins / "results" / "running.md").read_text()
    assert table.startswith(
        "**The baseline's speed changed:** it trained 1,300 images/s and then 1,000. "
    )


# ------------------------------------------------------------------------------ limits of time
def test_a_technique_that_is_plainly_slower_is_given_up(stand_ins, data):
    change(stand_ins / "src" / "train_amp.py", "args.steps * args.pause", "60 * epoch")
    done = drive(stand_ins, "2", data, "--with", "amp", "--part", "cells", "--without", "DDP")
    assert done.returncode == 0, done.stdout + done.stderr
    first, slow = rows_of(stand_ins / "results")
    assert (first["status"], slow["status"]) == ("ok", "skip")
    assert re.fullmatch(
        r"given up after \d+ s, in epoch 2 of 2: all of the baseline took \d+ s", slow["error"]
    )
    assert f"train_amp: SKIP: {slow['error']}" in done.stdout
    assert processes_of(stand_ins) == []


def test_without_time_every_run_is_skipped(stand_ins, data):
    done = drive(stand_ins, "2", data, "--minutes", "0.1")
    assert done.returncode == 0, done.stderr
    rows = rows_of(stand_ins / "results")
    assert len(rows) > 8 and {row["status"] for row in rows} == {"skip"}
    assert all("time: it does not fit into the 0.1 minutes" in row["error"] for row in rows[1:])
    assert not (stand_ins / "results" / "running.png").exists()


def test_long_epochs_are_cut_short_where_time_is_limited(stand_ins, data):
    keep_techniques(stand_ins)
    options = flags(steps=9999, pause=0.05, images=99990)
    done = drive(stand_ins, "2", data, "--minutes", "2", "--", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = rows_of(stand_ins / "results")
    assert row["status"] == "ok" and 5 <= row["options"]["steps"] < 999
    assert f"epochs end after {row['options']['steps']} steps" in done.stdout
    assert f"2 epochs of {row['options']['steps']} steps" in done.stdout


def test_cores_are_those_of_the_quota():
    """Of a container or job: tests/test_whatif_run.py has their kinds."""
    assert runs.cores is machine.cores


def test_time_left_by_the_lines_of_epochs():
    assert running.under_way([], 3.2, 4) == "        3 s  epoch 1/4"
    assert running.under_way([9], 10, 4) == "        10 s  epoch 2/4"
    assert running.under_way([9, 12], 13, 4) == "        13 s  epoch 3/4  5 s left"
    assert running.under_way([9, 12, 15, 18], 19, 4).endswith("epoch 4/4  0 s left")


@pytest.mark.parametrize(
    "minutes, epochs, runs, step, whole, between, steps, then",
    [
        (3, 4, 4, 0.043, 97, 0, 34, 4),  # 6 s of 16
        (3, 4, 4, 0.043, 97, 0.5, 23, 4),  # 4 times 0.5 s are no steps
        (3, 4, 4, 0.043, 97, 9, 17, 4),  # at least half are
        (3, 4, 4, 9, 97, 0, 5, 4),
        (3, 2, 1, 0.01, 100, 0.1, None, 2),
        (3, 1, 4, 0.01, 10, 0, None, 1),
        (3, 2, 4, 0.01, 100, 0.1, None, 5),
        (math.inf, 2, 4, 0.01, 100, 0.1, None, 6),
        (math.inf, 2, 4, 0.01, 10, 1, None, 27),
        (math.inf, 2, 4, 9, 10, 1, None, 2),
    ],
)
def test_epochs_fit_the_time(minutes, epochs, runs, step, whole, between, steps, then):
    found = calibration.fit((step, whole, 0, between), epochs, minutes, 1 not in (epochs, runs), 30)
    assert found[:3] == (steps, then, 1) and bool(found[3]) == bool(steps or then > epochs)


@pytest.mark.parametrize(
    ("minutes", "step", "whole", "validation", "aside", "steps", "part"),
    [
        (20, 0.025, 417, 13, 0.1, 236, 2 / 13),  # CIFAR-10 on two cores
        (20, 0.02, 100, 13, 0.1, None, 2 / 13),  # all steps fit, validation does not
        (20, 0.025, 417, 1.5, 0.1, 256, 1),
        (20, 0.01, 300, 4, 0.1, None, 1),  # all fits
        (math.inf, 0.025, 417, 500, 0.1, None, 1),
    ],
)
def test_a_validation_that_takes_most_of_a_run_is_cut(
    minutes, step, whole, validation, aside, steps, part
):
    found = calibration.fit((step, whole, validation, aside), 5, minutes, True, 30)
    assert (found[0], found[2]) == (steps, pytest.approx(part)) and found[1] == 5
    assert ("a run would take" in found[3]) == (part < 1 or bool(steps))
    assert ("all epochs end" in found[3]) == bool(steps)


@pytest.fixture
def many(tmp_path):
    """A dataset with 12 training images, and 70 and 30 of two classes to validate on."""
    for split, counts in (("training", (6, 6)), ("valid", (70, 30))):
        for name, count in zip("ab", counts):
            for number in range(count):
                path = tmp_path / "many" / split / name / f"deep{number % 2}" / f"{number:02}.jpeg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(str(number))
    (tmp_path / "many/valid/a/notes.txt").touch()
    (tmp_path / "many/training/list.csv").touch()
    return tmp_path / "many"


def test_fewer_images_to_validate_on_are_of_each_class(many, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # links hold from anywhere
    made, count, of = calibration.fewer(Path("many"), Path("links"), 20)
    assert (made, count, of) == (Path("links/many"), 20, 100)
    monkeypatch.chdir("links")
    train = datasets.ImageFolder("many/training", loader=str)
    assert len(train) == 12 and train.classes == ["a", "b"]
    valid = datasets.ImageFolder("many/valid", loader=lambda name: int(Path(name).read_text()))
    assert [label for _, label in valid] == [0] * 14 + [1] * 6
    assert len({*valid.samples}) == 20 and {number % 2 for number, _ in valid} == {0, 1}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many_train.lmdb").touch()
    made, count, of = calibration.fewer(Path("many"), Path("links"), 1)  # at least one of each
    assert (count, of) == (2, 100)
    assert Path("links/many_train.lmdb").resolve() == tmp_path / "many_train.lmdb"


@pytest.mark.parametrize(
    ("val_seconds", "count", "told"),
    [(0.4, 13, "minutes, so validation takes 13 of 100 images"), (0.01, 0, "")],
)
def test_runs_read_links_if_validation_is_cut(
    val_seconds, count, told, many, tmp_path, monkeypatch
):
    """The seconds are of 20 images; a run of 5 epochs may take 5 s, and trains for 2.5 s."""
    monkeypatch.setattr(calibration, "VALIDATED", 10)
    monkeypatch.setattr(calibration, "cores", lambda: 2)
    read = []

    def run(words):
        read.append(len(datasets.ImageFolder(Path(words[1]) / "valid", loader=str)))
        (tmp_path / "train.log").write_text("train: 1 parameters, 100 images, 2 classes, cpu")
        epoch = dict(seconds=0.5, val_seconds=val_seconds)
        record = dict(options=dict(batch_size=10), epochs=[epoch] * 2, lines=[1, 1.5 + val_seconds])
        return "ok", 0, record

    options = ["--dataset", str(many), "--lr", "1"]
    options, epochs, validated, line = calibration.shorten(
        run, options, tmp_path, (5, 1, False, 60)
    )
    assert {*read} == {20} and epochs == 5 and line.endswith(told)
    assert options[2:4] == ["--lr", "1"] and bool(validated) == bool(count)
    links = tmp_path / "fewer"
    if count:
        assert Path(options[1]) == links / "many" and validated == "13 of 100 images"
        assert len(datasets.ImageFolder(Path(options[1]) / "valid", loader=str)) == count
    else:
        assert options[1] == str(many) and not links.exists()


def test_a_dataset_that_is_none_is_left_to_the_script(many, tmp_path):
    links = tmp_path / "links"
    assert calibration.fewer(many, links, 100) == (many, 100, 100)
    assert calibration.fewer(tmp_path / "missing", links, 10) == (tmp_path / "missing", 0, 0)
    (many / "training" / "c").mkdir()
    assert calibration.fewer(many, links, 10) == (many, 0, 0) and not links.exists()


def test_images_that_are_links_keep_their_kind(many, tmp_path):
    """As those of a store that names its files by their content."""
    for number, path in enumerate(sorted(many.rglob("*.jpeg"))):
        path.symlink_to(path.rename(tmp_path / f"{number:x}"))
    made, count, _ = calibration.fewer(many, tmp_path / "links", 10)
    assert count == 10 and len(datasets.ImageFolder(made / "valid", loader=str)) == 10


def test_a_folder_that_cannot_be_made_cuts_nothing(many, tmp_path):
    (tmp_path / "links").write_text("no folder")
    assert calibration.fewer(many, tmp_path / "links", 10) == (many, 0, 0)


def test_a_validation_of_one_image_of_each_class_is_not_cut(many, tmp_path, monkeypatch):
    for path in sorted(many.glob("valid/*/*/*"))[1:]:
        if path.parent.parent.name == "a" or path.name != "01.jpeg":
            path.unlink()
    monkeypatch.setattr(calibration, "calibrate", lambda *_: (0.05, 10, 9.0, 0.1))
    monkeypatch.setattr(calibration, "fit", lambda *_: (None, 5, 0.1, "long, so "))
    options = ["--dataset", str(many)]
    assert calibration.shorten(None, options, tmp_path, (5,)) == (options, 5, None, "")


def test_a_quick_table_gives_a_run_more_of_the_time(monkeypatch):
    """9 steps of 0.25 s, then 0.8 s of validation: about what an H100 takes."""
    monkeypatch.setattr(calibration, "calibrate", lambda *_: (0.25, 9, 0.7, 0.1))
    found = []
    for share in (calibration.SHARE, calibration.QUICK_SHARE):
        options, limit = ["--dataset", "missing"], time.monotonic() + 300
        table = running.TimedTable(options, 5, 4, 5, limit, Path("folder"), {}, share=share)
        table.calibrate()
        found.append((table.options, table.epochs))
    few, more = ([*options, "--steps", steps] for steps in ("5", "8"))
    assert found == [(few, 5), (more, 5)]


# ------------------------------------------------------------------------------ the display
def test_a_terminal_shows_the_run_under_way_in_place(stand_ins, data):
    ours, its = pty.openpty()
    words = ["3", data, "--part", "cells", "--without", "DDP", "--without", "amp"]
    words += ["--", *flags(steps=9, pause=0.2)]
    process = Forked(stand_ins / "tools" / "running.py", *words, log=os.ttyname(its))
    wait_until(lambda: select.select([ours], [], [], 0)[0])  # it has opened the terminal
    os.close(its)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            piece = b""
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait().returncode == 0, shown
    assert re.search(rb"\r +\d+ s  epoch 1/3\x1b\[K", shown)
    assert re.search(rb"\r +\d+ s  epoch 3/3  \d+ s left\x1b\[K", shown)
    assert b"epoch 1/3  loss" not in shown  # that is for logs


def test_a_log_has_all_lines_of_a_run(tmp_path):
    code = """import sys
print("epoch 1", flush=True)
print("a warning", file=sys.stderr)
print("no line end", end="")
sys.exit(3)"""
    seen, log = [], tmp_path / "log"
    status, seconds = runs.follow(
        [sys.executable, "-c", code], log, lambda line, at: seen.append((line, at))
    )
    assert (
        status == 3
        and [line for line, _ in seen if line]
        == ["epoch 1", "a warning", "no line end"]
        == log.read_text().splitlines()[-3:]
    )
    moments = [at for _, at in seen]
    assert moments == sorted(moments) and 0 <= moments[0] and moments[-1] <= seconds


# ------------------------------------------------------------------------------ signals
@pytest.mark.fault("Ctrl-C", "Ctrl-C in running.sh")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_the_third_run(number, stand_ins, data):
    """Runs are sessions of their own: Ctrl-C reaches the driver alone, as kill does."""
    child = (
        "import subprocess\n    sleeper = 'import time; time.sleep(987)'\n"
        "    amp = subprocess.run([sys.executable, '-c', sleeper, __file__]) and 1"
    )
    change(stand_ins / "src" / "train_amp.py", "amp = 1.5", child)
    words = ["2", data, "--part", "cells", *ALL]
    if number == signal.SIGINT:
        process = Forked(stand_ins / "tools" / "running.py", *words)
    else:
        process = start([stand_ins / "running.sh", *words], cwd=stand_ins)

    def sleeps():
        commands = [" ".join(each.info["cmdline"]) for each in processes_of(stand_ins)]
        return any("sleep(987)" in command for command in commands)

    wait_until(lambda: sleeps() or process.poll() is not None)
    assert process.poll() is None
    os.kill(process.pid, number)
    if number == signal.SIGINT:
        done = process.wait()
        status, out, err = done.returncode, done.stdout, done.stderr
    else:
        out, err = process.communicate()
        status = process.returncode
    assert status == 130
    assert processes_of(stand_ins) == [] and not list(stand_ins.rglob("*.part"))
    rows = rows_of(stand_ins / "results")
    assert [row["column"] for row in rows] == ["plain", "+cudnn"]
    assert "| single | " in out and "after 2 of 12 runs" in out and "Traceback" not in out + err


@pytest.mark.fault("Ctrl-C")
def test_a_signal_before_the_first_run_ends_it_and_nohup_keeps_it():
    code = """import signal, runs
signal.signal(signal.SIGHUP, signal.SIG_IGN)
def main():
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGTERM)
runs.guarded(main, "running.sh")
"""
    done = run(sys.executable, "-c", code, cwd=compose.ROOT / "tools")
    assert_one_line(done, 130, "running.sh: stopped by SIGTERM")


@pytest.mark.fault("errors of PyTorch")
def test_a_long_folder_for_temporary_files_is_refused(tmp_path):
    """A loading worker that cannot make its socket prints a traceback and hangs (law#184)."""
    for letters in (70, 71):
        folder = Path("/tmp", f"{os.getpid():0{letters}}")  # another run has one of its own
        folder.mkdir()
        try:
            code = "import runs\nruns.guarded(int, 'running.sh')"
            command = [sys.executable, "-c", code]
            done = run(*command, cwd=compose.ROOT / "tools", env={"TMPDIR": str(folder)})
        finally:
            folder.rmdir()
        if letters == 70:
            assert done.returncode == 0, done.stderr
    assert_one_line(done, 2, f"running.sh: error: TMPDIR {folder} is too long")


@pytest.mark.fault("two runs at once")
@pytest.mark.skipif(
    bool(subprocess.run(["unshare", "-u", "true"], capture_output=True).returncode)
    if shutil.which("unshare")
    else True,
    reason="cannot have another host name",
)
def test_a_host_whose_name_has_no_address(tmp_path):
    """torchrun would wait for its own name, and warn for ever (Grendel-GS#9, pytorch#150532)."""
    script = tmp_path / "ranks.py"
    script.write_text("""# no init_process_group: that torchrun starts the ranks is all
import os, sys
sys.stdout.write(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n")
""")
    words, variables = runs.launched(script, 2)
    command = ["unshare", "-u", "sh", "-c", 'hostname no-such-host && exec "$@"', "sh", *words]
    done = run(*command, env=variables)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 2", "1 of 2"]


def test_stop_ends_what_a_process_starts_while_it_ends():
    code = """import signal, subprocess, sys, time
def started_late(*_):
    subprocess.Popen(["sleep", "987"])
    sys.exit()
signal.signal(signal.SIGTERM, started_late)
print("ready", flush=True)
time.sleep(987)"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    with process.stdout:
        process.stdout.readline()
        runs.stop(process)
    left = [each for each in psutil.process_iter() if runs.session_of(each.pid) == process.pid]
    assert process.returncode == 0  # its handler has run
    assert all(each.status() == psutil.STATUS_ZOMBIE for each in left)


@pytest.mark.fault("two runs at once", "Ctrl-C in running.sh")
def test_two_at_once_then_ctrl_c_for_one(stand_ins, data, tmp_path):
    """In folders of their own; each uses torchrun, so their ports must not clash."""
    with_torchrun(
        stand_ins,
        """
    if args.epochs == 3:
        args.result_dir.joinpath("begun").touch()
        time.sleep(987)""",
    )
    words = [data, "--part", "cells", "--without", "amp", "--result_dir"]
    long = Forked(stand_ins / "tools" / "running.py", "3", *words, tmp_path / "3")
    wait_until(lambda: (tmp_path / "3" / "running" / "begun").exists() or long.poll() is not None)
    assert_one_line(drive(stand_ins, "2", *words, tmp_path / "3"), 1, "name another --result_dir")
    short = drive(stand_ins, "2", *words, tmp_path / "2")
    assert short.returncode == 0, short.stdout + short.stderr
    assert [row["status"] for row in rows_of(tmp_path / "2")] == ["ok", "ok"]
    os.kill(long.pid, signal.SIGINT)
    assert long.wait().returncode == 130 and processes_of(tmp_path / "3") == []


# ------------------------------------------------------------------------------ wrong use
@pytest.mark.fault("wrong use of running.sh", "options of the driver behind --")
@pytest.mark.parametrize(
    "words",
    [
        ["0"],
        ["-1"],
        ["abc"],
        ["1.5"],
        ["1", "a", "b"],
        ["--epochs", "1"],
        ["1", "--without", "nothing"],
        ["1", "--with", "profile"],
        [""],
        ["1", "--part", "staircase"],
        ["1", "--minutes", "0"],
        ["1", "--minutes", "nan"],
        ["1", "--runs", "0"],
        ["5", "a", "--", "--epochs", "1"],
        ["5", "a", "--", "--epochs=1"],
        ["5", "a", "--", "--epoch", "1"],
        ["5", "a", "--", "--lr", "1", "--dataset", "b"],
        ["5", "a", "--", "--result_dir", "b"],
    ],
    ids=repr,
)
def test_wrong_use(words, capsys):
    with pytest.raises(SystemExit) as end:
        running.parse(words)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == ""
    assert len(err.splitlines()) == 1 and "./running.sh EPOCHS" in err


@pytest.mark.fault("wrong use of running.sh", "options of the driver behind --")
@pytest.mark.parametrize("words", [[], ["5; touch x"], ["a[$(touch x)]"]], ids=repr)
def test_wrong_use_of_a_shell_writes_and_executes_nothing(words, project, tmp_path):
    before = sorted(project.rglob("*"))
    done = run(project / "running.sh", *words, cwd=tmp_path)
    assert_one_line(done, 2, "./running.sh EPOCHS")
    assert done.stdout == "" and not (tmp_path / "x").exists()
    after = [path for path in sorted(project.rglob("*")) if "__pycache__" not in path.parts]
    assert after == before


@pytest.mark.fault("no images in the source", "wrong options")
@pytest.mark.parametrize(
    "words, part",
    [
        (["1", "no/such/folder"], "--dataset"),
        (["1", "DIGITS", "--", "--no_such_option"], "--no_such_option"),
        (["1", "DIGITS", "--part", "cells", "--", "--dali_device=tpu"], "--dali_device"),
    ],
)
def test_wrong_options_for_the_scripts_end_it_at_once(words, part, project, digits):
    done = drive(project, *[digits if word == "DIGITS" else word for word in words], cwd=project)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and part in done.stderr


@pytest.mark.parametrize(
    "told, batch",
    [
        ("143771\n", 256),
        ("81559\n16384\n", 128),
        ("8192\n", 64),
        ("4096\n", 32),
        ("[N/A]\n", 32),
        (None, 32),
    ],
)
def test_without_a_dataset_a_gpu_gets_work(told, batch, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    if told:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{told}'")
        (tmp_path / "nvidia-smi").chmod(0o755)
    words = running.gpu_workload(["--lr", "0.1"], runs.gpu_gigabytes())
    found = runs.module_of(ROOT / "src" / "train.py").build_parser().parse_args(words)
    assert (found.model, found.image_size, found.batch_size) == ("resnet50", 224, batch)
    for own in (["--model", "resnet18"], ["--batch_size=9"], ["--image_size", "64"]):
        assert running.gpu_workload(own, 80) == []


def test_without_a_dataset_it_draws_the_digits_first(stand_ins):
    change(stand_ins / "make_dataset.py", '"val", 250, 60', '"val", 5, 2')
    mine = stand_ins / "data" / "digits" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.touch()
    assert_one_line(drive(stand_ins, "1"), 1, "digits")  # of another making: left alone
    mine.unlink()
    assert drive(stand_ins, "1", "--without", "DDP", "--without", "amp").returncode == 0
    assert (stand_ins / "data" / "digits" / "train" / "0").is_dir()
    (row,) = rows_of(stand_ins / "results")
    assert Path(row["options"]["dataset"]).name == "digits"
