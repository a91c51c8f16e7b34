"""What tests share: processes started as a user starts them, small disks, a training run."""

import ast
import atexit
import contextlib
import ctypes
import fcntl
import inspect
import json
import multiprocessing.util
import os
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
import weakref
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from unittest import mock

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
TECHNIQUES = sorted(path.stem.removeprefix("train_") for path in SRC.glob("train_*.py"))

# the machine of records that are made up
MACHINE = dict(
    cpu="A CPU",
    cores=16,
    bfloat16=True,
    gpus=1,
    gpu="NVIDIA X1",
    driver="580",
    cuda="13.0",
    cudnn=91000,
    python="3.12.1",
    packages={"torch": "2.14.1"},
)
# what whatif knows of parser.add_argument("--amp", action="store_true", help="mixed precision")
AMP_OPTION = dict(
    flags=["--amp"],
    dest="amp",
    help="mixed precision",
    default=False,
    value=False,
    type=None,
    choices=None,
    nargs=0,
    action="StoreTrue",
    style="argparse",
    front=False,
)
# under DDP: before Python 3.11.8 a worker can hang as it starts (cpython#112275)
DDP_WORKERS = 2 if sys.version_info >= (3, 11, 8) else 0
SOON = (
    "mode=args.compile_mode",
    'backend="eager"',
)  # an edit: what torch.compile traces runs as it is
HANG = 600  # seconds after which a process that should end, or an event that should come, hangs

VARIABLES = {}  # of the environment, which conftest.py sets for each test and forked runs get
STARTED = []  # the processes of the test that runs; conftest.py ends those that are left


def flags(**options):
    """Return options as the words of a command line: flags(steps=2) is ["--steps", 2]."""
    return [word for name, value in options.items() for word in (f"--{name}", value)]


# a run that takes a second: two epochs of three steps of a model with 8,000 weights
TINY = flags(epochs=2, batch_size=40, steps=3, width=4, image_size=16, workers=0)


def tiny(dataset, result_dir, **options):
    """Return the options of such a run, with `options` in place of those of TINY."""
    return [*flags(dataset=dataset), *TINY, *flags(**options, result_dir=result_dir)]


def on_gpu(name):
    """Return a test's parameter for a second run of the test, on a GPU."""
    return pytest.param(name, marks=pytest.mark.gpu, id=f"{name}-on_gpu")


def params(values):
    """Return a test's parameters, scripts or sets; those that compile have the mark `compiler`."""
    values = [*values]
    names = [each.stem if isinstance(each, Path) else "_".join(each) for each in values]
    return [
        pytest.param(each, id=name, marks=[pytest.mark.compiler] * ("compile" in name))
        for each, name in zip(values, names)
    ]


def start(command, **options):
    """Start a process as a user would: without a launcher's variables in its environment."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    }
    environment |= {"PYTHON": sys.executable, **options.pop("env", {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    STARTED.append(
        subprocess.Popen(
            [str(word) for word in command], text=True, env=environment, **{**pipes, **options}
        )
    )
    return STARTED[-1]


def run(*command, timeout=HANG, **options):
    """Run a command to its end and return its CompletedProcess, with the output as text."""
    process = start(command, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def draw_digits(folder, **counts):
    """Draw a data set of digits, with counts train=24, val=7 or others in each class; return it."""
    words = [ROOT / "make_dataset.py", "digits", *flags(dst=folder, **counts)]
    made = run_forked(*words)
    assert made.returncode == 0, made.stderr
    return folder


def shared(tmp_path_factory, name, make):
    """Return the path `name`, which pytest's workers share: the first calls make(another path)."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
    return path


def torchrun(script, *options, processes=2):
    """Return the command that starts `script` as that many processes on this machine."""
    return [
        sys.executable,
        *TORCHRUN,
        "--standalone",
        f"--nproc_per_node={processes}",
        script,
        *options,
    ]


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


