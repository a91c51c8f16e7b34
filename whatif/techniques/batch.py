"""A larger batch. This is another training, so it is never part of a set."""

import math

from .. import advice

NAMES = ("batch",)


def times(facts):
    """Return how many times as large a batch fits into memory and leaves four steps an epoch."""
    room = 0.8 * facts["memory"] / facts["peak"] if facts.get("peak") else 2
    steps = advice.main_loader(facts).get("length") or math.inf
    return max((each for each in (2, 4) if each <= room and steps >= 4 * each), default=1)


def why_not(name, facts):
    """Return why it cannot be tried, or ""."""
    loader = advice.main_loader(facts)
    if not loader:
        return "the script trains without a torch DataLoader"
    if not loader.get("can_grow"):
        return "the dataset makes the batches itself"
    return "no memory is left, or an epoch has too few steps" if times(facts) == 1 else ""


def write(name, facts, extra):
    """Return what to write: an option, or the size in the DataLoader's call."""
    loader, extra = advice.main_loader(facts), {"times": times(facts), **extra}
    note = "watch: this is another training: tune the learning rate again"
    if option := advice.by_option(name, facts, extra):
        return advice.paragraphs(option, note)
    size = extra["times"] * loader["batch"] if loader["batch"] else None
    library = loader.get("library")
    if text := advice.by_library(name, [library, loader.get("driver")] if library else [],
                                 {**extra, "size": size or "a larger one"}, loader):
        return advice.paragraphs(text, note)
    lines = [f"a batch {extra['times']} times as large"]
    if size and loader.get("arguments"):
        lines += advice.written(loader["arguments"], {"batch_size": str(size)})
    text = advice.at_line(loader, lines)
    return advice.paragraphs(advice.inside(library, text) if library else text, note)
