"""Replace functions of a module, at once or once it has been imported, whenever that is."""

import functools
import sys
from contextlib import suppress


def is_ready(name):
    """Return whether a module has been imported completely."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name in sys.modules and not getattr(spec, "_initializing", False)


class Waiting:
    """A finder that finds nothing by itself, and sees what the other finders find."""

    def __init__(self):
        self.actions = {}  # {name of a module: functions to call after its import}

    def find_spec(self, name, path=None, target=None):
        for each in [*self.actions]:  # imported in a way that was not seen here
            if each != name and is_ready(each):
                self.act(each)
        if name not in self.actions or target is not None:  # target: a reload
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            if spec := find and find(name, path, target):
                self.act_after(spec, name)
                return spec
        return None

    def act_after(self, spec, name):
        """Let the loader of `spec` call the actions, and be as it was from then on."""
        loader = spec.loader
        load = getattr(loader, "exec_module", None)
        if load is None or isinstance(loader, type):
            return

        def exec_module(module):
            if module.__name__ == name:  # an archive has one loader for all its modules
                vars(loader).pop("exec_module", None)
            load(module)
            if sys.modules.get(name) is module:
                self.act(name)

        with suppress(AttributeError):  # a loader without attributes
            loader.exec_module = exec_module

    def act(self, name):
        for action in self.actions.pop(name, ()):
            with suppress(Exception):
                action()
        if not self.actions and self in sys.meta_path:
            sys.meta_path.remove(self)


WAITING = Waiting()


def after_import(name, action):
    """Call `action` without arguments after the import of `name`, at once if that is done."""
    if is_ready(name):
        return action()
    WAITING.actions.setdefault(name, []).append(action)
    if WAITING not in sys.meta_path:
        sys.meta_path.insert(0, WAITING)


def replace(new, without=()):
    """Replace objects in all modules but those named. `new` is {id of an object: another}.

    A module may have kept an object under a name of its own (from os import replace).
    """
    for module in [each for name, each in [*sys.modules.items()] if name not in without]:
        for name, value in [*getattr(module, "__dict__", {}).items()]:
            if id(value) in new:
                with suppress(AttributeError, TypeError):
                    setattr(module, name, new[id(value)])


def wrap(owner, name, wrapper):
    """Replace owner.name by a function, returned, that calls wrapper(original, *args, **kwargs)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)
    return wrapped


def before(owner, name, action):
    """Let owner.name call action with its own arguments first."""

    def call(original, *args, **kwargs):
        action(*args, **kwargs)
        return original(*args, **kwargs)

    wrap(owner, name, call)
