"""Write mixed precision: autocast around each call of a model, and a GradScaler for float16."""

import ast
import re

from . import anchors, checkpoints
from .sources import FUNCTIONS, LOOPS, Refused, heads

PRODUCTS = "convolutions and matrix products run in half precision"
FLOAT32 = f"{PRODUCTS}; the output is float32 again"
SHAPES = {"squeeze", "unsqueeze", "view", "reshape", "flatten", "permute", "transpose"}
NOT_ALWAYS = (
    ast.Lambda,
    ast.IfExp,
    ast.BoolOp,
    ast.comprehension,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)  # what is in them may be computed never, or often
CLIPS = "clip_grad_norm_", "clip_grad_value_"
SCALED = "small gradients would become zero in float16, so the loss is scaled"


def write(name, facts, sources):
    """Write a technique of mixed precision."""
    half = name.split()[-1]
    models = anchors.models_once(facts)
    device = facts["device"]
    done = 0
    for spot in anchors.statements_of(models, sources):
        done += around_calls(spot, device, half, sources)
    if not done:
        text = "".join(line for source in sources.files.values() for line in source.lines)
        raise Refused(
            "already there"
            if re.search(rf'autocast\("{device}", \w+\.{half}\)', text)
            else "an autocast of the script's own stands around the call"
        )
    if half == "float16":
        scale(facts, sources)


def around_calls(spot, device, half, sources):
    """Write autocast around the calls of a model in one statement; return whether it was needed."""
    source, line = sources.find(spot["at"])

    def nodes():
        calls = [
            each
            for each in source.calls(line, spot["name"])
            if not anchors.is_in_autocast(source, each)
        ]
        parts = [part_of(source, each, spot) for each in calls]
        return calls if {*parts} & {*calls} else parts

    if not nodes():
        return False
    torch = anchors.torch_name(source)
    context, found = f'{torch}.autocast("{device}", {torch}.{half})', nodes()
    is_part = not any(isinstance(each, ast.Call) for each in found)
    cast = Cast(source, spot | dict(holds="tensor") if is_part else spot, f"{torch}.{half}")
    statement = source.statement_of(found[0])
    target = target_of(source, statement, found)
    if target is not None and source.is_alone(statement):
        after = cast.of_target(target, statement)
        source.wrap(statement, f"with {context}:", after, FLOAT32 if after else PRODUCTS)
    elif can_come_before(source, statement, found):
        extract(source, line, found, context, cast)
    else:
        if not cast.is_tensor:
            raise cast.refused("is no tensor")
        edits = []
        for node in found:
            call = node if isinstance(node, ast.Call) else node.value
            edits.append((call.func, f"{context}({source.text(call.func)})"))
            edits.append(((source.stop(node), source.stop(node)), ".float()"))
        source.apply(edits)
        source.mark(source.statement_at(line), FLOAT32)
    return True


def part_of(source, call, spot):
    """Return a tensor that a statement takes of a call, as model(x)["out"]; else the call."""
    match part := source.parents[call]:
        case ast.Attribute(value, key) | ast.Subscript(value, ast.Constant(key)) if (
            value is call and key in spot.get("floats", ())
        ):
            return part
    return call


def target_of(source, statement, calls):
    """Return the target of a statement `target = model(...)`, or None.

    The output may get another shape in it.
    """
    match statement:
        case ast.Assign([ast.Name() | ast.Attribute() | ast.Tuple() as target], value):
            while (
                isinstance(value, ast.Call)
                and isinstance(value.func, ast.Attribute)
                and (value.func.attr in SHAPES and value not in calls)
            ):
                value = value.func.value
            return target if [value] == calls else None
    return None


def free_names(source, first, second):
    """Return an iterator of names that a file does not use."""
    used = {each.id for each in ast.walk(source.tree) if isinstance(each, ast.Name)}
    return (
        name
        for name in (first, second, *(f"{first}_{n}" for n in range(2, 99)))
        if name not in used
    )


def can_come_before(source, statement, calls):
    """Return whether calls can be made in a statement above, in the same order of all calls."""
    if not source.is_alone(statement) or not isinstance(
        statement, (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)
    ):
        return False
    free = {each for call in calls for each in ast.walk(call)}
    for call in calls:
        around = source.ancestors(call)
        around = around[: around.index(statement)]
        if any(isinstance(each, NOT_ALWAYS) for each in around):
            return False
        for other in heads(statement):
            is_earlier = isinstance(other, (ast.Call, ast.NamedExpr, ast.Await, ast.Yield)) and (
                source.start(other) < source.start(call)
            )
            if is_earlier and other not in around and other not in free:
                return False
    return not any(
        inner in calls for call in calls for inner in ast.walk(call) if inner is not call
    )


