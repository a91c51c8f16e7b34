"""Find threads that fight for cores in the workers of a DataLoader. Linux only."""

import os
import re
import sys
from pathlib import Path

BUSY = 0.25  # a thread with this share of the CPU time of the busiest one works
FEW = 4  # workers that are looked at


def cpu_times(pids):
    """Return {pid: {thread: seconds of CPU time}}; what cannot be read is left out."""
    tick, times = os.sysconf("SC_CLK_TCK"), {}
    for pid in [*pids][:FEW]:
        threads = {}
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                # the name may hold spaces; user and system time are the 12th and 13th after it
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                threads[task.name] = (int(fields[11]) + int(fields[12])) / tick
        except (OSError, ValueError, IndexError):
            continue
        times[pid] = threads
    return times


def in_use(before, after, seconds):
    """Return what the workers did in `seconds` between two results of cpu_times, or {}.

    `cores` is CPU time by wall time of a worker, `busy` the threads of a worker that work.
    """
    cores, busy, threads = [], [], []
    for pid in before.keys() & after.keys():
        spent = [after[pid][each] - before[pid].get(each, 0) for each in after[pid]]
        if spent and seconds > 0:
            cores.append(sum(spent) / seconds)
            busy.append(sum(each >= BUSY * max(spent) for each in spent) if sum(spent) > 0.1 else 1)
            threads.append(len(spent))
    if not cores:
        return {}
    return dict(cores=round(sum(cores) / len(cores), 2), busy=max(busy), threads=max(threads))


def libraries(pid):
    """Return the names of libraries with threads of their own that a process has loaded."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {
        name
        for name, pattern in dict(
            openblas=r"openblas", mkl=r"libmkl_|mkl_rt", cv2=r"/cv2/|libopencv_core"
        ).items()
        if re.search(pattern, text)
    }


def note(use, found, cv2_threads):
    """Return a sentence that says what to write against threads that fight for cores, or ""."""
    if use["busy"] < 2:
        return ""
    begin = (
        f"each worker computes with {use['busy']} threads ({use['cores']} cores in use): "
        "they fight for cores with the other workers"
    )
    if "cv2" in found and cv2_threads != 1:
        return f"{begin}; write cv2.setNumThreads(0) in worker_init_fn"
    variable = (
        "OPENBLAS_NUM_THREADS"
        if "openblas" in found
        else ("MKL_NUM_THREADS" if "mkl" in found else "OMP_NUM_THREADS")
    )
    return f"{begin}; start the script with {variable}=1 in its environment"


class CountThreads:
    """A worker_init_fn that also writes down how many threads OpenCV has in the worker."""

    def __init__(self, original, numbers):
        self.original, self.numbers = original, numbers

    def __call__(self, worker):
        if self.original is not None:
            self.original(worker)
        if worker < len(self.numbers) and (cv2 := sys.modules.get("cv2")):
            self.numbers[worker] = cv2.getNumThreads()
