"""Lines that change a dataset between epochs, which workers that stay do not see."""

import ast
import contextlib
import functools
import linecache
import re

from whatif.write.sources import FUNCTIONS, LOOPS

from .places import statements

LOADER = re.compile(r"^(?!.*(val|test|dev)).*(load|train|dl$)", re.I)  # the name of one to train


def changes_in(places, loaders):
    """Return the loaders with `changed`: "file:line" of the first line that changes the dataset.

    It sets or calls `loader.dataset.scale`, in a loop or in another function than that which makes
    the loader; or it does so by the dataset's own name, in the same function, in a loop below the
    line that makes the loader. `changed` is "" if there is none.
    """
    lines = {name: changing(places.whole(name)) for name in places.files()}
    return [about | dict(changed=changed_at(places, about, lines)) for about in loaders]


@functools.lru_cache(None)
def changing(file):
    """Return [(line, text of what it sets or calls)] of what may change a dataset in a file."""
    found, text = [], "".join(linecache.getlines(file))
    for node in statements(file) if "Loader" in text or ".dataset." in text else ():
        match node:
            case (
                ast.Expr(ast.Call(ast.Attribute() as owner))
                | ast.Assign([ast.Attribute() | ast.Subscript() as owner])
                | ast.AugAssign(ast.Attribute() | ast.Subscript() as owner)
            ):
                found.append((node.lineno, ast.unparse(owner)))
    return found


def changed_at(places, about, lines):
    """Return "file:line" of the first line that changes the dataset of a loader, or ""."""
    maker, _, made = about["at"].rpartition(":")
    makes = around(places.whole(maker), int(made), FUNCTIONS)
    dataset = dataset_of(about.get("arguments") or {})
    for name, each in lines.items():
        file = places.whole(name)
        for line, text in each:
            loader, is_there, _ = text.partition(".dataset.")
            by_name = dataset and text.startswith(f"{dataset}.") and name == maker
            if not (is_there and LOADER.search(loader) or by_name):
                continue
            inside, in_loop = around(file, line, FUNCTIONS), around(file, line, LOOPS)
            is_other = bool(inside) and not {*inside} & {*makes}
            is_later = in_loop and inside == makes and line > int(made)
            if is_later if by_name else in_loop or is_other:
                return f"{name}:{line}"
    return ""


def dataset_of(arguments):
    """Return the name that a call of a DataLoader has for its dataset, or ""."""
    text = arguments.get("keywords", {}).get("dataset", "")
    with contextlib.suppress(SyntaxError):  # of a text in it, perhaps
        given = ast.parse(arguments.get("call") or "f()", mode="eval").body.args
        text = text or (ast.unparse(given[0]) if given else "")
    return text if re.fullmatch(r"[\w.]+", text) else ""


def around(file, line, kinds):
    """Return the statements of some kinds that a line is in."""
    return [
        node
        for node in statements(file)
        if isinstance(node, kinds) and node.lineno < line <= node.end_lineno
    ]
