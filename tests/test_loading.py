"""loading.sh: what it measures, that it names the right bottleneck, and faults."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import loading
import report
from helpers import ROOT, SRC, Forked, flags, processes_of, run, run_forked, wait_until
from records import Loading
from test_loader import photo, save

SMALL = flags(resize=48, image_size=40, batch_size=8, epochs=3, workers=1)
DRIVER = ROOT / "tools" / "loading.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """40 pictures of 12 kB in a folder whose name holds spaces and brackets."""
    folder = tmp_path_factory.mktemp("data") / "a [set] of *"
    for i in range(40):
        save(photo(i, (160, 120)), folder / "train" / f"class{i % 2}" / f"{i}.jpg", quality=95)
    return folder


@pytest.fixture(scope="module")
def in_memory(data):
    """The same pictures on a file system in memory: each loader runs once only, warm."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or loading.file_system(memory)[0] not in loading.MEMORY:
        yield data
        return
    folder = memory / f"loading-test-{os.getpid()}"
    try:
        yield shutil.copytree(data, folder)
    finally:
        shutil.rmtree(folder)


def loader_with(path, line):
    """Write a loader of the user's own: the baseline, with a line before the first epoch."""
    text = (SRC / "loader.py").read_text()
    assert text.count("    epochs = []\n") == 1
    path.write_text(text.replace("    epochs = []\n", f"    {line}\n    epochs = []\n"))
    return path


def rows_of(folder):
    return json.loads((folder / "loading.json").read_text())


