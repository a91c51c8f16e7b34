"""A larger batch. This is another training, so it is never part of a set."""

import collections
import math

from .. import advice

NAMES = ("batch x2", "batch x4")
CHANNELS = 4  # of an image, at most; a larger first dimension is that of a batch


def why_not(name, facts):
    loader, size = advice.main_loader(facts), times([name])
    if not loader:
        return "the script trains without a torch DataLoader"
    if not loader.get("can_grow"):
        return "the dataset or a batch sampler of its own makes the batches"
    if (steps := loader.get("length") or math.inf) < 4 * size:
        return f"an epoch has too few steps ({steps})"
    if facts.get("peak"):
        fits = size * facts["peak"] <= 0.8 * facts["memory"]
        return "" if fits else "the GPU's memory is too small"
    return "" if size <= 2 else "without a GPU only twice the batch is tried"


def write(name, facts, extra):
    """Return what to write: an option, or the size in the DataLoader's call."""
    loader, extra = advice.main_loader(facts), {**extra, "times": times([name])}
    note = "watch: this is another training: tune the learning rate again"
    if option := advice.by_option(name, facts, extra):
        return advice.paragraphs(option, note)
    size = extra["times"] * loader["batch"] if loader["batch"] else None
    library = loader.get("library")
    if text := advice.by_library(
        name,
        [library, loader.get("driver")] if library else [],
        {**extra, "size": size or "a larger one"},
        loader,
    ):
        return advice.paragraphs(text, note)
    lines = [f"a batch {extra['times']} times as large"]
    if size and loader.get("arguments"):
        lines += advice.written(loader["arguments"], {"batch_size": str(size)})
    text = advice.at_line(loader, lines)
    return advice.paragraphs(advice.inside(library, text) if library else text, note)


def times(names):
    """Return how many batches are joined under a set of techniques."""
    return next((int(name[-1]) for name in names if name in NAMES), 1)


def is_samples(batch):
    """Return whether a list holds samples: images of several sizes, or dicts, as in detection."""
    import torch

    if not batch or len({type(each) for each in batch}) > 1:
        return False
    if isinstance(batch[0], torch.Tensor):
        are_images = all(each.dim() == 3 and each.shape[0] <= CHANNELS for each in batch)
        return are_images and len({each.shape for each in batch}) > 1
    return len(batch) > 1 and not isinstance(batch[0], (list, tuple))


def joined(batches):
    """Return batches as one, or raise ValueError: tensors are joined along their first dimension.

    Lists of samples, as detection has them, are joined as lists.
    """
    import torch

    first = batches[0]
    if isinstance(first, torch.Tensor):
        if not first.dim() or any(each.shape[1:] != first.shape[1:] for each in batches):
            raise ValueError("its batches cannot be joined: their shapes differ")
        whole = torch.cat(batches)
        return whole.pin_memory() if first.is_pinned() else whole
    if isinstance(first, (dict, collections.UserDict)):  # a BatchEncoding of transformers
        return type(first)({key: joined([each[key] for each in batches]) for key in first})
    if isinstance(first, (list, tuple)):
        if is_samples(first):
            return type(first)(sum(map(list, batches), []))
        parts = [joined([*each]) for each in zip(*batches)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, (str, bytes, int, float, type(None))):
        return first
    raise ValueError(f"its batches cannot be joined: they hold a {type(first).__name__}")
