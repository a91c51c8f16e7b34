"""Run scripts one at a time, follow their progress, stop them; and say what the machine is."""

import contextlib
import datetime
import fcntl
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paths import ROOT

from terminal import say, show
from whatif.machine import cores, has_bfloat16  # one place says how many cores, of a quota, too

with contextlib.suppress(ImportError):  # --help needs no packages; need_packages() tells
    import psutil

__all__ = ["ROOT", "say", "show"]  # and what stands here
GRACE_SECONDS = 10
LONGEST_TEMPORARY = 75  # bytes: workers add 32 to it for a socket, whose name has at most 107
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EVERY_SECONDS = 0.05  # a run's log is read


class Stopped(BaseException):
    """Ctrl-C or a signal to end; no Exception, so that no library catches it by accident."""


class GiveUp(Exception):
    """A run is not worth its time; the message says why."""


# ------------------------------------------------------------------------------ the machine
def machine(*others):
    """Return what figures depend on: CPU, cores, GPUs, driver, Python and packages, as a dict.

    `others` are packages to tell the version of, too.
    """
    import torch  # takes seconds

    gpus = torch.cuda.device_count()
    gpu, driver = "GPU" if gpus else None, None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        if gpus:  # torch would keep hundreds of megabytes of the GPU to tell its name
            told = subprocess.check_output(
                ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                text=True,
            )
            gpu, driver = told.splitlines()[0].split(", ")
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    packages = {}
    for name in (
        "torch",
        "torchvision",
        "lmdb",
        "nvidia-dali-cuda120",
        "nvidia-dali-cuda130",
        *others,
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return dict(
        cpu=model[1] if model else platform.machine(),
        cores=cores(),
        bfloat16=has_bfloat16(),
        gpus=gpus,
        gpu=gpu,
        driver=driver,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        python=platform.python_version(),
        packages=packages,
    )


def gpu_gigabytes():
    """Return the memory of the smallest GPU; 0 if that is unknown."""
    told = ""
    with contextlib.suppress(OSError):
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
        ).stdout
    return min(map(int, re.findall(r"^\d+", told, re.M)), default=0) / 1000


def setting(command, *others):
    """Return the date, the machine and the command as a record has them; `others`: see machine."""
    return dict(
        date=datetime.date.today().isoformat(),
        machine=machine(*others),
        command=shlex.join([*command.split(), *sys.argv[1:]]),
    )


# ------------------------------------------------------------------------------ one run
def launched(script, processes):
    """Return (words that start a script, variables): by torchrun if it is for that."""
    if "init_process_group" not in script.read_text():
        return [sys.executable, str(script)], {}
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        "--local-addr=localhost",
    ]  # else it waits for ever if no name server has the host's name
    threads = max(1, cores() // processes)  # they share the cores
    return [sys.executable, *words, str(script)], {"OMP_NUM_THREADS": str(threads)}


def variables_of(more=()):
    """Return the environment of a run."""
    return os.environ | {"PYTHON_COLORS": "0"} | dict(more)  # no colours in an error: see failure


def follow(command, log, watch, more=(), server=None):
    """Run `command` to its end and return (exit code, seconds); append its output to the file `log`.

    `watch(line, seconds)` is called for every line, and with None in between; what it raises stops
    the command. It gets the variables `more`, or is forked by `server` if that can.
    """
    with open(log, "a") as output, open(log, "rb") as reader:
        print(f"$ {shlex.join(command)}", file=output, flush=True)
        reader.seek(0, os.SEEK_END)
        process = server and server.start(command[1:], log)
        process = process or subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables_of(more),
            start_new_session=True,
        )
        started, text, ended = time.monotonic(), b"", False
        try:
            while not ended:
                ended = process.poll() is not None  # asked first: what it wrote last is read below
                *lines, text = (text + reader.read() + b"\n" * ended).split(b"\n")
                for line in lines:
                    watch(line.decode(errors="replace"), time.monotonic() - started)
                watch(None, time.monotonic() - started)
                time.sleep(0 if ended else EVERY_SECONDS)
        except BaseException:
            stop(process)
            raise
    return process.returncode, time.monotonic() - started


def session_of(pid):
    """Return the session that a process belongs to; None if it has ended."""
    with contextlib.suppress(OSError):
        return os.getsid(pid)


