"""running.sh as a user runs it: tables, failures, Ctrl-C, wrong use."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import psutil
import pytest
from helpers import SRC, TECHNIQUES, change, processes_of, run, run_forked, start, train

import running

CELLS = [(row, column) for row in ("single", "DP", "DDP")
         for column in ("plain", "+cudnn", "+amp", "+cudnn +amp")]
EXCLUSIVE = [("+DALI", "+LMDB", "+cache"), ("+DDP", "+DP")]
QUICK = ["--", "--steps", "1", "--batch_size", "40", "--width", "4", "--workers", "0",
         "--image_size", "16"]

# in place of a joined script: the record of one real run, under this script's name
STAND_IN = """import json, sys
from pathlib import Path
script, record = map(Path, sys.argv[1:3])
made = json.loads(record.read_text()) | {"script": script.stem}
for word, value in zip(sys.argv[3:], [*sys.argv[4:], ""]):
    if word.startswith("--"):  # the baseline's are in the record
        name, _, own = word[2:].partition("=")
        made["options"].setdefault(name.replace("-", "_"), own or value)
if "stem" in script.stem:
    print(f"{script.stem}: nothing to do: no layers")
# all techniques pay but one
gain = 1.1 ** script.stem.count("_") * (0.5 if "fused" in script.stem else 1)
made["images_per_second"] *= gain
made["train_seconds"] /= gain
for i, epoch in enumerate(made["epochs"]):
    epoch["images_per_second"] *= gain
    epoch["seconds"] /= gain
    print(f"epoch {i + 1}/{len(made['epochs'])}")
script.with_suffix(".json").write_text(json.dumps(made))
"""


@pytest.fixture(scope="module")
def record(digits, tmp_path_factory):
    """The record of a run of the baseline."""
    folder = tmp_path_factory.mktemp("record")
    train(SRC / "train.py", "--dataset", digits, "--epochs", 2, *QUICK[1:], "--result_dir", folder)
    return folder / "train.json"


def train_only(names, project, record):
    """Has the project's running.py run these scripts, and for all others a stand-in.

    To the driver a run is a process that ends with a record: a stand-in spares to import torch.
    """
    (project / "stand_in.py").write_text(STAND_IN)
    head = "def command_of(script, processes):\n"
    change(project / "tools" / "running.py", head, f"""{head}\
    if script.stem not in {[*names]!r}:
        return [sys.executable, str(ROOT / "stand_in.py"), str(script), {str(record)!r}]
