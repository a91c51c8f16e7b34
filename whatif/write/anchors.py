"""Where in a user's file something is written: at the top, for a model, around its calls."""

import ast
import re

from whatif import advice

from .sources import FUNCTIONS, LOOPS, Refused

WRAPPERS = "DistributedDataParallel", "DataParallel", "DDP"
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
SCOPES = *FUNCTIONS, *COMPREHENSIONS, ast.ClassDef, ast.Lambda  # names that they set are their own


def names_torch(node):
    """Return the name that an import gives to torch, or ""."""
    if not isinstance(node, ast.Import):
        return ""
    return next(
        (
            each.asname or "torch"
            for each in node.names
            if each.name == "torch" or each.name.startswith("torch.") and not each.asname
        ),
        "",
    )


def top_of(source):
    """Return the last of the first run of imports with torch in it, at the top level.

    Without such an import, as below `from models import *`, it is the first run of imports.
    """
    imports, last = (ast.Import, ast.ImportFrom), None
    of_torch = [node for node in source.tree.body if imports_torch(node)]
    for node in source.tree.body:
        if last and not isinstance(node, imports):
            break
        if last or isinstance(node, imports) and node in (of_torch or [node]):
            last = node
    if not last:
        raise Refused(f"{source.shown} has no import at its top")
    return last


def imports_torch(node):
    """Return whether a statement imports torch or a part of it."""
    names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.split(".")[0] == "torch" for name in names)


def torch_name(source):
    """Return how a file names torch, at its top level; write an import if it does not."""
    for node in source.tree.body:
        if name := names_torch(node):
            return name
    index = top_of(source).end_lineno
    source.insert(index, "import torch")
    source.block(index, index + 1, "the lines below need it")
    return "torch"


def put_at_top(source, line, *reasons):
    """Write a line below the imports."""
    last = top_of(source)
    source.need_alone(last)
    index = last.end_lineno
    while index < len(source.lines) and source.origins[index] is None:
        index += 1  # below another block
    above = [""] if source.lines[index - 1].strip() else []
    source.insert(index, *above, line)
    index += len(above)
    source.block(index, index + 1, *reasons)


def put_setting(name, facts, sources, line, reason):
    """Write a line of torch below the imports of the file that makes the optimizer.

    Without an optimizer it is the file that calls the model. If the script makes this setting in
    a line of its own, which may run later, it is written above the optimizer.
    """
    things = [*facts["optimizers"], *facts["models"]]
    if not things:
        raise Refused("no line of the script is known")
    source, number = sources.find(things[0]["at"])
    line = f"{torch_name(source)}{line.removeprefix('torch')}"
    if facts["optimizers"] and name in facts.get("settings", {}):
        source.put_before(source.statement_at(number), [line], reason)
    else:
        put_at_top(source, line, reason)


# -------------------------------------------------------------------------------- for a model
def assigns(node, name):
    """Return whether a statement, or one in it, gives a name its value."""
    root = re.match(r"\w*", name)[0]
    for each in ast.walk(node):
        targets = [
            *getattr(each, "targets", ()),
            getattr(each, "target", None),
            getattr(each, "optional_vars", None),
        ]
        for target in filter(None, targets):
            if {
                ast.unparse(part)
                for part in ast.walk(target)
                if isinstance(part, (ast.Name, ast.Attribute))
            } & {name, root}:
                return True
    return False


def wraps(node, name):
    """Return whether a statement gives a model to DistributedDataParallel or DataParallel."""
    return any(
        isinstance(each, ast.Call)
        and ast.unparse(each.func).rpartition(".")[2] in WRAPPERS
        and any(
            ast.unparse(argument).startswith(name)
            for argument in [*each.args, *(keyword.value for keyword in each.keywords)]
        )
        for each in ast.walk(node)
    )


