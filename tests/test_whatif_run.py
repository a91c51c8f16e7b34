"""whatif/: a run of a script, its processes and files, on scripts that need no torch."""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import zipapp
from pathlib import Path
from unittest import mock

import pytest

from helpers import ROOT, assert_one_line, processes_of, run, start, wait_until

PYTHON = sys.executable
SCRIPTS = ROOT / "tests" / "whatif_scripts"
SESSION = """
import json, os, sys, tempfile
from pathlib import Path
from whatif import copies, run

def main(args):
    assert not {"torch", "numpy"} & {*sys.modules}
    run.catch_signals()
    with tempfile.TemporaryDirectory(prefix="whatif-") as folder:
        spec = dict(mode=os.environ.get("MODE", "turns"), folder=folder + "/1", cwd=os.getcwd())
        try:
            if args.copy:
                with copies.copied(Path.cwd()) as copy:
                    spec["cwd"] = str(copy)
                    command = copies.moved(args.command, Path.cwd(), copy)
                    result = run.run_once(command, spec, 60 * args.minutes)
            else:
                result = run.run_once(args.command, spec, 60 * args.minutes)
        except KeyboardInterrupt:
            print("stopped")
            return 130
    print(json.dumps(result))
    return 0
"""  # in place of the package's own; it makes one run and prints what run_once returns
INSIDE = """
import os
from whatif.records import send

def install(spec):
    from whatif.inside import files
    if files.is_holding(spec):
        files.hold_everything(spec)
    send(spec["folder"], windows=[dict(steps=1)], name=__name__)
    import torch
    torch.spec = spec
    if getattr(torch, "FAULT", ""):
        raise ValueError(torch.FAULT)
"""
TORCH = (
    "spec = None\ndef done(**more):\n    from whatif.records import send\n"
    "    send(spec['folder'], done=True, **more)\n"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A copy of the package with parts that the tests know."""
    folder = tmp_path_factory.mktemp("program") / "whatif"
    shutil.copytree(ROOT / "whatif", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "session.py").write_text(SESSION)
    (folder / "inside" / "__init__.py").write_text(INSIDE)
    return folder


@pytest.fixture
def folder(tmp_path):
    """A folder with a package called torch, which is imported at once."""
    folder = tmp_path / "my folder"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(TORCH)
    (folder / "torch" / "_C.py").touch()
    return folder


def write(folder, text, name="train.py"):
    (folder / name).write_text(text)
    return folder / name


def ask(program, folder, *words, **variables):
    """Run whatif in `folder`; return what run_once returned."""
    with tempfile.TemporaryDirectory() as temporary:  # of a short name, as a socket's is limited
        done = run(PYTHON, program, *words, cwd=folder, env={"TMPDIR": temporary} | variables)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not os.listdir(temporary) and not processes_of(folder), processes_of(folder)
    return json.loads(done.stdout)


def once(program, folder, *command, mode="turns", limit=60, **variables):
    """Return what run_once returns of a command; without whatif's own process, which takes time."""
    from whatif import run as runs

    with (
        tempfile.TemporaryDirectory() as temporary,
        mock.patch.dict(os.environ, {"TMPDIR": temporary} | variables),
        mock.patch.object(tempfile, "tempdir", temporary),
    ):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        command = command[1:] if command[0] == "--" else (PYTHON, *command)
        spec = dict(mode=mode, folder=f"{temporary}/1", cwd=str(folder), place=str(program))
        result = runs.run_once(command, spec, limit)
        assert not os.listdir(temporary) and not processes_of(folder), processes_of(folder)
    return result


# ---------------------------------------------------------------------------- the command line
def test_help_needs_no_torch():
    done = run(PYTHON, "-S", ROOT / "whatif", "--help")
    assert done.returncode == 0 and "-m package.train" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "name a training script, -m MODULE or -- COMMAND"),
        (["missing.py"], "missing.py: there is no such script"),
        (["-m"], "-m: name a module"),
        (["--"], "--: name a command"),
        (["--", "no-such-command", "x"], "no-such-command: there is no such command"),
        (["--only", "warp,amp", "x.py"], "--only warp: choose from .*channels_last"),
        (["--seconds", "0", "x.py"], "above 0"),
        (["--minutes", "many", "x.py"], "many"),
        (["--json", "/", "x.py"], "--json /: "),
        (["--json=/none/x", "x.py"], "--json /none/x: "),
        (["--copy", "/bin/sh"], "--copy: .*/(da)?sh is not below"),
        (["--unknown", "x.py"], "unknown"),
        (["--seconds"], "one argument"),
    ],
)
def test_wrong_use_is_told_in_one_line(words, told, capsys, monkeypatch, tmp_path):
    from whatif import options

    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    with pytest.raises(SystemExit) as end:
        options.parse(words)
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(lines) == 1 and re.search(told, lines[0]), lines


