"""Two small lines for a GPU that are no techniques: copies that do not wait, and sums on it.

They are written only if the proof with them is not slower than without.
"""

import ast

from whatif import advice

from .anchors import spots_of
from .sources import LOOPS, Refused, heads

NAMES = ("non_blocking", "sums")
COPY = "the copy runs while the GPU works, because the loader pins memory"
SUM = "the sum stays on the device: .item() would make each step wait"


def edit(name, facts, extra, sources):
    """Write one of them, wherever it applies; raise Refused if it does nowhere."""
    if name == "non_blocking" and not is_pinned(facts, sources):
        raise Refused("no loader pins memory")
    if name == "non_blocking" and (place := own_to(sources)):
        raise Refused(f"{place} takes no non_blocking")
    todo = {}
    for model in advice.models_of(facts):
        for spot in spots_of(model):
            source, line = sources.find(spot["at"])
            loops = [
                each
                for each in source.ancestors(source.statement_at(line))
                if isinstance(each, (ast.For, ast.AsyncFor))
            ]
            if loops:
                todo[source.path, source.origins[loops[0].lineno - 1]] = source
    done = 0
    for (_, line), source in todo.items():
        if line:
            done += (copies if name == "non_blocking" else sums)(source, line)
    if not done:
        raise Refused("there is none")


def is_pinned(facts, sources):
    """Return whether a loader that trains pins memory, in the script or in a line of ours."""
    return any(each.get("pin") for each in advice.training_loaders(facts)) or any(
        "pin_memory=True" in line for source in sources.changed() for line in source.lines
    )


def own_to(sources):
    """Return where a class of the user's has a to(device) of its own, which a batch may be, or ""."""
    for source in sources.files.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef) and node.name == "to" and not node.args.kwarg:
                names = [each.arg for each in [*node.args.args, *node.args.kwonlyargs]]
                if names[:1] == ["self"] and "non_blocking" not in names:
                    return source.where(node)
    return ""


def copies(source, line):
    """Give non_blocking=True to the copies of a loop's own variables; return how many."""
    loop = source.statement_at(line)
    own = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    lines = []
    for statement in loop.body:
        found = [
            call
            for call in (heads(statement) if isinstance(statement, ast.Assign) else ())
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in ("to", "cuda")
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id in own
            and not {"non_blocking", "memory_format"} & {each.arg for each in call.keywords}
            and (call.args or call.func.attr == "cuda")
            and not (call.args and "dtype" in ast.unparse(call.args[0]))
        ]
        number = source.origins[statement.lineno - 1]
        if found and number and len(found[0].args) < 2:
            lines.append((number, [ast.unparse(each.func) for each in found]))
        elif not found:  # what is computed from a batch is not pinned
            own -= {
                each.id
                for each in ast.walk(statement)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    for number, names in lines:
        calls = {id(each): each for name in names for each in source.calls(number, name)}
        if len(calls) > 1:  # a break within each of them is hard to read
            source.apply([not_waiting(source, call) for call in calls.values()])
        else:
            source.apply(
                [
                    edit
                    for call in calls.values()
                    for edit in source.give(call, {"non_blocking": "True"})
                ]
            )
        source.mark(source.statement_at(number), COPY)
    return len(lines)


def not_waiting(source, call):
    """Return the edit that gives a copy non_blocking=True on its own line."""
    place, is_first, has_comma, _ = source.tail(call)
    comma = "" if is_first else " " if has_comma else ", "
    return (place, place), f"{comma}non_blocking{source.sign(call)}True"


def sums(source, line):
    """Keep sums such as `total += loss.item()` on the device; return how many."""
    loop, done = source.statement_at(line), 0
    found = [source.origins[each.lineno - 1] for each in loop.body if item_of(each)]
    for number in filter(None, found):
        loop = source.statement_at(line)
        statement = source.statement_at(number)
        target, item = statement.target.id, item_of(statement)
        if not is_summed_only(source, loop, statement, target):
            continue
        source.apply([(item, f"{source.text(item.func.value)}.detach().double()")])
        source.mark(source.statement_at(number), SUM)
        source.put_after(
            source.statement_at(line),
            [f"{target} = float({target})"],
            "one copy to the host for all steps",
        )
        done += 1
    return done


def item_of(statement):
    """Return the call `loss.item()` of `total += loss.item()`, perhaps times something, or None."""
    match statement:
        case ast.AugAssign(ast.Name(), ast.Add(), value):
            calls = [
                each
                for each in ast.walk(value)
                if isinstance(each, ast.Call)
                and isinstance(each.func, ast.Attribute)
                and each.func.attr == "item"
                and not each.args
                and isinstance(each.func.value, ast.Name)
            ]
            is_plain = (
                value in calls
                or isinstance(value, ast.BinOp)
                and calls
                and (calls[0] in (value.left, value.right))
                and isinstance(value.op, (ast.Mult, ast.Div))
            )
            return calls[0] if len(calls) == 1 and is_plain else None
    return None


def is_summed_only(source, loop, statement, target):
    """Return whether a loop uses a sum only to add to it; it begins as 0 outside."""
    scope = source.scope_of(loop)
    uses = [each for each in ast.walk(scope) if isinstance(each, ast.Name) and each.id == target]
    inside = {id(each) for each in ast.walk(loop)}
    if [id(each) for each in uses if id(each) in inside] != [id(statement.target)]:
        return False
    if any(isinstance(each, (ast.Return, ast.Yield)) for each in ast.walk(loop)) or any(
        isinstance(each, (ast.Global, ast.Nonlocal)) and target in each.names
        for each in ast.walk(scope)
    ):
        return False
    begins = [
        each
        for each in ast.walk(scope)
        if isinstance(each, ast.Assign)
        and any(isinstance(one, ast.Name) and one.id == target for one in each.targets)
        and isinstance(each.value, ast.Constant)
        and each.value.value == 0
    ]
    around = {id(each) for each in source.ancestors(loop) if isinstance(each, LOOPS)}
    return any(
        each.lineno < loop.lineno
        and {id(one) for one in source.ancestors(each) if isinstance(one, LOOPS)} == around
        for each in begins
    )
