"""loading.sh: what it measures, that it names the right bottleneck, and its faults by number."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT, SRC, change, processes_of, run, run_forked, start, wait_until
from test_loader import photo, save

import loading
import report

SMALL = ["--resize", "48", "--crop", "40", "--batch_size", "8", "--epochs", "3",
         "--num_workers", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """40 pictures of 12 kB in a folder whose name is not plain."""
    folder = tmp_path_factory.mktemp("data") / "a [set] of *"
    for i in range(40):
        save(photo(i, (160, 120)), folder / "train" / f"class{i % 2}" / f"{i}.jpg", quality=95)
    return folder


# in place of the baseline: its lines and its record of one real run
STAND_IN = """import shutil, sys, time
from pathlib import Path
record, folder = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--result_dir") + 1])
print("loader: 40 samples, of a stand-in")
for epoch in range(3):
    time.sleep(0.05)
    print(f"epoch {epoch + 1}/3", flush=True)
shutil.copy(record, folder)
"""


@pytest.fixture(scope="module")
def record(data, tmp_path_factory):
    """The record of a run of the baseline."""
    folder = tmp_path_factory.mktemp("record")
    done = run_forked(SRC / "loader.py", "--data_source", data, *SMALL, "--result_dir", folder)
    assert done.returncode == 0, done.stderr
    return folder / "loader.json"


@pytest.fixture
def short(project, record):
    """The project where a stand-in for the baseline runs, which spares to import torch twice."""
    (project / "stand_in.py").write_text(STAND_IN)
    line = "    marks = []\n"
    change(project / "tools" / "loading.py", line, f"""{line}\
    if script.stem == "loader":
        command = [sys.executable, str(ROOT / "stand_in.py"), {str(record)!r}, *command[2:]]
""")
    return project


def rows_of(folder):
    return json.loads((folder / "loading.json").read_text())


def test_f23_f66_f69_table_records_and_bottleneck(project, data, tmp_path):
    """From another folder, through a link, with spaces, `[`, `]` and `*` in the paths -> four rows,
    the table, the records, and what holds each loader back."""
    link = tmp_path / "a link.sh"
    link.symlink_to(project / "loading.sh")
    results = tmp_path / "the results"
    (results / "loading").mkdir(parents=True)
    (results / "loading" / "old_cold.json").write_text("{}")
    (results / "loading.json").write_text('[{"loader": "old"}]')
    done = run(link, "loader_LMDB.py", data, "--result_dir", results, *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(results)
    assert [(row["loader"], row["cache"]) for row in rows] == [
        ("loader", "cold"), ("loader", "warm"), ("loader_LMDB", "cold"), ("loader_LMDB", "warm")]
    for row in rows:
        assert row["status"] == "ok" and row["samples"] == 40 and len(row["epochs"]) == 3
        assert row["options"]["crop"] == 40 and row["storage"]["kind"] in ("SSD", "HDD", "network")
        assert row["cores_busy"] > 0 and row["command"].startswith("./loading.sh loader_LMDB.py")
    assert {"bottleneck", "evidence"} <= rows[1].keys() & rows[3].keys()
    text = (results / "loading.md").read_text()
    assert text == report.loading_markdown(rows) and text in done.stdout
    assert (results / "loading" / "loader_cold.json").exists()
    assert not list(tmp_path.glob("runs")) and Path(f"{data}_train.lmdb").exists()


def test_a_path_and_options_of_its_own(short, data, tmp_path):
    """A script of the user's, and an option that the baseline does not have."""
    mine = tmp_path / "my loader.py"
    mine.write_text((SRC / "loader_DALI.py").read_text())
    done = run_forked(short / "tools" / "loading.py", mine, data, "--result_dir", tmp_path, *SMALL,
                      "--samples", "16", "--dali_device", "cpu", "--split", "train")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    assert [row["loader"] for row in rows] == ["loader", "loader", "my loader", "my loader"]
    assert rows[-1]["options"]["dali_device"] == "cpu" and rows[-1]["samples"] == 16
    baseline = (tmp_path / "loading" / "loader_warm.log").read_text().splitlines()[0]
    assert "--samples=16" in baseline and "--dali_device" not in baseline