def test_wrong_use_ends_with_status_2():
    assert_one_line(run(PYTHON, ROOT / "whatif", "missing.py"), 2, "missing.py: there is no such")


def test_words_of_the_command_stay_its_own(monkeypatch, tmp_path):
    from whatif import options

    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    own = ["--only", "amp,compile", "--seconds=3"]
    args = options.parse([*own, "x.py", "--seconds", "5", "--", "-m", "--help"])
    assert args.command == [PYTHON, "x.py", "--seconds", "5", "--", "-m", "--help"]
    assert (args.kind, args.seconds, args.only) == ("script", 3, ["amp", "compile"])
    args = options.parse(["--copy", "-m", "pack.age", "--lr", "1", "--", "x"])
    assert args.command == [PYTHON, "-m", "pack.age", "--lr", "1", "--", "x"]
    assert (args.kind, args.name, args.script, args.copy) == ("module", "pack.age", None, True)
    args = options.parse(["--", "sh", "-c", "exit 3", "--", "--copy"])
    assert args.command == ["sh", "-c", "exit 3", "--", "--copy"] and not args.copy
    assert args.name == "sh -c 'exit 3' -- --copy"
    args = options.parse(["--", "sh", *"abcdefghijklmnopqrstuvwxyz" * 2])
    assert len(args.name) == 60 and args.name.endswith("...")


OWN = (
    "stats",
    "search",
    "run",
    "report",
    "options",
    "session",
    "records",
    "imports",
    "inside",
    "hook",
    "enter",
    "processes",
    "machine",
)


@pytest.mark.parametrize("form", ["folder", "archive", "module", "command"])
def test_no_module_of_ours_hides_one_of_the_users(form, program, folder, tmp_path):
    for name in OWN:
        write(folder, f"own = {name!r}", f"{name}.py")
    write(
        folder,
        "import sys\n"
        + "".join(f"import {name}; assert {name}.own == {name!r}\n" for name in OWN)
        + "import torch\n"
        "from whatif.inside import files\n"
        f"import {', '.join(OWN)}; assert inside.own and sys.argv[1:] == ['--copy', '-m', 'a b']\n"
        "assert not [path for path in sys.path if 'whatif' in path or 'hook' in path], sys.path\n"
        "torch.done()\n",
    )
    words = {"module": ["-m", "train"], "command": ["--", PYTHON, "train.py"]}.get(
        form, ["train.py"]
    )
    if form == "archive":
        zipapp.create_archive(program, tmp_path / "w.pyz")
        program = tmp_path / "w.pyz"
    result = ask(program, folder, *words, "--copy", "-m", "a b")
    assert result["done"] and not result["error"], result
    assert result["name"] == "whatif.inside" and not result["faults"]


# ------------------------------------------------------------------------------------ the hook
def test_the_next_sitecustomize_is_called(program, folder):
    write(folder, "import sys\nsys.first = __file__", "sitecustomize.py")
    write(
        folder,
        "import sys, sitecustomize, torch\nassert sys.first == sitecustomize.__file__\n"
        "import importlib; importlib.reload(sitecustomize)\ntorch.done()",
    )
    result = once(program, folder, "train.py", PYTHONPATH=str(folder))
    assert result["done"] and not result["error"], result