class Server:
    """A process that has imported modules, which takes seconds, to be forked for each run.

    pytest's workers share the one of the process that has started them.
    """

    def __init__(self, name, *modules):
        self.variable, self.server = f"FORKS_OF_{name}", forkserver.ForkServer()
        self.server.set_forkserver_preload([*modules])

    def run(self):
        """Start the server; let workers know how to reach it."""
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        with mock.patch.dict(os.environ, PYTHONPATH=paths):
            self.server.ensure_running()
        os.environ[self.variable] = repr([getattr(self.server, name, None) for name in KNOWN])

    def reach(self):
        """Have a server: that of the process that has started this one, or else an own one."""
        if self.variable not in os.environ:
            self.run()
        elif not self.server._forkserver_address:
            for name, value in zip(KNOWN, ast.literal_eval(os.environ[self.variable])):
                setattr(self.server, name, value)
            self.pipe = os.pipe()  # in place of the one whose end would end an own server
            self.server._forkserver_alive_fd = self.pipe[1]
            self.server.ensure_running = resource_tracker.ensure_running

    def start(self, function, *args):
        """Call a function in a fork; return its multiprocessing.Process."""
        self.reach()
        process = multiprocessing.get_context("forkserver").Process(target=function, args=args)
        connect = self.server.connect_to_new_process
        with mock.patch.object(forkserver, "connect_to_new_process", connect):
            process.start()
        return process


KNOWN = "_forkserver_address", "_forkserver_authkey"  # the key from Python 3.14 on
SERVER = Server(
    "SCRIPTS",
    "helpers",
    "torch",
    "torchvision.transforms.v2",
    "PIL.Image",
    "PIL.PngImagePlugin",
    "lmdb",
    "numpy",
    "tqdm",
    "nvidia.dali.plugin.pytorch",
    "torch.distributed",
)


def as_main(words, out, err, cwd, variables):
    """Do in the fork what `python words...` does."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    for name in "CUDA_VISIBLE_DEVICES", "PYTHONPATH":  # an earlier test's, and the server's own
        os.environ.pop(name, None)
    os.environ.update(variables)
    if variables["NEEDS_GPU"] == "True":
        import torch

        assert torch.cuda.is_available(), "the GPU is hidden"
    if "RANK" in variables:
        import torch

        torch.set_num_threads(1)  # as torchrun does
    multiprocessing.set_start_method(None, force=True)  # workers start as `python` starts them
    if variables["NEEDS_GPU"] == "False" and "RANK" not in variables:
        fork_scripts()
        fork_spawned()
    run_as_main(words)


def run_as_main(words):
    """Do what `python WORD ...` does with a script, torchrun's module, or -c as multiprocessing."""
    sys.argv = words
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        return exec(words[1], vars(sys.modules["__main__"]))
    if words[:2] == TORCHRUN:
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        inspect.stack = quick_stack
        return runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    return runpy.run_path(words[0], run_name="__main__")


def quick_stack(context=0):
    """Do what inspect.stack() does, without lines of source.

    It looks through all modules for those of some frames; torchrun calls it a hundred times.
    """
    return [
        inspect.FrameInfo(frame, frame.f_code.co_filename, line, frame.f_code.co_name, None, None)
        for frame, line in traceback.walk_stack(sys._getframe(1))
    ]


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TORCHRUN = ["-m", "torch.distributed.run"]


def fork(begin, *args):
    """Call `begin`, which ends the process, in a fork; return its number."""
    # what a handler raises in a hook of os.fork would be lost
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of NumPy's idle threads
        pid = os.fork()
    if not pid:
        begin(*args)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return pid


