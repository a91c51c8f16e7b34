"""What running.sh runs: every training variant, one after the other, and the table of them."""

import argparse
import contextlib
import datetime
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

import report

ROOT = Path(__file__).resolve().parent
GRACE_SECONDS = 10


class Stopped(Exception):
    """Ctrl-C or a signal to end."""


def stop(process):
    """Ends `process` and all that it started, whatever process groups those are in."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
        process.terminate()  # torchrun ends its workers itself, given a moment
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        process.kill()
        for child in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(tree, GRACE_SECONDS)
    process.wait()


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_on_signals():
    """From now on Ctrl-C and the signals to end raise Stopped."""
    def stopped(number, frame):
        raise Stopped(signal.Signals(number).name)
    for number in SIGNALS:
        signal.signal(number, stopped)


def finish_despite_signals():
    """From now on they do nothing: the table is a second's work."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def folder_of_its_own(folder, driver):
    """Makes `folder` and keeps other runs out of it; where it cannot, exit 1. Returns the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except BlockingIOError:
        sys.exit(f"{driver}: error: another run is at work in {folder}: name another "
                 "--result_dir")
    except OSError as error:
        sys.exit(f"{driver}: error: {error}")


def compose(techniques, path):
    """Writes the script that has just these techniques to `path`. Raises RuntimeError."""
    if techniques:
        joined = subprocess.run([ROOT / "compose.sh", *techniques], capture_output=True)
        if joined.returncode:
            raise RuntimeError(joined.stderr.decode().strip().splitlines()[-1])
        path.write_bytes(joined.stdout)
    else:
        shutil.copyfile(ROOT / "src" / "train.py", path)


def command_of(script, processes):
    """How `script` is started: with torchrun when it joins a process group, else with Python."""
    if "init_process_group" not in script.read_text():
        return [sys.executable, str(script)]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={processes}", str(script)]


def error_line(log):
    """The line of a log that tells a reader most: a script's own error, or else the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if re.match(r"[\w.]+: error: ", line)]
    raised = [line for line in lines
              if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)]
    return (own + raised + lines[-1:])[0]


def run(techniques, options, folder, processes):
    """Runs one joined script. Returns (status, exit code, its record or {"error", "log"})."""
    script = folder / ("_".join(["train", *techniques]) + ".py")
    log = script.with_suffix(".log")
    for ending in (".py", ".log", ".json", ".pt"):  # of an earlier run
        script.with_suffix(ending).unlink(missing_ok=True)
    try:
        compose(techniques, script)
    except RuntimeError as error:
        log.write_text(f"{error}\n")
        return "fail", 1, {"error": str(error), "log": str(log)}
    command = [*command_of(script, processes), *options, "--result_dir", str(folder)]
    threads = {}
    if "torch.distributed.run" in command:  # the same cores as one process has
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
    with open(log, "wb") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, env={**threads, **os.environ},
                                   start_new_session=True)
        try:
            code = process.wait()
        except BaseException:
            stop(process)
            raise
    record = script.with_suffix(".json")
    if code or not record.exists():
        return "fail", code, {"error": error_line(log), "log": str(log)}
    return "ok", 0, json.loads(record.read_text())


def parse(arguments):
    """(options of the driver, options for the scripts), which come behind a --."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser("running.sh", usage=(
        "./running.sh EPOCHS [DATASET] [--result_dir DIR] [-- OPTION ...]"))
    parser.error = lambda message: parser.exit(2, f"{parser.usage}: {message}\n")

    def epochs(text):
        if not (text.isdecimal() and text.isascii()) or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
        return int(text)
    parser.add_argument("EPOCHS", type=epochs, help="passes over the training pictures")
    parser.add_argument("DATASET", type=Path, nargs="?", help="folder of train/ and val/<class>/*")
    parser.add_argument("--result_dir", "--result-dir", type=Path, default=ROOT / "results")
    return parser.parse_args(arguments[:split]), arguments[split + 1:]


def main():
    args, options = parse(sys.argv[1:])

    stop_on_signals()
    dataset = args.DATASET
    if dataset is None:
        dataset = ROOT / "data" / "digits"
        made = subprocess.run([sys.executable, ROOT / "make_dataset.py", "digits"])
        if made.returncode:
            sys.exit(made.returncode)
    folder = args.result_dir.resolve() / "running"
    lock = folder_of_its_own(folder, "running.sh")  # held until the process ends

    import torch  # seconds: after all that can be wrong with the arguments
    gpus = torch.cuda.device_count()
    processes = gpus or 2
    common = {"date": datetime.date.today().isoformat(), "processes": processes,
              "command": shlex.join(["./running.sh", *sys.argv[1:]])}
    options = ["--dataset", str(dataset.resolve()), "--epochs", str(args.EPOCHS), *options]
    cells = [(row, column) for row in report.ROWS for column in report.COLUMNS]
    rows, interrupted, started = [], "", time.monotonic()
    try:
        for i, (row, column) in enumerate(cells):
            techniques = report.ROWS[row] + report.COLUMNS[column]
            print(f"[{i + 1:>2}/{len(cells)}] {row:<6} {column:<12} ", end="", flush=True)
            status, code, details = run(techniques, options, folder, processes)
            if i == 0 and code == 2:  # wrong use is the same for every script
                print()
                print(details["error"], file=sys.stderr)
                sys.exit(2)
            rows.append({"row": row, "column": column, "techniques": techniques, "status": status,
                         **common, **details})
            left = (time.monotonic() - started) / (i + 1) * (len(cells) - i - 1)
            print(f"{report.summary(rows[-1], rows[0])}   ({left:.0f} s to go)", flush=True)
    except Stopped as reason:
        interrupted = f"Stopped by {reason} after {len(rows)} of {len(cells)} runs."
        print(f"\n{interrupted}", file=sys.stderr)
    finish_despite_signals()
    if rows:
        report.write(rows, args.result_dir / "running", interrupted)
        print()
        print((args.result_dir / "running.md").read_text())
    if interrupted:
        sys.exit(130)
    sys.exit(any(row["status"] == "fail" for row in rows))


if __name__ == "__main__":
    try:
        main()
    except Stopped as reason:
        print(f"running.sh: stopped by {reason}", file=sys.stderr)
        sys.exit(130)