def test_without_another_sitecustomize_there_is_none(program, folder):
    write(
        folder,
        "try:\n    import sitecustomize\nexcept ImportError:\n    import torch\n"
        "    torch.done()\nelse:\n    assert 'whatif' not in sitecustomize.__file__\n"
        "    import torch\n    torch.done()",
    )
    result = once(program, folder, "train.py")
    assert not result["error"] and result["log"] == "", result


IMPORTS = """
import importlib, importlib.util, multiprocessing, os, subprocess, sys
before = [*sys.meta_path]
spec = importlib.util.find_spec("torch")
assert "torch" not in sys.modules and spec.origin.endswith("__init__.py")
assert importlib.util.find_spec("torch") and sys.modules.get("torch") is None
class Own:
    pass
def child(own):
    import torch
    assert type(own).__name__ == "Own" and torch.spec
if __name__ == "__main__":
    for _ in range(2):
        try:
            os.environ["BROKEN"] = "yes"
            import torch
        except OSError:
            del os.environ["BROKEN"]
    import torch._C
    assert torch.spec and type(torch.__loader__).__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(torch.__spec__.loader)
    torch = importlib.reload(torch)
    for method in ("spawn", "forkserver", "fork"):
        process = multiprocessing.get_context(method).Process(target=child, args=(Own(),))
        process.start()
        process.join()
        assert process.exitcode == 0, method
    for options in (["-I"], ["-E"], ["-S"], ["-O"]):
        subprocess.run([sys.executable, *options, "-c", "print(1)"], check=True)
    from whatif.records import send
    send(os.environ["WHATIF"], done=True)
    for line in open(os.environ["WHATIF"] + "/records"):
        print(line.strip())
"""


def test_torch_is_imported_in_every_way(program, folder):
    write(
        folder,
        "import os\nif os.environ.get('BROKEN'): raise OSError('broken')\n"
        "spec = globals().get('spec')",
        "torch/__init__.py",
    )
    write(folder, IMPORTS)
    log = once(program, folder, "train.py")["log"]
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert log.count("1\n") == 4 and "Error" not in log, log
    with_torch = [line["pid"] for line in lines if line.get("torch")]
    # one process is forked after its import: it has the parent's hooks
    assert len(with_torch) == len({*with_torch}) == 3, log


def test_a_fault_of_ours_is_told_to_the_parent_only(program, folder):
    write(folder, "spec = None\nFAULT = 'our fault'", "torch/__init__.py")
    write(folder, "import torch\nprint('goes on')")
    result = once(program, folder, "train.py")
    assert result["log"] == "goes on" and "our fault" in result["faults"][0]


# ----------------------------------------------------------------------------- stdin and errors
def test_stdin_is_a_terminal_at_its_end(program, folder):
    write(
        folder,
        "import os, sys\nrows, columns = os.popen('stty size', 'r').read().split()\n"
        "assert int(columns) > 0 and sys.stdin.isatty()\n"
        "assert sys.stdin.read() == sys.stdin.read() == ''\ninput('Go on? [y/n]')",
    )
    result = once(program, folder, "train.py")
    assert result["error"].startswith("it asks for input, but whatif gives it none"), result