def fork_scripts():
    """Have a driver start `python SCRIPT WORD ...` in forks of itself, without the imports.

    They are processes of their own as ever, with the command line that they would have, and so are
    torchrun and its ranks; what needs variables of Python's own is started as usual.
    """
    plain, path = subprocess.Popen._execute_child, [*sys.path]

    def execute(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        words = [] if isinstance(args, (str, bytes)) else [*map(os.fsdecode, args)]
        variables = dict(os.environ if env is None else env)
        script = words[2:] if words[1:2] == ["-u"] else words[1:]
        is_known = script[:2] == TORCHRUN or script and script[0].endswith(".py")
        has_own = variables.get("PYTHONPATH") != os.environ.get("PYTHONPATH")
        if words[:1] != [sys.executable] or not is_known or preexec_fn or pass_fds or has_own:
            return plain(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
        files, session = more[3:9], more[14]
        ends = files[:1] + files[3::2]
        self.pid = fork(begin_fork, words, script, path, cwd, variables, ends, session)
        self._child_created = True
        self._close_pipe_fds(*files)

    subprocess.Popen._execute_child = execute


def fork_spawned():
    """Have multiprocessing spawn its processes, and its server, in forks without the imports.

    They read what is pickled and import the script as ever.
    """
    plain, path = multiprocessing.util.spawnv_passfds, [*sys.path]

    def spawn(executable, args, fds):
        words = [*map(os.fsdecode, args)]
        code = words[words.index("-c") :]
        if "resource_tracker" in code[1]:
            return plain(executable, args, fds)
        return fork(begin_fork, words, code, path, None, dict(os.environ), (), False, fds)

    multiprocessing.util.spawnv_passfds = spawn


def begin_fork(words, script, path, cwd, variables, files, session, kept=()):
    """Become `python SCRIPT WORD ...`, of which `words` is the whole command; end as it does.

    Of the open files the first three and those in `kept` stay open.
    """
    import torch

    if session:
        os.setsid()
    for number, file in enumerate(files):
        if file != -1:
            os.dup2(file, number)
    for number in {*range(3, 1024)} - {*kept}:
        with contextlib.suppress(OSError):
            os.close(number)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # what the driver does at its end is not this process's
    atexit._clear()
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd or ".")
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS", os.cpu_count())))
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))
    for name, module in [*sys.modules.items()]:  # the driver's, which a script has no part in
        file = str(getattr(module, "__file__", None))  # packages may be installed below ROOT
        if file.startswith((str(ROOT), path[0])) and not file.startswith(sys.prefix):
            del sys.modules[name]
    show_command(words)
    sys.path[:] = path
    code = 0
    try:
        run_as_main(script)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else bool(end.code)
        if code is True:
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def show_command(words):
    """Have /proc show `words` as this process's command line, as far as there is space."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = (int(field) for field in fields[45:47])  # where the kernel finds it
    line = "\0".join(words).encode()[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


class Forked:
    """`python words...` in a fork, or in `ranks` forks as torchrun would start them.

    It gets the variables `env`, too, and its output can go to the file `log`. The scripts that it
    starts are forks, too: see fork_scripts.
    """

    def __init__(self, *words, cwd="/", ranks=0, env={}, log=None):
        self.words, self.made = words, tempfile.TemporaryDirectory()
        self.processes, common = [], VARIABLES | env
        if ranks:
            from torch.distributed import TCPStore

            self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            common |= {
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(self.store.port),
                "GROUP_WORLD_SIZE": "1",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        for rank in range(max(1, ranks)):
            variables = common | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {})
            files = [log or Path(self.made.name) / f"{name}{rank}" for name in ("out", "err")]
            words = [str(word) for word in words]
            self.processes.append(SERVER.start(as_main, words, *files, cwd, variables))
        STARTED.append(self)

    def kill(self):
        for process in self.processes:
            process.kill()

    @property
    def pid(self):
        return self.processes[0].pid

    def poll(self):
        """Return the exit code of the first process; None while it runs."""
        return self.processes[0].exitcode

    def is_alive(self):
        return any(process.is_alive() for process in self.processes)

    def output(self):
        """Return what the first process has printed so far."""
        path = Path(self.made.name) / "out0"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, timeout=HANG):
        """Wait for the end and return a CompletedProcess with the output of all ranks."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        out, err = (
            "".join(
                path.read_text(errors="replace")
                for path in sorted(Path(self.made.name).glob(f"{name}*"))
            )
            for name in ("out", "err")
        )
        assert None not in codes, f"{self.words} does not end: {codes}\n{out}\n{err}"
        return subprocess.CompletedProcess(self.words, max(codes, key=abs), out, err)


def run_forked(*words, timeout=HANG, **options):
    """Run `python words...` in forks (see Forked) to its end; return its CompletedProcess."""
    return Forked(*words, **options).wait(timeout)


def wait_until(condition, seconds=HANG, pause=0.02):
    """Wait until `condition()` is true and return its value; fail after that many seconds."""
    end = time.monotonic() + seconds
    while True:
        begin = time.monotonic()
        if value := condition():
            return value
        assert begin < end, "what the test waits for does not happen"
        time.sleep(max(pause, 3 * (time.monotonic() - begin)))  # leave the cores to others