""")


def test_f23_f47_f66_f69_twelve_cells_from_another_folder_through_a_link(project, digits, tmp_path):
    """From another folder, through a link, spaces in the path, old results there, DALI's import
    broken -> the rows of this run alone; DALI is SKIP with what to install; exit 0.

    Three of the cells are trained; the others take over the first one's record: that joined
    scripts train is for test_compose.py.
    """
    results = project / "results"
    train_only(["train", "train_DP_cudnn_amp", "train_DDP_cudnn_amp", "train_DALI"], project,
               results / "running" / "train.json")
    change(project / "src" / "train_DALI.py", "from nvidia.dali", "from no_such_package")
    (results / "running").mkdir(parents=True)
    (results / "running" / "train_old.json").write_text("{}")
    (results / "running.md").write_text("old")
    data = tmp_path / "a [set] of *"
    shutil.copytree(digits, data)
    link = tmp_path / "link.sh"
    link.symlink_to(project / "running.sh")
    done = run(link, "2", data.name, *QUICK, "--compile-mode", "reduce-overhead",
               "--amp_dtype=bfloat16", cwd=tmp_path)  # for those that have them
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((results / "running.json").read_text())
    assert [(row["row"], row["column"]) for row in rows[:12]] == CELLS
    assert_staircase(rows[0], rows[12:])
    table = (results / "running.md").read_text()
    assert "| +DALI | SKIP: train_DALI.py: error: " in table and "pip install" in table
    assert f"torchvision {version('torchvision')}, Python " in table
    assert "| +stem | SKIP: nothing to do: no layers" in table  # and not kept
    compiled = [(results / "running" / f"{name}.log").read_text().splitlines()[0] for name in {
        "_".join(["train", *row["techniques"]]) for row in rows if "compile" in row["techniques"]}]
    assert compiled and all("--compile-mode reduce-overhead" in line for line in compiled)
    best = [row for row in rows[12:] if row["kept"]]
    assert f"`./compose.sh {' '.join(best[-1]['techniques'])} > my_train.py`" in table
    # what did not pay is tried again when others have been kept since
    assert [row["kept"] for row in rows[12:] if row["column"] == "+fused"] == [False, False]
    for row in rows[:12]:
        assert row["status"] == "ok"
        name = "_".join(["train", *row["techniques"]])
        assert row["script"] == name and len(row["epochs"]) == 2
        assert row["options"]["epochs"] == 2 and row["options"]["steps"] == 1
        assert row["options"].get("amp_dtype") == ("bfloat16" if "amp" in name else None)
        # the joined script, its record and its log are there to open
        text = (results / "running" / f"{name}.py").read_text()
        marks = ("GradScaler", "init_process_group", "nn.DataParallel(net)")
        assert [mark in text for mark in marks] == ["amp" in name, "DDP" in name,
                                                    row["row"] == "DP"]
        assert json.loads((results / "running" / f"{name}.json").read_text())["epochs"] == row[
            "epochs"]
        assert "epoch 2/2" in (results / "running" / f"{name}.log").read_text()
    assert (results / "running" / "train_old.json").exists()  # not its own to delete
    assert table.strip() in done.stdout and "old" not in table
    assert "\n".join(table.splitlines()[:5]).count("x)") == 12
    assert f"{rows[0]['train_seconds']:.2f} s (1.00x)" in table
    assert f"{rows[0]['train_seconds'] / rows[5]['train_seconds']:.2f}x" in table
    assert "`./running.sh 2 " in table and rows[0]["environment"]["torch"] in table
    if rows[0]["environment"]["gpus"] == 0:
        assert "no GPU here" in table
    assert (results / "running.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    progress = [line for line in done.stdout.splitlines() if line.startswith("[")]
    planned = 12 + len({row["column"] for row in rows[12:]})
    assert len(progress) == len(rows)
    assert progress[2].startswith(f"[ 3/{planned}] single    +amp")
    assert all("s to go" in line for line in progress)


def assert_staircase(baseline, steps):
    """Each step adds one technique to the fastest set so far; of a group at most one is kept."""
    pointless = running.POINTLESS.get(baseline["environment"]["gpus"], ())
    assert {row["column"] for row in steps} == {
        f"+{name}" for name in TECHNIQUES if name not in ("profile", *pointless)}
    best, left = baseline, list(steps)
    while left:
        on = left[0]["on"]
        assert on == best["techniques"]
        choice = next(({*each} for each in EXCLUSIVE if left[0]["column"] in each),
                      {left[0]["column"]})
        group = list(itertools.takewhile(lambda row: row["column"] in choice, left))
        left = left[len(group):]
        for row in group:
            assert row["row"] == "staircase" and row["on"] == on
            assert row["techniques"] == sorted([*on, row["column"][1:]])
        good = [row for row in group if row["status"] == "ok"]
        top = max(good, key=lambda row: row["images_per_second"], default=None)
        pays = bool(top) and top["images_per_second"] >= 1.01 * best["images_per_second"]
        assert [row["kept"] for row in group] == [pays and row is top for row in group]
        best = top if pays else best


def test_the_staircases_order(monkeypatch):
    others = {"DALI", "LMDB", "cache", "DDP", "DP", "profile"}
    computing = [(name,) for name in TECHNIQUES if name not in others]
    assert ("amp",) in computing and ("cudnn",) in computing
    found = running.groups()  # joins all pairs
    monkeypatch.setattr(running, "groups", lambda: found)
    assert [*running.stairs_of(2, ["LMDB"])] == [("DALI", "cache"), ("DDP", "DP"), *computing]
    assert [*running.stairs_of(4, ["DALI", "LMDB", "cache", "DP"])] == [("DDP",), *computing]
    assert [*running.stairs_of(2, ["LMDB", "DDP"])] == [("DALI", "cache"), *computing, ("DP",)]
    assert [*running.stairs_of(1, [])] == [("DALI", "LMDB", "cache"), *computing]
    computing.remove(("cudnn",))
    assert [*running.stairs_of(0, [])] == [("DALI", "LMDB", "cache"), *computing, ("DDP",)]


def test_the_staircase_tries_again_and_loading_first_where_steps_wait():
    def row(techniques, wait):
        return dict(status="ok", techniques=techniques, epochs=[dict(data_wait=wait)] * 3)
    data, amp, compiled, both = ("DALI", "cache"), ("amp",), ("compile",), ("DDP", "DP")
    stairs = {amp: "compute", data: "data", compiled: "compute", both: "parallel"}
    assert running.due(stairs, {}, row([], 0.15)) == [["amp"], [*data], ["compile"], [*both]]
    assert running.due(stairs, {}, row([], 0.25)) == [[*data], ["amp"], ["compile"], [*both]]
    tries = {name: ([], True) for name in (*data, "amp")}
    assert running.due(stairs, tries, row(["amp"], 0.15)) == [["compile"], [*both], [*data]]
    assert running.due(stairs, tries, row(["amp"], 0.25)) == [[*data], ["compile"], [*both]]
    # once loading is faster, what did not pay before is due again, but not what cannot be run
    tries |= {"DALI": (["amp"], True), "cache": ([], False), "compile": (["amp"], True),
              "DDP": (["amp"], True), "DP": (["amp"], False)}
    assert running.due(stairs, tries, row(["DALI", "amp"], 0.3)) == [["compile"], ["DDP"]]
    assert running.due(stairs, tries, row(["amp"], 0.3)) == []
    assert running.due(stairs, {}, dict(status="fail", techniques=[]))[0] == ["amp"]


def test_f63_f65_failing_variants_leave_rows_and_the_others_run(project, record):
    """train_amp.py raises an error, train_cudnn.py's loss is infinite -> FAIL in their rows, the
    error and the log's path in the table; the others run; exit 1.

    On the default digits, here fewer, which it makes first. One failure under torchrun is enough,
    so the table has one row here; of the others there are stand-ins.
    """
    change(project / "make_dataset.py", '"val", 250, 60)', '"val", 25, 6)')
    train_only(["train_cudnn", "train_amp", "train_DDP_amp"], project, record)
    change(project / "src" / "train_amp.py", "scaler.update()", "scaler.update(no_such_name)")
    change(project / "src" / "train_cudnn.py", "= loss.detach()", "= loss.detach() / 0")
    change(project / "tools" / "report.py", '"DP": ["DP"], "DDP": ["DDP"]}', "}")
    change(project / "tools" / "report.py", '"+cudnn +amp": ["cudnn", "amp"]}',
           '"+DDP +amp": ["DDP", "amp"], "+DP": ["DP"]}')
    done = run_forked(project / "tools" / "running.py", "1", "--part", "cells", *QUICK, timeout=300)
    assert done.returncode == 1
    assert (project / "data" / "digits" / "train" / "0").is_dir()
    rows = json.loads((project / "results" / "running.json").read_text())
    assert [row["status"] for row in rows] == ["ok", "fail", "fail", "fail", "ok"]
    table = (project / "results" / "running.md").read_text()
    for row in rows:
        if row["status"] == "fail":
            word = "no_such_name" if "amp" in row["techniques"] else "finite at epoch 1, step 1;"
            assert word in row["error"] and row["log"] in table
            with open(row["log"]) as log:
                assert word in log.read()
    assert table.splitlines()[2].count("FAIL") == 3
    assert done.stdout.count("FAIL: NameError") == 2  # when it ends, and in the table
    assert done.stdout.count("]: NameError") == 2  # of a rank


@pytest.mark.parametrize("number, whole_group", [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_f31_f67_ctrl_c_in_the_third_run(number, whole_group, project, digits, record):
    """Ctrl-C, or SIGTERM to the driver alone, in the third run -> exit 130 within 30 seconds, no
    process left, the table of the two runs before.

    Ctrl-C reaches the whole group of a terminal; kill reaches the driver alone. Stand-ins have run
    before.
    """
    train_only(["train_amp"], project, record)
    process = start([project / "running.sh", "2", digits, "--part", "cells", *QUICK[:-4],
                     "--workers", "2"], cwd=project, start_new_session=True)
    log = project / "results" / "running" / "train_amp.log"
    while not (log.exists() and " parameters, " in log.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    sent = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - sent < 30
    assert process.returncode == 130
    assert processes_of(project) == [] and not list(project.rglob("*.part"))
    rows = json.loads((project / "results" / "running.json").read_text())
    assert [row["column"] for row in rows] == ["plain", "+cudnn"]
    assert "| single | " in out and "after 2 of 12 runs" in out and "Traceback" not in out + err


def test_stop_ends_what_a_process_starts_while_it_ends():
    code = """import signal, subprocess, sys, time
