"""What to write for a technique: the script's option, its library's, or the lines themselves.

Nothing here needs torch. `facts` are what inside/facts.py has found, and `extra` has `workers`,
`times` (of a batch), and perhaps `device`.
"""

import importlib
import re

from .libraries import LIBRARIES
from .scriptoptions import options_for, takes_words
from .search import kind

FITS = "lightning", "pytorch_lightning", "catalyst"  # their call gets the model first
INDENT = f"\n{12 * ' '}"


def module_of(name):
    """Return the module of a technique."""
    return importlib.import_module(f"{__package__}.techniques.{kind(name)}")


def write(name, facts, extra=None):
    """Return what to write for a technique: lines of text, the first without an indent."""
    text = module_of(name).write(name, facts, extra or {})
    return re.sub(r"\btorch\.", f"{facts.get('name_of_torch') or 'torch'}.", text)


# ------------------------------------------------------------------------------ from the facts
def is_seen(name, facts):
    """Return "already there" if the script has the technique."""
    return "already there" if {name, kind(name)} & {*facts["seen"]} else ""


def no_model(facts):
    return "" if models_of(facts) else "no torch.nn.Module is called in a step"


def needs_gpu(facts):
    return "" if facts["device"] == "cuda" else "it needs an NVIDIA GPU"


def main_loader(facts):
    """Return the first loader that trains, or {}."""
    return facts["loaders"][facts["training"][0]] if facts["training"] else {}


def training_loaders(facts):
    """Return the loaders that train, each call of a line once."""
    loaders = [facts["loaders"][number] for number in facts["training"]]
    return [
        *{(each["at"], each.get("arguments", {}).get("call")): each for each in loaders}.values()
    ]


def models_of(facts):
    """Return the models: first those that train, then those that only take time."""
    return sorted(
        (each for each in facts["models"] if each.get("role") != ""),
        key=lambda each: each.get("role") == "frozen",
    )


def drivers_of(facts):
    """Return the libraries that run the loop or make the optimizer, the loop's first."""
    things = [*facts["models"][:1], *facts["optimizers"], *facts["loaders"]]
    found = [each.get("driver") for each in facts["models"]]
    found += [each.get(key) for key in ("driver", "library") for each in things]
    return [*dict.fromkeys(filter(None, found))]


def line(of):
    """Return "file:line  its text"."""
    return f"{of['at']}  {of['text']}" if of else ""


# ------------------------------------------------------------------- options instead of lines
def options_of(name, facts, extra):
    """Return the words of the script's own option for a technique, or []."""
    return options_for(name, facts.get("options", ()), drivers_of(facts), extra)


def are_words(words, facts):
    """Return whether words of options_of() go on the command line; else they stand in a file."""
    return words[0].startswith("-") or takes_words(facts.get("options", ()))


def by_option(name, facts, extra):
    """Return the advice to use the script's own option, or ""."""
    words = options_of(name, facts, extra)
    if not words:
        return ""
    if not words[0].startswith("-"):
        return f"your script has a setting for it: {' '.join(words)}"
    return f"your script has an option: {' '.join(words)}"


def by_library(name, libraries, extra, entry=None):
    """Return the advice to use the option of the first of `libraries` that has one, or ""."""
    for library in libraries:
        texts = LIBRARIES.get(library, {})
        if text := texts.get(name) or texts.get(kind(name)):
            text = text if isinstance(text, str) else f"{text[0]}({text[1]})"
            first = f"{line(entry)}\n            " if entry else ""
            return first + text.format(**{"workers": "N", "size": "a larger one", **extra})
    return ""


def built_in(name, facts, extra):
    """Return the advice to use the option of the script, or of the library that runs it, or ""."""
    driver, entry = driven(facts)
    return by_option(name, facts, extra) or by_library(name, [driver], extra, entry)


def setting(name, facts, extra, code, *notes):
    """Return the advice for a line at the top of a script, or below one that would undo it."""
    if option := built_in(name, facts, extra):
        return paragraphs(option, notes[0])
    place, own = "at the top", facts.get("settings", {}).get(kind(name))
    if own and facts["optimizers"]:
        place, code = f"above {line(facts['optimizers'][0])}", f"{code}  # {own} sets it too"
    return paragraphs(f"{place}{INDENT}{code}", *notes)


def inside(library, text):
    """Return the advice for lines that are a library's."""
    return f"inside {library}, which has to be told to do this:\n        {text}"


def example(name):
    """Return the line that names the template of a technique."""
    return f"example: diff src/train.py src/train_{kind(name)}.py in pytorch-speedup"


def paragraphs(*lines):
    """Join lines of advice, of which empty ones are left out."""
    return "\n        ".join(filter(None, lines))


# ----------------------------------------------------------------------- arguments of a call
def named_in(spread):
    """Return "options (train.py:12)"."""
    return spread["text"] + (f" ({spread['at']})" if spread["at"] else "")


