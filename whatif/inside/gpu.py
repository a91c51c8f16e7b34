"""On a GPU: the lines that make the host wait, and what the kernels of a step do."""

import collections
import re
import warnings

import torch


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


def time_kernels(run, steps):
    """Return for how many seconds of a step the GPU works, and the shares of what it does."""
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