def stop(process):
    """End `process`, which began a session, and all that it started, in whatever sessions."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
        sessions = {session_of(each.pid) for each in tree} | {process.pid}
        process.terminate()  # torchrun ends its workers itself, given a moment
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        process.kill()
        # a process started in the meantime has lost its parent, but not its session
        sessions -= {session_of(0), None}
        tree += [each for each in psutil.process_iter() if session_of(each.pid) in sessions]
        for child in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(tree, GRACE_SECONDS)
    process.wait()


def failure(code, log):
    """Return (status, exit code, details) of a run that did not end well.

    The error is the script's own line, or what was raised, or else the last line of the log. A
    script that refuses (exit 2) or lacks a package is a skip: the options have been checked, so it
    is this machine or dataset that cannot have the technique.
    """
    text = log.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # a C library's thread can have begun a line of its own before a script's
    own = re.findall(r"^[\w.]+: error: .*|\w+\.py: error: .*", "\n".join(lines), re.M)
    raised = [
        line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)
    ]
    error = (own + raised + lines[-1:])[0]
    refused = code == 2 or re.search(r"exitcode *: 2 ", text)  # the latter is torchrun's
    if refused or ": pip install " in error or "No module named" in error:
        return "skip", code, {"error": error}
    return "fail", code, {"error": error, "log": str(log)}


def read_record(path):
    """Return the record that a script wrote, with what follows from the epochs of a training.

    Speed and training time leave out the first epoch, which is the warm-up.
    """
    record = json.loads(path.read_text())
    if "images_per_second" in record:
        return record
    steady = record["epochs"][1:] or record["epochs"]
    return {
        "script": path.stem,
        **record,
        "val_top1": record["epochs"][-1]["val_top1"],
        "images_per_second": statistics.median(each["images_per_second"] for each in steady),
        "train_seconds": sum(each["seconds"] for each in steady),
    }


# ------------------------------------------------------------------------------ a driver
def need_packages():
    """End with one line if a package is missing that every run needs."""
    names = ("torch", "torchvision", "matplotlib", "psutil")
    if missing := [name for name in names if not importlib.util.find_spec(name)]:
        sys.exit(
            f"{sys.executable} lacks {', '.join(missing)}: activate the environment that has "
            "them, or pip install -r requirements.txt"
        )


def guarded(main, driver):
    """Run `main`; end with one line on a signal or an error of the system, such as a full disk."""

    def stopped(number, frame):
        raise Stopped(signal.Signals(number).name)

    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPORARY:
        refuse(
            f"{driver}: error: TMPDIR {tempfile.gettempdir()} is too long: DataLoader's workers "
            "would hang; name a shorter one"
        )
    try:
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, stopped)
        main()
    except Stopped as reason:
        print(f"{driver}: stopped by {reason}", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        sys.exit(f"{driver}: error: {error}")


def refuse(message):
    """Print why a command is wrong, and exit 2."""
    print(message, file=sys.stderr)
    sys.exit(2)


def module_of(path):
    """Import the script at `path`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def folder_of_its_own(folder, driver):
    """Make `folder` and lock it against other runs; return the lock. Exit 1 if one has it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{driver}: error: another run uses {folder}: name another --result_dir")
    return lock


def check_options(script, words, driver):
    """Check options with the script's own parser, before any run; exit 2 if one is wrong."""
    try:
        parser = module_of(script).build_parser()
    except (Exception, SystemExit):
        return  # a package is missing, or the script is the user's: running it will tell
    parser.prog = driver
    parser.parse_args(words)


def end(write, stem, interrupted, has_failed):
    """Write and print the tables, then end: 130 if interrupted, 1 if a run failed, else 0.

    `write(stem)` writes the tables; it is None if there is none.
    """
    for number in SIGNALS:  # writing takes a second or two
        signal.signal(number, signal.SIG_IGN)
    for child in psutil.Process().children(recursive=True):  # started just as a signal came
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    if write:
        write(stem)
        print(f"\n{stem.with_suffix('.md').read_text()}\nThis is {stem.with_suffix('.md')}")
    sys.exit(130 if interrupted else has_failed)


def conclude(rows, write, stem, interrupted):
    """Write and print what rows there are, and end the driver."""
    if rows and interrupted:
        rows[-1].stopped = interrupted
    write = functools.partial(write, rows) if rows else None
    end(write, stem, interrupted, any(row.has_failed for row in rows))
