"""torch.compile, with the default mode or with CUDA graphs (reduce-overhead)."""

import ast
import functools
import inspect
import re
import types

from .. import advice
from ..write import anchors
from ..write.sources import Refused

NAMES = "compile", "compile reduce-overhead"
# torch.jit.trace also makes TensorBoard's graph, older ONNX files and what fvcore counts
TRACES = re.compile(
    r"(.*\.)?(add_graph|(Flop|Activation)CountAnalysis|fvcore\..*(flop|activation)_count"
    r"|jit\.(trace(_module)?|_get_trace_graph)|onnx\.export)"
)
EXPORT_WITHOUT_TRACE = 2, 9  # torch from which that is onnx.export's default


def why_not(name, facts):
    if why := advice.no_model(facts) or advice.is_seen(name, facts):
        return why
    if "DataParallel" in facts["seen"]:
        return "DataParallel on several GPUs cannot be compiled"
    return advice.needs_gpu(facts) if name != "compile" else ""


def write(name, facts, extra):
    """Return what to write: an option, or the line that compiles the model."""
    note = (
        "watch: it compiles in the first step, and again for a new shape"
        if name == "compile"
        else "watch: shapes must not change; it takes memory"
    )
    mode = f'mode="{name.split()[1]}"' if name != "compile" else ""
    late = traced_late(facts)
    if late:
        note += f"; torch.jit cannot trace a compiled model ({', '.join(late)})"
    if option := advice.built_in(name, facts, extra):
        return advice.paragraphs(option, note)
    _, entry = advice.driven(facts)
    models = advice.models_of(facts)
    model = models[0]
    if entry:
        place, own, is_fitted = advice.in_driver(model, facts)
        words = ", ".join(filter(None, [own, mode]))
        new = f"{own} = torch.compile({words})" if is_fitted else f"{own}.compile({mode})"
        return advice.paragraphs(f"{place}{advice.INDENT}{new}", note)
    place, called = advice.before_use(model, facts)
    below = [(each.get("traced") or {}).get("below") or {} for each in models]
    if below[0] and facts["optimizers"]:
        place = f"below {advice.line(below[0])}, which cannot trace a compiled model"
    others = [
        (other, line.get("at", at))
        for (other, at), line in zip(advice.other_models(models), below[1:])
    ]
    text = advice.paragraphs(
        f"{place}{advice.INDENT}{called}.compile({mode})",
        advice.likewise(others),
        note,
        advice.example(name),
    )
    return advice.inside(model["library"], text) if model.get("library") else text


def traced_late(facts):
    """Return the places that trace a model, or may, where it has to be compiled before."""
    traced = [each.get("traced") or {} for each in advice.models_of(facts)]
    return [*dict.fromkeys(at for each in traced for at in each.get("late", ()))]


def edit(name, facts, extra, sources):
    """Write compile() for each model; the names in its state_dict stay."""
    mode = f'mode="{name.split()[1]}"' if name != "compile" else ""
    models = anchors.models_once(facts)
    below = traces(facts, sources)
    if below and len(models) > 1:
        raise Refused(below[-1][2])
    for model in models:
        anchors.spots_of(model)
        anchors.change_model(
            model,
            facts,
            sources,
            [f"{{name}}.compile({mode})"],
            "layers are fused into fewer kernels; the first step compiles",
            below=below,
        )


def traces(facts, sources):
    """Return (source, statement, why not above it) of each line that traces a model with torch.jit.

    Refused if it is not known that all of them are run before the training.
    """
    words = "traces a model, which fails for one that is compiled"
    found, sites = [], (facts.get("sites") or {}).get("traces", ())
    late = [each["at"] for each in sites if not each["is_early"]] or traced_late(facts)
    if late:
        raise Refused(f"{late[0]} {words}")
    for each in sites:
        source, line = sources.find(each["at"])
        found.append((source, source.statement_at(line), f"{each['at']} {words}"))
    early = [statement for _, statement, _ in found]
    for file in facts.get("files", ()):
        try:
            source, _ = sources.find(f"{file}:1")
        except Refused:
            continue  # what cannot be read is not changed
        imported = imports_of(source.tree)
        for call in ast.walk(source.tree):
            if isinstance(call, ast.Call) and is_traced(call, facts.get("torch", "2.3"), imported):
                statement = source.statement_of(call)
                if statement not in early and not is_asked_in(early, statement, source):
                    raise Refused(f"{source.where(call)} {words}")
    return found


def is_asked_in(early, statement, source):
    """Return whether a statement makes fvcore's object, which a line of its function then asks.

    It traces a model when it is asked first, and keeps what it has found.
    """
    match statement:
        case ast.Assign([ast.Name(name)], ast.Call(function)):
            return ast.unparse(function).endswith("CountAnalysis") and any(
                each in anchors.block_of(source, statement)
                and any(anchors.is_of(node, name, ast.Load) for node in ast.walk(each))
                for each in early
            )
    return False


def imports_of(tree):
    """Return {name: what it is from outside} of the imports in a file: {trace: torch.jit.trace}."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def is_traced(call, torch, imported):
    """Return whether a call traces a model; from torch 2.9 on, ONNX is exported without that."""
    root, dot, rest = ast.unparse(call.func).partition(".")
    name = imported.get(root, root) + dot + rest
    is_new = name.endswith("onnx.export") and (
        tuple(map(int, torch.split(".")[:2])) >= EXPORT_WITHOUT_TRACE
    )
    given = [ast.unparse(each.value) for each in call.keywords if each.arg in ("dynamo", None)]
    is_old = given not in (["True"], []) if is_new else given != ["True"]
    return bool(TRACES.fullmatch(name)) and is_old


def forward(plain, name, run):
    """Return `plain`, compiled; each call makes a function that shares nothing with another."""
    import torch

    config = torch._dynamo.config
    for limit in (
        "recompile_limit",
        "cache_size_limit",
        "accumulated_recompile_limit",
        "accumulated_cache_size_limit",
    ):  # functions below `plain` belong to all sets
        if hasattr(config, limit):
            setattr(config, limit, max(getattr(config, limit), 1024))
    keep_apart()
    mode = name.removeprefix("compile").strip() or None
    compiled = torch.compile(copied(plain), mode=mode)

    def call(*args, **kwargs):
        return compiled(*args, **kwargs)

    return call


def keep_apart():
    """Leave a cache on the disk alone in which bfloat16 and float16 of autocast are the same.

    In torch 2.11 its key only tells whether there is an autocast
    (findings/torch_autocast_cache.sh).
    """
    from torch._functorch import config
    from torch._functorch._aot_autograd import autograd_cache

    if "autocast_state" not in inspect.getsource(autograd_cache):
        config.enable_autograd_cache = False


def copied(plain):
    """Return the same function with a code object of its own.

    What torch.compile makes is kept by code object, so a function that was compiled under another
    autocast or layout cannot be taken for this one.
    """
    function = getattr(plain, "__func__", plain)
    if not isinstance(function, types.FunctionType):

        def function(*args, **kwargs):
            return plain(*args, **kwargs)

        plain = function
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(own, function)
    return types.MethodType(own, plain.__self__) if hasattr(plain, "__self__") else own
