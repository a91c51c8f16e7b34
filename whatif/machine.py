"""What of this machine a process may use: memory and cores, also in a container or a job."""

import math
import os
from contextlib import suppress
from pathlib import Path


def groups(root, controller):
    """Return the folders of the control group that limits this process, the innermost first.

    In a container the path in /proc may not be below the folder that is mounted; the upper ones
    are there.
    """
    found = []
    for line in read(Path(root, "proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        mounts = Path(root, "sys/fs/cgroup")
        if number == "0" and not controllers:  # version 2
            tops = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            tops = [mounts / controllers, mounts / controller]
        else:
            continue
        inner = Path(path.lstrip("/"))
        for top in tops:
            found += [top / part for part in (inner, *inner.parents) if (top / part).is_dir()]
    return list(dict.fromkeys(found))


def read(path):
    """Return the text of a file, or "" if it cannot be read."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def number(text):
    """Return a number, or infinity for what is none ("max" or "")."""
    return int(text) if text.lstrip("-").isdigit() else math.inf


def memory_limit(root="/"):
    """Return how many bytes of memory this process may use, at most: the machine's or its job's.

    `root` is another folder than / in tests.
    """
    limits = []
    for line in read(Path(root, "proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            limits.append(1024 * int(line.split()[1]))
    if not limits:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for group in groups(root, "memory"):
        limits += [number(read(group / name)) for name in ("memory.max", "memory.limit_in_bytes")]
    return min(limits)


def quota(group):
    """Return how many cores' time a control group may use."""
    limit, _, period = read(group / "cpu.max").partition(" ")
    limit = limit or read(group / "cpu.cfs_quota_us")  # version 1
    period = period or read(group / "cpu.cfs_period_us")
    cores = number(limit) / max(1, number(period)) if period else math.inf
    return cores if cores > 0 else math.inf  # -1 stands for none


def cores(root="/"):
    """Return the number of cores this process may use, a part of one counted as one."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    least = min([allowed, *map(quota, groups(root, "cpu"))])
    return max(1, math.ceil(least))