def extract(source, line, calls, context, cast):
    """Make calls in statements of their own, under autocast, above the one that uses them."""
    names = free_names(source, "output", "outputs")
    edits, texts, casts = [], [], []
    for call in sorted(calls, key=source.start):
        name = next(names)
        texts.append(f"    {name} = {source.text(call)}")
        casts += [] if cast.is_tensor else cast.lines(name)
        edits.append((call, f"{name}.float()" if cast.is_tensor else name))
    source.apply(edits)
    statement = source.statement_at(line)
    index = statement.lineno - 1
    indent = source.lines[index][: source.start(statement)[1]]
    lines = [
        indent + source.unit_for(each, indent) for each in (f"with {context}:", *texts, *casts)
    ]
    lines = source.end.join(lines).split(source.end)
    source.insert(index, *lines)
    source.block(index, statement.end_lineno + len(lines), FLOAT32)


def casts_of(holds, names):
    """Return the texts that make the parts of a tuple float32 again; `holds` has their forms."""
    casts = dict(
        tensor="{0}.float()",
        tuple="tuple(each.float() for each in {0})",
        list="[each.float() for each in {0}]",
        rest="{0}",
    )
    return [casts[form].format(name) for form, name in zip(holds.split(), names)]


class Cast:
    """The lines that make the output of a model float32 again, by how it holds its tensors."""

    def __init__(self, source, spot, half):
        self.source, self.spot, self.half = source, spot, half
        self.holds = spot.get("holds", "")
        self.is_tensor = self.holds == "tensor"

    def refused(self, why):
        return Refused(f"{self.spot['at']}: the output of {self.spot['name']} {why}")

    def of_target(self, target, statement):
        """Return the lines for what a statement assigns to."""
        text = self.source.text(target)
        if isinstance(target, ast.Tuple):
            names = [*map(self.source.text, target.elts)]
            forms = self.holds.split()
            if len(forms) == len(names) > 1 and not any(
                name[0] == "*" and form != "rest" for name, form in zip(names, forms)
            ):
                casts = zip(names, casts_of(self.holds, names))
                return [f"{name} = {cast}" for name, cast in casts if name not in (cast, "_")]
            if self.holds not in ("tuple", "list", "namedtuple"):
                raise self.refused("holds more than tensors and tuples of tensors")
            if "_" in names:
                return [f"{name} = {name}.float()" for name in names if name != "_"]
            text = ", ".join(names)
            return [f"{text} = (each.float() for each in ({text}))"]
        if self.spot.get("has_loss") and (
            not self.holds or self.gives_loss(text, self.source.scope_of(statement))
        ):
            return []  # the model computes its loss, in float32
        return self.lines(text)

    def gives_loss(self, text, scope):
        """Return whether a function uses only the loss of an output."""
        uses = [
            self.source.parents[each]
            for each in ast.walk(scope)
            if isinstance(each, (ast.Name, ast.Attribute))
            and isinstance(each.ctx, ast.Load)
            and ast.unparse(each) == text
        ]
        return {ast.unparse(each).removeprefix(text) for each in uses} <= {".loss", "['loss']"}

    def lines(self, text):
        """Return the lines for one variable."""
        quote, known = (
            self.source.quote(),
            {
                "tensor": f"{text} = {text}.float()",
                "tuple": f"{text} = tuple(each.float() for each in {text})",
                "list": f"{text} = [each.float() for each in {text}]",
                "namedtuple": f"{text} = {text}._make(each.float() for each in {text})",
                "dict": f"{text} = {{key: each.float() for key, each in {text}.items()}}",
            },
        )
        if self.holds in known:
            return [known[self.holds]]
        if " " in self.holds:
            parts = [f"{text}[{number}]" for number, _ in enumerate(self.holds.split())]
            return [f"{text} = {', '.join(casts_of(self.holds, parts))}"]
        if self.holds != "mixed":
            raise self.refused("is no tensor, and no tuple or dict of tensors")
        key, each = (next(free_names(self.source, name, f"{name}s")) for name in ("key", "value"))
        return [
            f"for {key}, {each} in [*{text}.items()]:",
            f"    if getattr({each}, {quote}dtype{quote}, None) == {self.half}:",
            f"        {text}[{key}] = {each}.float()",
        ]


