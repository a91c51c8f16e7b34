"""Markers, and fixtures: tiny data sets, and a copy of the project."""

import contextlib
import fcntl
import gc
import os
import random
import shutil
import subprocess

import numpy as np
import psutil
import pytest
from PIL import Image

from forked_runs import FORKS
from forked_workers import fork_workers
from helpers import ROOT, SERVER, STARTED, VARIABLES, Forked, draw_digits


# tests that run side by side share the cores: with more threads than cores all take far longer,
# and threads that wait for each other must not keep a core busy
def pytest_configure(config):
    if workers := getattr(config.option, "numprocesses", None):  # this process starts them
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
        for server in SERVER, FORKS:
            server.run()
        fork_workers()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Have one worker compile the tests, which takes seconds, before the others read them."""
    with open(__file__) as lock:
        if "PYTEST_XDIST_WORKER" in os.environ:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)
        done = yield
    gc.freeze()  # collections need not look through all imports again
    return done


def pytest_collection_modifyitems(items):
    import torch

    gpus = torch.cuda.device_count()
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    reasons = {
        "gpu": not gpus and "needs an NVIDIA GPU",
        "gpus": gpus < 2 and f"needs two NVIDIA GPUs, has {gpus}",
        "compiler": not compiler and "needs a C++ compiler: apt-get install g++",
    }
    for item in items:
        for name, reason in reasons.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Hide the GPUs from tests without a GPU's mark, so that they do the same on every machine."""
    needed = bool(item.get_closest_marker("gpu") or item.get_closest_marker("gpus"))
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if not needed:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif VISIBLE is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = VISIBLE
    VARIABLES.clear()
    VARIABLES.update(
        NEEDS_GPU=str(needed),
        **{key: os.environ[key] for key in ["CUDA_VISIBLE_DEVICES"] if key in os.environ},
    )


def pytest_unconfigure():
    gc.freeze()  # Python would look through all objects once more as it ends, which takes seconds


@pytest.fixture(autouse=True)
def nothing_goes_on():
    """End the processes that a failed test has left."""
    STARTED.clear()
    yield
    for process in STARTED:
        if isinstance(process, (subprocess.Popen, Forked)) and process.poll() is None:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
        process.kill()


@pytest.fixture
def rng():
    """A random.Random with a new seed, which a failed test shows."""
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"rng's seed: {seed}")
    return random.Random(seed)


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """Digits: 24 training and 3 validation pictures in each of ten classes."""
    return draw_digits(tmp_path_factory.mktemp("data") / "digits", train=24, val=3)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """JPEGs of several shapes: colour, grey, EXIF orientation 6; 26 to train, 13 to validate."""
    folder = tmp_path_factory.mktemp("photos")
    made = np.random.default_rng(0)
    for split, count in (("train", 26), ("val", 13)):
        for k in range(count):
            size = [(60, 40), (41, 77), (50, 50)][k % 3]
            coarse = made.integers(0, 256, (5, 6, 3), dtype=np.uint8)
            picture = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
            exif = Image.Exif()
            exif[0x0112] = 6 if k % 5 == 4 else 1
            path = folder / "set" / split / "ab"[k % 2] / f"{k}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            (picture.convert("L") if k % 7 == 6 else picture).save(path, quality=92, exif=exif)
    return folder / "set"


@pytest.fixture
def project(tmp_path):
    """A copy of the project's scripts in a folder whose name has a space."""
    folder = tmp_path / "a project"
    folder.mkdir()
    for name in ("src", "tools", "whatif"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "runs")
        )
    for path in [*ROOT.glob("*.sh"), *ROOT.glob("*.py")]:
        shutil.copy2(path, folder)
    return folder