@pytest.mark.fault("brackets in the path", "old results")
def test_table_records_and_bottleneck(project, data, tmp_path):
    """With old results there, from another folder."""
    results = tmp_path / "the results"
    (results / "loading").mkdir(parents=True)
    (results / "loading" / "old_cold.json").write_text("{}")
    (results / "loading.json").write_text('[{"loader": "old"}]')
    driver = project / "tools" / "loading.py"
    words = ["loader_LMDB.py", data, "--result_dir", results, *SMALL]
    done = run_forked(driver, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(results)
    assert [(row["loader"], row["cache"]) for row in rows] == [
        (loader, cache) for loader in ("loader", "loader_LMDB") for cache in ("cold", "warm")
    ]
    for row in rows:
        assert row["status"] == "ok" and row["samples"] == 40 and len(row["epochs"]) == 3
        assert row["options"]["image_size"] == 40
        assert row["storage"]["kind"] in ("SSD", "HDD", "network")
        assert row["command"].startswith("./loading.sh loader_LMDB.py")
        assert row["machine"]["cores"] == loading.runs.cores()
    assert max(row["cores_busy"] for row in rows) > 0  # 40 samples can take less than a clock tick
    assert {"bottleneck", "evidence"} <= rows[1].keys() & rows[3].keys()
    text = (results / "loading.md").read_text()
    assert text == report.loading_markdown([*map(Loading.read, rows)]) and text in done.stdout
    assert (results / "loading" / "loader_cold.json").exists()
    assert not list(tmp_path.glob("runs")) and Path(f"{data}_train.lmdb").exists()


def test_a_path_and_options_of_its_own(in_memory, tmp_path):
    """A script of the user's, and an option that the baseline does not have."""
    mine = tmp_path / "my loader.py"
    text = (SRC / "loader_DALI.py").read_text()
    assert text.count('default=0, help="sets order') == 1
    mine.write_text(text.replace('default=0, help="sets order', 'default=7, help="sets order'))
    own = flags(samples=16, dali_device="cpu", split="train")
    done = run_forked(DRIVER, mine, in_memory, "--result_dir", tmp_path, *SMALL, *own)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    assert list(dict.fromkeys(row["loader"] for row in rows)) == ["loader", "my loader"]
    assert rows[-1]["options"]["dali_device"] == "cpu" and rows[-1]["samples"] == 16
    assert {row["options"]["seed"] for row in rows} == {0}  # the baseline's default for both
    baseline = (tmp_path / "loading" / "loader_warm.log").read_text().splitlines()[0]
    assert "--samples=16" in baseline and "--dali_device" not in baseline
    if loading.file_system(in_memory)[0] in loading.MEMORY:
        assert rows[0]["storage"]["kind"] == "memory" and rows[0]["bottleneck"] != "IO"
        if rows[0]["bottleneck"] == "CPU":  # on a busy machine the steps may take longer
            busy = r"\d of \d+ cores busy.*; the files are in memory"
            assert re.search(busy, rows[0]["evidence"])


@pytest.mark.fault("wrong use of loading.sh", "another folder or a link")
@pytest.mark.parametrize(
    "words, said",
    [
        ([], "usage"),
        (["loader.py"], "usage"),
        (["nothing.py", "DATA"], "nothing.py"),
        (["DATA", "loader.py"], "no script"),
        (["loader.py", "/no/such/set"], "/no/such/set"),
        (["train.py", "DATA"], "not a loader"),
        (["loader.py", "EMPTY"], "EMPTY"),
        (["loader.py", "DATA", "--image_size", "abc"], "--image_size"),
        (["loader.py", "DATA", "--cold"], "cold"),
        (["loader_DALI.py", "DATA", "--dali_device", "tpu"], "tpu"),
        (["COPY/loader.py", "DATA"], "rename it"),
        (["loader.py", "DATA", "--dali_device", "cpu"], "--dali_device"),
        (["loader_LMDB.py", "DATA", "--dali_device", "cpu"], "--dali_device"),
        (["x; touch hit", "DATA"], "usage"),
        (["loader.py", "$(touch hit)"], "usage"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use(data, tmp_path, words, said):
    """Exit 2 with the reason, no traceback, nothing executed; the shell runs a link."""
    link = tmp_path / "a link.sh"
    link.symlink_to(ROOT / "loading.sh")
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "COPY").mkdir()
    (tmp_path / "COPY" / "loader.py").write_text((SRC / "loader.py").read_text())
    words = [str(data) if word == "DATA" else word for word in words]
    if len(words) < 2 or "touch" in str(words):  # what a shell might take apart
        done = run(link, *words, cwd=tmp_path)
    else:
        done = run_forked(DRIVER, *words, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "hit").exists()


@pytest.mark.fault("Ctrl-C", "Ctrl-C in running.sh")
def test_ctrl_c(in_memory, tmp_path):
    """The table of the runs before, nothing left."""
    slow = loader_with(tmp_path / "slow.py", "time.sleep(999)")
    process = Forked(DRIVER, slow, in_memory, "--result_dir", "r", *SMALL, cwd=tmp_path)

    def has_begun():
        return any("40 samples" in log.read_text() for log in tmp_path.glob("r/loading/slow_*.log"))

    wait_until(lambda: has_begun() or process.poll() is not None)
    os.kill(process.pid, signal.SIGINT)
    done = process.wait()
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert "Stopped by SIGINT" in done.stderr
    rows = rows_of(tmp_path / "r")
    assert {row["loader"] for row in rows} == {"loader"} and "| loader | warm |" in done.stdout
    table = (tmp_path / "r" / "loading.md").read_text()
    assert f"Stopped by SIGINT after {len(rows)} runs." in table
    assert table == report.loading_markdown([*map(Loading.read, rows)])
    assert not processes_of(tmp_path) and not list(tmp_path.rglob("*.part"))


# --------------------------------------------------------------------------------- bottleneck
# In front of the baseline it makes the disk slow: the first open() of a picture after its pages
# were dropped takes as long as reading it at 0.4 MB/s would.
SLOW_DISK = """
import builtins, io, os, time
marks, plain_open, plain_advise = os.environ["MARKS"], io.open, os.posix_fadvise
def advise(file, start, size, advice):
    if advice == os.POSIX_FADV_DONTNEED:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{file}"))
        plain_open(os.path.join(marks, name), "w").close()
    plain_advise(file, start, size, advice)
def slow_open(path, mode="r", *args, **kwargs):
    if "b" in mode and str(path).endswith(".jpg"):
        try:
            os.unlink(os.path.join(marks, os.path.basename(path)))
            time.sleep(os.path.getsize(path) / 0.4e6)
        except FileNotFoundError:
            pass
    return plain_open(path, mode, *args, **kwargs)
os.posix_fadvise, builtins.open, io.open = advise, slow_open, slow_open
"""


# in place of the driver's: kernels and engine are busy for longer than the cores
NVIDIA_SMI = """#!/usr/bin/env bash
while line='96, 98'; do echo "$line"; [[ $* == *-lms* ]] || exit 0; sleep 0.02; done
"""


@pytest.mark.fault("one variant fails")
def test_it_names_io_on_a_slow_disk(project, data, tmp_path):
    """It also tells how busy a GPU is, by a stand-in's figures, and why a loader fails."""
    (tmp_path / "marks").mkdir()
    baseline = project / "src" / "loader.py"
    baseline.write_text(SLOW_DISK + baseline.read_text())
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    broken = loader_with(
        tmp_path / "broken.py", "os.write(2, b'libpng error: '); raise OSError('out of order')"
    )
    variables = {"MARKS": str(tmp_path / "marks"), "PATH": f"{smi.parent}:{os.environ['PATH']}"}
    words = [broken, data, "--result_dir", tmp_path, *SMALL]
    done = run_forked(project / "tools" / "loading.py", *words, env=variables)
    assert done.returncode == 1, done.stdout + done.stderr
    (cold, warm, last), table = rows_of(tmp_path), (tmp_path / "loading.md").read_text()
    assert (cold["status"], warm["status"], last["status"]) == ("ok", "ok", "fail")
    assert warm["bottleneck"] == "IO", warm["evidence"]
    assert cold["images_per_second"] < warm["images_per_second"]
    assert f"{cold['images_per_second']:,.0f} images/s cold and" in warm["evidence"]
    assert cold["gpu_kernels_busy"] == pytest.approx(0.96)
    assert cold["jpeg_engine_busy"] == pytest.approx(0.98) == cold["gpu_busy"]
    assert "98% |" in table
    assert last["loader"] == "broken" and last["error"] == "broken.py: error: out of order"
    assert last["log"] in table and Path(last["log"]).exists()


@pytest.mark.parametrize(
    "line, share, said",
    [
        ("96, 60", 0.60, "the GPU 96% (its JPEG engine 60%, its kernels 96%); "),
        ("96, [N/A]", 0, "the GPU 96%; "),
    ],
)
def test_a_jpeg_engine_that_is_less_busy_or_not_there(line, share, said):
    watch = loading.GPUWatch()
    watch.process = SimpleNamespace(stdout=[line])
    watch.collect()
    busy = watch.busy(0, time.monotonic())
    assert busy == dict(gpu_busy=0.96, gpu_kernels_busy=0.96, jpeg_engine_busy=share)
    name, evidence = loading.bottleneck(None, row(500, found=busy), {}, 4)
    assert name == "GPU" and said in evidence


def row(speed, needs=50.0, busy=0.1, gpu=None, disk=0.0, found=(), **options):
    epochs = [dict(images_per_second=speed * factor) for factor in (0.5, 0.99, 1, 1.01)]
    return Loading.read(
        dict(
            images_per_second=speed,
            megabytes_per_second=needs,
            cores_busy=busy,
            gpu_busy=gpu,
            gpu_kernels_busy=gpu,
            jpeg_engine_busy=0,
            disk_megabytes_per_second=disk,
            epochs=epochs,
            options=options,
        )
        | dict(found)
    )


def test_the_verdict_on_each_kind_of_evidence(monkeypatch):
    monkeypatch.setattr(loading.runs, "cores", lambda: 16)
    storage, fast = dict(cold_megabytes_per_second=10.0), dict(cold_megabytes_per_second=999.0)
    of = lambda *args: loading.bottleneck(*args)[0]  # noqa: E731
    assert of(row(100), row(500, busy=15), storage, 16) == "IO"
    assert of(row(450), row(500, busy=15), storage, 16) == "CPU"
    assert of(row(100), row(500, busy=15), fast, 16) == "CPU"
    name, evidence = loading.bottleneck(row(100), row(500, lmdb=None), fast, 16)
    assert name == "IO" and "disk alone" not in evidence  # of other files than the LMDB file
    assert of(row(500), row(500, busy=15, disk=40.0), storage, 16) == "IO"  # larger than memory
    assert of(None, row(500, busy=3, gpu=0.95), storage, 16) == "GPU"
    assert of(None, row(500, busy=15.5, gpu=0.4), storage, 16) == "CPU"
    name, evidence = loading.bottleneck(None, row(500, busy=3.9), storage, 4)
    assert name == "CPU" and "try more --workers" in evidence


def cached_bytes(paths):
    """Return how many bytes of each file are in the page cache, by util-linux's fincore."""
    done = run("fincore", "--bytes", "--noheadings", "--output", "RES", *paths)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_it_leaves_the_cache_of_other_files_alone(data, tmp_path):
    if not shutil.which("fincore"):
        pytest.skip("fincore is not installed")
    other = tmp_path / "other.bin"
    other.write_bytes(os.urandom(1 << 20))
    subprocess.run(["sync"], check=True)
    files = sorted(data.rglob("*.jpg"))
    for path in files:
        path.read_bytes()
    assert cached_bytes([other]) == [1 << 20] and all(cached_bytes(files))
    code = "import runpy, sys\nrunpy.run_path(sys.argv[1])['drop_from_cache'](sys.argv[2:])"
    (tmp_path / "drop.py").write_text(code)
    done = run_forked(tmp_path / "drop.py", SRC / "loader.py", *files)
    assert done.returncode == 0, done.stderr
    if any(cached_bytes(files)):
        pytest.skip("this file system keeps its files in memory")
    assert cached_bytes([other]) == [1 << 20]
