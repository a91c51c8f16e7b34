"""The script's own options: of argparse and what is built on it, click, absl, fire and hydra.

`install()` watches argparse from then on; `options_of` gathers all that there is, in a step. An
option is a dict: flags, dest, help, default, type, choices, value (the current one), action, nargs,
style (how its words are written) and front (it has to stand before the other arguments).
"""

import argparse
import contextlib
import math
import sys

from whatif.imports import wrap

SIMPLE = (bool, int, float, str, type(None))
LARGE = 500  # the most options that are recorded


def simple(value):
    """Return a value that JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return "".join(value)  # of an enumeration that is text, too
    if isinstance(value, SIMPLE):
        return value
    if isinstance(value, (list, tuple)):
        return [simple(each) for each in value[:50]]
    return str(value)[:100]


def option(flags, dest, value, style, **more):
    """Return an option; what is not known of it is None."""
    empty = dict(
        help="", default=None, type=None, choices=None, action="store", nargs=None, front=False
    )
    return dict(flags=list(flags), dest=dest, value=simple(value), style=style) | empty | more


def type_name(function):
    return getattr(function, "__name__", type(function).__name__) if function else None


class Parsers:
    """Watches argparse: what the script's command line was parsed with."""

    def __init__(self):
        self.found = {}  # {flags: option}

    def install(self):
        """Watch parse_args and parse_known_args, also of parsers that inherit them."""
        owner, name = argparse.ArgumentParser, "_parse_known_args"
        if not hasattr(owner, name):  # what both of them call, in all versions until now
            name = "parse_known_args"

        def parse(original, parser, args=None, *rest, **options):
            result = original(parser, args, *rest, **options)
            if self.is_command_line(args):
                self.note(parser, result[0])
            return result

        wrap(owner, name, parse)
        self.look_back()

    def is_command_line(self, args):
        """Return whether a parser got words of the command, or all of none."""
        words = sys.argv[1:]
        return args is None or (set(args) <= set(words) if args else not words)

    def look_back(self):
        """Find a parser and its result in a script that had parsed before it imported torch."""
        values = list(vars(sys.modules.get("__main__", argparse.Namespace())).values())
        spaces = [each for each in values if isinstance(each, argparse.Namespace)]
        for parser in values:
            if isinstance(parser, argparse.ArgumentParser) and spaces:
                self.note(parser, spaces[-1])

    def note(self, parser, namespace):
        """Add a parser's options."""
        actions = [
            each
            for each in parser._actions
            if not isinstance(each, (argparse._HelpAction, argparse._VersionAction))
        ]
        front = any(
            isinstance(each, argparse._SubParsersAction)
            or each.nargs in (argparse.REMAINDER, argparse.PARSER)
            for each in actions
        )
        for action in actions[:LARGE]:
            if action.option_strings:
                self.found[tuple(action.option_strings)] = option(
                    action.option_strings,
                    action.dest,
                    value_of(namespace, action),
                    "argparse",
                    help=help_of(action),
                    default=simple(action.default),
                    type=type_name(action.type),
                    front=front,
                    nargs=simple(action.nargs),
                    choices=simple(list(action.choices)) if action.choices else None,
                    action=type(action).__name__.strip("_").removesuffix("Action"),
                )


def value_of(namespace, action):
    """Return an action's value; jsonargparse nests namespaces: trainer.precision."""
    value = namespace
    if hasattr(namespace, action.dest):
        return getattr(namespace, action.dest)
    for part in action.dest.split("."):
        value = getattr(value, part, None)
    return action.default if value is None else value


def help_of(action):
    return str(action.help)[:300] if action.help not in (None, argparse.SUPPRESS) else ""


# --------------------------------------------------------------- what is there while steps run
def of_click(frames=()):
    """Return the options of click's (and typer's) command that is under way."""
    module = sys.modules.get("click")
    context, found = module and module.get_current_context(silent=True), []
    depth = 0
    while context is not None:
        for each in context.command.params:
            flags = [flag for flag in each.opts if flag.startswith("-")]
            if flags:
                kind = getattr(each.type, "name", None)
                found.append(
                    option(
                        flags,
                        each.name,
                        context.params.get(each.name),
                        "click",
                        help=getattr(each, "help", "") or "",
                        type=kind,
                        front=depth > 0,
                        choices=simple(list(getattr(each.type, "choices", ()))) or None,
                        action="StoreTrue" if getattr(each, "is_flag", False) else "store",
                        default=simple(each.default) if not callable(each.default) else None,
                    )
                )
        context, depth = context.parent, depth + 1
    return found


def of_absl(frames=()):
    """Return the flags that the script defines with absl."""
    module = sys.modules.get("absl.flags")
    if not module:
        return []
    flags = module.FLAGS.get_key_flags_for_module(sys.argv[0])
    return [
        option(
            [f"--{each.name}"],
            each.name,
            each.value,
            "absl",
            help=each.help or "",
            default=simple(each.default),
            type=type_name(type(each.default)),
            action="StoreTrue" if each.boolean else "store",
            choices=simple(getattr(each.parser, "enum_values", None)),
        )
        for each in flags
    ]


def of_fire(frames=()):
    """Return the parameters of the function that python-fire has called."""
    inner = None
    for frame in frames:  # innermost first
        if frame.f_globals.get("__name__") == "fire.core" and inner is not None:
            code = inner.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            return [
                option(
                    [f"--{name}"],
                    name,
                    inner.f_locals.get(name),
                    "--key=value",
                    type=type_name(type(inner.f_locals.get(name))),
                )
                for name in names
                if name != "self"
            ]
        inner = frame if frame.f_globals.get("__name__") != "fire.core" else inner
    return []


def leaves(config, path=""):
    """Yield (path, value) of the leaves of a nested config."""
    for key in config:
        if key == "hydra" and not path:  # hydra's own settings
            continue
        value = None
        with contextlib.suppress(Exception):  # an interpolation may have no value
            value = config[key] if not is_missing(config, key) else None
        inner = f"{path}.{key}".lstrip(".")
        if hasattr(value, "items"):
            yield from leaves(value, inner)
        else:
            yield inner, value


def is_missing(config, key):
    module = sys.modules.get("omegaconf")
    return bool(module) and module.OmegaConf.is_missing(config, key)


def of_hydra(frames=()):
    """Return the settings of the config that hydra gave the script, as overrides."""
    module = sys.modules.get("omegaconf")
    if not module or "hydra" not in sys.modules:
        return []
    for frame in reversed(list(frames)):
        for value in frame.f_locals.values():
            if isinstance(value, module.DictConfig) and len(value):
                return [
                    option([path], path, leaf, "key=value", type=type_name(type(leaf)))
                    for path, leaf in list(leaves(value))[:LARGE]
                ]
    return []


def of_globals(frames=()):
    """Return the globals that --key=value sets in a script that executes a configurator."""
    values = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    keys = values.get("config_keys")
    if not isinstance(keys, list):
        return []
    return [
        option(
            [f"--{key}"], key, values.get(key), "--key=value", type=type_name(type(values.get(key)))
        )
        for key in keys
        if isinstance(key, str)
    ]


def options_of(parsers, frame=None):
    """Return the script's options; `frame` is one within a step, whose callers are looked at."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    found = list(parsers.found.values())
    for gather in of_click, of_absl, of_fire, of_hydra, of_globals:
        try:
            found += gather(frames)
        except Exception:  # noqa: BLE001  a library of another version; options are a help only
            continue
    return found[:LARGE]
