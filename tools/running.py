"""What running.sh runs: the training variants, the staircase of them, and their tables."""

import argparse
import concurrent.futures
import contextlib
import datetime
import fcntl
import importlib.metadata
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

import report

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 10
PAYS = 1.01  # a step of the staircase stays if it is so many times as fast as without it
POINTLESS = {0: ("DP", "cudnn"), 1: ("DP", "DDP")}  # what so many GPUs give nothing to do
WAITS = 0.2  # share of its time above which a step's wait for data hides what else may pay


class Stopped(BaseException):  # no library's `except Exception` is to take it
    """Ctrl-C or a signal to end."""


def cores():
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def packages():
    """{name: version} of what the scripts may use besides torch, if it is installed."""
    found = {}
    for each in importlib.metadata.distributions():
        if re.fullmatch(r"torchvision|lmdb|nvidia-dali-cuda\d+", each.name or ""):
            found.setdefault(each.name, each.version)  # Python imports the first, too
    return found


def session_of(pid):
    """The number of the session that a process belongs to; None if it has ended."""
    with contextlib.suppress(OSError):
        return os.getsid(pid)


def stop(process):
    """Ends `process`, which began a session, and all that it started, in whatever sessions."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
        sessions = {session_of(each.pid) for each in tree} | {process.pid}
        process.terminate()  # torchrun ends its workers itself, given a moment
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        process.kill()
        # who was started meanwhile has lost its parent, not its session
        sessions -= {session_of(0), None}
        tree += [each for each in psutil.process_iter() if session_of(each.pid) in sessions]
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


def conclude(rows, write, stem, interrupted):
    """Writes and prints what there is, despite signals: a second's work. Then ends the driver."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if rows:
        rows[-1] |= {"stopped": interrupted} if interrupted else {}
        write(rows, stem)
        print(f"\n{stem.with_suffix('.md').read_text()}")
    sys.exit(130 if interrupted else any(row["status"] == "fail" for row in rows))


