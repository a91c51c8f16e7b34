"""The layout of images in which channels come last."""

import ast

from .. import advice
from ..write import anchors

NAMES = ("channels_last",)
LAYOUT = "memory_format=torch.channels_last"


def why_not(name, facts):
    no_images = "the model has no 2-D convolution" * ("image" not in facts["seen"])
    return advice.no_model(facts) or no_images or advice.is_seen(name, facts)


def to_layout(model, name):
    """Return the lines that change a model's weights, one by one where its to() may fail."""
    if not model.get("own_to"):
        return [f"{name}.to({LAYOUT})"]
    return [
        f"for weights in {name}.parameters():  # to() may fail here",
        "    if weights.dim() == 4:",
        f"        weights.data = weights.data.contiguous({LAYOUT})",
    ]


def has_images(model):
    """Return whether a model is called with images: it may also make them of something else."""
    return model.get("has_images", True)


def write(name, facts, extra):
    """Return what to write: an option, or the lines that change the model and its images."""
    if option := advice.built_in(name, facts, extra):
        return option
    _, entry = advice.driven(facts)
    models = advice.models_of(facts)
    models = [each for each in models if "image" in each.get("traits", ["image"])] or models
    model = models[0]
    note = "watch: it gains more with amp; .view() in a layer may have to be .reshape()"
    if entry:  # the library gives the images; a convolution takes the layout of its weights
        place, own, _ = advice.in_driver(model, facts)
        return advice.paragraphs(
            place + advice.INDENT + advice.INDENT.join(to_layout(model, own)), note
        )
    place, called = advice.before_use(model, facts)
    text = advice.paragraphs(
        place + advice.INDENT + advice.INDENT.join(to_layout(model, called)),
        advice.at_line(model, [f"its images as .to({LAYOUT})"]) if has_images(model) else "",
        advice.likewise(
            {
                at: (name, at)
                for name, at in [
                    *(
                        (each["local"], at)
                        for each in filter(has_images, models)
                        for at in each["calls"][each is model :]
                    ),
                    *advice.other_models(models),
                ]
            }.values()
        ),
        note,
        advice.example(name),
    )
    return advice.inside(model["library"], text) if model.get("library") else text


def edit(name, facts, extra, sources):
    """Write the layout of the weights, and of the images in each call."""
    models = [
        each for each in anchors.models_once(facts) if "image" in each.get("traits", ["image"])
    ]
    spots = anchors.statements_of(models, sources)
    for model in models:
        lines = [line.partition("  #")[0] for line in to_layout(model, "{name}")]
        images = any(spot["images"] for spot in anchors.spots_of(model))  # uint8: in the model
        anchors.change_model(
            model,
            facts,
            sources,
            lines,
            "convolutions are faster in this layout" + ", which images get as well" * images,
        )
    for spot in spots:
        images_of(spot, sources)


def images_of(spot, sources):
    """Give the images of a call the layout, where the call names them one by one."""
    if not spot["images"]:
        return
    source, line = sources.find(spot["at"])
    layout, edits = f"{anchors.torch_name(source)}.channels_last", []
    for call in source.calls(line, spot["name"]):
        is_plain = not any(isinstance(each, ast.Starred) for each in call.args)
        given = dict(enumerate(call.args)) if is_plain else {}
        given |= {each.arg: each.value for each in call.keywords if each.arg}
        for image in (given[key] for key in spot["images"] if key in given):
            text = source.text(image)
            if not isinstance(image, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
                text = f"({text})"
            edits.append((image, f"{text}.to(memory_format={layout})"))
    if edits:
        source.apply(edits)
        source.mark(source.statement_at(line), "images get the same layout as the weights")


def forward(plain, name, run):
    """Return `plain` with images in channels_last."""
    import torch
    from torch.utils._pytree import tree_map_only

    def last_forward(*args, **kwargs):
        args, kwargs = tree_map_only(
            torch.Tensor,
            lambda each: (
                each.contiguous(memory_format=torch.channels_last) if each.dim() == 4 else each
            ),
            (args, kwargs),
        )
        return plain(*args, **kwargs)

    return last_forward


def on(run, name):
    """Change the layout of the weights."""
    import torch

    change(run, torch.channels_last)


def off(run, name):
    """Put the layout of before back."""
    change(run, None)


def change(run, layout):
    """Give each weight of four dimensions the layout, or (None) the one it had at first.

    Both copies are kept, because a CUDA graph reads the weights where they were when it was made.
    Momentum and gradients follow: a fused step on mixed layouts is silently wrong.
    """
    import torch

    weights = {
        id(each): each
        for module in run.models.inner()
        for each in module.parameters()
        if each.dim() == 4
    }
    with torch.no_grad():
        for weight in weights.values():
            copies = run.layouts.setdefault(weight, {None: weight.data})
            if layout not in copies:
                copies[layout] = torch.empty_like(weight.data, memory_format=layout)
            if copies[layout].data_ptr() != weight.data_ptr():
                weight.data = copies[layout].copy_(weight.data)
            if weight.grad is not None:
                weight.grad = torch.empty_like(weight.data).copy_(weight.grad)
        for optimizer in run.optimizers:
            for weight, state in optimizer.state.items():
                for name, value in state.items() if id(weight) in weights else ():
                    if getattr(value, "shape", None) == weight.shape:
                        state[name] = torch.empty_like(
                            weight.data, dtype=value.dtype, device=value.device
                        ).copy_(value)
