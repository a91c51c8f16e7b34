"""TF32 for products of float32 matrices."""

import contextlib

NAMES = ("tf32",)


def on(run, name):
    """Let products of float32 use TF32."""
    import torch
    torch.set_float32_matmul_precision("high")


def off(run, name):
    """Put back what the script had."""
    import torch
    with contextlib.suppress(RuntimeError):  # a script may mix the old setting and the new one
        torch.set_float32_matmul_precision(run.settings["tf32"])
