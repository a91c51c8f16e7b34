"""The user's own lines: where something is called or made, and what a line calls it.

A file is the user's unless it belongs to site-packages, the standard library, an environment's
scripts, or whatif. So a package in another folder (`pip install -e`, PYTHONPATH) is the user's.
"""

import ast
import collections
import contextlib
import functools
import inspect
import linecache
import os
import re
import sys
import sysconfig
import traceback
import types

import torch

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # whatif, a folder or archive
PACKAGES = ("site-packages", "dist-packages")
FRAMEWORKS = frozenset(  # libraries, even if they are installed from a clone of their repository
    "torch torchvision torchaudio torchtext numpy accelerate transformers trl peft lightning "
    "pytorch_lightning lightning_fabric lightning_utilities ultralytics timm fastai ignite "
    "deepspeed hydra datasets mmengine skorch composer catalyst".split()
)
CONTAINERS = (
    dict,
    list,
    tuple,
    collections.OrderedDict,
    torch.nn.Sequential,
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
)
UNKNOWN = object()  # an expression that cannot be evaluated without a call


@functools.lru_cache
def system_folders():
    """Return the folders of the standard library and of an environment's scripts."""
    paths = sysconfig.get_paths()
    found = {os.path.dirname(os.__file__), paths["stdlib"], paths["platstdlib"], paths["scripts"]}
    return tuple(folder + os.sep for folder in found | set(map(os.path.realpath, found)))


@functools.lru_cache
def statements(file):
    """Return the statements of a file, as nodes of ast; the inner ones come later."""
    with contextlib.suppress(SyntaxError, ValueError):
        tree = ast.parse("".join(linecache.getlines(file)))
        return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return []


def setters(file, name):
    """Return the assignments in a file that set a name."""
    return [
        node
        for node in statements(file)
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets)
    ]


def has_name(frame, line, name, is_here=False):
    """Return whether a user's line has an attribute of self, or else its file sets it.

    Other names a line has in any case. `is_here` is to have it in the line.
    """
    statement = statement_of(frame, line)
    if statement and name in ast.unparse(statement):
        return True
    is_own = not name.startswith("self.") or setters(frame.f_code.co_filename, name)
    return not is_here and bool(is_own)


def span_of(frame):
    """Return (first line, last line, first column, last column) of what a frame does, or None.

    Python from 3.11 on knows that.
    """
    spans = list(getattr(frame.f_code, "co_positions", tuple)())
    at = frame.f_lasti // 2
    return spans[at] if 0 <= at < len(spans) and None not in spans[at] else None


def is_within(span, node):
    """Return whether a span lies in a node."""
    first, last, start, stop = span
    return (node.lineno, node.col_offset) <= (first, start) and (last, stop) <= (
        node.end_lineno,
        node.end_col_offset,
    )


def statements_at(file, line):
    """Return the innermost statements at a line; several may share it."""
    found = [node for node in statements(file) if node.lineno <= line <= node.end_lineno]
    spans = [(each.lineno, each.end_lineno, each.col_offset, each.end_col_offset) for each in found]
    return [
        node
        for node, own in zip(found, spans)
        if not any(span != own and is_within(span, node) for span in spans)
    ]


def statement_of(frame, line):
    """Return the innermost statement that a frame is in, or None."""
    found, span = statements_at(frame.f_code.co_filename, line), span_of(frame)
    if len(found) > 1:
        found = [node for node in found if span and is_within(span, node)]
    return found[-1] if len(found) == 1 else None


def expressions_at(file, line):
    """Return the expressions of the statements at a line; first those that cover the line."""
    return sorted(
        (
            node
            for statement in statements_at(file, line)
            for node in ast.walk(statement)
            if isinstance(node, ast.expr)
        ),
        key=lambda node: not node.lineno <= line <= node.end_lineno,
    )


def modules_of(values):
    """Return those of {name: value} that are modules."""
    return {name: value for name, value in values.items() if isinstance(value, torch.nn.Module)}


