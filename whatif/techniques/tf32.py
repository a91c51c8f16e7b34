"""TensorFloat-32 for products of float32 matrices."""

import contextlib

from .. import advice
from ..write import anchors

NAMES = ("tf32",)


def why_not(name, facts):
    """Return why it cannot be tried, or ""."""
    if why := advice.needs_gpu(facts) or advice.is_seen(name, facts):
        return why
    return "" if facts.get("capability", 0) >= 8 else "this GPU has no TF32"


def write(name, facts, extra):
    """Return what to write: an option, or the line at the top."""
    driver, entry = advice.driven(facts)
    note = "watch: products in float32 keep 10 bits of mantissa: compare the accuracy"
    if option := advice.by_option(name, facts, extra) or advice.by_library(
            name, [driver], extra, entry):
        return advice.paragraphs(option, note)
    return advice.paragraphs(
        f'at the top{advice.INDENT}torch.set_float32_matmul_precision("high")', note)


def edit(name, facts, extra, sources):
    """Write the setting at the top."""
    source = anchors.main_source(facts, sources)
    torch = anchors.torch_name(source)
    anchors.put_at_top(source, f'{torch}.set_float32_matmul_precision("high")',
                       "products of float32 matrices use TensorFloat-32")


def on(run, name):
    """Let products of float32 use TF32."""
    import torch
    torch.set_float32_matmul_precision("high")


def off(run, name):
    """Put back what the script had."""
    import torch
    with contextlib.suppress(RuntimeError):  # a script may mix the old setting and the new one
        torch.set_float32_matmul_precision(run.settings["tf32"])
