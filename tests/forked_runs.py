"""whatif's runs in forks of one process that has imported torch, which takes it seconds.

All of whatif's own code runs as it is; only the start of the script's process is another one, and
watching, warming up and windows are shorter.
"""

import atexit
import os
import runpy
import shutil
import sys
import threading
import time
import types
from pathlib import Path

from helpers import ROOT, STARTED, Server
from whatif import run, session

SCRIPTS = ROOT / "tests" / "whatif_scripts"
WATCH = 0.2  # seconds
FORKS = Server(  # helpers.SERVER imports far more
    "WHATIF",
    "forked_runs",
    "torch._dynamo",  # the first optimizer of a script imports it
    "torch.distributed",
    "numpy",
    *(f"whatif.inside.{path.stem}" for path in (ROOT / "whatif" / "inside").glob("[a-z]*.py")),
    "frozen",
)


def as_script(words, cwd, log, variables):
    """Do in a fork what `python words...` does when the hook is there."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, it in enumerate((null, file, file)):
        os.dup2(it, number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    code = 0
    try:
        begin(words, variables)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def rounds_of(wanted):
    """Return Turns.wanted for at most spec["rounds"] rounds; spec["always"] ignores verdicts."""

    def wanted_now(turns):
        turns.taken = getattr(turns, "taken", 0) + 1
        spec = turns.run.spec
        if "rounds" in spec and turns.taken > spec["rounds"]:
            return []
        return [(name,) for name in turns.names] if spec.get("always") else wanted(turns)

    return wanted_now


def begin(words, variables):
    """Do what the hook does, then run the script."""
    import json
    import multiprocessing

    import torch

    from whatif import enter
    from whatif.inside import plans

    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    with open(os.path.join(variables["WHATIF"], "spec.json")) as file:
        spec = json.load(file)
    plans.WATCH_SECONDS = spec.get("watch", WATCH), 20.0
    plans.WARMUP, plans.FIRST_WARM, plans.COUNTED = 0.05, (3, 80, 240.0), 0.2
    plans.WATCHED, plans.ROUND, plans.ALONE = 5, 2, 3
    plans.Turns.wanted = rounds_of(plans.Turns.wanted)
    sys.argv, sys.orig_argv = words, [sys.executable, *words]
    own = *(str(ROOT / name) for name in ("tests", "tools", "benchmarks")), str(ROOT)
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)[1:]  # the first has the hook
    sys.path[:] = [*paths, *(path for path in sys.path if path not in own)]
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))

    def start_again(executable, command):
        begin(command[1:], variables)
        sys.exit()

    os.execv = start_again  # of a changed main script
    enter.enter(spec)
    runpy.run_path(words[0], run_name="__main__")


for function in (as_script, begin):  # these frames are not the user's code
    function.__code__ = function.__code__.replace(co_filename="<fork>")


def fork(function, *args):
    """Call a function in a fork; return its multiprocessing.Process."""
    STARTED.append(FORKS.start(function, *args))
    return STARTED[-1]


class Started:
    """A fork, as far as whatif.run asks a subprocess.Popen."""

    def __init__(self, *args):
        self.process = fork(as_script, *args)
        self.pid, self.returncode = self.process.pid, None

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise run.subprocess.TimeoutExpired("script", timeout)
        return self.process.exitcode


def start_forks(command, spec, stdin):
    """Take the place of whatif.run.start."""
    open(f"{spec['folder']}/log", "wb").close()
    return [
        Started(
            [str(word) for word in command[1:]],
            spec["cwd"],
            f"{spec['folder']}/log",
            run.environment(spec) | variables,
        )
        for variables in run.rank_variables()
    ]


class Scripts:
    """Runs the scripts of whatif_scripts, copied into a folder of the test's own."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch, self.number = folder, monkeypatch, 0
        monkeypatch.setattr(run, "start", start_forks)
        monkeypatch.setattr(run, "PAUSE", 0.01)

    def copy(self, name, folder=None):
        """Copy a script into the folder; return its new path."""
        return Path(shutil.copy(SCRIPTS / name, folder or self.folder))

    @staticmethod
    def source(name):
        """Return the path of a script in whatif_scripts."""
        return SCRIPTS / name

    def arguments(self, name, *words, only=(), minutes=10.0, seconds=0.5):
        """Return what options.parse would return."""
        path = self.folder / name
        return types.SimpleNamespace(
            only=[*only] or ["plain"],
            script=path,
            kind="script",
            name=name,
            minutes=minutes,
            write=None,
            seconds=seconds,
            json=None,
            copy=False,
            command=[sys.executable, name, *map(str, words)],
        )

    def session(self, name, *words, **options):
        """Return a Session of a script."""
        if not (self.folder / name).exists():
            self.copy(name)
        args = self.arguments(name, *words, **options)
        self.number += 1
        runs = self.folder.parent / f"{self.folder.name}.runs{self.number}"
        return session.Session(args, args.command, self.folder, str(runs))

    def once(self, name, *words, mode="turns", only=(), window=0.02, rounds=1, **spec):
        """Run one process; return what it has told."""
        one = self.session(name, *words, only=only)
        spec = dict(window=window, deadline=time.time() + 60, rounds=rounds, seconds=0.1) | spec
        result = run.run_once(one.command, one.spec(mode, **spec), 60)
        assert not result.get("faults"), result["faults"]
        return result


def windows_of(result, *names):
    """Return the windows of a set."""
    return [each for each in result["windows"] if tuple(each["names"]) == names]