def block_of(source, statement):
    """Return the list of statements that a statement is in."""
    parent = source.parents[statement]
    for field in "body", "orelse", "finalbody":
        if statement in getattr(parent, field, ()):
            return getattr(parent, field)
    for case in getattr(parent, "handlers", ()):
        if statement in case.body:
            return case.body
    return [statement]


def hoisted(source, statement, name):
    """Return the statement above which a model is changed, for all branches of the script.

    It goes up as long as the name has its value there, and above the first statement that wraps
    the model.
    """
    while True:
        block = block_of(source, statement)
        before = block[: block.index(statement)]
        if earlier := next((each for each in before if wraps(each, name)), None):
            statement, before = earlier, before[: before.index(earlier)]
        parent = source.parents[statement]
        if isinstance(parent, LOOPS):
            raise Refused(f"{source.where(statement)} is in a loop")
        if not isinstance(parent, ast.If) or any(assigns(each, name) for each in before):
            return statement
        statement = parent


def place_for(model, facts, sources):
    """Return where a model is changed: (source, statement, its name there, another statement).

    It is changed above the statement, or below the other one if that is not None. That is before
    DistributedDataParallel gets the model, above the optimizer, or below the line that makes it.
    """
    name, at = model["name"], model.get("before") or model.get("above")
    if not facts["optimizers"]:
        raise Refused("the optimizer is made in another process")
    if model.get("before"):
        name = model.get("bare") or ""
    elif model.get("is_wrapped"):
        raise Refused("the line that wraps the model is not known")
    if not at and (found := below_making(model, name, sources)):
        return found
    if not at or not name or not re.fullmatch(r"[\w.\[\]'\"]+", name):
        raise Refused(f"it is not known where {model['kind']} gets its last change")
    source, line = sources.find(at["at"])
    statement = source.statement_at(line)
    if not isinstance(
        source.parents[statement], (ast.If, *FUNCTIONS, ast.Module, ast.With, ast.Try, *LOOPS)
    ):
        raise Refused(f"{source.where(statement)} is not a statement in a function")
    if at.get("below"):  # made in the call of DataParallel
        if any(isinstance(each, LOOPS) for each in source.ancestors(statement)):
            raise Refused(f"{source.where(statement)} is in a loop")
        return source, statement, name, statement
    statement = hoisted(source, statement, name)
    block = block_of(source, statement)
    later = [each for each in block[block.index(statement) :] if rebinds(each, name)]
    if not later and (
        may_be_none(source, statement, name) or not is_bound(source, statement, name)
    ):
        if found := below_only(source, statement, name):
            return found
        raise Refused(f"{name} is not made in each run of {source.shown}")
    return source, statement, name, later[-1] if later else None


def is_bound(source, statement, name):
    """Return whether a name has its value above a statement, whichever branches a run takes.

    It has if a statement outside of branches sets it before, or uses it.
    """
    scope, root = source.scope_of(statement), re.match(r"\w*", name)[0]
    given = ast.walk(scope.args) if isinstance(scope, FUNCTIONS) else ()
    if any(getattr(each, "arg", "") == root for each in given) or not any(
        is_of(each, root, ast.Store) for each in own_nodes(scope)
    ):
        return True  # an argument, or a name from outside
    while statement is not scope:
        block, parent = block_of(source, statement), source.parents[statement]
        if any(is_set(each, root) for each in block[: block.index(statement)]) or any(
            in_each_run(each, lambda node: is_of(node, root, ast.Load)) for each in block
        ):
            return True
        statement = parent
    return False


def may_be_none(source, statement, name):
    """Return whether a name is None above a statement in some runs, as a model that is optional.

    It is not if a statement outside of branches makes it, or takes an attribute of it.
    """
    scope, root = source.scope_of(statement), re.match(r"\w*", name)[0]
    if not any(is_none(each, name) for each in ast.walk(scope)):
        return False
    while statement is not scope:
        block, parent = block_of(source, statement), source.parents[statement]
        if any(in_each_run(each, lambda node: has_attribute(node, name)) for each in block) or any(
            is_set(each, root) and not any(is_none(part, name) for part in ast.walk(each))
            for each in block[: block.index(statement)]
        ):
            return False
        statement = parent
    return True


