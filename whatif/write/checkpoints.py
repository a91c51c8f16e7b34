"""Write what a checkpoint of the script has to keep: the scaler, and fused optimizers."""

import ast
import re

from whatif import advice

from . import anchors
from .sources import FUNCTIONS, Refused

KEPT = "the scale is a part of the training's state"


def calls_of(source, names, method):
    """Return the calls of `name.method` in a file, for one of the names."""
    wanted = {f"{name}.{method}" for name in names}
    return [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in wanted
    ]


def names_of(facts):
    """Return the names that optimizers may have in the script: also with another owner.

    A function may make one without a name, which the line of its step has.
    """
    names = {each.get("name") or "optimizer" for each in facts["optimizers"]}
    names |= {name for _, name in advice.stepped(facts)}
    names |= {name.rpartition(".")[2] for name in names} | {"optimizer"}
    return names | {f"self.{name}" for name in names if "." not in name}


def loads(facts, sources):
    """Return whether a file that is known loads the state of an optimizer, or of what may be one."""
    models = {each.get(key) for each in facts["models"] for key in ("name", "local", "bare")}
    models |= {f"{name}.module" for name in models} | {"model", "net"}
    optimizers = {name.rpartition(".")[2] for name in names_of(facts)} - {"self"}
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "load_state_dict"
        and ast.unparse(node.func.value) not in models
        and may_be_optimizer(source, node, optimizers)
        for source in sources.files.values()
        for node in ast.walk(source.tree)
    )


def may_be_optimizer(source, call, optimizers):
    """Return whether what loads a state may be an optimizer: its words name one, or many things.

    A state that is taken from a live object, as by target networks, is from no checkpoint.
    """
    owner, words = call.func.value, ast.unparse(call)
    if is_named(ast.unparse(owner), optimizers):
        return True
    if any(ast.unparse(each).endswith(".state_dict()") for each in call.args):
        return False
    if is_named(words, optimizers):
        return True
    if not isinstance(owner, ast.Name):
        return not isinstance(owner, ast.Attribute)
    around = [call, *source.ancestors(call)]
    passed = [source.scope_of(call), *(each for each in around if isinstance(each, ast.Lambda))]
    passed = [each.args for each in passed if hasattr(each, "args")]
    passed += [each.target for each in around if isinstance(each, (ast.For, ast.AsyncFor))]
    passed += [part.target for each in around for part in getattr(each, "generators", ())]
    return any(
        owner.id in (getattr(part, "arg", ""), getattr(part, "id", ""))
        for each in passed
        for part in ast.walk(each)
    ) or any(
        isinstance(each, ast.Assign)
        and owner.id in map(ast.unparse, each.targets)
        and (isinstance(each.value, ast.Subscript) or is_named(ast.unparse(each.value), optimizers))
        for each in ast.walk(source.scope_of(call))
    )


def is_named(text, optimizers):
    """Return whether words name an optimizer."""
    return bool(re.search("opt", text, re.I) or optimizers & set(re.findall(r"\w+", text)))


def is_kept_in(facts, source, scope):
    """Return whether all lines of a file that save or load the optimizer are in a function."""
    names = names_of(facts)
    return all(
        source.scope_of(each) is scope
        for method in ("state_dict", "load_state_dict")
        for each in calls_of(source, names, method)
    )


def keep_scaler(facts, source, sources):
    """Save and load the scaler's state beside the optimizer's.

    Refused says why it cannot be kept, if the script keeps its optimizer.
    """
    names = names_of(facts)
    for other in sources.files.values():
        for method in "state_dict", "load_state_dict":
            if other is not source and (found := calls_of(other, names, method)):
                raise Refused(
                    f"{other.where(found[0])} keeps the optimizer where the scaler is not known"
                )
    each_of(source, names, "state_dict", save)
    each_of(source, names, "load_state_dict", load)


def each_of(source, names, method, edit):
    """Edit each call of a method in a file. Raise Refused if none can be edited.

    One of several may be a copy in memory, which needs no scaler.
    """
    done, refused = False, None
    for number in range(len(calls_of(source, names, method))):
        try:
            edit(source, calls_of(source, names, method)[number])
            done = True
        except Refused as why:
            refused = why
    if refused and not done:
        raise refused


def takes_more(source, call):
    """Return whether a call takes any keyword: dict(), or a function with **options."""
    name = ast.unparse(call.func).rpartition(".")[2]
    return name in ("dict", "OrderedDict", "update") or any(
        isinstance(each, FUNCTIONS) and each.name == name and each.args.kwarg
        for each in ast.walk(source.tree)
    )


def save(source, call):
    """Add the scaler to a dict in which the optimizer's state is saved."""
    around = source.parents[call]
    if isinstance(around, ast.Dict) and call in around.values:
        key = around.keys[around.values.index(call)]
        text = source.text(key) if isinstance(key, ast.Constant) else '"'
        items, first = [f"{text[0]}scaler{text[0]}: scaler.state_dict()"], around.keys[0]
    elif isinstance(around, ast.keyword) and takes_more(source, source.parents[around]):
        around = source.parents[around]
        items, first = ["scaler=scaler.state_dict()"], (around.args or around.keywords)[0]
    else:
        raise Refused(f"{source.where(call)} saves the optimizer in a way of its own")
    if "scaler.state_dict()" in source.text(around):
        return  # it holds several optimizers
    statement = source.statement_of(call)
    line = source.origins[statement.lineno - 1]
    source.apply([source.grow(around, items, first)])
    if line:
        source.mark(source.statement_at(line), KEPT)


def load(source, call):
    """Load the scaler's state below the optimizer's, if the checkpoint has one."""
    statement = source.parents[call]
    given = call.args[0] if call.args else None
    if (
        not isinstance(statement, ast.Expr)
        or not isinstance(given, ast.Subscript)
        or not (isinstance(given.value, ast.Name) and isinstance(given.slice, ast.Constant))
    ):
        raise Refused(f"{source.where(call)} loads the optimizer in a way of its own")
    name, quote = given.value.id, source.text(given.slice)[0]
    key = f"{quote}scaler{quote}"
    block = anchors.block_of(source, statement)
    if any(f"scaler.load_state_dict({name}[" in ast.unparse(each) for each in block):
        return  # below the state of another optimizer
    source.put_after(
        statement, [f"if {key} in {name}:", f"    scaler.load_state_dict({name}[{key}])"], KEPT
    )
