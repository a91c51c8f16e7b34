"""Automatic mixed precision: autocast round the model; float16 with a GradScaler."""

import contextlib
from types import MethodType

NAMES = ("amp bfloat16", "amp float16")
CALM = 20  # steps without a skipped one, before a window counts


def forward(plain, name, run):
    """Return `plain` under autocast; what it returns is float32 again."""
    import torch
    from torch.utils._pytree import tree_map_only
    half = getattr(torch, name.split()[1])

    def half_forward(*args, **kwargs):
        with torch.autocast(run.device, half):
            output = plain(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda each: each.float() if each.dtype == half
                             else each, output)
    return half_forward


def on(run, name):
    """Scale the loss of float16, and give each optimizer a step that goes through the scaler."""
    if not name.endswith("float16") or name.endswith("bfloat16"):
        return
    import torch
    run.scaler = run.scalers.setdefault(name, torch.amp.GradScaler(run.device))
    for optimizer in run.optimizers:
        run.plain_steps[optimizer] = optimizer.__dict__.get("step")
        optimizer.step = MethodType(scaled_step, optimizer)


def off(run, name):
    """Undo what on() did."""
    if not run.scaler:
        return
    run.scaler = None
    for optimizer, step in run.plain_steps.items():
        optimizer.__dict__.pop("step", None)
        if step:
            optimizer.step = step
    run.plain_steps = {}


def scaled_step(optimizer, closure=None, **kwargs):
    """Take the place of an optimizer's step."""
    from whatif.inside.watch import Run
    run = Run.active
    plain = run.plain_steps.get(optimizer) or MethodType(type(optimizer).step, optimizer)
    if run.stepping or not run.scaler:  # called by the scaler
        return plain(**kwargs)
    loss = closure() if closure else None  # the scaler takes none
    run.stepping, run.late = True, False
    try:
        with contextlib.suppress(AssertionError):  # no gradient
            run.scaler.step(optimizer, **kwargs)
    finally:
        run.stepping = False
    run.scaler.update()
    if not run.late:  # the scaler left the step out
        run.skipped = True
    run.step(optimizer)
    return loss


def unscale(run):
    """Unscale the gradients before the script clips them."""
    for optimizer in run.optimizers if run.scaler else ():
        with contextlib.suppress(RuntimeError, AssertionError):  # unscaled, or no gradients
            run.scaler.unscale_(optimizer)