def guarded(main, driver):
    """Runs `main`; a signal where nothing is there to show yet, or a full disk, ends in a line."""
    try:
        main()
    except Stopped as reason:
        print(f"{driver}: stopped by {reason}", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        sys.exit(f"{driver}: error: {error}")


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


def check_options(script, words, driver):
    """Has the script's own parser look at its options, before minutes go by; exit 2 if it minds."""
    try:
        parser = runpy.run_path(str(script))["build_parser"]()
    except (Exception, SystemExit):
        return  # a package is missing, or the script is the user's: running it will tell
    parser.prog = driver
    parser.parse_args(words)


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


def failure(code, log):
    """(status, exit code, details) of a run that did not end well.

    It is a skip where a package is missing, and where a script refuses by wrong use: the options
    are good, so this machine or data set cannot have the technique.
    """
    error = error_line(log)
    refused = code == 2 or re.search(r"exitcode *: 2 ", log.read_text(errors="replace"))  # torchrun
    status = "skip" if refused or ": pip install " in error else "fail"
    return status, code, {"error": error, "log": str(log)}


def section(text, name):
    """The part of a training script's main() under the heading `name`."""
    parts = re.split(r"\n    # -+ (\w+)\n", text)
    return parts[parts.index(name) + 1]


def scripts():
    """{technique: its script's text}, by name."""
    return {path.stem.removeprefix("train_"): path.read_text()
            for path in sorted((ROOT / "src").glob("train_*.py"))}


def groups():
    """{"data": [[technique, ...], ...], "compute": ..., "parallel": ...}: lists to choose one of.

    It follows from the scripts: compose.sh refuses to join what excludes each other; of those
    choices one is of data if each of it changes the data section, else of parallel. A script that
    profiles is no technique.
    """
    texts = scripts()
    names = [name for name, text in texts.items() if "torch.profiler" not in text]
    pairs = list(itertools.combinations(names, 2))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        refused = list(pool.map(lambda pair: subprocess.run(
            [ROOT / "compose.sh", *pair], capture_output=True).returncode == 2, pairs))
    choices = {name: [name] for name in names}
    for (one, other), excluded in zip(pairs, refused):
        if excluded and choices[one] is not choices[other]:
            joined = sorted(choices[one] + choices[other])
            choices.update(dict.fromkeys(joined, joined))
    data = section((ROOT / "src" / "train.py").read_text(), "data")
    result = {"data": [], "compute": [], "parallel": []}
    for choice in {id(choice): choice for choice in choices.values()}.values():
        of_data = all(section(texts[name], "data") != data for name in choice)
        result["compute" if len(choice) == 1 else "data" if of_data else "parallel"].append(choice)
    return result


def technique_options():
    """{option: techniques that have it}, of those options that the baseline has not."""
    base, owners = (ROOT / "src" / "train.py").read_text(), {}
    for name, text in scripts().items():
        for option in report.own_options(report.changes(text, base)[0]):
            owners.setdefault(option, []).append(name)
    return owners


def option_of(word):
    """'--compile_mode' of '--compile-mode=default'."""
    return "--" + word.split("=")[0][2:].replace("-", "_")


def options_of(techniques, options, owners):
    """`options` without those that belong to other techniques than these."""
    kept, passed = [], True
    for word in options:
        if word.startswith("--"):
            names = owners.get(option_of(word))
            passed = names is None or not set(names).isdisjoint(techniques)
        kept += [word] if passed else []
    return kept


def run(techniques, options, folder, processes, limit=None):
    """Runs one joined script, for at most `limit` seconds.

    Returns (status, exit code, its record or {"error", "log"}).
    """
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
        threads = {"OMP_NUM_THREADS": str(max(1, cores() // processes))}
    with open(log, "wb") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, env={**threads, **os.environ},
                                   start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            stop(process)
            return "skip", 0, {"error": f"given up after {limit:.0f} s", "log": str(log)}
        except BaseException:
            stop(process)
            raise
        finally:  # half a checkpoint of what was stopped
            script.with_suffix(".pt.part").unlink(missing_ok=True)
    record = script.with_suffix(".json")
    if code or not record.exists():
        return failure(code, log)
    idle = re.search(r"^\w+: (nothing to do: .*)", log.read_text(errors="replace"), re.MULTILINE)
    if idle:  # noise could make it a gain
        return "skip", 0, {"error": idle[1], "log": str(log)}
    return "ok", 0, json.loads(record.read_text())


def stairs_of(gpus, without):
    """{(technique, ...): group} in the staircase's order: each tuple is to choose one of.

    First loading; then several GPUs, where there are, since what comes after takes less time then
    (not for DataParallel alone, with which others cannot be had).
    """
    left_out, found = {*without, *POINTLESS.get(gpus, ())}, groups()
    early = gpus > 1 and "DDP" not in left_out
    order = ["data", *(["parallel", "compute"] if early else ["compute", "parallel"])]
    stairs = {tuple(name for name in choice if name not in left_out): group
              for group in order for choice in found[group]}
    stairs.pop((), None)
    return stairs


def due(stairs, tries, best):
    """Lists of techniques to be tried on top of the row `best`, the next one first.

    `stairs` is {(technique, ...): group}, each to choose one of, `tries` {technique: what its last
    try was on top of, whether it could be run}. A choice is due until one of it is kept: at first,
    and again when others have been kept since, as what did not pay may do so now; only what could
    not be run is not tried again. While steps wait for data, nothing that makes them shorter can
    show what it buys: then loading comes first.
    """
    found = []
    for names, group in stairs.items():
        left = [name for name in names if name not in tries
                or tries[name][1] and tries[name][0] != best["techniques"]]
        if left and not set(names) & set(best["techniques"]):
            found.append((group != "data", names[0] in tries, left))
    waits = best["status"] == "ok" and report.data_wait(best) > WAITS
    found.sort(key=lambda each: (each[0] if waits else False, each[1]))
    return [left for *_, left in found]


def parse(arguments):
    """(options of the driver, options for the scripts), which come behind a --."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser("running.sh", usage=(
        "./running.sh EPOCHS [DATASET] [--part cells|staircase|all] [--without TECHNIQUE] ... "
        "[--result_dir DIR] [-- OPTION ...]"))
    parser.error = lambda message: parser.exit(2, f"{parser.usage}: {message}\n")

    def epochs(text):
        if not (text.isdecimal() and text.isascii()) or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
        return int(text)
    parser.add_argument("EPOCHS", type=epochs, help="passes over the training pictures")
    parser.add_argument("DATASET", type=Path, nargs="?", help="folder of train/ and val/<class>/*")
    parser.add_argument("--part", choices=["cells", "staircase", "all"], default="all")
    parser.add_argument("--without", action="append", default=[], metavar="TECHNIQUE",
                        choices=list(scripts()))
    parser.add_argument("--result_dir", "--result-dir", type=Path, default=ROOT / "results")
    args = parser.parse_args(arguments[:split])
    if args.part == "staircase" and args.EPOCHS == 1:
        parser.error("the staircase takes 2 EPOCHS or more, since the first warms up")
    return args, arguments[split + 1:]


def main():
    args, options = parse(sys.argv[1:])

    stop_on_signals()
    owners = technique_options()
    for name in sorted({name for word in options for name in owners.get(option_of(word), [])}):
        check_options(ROOT / "src" / f"train_{name}.py", options_of([name], options, owners),
                      "running.sh")
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
              "packages": packages(), "command": shlex.join(["./running.sh", *sys.argv[1:]])}
    options = ["--dataset", str(dataset.resolve()), "--epochs", str(args.EPOCHS), *options]
    rows, results, interrupted, started = [], {}, "", time.monotonic()
    # the table's cells; the staircase starts from the first
    cells = [(row, column, report.ROWS[row] + report.COLUMNS[column])
             for row in report.ROWS for column in report.COLUMNS]
    cells = [cell for cell in cells if not set(cell[2]) & set(args.without)]
    cells = cells[:1] if args.part == "staircase" else cells
    stairs = {}
    if args.part != "cells" and args.EPOCHS > 1:
        stairs = stairs_of(gpus, args.without)
    count = len(cells) + sum(map(len, stairs))

    def attempt(row, column, techniques):
        """Runs a set of techniques, if it has not been run yet, and adds its row."""
        print(f"[{len(rows) + 1:>2}/{count}] {row:<9} {column:<14} ", end="", flush=True)
        key, begin = frozenset(techniques), time.monotonic()
        if key not in results:
            limit = 300 + 3 * results[frozenset()][1] if rows else None
            status, code, details = run(techniques, options_of(techniques, options, owners),
                                        folder, processes, limit)
            if not rows and code == 2:  # wrong use is the same for every script
                print()
                print(details["error"], file=sys.stderr)
                sys.exit(2)
            results[key] = {"techniques": techniques, "status": status, **common,
                            **details}, time.monotonic() - begin
        rows.append({"row": row, "column": column, **results[key][0]})
        left = (time.monotonic() - started) / len(rows) * (count - len(rows))
        print(f"{report.summary(rows[-1], rows[0])}   ({left:.0f} s to go)", flush=True)
        return rows[-1]

    try:
        for row, column, techniques in cells:
            attempt(row, column, techniques)
        best, tries = rows[0], {}
        while left := due(stairs, tries, best):
            names = left[0]
            tried = [attempt("staircase", f"+{name}", sorted([*best["techniques"], name]))
                     for name in names]
            tries |= {name: (best["techniques"], row["status"] == "ok")
                      for name, row in zip(names, tried)}
            top = max(tried, key=report.images_per_second)
            for row in tried:
                row["on"] = best["techniques"]
                row["kept"] = row is top and row["status"] == "ok" and (
                    report.images_per_second(row) >= PAYS * report.images_per_second(best))
            best = top if top["kept"] else best
            count = len(rows) + sum(map(len, due(stairs, tries, best)))
    except Stopped as reason:
        interrupted = f"Stopped by {reason} after {len(rows)} of {count} runs."
        print(f"\n{interrupted}", file=sys.stderr)
    conclude(rows, report.write, args.result_dir / "running", interrupted)


if __name__ == "__main__":
    guarded(main, "running.sh")
