"""Run the training scripts alone and one on top of another: running.sh starts this."""

import argparse
import datetime
import itertools
import json
import math
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import report
from runs import (ROOT, GiveUp, Stopped, check_options, conclude, cores, failure, follow,
                  folder_of_its_own, guarded, machine, say, show, stop_on_signals)

PAYS = 1.01  # a technique is kept if training is so many times as fast with it
WAITS = 0.2  # from this share of its time on, a step's wait for data hides what else may pay
SLOW = 3  # a run so many times slower than the baseline is given up ...
SLOW_STEPS, SLOW_SECONDS = 3, 5  # ... after so many steps and seconds beyond the first step
FIRST = ("channels_last", "amp", "compile", "cache", "DALI")  # these usually pay most
MINUTES = 5  # of the whole without a DATASET
RUNS = 15  # with a limit of time, a run of the baseline takes at most this part of it
LEAST_STEPS = 5  # an epoch is not made shorter than this
CLOSING_SECONDS = 15  # for the table and the chart at the end
TIME = "time: it does not fit into the {:g} minutes (--minutes)"


def compose(techniques, path):
    """Write the script with just these techniques to `path`; RuntimeError if they do not join."""
    if techniques:
        joined = subprocess.run([ROOT / "compose.sh", *techniques], capture_output=True)
        if joined.returncode:
            raise RuntimeError(joined.stderr.decode().strip().splitlines()[-1])
        path.write_bytes(joined.stdout)
    else:
        shutil.copyfile(ROOT / "src" / "train.py", path)


def command_of(script, processes):
    """Return the words that start `script`: torchrun's if it joins a process group, or Python's."""
    if "init_process_group" not in script.read_text():
        return [sys.executable, str(script)]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={processes}", str(script)]


def scripts():
    """Return {technique: its script's text}, by name."""
    return {path.stem.removeprefix("train_"): path.read_text()
            for path in sorted((ROOT / "src").glob("train_*.py"))}


def groups():
    """Return {"data": [[technique, ...], ...], "compute": ..., "parallel": ...}: choose one a list.

    Techniques that write at the same place exclude each other. If all of such a choice change the
    data section, it is one of data, else a parallel one. A script that profiles is no technique.
    """
    def section(text):
        parts = re.split(r"\n    # -+ (\w+)\n", text)
        return parts[parts.index("data") + 1]
    texts, base = scripts(), ROOT / "src" / "train.py"
    choices = {name: [name] for name, text in texts.items() if "torch.profiler" not in text}
    for one, other in itertools.combinations(choices, 2):
        pair = [ROOT / "src" / f"train_{name}.py" for name in (one, other)]
        merged = subprocess.run(["git", "merge-file", "-p", pair[0], base, pair[1]],
                                capture_output=True)
        if merged.returncode and choices[one] is not choices[other]:
            joined = sorted(choices[one] + choices[other])
            choices.update(dict.fromkeys(joined, joined))
    result = {"data": [], "compute": [], "parallel": []}
    for choice in {id(choice): choice for choice in choices.values()}.values():
        of_data = all(section(texts[name]) != section(base.read_text()) for name in choice)
        result["compute" if len(choice) == 1 else "data" if of_data else "parallel"].append(choice)
    return result


def reasons_to_leave_out(here):
    """Return {technique: why the default leaves it out} on the machine `here`."""
    reasons = {}
    if not here["gpus"]:
        reasons = {"DP": "it does nothing without GPUs", "cudnn": "it does nothing without a GPU"}
        if here["bfloat16"] is False:
            reasons["amp"] = "this CPU has no bfloat16, so PyTorch would emulate it"
    elif here["gpus"] == 1:
        reasons = dict.fromkeys(("DP", "DDP"), "it does nothing on one GPU")
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        reasons["compile"] = "it needs a C++ compiler, such as g++"
    return reasons


def stairs_of(gpus, left_out):
    """Return [(group, [technique, ...]), ...]: choose one a list; the most promising come first.

    With several GPUs that is DDP: it also shortens the runs after it.
    """
    stairs = [(group, [name for name in choice if name not in left_out])
              for group, choices in groups().items() for choice in choices]

    def rank(name):
        return FIRST.index(name) if name in FIRST else len(FIRST)
    for _, names in stairs:
        names.sort(key=rank)
    return sorted((each for each in stairs if each[1]), key=lambda each: (
        (each[0] == "parallel") == (gpus < 2), rank(each[1][0])))


def due(stairs, tries, best):
    """Return the lists of techniques to try on top of the row `best`, the next one first.

    `tries` is {technique: (the techniques it was last tried on, whether it ran)}. A choice is due
    until one of it is kept: once, and again after others have been kept, since it may pay then.
    While steps wait for data, nothing else can show what it gains: then data comes first.
    """
    found = []
    for group, names in stairs:
        left = [name for name in names if name not in tries
                or tries[name][1] and tries[name][0] != best["techniques"]]
        if left and not set(names) & set(best["techniques"]):
            found.append((names[0] in tries, group != "data", left))
    waits = best["status"] == "ok" and report.data_wait(best) > WAITS
    found.sort(key=lambda each: (each[0], each[1] if waits else False))
    return [left for *_, left in found]


