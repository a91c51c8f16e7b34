"""Automatic mixed precision: torch.autocast, with a GradScaler for float16."""

import ast
import contextlib
import re
from types import MethodType

from .. import advice
from ..write import autocasts
from . import fused

NAMES = "amp bfloat16", "amp float16"
CALM = 20  # steps without a skipped one, before a window counts


def why_not(name, facts):
    if why := advice.no_model(facts):
        return why
    if advice.is_seen(name, facts) or any(
        each.get("autocast") for each in facts["models"] if each.get("role") != "frozen"
    ):
        return "already there"
    if facts["models"] and all("float64" in each.get("traits", ()) for each in facts["models"]):
        return "the weights are float64, which autocast leaves as they are"
    if name == "amp bfloat16" and facts.get("emulates"):
        return "this CPU has no bfloat16, so PyTorch would emulate it (--only amp tries it)"
    return advice.needs_gpu(facts) if name == "amp float16" else ""


def write(name, facts, extra):
    """Return what to write: an option, or the lines around the call of a model."""
    drivers, entry = advice.drivers_of(facts), advice.driven(facts)[1]
    if option := (
        advice.by_option(name, facts, extra)
        or advice.by_library(f"{name} on {facts['device']}", drivers, extra, entry)
        or advice.by_library(name, drivers, extra, entry)
    ):
        return advice.paragraphs(option, watch(name, True))
    models = advice.models_of(facts)
    model = models[0]
    calls = [
        (advice.shown_model(each) if each["local"] == each["name"] else each["local"], at)
        for each in models
        for at in each["calls"]
    ]
    text = advice.paragraphs(
        advice.at_line(model, autocast_of(model, facts["device"], f"torch.{name.split()[-1]}")),
        own_autocast(name, facts),
        *(scaler_of(facts) if name == "amp float16" else ()),
        advice.likewise(each for each in calls if each != calls[0]),
        watch(name, bool(own_scaler(facts))),
        advice.example(name),
    )
    library = model.get("library")
    return advice.inside(library, text) if library else text


def edit(name, facts, extra, sources):
    """Write autocast around each call of a model, and for float16 a GradScaler."""
    autocasts.write(name, facts, sources)


def watch(name, is_scaled=False):
    """Return what to watch; a library, an option or an own scaler has lines for that already."""
    if name == "amp float16" and not is_scaled:
        return "watch: clip gradients after scaler.unscale_(optimizer); save the scaler's state"
    return "watch: compare the accuracy of a whole training"


def own_autocast(name, facts):
    """Return the line of an autocast of the script's own, for this device, in float32, or ""."""
    found = [
        each
        for each in facts.get("autocasts", ())
        if not each["half"]
        and each["device"] == facts["device"]
        and ("(" not in each["text"] or re.search(r"(?<!\w)autocast\(", each["text"]))
    ]
    return (
        f"or at {advice.line(found[0]).rstrip(':')}: enabled=True, dtype=torch.{name.split()[-1]}"
        if found
        else ""
    )


def own_scaler(facts):
    """Return the name of a GradScaler of the script's own, which does nothing as it is, or ""."""
    for each in (facts.get("sites") or {}).get("backwards", ()):
        if found := re.match(r"([\w.\[\]'\"]+)\.scale\(", each["name"]):
            return found[1]
    return ""


def scaler_of(facts):
    """Return the lines of a GradScaler for all optimizers."""
    if own := own_scaler(facts):
        return (f"where {own} is made, the script's own GradScaler{advice.INDENT}enabled=True",)
    names = []
    for number, each in enumerate(facts["optimizers"]):  # one line may make several
        stepped = [name for one, name in advice.stepped(facts) if one == number]
        names += stepped or [each.get("name") or "optimizer"]
    names = [*dict.fromkeys(names)] or ["optimizer"]
    loss = loss_of(facts)
    scaled = f"scaler.scale({ast.unparse(ast.parse(loss))}).backward()"
    old = ", ".join([f"{loss}.backward()", *(f"{name}.step()" for name in names)])
    steps = "; ".join(f"scaler.step({name})" for name in names)
    made = (
        f'before the training loop{advice.INDENT}scaler = torch.amp.GradScaler("{facts["device"]}")'
    )
    if len(names) == 1:
        return made, (
            f"for {old.replace(', ', ' and ')}{advice.INDENT}{scaled}; {steps}; scaler.update()"
        )
    return made, (
        f"for {old}{advice.INDENT}{scaled}; {steps}"
        f"{advice.INDENT}scaler.update() after these steps, before the next backward()"
    )


