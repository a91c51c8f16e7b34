"""Fork runs of scripts from one process that has imported what they need, which takes seconds.

`python forking.py SCRIPT` is that process. It does the imports of SCRIPT and nothing else: it
computes nothing and never touches a GPU, so that its forks can. Each fork goes on as
`python SCRIPT OPTION ...` does, in a session of its own.
"""

import ast
import contextlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path


# ------------------------------------------------------------------------------ the driver's side
class Fork:
    """A run in a fork, with what the drivers use of a subprocess.Popen."""

    def __init__(self, answers):
        self.answers, self.pid, self.returncode = answers, int(answers.readline()), None

    def wait(self, timeout=None):
        """Return the exit status; raise TimeoutExpired if the run goes on."""
        if self.returncode is None:
            if not select.select([self.answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout)
            self.returncode = int(self.answers.readline() or 1)  # 1: the server was killed
        return self.returncode

    def poll(self):
        """Return the exit status; None if the run goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def terminate(self, number=signal.SIGTERM):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.terminate(signal.SIGKILL)


class Server:
    """The process that imports and forks. It runs one script at a time, and ends with the driver.

    `seconds` is how long its imports took, once a run has been forked.
    """

    def __init__(self, script, variables):
        self.script, self.variables = script, variables
        self.seconds = None
        self.launch()

    def launch(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(self.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # select() has to see every answer
            env=self.variables,
            start_new_session=True,  # Ctrl-C is the driver's
        )
        self.is_ready = False

    def start(self, words, log):
        """Start `python WORD ...` in a fork, its output at the end of the file `log`.

        Return None if the imports have opened a GPU: a fork could not use it.
        """
        if self.process.poll() is not None:
            self.launch()
        if not self.is_ready:
            told, self.is_ready = self.process.stdout.readline(), True
            self.seconds = float(told) if told.strip() else None
        if self.seconds is None:
            return None
        self.process.stdin.write(json.dumps([words, str(log)]).encode() + b"\n")
        return Fork(self.process.stdout)


# ------------------------------------------------------------------------------ the server's side
def import_as(script):
    """Do the imports at the top of a script; what fails is left for the script to tell."""
    for node in ast.parse(Path(script).read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            with contextlib.suppress(Exception):
                exec(compile(ast.Module([node], []), script, "exec"), {})


def has_opened_gpu():
    """Return whether this process has opened the device of a GPU."""
    opened = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    return any("/dev/nvidia" in path for path in opened)


def serve(script):
    """Fork for each request; return the request in a fork, and None at the end."""
    answers, began = os.dup(1), time.monotonic()
    os.dup2(2, 1)  # so that a library's words are no answers
    import_as(script)
    os.write(answers, b"\n" if has_opened_gpu() else b"%.3f\n" % (time.monotonic() - began))
    for line in sys.stdin:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of NumPy's idle threads
            child = os.fork()
        if not child:
            os.close(answers)
            return json.loads(line)
        os.write(answers, b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))
    return None


def begin(words, log):
    """Become `python WORD ...`, with the output at the end of the file `log`."""
    os.setsid()
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND)
    for number, file in enumerate((null, output, output)):
        os.dup2(file, number)
    os.close(null)
    os.close(output)
    sys.argv, sys.path[0] = words, os.path.dirname(words[0])
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if request := serve(sys.argv[1]):
        begin(*request)