@pytest.mark.parametrize(
    "text, words, told",
    [
        (
            "import torch\ndef step():\n    raise ValueError('my own\\nfault')\nstep()",
            ["train.py"],
            r"ValueError: my own \(train.py:3\)$",
        ),
        ("import json\njson.loads('?')", ["train.py"], r"JSONDecodeError: .* \(train.py:2\)$"),
        ("import absent", ["train.py"], r"ModuleNotFoundError: .*'absent' \(train.py:1\)"),
        (
            "import sys\nsys.exit('bad option')",
            ["train.py"],
            "^it ended with status 1: bad option$",
        ),
        (
            "import os\nos.kill(os.getpid(), 9)",
            ["train.py"],
            "^it was killed by signal 9, probably",
        ),
        ("import os\nos.kill(os.getpid(), 11)", ["train.py"], "^it was killed by signal 11$"),
        ("x = 1", ["train.py"], "no process of it was seen to import torch"),
        ("", ["--", PYTHON, "-I", "-c", "import json"], "python -I, -E and -S, .* hide it"),
        (
            "import subprocess, sys\nimport torch\nif sys.argv[1:]: raise KeyError('of a child')\n"
            "subprocess.run([sys.executable, 'train.py', 'child'], check=True)",
            ["train.py"],
            "KeyError: 'of a child' .train.py:3.$",
        ),
        (
            "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import absent'])\n"
            "import torch\nraise KeyError('own')",
            ["train.py"],
            "KeyError: 'own' .train.py:4.$",
        ),
        (
            "import torch\nraise KeyError('of a rank')",
            ["--", "sh", "-c", f"'{PYTHON}' train.py || exit 3"],
            r"KeyError: 'of a rank' \(train.py:2\)$",
        ),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value)[-20:],
)
def test_errors_are_one_line(text, words, told, program, folder):
    write(program / "inside", INSIDE.replace("windows=[dict(steps=1)]", "facts={}"), "__init__.py")
    try:
        result = once(program, folder, *words) if write(folder, text) else None
    finally:
        write(program / "inside", INSIDE, "__init__.py")
    assert re.search(told, result["error"]) and "\n" not in result["error"], result
    if "(train.py:" in result["error"]:
        assert "whatif" not in result["traceback"] and "train.py" in result["traceback"]


@pytest.mark.parametrize(
    "sent, code, told",
    [
        (dict(error="EOFError: EOF when reading a line (x.py:3)"), 1, "it asks for input, but"),
        (dict(error="EOFError: Ran out of input"), 1, "EOFError: Ran out of input"),
        (dict(done=True), 0, "it ended without a step of an optimizer"),
        (dict(done=True, steps=1), 0, "it ended after 1 steps, before the warm-up was over"),
        ({}, 1, "it ended with status 1: the last line"),
        (dict(done=True, windows=[dict(steps=1)]), 1, ""),
    ],
)
def test_why_a_run_failed(sent, code, told):
    from whatif.run import why_failed

    why = why_failed(dict(windows=[]) | sent, code, "a line\nthe last line\n")
    assert why.startswith(told) and bool(why) == bool(told)


# ----------------------------------------------------------------------------- several processes
SEVERAL = """
import subprocess, sys
if len(sys.argv) == 1:
    children = [subprocess.Popen([sys.executable, __file__, n]) for n in "12"]
    print([child.wait() for child in children])
else:
    import os, time, torch
    print("child", os.getpid())
    while not all(str(n) in os.listdir(".") for n in "12"):  # both have begun
        open(sys.argv[1], "w").close()
        time.sleep(0.01)
    torch.done(number=int(sys.argv[1]))
    time.sleep(60)
"""


def test_each_training_process_is_reported_by_itself(program, folder):
    write(folder, SEVERAL)
    result = once(program, folder, "train.py")
    ((pid, other),) = result["others"].items()
    assert {result["number"], other["number"]} == {1, 2} and result["pid"] != int(pid)
    assert other["windows"] == result["windows"] and not result["error"]
    assert not other.get("error")


FAILING = """
import multiprocessing, sys, torch
from whatif.records import send

def train(handles):
    send(torch.spec["folder"], window=dict(steps=1))
    try:
        raise OSError(28, "no space")
    except OSError:
        if not handles:
            raise
        sys.exit(1)  # as torch.multiprocessing.spawn() does

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=train, args=sys.argv[2:])
    process.start()
    process.join()
"""


@pytest.mark.parametrize("how", [["fork", ""], ["spawn", ""], ["spawn", "handled"]])
def test_an_error_of_a_process_of_multiprocessing_is_told(program, folder, how):
    """Python prints it in the process, which then comes to its own end."""
    write(folder, FAILING)
    result = once(program, folder, "train.py", *how)
    errors = [each.get("error") for each in (result, *result["others"].values())]
    assert "OSError: [Errno 28] no space (train.py:8)" in errors, result