def technique_options():
    """Return {option: techniques that have it} of the options that the baseline has not."""
    src, owners = ROOT / "src", {}
    for name in scripts():
        for option in report.own_options(src / "train.py", src / f"train_{name}.py"):
            owners.setdefault(option, []).append(name)
    return owners


def options_of(techniques, options, owners):
    """Return `options` without those that belong to other techniques than these."""
    kept, passed = [], True
    for word in options:
        if word.startswith("--"):
            names = owners.get(word.split("=")[0])
            passed = names is None or not set(names).isdisjoint(techniques)
        kept += [word] if passed else []
    return kept


def too_slow(progress, baseline):
    """Return how many times slower than the record `baseline` a run is; None if not too slow."""
    pace, steps, seconds = progress.pace()
    if steps < SLOW_STEPS or seconds < SLOW_SECONDS:
        return None
    times = baseline["images_per_second"] / (pace * baseline["options"]["batch_size"])
    return times if times > SLOW else None


def run(techniques, options, folder, processes, limit, judge=None):
    """Run one joined script for at most `limit` seconds; `judge(progress)` may raise GiveUp.

    Return (status, exit code, its record or {"error"}, with "log" if it failed).
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
    epochs, started = int(options[options.index("--epochs") + 1]), time.monotonic()
    threads = {}
    if "torch.distributed.run" in command:  # all processes together use the cores that one has
        threads = {"OMP_NUM_THREADS": str(max(1, cores() // processes))}

    def watch(progress, line):
        seconds = time.monotonic() - started
        if line and re.match(r"epoch \d+/", line) and not sys.stdout.isatty():
            say(f"        {line}")
        if line and (idle := re.match(r"\w+: (no .* can be changed)", line)):
            raise GiveUp(idle[1])
        if seconds > limit:
            raise GiveUp(f"time: given up after {seconds:.0f} s")
        if judge:
            judge(progress)
        pace, *_ = progress.pace()
        told = progress.estimate(epochs)
        show(f"        {seconds:.0f} s  " + (
            f"epoch {progress.epoch}/{epochs}  step {progress.step}/{progress.steps}"
            if progress.epoch else "starting") + (f"  {pace:.1f} steps/s" if pace else "") + (
            f"  {max(0, told[0] - seconds):.0f} s left" if told else ""))
    try:
        code = follow(command, log, watch, threads)
    except GiveUp as reason:
        return "skip", 0, {"error": str(reason)}
    finally:  # half a checkpoint of a run that was stopped
        script.with_suffix(".pt.part").unlink(missing_ok=True)
    record = script.with_suffix(".json")
    if code or not record.exists():
        return failure(code, log)
    return "ok", 0, json.loads(record.read_text())


def parse(arguments):
    """Return (options of the driver, options for the scripts); the latter come behind a --."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser("running.sh", allow_abbrev=False, usage=(
        "./running.sh EPOCHS [DATASET] [--minutes N] [--part cells|staircase|all] [--with TECHNIQUE"
        "] ... [--without TECHNIQUE] ... [--result_dir DIR] [-- OPTION ...]"))
    parser.error = lambda message: parser.exit(2, f"{parser.usage}: {message}\n")

    def epochs(text):
        if not (text.isdecimal() and text.isascii()) or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
        return int(text)

    def minutes(text):
        if not re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII) or not float(text):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return float(text)
    names = list(scripts())
    parser.add_argument("EPOCHS", type=epochs)
    parser.add_argument("DATASET", type=Path, nargs="?")
    parser.add_argument("--minutes", type=minutes)
    parser.add_argument("--part", choices=["cells", "staircase", "all"], default="all")
    parser.add_argument("--with", dest="wanted", action="append", default=[], choices=names)
    parser.add_argument("--without", action="append", default=[], choices=names)
    parser.add_argument("--result_dir", type=Path, default=ROOT / "results")
    args, options = parser.parse_args(arguments[:split]), arguments[split + 1:]
    if args.part == "staircase" and args.EPOCHS == 1:
        parser.error("the staircase needs 2 EPOCHS or more, because the first one warms up")
    for word in options:  # argparse takes the start of a name for the name
        for own in ("--epochs", "--dataset", "--result_dir"):
            if len(word) > 2 and own.startswith(word.split("=")[0]):
                parser.error(f"{word} cannot stand behind the --: EPOCHS, DATASET and --result_dir "
                             "before it set the same for all scripts")
    return args, options


