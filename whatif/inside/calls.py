"""The arguments that a user's line gives in a call, and where each of them comes from."""

import ast
import inspect
import re

import torch

from .places import UNKNOWN, evaluate, expressions_at, span_of, statements


def calls_in_line(frame, line):
    """Return (the calls in a user's line, which of them the frame makes or None)."""
    calls = [
        node
        for node in expressions_at(frame.f_code.co_filename, line)
        if isinstance(node, ast.Call)
    ]
    span = span_of(frame)
    return calls, next(
        (
            node
            for node in calls
            if span == (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
        ),
        None,
    )


def called_at(places, names):
    """Return {at: "file:line", name: what the user's line calls there, is_direct}, or {}.

    `is_direct` is false of a function that calls the model in turn: functional_call(model, x).
    `names` are the names, or ends of names, that the call may have if Python cannot tell it.
    """
    frame, line = places.frames()[0]
    calls, node = calls_in_line(frame, line)
    if node is None:
        likely = [each for each in calls if ast.unparse(each.func).endswith(tuple(names))]
        node = likely[0] if len(likely) == 1 else None
    place = places.line_of(frame.f_code.co_filename, getattr(node, "lineno", line))
    if node is None:
        return {}
    function = evaluate(node.func, {**frame.f_globals, **frame.f_locals})
    is_direct = function is UNKNOWN or isinstance(function, torch.nn.Module)
    return dict(at=place["at"], name=ast.unparse(node.func), is_direct=is_direct)


def call_in_line(frame, line, owner):
    """Return the node of the call in a user's line that makes an object of the class `owner`.

    It is the call that is under way, if Python knows it; else that of one of the class's names, or
    of super().__init__, or the only call in the line.
    """
    calls, node = calls_in_line(frame, line)
    if node:
        return node
    values = {**frame.f_globals, **frame.f_locals}
    classes, names = owner.__mro__, {each.__name__ for each in owner.__mro__}
    for node in calls:
        function = evaluate(node.func, values)
        last = ast.unparse(node.func).rpartition(".")[2]
        if any(function is each for each in classes) or last in names | {"__init__"}:
            return node
    return calls[0] if len(calls) == 1 else None


def is_called(places, owner):
    """Return whether the user's line itself calls the class `owner`, or one that it is made of."""
    frame, line = places.frames()[0]
    node = call_in_line(frame, line, owner)
    function = node and evaluate(node.func, {**frame.f_globals, **frame.f_locals})
    return isinstance(function, type) and function in owner.__mro__


def made_at(places, frame, line, text):
    """Return (where a user's line made the dict that is called `text`, how), or ("", "").

    How is "dict" for dict(...), "{}" for {...}, and "" for other values. A dict that is changed
    before the call has no such place.
    """
    file, code = frame.f_code.co_filename, frame.f_code
    found = None
    for node in statements(file):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if (
            isinstance(node, (ast.Assign, ast.AnnAssign))
            and node.value
            and any(target is not None and ast.unparse(target) == text for target in targets)
        ):
            is_near = (
                "." in text or node.lineno >= code.co_firstlineno or text not in (code.co_varnames)
            )
            if (
                is_near
                and (node.lineno < line or "." in text)
                and (found is None or node.lineno > found.lineno)
            ):
                found = node
    if found is None or any(
        found.lineno < node.lineno and (node.lineno < line or "." in text) and changes(node, text)
        for node in statements(file)
    ):
        return "", ""
    how = (
        "{}"
        if isinstance(found.value, ast.Dict)
        else "dict"
        if isinstance(found.value, ast.Call) and ast.unparse(found.value.func) == "dict"
        else ""
    )
    return f"{places.shown(file)}:{found.lineno}", how


def changes(node, text):
    """Return whether a statement sets an item of the dict that is called `text`, or updates it."""
    match node:
        case ast.Expr(ast.Call(ast.Attribute(owner, "update"))):
            return ast.unparse(owner) == text
        case ast.Assign([ast.Subscript(owner)]):
            return ast.unparse(owner) == text
    return False


def spread_of(places, frame, line, node, bound):
    """Return what is known of a `**options` in a call: its text, its names, where it is made."""
    text, values = ast.unparse(node.value), {**frame.f_globals, **frame.f_locals}
    given = evaluate(node.value, values)
    match node.value:
        case ast.Dict(keys) if all(isinstance(key, ast.Constant) for key in keys):
            names = [key.value for key in keys]
        case _:
            names = (
                [key for key in given if isinstance(key, str)]
                if isinstance(given, dict)
                else [*bound]
            )
    is_named = isinstance(node.value, (ast.Name, ast.Attribute))
    at, how = made_at(places, frame, line, text) if is_named and given is not UNKNOWN else ("", "")
    return dict(text=text, names=names, at=at, how=how)


def arguments_of(places, owner, args=(), kwargs=()):
    """Return what the user's line gives to `owner`, a class whose __init__ got args and kwargs.

    Return {call: its text, function: that of the function, positional: names of arguments,
    keywords: {name: text}, spreads: [{text, names, at, how}]}; {} if the line has no such call.
    """
    frame, line = places.frames()[0]
    node = call_in_line(frame, line, owner)
    if node is None:
        return {}
    try:
        parameters = list(inspect.signature(owner.__init__).parameters)[1:]
    except (TypeError, ValueError):
        parameters = []
    is_starred = any(isinstance(each, ast.Starred) for each in node.args)
    count = len(args if is_starred else node.args)
    keywords = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg}
    bound = [name for name in dict(kwargs) if name not in keywords]
    spreads = [
        spread_of(places, frame, line, each, bound) for each in node.keywords if each.arg is None
    ]
    return dict(
        call=re.sub(r"\s+", " ", ast.unparse(node)),
        function=ast.unparse(node.func),
        positional=parameters[:count],
        keywords=keywords,
        spreads=spreads,
    )
