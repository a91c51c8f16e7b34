"""Processes of a DataLoader that load while steps run."""

import ast
import re

from .. import advice
from ..write.sources import Refused

NAMES = ("workers",)


def wanted(facts):
    """Return how many workers a loader of each process can have."""
    return max(1, min(16, facts["cores"] // facts["processes"]))


def why_not(name, facts):
    loader = advice.main_loader(facts)
    if not loader:
        return "the script trains without a torch DataLoader"
    if loader.get("repeats"):
        return "an IterableDataset without get_worker_info may give each worker the same data"
    is_pinned = loader["pin"] or facts["device"] != "cuda"
    stays = loader["persistent"] or loader.get("changed")
    if loader["workers"] >= wanted(facts) and stays and is_pinned:
        return "already there"
    return advice.is_seen(name, facts)


def new_arguments(loader, facts, extra):
    """Return the arguments that a loader shall have, {name: text}, without those it has."""
    count = extra.get("workers", wanted(facts))
    new = {"num_workers": str(count)} if count != loader["workers"] else {}
    if count and not loader["persistent"] and not loader.get("changed"):
        new["persistent_workers"] = "True"
    if facts["device"] == "cuda" and not loader["pin"]:
        new["pin_memory"] = "True"
    return new


def edit(name, facts, extra, sources):
    """Write arguments of each DataLoader that trains."""
    loaders, done = advice.training_loaders(facts), 0
    for loader in loaders:
        new, given = new_arguments(loader, facts, extra), loader.get("arguments") or {}
        if loader.get("library"):
            raise Refused(f"{loader['library']} makes the loader")
        if not given:
            raise Refused(f"{loader['at']} makes its loader in a way of its own")
        if not new:
            continue
        source, line = sources.find(loader["at"])
        call = source.call_of(line, given)
        if "persistent_workers" in new and "num_workers" not in new:
            number = number_of(source, call, given)
            new["persistent_workers"] = f"{number} > 0" if number else "True"
        source.apply(source.give(call, new, given.get("positional", ())))
        source.mark(source.statement_at(line), "workers load the next batches while steps run")
        done += 1
    if not done:
        raise Refused("already there")


def number_of(source, call, given):
    """Return the text of a call's number of workers, which may be 0 in another run, or ""."""
    values = {each.arg: each.value for each in call.keywords if each.arg}
    number = (dict(zip(given.get("positional", ()), call.args)) | values).get("num_workers")
    if number is None:
        return in_spread(given, source.quote(), in_call=True)
    if isinstance(number, ast.Constant):
        return ""
    is_one = isinstance(number, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
    return source.text(number) if is_one else f"({source.text(number)})"


def in_spread(given, quote='"', in_call=False):
    """Return how a call that unpacks a dict can name its number of workers, or "".

    Where the dict is made, unless it is `in_call`, the number is known.
    """
    names = [
        each["text"]
        for each in given.get("spreads", ())
        if "num_workers" in each["names"]
        and re.fullmatch(r"[\w.]+", each["text"])
        and (in_call or not each["at"])
    ]
    return f"{names[-1]}[{quote}num_workers{quote}]" if names else ""


def write(name, facts, extra):
    """Return what to write: an option, or arguments of each DataLoader that trains."""
    loaders, extra = advice.training_loaders(facts), {"workers": wanted(facts), **extra}
    note = "watch: each worker takes memory and draws random numbers of its own"
    if changed := next(filter(None, (each.get("changed") for each in loaders)), ""):
        note += f"; {changed} changes the dataset, so workers must not stay for all epochs"
    if option := advice.by_option(name, facts, extra):
        return advice.paragraphs(option, note)
    new = {"num_workers": str(extra["workers"]), "persistent_workers": "True"}
    if extra["workers"] == 0:
        new.pop("persistent_workers")
    if facts["device"] == "cuda":
        new["pin_memory"] = "True"
    lines = []
    for loader in loaders:
        mine = dict(new)
        if mine["num_workers"] == str(loader.get("workers")):
            del mine["num_workers"]
        if loader.get("changed"):
            mine.pop("persistent_workers", None)
        number = in_spread(loader.get("arguments") or {})
        if number and "num_workers" not in mine and "persistent_workers" in mine:
            mine["persistent_workers"] = f"{number} > 0"
        text = advice.at_line(loader, advice.written(loader.get("arguments", {}), mine))
        library = loader.get("library")
        if library:
            text = advice.by_library(name, [library, loader.get("driver")], extra, loader) or (
                advice.inside(library, text)
            )
        lines.append(text)
    return advice.paragraphs(*dict.fromkeys(lines), note)
