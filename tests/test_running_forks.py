"""tools/forking.py: a run in a fork is like one that `python` starts, and torch is there at once."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

import forking
import runs
from helpers import processes_of, wait_until

TEXT = """
import atexit
import os
import sys
import threading

print("top")


def main():
    atexit.register(print, "at the end")
    threading.Timer(0.05, print, ["a thread"]).start()
    print(sys.argv, __name__, __file__, sys.path[0], os.getcwd(), sys.stdin.read() == "")
    print(os.getsid(0) == os.getpid(), os.environ["MORE"], sys.stdout.isatty())
    print("a warning", file=sys.stderr, flush=True)
    how = sys.argv[1]
    if how == "kill":
        sys.stdout.flush()
        os.kill(os.getpid(), 9)
    raise SystemExit(int(how)) if how.isdigit() else SystemExit(how) if how else ValueError("no")


if __name__ == "__main__":
    main()
"""
WORKERS = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.ones(100, 100) * index


if __name__ == "__main__":
    for method in sys.argv[1:]:
        loader = DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context=method)
        print(method, sum((batch @ batch).sum().item() for batch in loader))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "a script.py"
    path.write_text(TEXT)
    return path


@pytest.fixture
def server(script):
    made = forking.Server(script, os.environ | {"MORE": "more"})
    yield made
    made.process.kill()
    made.process.wait()


def outcome(script, how, server, log):
    """Return (exit status, lines of the log) of a run."""
    status, _ = runs.follow(
        [sys.executable, str(script), how],
        log,
        lambda line, seconds: None,
        {"MORE": "more"},
        server,
    )
    return status, log.read_text().splitlines()[1:]


@pytest.mark.parametrize("how", ["0", "3", "a word", "", "kill"])
def test_a_fork_does_what_a_process_does(how, script, server, tmp_path, capfd):
    plain = outcome(script, how, None, tmp_path / "plain")
    for again in "one", "two":
        forked = outcome(script, how, server, tmp_path / again)
        frames = [line for line in forked[1] if not re.match(r'  File ".*(forking|runpy)', line)]
        assert forked[0] == plain[0] and {*plain[1]} <= {*frames}
        assert frames[-1] == plain[1][-1]
    assert "top" not in capfd.readouterr().err  # the server only imports


def test_workers_of_a_fork_start_by_any_method(tmp_path):
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(WORKERS)
    server = forking.Server(script, os.environ)
    try:
        methods = ["fork", "forkserver", "spawn"]
        status, _ = runs.follow(
            [sys.executable, str(script), *methods], log, lambda line, seconds: None, server=server
        )
        told = log.read_text()
        assert status == 0, told
        total = sum(100.0**3 * index**2 for index in range(6))
        assert told.splitlines()[1:] == [f"{method} {total}" for method in methods]
    finally:
        server.process.kill()
        server.process.wait()


def test_imports_that_open_a_gpu_leave_every_run_a_process(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "opening.py").write_text(f"file = open({str(tmp_path / 'dev' / 'nvidia0')!r})")
    script = tmp_path / "train.py"
    script.write_text("import opening, os\nprint(os.getppid())")
    server = forking.Server(script, os.environ | {"PYTHONPATH": str(tmp_path)})
    assert outcome(script, "", server, tmp_path / "log") == (0, [str(os.getpid())])
    assert server.seconds is None
    server.process.kill()
    server.process.wait()


def test_a_run_that_is_stopped_ends_with_its_children_and_the_server_goes_on(
    script, server, tmp_path
):
    script.write_text(
        TEXT.replace(
            "    how = sys.argv[1]",
            """    how = sys.argv[1]
    if how == "sleep":
        import subprocess
        subprocess.run([sys.executable, "-c", "import time; time.sleep(988)", __file__])""",
        )
    )

    def stop(line, seconds):
        if any("sleep(988)" in " ".join(each.info["cmdline"]) for each in processes_of(script)):
            raise runs.GiveUp("enough")

    with pytest.raises(runs.GiveUp):
        runs.follow([sys.executable, str(script), "sleep"], tmp_path / "log", stop, server=server)
    assert processes_of(script) == [psutil.Process(server.process.pid)]
    assert outcome(script, "3", server, tmp_path / "again")[0] == 3
    server.process.send_signal(signal.SIGKILL)  # one that is gone is started again
    wait_until(lambda: server.process.poll() is not None)
    assert outcome(script, "4", server, tmp_path / "new")[0] == 4


def test_a_server_ends_with_its_driver(script, tmp_path):
    code = (
        "import forking, os, sys; server = forking.Server(sys.argv[1], os.environ);"
        "print(server.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, script],
        capture_output=True,
        text=True,
        cwd=runs.ROOT / "tools",
    )
    pid = int(done.stdout)
    wait_until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    )