def main():
    started = time.monotonic()
    args, options = parse(sys.argv[1:])
    stop_on_signals()
    owners = technique_options()
    for name in sorted({name for word in options for name in owners.get(word.split("=")[0], [])}):
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

    # what to run, and for how long
    here = machine()
    processes = here["gpus"] or 2
    left_out = {name: why for name, why in reasons_to_leave_out(here).items()
                if name in scripts() and name not in args.wanted}
    common = {"date": datetime.date.today().isoformat(), "machine": here, "processes": processes,
              "command": shlex.join(["./running.sh", *sys.argv[1:]]), "left_out": left_out}
    without = {*left_out, *args.without}
    cells = [(row, column, report.ROWS[row] + report.COLUMNS[column])
             for row in report.ROWS for column in report.COLUMNS]
    cells = [cell for cell in cells if {*cell[2]} <= {*scripts()} - without]
    baseline, cells = cells[0], [] if args.part == "staircase" else cells[1:]
    stairs = []
    if args.part != "cells" and args.EPOCHS > 1:
        stairs = stairs_of(here["gpus"], without)
    minutes = args.minutes or (math.inf if args.DATASET else MINUTES)
    deadline = started + 60 * minutes - CLOSING_SECONDS
    options = ["--dataset", str(dataset.resolve()), "--epochs", str(args.EPOCHS), *options]
    for name, why in left_out.items():
        say(f"Left out: {name}, because {why}. --with {name} tries it.")
    if args.part == "all" and args.EPOCHS == 1:
        say("No staircase: it needs 2 EPOCHS or more, because the first one warms up.")
    if minutes < math.inf:
        say(f"This takes at most {minutes:g} minutes.")

    rows, results, shorter, interrupted = [], {}, [], ""
    others = len(cells) + sum(len(names) for _, names in stairs)
    count = 1 + others + bool(others)
    took = [0.0]  # seconds of the runs that ended well, start included

    def time_left():
        """Return the seconds left, less those kept for the baseline's last run."""
        return deadline - time.monotonic() - 1.5 * statistics.median(took)

    def shorten(progress):
        """Give up a baseline that would take too long, and add --steps for all runs."""
        most = 60 * minutes / RUNS
        whole, start = progress.estimate(args.EPOCHS) or (0, 0)
        if whole > most:
            steps = max(LEAST_STEPS, int(progress.steps * (most - start) / (whole - start)))
            if steps < progress.steps:
                shorter.extend(["--steps", str(steps)])
                raise GiveUp(f"a run would take {whole:.0f} s of the {minutes:g} minutes, so all "
                             f"epochs end after {steps} steps (--steps)")

    def judge(techniques):
        """Return what gives up a run of these techniques when it is too slow."""
        def give_up_if_slow(progress):
            if times := too_slow(progress, rows[0]):
                emulated = "amp" in techniques and not here["gpus"] and here["bfloat16"] is False
                raise GiveUp(f"{times:.0f} times slower" + (
                    " on this CPU, which has no bfloat16" if emulated else " than the baseline"))
        return give_up_if_slow if techniques and rows[0]["status"] == "ok" else None

    def attempt(row, column, techniques):
        """Run a set of techniques, if it has not been run yet, and add its row."""
        say(f"[{len(rows) + 1:>2}/{count}] {row} {column}")
        key, begin, is_last = frozenset(techniques), time.monotonic(), row == "again"
        result = None if is_last else results.get(key)
        if not result:
            limit = deadline - begin if is_last else time_left()
            limit = min(limit, 300 + 3 * took[0])
            words = options_of(techniques, options, owners)
            if not rows:
                status, code, details = run([], words, folder, processes, time_left() / 2, shorten)
                if shorter:
                    say(f"        {details['error']}")
                    options.extend(shorter)
                    begin = time.monotonic()
                    status, code, details = run([], words + shorter, folder, processes,
                                                time_left() / 2)
                took.clear()
            elif limit < 0.8 * statistics.median(took):
                status, code, details = "skip", 0, {"error": TIME.format(minutes)}
            else:
                status, code, details = run(techniques, words, folder, processes, limit,
                                            judge(techniques))
            if not rows and code == 2:  # wrong use is the same for every script
                print(details["error"], file=sys.stderr)
                sys.exit(2)
            if status == "ok" or not rows:
                took.append(time.monotonic() - begin)
            result = {"techniques": techniques, "status": status, **common, **details}
            results.setdefault(key, result)
        rows.append({"row": row, "column": column, **result})
        say(f"        {report.summary(rows[-1], rows[0])}")
        return rows[-1]

    try:
        best, tries = attempt(*baseline), {}
        while left := due(stairs, tries, best):
            names = left[0]
            if names[0] in tries and time_left() < statistics.median(took):
                break  # what is left has been tried before
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
            count = len(rows) + sum(map(len, due(stairs, tries, best))) + len(cells) + 1
        for cell in cells:
            attempt(*cell)
        if len(results) > 1:
            attempt("again", "baseline", [])
    except Stopped as reason:
        interrupted = f"Stopped by {reason} after {len(rows)} of {count} runs."
        say(interrupted)
    conclude(rows, report.write, args.result_dir / "running", interrupted)


if __name__ == "__main__":
    guarded(main, "running.sh")
