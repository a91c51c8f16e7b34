"""The fused kernels of an optimizer."""

from .. import advice
from ..write import anchors, checkpoints
from ..write.sources import Refused

NAMES = ("fused",)


def fusible(facts):
    return [each for each in facts["optimizers"] if each["can_fuse"]]


def why_not(name, facts):
    if not facts["optimizers"]:
        return "the optimizer is made in another process"
    if not fusible(facts):
        kinds = dict.fromkeys(each["kind"] for each in facts["optimizers"])
        return f"torch has no fused {', '.join(kinds)}"
    if all(each["fused"] for each in fusible(facts)):
        return "already there"
    return advice.is_seen(name, facts)


def write(name, facts, extra):
    """Return what to write: an option, or an argument for each optimizer."""
    if option := advice.by_option(name, facts, extra):
        return option
    todo = [each for each in fusible(facts) if not each["fused"]]
    lines = []
    for one in todo:
        library = one.get("library")
        if text := advice.by_library(name, [library], extra, one):
            lines.append(text)
        else:
            text = advice.at_line(one, arguments(one))
            lines.append(advice.inside(library, text) if library else text)
    if text := watch(todo):
        lines.append(text)
    if {"lightning", "pytorch_lightning", "fabric"} & {*advice.drivers_of(facts)}:
        lines.append(
            "watch: with amp, Lightning refuses to clip gradients (gradient_clip_val) of "
            "a fused optimizer"
        )
    return advice.paragraphs(*dict.fromkeys(lines), advice.example(name))


KEEP = """\
@{name}.register_load_state_dict_post_hook
def stay_fused(optimizer):
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, None
    for weights, state in optimizer.state.items():
        for key, value in state.items():
            if getattr(value, "shape", None) == weights.shape:
                state[key] = {torch}.empty_like(weights).copy_(value)
            elif key == "step":
                state[key] = {torch}.as_tensor(value).to(weights.device)"""
MOMENTUM = """\
@{name}.register_step_pre_hook
def make_momentum(optimizer, *_):
    for group in optimizer.param_groups:
        for weights in group["params"]:
            if optimizer.state[weights].get("momentum_buffer") is None:
                optimizer.state[weights]["momentum_buffer"] = {torch}.zeros_like(weights)"""


def edit(name, facts, extra, sources):
    """Write fused=True in the call of each optimizer, and what keeps it after a checkpoint."""
    done, has_loads = 0, checkpoints.loads(facts, sources)
    is_scaled = facts.get("has_scaler") or "amp float16" in extra.get("names", ())
    for one in fusible(facts):
        given = one.get("arguments") or {}
        if one.get("library"):
            raise Refused(f"{one['library']} makes the optimizer")
        if one["fused"]:
            continue
        if one["kind"] == "SGD" and one.get("momentum") and one.get("has_idle"):
            raise Refused(
                "weights that get their first gradient later fail in a fused SGD with momentum"
            )
        if not given:
            raise Refused(f"{one['at']} makes its optimizer in a way of its own")
        source, line = sources.find(one["at"])
        call = source.call_of(line, given)
        foreach = [each for each in call.keywords if each.arg == "foreach"]
        if foreach:
            place = source.start(foreach[0]), source.stop(foreach[0])
            source.apply([(place, "fused=True")])
        else:
            new = {"fused": "True"} | ({"foreach": "None"} if one.get("foreach") else {})
            source.apply(source.give(call, new, given.get("positional", ())))
        source.mark(source.statement_at(line), "one kernel updates all weights")
        below(one, line, source, has_loads, is_scaled)
        done += 1
    if not done:
        raise Refused("already there")


def below(one, line, source, has_loads, is_scaled):
    """Write what has to follow the line of a fused optimizer."""
    variable, parts = one.get("name"), []
    if one["kind"] == "SGD" and one.get("momentum") and is_scaled:
        if one.get("dampening"):
            raise Refused(
                "a scaler that skips the first step of a fused SGD with momentum needs "
                "its momentum made before, which dampening would change"
            )
        parts.append((MOMENTUM, "the scaler may skip the first step, which would make momentum"))
    if has_loads:
        parts.append((KEEP, "a checkpoint from before this change stays fused, in this layout"))
    for text, reason in parts[::-1]:
        if not variable:
            raise Refused(f"{one['at']} gives the optimizer no name")
        torch = anchors.torch_name(source)
        lines = text.format(name=variable, torch=torch).splitlines()
        source.put_after(source.statement_at(line), lines, reason)


def arguments(one):
    """Return the lines that make an optimizer fused. It cannot be foreach as well."""
    given, new = one.get("arguments", {}), {"fused": "True"}
    if not one.get("foreach"):
        return advice.written(given, new)
    for spread in given.get("spreads", ()):
        if "foreach" in spread["names"] and spread["at"]:
            return [f"in {advice.named_in(spread)}: fused=True in place of foreach=True"]
        if "foreach" in spread["names"]:
            return advice.written(given, {"foreach": "None", **new})
    return [f"{text} in place of foreach=True" for text in advice.written(given, new)]


def watch(optimizers):
    """Return what to watch."""
    sgd = any(each["kind"] == "SGD" for each in optimizers)
    return "watch: load_state_dict of an old checkpoint turns it off again" + (
        "; with amp float16, create\n        SGD's momentum before the first step, as "
        "train_fused.py does" * sgd
    )


def on(run, name):
    """Let each optimizer that can do so take its fused kernels, in place of foreach."""
    for optimizer in run.optimizers:
        if is_torchs(optimizer):
            run.unfused[optimizer] = (
                optimizer.__dict__.get("_step_supports_amp_scaling"),
                [
                    (group, group.get("fused"), group.get("foreach"))
                    for group in optimizer.param_groups
                ],
            )
            for group in optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
            optimizer._step_supports_amp_scaling = True
            if run.scaler or run.live("scalers"):
                make_momentum(optimizer)
            move_steps(optimizer)


def is_torchs(optimizer):
    """Return whether the step is one of torch's own, which has a fused kernel."""
    return "fused" in optimizer.defaults and type(optimizer).step.__module__.startswith(
        "torch.optim"
    )


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
    """Make the momentum of a fused SGD before the first step, which the scaler may skip.

    PyTorch would leave it uninitialised then.
    """
    import torch

    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for weight in group["params"] if group["momentum"] and group.get("fused") else ():
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