def test_processes_that_train_beside_the_measured_one_are_not_waited_for():
    """Their counts may come first, and they may end first, which ends no measurement."""
    from whatif.run import Results

    results, mine = Results(), os.getpid()
    for pid in -1, -2, mine:  # there is no -1 and no -2
        results.add(dict(pid=pid, beside={}))
        assert not results.are_done() and not results.is_lost()
    results.add(dict(pid=mine, beside=dict(steps=5, seconds=2.0)))
    results.add(dict(pid=-2, steps=3, ended=True, done=True))
    assert not results.are_done() and not results.is_lost() and "ended" not in results.first()
    results.add(dict(pid=0, window=dict(steps=3)))  # no such process
    assert results.is_lost() and results.are_done()  # the others may train for long
    results.add(dict(pid=0, done=True))
    assert results.are_done() and not results.is_lost()
    merged = results.merged()
    assert len(merged["windows"]) == 1 and merged["others"].keys() == {mine, -1, -2}


def test_torchrun_around_whatif(program, folder):
    write(
        folder,
        "import os, torch\nassert os.environ['RANK'] == os.environ['LOCAL_RANK']\n"
        "assert os.environ['MASTER_PORT'] != '1'\n"
        "torch.done(rank=int(os.environ['RANK'])) if os.environ['RANK'] == '0' else None",
    )
    ranks = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_PORT="1")
    second = run(PYTHON, program, "train.py", env=ranks | dict(RANK="1"), cwd=folder)
    assert second.returncode == 0 and not second.stdout + second.stderr
    result = ask(program, folder, "train.py", **ranks, RANK="0")
    told = [result, *result["others"].values()]  # either process may be the first to report
    assert [each["rank"] for each in told if "rank" in each] == [0], result
    assert not result["error"], result
    alone = run(
        PYTHON, program, "train.py", env=ranks | dict(RANK="0", LOCAL_WORLD_SIZE="1"), cwd=folder
    )
    assert_one_line(alone, 2, "torchrun runs on several")


HANGS = """
import os, subprocess, sys, tempfile, time
from multiprocessing import shared_memory
open(tempfile.mkdtemp() + "/ccX1.s", "w").close()  # as a compiler that was cut off leaves it
memory = shared_memory.SharedMemory(create=True, size=10)
sleep = [sys.executable, "-c", "import time; time.sleep(600)", os.getcwd()]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
subprocess.Popen(sleep, process_group=0) if sys.version_info > (3, 11) else None
subprocess.Popen(["sh", "-c", "cd /; nohup setsid env -i '%s' -c '%s' '%s' & sleep 600" % (
    sleep[0], sleep[2], sleep[3])])
subprocess.Popen(sleep, env={}, preexec_fn=os.setsid)
os.mkdir("made")
print(memory.name, os.environ["TORCHINDUCTOR_CACHE_DIR"])
sys.stdout.flush()
import torch
open("ready", "w").close()
time.sleep(600)
"""


def test_what_is_cut_off_leaves_nothing(program, folder):
    write(folder, HANGS)
    result = once(program, folder, "train.py", mode="fixed", limit=2)
    assert result["error"].startswith("cut off after 2 s: too slow, or too little time")
    assert result["is_cut"]
    memory, cache = result["log"].splitlines()[0].split()
    assert not Path("/dev/shm", memory).exists()
    assert "whatif" not in cache and not Path(cache).is_relative_to(folder)  # as without whatif
    assert not (folder / "ready").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything(number, program, folder):
    write(folder, HANGS)
    with tempfile.TemporaryDirectory() as temporary:
        process = start([PYTHON, program, "train.py"], cwd=folder, env={"TMPDIR": temporary})
        wait_until((folder / "ready").exists)
        process.send_signal(number)
        out, err = process.communicate()
        assert (process.returncode, out, err) == (130, "stopped\n", "")
        assert not os.listdir(temporary) and not processes_of(folder)


def test_a_copy_is_run_and_removed(program, folder):
    write(
        folder,
        "import os, sys, torch\nopen('written', 'w').close()\n"
        "assert os.getcwd() != sys.argv[1] and os.path.dirname(__file__) == os.getcwd()\n"
        "torch.done()",
    )
    result = ask(program, folder, "--copy", folder / "train.py", f"{folder}2")
    assert not result["error"], result
    assert {each.name for each in folder.iterdir()} == {"torch", "train.py"}
    assert {each.name for each in folder.parent.iterdir()} == {"my folder"}


