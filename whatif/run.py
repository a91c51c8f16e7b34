"""One run of the user's command: start it, read what it sends, end it and all it has started."""

import contextlib
import fcntl
import getpass
import importlib.util
import json
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from whatif import processes
from whatif.records import Reader

RANKS = int(os.environ.get("WORLD_SIZE", 1))  # processes that torchrun has started of whatif
LOCAL_RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", RANKS))
RANK = int(os.environ.get("RANK", 0)) if RANKS > 1 else 0
STOPPED = []  # signals received; run_once ends the run then
PAUSE = 0.05  # seconds between two looks at the records
OWN_END = 30  # seconds in which a script may end by itself after its training
LOST = 5  # seconds to wait for the status of a command whose training process was killed
SOCKET = 70  # characters of TMPDIR with which a path of a socket in it is short enough
OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
}  # trackers in runs of which nothing is kept
LAUNCHERS = (
    "ChildFailedError",
    "CalledProcessError",
    "ProcessRaisedException",
    "ProcessExitedException",
)  # errors that tell of another process's error


def catch_signals():
    """Let Ctrl-C and a request to end stop the run in progress; run_once raises it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, _: STOPPED.append(number))


def place():
    """Return the folder or archive of the package whatif."""
    return os.path.abspath([*sys.modules["whatif"].__path__][0])


def free_paths(folder):
    """Return the paths below which nothing is held: the run's own, devices, and caches."""
    names = ("XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "TRITON_CACHE_DIR")
    caches = ["~/.cache", "~/.triton", "~/.nv", *filter(None, map(os.environ.get, names))]
    return [folder, "/dev", "/proc", compile_cache(), *map(os.path.expanduser, caches)]


def compile_cache():
    """Return where torch.compile keeps its code, though a run has a TMPDIR of its own."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = f"uid_{os.getuid()}"
    name = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), name)


# ----------------------------------------------------------------------------------- the start
def prepare(spec):
    """Make the run's folder: spec.json, records, and the hook in a folder of its own."""
    folder = Path(spec["folder"])
    for part in ("hook", "tmp"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "records").touch()
    spec.setdefault("place", place())
    spec.setdefault("free", free_paths(spec["folder"]))
    hook = importlib.util.find_spec("whatif.hook")
    (folder / "hook" / "sitecustomize.py").write_text(hook.loader.get_source("whatif.hook"))
    (folder / "spec.json").write_text(json.dumps(spec))


def environment(spec):
    """Return the variables with which the command starts."""
    folder = spec["folder"]
    hooks = os.path.join(os.environ.get("WHATIF", "/none"), "hook")  # of a whatif around this one
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != hooks]
    held = OFF if spec["mode"] in ("fixed", "proof") else {}
    variables = {
        "PYTHONHASHSEED": "0",
        **os.environ,
        **held,
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": compile_cache(),
        "WHATIF": folder,
        "PYTHONPATH": os.pathsep.join([f"{folder}/hook", *filter(None, paths)]),
    }
    if len(folder) < SOCKET:
        variables["TMPDIR"] = f"{folder}/tmp"
    return variables


def rank_variables():
    """Return, for each process to start, the variables that torchrun would give it."""
    if RANKS == 1:
        return [{}]
    with socket.create_server(("", 0)) as free:  # each run meets at a port of its own
        port = free.getsockname()[1]
    common = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    names = "RANK", "LOCAL_RANK", "ROLE_RANK"
    return [common | dict.fromkeys(names, str(rank)) for rank in range(RANKS)]


@contextlib.contextmanager
def terminal_at_its_end():
    """Yield a file for stdin: a pseudo terminal of 80 columns, at whose end each read is."""
    try:
        master, slave = pty.openpty()
    except OSError:  # a container may have none
        yield subprocess.DEVNULL
        return
    try:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        modes = termios.tcgetattr(slave)
        modes[3] &= ~(termios.ICANON | termios.ECHO)
        modes[6][termios.VMIN] = modes[6][termios.VTIME] = 0  # a read waits for nothing
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        yield slave
    finally:
        os.close(master)
        os.close(slave)


