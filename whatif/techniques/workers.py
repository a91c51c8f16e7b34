"""Processes of a DataLoader that load while steps run."""

from .. import advice

NAMES = ("workers",)


def wanted(facts):
    """Return how many workers a loader of each process can have."""
    return max(1, min(16, facts["cores"] // facts["processes"]))


def why_not(name, facts):
    """Return why it cannot be tried, or ""."""
    loader = advice.main_loader(facts)
    if not loader:
        return "the script trains without a torch DataLoader"
    if loader.get("repeats"):
        return ("an IterableDataset without get_worker_info may give each worker the same data")
    is_pinned = loader["pin"] or facts["device"] != "cuda"
    if loader["workers"] >= wanted(facts) and loader["persistent"] and is_pinned:
        return "already there"
    return advice.is_seen(name, facts)


def write(name, facts, extra):
    """Return what to write: an option, or arguments of each DataLoader that trains."""
    extra = {"workers": wanted(facts), **extra}
    note = "watch: each worker takes memory and draws random numbers of its own"
    if option := advice.by_option(name, facts, extra):
        return advice.paragraphs(option, note)
    new = {"num_workers": str(extra["workers"]), "persistent_workers": "True"}
    if extra["workers"] == 0:
        new.pop("persistent_workers")
    if facts["device"] == "cuda":
        new["pin_memory"] = "True"
    lines = []
    for loader in advice.training_loaders(facts):
        mine = {key: value for key, value in new.items()
                if key != "num_workers" or value != str(loader.get("workers"))}
        text = advice.at_line(loader, advice.written(loader.get("arguments", {}), mine))
        library = loader.get("library")
        if library:
            text = advice.by_library(name, [library, loader.get("driver")], extra, loader) or (
                advice.inside(library, text))
        lines.append(text)
    return advice.paragraphs(*dict.fromkeys(lines), note)
