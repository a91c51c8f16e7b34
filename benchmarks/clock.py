"""Run a training script with a clock at the end of its steps: clock.py FIRST STEPS KEPT SCRIPT ARGS.

FIRST steps are not timed, the STEPS after them are. Then it prints the steps/s and ends the script.
If KEPT is not 0, a loader that trains gives its first KEPT batches again and again. It imports
nothing of this project, so that no module of ours hides one of the script's.
"""

import itertools
import os
import runpy
import sys
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
first, steps, kept = map(int, sys.argv[1:4])
done, started = 0, 0.0


def count(*_):
    global done, started
    done += 1
    if done not in (first, first + steps):
        return
    wait()
    now = time.perf_counter()
    if done == first:
        started = now
        return
    print(f"\nby hand: {steps / (now - started):.6g} steps/s", flush=True)
    os._exit(0)  # workers see that and end in seconds


def repeated(loader, plain=torch.utils.data.DataLoader.__iter__):
    batches = list(itertools.islice(plain(loader), kept))
    while torch.is_grad_enabled() and batches:  # until `count` ends the script
        yield from batches
    yield from batches


register_optimizer_step_post_hook(count)
if kept:
    torch.utils.data.DataLoader.__iter__ = repeated
sys.argv[:] = sys.argv[4:]
sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