def parts_of(name, value):
    """Return {name.attribute or name[key]: its value}, of objects that are not large."""
    parts = {}
    with contextlib.suppress(Exception):  # a proxy may fail
        if isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            parts = {f"{name}[{key!r}]": part for key, part in items} if len(value) < 100 else {}
        elif name == "self" or not isinstance(value, (type, types.ModuleType, torch.nn.Module)):
            stored = vars(value)
            parts = {
                f"{name}.{key}": part
                for key, part in {**stored, **stored.get("_modules", {})}.items()
            }
    return parts


def attribute_of(value, name):
    """Return an attribute that is stored, so that no property of the user's runs, or UNKNOWN."""
    with contextlib.suppress(Exception):
        stored = (
            vars(value) if hasattr(type(value), "__dict__") and hasattr(value, "__dict__") else {}
        )
        for values in stored, stored.get("_modules", {}), stored.get("_parameters", {}):
            if name in values:
                return values[name]
        found = inspect.getattr_static(value, name)
        if isinstance(found, types.MemberDescriptorType):  # one of __slots__
            return getattr(value, name)
        if not hasattr(type(found), "__get__"):
            return found
    return UNKNOWN


def evaluate(node, values):
    """Return the value of names, attributes and subscripts, without a call, or UNKNOWN."""
    match node:
        case ast.Constant(value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int(value))):
            return -value
        case ast.Name(name):
            return values.get(name, UNKNOWN)
        case ast.Attribute(owner, name):
            owner = evaluate(owner, values)
            return UNKNOWN if owner is UNKNOWN else attribute_of(owner, name)
        case ast.Subscript(owner, key):
            owner, key = evaluate(owner, values), evaluate(key, values)
            if type(owner) in CONTAINERS and type(key) in (int, str):
                with contextlib.suppress(Exception):
                    return owner[key]
    return UNKNOWN


def comprehended(statement):
    """Return the variables that are there only within a statement: those of comprehensions."""
    return {
        one.id
        for node in (ast.walk(statement) if statement else ())
        if isinstance(node, ast.comprehension)
        for one in ast.walk(node.target)
        if isinstance(one, ast.Name)
    }


def path_to(module, name, model):
    """Return how `name`, a model, names `module`, a part of it (net.head, net[0]), or ""."""
    path = next((path for path, part in model.named_modules() if part is module), None)
    return "" if path is None else re.sub(r"\.(\d+)", r"[\1]", f"{name}.{path}".rstrip("."))


def outermost(models):
    """Return those of {module: steps in which it was the outermost one called} that are models.

    Left out is a part of another one that was called before the first step only: a script does
    that to find a size. Steps are counted from 0; the calls before the first step are in step 0.
    """

    def is_part(module):
        return any(
            module is not other and any(module is part for part in other.modules())
            for other in models
        )

    return [
        module for module, steps in models.items() if not (set(steps) <= {0} and is_part(module))
    ]


def names_in(node):
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def has_remainder(node):
    return any(isinstance(each, ast.Mod) for each in ast.walk(node))


def counts_batches(frame, line):
    """Return whether a loop around a line compares the number of a batch with something not fixed.

    Such a loop (`if number == len(loader) - 1`) may rely on the length of an epoch, also where it
    computes another number first (`step = number // 2`). A remainder (`number % 100 == 0`) does
    not count.
    """
    for node in statements(frame.f_code.co_filename):
        if (
            not isinstance(node, ast.For)
            or not node.lineno <= line <= node.end_lineno
            or not (
                isinstance(node.target, ast.Tuple)
                and node.target.elts
                and isinstance(node.target.elts[0], ast.Name)
            )
        ):
            continue
        numbers = {node.target.elts[0].id}
        for each in ast.walk(node):
            match each:
                case ast.Assign([ast.Name(name)], value) if numbers & names_in(value):
                    numbers |= {name} if not has_remainder(value) else set()
        for test in (each for each in ast.walk(node) if isinstance(each, ast.Compare)):
            sides = [test.left, *test.comparators]
            counted = [side for side in sides if numbers & names_in(side)]
            if (
                counted
                and not any(map(has_remainder, counted))
                and any(
                    isinstance(each, (ast.Name, ast.Attribute, ast.Call))
                    for side in sides
                    if side not in counted
                    for each in ast.walk(side)
                )
            ):
                return True
    return False


