"""The techniques, one file each: when one applies, how it is switched on and off, what to write.

A new technique is a new file in this folder. A module names its techniques in NAMES; "amp bfloat16"
and "amp float16" are two of one kind, and a set holds one of a kind at most. Each function but
write is optional:

    on(run, name), off(run, name)   change the script's process, where no step is under way
    forward(plain, name, run)       return a forward that does what `plain` does, with the technique
    why_not(name, facts)            return why it cannot be tried, or ""
    write(name, facts, extra)       return what to write in the script, in words
    edit(name, facts, extra, sources)   write it in copies of the user's files, `sources`; raise
                                    Refused(why) if it cannot be written safely
"""

import importlib
import pkgutil

from whatif.search import kind

FOUND = {
    each.name: importlib.import_module(f"{__name__}.{each.name}")
    for each in pkgutil.iter_modules(__path__)
}


def in_order(*first):
    """Return all modules: those of `first` in this order, then the others."""
    return [FOUND[name] for name in dict.fromkeys([*first, *sorted(FOUND)])]


# forward() of the first is the innermost: autocast stands around what is compiled
MODULES = in_order("compile", "amp", "channels_last")
# the order in which they are tried and written
NAMES = [
    name
    for module in in_order(
        "amp", "channels_last", "fused", "cudnn", "tf32", "compile", "batch", "workers"
    )
    for name in module.NAMES
]
KINDS = [*dict.fromkeys(map(kind, NAMES))]
LOADING = ("workers",)  # measured with the loader by itself, not by turns
NEVER_KEPT = ("batch",)  # another training


def module_of(name):
    """Return the module of a technique."""
    return next(module for module in MODULES if name in module.NAMES)


def ordered(names):
    """Return a set of techniques as a tuple in the order of NAMES."""
    return tuple(name for name in NAMES if name in names)


def reasons(facts, names):
    """Return {technique: why it cannot be tried}."""
    found = {name: call("why_not", name, name, facts) or captured(name, facts) for name in names}
    return {name: why for name, why in found.items() if why}


def captured(name, facts):
    """Return why a technique is kept out by CUDA graphs that the script itself replays, or ""."""
    if "graphs" not in facts["seen"] or "compile" in facts["seen"]:  # compiled code captures anew
        return ""
    free = kind(name) in ("fused", *LOADING)
    return "" if free else "your script replays CUDA graphs, captured without it"


def call(function, name, *args):
    """Call a technique's function, if its module has it."""
    if found := getattr(module_of(name), function, None):
        return found(*args)
    return None


def forward_of(names, plain, run):
    """Return a forward for a set of techniques, made of a plain one."""
    for module in MODULES:
        for name in names:
            if name in module.NAMES and hasattr(module, "forward"):
                plain = module.forward(plain, name, run)
    return plain


def changes_forward(names):
    """Return those techniques of a set for which a forward of its own is made."""
    return tuple(name for name in names if hasattr(module_of(name), "forward"))