def started_late(*_):
    subprocess.Popen(["sleep", "987"])
    sys.exit()
signal.signal(signal.SIGTERM, started_late)
print("ready", flush=True)
time.sleep(987)"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                               start_new_session=True)
    with process.stdout:
        process.stdout.readline()
        running.stop(process)
    left = [each for each in psutil.process_iter() if running.session_of(each.pid) == process.pid]
    assert process.returncode == 0  # its handler has run
    assert all(each.status() == psutil.STATUS_ZOMBIE for each in left)


@pytest.mark.parametrize("words", [
    [], ["0"], ["-1"], ["abc"], ["5; touch x"], ["a[$(touch x)]"], ["1.5"], ["٣"], ["1", "a", "b"],
    ["--epochs", "1"], ["1", "--without", "nothing"], [""]], ids=repr)
def test_f64_wrong_use(words, project, tmp_path):
    """EPOCHS missing, 0, -1, abc, 1.5, `5; touch x`, `a[$(touch x)]`, or words too many -> the
    usage on one line, exit 2, nothing executed or written."""
    before = sorted(project.rglob("*"))
    done = run(project / "running.sh", *words, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "./running.sh EPOCHS" in done.stderr
    assert not (tmp_path / "x").exists() and not (project / "x").exists()
    after = [path for path in sorted(project.rglob("*")) if "__pycache__" not in path.parts]
    assert after == before


@pytest.mark.parametrize("words, part", [
    (["1", "no/such/folder"], "--dataset"), (["1", "DIGITS", "--", "--model", "none"], "--model"),
    (["1", "DIGITS", "--", "--batch_size", "0"], "--batch_size"),
    (["1", "DIGITS", "--", "--no_such_option"], "--no_such_option"),
    (["1", "DIGITS", "--", "--amp-dtype", "float61"], "--amp_dtype"),
    (["1", "DIGITS", "--part", "cells", "--", "--dali_device=tpu"], "--dali_device")])
def test_f19_f61_wrong_options_for_the_scripts_end_it_at_once(words, part, project, digits):
    """A data set that is not there, an unknown model, --batch_size 0, an unknown option, a wrong
    value for an option of one technique -> one line names the option, exit 2."""
    done = run_forked(project / "tools" / "running.py", *[digits if word == "DIGITS" else word
                                                for word in words], cwd=project)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and part in done.stderr


def test_f62_two_at_once_in_one_folder_are_refused(project, digits):
    """A second run in the folder of the first -> refused in one line that names --result_dir, exit
    1; the first goes on."""
    first = start([project / "running.sh", "50", digits, "--part", "cells", "--", "--batch_size",
                   "40"], cwd=project, start_new_session=True)
    while not (project / "results" / "running" / "train.log").exists():
        time.sleep(0.05)
    second = run(project / "running.sh", "1", digits, cwd=project)
    assert second.returncode == 1 and "--result_dir" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert first.returncode == 130


def test_f62_f67_two_at_once_in_folders_of_their_own_then_ctrl_c_for_one(project, digits, tmp_path):
    """Two runs at once, each with torchrun and a --result_dir of its own, then Ctrl-C for one while
    it trains -> no clash of ports, the other's rows are there; exit 130, no process left."""
    change(project / "tools" / "report.py", 'ROWS = {"single": [], "DP": ["DP"], ', "ROWS = {")
    text = (project / "tools" / "report.py").read_text()
    (project / "tools" / "report.py").write_text(re.sub(
        r"COLUMNS = \{.*?\}", 'COLUMNS = {"plain": []}', text, count=1, flags=re.DOTALL))
    long, short = [start([
        project / "running.sh", epochs, digits, "--part", "cells", "--result_dir",
        tmp_path / epochs, *QUICK[:-4], "--workers", "2"], cwd=project, start_new_session=True)
        for epochs in ("9999", "2")]
    out, err = short.communicate(timeout=200)
    assert short.returncode == 0, out + err
    (row,) = json.loads((tmp_path / "2" / "running.json").read_text())
    assert row["script"] == "train_DDP" and row["status"] == "ok"
    log = tmp_path / "9999" / "running" / "train_DDP.log"
    while not (log.exists() and "epoch 1/9999" in log.read_text()):
        assert long.poll() is None
        time.sleep(0.05)
    assert len([process for process in processes_of(tmp_path)
                if "train_DDP.py" in " ".join(process.cmdline())]) >= 3
    os.killpg(long.pid, signal.SIGINT)
    long.communicate(timeout=60)
    assert long.returncode == 130
    assert processes_of(tmp_path) == []


def test_f31_ctrl_c_before_the_first_run(project, digits):
    """Ctrl-C before the first run -> exit 130, no traceback."""
    process = start([project / "running.sh", "1", digits], cwd=project, start_new_session=True)
    while not (project / "results" / "running" / ".lock").exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in out + err


def give_up_soon(name, project):
    """Has a technique take long, and the driver wait for it a second and a bit."""
    change(project / "src" / f"train_{name}.py", "\nimport torch\n",
           "\ntime.sleep(99)\nimport torch\n")
    change(project / "tools" / "running.py", "limit = 300 + 3 *",
           f"limit = (1 if {name!r} in techniques else 300) + 3 *")


def test_the_staircase_alone_gives_up_on_what_takes_too_long(project, digits, record):
    """And a data set that a technique cannot hold is a SKIP with the script's own words."""
    for path in (project / "src").glob("train_*.py"):
        if path.stem not in ("train_cache", "train_fused"):
            path.unlink()
    train_only(["train_cache", "train_fused"], project, record)
    change(project / "src" / "train_cache.py", "if needed > free:", "if True:")
    give_up_soon("fused", project)
    done = run_forked(project / "tools" / "running.py", "2", digits, "--part", "staircase", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((project / "results" / "running.json").read_text())
    assert [row["status"] for row in rows] == ["ok", "skip", "skip"]
    assert "the decoded pictures take" in rows[1]["error"] and "given up after" in rows[2]["error"]
    assert "training seconds |" not in done.stdout and "| staircase |" in done.stdout
    assert processes_of(project) == []


def test_the_grid_gives_up_on_what_takes_too_long(project, digits, record):
    train_only(["train_cudnn"], project, record)
    give_up_soon("cudnn", project)
    done = run_forked(project / "tools" / "running.py", "1", digits, "--part", "cells", "--without", "amp",
                      "--without", "DP", "--without", "DDP", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\| training seconds \| plain \| \+cudnn \|\n.*\n\| single \| .* \| SKIP \|",
                     done.stdout)
    assert "given up after" in done.stdout and processes_of(project) == []


def test_without_techniques(project, digits, record):
    train_only([], project, record)
    words = [word for name in TECHNIQUES if name != "amp" for word in ("--without", name)]
    done = run_forked(project / "tools" / "running.py", "2", digits, *words, *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((project / "results" / "running.json").read_text())
    assert [(row["row"], row["column"]) for row in rows] == [
        ("single", "plain"), ("single", "+amp"), ("staircase", "+amp")]
    assert "| DP |" not in done.stdout and "| DDP |" not in done.stdout


def test_digits_of_another_making_are_left_alone(project):
    (project / "data" / "digits").mkdir(parents=True)
    (project / "data" / "digits" / "mine.txt").write_text("")
    done = run(project / "running.sh", "1", cwd=project)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "digits" in done.stderr
