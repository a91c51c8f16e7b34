"""Fixtures: tiny data, the project copied to a folder whose name holds a space, processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
TECHNIQUES = sorted(path.stem.removeprefix("train_") for path in SRC.glob("train_*.py"))
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "gpus: needs two NVIDIA GPUs")


def pytest_collection_modifyitems(items):
    import torch
    gpus = torch.cuda.device_count()
    for item in items:
        for name, least in (("gpu", 1), ("gpus", 2)):
            if item.get_closest_marker(name) and gpus < least:
                item.add_marker(pytest.mark.skip(reason=f"needs {least} NVIDIA GPU, has {gpus}"))


def start(command, **options):
    """A process of a user's: no PYTHON or launcher's variables from the test's own environment."""
    environment = {key: value for key, value in os.environ.items()
                   if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    environment |= {"PYTHON": sys.executable, **options.pop("env", {})}
    return subprocess.Popen([str(word) for word in command], text=True, env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def run(*command, timeout=300, **options):
    """Runs a command to its end: CompletedProcess with stdout and stderr as text."""
    process = start(command, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def torchrun(script, *options, processes=2):
    """The words that start `script` as so many processes of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={processes}", script, *options]


def train(script, *options, **details):
    """Runs a training script to a good end and returns (its record, its output)."""
    is_ddp = "init_process_group" in Path(script).read_text()
    words = torchrun(script, *options) if is_ddp else [sys.executable, script, *options]
    done = run(*words, **details)
    assert done.returncode == 0, f"{words}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    options = [str(word) for word in options]
    folder = Path(options[options.index("--result_dir") + 1])
    return json.loads((folder / f"{Path(script).stem}.json").read_text()), done.stdout


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A small set of digits: 24 training and 7 validation pictures in each of ten classes."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    made = run(sys.executable, ROOT / "make_dataset.py", "digits", "--dst", folder, "--train", 24,
               "--val", 7)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture
def project(tmp_path):
    """A copy of the project's scripts in a folder with a space in its name."""
    folder = tmp_path / "a project"
    folder.mkdir()
    shutil.copytree(SRC, folder / "src", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    for path in [*ROOT.glob("*.sh"), *ROOT.glob("*.py")]:
        shutil.copy2(path, folder)
    return folder
