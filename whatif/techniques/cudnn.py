"""cuDNN's choice of the fastest algorithm for each convolution."""

from .. import advice
from ..write import anchors

NAMES = ("cudnn",)
LINE = "torch.backends.cudnn.benchmark = True"


def why_not(name, facts):
    if why := advice.needs_gpu(facts) or advice.is_seen(name, facts):
        return why
    return "" if "convolution" in facts["seen"] else "the model has no convolution"


def write(name, facts, extra):
    return advice.setting(
        name,
        facts,
        extra,
        LINE,
        "watch: it tries every new input size; runs differ in the last bits",
        advice.example(name),
    )


def edit(name, facts, extra, sources):
    anchors.put_setting(
        name,
        facts,
        sources,
        LINE,
        "cuDNN tries its algorithms on each new shape and keeps the fastest",
    )


def on(run, name):
    import torch

    torch.backends.cudnn.benchmark = True


def off(run, name):
    import torch

    torch.backends.cudnn.benchmark = run.settings["cudnn"]
