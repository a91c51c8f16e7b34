"""How many cores this process may use, also in a container or a job, and what they compute in."""

import math
import os
from contextlib import suppress
from pathlib import Path


def read(path):
    """Return the text of a file, or "" if it cannot be read."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def groups(root):
    """Return the folders of the control groups that limit this process's cores.

    In a container the path in /proc may not be below the folder that is mounted; the upper ones
    are there.
    """
    found, mounts = [], Path(root, "sys/fs/cgroup")
    for line in read(Path(root, "proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:  # version 2
            tops = [mounts, mounts / "unified"]
        elif "cpu" in controllers.split(","):
            tops = [mounts / controllers, mounts / "cpu"]
        else:
            continue
        inner = Path(path.lstrip("/"))
        found += [top / part for top in tops for part in (inner, *inner.parents)]
    return found


def number(text):
    """Return a number, or infinity for what is none ("max" or "")."""
    return int(text) if text.lstrip("-").isdigit() else math.inf


def quota(group):
    """Return how many cores' time a control group may use."""
    limit, _, period = read(group / "cpu.max").partition(" ")
    limit = limit or read(group / "cpu.cfs_quota_us")  # version 1
    period = period or read(group / "cpu.cfs_period_us")
    cores = number(limit) / max(1, number(period)) if period else math.inf
    return cores if cores > 0 else math.inf  # -1 stands for none


def cores(root="/"):
    """Return the number of cores this process may use, a part of one counted as one.

    `root` is another folder than / in tests.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, math.ceil(min([allowed or 1, *map(quota, groups(root))])))


def has_bfloat16(root="/"):
    """Return whether this CPU calculates in bfloat16; where that is not known, it may."""
    words = read(Path(root, "proc/cpuinfo")).split()
    return not words or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)
