"""The fused kernels of an optimizer."""

from .. import advice

NAMES = ("fused",)


def fusible(facts):
    return [each for each in facts["optimizers"] if each["can_fuse"]]


def why_not(name, facts):
    """Return why it cannot be tried, or ""."""
    if not facts["optimizers"]:
        return "the optimizer is made in another process"
    if not fusible(facts):
        kinds = dict.fromkeys(each["kind"] for each in facts["optimizers"])
        return f"torch has no fused {', '.join(kinds)}"
    if all(each["fused"] for each in fusible(facts)):
        return "already there"
    return advice.is_seen(name, facts)


def write(name, facts, extra):
    """Return what to write: an option, or an argument for each optimizer."""
    if option := advice.by_option(name, facts, extra):
        return option
    todo = [each for each in fusible(facts) if not each["fused"]]
    lines = []
    for one in todo:
        library = one.get("library")
        if text := advice.by_library(name, [library], extra, one):
            lines.append(text)
        else:
            text = advice.at_line(one, arguments(one))
            lines.append(advice.inside(library, text) if library else text)
    if text := watch(todo):
        lines.append(text)
    return advice.paragraphs(*dict.fromkeys(lines), advice.example(name))


def arguments(one):
    """Return the lines that make an optimizer fused. It cannot be foreach as well."""
    given, new = one.get("arguments", {}), {"fused": "True"}
    if not one.get("foreach"):
        return advice.written(given, new)
    for spread in given.get("spreads", ()):
        if "foreach" in spread["names"] and spread["at"]:
            return [f"in {advice.named_in(spread)}: fused=True in place of foreach=True"]
        if "foreach" in spread["names"]:
            return advice.written(given, {"foreach": "None", **new})
    return [f"{text} in place of foreach=True" for text in advice.written(given, new)]


def watch(optimizers):
    """Return what to watch."""
    sgd = any(each["kind"] == "SGD" for each in optimizers)
    return "watch: load_state_dict of an old checkpoint turns it off again" + (
        "; with amp float16, create\n        SGD's momentum before the first step, as "
        "train_fused.py does" * sgd)
