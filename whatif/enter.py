"""What the hook does in each Python process: wait for torch, and tell the script's own error."""

import importlib
import os
import re
import sys
import sysconfig
import traceback
from contextlib import suppress

from whatif.imports import after_import, wrap
from whatif.records import send
from whatif.write import overlay

SHOWN = 250  # characters of an error


def enter(spec):
    """Wait until torch has been imported, then watch this process."""
    if spec.get("files"):
        overlay.lay(spec["files"], spec["starter"])
    tell_errors(spec)
    after_import("torch", lambda: install(spec))


def install(spec):
    """Call whatif.inside.install, and tell the parent if that fails."""
    send(spec["folder"], torch=True)
    try:
        importlib.import_module("whatif.inside").install(spec)
    except Exception:
        send(spec["folder"], fault=traceback.format_exc())


def tell_errors(spec):
    """Send an error that ends this process, before Python prints it."""
    before = sys.excepthook

    def excepthook(kind, error, where):
        with suppress(Exception):
            send(spec["folder"], **described(error, where, spec))
        before(kind, error, where)

    def call(original, process):
        """Take the place of the run() of a process of multiprocessing, which has no such hook."""
        try:
            return original(process)
        except BaseException as error:
            # torch.multiprocessing.spawn() calls sys.exit() where it handles an error
            told = error.__context__ if isinstance(error, SystemExit) else error
            with suppress(Exception):
                if isinstance(told, Exception):
                    send(spec["folder"], **described(told, told.__traceback__, spec))
            raise

    sys.excepthook, name = excepthook, "multiprocessing.process"
    after_import(name, lambda: wrap(sys.modules[name].BaseProcess, "run", call))


def is_users(file, spec):
    """Return whether a file of code is the user's: no library's, not Python's, not whatif's."""
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("scripts"), spec["place"], "<")
    return not re.search(r"(site|dist)-packages[\\/]", file) and not file.startswith(library)


def described(error, where, spec):
    """Return {error: one line, traceback: text without the frames before the user's first}."""
    first = where
    while first and not is_users(first.tb_frame.f_code.co_filename, spec):
        first = first.tb_next
    where = first or where
    kind = type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    told = f"{kind}: {lines[-1 if kind == 'ProcessRaisedException' else 0]}".rstrip(": ")
    told = told[:SHOWN] + " ..." * (len(told) > SHOWN)
    at = ""
    for frame, line in traceback.walk_tb(where):
        file = frame.f_code.co_filename
        if is_users(file, spec):  # the innermost one stays
            at = f" ({os.path.relpath(file, spec['cwd'])}:{line})"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        at += f" (rank {os.environ.get('RANK', 0)})"
    text = "".join(traceback.format_exception(type(error), error, where))
    return dict(error=told + at, kind=kind, traceback=text)