@pytest.mark.parametrize("words, said", [
    ([], "usage"), (["loader.py"], "usage"), (["nothing.py", "DATA"], "nothing.py"),
    (["DATA", "loader.py"], "no script"), (["loader.py", "/no/such/set"], "/no/such/set"),
    (["train.py", "DATA"], "no loader"), (["loader.py", "EMPTY"], "EMPTY"),
    (["loader.py", "DATA", "--crop", "abc"], "--crop"), (["loader.py", "DATA", "--cold"], "cold"),
    (["loader_DALI.py", "DATA", "--dali_device", "tpu"], "tpu"),
    (["COPY/loader.py", "DATA"], "name"),
    (["loader.py", "DATA", "--dali_device", "cpu"], "--dali_device"),
    (["loader_LMDB.py", "DATA", "--dali_device", "cpu"], "--dali_device"),
    (["x; touch hit", "DATA"], "usage"), (["loader.py", "$(touch hit)"], "usage")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_f68_wrong_use(data, tmp_path, words, said):
    """Arguments missing, swapped or unknown, no data set, wrong options, `$(touch hit)` -> exit 2
    and the reason, no traceback, nothing executed."""
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "COPY").mkdir()
    (tmp_path / "COPY" / "loader.py").write_text((SRC / "loader.py").read_text())
    words = [str(data) if word == "DATA" else word for word in words]
    if len(words) < 2 or "touch" in str(words):  # what a shell might take apart
        done = run(ROOT / "loading.sh", *words, cwd=tmp_path)
    else:
        done = run_forked(ROOT / "tools" / "loading.py", *words, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "hit").exists()


def test_f65_a_loader_that_fails(short, data, tmp_path):
    """A loader that raises an error -> its record says fail and why, the table has the log's path;
    exit 1."""
    broken = tmp_path / "loader_broken.py"
    broken.write_text((SRC / "loader.py").read_text().replace(
        "    epochs = []\n", '    raise OSError("out of order")\n', 1))
    done = run_forked(short / "tools" / "loading.py", broken, data, "--result_dir", tmp_path, *SMALL)
    assert done.returncode == 1
    last = rows_of(tmp_path)[-1]
    assert last["status"] == "fail" and "out of order" in last["error"]
    assert last["log"] in (tmp_path / "loading.md").read_text() and Path(last["log"]).exists()


def test_f47_without_dali_it_is_skipped(short, data, tmp_path):
    """loader_DALI.py where DALI cannot be imported -> SKIP, and what to install; exit 0."""
    change(short / "src" / "loader_DALI.py", "from nvidia.dali", "from no_such_package")
    done = run_forked(short / "tools" / "loading.py", "loader_DALI.py", data, "--result_dir", tmp_path,
                      *SMALL)
    assert done.returncode == 0, done.stderr
    assert "SKIP" in done.stdout and "pip install nvidia-dali-cuda120" in done.stdout


@pytest.mark.parametrize("number, whole_group", [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_f31_f67_ctrl_c(number, whole_group, short, data, tmp_path):
    """Ctrl-C to the whole group, or SIGTERM to the driver alone, in the third run -> exit 130
    within 30 seconds, no process or temporary file left, the table of the two runs before."""
    slow = tmp_path / "slow.py"
    slow.write_text((SRC / "loader.py").read_text().replace(
        "    epochs = []\n", "    epochs = []\n    time.sleep(999)\n", 1))
    process = start([short / "loading.sh", slow, data, "--result_dir", tmp_path / "r", *SMALL],
                    start_new_session=True)
    log = tmp_path / "r" / "loading" / "slow_cold.log"
    wait_until(lambda: log.exists() and "40 samples" in log.read_text(), 90)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err
    assert f"Stopped by {number.name}" in err
    assert [(row["loader"], row["cache"]) for row in rows_of(tmp_path / "r")] == [
        ("loader", "cold"), ("loader", "warm")]
    assert "| loader | warm |" in out
    table = (tmp_path / "r" / "loading.md").read_text()
    assert f"Stopped by {number.name} after 2 runs." in table
    assert table == report.loading_markdown(rows_of(tmp_path / "r"))
    assert not processes_of(tmp_path) and not list(tmp_path.rglob("*.part"))


# --------------------------------------------------------------------------------- bottleneck
@pytest.fixture
def disk(data, tmp_path):
    """The data set on a disk of its own: limited, it does not keep Python from its packages."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, folder]):
        done = shutil.which(command[0]) and subprocess.run(command, capture_output=True, text=True)
        if not done or done.returncode:
            said = done.stderr.strip() if done else "not installed"
            pytest.skip(f"no disk of one's own is to be had here ({command[0]}: {said})")
    try:
        shutil.copytree(data, folder / data.name)
        yield folder / data.name
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        image.unlink()


@contextlib.contextmanager
def throttled(folder, megabytes):
    """A function for a process to call at its start: from then on the disk under `folder` gives it
    so many megabytes a second. Needs the right to make a control group."""
    number = os.stat(folder).st_dev
    disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not disk.exists():
        pytest.skip("the folder lies on no block device")
    disk = disk.resolve()
    limit = (disk / "dev" if not (disk / "partition").exists() else disk.parent / "dev").read_text()
    size = int(megabytes * 1e6)
    old, new = Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")
    group = (old if old.exists() else new) / f"throttled{os.getpid()}"
    try:
        group.mkdir()
        if old.exists():
            (group / "blkio.throttle.read_bps_device").write_text(f"{limit.strip()} {size}")
        else:
            (group / "io.max").write_text(f"{limit.strip()} rbps={size}")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no right to limit a disk by a control group here ({error})")
    try:
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def verdicts(folder):
    return {row["loader"]: (row["bottleneck"], row["evidence"]) for row in rows_of(folder)
            if "bottleneck" in row}


def test_it_names_io_on_a_throttled_disk(disk, tmp_path):
    """From a disk limited by a control group, with the disk's own speed as evidence."""
    with throttled(disk, 0.4) as slow:
        done = run(ROOT / "loading.sh", "loader.py", disk, "--result_dir", tmp_path, *SMALL,
                   preexec_fn=slow)
    assert done.returncode == 0, done.stdout + done.stderr
    name, evidence = verdicts(tmp_path)["loader"]
    assert name == "IO", evidence
    cold, warm = rows_of(tmp_path)
    assert cold["megabytes_per_second"] < 0.6 and cold["images_per_second"] < warm[
        "images_per_second"] / 2
    assert f"{cold['images_per_second']:,.0f} images/s against" in evidence


SLOW_DISK = """
import builtins
plain = io.open
def slow(path, mode="r", *args, **kwargs):
    if str(path).endswith(".jpg") and "b" in mode:
        from loading import cached  # RWF_NOWAIT would have a fast disk read the page at once
        if not cached([path]):
            time.sleep(os.path.getsize(path) / 0.4e6)
    return plain(path, mode, *args, **kwargs)
sys.path.append(PROJECT)
builtins.open = io.open = slow
"""


def test_it_names_io_on_a_simulated_disk(project, data, tmp_path):
    """Simulated, for machines where no disk can be throttled: to open a .jpg that is not in the
    page cache takes as long as to read it from a disk of 0.4 megabytes a second."""
    if loading.cached([next(data.rglob("*.jpg"))]) is None:
        pytest.skip("this file system does not tell what is in the page cache")
    loader = project / "src" / "loader.py"  # which the driver imports, too
    change(loader, "\nimport json\n", "\nimport io\nimport json\n")
    slow = SLOW_DISK.replace("PROJECT", repr(str(project)))
    change(loader, "\n\n\ndef at_least", f"\n{slow}\n\ndef at_least")
    done = run_forked(project / "tools" / "loading.py", "loader.py", data, "--result_dir", tmp_path, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert verdicts(tmp_path)["loader"][0] == "IO", verdicts(tmp_path)


# in place of the driver's: of what it samples, kernels 57 % of the time and its JPEG engine 98 %
NVIDIA_SMI = """#!/usr/bin/env bash
case "$*" in
*utilization.jpeg*) line='57, 98'; {engine} ;;
*utilization.gpu*) line=57 ;;
*) line='550.00' ;;
esac
echo "$line"
while [[ $* == *-lms* ]]; do sleep 0.02; echo "$line"; done
"""


@pytest.mark.parametrize("engine, share, said", [
    ("true", 0.98, "the GPU 98% (its JPEG engine 98%, kernels 57%); "),
    ("line='57, 60'", 0.60, "the GPU 60% (its JPEG engine 60%, kernels 57%): neither cores nor"),
    ("line='57, [N/A]'", 0, "the GPU 57%: neither cores nor GPU are full"),
    ("exit 1", None, "the GPU 57%: neither cores nor GPU are full")],
    ids=["engine", "neither", "no engine", "older driver"])
def test_how_busy_the_gpu_and_its_jpeg_engine_are(engine, share, said, short, data, tmp_path):
    """By nvidia-smi, here a stand-in for it -> record and evidence have both, where it tells."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(NVIDIA_SMI.replace("{engine}", engine))
    smi.chmod(0o755)
    change(short / "stand_in.py", "sleep(0.05)", "sleep(0.3)")
    done = run(short / "loading.sh", "loader.py", data, "--result_dir", tmp_path, *SMALL,
               env={"PATH": f"{smi.parent}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stdout + done.stderr
    warm = rows_of(tmp_path)[-1]
    assert warm["gpu_kernels_busy"] == pytest.approx(0.57)
    assert warm["jpeg_engine_busy"] == (share if share is None else pytest.approx(share))
    assert warm["gpu_busy"] == pytest.approx(max(0.57, share or 0))
    assert warm["bottleneck"] == "GPU" and said in warm["evidence"]
    assert f"{max(0.57, share or 0):.0%} |" in (tmp_path / "loading.md").read_text()


def row(speed, needs=50.0, busy=0.1, gpu=None, disk=0.0):
    epochs = [dict(images_per_second=speed * factor) for factor in (0.5, 0.99, 1, 1.01)]
    return dict(images_per_second=speed, megabytes_per_second=needs, cores_busy=busy, gpu_busy=gpu,
                gpu_kernels_busy=gpu, jpeg_engine_busy=0, disk_megabytes_per_second=disk,
                epochs=epochs)


def test_the_verdict_on_each_kind_of_evidence(monkeypatch):
    monkeypatch.setattr(loading, "cores", lambda: 16)
    storage = dict(cold_megabytes_per_second=10.0, kind="SSD")
    of = lambda *args: loading.bottleneck(*args)[0]  # noqa: E731
    assert of(row(100), row(500, busy=15), storage, 16) == "IO"
    assert of(row(450), row(500, busy=15), storage, 16) == "CPU"
    fast = dict(cold_megabytes_per_second=999.0, kind="SSD")
    assert of(row(100), row(500, busy=15), fast, 16) == "CPU"
    assert of(row(500), row(500, busy=15, disk=40.0), storage, 16) == "IO"  # larger than memory
    assert of(None, row(500, busy=3, gpu=0.95), storage, 16) == "GPU"
    assert of(None, row(500, busy=15.5, gpu=0.4), storage, 16) == "CPU"
    name, evidence = loading.bottleneck(None, row(500, busy=3.9), storage, 4)
    assert name == "CPU" and "raise --num_workers" in evidence


def test_it_leaves_the_cache_of_other_files_alone(data, tmp_path):
    other = tmp_path / "other.bin"
    other.write_bytes(os.urandom(1 << 20))
    subprocess.run(["sync"], check=True)
    if loading.cached([other]) is None:
        pytest.skip("this file system does not tell what is in the page cache")
    sys.path.insert(0, str(SRC))
    import loader
    files = sorted(data.rglob("*.jpg"))
    for path in files:
        path.read_bytes()
    assert loading.cached([other]) == 1 and loading.cached(files) == 1
    loader.drop_from_cache(files)
    assert loading.cached(files) == 0 and loading.cached([other]) == 1
    time.sleep(0.2)
    assert loading.cached(files) == 0  # to look loads nothing


def test_cpu_is_named_in_memory(data, tmp_path):
    memory = Path("/dev/shm")
    if not memory.is_dir() or loading.file_system(memory)[0] not in loading.MEMORY:
        pytest.skip("no file system in memory at /dev/shm")
    folder = memory / f"loading-test-{os.getpid()}"
    try:
        shutil.copytree(data, folder)
        done = run_forked(ROOT / "tools" / "loading.py", "loader.py", folder, "--result_dir", tmp_path,
                          *SMALL)
        assert done.returncode == 0, done.stderr
        (only,) = rows_of(tmp_path)
        assert only["storage"]["kind"] == "memory" and only["bottleneck"] == "CPU"
        assert re.search(r"\d of \d+ cores busy.*; the files are in memory", only["evidence"])
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)
