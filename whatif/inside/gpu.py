"""On a GPU: the lines that make the host wait, how long it waits for the host, and its kernels."""

import collections
import re
import statistics
import time
import warnings

import torch

from whatif.inside.clock import on

CYCLES = 1_000_000  # of a sleep by which others are measured


def find_waits(run, steps):
    """Find the user's own lines that make the host wait for the GPU in each step; tell them."""
    texts, waits = {}, collections.defaultdict(set)  # of each line: its text, and its steps

    def shown(message, category, file, number, *_):
        frame, _ = run.places.frames()[0]
        if "called a synchronizing" in str(message) and run.places.is_users(frame):
            at, text = run.places.place().values()
            if file != frame.f_code.co_filename:  # the line calls what waits
                text += f"  ({file.split('-packages/')[-1]}:{number})"
            texts[at] = text
            waits[at].add(step)

    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown
        torch.cuda.set_sync_debug_mode("warn")
        for step in range(steps):
            yield
        torch.cuda.set_sync_debug_mode("default")
    warnings.showwarning = before
    run.send(lines=[(at, texts[at]) for at in texts if len(waits[at]) == steps])


def queued_share(run, steps):
    """Return what share of its time a step takes whose kernels wait in the queue, or None.

    That is from the first call of a model to the optimizer's step. In every second step the GPU
    sleeps until the host has started all of that; what is left then is the GPU's own time. Where
    the host waits for the GPU on the way, only what comes before is queued, so the share is not
    too small. A profiler would tell more, but it may slow the start of kernels from then on.
    """
    took, length = {False: [], True: []}, 0.0
    per_second = CYCLES / slept(CYCLES)
    for number in range(2 * steps):
        began = []
        cycles = int(1.5 * length * per_second) if number % 2 else 0
        run.on_forward = lambda: began.append((begin(run.gpu, cycles), time.perf_counter()))
        yield
        run.on_forward, end = None, mark()
        end.synchronize()
        if began:
            start, since = began[0]
            took[bool(cycles)].append(start.elapsed_time(end))
            length = time.perf_counter() - since
    if not all(took.values()):
        return None  # no model was called; of several processes, each has made as many steps
    alone, queued = map(statistics.median, took.values())
    return min(1.0, queued / alone)


def begin(gpu, cycles):
    """Let the GPU sleep once it has done all; return the event that is reached after that."""
    with on(gpu):
        torch.cuda.synchronize()
        if cycles:
            torch.cuda._sleep(cycles)
        return mark()


def mark(gpu=None):
    """Return an event that tells when a GPU has done all that was started before."""
    with on(gpu):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return event


def slept(cycles):
    """Return for how many seconds the GPU sleeps if it is to for so many cycles."""
    torch.cuda._sleep(cycles)  # the first one loads the kernel
    begin = mark()
    torch.cuda._sleep(cycles)
    end = mark()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def time_kernels(run, steps):
    """Return for how many seconds of a step the GPU works, and the shares of what it does.

    This comes after all windows, since what the profiler has put into the start of a kernel may
    stay until the process ends.
    """
    busy, until, kinds, cuda = 0, 0, collections.Counter(), torch.autograd.DeviceType.CUDA
    try:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        profiler.start()
    except RuntimeError:  # the script may have a profiler of its own
        return None, {}
    for _ in range(steps):
        yield
    torch.cuda.synchronize()
    profiler.stop()
    kernels = [
        each
        for each in profiler.events()
        if each.device_type == cuda
        and each.device_index == torch.cuda.current_device()
        and not each.is_user_annotation
        and "HtoD" not in each.name
    ]
    for each in sorted(kernels, key=lambda each: each.time_range.start):
        begin, end = each.time_range.start, each.time_range.end
        busy, until = busy + max(0, end - max(begin, until)), max(until, end)
        kinds[kernel_kind(each.name)] += end - begin
    total = sum(kinds.values())
    return busy / 1e6 / steps, {kind: took / total for kind, took in kinds.items()}


def kernel_kind(name):
    """Return what the time of a kernel depends on: products, memory or communication."""
    if re.search("nccl", name, re.I):
        return "communication"
    moves = r"bn_|norm|elementwise|reduce|softmax|pool|multi_tensor|copy|fill"
    products = r"gemm|conv|cutlass|xmma|[wd]grad|fprop|flash|fmha|attention|nvjet|winograd|mma|rnn"
    if re.search(products, name, re.I) and not re.search(moves, name, re.I):
        return "products"
    return "memory"