def loss_of(facts):
    """Return what the script calls backward() of, if that is the same in all its lines."""
    names = {
        each["name"].removesuffix(".backward") if each.get("is_direct") else ""
        for each in (facts.get("sites") or {}).get("backwards", ())
    }
    name = names.pop() if len(names) == 1 else ""
    is_short = re.fullmatch(r"(?!torch\b)[^,\n]{1,50}", name)  # loss.mean() or (loss / 2), say
    return name if is_short else "loss"


def autocast_of(model, device, dtype):
    """Return the lines that call a model under autocast, and its loss outside of it."""
    spots = [each for each in model.get("spots", ()) if each.get("at") == model["at"]]
    holds = {each.get("holds", "") for each in spots}
    is_tensor = model["is_tensor"] and (not holds or holds == {"tensor"})  # in other lines, perhaps
    autocast, name = f'torch.autocast("{device}", {dtype})', model["local"]  # where it is called
    lines = [f"instead of {name}(...): {autocast}({name})(...)" + ".float()" * is_tensor]
    if model["statement"]:
        lines = [f"with {autocast}:", f"    {model['statement']}"]
        if is_tensor and ", " not in model["target"]:
            lines.append(f"{model['target']} = {model['target']}.float()")
    are_tensors = model["statement"] and model.get("are_tensors") and ", " in model["target"]
    are_tensors = are_tensors and (not holds or "tensor" not in holds)
    if are_tensors and "_" in (names := model["target"].split(", ")):
        lines += [f"{each} = {each}.float()" for each in names if each != "_"]
    elif are_tensors:
        lines.append(f"{model['target']} = (each.float() for each in ({model['target']}))")
    elif not is_tensor:
        lines.append("and a loss outside of the model takes the output's tensors as .float()")
    return lines


def forward(plain, name, run):
    """Return `plain` under autocast; what it returns is float32 again."""
    import torch
    from torch.utils._pytree import tree_map_only

    half = getattr(torch, name.split()[1])

    def half_forward(*args, **kwargs):
        with torch.autocast(run.device, half):
            output = plain(*args, **kwargs)
        return tree_map_only(
            torch.Tensor, lambda each: each.float() if each.dtype == half else each, output
        )

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
        fused.make_momentum(optimizer)  # the script's own optimizer may be fused


def off(run, name):
    """Undo what on() did."""
    if not run.scaler:
        return
    update(run)
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
        return plain(*[closure] * bool(closure), **kwargs)
    loss = closure() if closure else None  # the scaler takes none
    if all(each.grad is None for each in weights_of(optimizer)):
        plain(**kwargs)
        return loss
    run.stepping, run.late = True, False
    try:
        run.scaler.step(optimizer, **kwargs)
        run.is_scaling = True
    finally:
        run.stepping = False
    if not run.late:  # the scaler left the step out
        run.skipped = True
    run.step(optimizer)
    return loss


scaled_step._wrapped_by_lr_sched = True  # or schedulers warn that a step was put over theirs


def weights_of(optimizer):
    return [each for group in optimizer.param_groups for each in group["params"]]


def scaled(run, loss):
    """Return a loss times the scale, which is that of the last steps from now on."""
    update(run)
    return run.scaler.scale(loss)


def update(run):
    """Let the scaler end a step of all optimizers, which have to see the same scale in it."""
    if run.is_scaling:
        run.is_scaling = False
        with contextlib.suppress(AssertionError):  # a step that failed
            run.scaler.update()


def unscale(run, weights):
    """Unscale the gradients of those optimizers whose weights the script is about to clip."""
    ids = {*map(id, weights)}
    for optimizer in run.optimizers:
        if not ids.isdisjoint(map(id, weights_of(optimizer))):
            with contextlib.suppress(RuntimeError, AssertionError):  # unscaled, or no gradients
                run.scaler.unscale_(optimizer)


def scale_of(run):
    """Return the scale of float16, which a skipped step lowers; 0 without a scaler.

    A fused step skips itself, so the scale alone shows it.
    """
    if run.scaler is None:
        return 0
    update(run)
    return run.scaler.get_scale()