def package_of(frame):
    """Return the name of the installed package that a frame's code is in, or ""."""
    path = frame.f_code.co_filename
    if path.startswith(OURS + os.sep):  # whatif itself may be installed
        return ""
    for name in PACKAGES:
        _, is_there, inner = path.rpartition(os.sep + name + os.sep)
        if is_there:
            return inner.split(os.sep)[0].removesuffix(".py")
    top = (frame.f_globals.get("__name__") or "").split(".")[0]
    return top if top in FRAMEWORKS else ""


def passes_on(frame, line):
    """Return whether a line gives all arguments of its function to another: f(*args, **kwargs)."""
    code = frame.f_code
    if not code.co_flags & inspect.CO_VARARGS or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    count = code.co_argcount + code.co_kwonlyargcount
    wanted = {f"*{code.co_varnames[count]}", f"**{code.co_varnames[count + 1]}"}
    return any(
        wanted
        <= {
            *map(ast.unparse, node.args),
            *(f"**{ast.unparse(each.value)}" for each in node.keywords if each.arg is None),
        }
        for node in expressions_at(code.co_filename, line)
        if isinstance(node, ast.Call)
    )


class Places:
    """The user's lines, as they are shown from `cwd`; files below `roots` are the user's."""

    def __init__(self, cwd, roots=()):
        self.cwd, self.known = os.path.abspath(cwd), {}
        self.roots = tuple(os.path.join(os.path.abspath(root), "") for root in roots)

    def is_users_file(self, file, module=""):
        """Return whether a file, of a module of that name, is the user's."""
        if file not in self.known:
            self.known[file] = self.find_out(file, module)
        return self.known[file]

    def find_out(self, file, module):
        file = self.whole(file)
        if file.startswith(OURS + os.sep) or not os.path.exists(file) and "<" in file:
            return False
        inside = [root for root in self.roots if file.startswith(root)]
        rest = file.removeprefix(max(inside, key=len, default=""))
        if any(f"{os.sep}{name}{os.sep}" in os.sep + rest for name in PACKAGES):
            return False
        system = [folder for folder in system_folders() if file.startswith(folder)]
        if inside:  # an environment may lie in the user's folder, and a root in site-packages
            return not system or len(max(inside, key=len)) > len(max(system, key=len))
        return not system and module.split(".")[0] not in FRAMEWORKS

    def files(self):
        """Return the user's files that are imported, as they are shown."""
        found = []
        for name, module in [*sys.modules.items()]:
            file = getattr(module, "__file__", None)
            if (
                isinstance(file, str)
                and file.endswith(".py")
                and self.is_users_file(file, "" if name == "__main__" else name)
            ):
                found.append(self.shown(file))
        return [*dict.fromkeys(found)]

    def is_users(self, frame):
        return self.is_users_file(frame.f_code.co_filename, frame.f_globals.get("__name__") or "")

    def frames(self):
        """Return (frame, line) of the user's own code, innermost first; at least one of a file."""
        stack = list(traceback.walk_stack(sys._getframe(1)))
        files = [
            each
            for each in stack
            if not each[0].f_code.co_filename.startswith(("<", OURS + os.sep))
        ]
        return [each for each in stack if self.is_users(each[0])] or files[-1:] or stack[-1:]

    def whole(self, file):
        """Return a file's whole path; `python train.py` gives code that name, also after chdir."""
        return os.path.normpath(os.path.join(self.cwd, file))

    def shown(self, file):
        """Return the path of a file as a person can open it from `cwd`."""
        file = self.whole(file)
        return (
            os.path.relpath(file, self.cwd) if file.startswith(os.path.join(self.cwd, "")) else file
        )

    def line_of(self, file, line):
        """Return {at: "file:line", text: its text}."""
        return dict(at=f"{self.shown(file)}:{line}", text=linecache.getline(file, line).strip())

    def place(self, depth=0, above=False):
        """Return {at: "file:line", text: its text} of a line of the user's own code.

        `above` gives the first line of its statement.
        """
        frame, line = self.frames()[depth]
        if above:
            line = getattr(statement_of(frame, line), "lineno", line)
        return self.line_of(frame.f_code.co_filename, line)

    def made(self, name):
        """Return {at, text} of the only line in the user's innermost file that sets `name`, or {}.

        The name is an attribute; a variable may have many meanings.
        """
        file = self.frames()[0][0].f_code.co_filename
        found = setters(file, name) if "." in name else ()
        return self.line_of(file, found[0].lineno) if len(found) == 1 else {}

    def target(self):
        """Return what the user's statement assigns to, or ""; a, b = one(), two() has two names."""
        frame, line = self.frames()[0]
        match statement_of(frame, line):
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
                span = span_of(frame)
                pairs = zip(targets, values) if span else ()
                return next((ast.unparse(to) for to, each in pairs if is_within(span, each)), "")
            case ast.Assign([target]) | ast.AnnAssign(target) if not isinstance(target, ast.Tuple):
                return ast.unparse(target)
        return ""

    def library(self, made=None):
        """Return the package that the user's innermost line calls, if it is not torch, or "".

        The package of a class does not count if the user makes an object of it: `made`.
        """
        found = ""
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            if self.is_users(frame):
                return found
            package = package_of(frame)
            if (
                package
                and package != "torch"
                and (made is None or frame.f_locals.get("self") is not made)
            ):
                found = package
        return ""

    def assigned(self, name):
        """Return {statement, target}: the user's statement if it is `target = name(...)`.

        The target may be a tuple: `logits, loss`.
        """
        frame, line = self.frames()[0]
        match statement_of(frame, line):
            case ast.Assign(
                [ast.Name() | ast.Attribute() | ast.Tuple() as target], ast.Call(called)
            ) as node:
                if ast.unparse(called) == name:
                    targets = target.elts if isinstance(target, ast.Tuple) else [target]
                    target = ", ".join(map(ast.unparse, targets))
                    return dict(
                        statement=ast.unparse(node).replace(f"({target}) =", f"{target} ="),
                        target=target,
                    )
        return dict(statement="", target="")

    def named_in_line(self, depth=0):
        """Return {name: module} of what the line itself names; first what it calls."""
        frame, line = self.frames()[depth]
        nodes = expressions_at(frame.f_code.co_filename, line)
        called = [node.func for node in nodes if isinstance(node, ast.Call)]
        values = {**frame.f_globals, **frame.f_locals}
        names = {}
        for node in [*called, *nodes]:
            if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
                names.setdefault(ast.unparse(node), evaluate(node, values))
        return modules_of(names)

    def names(self, depth=0):
        """Return {name: model} of models that a user's line can name, the line's own names first.

        Then come local variables, what they hold (self.net, self.nets["net"]), and globals.
        """
        frame, line = self.frames()[depth]
        passing = comprehended(statement_of(frame, line))
        own = {
            name: model
            for name, model in self.named_in_line(depth).items()
            if not passing & set(re.findall(r"[^\W\d]\w*", name))
        }
        local = dict(frame.f_locals)
        other = {name: value for name, value in frame.f_globals.items() if name not in local}
        local = {**{name: local[name] for name in ("self",) if name in local}, **local}
        models = dict(own)
        for values in local, other:
            values = {name: value for name, value in values.items() if name not in passing}
            for _ in range(3):  # net, then self.net, then self.nets["net"]
                for name, model in modules_of(values).items():
                    models.setdefault(name, model)
                values = {
                    inner: part
                    for name, value in values.items()
                    for inner, part in parts_of(name, value).items()
                }
        return models

    def name_outside(self, module):
        """Return (how a module is named where it is made: not as an argument, the depth there)."""
        name = ""
        for depth, (frame, _) in enumerate(self.frames()):
            found = self.name_of(module, depth)
            root, code = re.match(r"\w*", found)[0], frame.f_code
            name = found or name
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if root == "self" or found and root not in given:
                break
        return name, depth

    def name_of(self, module, depth=0):
        """Return how a user's line can name a module: as the line has it, if it does, or ""."""
        for name, model in self.named_in_line(depth).items():
            if model is module:
                return name
        models = self.names(depth)
        return next((name for name, model in models.items() if model is module), "") or next(
            filter(None, (path_to(module, name, model) for name, model in models.items())), ""
        )


class Beyond(Places):
    """The user's lines without those of functions that only pass their arguments on."""

    def __init__(self, places):
        vars(self).update(vars(places))

    def frames(self):
        found = super().frames()
        while len(found) > 1 and passes_on(*found[0]):
            del found[0]
        return found
