"""TensorFloat-32 for products of float32 matrices."""

import contextlib

from .. import advice
from ..write import anchors

NAMES = ("tf32",)
LINE = 'torch.set_float32_matmul_precision("high")'


def why_not(name, facts):
    if why := advice.needs_gpu(facts) or advice.is_seen(name, facts):
        return why
    return "" if facts.get("capability", 0) >= 8 else "this GPU has no TF32"


def write(name, facts, extra):
    return advice.setting(
        name,
        facts,
        extra,
        LINE,
        "watch: products in float32 keep 10 bits of mantissa: compare the accuracy",
    )


def edit(name, facts, extra, sources):
    reason = "products of float32 matrices use TensorFloat-32"
    anchors.put_setting(name, facts, sources, LINE, reason)


def on(run, name):
    import torch

    torch.set_float32_matmul_precision("high")


def off(run, name):
    import torch

    with contextlib.suppress(RuntimeError):  # a script may mix the old setting and the new one
        torch.set_float32_matmul_precision(run.settings["tf32"])
