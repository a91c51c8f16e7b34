"""pytest-xdist's workers as forks of a process that has imported torch, which takes each seconds.

All else of a worker is as ever: it gets its commands from execnet.
"""

import atexit
import multiprocessing
import os
import sys
import types

from execnet import gateway_io

from helpers import SERVER


def as_worker(commands, answers, variables):
    """Do in the fork what execnet's `python -c ...` does."""
    for number, end in enumerate((commands, answers)):
        os.dup2(end.fileno(), number)
        end.close()
    os.environ.clear()
    os.environ.update(variables)
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.process._parent_process = None
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(eval(sys.stdin.readline()), vars(sys.modules["__main__"]))
    atexit._run_exitfuncs()


class Worker(gateway_io.Popen2IOMaster):
    """A fork, as far as execnet asks a process that it has started."""

    def __init__(self, args, execmodel):
        commands, ours = multiprocessing.Pipe(duplex=False)
        theirs, answers = multiprocessing.Pipe(duplex=False)
        self.popen = SERVER.start(as_worker, commands, answers, dict(os.environ))
        for end in commands, answers:
            end.close()
        files = open(os.dup(ours.fileno()), "wb"), open(os.dup(theirs.fileno()), "rb")
        gateway_io.Popen2IO.__init__(self, *files, execmodel)

    def wait(self):
        self.popen.join()


def fork_workers():
    """Have execnet start workers as forks."""
    gateway_io.Popen2IOMaster = Worker
