"""What tests share: processes started as a user starts them, small disks, a training run."""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
TECHNIQUES = sorted(path.stem.removeprefix("train_") for path in SRC.glob("train_*.py"))

SEEN = {}  # what a forked run is told of that


def on_gpu(name):
    """A test's parameter, once more where a GPU is to be seen."""
    return pytest.param(name, marks=pytest.mark.gpu, id=f"{name}-on_gpu")


STARTED = []  # what a test has begun, and has to be over when it ends


def start(command, **options):
    """A process of a user's: no PYTHON or launcher's variables from the test's own environment."""
    environment = {key: value for key, value in os.environ.items()
                   if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    environment |= {"PYTHON": sys.executable, **options.pop("env", {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    STARTED.append(subprocess.Popen([str(word) for word in command], text=True, env=environment,
                                    **{**pipes, **options}))
    return STARTED[-1]


def run(*command, timeout=300, **options):
    """Run a command to its end; return CompletedProcess with stdout and stderr as text."""
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


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


# Starting Python and importing torch and DALI takes seconds: one process imports them, and a run is
# a fork of it that does what `python` would.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "torchvision.transforms.v2", "PIL.Image", "lmdb", "numpy",
                               "tqdm", "nvidia.dali.plugin.pytorch", "torch.distributed"])


def as_main(words, out, err, cwd, variables):
    """In the fork: what `python words...` does."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(cwd)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the server's, which an earlier test has set
    os.environ.update(variables)
    if variables["NEEDS_GPU"] == "True":
        import torch
        assert torch.cuda.is_available(), "the GPU is hidden from what tests it"
    if "RANK" in variables:
        import torch
        torch.set_num_threads(1)  # as torchrun does
    multiprocessing.set_start_method(None, force=True)  # workers start as `python` starts them
    sys.argv = words
    sys.path[0] = os.path.dirname(words[0])
    runpy.run_path(words[0], run_name="__main__")


class Forked:
    """`python words...` in a fork, or in `ranks` of them as torchrun would start them: with the
    store in a process that outlives them."""

    def __init__(self, *words, cwd="/", ranks=0):
        self.words, self.made = words, tempfile.TemporaryDirectory()
        self.processes, common = [], dict(SEEN)
        if ranks:
            from torch.distributed import TCPStore
            self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                       "MASTER_ADDR": "localhost", "MASTER_PORT": str(self.store.port),
                       "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0",
                       "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for rank in range(max(1, ranks)):
            variables = common | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {})
            files = [Path(self.made.name) / f"{name}{rank}" for name in ("out", "err")]
            self.processes.append(SERVER.Process(target=as_main, args=(
                [str(word) for word in words], *files, cwd, variables)))
            self.processes[-1].start()
        STARTED.append(self)

    def kill(self):
        for process in self.processes:
            process.kill()

    def wait(self, timeout=240):
        """Waits for the end: CompletedProcess, with the output of all ranks."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        out, err = ("".join(path.read_text(errors="replace") for path in sorted(
            Path(self.made.name).glob(f"{name}*"))) for name in ("out", "err"))
        assert None not in codes, f"{self.words} goes on and on: {codes}\n{out}\n{err}"
        return subprocess.CompletedProcess(self.words, max(codes, key=abs), out, err)


def run_forked(*words, timeout=240, **options):
    """Runs `python words...` in a fork, see Forked, to its end: CompletedProcess."""
    return Forked(*words, **options).wait(timeout)


def wait_until(condition, seconds=60, pause=0.005):
    """Waits until `condition()` is true and returns what it is; fails after so long."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(pause)
    return value


def wait_awhile(seconds, is_enough):
    """Waits so many seconds, or until `is_enough()`, whichever comes first."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not is_enough():
        time.sleep(0.0005)


def processes_of(word):
    """The living processes whose command line names `word`: a run, and what it started."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(word) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def module_of(path):
    """A script, imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def change(path, old, new):
    """Has `new` stand in a file where `old` stood."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


class SmallDisk:
    """`folder`, new, as a file system that is soon full: a tmpfs, where root may mount one.

    Where none can be mounted, a limit on the size of each file that a process writes (RLIMIT_FSIZE)
    stands for it: start processes with `options`.
    """

    def __init__(self, folder, kilobytes, bytes_a_file=None):
        self.folder, self.limit = folder, bytes_a_file or 1024 * kilobytes
        folder.mkdir()
        self.mounted = not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder],
            capture_output=True).returncode
        self.options = {} if self.mounted else {"preexec_fn": self.set_limit}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.mounted:
            subprocess.run(["umount", self.folder], check=True)
        else:
            self.folder.chmod(0o755)

    def set_limit(self):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))

    def make_room(self):
        self.options = {}
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", self.folder], check=True)

    def make_read_only(self):
        """Skips the test where nothing can be closed to it."""
        if not self.mounted and not os.geteuid():
            pytest.skip("root may write anywhere, and no tmpfs can be mounted")
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,ro", self.folder], check=True)
        else:
            for path in (*self.folder.iterdir(), self.folder):
                path.chmod(0o555)


def train(script, *options, forked=True, **details):
    """Runs a training script to a good end and returns (its record, its output).

    Forked, which spares the start of a process, or as a user does, with torchrun if it needs that.
    """
    is_ddp = "init_process_group" in Path(script).read_text()
    options = [str(word) for word in options]
    folder = Path(options[options.index("--result_dir") + 1])
    if forked:
        done = run_forked(script, *options, ranks=2 if is_ddp else 0, **details)
    else:
        done = run(*(torchrun(script, *options) if is_ddp else [sys.executable, script, *options]),
                   **details)
    assert done.returncode == 0, f"{script} {options}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return json.loads((folder / f"{Path(script).stem}.json").read_text()), done.stdout