def start(command, spec, stdin):
    """Start the processes of a run: one, or as many as torchrun has started of whatif."""
    with open(f"{spec['folder']}/log", "wb") as log:
        return [
            subprocess.Popen(
                command,
                cwd=spec["cwd"],
                env=environment(spec) | variables,
                stdin=stdin,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for variables in rank_variables()
        ]


# -------------------------------------------------------------------------------- its records
class Results:
    """What the processes of a run have sent, by process; the first one is measured."""

    def __init__(self):
        self.by_pid, self.errors, self.faults, self.torch = {}, [], [], set()

    def add(self, record):
        pid = record.pop("pid")
        if "fault" in record:  # of whatif's own code
            self.faults.append(record["fault"])
        elif "torch" in record:
            self.torch.add(pid)
        elif "error" in record and "done" not in record:  # the process is about to end
            self.errors.append(record | dict(pid=pid))
            if pid in self.by_pid and record["kind"] not in LAUNCHERS:
                self.by_pid[pid] |= record | dict(done=True)
        else:
            before = self.by_pid.setdefault(pid, dict(pid=pid, windows=[], failed=[]))
            for one, many in (
                ("window", "windows"),
                ("whole", "windows"),
                ("fails", "failed"),
                ("both", "beside"),
            ):
                if one in record:
                    before.setdefault(many, []).append(record.pop(one))
            if not before.get("done"):
                before |= record
                for each in self.errors:  # it sends what there is after its error
                    if each["pid"] == pid and each["kind"] not in LAUNCHERS:
                        before |= each | dict(done=True)

    def measured(self):
        """Return {pid: what it has told} without processes that only count their steps."""
        return {
            pid: each
            for pid, each in self.by_pid.items()
            if not isinstance(each.get("beside"), dict)
        }

    def is_lost(self):
        """Return whether a process that had reported is gone before it was done."""
        return any(
            not each.get("done") and not processes.is_alive(pid)
            for pid, each in self.measured().items()
        )

    def first(self):
        """Return what the process that is measured has told."""
        return next(iter(self.measured().values()), dict(windows=[], failed=[]))

    def are_done(self):
        """Return whether the first process that has reported is done, or all have been killed."""
        measured = self.measured()
        return bool(measured) and (
            bool(self.first().get("done")) or not any(map(processes.is_alive, measured))
        )

    def merged(self):
        """Return the first process's result; the others are its "others", by process."""
        first = self.first()
        return first | dict(
            faults=self.faults,
            others={pid: each for pid, each in self.by_pid.items() if each is not first},
        )

    def why_ended(self, pids):
        """Return {error, traceback} of a run that failed, or {}: the one that came first.

        `pids` are the processes that were started. Their own error comes first, if it does not
        only tell of another process's; then that of a process with torch.
        """
        own = [
            each for each in self.errors if each["pid"] in pids and each["kind"] not in LAUNCHERS
        ]
        others = [each for each in self.errors if each["pid"] not in pids]
        with_torch = [each for each in others if each["pid"] in self.torch]
        return next(iter([*own, *with_torch, *others[::-1], *self.errors]), {})


def why_failed(result, code, log):
    """Return, in one line, why a run gave no rate; or "" if it gave one."""
    if error := result.get("error"):
        asks = "it asks for input, but whatif gives it none (stdin is at its end)"
        return asks if "EOF when reading a line" in error else error
    if not result.get("done") and code:
        if code == -signal.SIGKILL:
            return "it was killed by signal 9, probably because memory ran out"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"it {how}" + "".join(f": {line[:150]}" for line in log.strip().splitlines()[-1:])
    if result["windows"]:
        return ""
    if not result.get("torch", True):
        return (
            "it ended, and no process of it was seen to import torch (python -I, -E and -S, "
            "containers and other machines hide it)"
        )
    if not result.get("steps"):
        return "it ended without a step of an optimizer of torch.optim"
    return (
        f"it ended after {result['steps']} steps, before the warm-up was over: let it make "
        "more steps"
    )


# ------------------------------------------------------------------------------------ the run
def follow(started, reader, results, limit, show):
    """Read records until the run is over. Return {}, or {error, done, is_cut} if it took too long."""
    begin = time.monotonic()
    while True:
        codes = [process.poll() for process in started]
        for record in reader.read():
            results.add(record)
        if results.are_done() or codes[0] is not None or any(codes):
            return {}
        if time.monotonic() - begin > limit:
            or_none = "" if results.first()["windows"] else " (or no optimizer of torch.optim)"
            return dict(
                done=True,
                is_cut=True,
                error=f"cut off after {limit:.0f} s: too slow, or too little "
                f"time (--minutes){or_none}",
            )
        if STOPPED:
            raise KeyboardInterrupt
        show(results.merged())
        time.sleep(PAUSE)


def finish(started, folder):
    """Kill all processes of a run, and remove the folders that it has made."""
    processes.end_all(started, folder)
    for made in Path(folder).glob("*.made"):
        for path in made.read_text().splitlines():
            shutil.rmtree(path, ignore_errors=True)


def run_once(command, spec, limit, show=lambda result: None):
    """Run a command until each process that trains is done, or for `limit` seconds.

    `spec` needs mode, folder (a new one, which is removed at the end) and cwd; the processes find
    it all in spec.json. `show` is called with what there is, again and again. Returned are the
    merged records of the first process that reported, with windows (a list), error ("" or one
    line), traceback, code, log (its last lines), faults (of whatif in these processes), and
    others: the same of further processes that report, by pid. Ctrl-C raises KeyboardInterrupt with
    the `result` until then.
    """
    folder = spec["folder"]
    prepare(spec)
    started, results, reader = [], Results(), Reader(folder)
    try:
        with terminal_at_its_end() as stdin:
            started += start(command, spec, stdin)
            cut = follow(started, reader, results, limit, show)
            if results.first().get("ended") or results.is_lost() and not cut:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started[0].wait(LOST if results.is_lost() else OWN_END)  # its own end
            codes = [process.poll() for process in started]
            finish(started, folder)
        for record in reader.read():
            results.add(record)
        log = Path(folder, "log").read_text(errors="replace")
    except KeyboardInterrupt as stop:
        stop.result = results.merged()
        raise
    finally:
        finish(started, folder)
        reader.close()
        shutil.rmtree(folder, ignore_errors=True)
    code = next(filter(None, codes), 0)
    result = dict(torch=bool(results.torch)) | results.merged() | cut
    is_lost = results.is_lost() and codes[0] is None
    if (code or is_lost) and not result.get("done"):
        result |= results.why_ended([process.pid for process in started])
    return result | dict(
        error=why_failed(result, code, log), code=code, log="\n".join(log.splitlines()[-20:])
    )