# ------------------------------------------------------------------------------- files and more
HOLD = """
import torch
def hold():
    from whatif.inside.files import hold_everything
    hold_everything(torch.spec)
"""


@pytest.mark.parametrize("mode", ["turns", "fixed"])
def test_nothing_reaches_the_users_files(mode, program, folder):
    write(folder, HOLD, "numbers_of.py")
    shutil.copy(SCRIPTS / "writes.py", folder / "train.py")
    for name in ("user.txt", "old.txt"):
        (folder / name).write_text("user's own")
    (folder / "folder").mkdir()
    (folder / "folder" / "inner.txt").touch()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    words = ["start"] if mode == "fixed" else []
    result = once(program, folder, "train.py", *words, mode=mode)
    assert result["log"] == "all as it should be", result["log"]
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if mode == "turns":
        before |= {folder / "log.txt": b"before\n", folder / "raw.bin": b"before"}
    assert after == before


def in_process(program, folder, text):
    """Run a script that holds everything, then `text`; return its output."""
    (folder / "numbers_of.py").write_text(HOLD)
    write(folder, "from numbers_of import hold\n" + text + "\nprint('end')")
    return once(program, folder, "train.py")["log"]


TRACKER = """
def log(values):
    print("logged", values)
def init():
    return Run()
class Run:
    def log(self, values):
        print("sent", values)
    def finish(self):
        print("finished")
"""


def test_trackers_are_silent(program, folder):
    write(folder, "from math import log\n" + TRACKER.replace("def log", "def log_it", 1), "aim.py")
    write(folder, TRACKER, "wandb.py")
    log = in_process(
        program,
        folder,
        """
import wandb, math
from wandb import log as own
run = wandb.init()
run.log(1)
hold()
run.log(2); wandb.log(3); own(4); run.finish()
import aim
aim.log_it(5); aim.Run().log(6)
assert math.log(1) == 0""",
    )
    assert log == "sent 1\nfinished\nsent 6\nend"


def test_uploads_are_refused_and_this_machine_is_not(program, folder):
    log = in_process(
        program,
        folder,
        """
import http.server, threading, urllib.request
class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"taken")
    def log_message(*_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
hold()
print(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", b"x").read().decode())
try:
    urllib.request.urlopen("http://192.0.2.1/", b"x")  # an address that nobody has
except urllib.error.URLError as error:
    print(error.reason)""",
    )
    assert log == "taken\nwhatif holds back POST to 192.0.2.1\nend"


def test_large_files_are_not_copied(program, folder):
    (folder / "data.bin").write_bytes(b"user's own")
    (folder / "log.txt").write_text("user's own")
    log = in_process(
        program,
        folder,
        """
import mmap, os
from whatif.inside import open_files
open_files.LARGE = 5
data = open("data.bin", "r+b")
mapped = mmap.mmap(data.fileno(), 0)
log = open("log.txt", "a")
hold()
mapped[:4] = b"USER"
print(mapped[:], data.read())
print("more", file=log, flush=True)""",
    )
    assert log == 'b"USER\'s own" b"user\'s own"\nend'
    assert (folder / "data.bin").read_bytes() == b"user's own"
    assert (folder / "log.txt").read_text() == "user's own"


def test_what_a_script_wrote_before_is_its_files_own_after_gc_freeze_too(program, folder):
    log = in_process(
        program,
        folder,
        """
import gc
log = open("log.txt", "w")
print("before", file=log)
gc.freeze()
hold()
assert gc.get_freeze_count()
print("after", file=log, flush=True)""",
    )
    assert log == "end" and (folder / "log.txt").read_text() == "before\n"


def test_child_processes_hold_too(program, folder):
    log = in_process(
        program,
        folder,
        """
import subprocess, sys
if sys.argv[1:]:
    import torch
    open("child.txt", "w").close()
else:
    hold()
    print(subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True))
    open("child.txt").close()""",
    )
    assert log.endswith("\nend") and not (folder / "child.txt").exists(), log