def is_none(node, name):
    """Return whether a statement sets a name to None."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is None
        and name in map(ast.unparse, node.targets)
    )


def has_attribute(node, name):
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == name


def is_of(node, root, context):
    return isinstance(node, ast.Name) and node.id == root and isinstance(node.ctx, context)


def own_nodes(scope):
    """Yield the nodes of a function or a module, without those in functions and classes of its."""
    for each in ast.iter_child_nodes(scope):
        yield each
        if not isinstance(each, SCOPES):
            yield from own_nodes(each)


def branches_of(node):
    """Return the blocks of a statement of which each run takes one; none if it has no branches."""
    match node:
        case ast.If():
            return [node.body, node.orelse]
        case ast.Match():
            last = node.cases[-1]
            is_all = isinstance(last.pattern, ast.MatchAs) and not last.pattern.pattern
            return [
                *(each.body for each in node.cases),
                *([] if is_all and not last.guard else [[]]),
            ]
        case ast.Try():
            blocks = [[*node.body, *node.orelse], *(each.body for each in node.handlers)]
            return [[*node.finalbody, *block] for block in blocks]
    return []


def is_set(node, root):
    """Return whether a statement sets a name in each of its branches that goes on."""
    if blocks := branches_of(node):
        head = getattr(node, "test", getattr(node, "subject", None))
        return (head is not None and is_set(head, root)) or all(
            any(is_set(each, root) for each in block) or block and ends(block[-1])
            for block in blocks
        )
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return any(root == (each.asname or each.name) for each in node.names)
    if isinstance(node, SCOPES):
        return getattr(node, "name", "") == root
    return is_of(node, root, ast.Store) or any(
        is_set(each, root) for each in ast.iter_child_nodes(node)
    )


def ends(node):
    """Return whether a statement ends its function or the script."""
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and not node.test.value
    called = node.value.func if isinstance(node, ast.Expr) and hasattr(node.value, "func") else None
    return isinstance(node, (ast.Raise, ast.Return, ast.Continue, ast.Break)) or (
        called is not None and re.search(r"(^|\.)(exit|quit|error|abort)$", ast.unparse(called))
    )


def in_each_run(node, is_it):
    """Return whether is_it(a node) holds in a statement, outside of its branches."""
    match node:
        case ast.If(test=first) | ast.IfExp(test=first) | ast.Match(subject=first):
            return in_each_run(first, is_it)
        case ast.BoolOp(values=[first, *_]):
            return in_each_run(first, is_it)
        case ast.ExceptHandler() | ast.Lambda() | ast.ClassDef():
            return False
    return not isinstance(node, FUNCTIONS) and (
        is_it(node) or any(in_each_run(each, is_it) for each in ast.iter_child_nodes(node))
    )


def below_making(model, name, sources):
    """Return the place below the only statement that makes a model which no optimizer has.

    The function that calls the model may get it from another one: that is outside.
    """
    made = (model.get("made") or {}).get("at") or model.get("outside") or model["at"]
    source, line = sources.find(made)
    return below_only(source, source.statement_at(line), name)


def below_only(source, statement, name):
    """Return the place below the only statement of a function that makes a model, or None."""
    nodes = own_nodes(source.scope_of(statement))
    made = [node for node in nodes if rebinds(node, name) and not is_none(node, name)]
    if len(made) != 1 or any(isinstance(each, LOOPS) for each in source.ancestors(made[0])):
        return None
    return source, made[0], name, made[0]


def rebinds(node, name):
    """Return whether a statement makes a name another model, and not by `.to()` or a wrapper."""
    return (
        isinstance(node, ast.Assign)
        and name in map(ast.unparse, node.targets)
        and (not wraps(node, name))
        and not (
            isinstance(node.value, ast.Call)
            and re.fullmatch(
                re.escape(name) + r"\.(to|cuda|cpu|train|eval|requires_grad_|apply)",
                ast.unparse(node.value.func),
            )
        )
    )


def below_too(source, place, lowest, why):
    """Return the statement below which a model is changed that may change only below `lowest`.

    That is None if it is changed below in any case; Refused says `why` where that is not known.
    """
    block, low = block_of(source, place), [lowest, *(source.ancestors(lowest) if lowest else ())]
    at = next((each for each in low if each in block), None)
    if (
        at is None
        or at is place
        and at is not lowest  # a branch with both in it, and perhaps the training
        or any(isinstance(each, (*LOOPS, *FUNCTIONS)) for each in low[: low.index(at) + 1])
    ):
        raise Refused(why)
    return at if block.index(at) >= block.index(place) else None


def change_model(model, facts, sources, lines, *reasons, below=()):
    """Write lines that change a model; `{name}` in them is its name there.

    `below`, of (source, statement, why not elsewhere), are what has to run before.
    """
    source, statement, name, later = place_for(model, facts, sources)
    for its, lowest, why in below:
        at = below_too(source, later or statement, lowest if its is source else None, why)
        if at and (model.get("before") or model.get("is_wrapped")):
            raise Refused(why)
        later = at or later
    lines = [line.replace("{name}", name) for line in lines]
    if "torch." in lines[0]:
        lines = [line.replace("torch.", f"{torch_name(source)}.") for line in lines]
        source, statement, name, later = place_for(model, facts, sources)
    if any(line.strip() == lines[0] for line in source.own_lines()):
        raise Refused("already there")
    if lines[0] in source.written_at(later or statement, is_below=bool(later)):
        return  # one function makes several models
    if later:
        source.put_after(later, lines, *reasons)
    else:
        source.put_before(statement, lines, *reasons)


# ---------------------------------------------------------------------------- calls of a model
def spots_of(model):
    """Return {at, name, images} of each line that calls a model; Refused if a library does."""
    if model.get("library"):
        raise Refused(f"{model['library']} calls the model")
    if model.get("driver") and model["driver"] != "accelerate":
        raise Refused(f"{model['driver']} runs the loop")
    merged = {}
    for spot in model.get("spots") or [dict(at=model["at"], name=model["local"])]:
        if not spot:
            raise Refused(f"a line that calls {model['name']} is not known")
        merge(merged, (spot["at"], spot["name"]), spot)
    return [*merged.values()]


def merge(merged, key, spot):
    """Add what is known of a call to that of others under the same key."""
    one = merged.setdefault(key, spot | dict(images=[]))
    one["images"] += [each for each in spot.get("images", ()) if each not in one["images"]]
    one["floats"] = [each for each in one.get("floats", ()) if each in spot.get("floats", ())]
    if one.get("holds") != spot.get("holds"):  # a dict may have a part only at times
        one["holds"] = "mixed" if {one["holds"], spot["holds"]} == {"dict", "mixed"} else ""


def statements_of(models, sources):
    """Return the spots of models, one for each statement and name: its calls are changed together.

    A statement may have two lines with calls, and a function may call several models by one name.
    """
    merged = {}
    for spot in (spot for model in models for spot in spots_of(model)):
        merge(merged, (statement_calling(sources, spot), spot["name"]), spot)
    return [*merged.values()]


def statement_calling(sources, spot):
    """Return the statement that calls a model at a spot."""
    source, line = sources.find(spot["at"])
    return source.statement_of(source.calls(line, spot["name"])[0])


def models_once(facts):
    """Return the models that train, and those that only take time; Refused if there is none."""
    if why := advice.no_model(facts):
        raise Refused(why)
    return advice.models_of(facts)


def is_in_autocast(source, node):
    """Return whether a node stands in `with autocast(...)`."""
    return any(
        isinstance(each, (ast.With, ast.AsyncWith))
        and any("autocast" in ast.unparse(item.context_expr) for item in each.items)
        for each in source.ancestors(node)
    )