# --------------------------------------------------------------------------------- the scaler
def is_called(source, node):
    """Return whether a node is what a call calls."""
    parent = source.parents[node]
    return isinstance(parent, ast.Call) and parent.func is node


class Sites:
    """The user's lines of backward(), step() and clipping, all in one function."""

    def __init__(self, facts, sources):
        sites = facts.get("sites") or {}
        self.found, self.sources = {}, sources
        for what in "backwards", "steps", "clips":
            self.found[what] = [self.look(each) for each in sites.get(what, ())]
        if not self.found["backwards"] or not self.found["steps"]:
            raise Refused("the lines of backward() and step() are not known")
        self.source = self.found["steps"][0][0]
        if any(each[0] is not self.source for sites in self.found.values() for each in sites):
            raise Refused("backward() and step() are in several files")
        scopes = {
            self.source.scope_of(self.statement(line))
            for sites in self.found.values()
            for _, line, _, _ in sites
        }
        if len(scopes) > 1:
            raise Refused("backward() and step() are in several functions")
        self.scope = scopes.pop()
        self.add_unseen(facts)
        self.refuse_readers()

    def add_unseen(self, facts):
        """Add those calls of the function that did not run yet: at an epoch's end, say."""
        known = {what: {each[2]: each[3] for each in found} for what, found in self.found.items()}
        number = {*known["steps"].values()}
        number = number.pop() if len(number) == 1 else None
        seen = {self.statement(each[1]) for found in self.found.values() for each in found}
        named = {each[1:3] for found in self.found.values() for each in found}  # may share a line
        for call in self.calls():
            statement, name = self.source.statement_of(call), ast.unparse(call.func)
            line = self.source.origins[call.lineno - 1]
            if line is None or statement in seen or (line, name) in named:
                continue
            if name in known["steps"]:
                self.found["steps"].append((self.source, line, name, known["steps"][name]))
            elif name.endswith(".backward"):
                if len(known["steps"]) < len(facts["optimizers"]):
                    raise Refused(f"{self.source.where(call)}: not known which optimizer it is for")
                self.found["backwards"].append((self.source, line, name, None))
            elif name.rpartition(".")[2] in CLIPS:
                self.found["clips"].append((self.source, line, name, number))

    def calls(self):
        """Return the calls of the function, without those of functions in it."""
        return [
            node
            for node in ast.walk(self.scope)
            if isinstance(node, ast.Call) and self.source.scope_of(node) is self.scope
        ]

    def refuse_readers(self):
        """Refuse what reads gradients, and what is theirs in functions of the user's that are called."""
        called = {ast.unparse(each.func).rpartition(".")[2] for each in self.calls()}
        called -= {"step", "zero_grad"}  # an optimizer's own
        for source in self.sources.files.values():
            for scope in ast.walk(source.tree):
                if scope is not self.scope and not (
                    isinstance(scope, FUNCTIONS) and scope.name in called
                ):
                    continue
                for node in ast.walk(scope):
                    match node:
                        case ast.Attribute(attr="grad", ctx=ast.Load()) if not is_called(
                            source, node
                        ):
                            why = "reads gradients, which are scaled there"
                        case ast.Call(func) if re.search(r"(^|\.)grad$", ast.unparse(func)):
                            why = "calls autograd.grad"
                        case ast.Call(func) if scope is not self.scope and ast.unparse(
                            func
                        ).rpartition(".")[2] in ("backward", *CLIPS):
                            why = "did not run yet, in another function than step()"
                        case _:
                            continue
                    raise Refused(f"{source.where(node)} {why}")

    def look(self, site):
        if not site.get("at"):
            raise Refused("a line of backward(), step() or clipping is not known")
        source, line = self.sources.find(site["at"])
        return source, line, site["name"], site.get("optimizer")

    def statement(self, line):
        return self.source.statement_at(line)

    def call(self, line, name):
        """Return the only call of a name at a line, which is a statement by itself."""
        call = self.source.calls(line, name)[0]
        statement = self.source.parents[call]
        if not isinstance(statement, ast.Expr):
            raise Refused(f"{self.source.shown}:{line}: {name}() is part of another statement")
        self.source.need_alone(statement)
        return call


