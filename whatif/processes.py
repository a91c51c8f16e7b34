"""The processes of a run: which ones there are, and how to end them all."""

import contextlib
import os
import signal
import time
from pathlib import Path

CLEANERS = (b"resource_tracker", b"torch_shm_manager")  # remove shared memory after the others' end
PATIENCE = 2  # seconds that a cleaner has, after which it is killed, too
LEAST = 10  # seconds in which killed processes should be gone


def read(path):
    """Return the bytes of a file in /proc; b"" if its process is gone or another user's."""
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""


def status(pid, proc="/proc"):
    """Return (state, parent, session) of a process, or None."""
    fields = read(f"{proc}/{pid}/stat").rpartition(b")")[2].split()
    return (fields[0].decode(), int(fields[1]), int(fields[3])) if fields else None


def is_alive(pid):
    """Return whether a process is there and no zombie."""
    found = status(pid)
    return bool(found) and found[0] not in "ZX"


def of_run(sessions, folder):
    """Return the living processes of a run: of its sessions, with its WHATIF, or their children.

    A process that moved to a session of its own still has the variable; one that has changed its
    environment has its session or its parent.
    """
    mark = os.fsencode(f"WHATIF={folder}")
    known = {
        int(name): found
        for name in os.listdir("/proc")
        if name.isdigit() and (found := status(name)) and found[0] not in "ZX"
    }
    mine = {
        pid
        for pid, (_, _, session) in known.items()
        if session in sessions or mark in read(f"/proc/{pid}/environ").split(b"\0")
    }
    while more := {pid for pid, (_, parent, _) in known.items() if parent in mine} - mine:
        mine |= more
    return mine - {os.getpid()}


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def is_cleaner(pid):
    return any(name in read(f"/proc/{pid}/cmdline") for name in CLEANERS)


def end_all(started, folder):
    """Kill the processes of a run, and wait for their end. `started` lead sessions of their own."""
    sessions, begin = {process.pid for process in started}, time.monotonic()
    while (found := of_run(sessions, folder)) and time.monotonic() - begin < LEAST:
        is_patient = time.monotonic() - begin < PATIENCE
        kill([pid for pid in found if not (is_patient and is_cleaner(pid))])
        for process in started:
            process.poll()
        time.sleep(0.01)
    for process in started:
        process.wait()