def in_dict(spread, new):
    """Return the line that sets items of a dict that can be named."""
    items = [
        f'"{name}": {value}' if spread["how"] == "{}" else f"{name}={value}"
        for name, value in new.items()
    ]
    return f"in {named_in(spread)}: {', '.join(items)}"


def written(arguments, new):
    """Return lines that give the arguments `new`, {name: text}, in a user's call.

    An argument that the call has already is replaced where it is: as a keyword, by its position,
    or in a dict that the call unpacks.
    """
    keywords, spreads = arguments.get("keywords", {}), arguments.get("spreads", [])
    new = {name: value for name, value in new.items() if keywords.get(name) != value}
    plain, replaced, lines, call = [], [], [], {}
    for spread in spreads:
        if not set(spread["names"]) & set(new):
            continue
        mine = {name: value for name, value in new.items() if name not in keywords}
        if spread["at"]:
            lines.append(in_dict(spread, mine))
        else:
            call |= dict(spread=spread, new=mine)
        new = {name: value for name, value in new.items() if name not in mine}
    for name, value in new.items():
        if name in keywords:
            replaced.append(f"{name}={value} in place of {name}={keywords[name]}")
        elif name in arguments.get("positional", ()):
            place = arguments["positional"].index(name) + 1
            replaced.append(f"{value} as argument {place} ({name})")
        else:
            plain.append(f"{name}={value}")
    if call:
        items = ", ".join(f'"{name}": {value}' for name, value in call["new"].items())
        old = f"**{call['spread']['text']}"
        text = arguments["call"].replace(old, f"**{{{old}, {items}}}")
        lines.append(text if old in arguments["call"] else items)
    return [*([", ".join(plain)] if plain else []), *replaced, *lines]


def at_line(of, lines):
    """Return a user's line, and below it what to write there."""
    return f"{line(of)}{INDENT}{INDENT.join(lines)}"


# ------------------------------------------------------------------------- places for a model
def shown_model(about):
    """Return a model's name, and whether it only takes time."""
    return about["name"] + (" (frozen)" if about.get("role") == "frozen" else "")


def before_use(about, facts):
    """Return (where a model is to be changed, its name there).

    That is before DistributedDataParallel gets it: neither layout nor function may change below
    a live one. Else it is above the line that makes the optimizer. A model that is made in the call
    of DataParallel, which does not mind, is changed below that line.
    """
    name = about["name"]
    if not facts["optimizers"]:  # a pickled model loses what compile() did
        return "in the process that trains, before its first step", name
    if about.get("before"):
        where = "below" if about["before"].get("below") else "above"
        return f"{where} {line(about['before'])}", about["bare"] or "model"
    if about.get("is_wrapped"):
        inner = name.removesuffix(".module") if name.endswith(".module") else name
        return (
            "before DistributedDataParallel or DataParallel gets the model",
            "model" if inner != name else name,
        )
    if about.get("above"):
        return f"above {line(about['above'])}", name
    made = about.get("made")
    return f"below {line(made)}" if made else f"below the line that makes {name}", name


def likewise(pairs):
    """Return the line that names further (name, place) where the same has to be done."""
    found = ", ".join(dict.fromkeys(f"{name} ({at})" for name, at in pairs))
    return f"likewise: {found}" if found else ""


def other_models(models):
    """Return (name, place) of all models but the first, for what is done once for each."""
    return [
        (
            shown_model(each),
            next(filter(None, (each.get(key) for key in ("before", "above", "made"))), each)["at"],
        )
        for each in models[1:]
    ]


def in_driver(model, facts):
    """Return (where a model is changed whose loop a library runs, its name there, is it fitted)."""
    driver, entry = driven(facts)
    if model.get("above") and driver not in FITS:  # the script makes the optimizer
        return *before_use(model, facts), False
    return f"above {line(entry)}", fitted(driver, entry), driver in FITS


def stepped(facts):
    """Return [(number, name)] of optimizers, as lines of step() call them: not as they are made."""
    return [
        (each.get("optimizer"), each["name"].removesuffix(".step"))
        for each in (facts.get("sites") or {}).get("steps", ())
        if re.fullmatch(r"(?!(self|scaler)\.step$)[\w.\[\]'\"]+\.step", each.get("name", ""))
    ]


def fitted(driver, entry):
    """Return the variable that a line like trainer.fit(model, ...) gives, or "model"."""
    first = r"\.\w+\(\s*(?:\w*model\s*=\s*)?" if driver in FITS else r"\bmodel\s*=\s*"
    found = re.search(rf"{first}([A-Za-z_][\w.]*)\s*[,)]", (entry or {}).get("text", ""))
    return found[1] if found else "model"


def driven(facts):
    """Return (the library that runs the loop or "", the user's line that calls it)."""
    for each in models_of(facts):
        if each.get("driver"):
            return each["driver"], each.get("entry") or {}
    return "", {}
