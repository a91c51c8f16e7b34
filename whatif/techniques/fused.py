"""The fused kernels of an optimizer."""

NAMES = ("fused",)


def on(run, name):
    """Let each optimizer that can do so take its fused kernels, in place of foreach."""
    for optimizer in run.optimizers:
        if "fused" in optimizer.defaults:
            run.unfused[optimizer] = (
                optimizer.__dict__.get("_step_supports_amp_scaling"),
                [(group, group.get("fused"), group.get("foreach"))
                 for group in optimizer.param_groups])
            for group in optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
            optimizer._step_supports_amp_scaling = True
            if run.scaler:
                make_momentum(optimizer)
            move_steps(optimizer)


def off(run, name):
    """Put back what each optimizer had."""
    for optimizer, (supports, groups) in run.unfused.items():
        for group, fused, foreach in groups:
            group["fused"], group["foreach"] = fused, foreach
        optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        if supports is not None:
            optimizer._step_supports_amp_scaling = supports
        move_steps(optimizer)
    run.unfused = {}


def make_momentum(optimizer):
    """Make SGD's momentum before the first step, which the scaler may skip.

    PyTorch would leave it uninitialised then.
    """
    import torch
    for group in optimizer.param_groups:
        for weight in group["params"] if group.get("momentum") else ():
            if optimizer.state[weight].get("momentum_buffer") is None:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)


def move_steps(optimizer):
    """Move Adam's counts of steps to where its kernels want them."""
    import torch
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state = optimizer.state.get(weight) or {}
            if isinstance(step := state.get("step"), torch.Tensor):
                is_there = group.get("fused") or group.get("capturable")
                state["step"] = step.to(weight.device if is_there else "cpu", torch.float32)
