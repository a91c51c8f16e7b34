"""Run a training script as a user does and keep what its layers see.

    spy.py FOLDER SCRIPT OPTION ...

Each process writes FOLDER/<rank>.seen: a list of dicts, one for each call of a layer in KEPT and
for each step of the optimizer, with the layer's name, whether it trains, and a tensor.
"""

import os
import runpy
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

KEPT = {
    "Normalize": lambda inputs, output: inputs[0],  # the bytes of a batch
    "Linear": lambda inputs, output: output,  # the scores, if it is the last layer
    "Dropout": lambda inputs, output: output == 0,
    "CrossEntropyLoss": lambda inputs, output: inputs[1],
}  # the labels
seen = []


def keep(layer, inputs, output):
    name = type(layer).__name__
    is_probe = torch.is_grad_enabled() and not layer.training  # before training starts
    if name in KEPT and not is_probe:
        seen.append(
            dict(
                layer=name,
                trains=torch.is_grad_enabled(),
                tensor=KEPT[name](inputs, output).detach().cpu().clone(),
            )
        )


def keep_rate(optimizer, *_):
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    seen.append(dict(layer="lr", trains=True, tensor=torch.tensor(rates, dtype=torch.float64)))


target, sys.argv = sys.argv[1], sys.argv[2:]
torch.nn.modules.module.register_module_forward_hook(keep)
register_optimizer_step_pre_hook(keep_rate)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    torch.save(seen, os.path.join(target, f"{os.environ.get('RANK', 0)}.seen"))