def wait_awhile(seconds, is_enough):
    """Wait that many seconds, or until `is_enough()` if that is sooner."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not is_enough():
        time.sleep(0.002)


def processes_of(word):
    """Return the living processes whose command line contains `word`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(word) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def change(path, old, new):
    """Replace `old`, which must be there, by `new` in a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


class SmallDisk:
    """A new file system at `folder` that is soon full: a tmpfs, if root may mount one.

    Otherwise the size of each file that a process writes is limited (RLIMIT_FSIZE): start the
    processes with `disk.run` or with `**disk.options`.
    """

    def __init__(self, folder, kilobytes, bytes_a_file=None):
        self.folder, self.limit = folder, bytes_a_file or 1024 * kilobytes
        folder.mkdir()
        self.mounted = not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder],
            capture_output=True,
        ).returncode
        self.options = {} if self.mounted else {"preexec_fn": self.set_limit}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.mounted:
            subprocess.run(["umount", self.folder], check=True)
        else:
            self.folder.chmod(0o755)

    def run(self, *words):
        """Run `python words...` to its end; return its CompletedProcess."""
        if self.mounted:
            return run_forked(*words)
        return run(sys.executable, *words, **self.options)

    def set_limit(self):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))

    def make_room(self):
        self.options = {}
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", self.folder], check=True)

    def make_read_only(self):
        """Make it read-only, or skip the test if that is impossible."""
        if not self.mounted and not os.geteuid():
            pytest.skip("root can write to any folder, and no tmpfs can be mounted")
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,ro", self.folder], check=True)
        else:
            for path in (*self.folder.iterdir(), self.folder):
                path.chmod(0o555)


def train(script, *options, forked=True, **details):
    """Run a training script, which must succeed; return (its record, its output).

    It runs in a fork, which is faster, or as a user starts it, with torchrun if it needs that.
    """
    is_ddp = "init_process_group" in Path(script).read_text()
    options = [str(word) for word in options]
    folder = Path(options[options.index("--result_dir") + 1])
    if forked:
        done = run_forked(script, *options, ranks=2 if is_ddp else 0, **details)
    else:
        done = run(
            *(torchrun(script, *options) if is_ddp else [sys.executable, script, *options]),
            **details,
        )
    assert done.returncode == 0, f"{script} {options}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    from runs import read_record

    return read_record(folder / f"{Path(script).stem}.json"), done.stdout


def spy(folder, script, *options, ranks=0):
    """Run a training script, which must succeed, under spy.py.

    Returns a function: seen(layer, trains, rank=0) is the list of tensors that spy.py has kept.
    """
    import torch

    folder.mkdir()
    done = run_forked(ROOT / "tests" / "spy.py", folder, script, *options, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    kept = [torch.load(folder / f"{rank}.seen") for rank in range(ranks or 1)]
    return lambda layer, trains, rank=0: [
        each["tensor"] for each in kept[rank] if (each["layer"], each["trains"]) == (layer, trains)
    ]


def with_little_memory(folder):
    """Write a script that runs another one with 1 GB of address space beside its imports'."""
    (folder / "limited.py").write_text("""
import resource, runpy, sys
import lmdb, torch, torchvision.transforms.v2
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 10 ** 9,) * 2)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
""")
    return folder / "limited.py"


def replaced(text, *edits):
    """Return `text` with each (old, new) replaced; old has to be there once."""
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def edited(script, folder, *edits):
    """Write a user's copy of src/<script>.py, or of a path, with each (old, new) replaced."""
    source = SRC / f"{script}.py" if isinstance(script, str) else script
    path = Path(folder) / source.name
    path.write_text(replaced(source.read_text(), *edits))
    return path


def load_checkpoint(path):
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def weights(folder, name):
    """Return the model's weights in the checkpoint of the script `name`."""
    return load_checkpoint(folder / f"{name}.pt")["parts"]["model"]


def same_bits(one, other):
    """Return whether two dicts of tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def learned(epochs):
    """Return what epochs of a record or checkpoint say of learning, without the times."""
    return [[epoch[key] for key in ("loss", "val_top1", "val_top5")] for epoch in epochs]


def assert_one_line(done, status, *parts):
    """Check that a run failed with this status and one line on stderr that has all `parts`."""
    assert done.returncode == status, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr


def error_of(done, name, status=1):
    """Return the one error line of the script `name`, which has to have failed.

    Threads of C libraries write to stderr, too: the line can stand behind the start of theirs.
    """
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    own = re.findall(rf"{name}\.py: error: .*", done.stderr)
    assert len(own) == 1, done.stderr
    return own[0]


class Hostile:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def benchmark(script, folder, *words, stop_at=None):
    """Run a benchmark, with Ctrl-C once it has said `stop_at`; return (process, record, page)."""
    running = Forked(script, *words)
    if stop_at:
        wait_until(lambda: stop_at in running.output() or not running.is_alive())
        os.kill(running.processes[0].pid, signal.SIGINT)
    done = running.wait()
    files = [folder / f"{script.stem}.{kind}" for kind in ("json", "md")]
    assert all(file.exists() for file in files), done.stderr
    return done, json.loads(files[0].read_text()), files[1].read_text()
