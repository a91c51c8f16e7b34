"""Changed files laid over a script's own when they are imported; the files stay as they are.

It is called before any module of the script is imported. The main script starts again through
start.py, because Python reads it before any hook.
"""

import importlib.util
import io
import linecache
import os
import sys
from importlib import machinery

STARTER = '''"""Run a changed copy of a script as if it were the script itself."""
import io
import os
import sys


def start():
    path = sys.argv[1]
    with io.open_code(path) as file:  # overlay.py gives the copy
        text = file.read()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    for name in [*globals()]:
        if name not in ("__name__", "__builtins__", "__spec__"):
            del globals()[name]
    globals().update(__file__=path, __doc__=None, __package__=None, __loader__=None,
                     __cached__=None)
    return compile(text, path, "exec", dont_inherit=True)


exec(start())
'''


def lay(files, starter):
    """Let imports read the copies; `files` is {real path: path of the copy}."""
    known = {}

    def copy_of(path):
        name = os.fspath(path)
        if not isinstance(name, str):
            return None
        if name not in known:
            known[name] = files.get(os.path.realpath(name))
        return known[name]

    if sys.argv and copy_of(sys.argv[0]):
        begin = sys.orig_argv.index(sys.argv[0])
        os.execv(
            sys.executable,
            [sys.executable, *sys.orig_argv[1:begin], starter, *sys.orig_argv[begin:]],
        )
    open_code, get_code = io.open_code, machinery.SourceFileLoader.get_code

    def opened(path):
        copy = copy_of(path)
        return open_code(copy if copy else path)

    def code_of(loader, name):
        path = loader.get_filename(name)
        copy = copy_of(path)
        if not copy:
            return get_code(loader, name)
        with open_code(copy) as file:  # no .pyc is read or written
            return loader.source_to_code(file.read(), path)

    def text_of(loader, name):
        copy = copy_of(loader.get_filename(name))
        if not copy:
            return get_source(loader, name)
        with open_code(copy) as file:
            return importlib.util.decode_source(file.read())

    get_source = machinery.SourceFileLoader.get_source
    io.open_code = opened
    machinery.SourceFileLoader.get_code = code_of
    machinery.SourceFileLoader.get_source = text_of
    keep_lines(files)


def keep_lines(files):
    """Let tracebacks and inspect.getsource show the copies."""
    update = linecache.updatecache

    def updated(filename, module_globals=None):
        copy = files.get(os.path.realpath(filename)) if filename else None
        if not copy:
            return update(filename, module_globals)
        with io.open_code(copy) as file:
            lines = importlib.util.decode_source(file.read()).splitlines(keepends=True)
        linecache.cache[filename] = sum(map(len, lines)), None, lines, filename
        return lines

    linecache.updatecache = updated