def scale(facts, sources):
    """Write a GradScaler: where it is made, around backward and step, before clipping, saved."""
    sites = Sites(facts, sources)
    source = sites.source
    if any(isinstance(node, ast.Name) and node.id == "scaler" for node in ast.walk(source.tree)):
        raise Refused("the script has a variable called scaler")
    steps = sorted(sites.found["steps"], key=lambda each: each[1])
    ends = updates(sites, steps)
    for _, line, name, _ in sites.found["backwards"]:
        call = sites.call(line, name)
        if not isinstance(call.func, ast.Attribute) or name.endswith("autograd.backward"):
            raise Refused(f"{source.shown}:{line} calls torch.autograd.backward")
        if call.args:  # accelerator.backward(loss) is no loss's
            raise Refused(f"{source.shown}:{line} gives backward() an argument")
        loss, dot = call.func.value, f".{call.func.attr}"
        whole = loss
        if source.start(call) != source.start(loss) and source.text(call.func).endswith(f"){dot}"):
            last, end = source.stop(call.func)  # the call's parentheses take the place of its own
            whole = source.start(call), (last, end - len(dot))
        source.apply([(whole, f"scaler.scale({source.text(loss)})")])
        source.mark(sites.statement(line), SCALED)
    for _, line, name, number in sites.found["clips"]:
        mine = [each for each in steps if each[3] == number]
        if len(mine) != 1 or number is None or len(sites.found["clips"]) > len(steps):
            raise Refused(
                f"{source.shown}:{line} clips gradients of several optimizers, or clips again"
            )
        optimizer = mine[0][2].rpartition(".")[0]
        source.put_before(
            sites.statement(line),
            [f"scaler.unscale_({optimizer})"],
            "gradients are clipped at their own size",
        )
    for _, line, name, _ in steps:
        call = sites.call(line, name)
        if call.args or call.keywords or not name.endswith(".step"):
            raise Refused(f"{source.shown}:{line} gives step() an argument")
        source.apply([(call, f"scaler.step({name.removesuffix('.step')})")])
        statement = sites.statement(line)
        if line in ends:
            index = statement.end_lineno
            indent = source.lines[statement.lineno - 1]
            source.insert(index, indent[: len(indent) - len(indent.lstrip())] + "scaler.update()")
            source.block(
                statement.lineno - 1,
                index + 1,
                "the scaler divides gradients again, and skips a step that overflowed",
            )
        else:
            source.mark(
                statement, "the scaler divides gradients again, and skips a step that overflowed"
            )
    make(facts, sites, sources)


def updates(sites, steps):
    """Return the lines of those steps below which the scaler is updated."""
    lines = sorted(line for _, line, _, _ in sites.found["backwards"])
    last = steps[-1][1]
    if len(steps) == 1:
        return {last}
    previous, alternating = 0, True
    for _, line, _, _ in steps:
        alternating &= any(previous < each < line for each in lines)
        previous = line
    if alternating and lines[-1] < last:
        return {line for _, line, _, _ in steps}
    parents = {sites.source.parents[sites.statement(line)] for _, line, _, _ in steps}
    if len(parents) == 1 and lines[-1] < steps[0][1]:
        return {last}
    if len({name for _, _, name, _ in steps}) == 1:
        raise Refused(f"{sites.source.shown}:{last} steps again, without a backward() before it")
    raise Refused("its optimizers step in an order in which one scale is not enough")


def make(facts, sites, sources):
    """Write the line that makes the scaler, and its state in the script's checkpoint."""
    source, torch = sites.source, anchors.torch_name(sites.source)
    line = f'scaler = {torch}.amp.GradScaler("{facts["device"]}")'
    at = [each["at"] for each in facts["optimizers"]]
    made, number = sources.find(at[-1])
    statement = made.statement_at(number)
    is_here = (
        made is source
        and made.scope_of(statement) is sites_scope(sites)
        and not any(isinstance(each, LOOPS) for each in made.ancestors(statement))
        and isinstance(made.parents[statement], (*FUNCTIONS, ast.Module))
    )
    is_here = is_here and checkpoints.is_kept_in(facts, source, sites_scope(sites))
    checkpoints.keep_scaler(facts, source, sources)
    if is_here:
        statement = made.statement_at(number)
        made.put_after(statement, [line], SCALED)
    else:
        anchors.put_at_top(source, line, SCALED)


def sites_scope(sites):
    """Return the function of the sites in the tree as it is now."""
    return sites.source.scope_of(sites.statement(sites.found["steps"][0][1]))