SEEDS = """
import os, random
import torch
from whatif.inside.seeds import shift_seeds
k = 0 if os.fork() else 3  # torch takes seconds to be imported
if not k:
    os.wait()
shift_seeds(k)
def drawn():
    import numpy
    return random.random(), torch.rand(1).item(), numpy.random.rand()
first = drawn()
import numpy
from numpy.random import default_rng, seed
print(first, [random.Random(k).random(), torch.rand(1, generator=torch.Generator().manual_seed(
    k)).item(), numpy.random.RandomState(k).rand()])
random.seed(7); torch.manual_seed(seed=7); numpy.random.seed(7)
own = torch.Generator().manual_seed(7)
print(drawn(), default_rng(7).random(), torch.rand(1, generator=own).item())
random.seed(7 + k); generator = torch.Generator().manual_seed(7 + k)
other = numpy.random.RandomState(7 + k)
print(torch.initial_seed() - 7, random.Random(7 + k).random(), torch.rand(
    1, generator=generator).item(), other.rand(), numpy.random.Generator(
    numpy.random.PCG64(7 + k)).random())
for wrong in (lambda: seed(-1), lambda: seed(2**32), lambda: torch.manual_seed(2**64)):
    try:
        wrong()
        print("taken")
    except (ValueError, RuntimeError):
        pass
seed([1, 2]); seed(None); random.seed("text"); random.seed(); torch.manual_seed(2**64 - 1)
"""


def test_seeds_are_shifted(tmp_path):
    done = run(PYTHON, write(tmp_path, SEEDS), env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6, lines
    floats = re.compile(r"\d\.[\de-]+").findall
    for k, (first, second, third) in {3: lines[:3], 0: lines[3:]}.items():
        assert floats(first)[:3] == floats(first)[3:]  # a script that sets none has seed k
        *drawn, own = floats(second)
        assert third.split()[0] == str(k) and floats(third) == drawn
        assert (own == drawn[1]) == (k == 0)  # the script's own generator is as it was


# --------------------------------------------------------------------------------- the machine
@pytest.mark.parametrize(
    "files, cores",
    [
        ({}, 64),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/b/cpu.max": "150000 100000",
                "sys/fs/cgroup/a/cpu.max": "max 100000",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n1:name=systemd:/",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000",  # a container sees its own on top
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu:/j\n4:memory:/j\n0::/",
                "sys/fs/cgroup/cpu/j/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/j/cpu.cfs_period_us": "100000",
            },
            64,
        ),
    ],
)
def test_cores_of_the_machine_and_its_jobs(files, cores, tmp_path, monkeypatch):
    from whatif import machine

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert machine.cores(tmp_path) == cores


def test_cores_of_this_machine():
    from whatif import machine

    assert 1 <= machine.cores() <= os.cpu_count()


@pytest.mark.parametrize(
    "flags, only, emulates",
    [
        ("avx2 fma", None, True),
        ("avx2 avx512_bf16", None, False),
        ("asimd bf16", None, False),
        ("", None, False),  # not known
        ("avx2 fma", "amp,fused", False),  # the user wants it
    ],
)
def test_a_cpu_that_emulates_bfloat16_does_not_try_amp_unasked(
    flags, only, emulates, tmp_path, monkeypatch
):
    from whatif import machine, options, session, techniques

    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(flags and f"flags : {flags}\n")
    found = machine.has_bfloat16(tmp_path)
    monkeypatch.setattr(machine, "has_bfloat16", lambda: found)
    args = options.parse([*(["--only", only] if only else []), "-m", "train"])
    spec = session.Session(args, args.command, tmp_path, tmp_path).spec("turns")
    assert spec["emulates"] == emulates
    facts = dict(
        seen=[], models=[dict(role="trains")], device="cpu", emulates=spec["emulates"], files=[]
    )
    why = techniques.reasons(facts, ["amp bfloat16"])
    assert ("would emulate it" in why.get("amp bfloat16", "")) == emulates
