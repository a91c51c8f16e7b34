"""Run a training script with a clock at the end of its steps: clock.py FIRST STEPS SCRIPT ARGS.

FIRST steps are not timed, the STEPS after them are. Then it prints the steps/s and ends the script.
It imports nothing of this project, so that no module of ours hides one of the script's.
"""

import os
import runpy
import sys
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
first, steps = map(int, sys.argv[1:3])
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
    os._exit(0)


register_optimizer_step_post_hook(count)
sys.argv[:] = sys.argv[3:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
