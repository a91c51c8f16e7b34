"""Run the training scripts alone and one on top of another: running.sh starts this."""

import dataclasses
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import calibration
import compose
import forking
import records
import report
from options import Parser, split
from ratios import CLEAR, WAITS, compare, doubt_of, is_settled, seems_to_gain
from records import Training, Verdict
from runs import (
    ROOT,
    GiveUp,
    Stopped,
    check_options,
    conclude,
    failure,
    folder_of_its_own,
    follow,
    gpu_gigabytes,
    guarded,
    launched,
    need_packages,
    read_record,
    refuse,
    say,
    setting,
    show,
    variables_of,
)
from whatif import search, stats
from whatif.search import Step, Turn
from whatif.stats import ADVISED, Estimate

USAGE = (
    "./running.sh EPOCHS [DATASET] [--minutes N] [--runs N] [--part cells|staircase|all] "
    "[--with TECHNIQUE] ... [--without TECHNIQUE] ... [--result_dir DIR] [-- OPTION ...]"
)
ABOUT = """Run every training script on this machine, alone and one on top of another, and print what
each gains. What cannot gain here is left out. Writes running.md, .json and .png in DIR; the scripts,
their records and logs are in DIR/running."""
EVERY = 5  # after so many runs the baseline runs again
SLOW, SLOW_SECONDS = 3, 10  # after its first epoch a run may take 3 times the baseline's seconds
FIRST_SECONDS = 300  # its first epoch may take this longer (it compiles, decodes), or with a ...
FIRST_SHARE = 5  # ... limit of time this part of it, if that is less
FIRST = ("channels_last", "amp", "cache", "DALI", "compile")  # these usually pay most
MINUTES = 5  # of the whole without a DATASET
GPU_WORKLOAD = ("--model", "resnet50", "--image_size", "224")  # without a DATASET, and ...
GPU_BATCHES = {30: 256, 15: 128, 7: 64, 0: 32}  # {GB of the smallest GPU, at least: images}
CLOSING_SECONDS = 15  # for the table and the chart at the end
QUICK = {  # what a quick table, without a DATASET on a GPU, leaves out
    "DALI": "it starts slowly, and cache holds all of the few drawn digits",
    "LMDB": "it is for many files on a slow disk, and the drawn digits are few",
    "cudnn": "it starts slowly, and no table of results/ shows a clear gain",
    "graphs": "it is for steps that wait for the host, and these compute",
}
GRID = "more runs of each technique take its time"  # why a quick table has no grid
VERDICTS = {
    stats.Verdict.FASTER: Verdict.FASTER,
    stats.Verdict.SLOWER: Verdict.SLOWER,
    stats.Verdict.NOT_SIGNIFICANT: Verdict.NO_DIFFERENCE,
    stats.Verdict.OPEN: Verdict.NOT_CLEAR,
}


def groups():
    """Return {"data": [[technique, ...], ...], "compute": ..., "parallel": ...}.

    A set has at most one technique of each list.

    Techniques that exclude each other are one list: one of data if all of them change the data
    section, a parallel one if any wraps net in DataParallel. A script that profiles is no technique.
    """
    result = {"data": [], "compute": [], "parallel": []}
    texts = {name: compose.script(f"train_{name}") for name in compose.TECHNIQUES}
    for choice in compose.choices(name for name in texts if "torch.profiler" not in texts[name]):
        of_data = len(choice) > 1 and all(
            "# new #" in re.search(r" -+ data\n.*? -----", texts[name], re.DOTALL)[0]
            for name in choice
        )
        wraps = any("DataParallel(" in texts[name] for name in choice)
        result["data" if of_data else "parallel" if wraps else "compute"].append(choice)
    return result


def reasons_to_leave_out(here, is_quick=False):
    """Return {technique: why the default leaves it out} on the machine `here`."""
    reasons = (QUICK if is_quick else {}) | {
        "progressive": "it trains differently: compare accuracy and training seconds"
    }
    if not here["gpus"]:
        reasons |= {"DP": "it does nothing without GPUs"}
        reasons |= dict.fromkeys(("cudnn", "graphs"), "it does nothing without a GPU")
        if not here["bfloat16"]:
            reasons["amp"] = "this CPU has no bfloat16, so PyTorch would emulate it"
    elif here["gpus"] == 1:
        reasons |= dict.fromkeys(("DP", "DDP"), "it does nothing on one GPU")
    if not any(
        map(shutil.which, ("gcc", "clang", "cc") if here["gpus"] else ("g++", "clang++", "c++"))
    ):
        reasons["compile"] = "it needs a compiler: of C on a GPU, of C++ on a CPU"
    return reasons


def stairs_of(gpus, allowed):
    """Return [(group, [technique, ...]), ...] with the most promising lists first.

    With several GPUs that is DDP: it also shortens the runs after it.
    """

    def rank(name):
        return FIRST.index(name) if name in FIRST else len(FIRST)

    stairs = [
        (group, sorted((name for name in choice if name in allowed), key=rank))
        for group, choices in groups().items()
        for choice in choices
    ]
    return sorted(
        (each for each in stairs if each[1]),
        key=lambda each: ((each[0] == "parallel") == (gpus < 2), rank(each[1][0])),
    )


def step_of(row):
    """Return what the last row of a technique says, as the search asks for it."""
    on = tuple(row.on) if row.on is not None else None
    if row.status != "ok":
        return Step(on, failed=True)
    if row.ratio is None:
        return Step(on, rate=row.images_per_second)
    ratio, spread = row.ratio, row.spread
    return Step(on, Estimate(ratio, ratio - spread, ratio + spread, row.n), row.settled)


def due(stairs, last, best):
    """Return [(Turn, technique), ...]: what to do next on top of the row `best`, the best first.

    `last` is {technique: its last row}. While steps wait for data, data comes first: nothing else
    can show what it gains. Of what gains, compile comes last, because it starts slowest.
    """
    choice = {name: place for place, (_, names) in enumerate(stairs) for name in names}
    waits = best.status == "ok" and report.data_wait(best) > WAITS
    data = {name for group, names in stairs if group == "data" for name in names}
    return search.due(
        tuple(best.techniques),
        list(choice),
        {name: step_of(row) for name, row in last.items()},
        choice.get,
        seems_to_gain,
        first=data if waits else (),
        last=("compile",),
    )


def options_of(techniques, options):
    """Return `options` without those that belong only to other techniques."""
    own = {
        name: {*report.own_options(ROOT / "src" / "train.py", ROOT / "src" / f"train_{name}.py")}
        for name in compose.TECHNIQUES
    }
    others = set().union(*own.values()) - set().union(*(own[name] for name in techniques))
    kept, passed = [], True
    for word in options:
        if word.startswith("--"):
            passed = word.split("=")[0] not in others
        if passed:
            kept.append(word)
    return kept


def under_way(lines, seconds, epochs):
    """Return the line that a terminal shows: `lines` are the seconds at the end of each epoch."""
    text = f"        {seconds:.0f} s  epoch {min(len(lines) + 1, epochs)}/{epochs}"
    if len(lines) > 1:
        each = (lines[-1] - lines[0]) / (len(lines) - 1)
        text += f"  {max(0, lines[-1] + (epochs - len(lines)) * each - seconds):.0f} s left"
    return text


def run(techniques, options, folder, processes, check, server=None):
    """Run one joined script, in a fork of `server` if it can.

    `check(lines, seconds)` may raise GiveUp; `lines` are the seconds at the end of each epoch.
    Return (status, exit code, its record with "lines", or {"error"} with "log" if it failed).
    """
    script = folder / ("_".join(["train", *techniques]) + ".py")
    log, record = script.with_suffix(".log"), script.with_suffix(".json")
    for path in (log, record, script.with_suffix(".pt")):  # of an earlier run
        path.unlink(missing_ok=True)
    try:
        script.write_text(compose.join(techniques), *compose.UTF8)
    except RuntimeError as error:
        log.write_text(f"{error}\n")
        return "fail", 1, {"error": str(error).splitlines()[0], "log": str(log)}
    words, variables = launched(script, processes)
    if variables or "spawn" in script.read_text():
        server = None
    epochs, lines = int(options[options.index("--epochs") + 1]), []

    def watch(line, seconds):
        if line and line.startswith("epoch "):
            lines.append(seconds)
            if not sys.stdout.isatty():
                say(f"        {line}")
        check(lines, seconds)
        show(under_way(lines, seconds, epochs))

    command = [*words, *options, "--result_dir", str(folder)]
    try:
        code, seconds = follow(command, log, watch, variables, server)
    except GiveUp as reason:
        return "skip", 0, {"error": str(reason)}
    finally:  # half a checkpoint of a run that was stopped
        script.with_suffix(".pt.part").unlink(missing_ok=True)
    if code or not record.exists():
        return failure(code, log)
    return "ok", 0, read_record(record) | {"lines": lines, "wall_seconds": seconds}


def giving_up(limit, minutes, epochs, usual, rest):
    """Return a function that gives up a run after `limit` seconds, or if it is hopeless.

    The baseline took `usual` seconds, `rest` of them after its first epoch; 0 if that is unknown.
    """
    allowed = SLOW * usual + min(FIRST_SECONDS, 60 * minutes / FIRST_SHARE)

    def check(lines, seconds):
        if seconds > limit:
            raise GiveUp(
                f"time: cut off after {seconds:.0f} s, so that all fits into "
                f"{minutes:g} minutes (--minutes)"
            )
        since = seconds - lines[0] if lines else 0
        is_slow = since > max(SLOW * rest, SLOW_SECONDS) if lines else seconds > allowed
        if usual and is_slow:
            raise GiveUp(
                f"given up after {seconds:.0f} s, in epoch {len(lines) + 1} of "
                f"{epochs}: all of the baseline took {usual:.0f} s"
            )

    return check


def as_run(number, details, lines, seconds):
    """Return what a row keeps of each of its runs."""
    return dict(
        number=number,
        rates=report.speeds(Training.read(details)),
        wall_seconds=seconds,
        parts=records.Parts.written(details, lines, seconds),
        images_per_second=details["images_per_second"],
        warmup_seconds=details["warmup_seconds"],
    )


class Table:
    """The rows of one table, measured one after another, and the time left for more."""

    def __init__(
        self, options, epochs, runs, minutes, deadline, folder, common, server=None, share=1
    ):
        self.share = share  # of the time limit: the baseline's run takes at most this part
        self.options, self.epochs, self.folder, self.common = options, epochs, folder, common
        self.runs, self.minutes, self.deadline, self.server = runs, minutes, deadline, server
        self.rows, self.results = [], {}
        self.took = [0.0]  # seconds of each run that ended well, start included
        self.rest = 0.0  # of the baseline's first run: seconds after its first epoch
        self.count = 0  # of all rows, those of the staircase that are to come included
        self.reserved = 0  # runs that are to come before a second try or run of a technique

    def time_left(self):
        """Return the seconds left, less those kept for the baseline's last run."""
        return self.deadline - time.monotonic() - 1.5 * self.took[0]

    def has_time(self, runs):
        """Return whether there is time for so many runs besides those that are reserved."""
        return self.time_left() > (self.reserved + runs) * statistics.median(self.took)

    def run(self, techniques, options, epochs, limit):
        """Run a set of techniques for at most `limit` seconds; return what `run` returns."""
        words = ["--epochs", str(epochs), *options_of(techniques, options)]
        check = giving_up(limit, self.minutes, epochs, self.took[0], self.rest)
        return run(techniques, words, self.folder, self.common["processes"], check, self.server)

    def calibrate(self):
        """Set --steps or the epochs of all runs, if they would be too long or too short."""
        is_compared = 1 not in (self.epochs, self.runs)
        if self.minutes == math.inf and not is_compared:
            return
        say("Timing some steps of train.py.")
        self.options, self.epochs, self.common["validated"], told = calibration.shorten(
            lambda options: self.run([], options, 2, self.time_left() / 2),
            self.options,
            self.folder,
            (self.epochs, self.minutes, is_compared, self.share),
        )
        if told:
            say(f"        {told}")

    def measure(self, techniques):
        """Run a set of techniques if the time allows; return what `run` returns, with "runs"."""
        begin, first = time.monotonic(), self.rows[0] if self.rows else None
        limit = self.deadline - begin if first and not techniques else self.time_left()
        if not first:
            limit /= 2
        elif limit < 0.8 * min(self.took):
            told = f"time: it does not fit into the {self.minutes:g} minutes (--minutes)"
            return "skip", 0, {"error": told}
        status, code, details = self.run(techniques, self.options, self.epochs, limit)
        if status != "ok":
            return status, code, details
        seconds, lines = details.pop("wall_seconds"), details.pop("lines")
        if first:
            self.took.append(seconds)
        else:
            if self.server:
                self.common["import_seconds"] = self.server.seconds
            self.took, self.rest = [seconds], seconds - (lines or [seconds])[0]
        details["runs"] = [as_run(len(self.took), details, lines, seconds)]
        return status, code, details

    def repeat(self, row):
        """Measure the set of a row once more; return whether that ended well."""
        (status, _, details), found = self.measure(row.techniques), {}
        if status == "ok":
            row.runs += details["runs"]
            found["images_per_second"] = statistics.median(
                each["images_per_second"] for each in row.runs
            )
        elif status == "fail" or row is self.rows[0]:  # without it no ratio can be trusted
            found["failed"] = report.problem(Training.read(details | {"status": status}))
        for each in (*self.rows, *self.results.values()):  # all rows of this set
            if each.runs is row.runs:
                each.update(**found)
        say(
            f"        again {' '.join(row.techniques) or 'the baseline'}: "
            + report.summary(
                Training.read(row.written() | details | {"status": status}), self.rows[0]
            )
        )
        return status == "ok"

    def attempt(self, row, column, techniques):
        """Measure a set of techniques, unless it has been measured before, and add its row."""
        base = self.rows[0] if self.rows else None
        if (
            base
            and base.status == "ok"
            and self.runs > 1
            and (len(self.took) >= base.runs[-1]["number"] + EVERY and self.has_time(EVERY))
        ):
            self.repeat(base)
        say(f"[{len(self.rows) + 1:>2}/{self.count}] {row} {column}")
        key = frozenset(techniques)
        if key not in self.results:
            status, code, details = self.measure(techniques)
            if not base and code == 2:  # wrong use is the same for every script
                refuse(details["error"])
            about = dict(techniques=techniques, status=status)
            self.results[key] = Training.read(about | self.common | details)
        self.rows.append(dataclasses.replace(self.results[key], row=row, column=column))
        say(f"        {report.summary(self.rows[-1], self.rows[0])}")
        return self.rows[-1]

    def judge(self, row):
        """Add to a row how many times as fast as the set before it is, by all runs until now."""
        before = self.results[frozenset(row.on)]
        if row.status == before.status == "ok":
            n = len(row.runs)
            sets = [each.runs for each in self.results.values() if each.status == "ok"]
            found = compare(row.runs, before.runs, doubt_of(sets))
            settled = is_settled(found) or n >= self.runs
            row.update(ratio=found.speedup, spread=found.spread, n=n, settled=settled)
            if row.verdict is not Verdict.TRIED_AGAIN:
                told = VERDICTS[stats.verdict(found, CLEAR, ADVISED)]
                row.verdict = told if settled or n > 1 else Verdict.RAN_ONCE

    def tell(self, row):
        """Judge a row, and say what came out."""
        self.judge(row)
        if row.ratio is not None:
            say(f"        {report.gain(row)} of the set before: {row.verdict.value}")

    def confirm(self):
        """Run what was kept again, the last set first, beside the set that it was added to.

        Each set has two runs then, or up to `runs` if it is not settled.
        """
        kept = [row for row in reversed(self.rows) if row.kept]
        self.reserved = 0
        for n in range(2, self.runs + 1):
            fewer = [
                row
                for row in kept
                if len(row.runs) < n and not row.failed and (n == 2 or row.settled is False)
            ]
            sets = [each for row in fewer for each in (row.techniques, row.on)]
            for row in (self.rows[0], *kept):
                if row.techniques in sets and row.status == "ok":
                    self.repeat(row)
            for row in kept:
                self.judge(row)

    def close(self):
        """Run the baseline once more, to see if it has moved; judge each row by all runs."""
        if self.rows[0].status == "ok" and len(self.rows) > 1:
            self.repeat(self.rows[0])
        for row in self.rows:
            if row.on is not None:
                self.judge(row)

    def climb(self, stairs, cells):
        """Add technique after technique to the baseline; return the row of the last set."""
        best, last = self.rows[0], {}
        self.reserved = sum(len(names) for _, names in stairs) + len(cells)
        if stairs and best.status == "ok" and self.runs > 1 and self.has_time(1):
            self.repeat(best)  # how much do runs differ on this machine?
        while True:
            for row in last.values():
                if row.on == best.techniques:
                    self.judge(row)
            steps, on = due(stairs, last, best), best.techniques
            new = [name for _, name in steps if name not in last]
            first_runs = len(new) + sum(frozenset(cell[2]) not in self.results for cell in cells)
            self.reserved = first_runs + len(on) + bool(on)  # what was kept runs again
            if not self.has_time(2):  # only first runs on this set, and what gains
                self.reserved = first_runs + 2 * bool(on)
                steps = [
                    (turn, name)
                    for turn, name in steps
                    if name in new
                    or (turn is Turn.GAINS if last[name].on == on else self.has_time(1))
                ]
            self.count = len(self.rows + cells) + max(len(new), bool(steps))
            if not steps:
                return best
            turn, name = steps[0]
            row = last.get(name)
            if not row or row.on != on:  # one run
                if row and row.verdict is Verdict.RAN_ONCE:
                    row.verdict = Verdict.TRIED_AGAIN
                last[name] = row = self.attempt("staircase", f"+{name}", sorted([*on, name]))
                row.update(on=on, kept=False)
                self.tell(row)
            elif turn is Turn.GAINS:  # most of all
                row.kept, best = True, row
                say(f"        kept: {' '.join(row.techniques)}")
                self.rows[1:] = sorted(self.rows[1:], key=lambda row: (len(row.on), row.kept))
            elif self.repeat(best) and self.repeat(row):  # a turn
                self.tell(row)
            else:
                last[name] = Training(status="skip")  # not again


def least_sure(row):
    """Return what sorts rows: those with less than three runs, then those with the widest ±."""
    return min(len(row.runs), 3), -row.spread / row.ratio


class TimedTable(Table):
    """A table with a limit of time."""

    def fits(self, row):
        """Return whether there is time to run the set of a row again."""
        seconds = row.runs[-1]["wall_seconds"]
        if len(row.runs) == 1:  # it may have compiled
            seconds = min(seconds, statistics.median(self.took))
        return self.time_left() > 1.1 * seconds

    def confirm(self):
        """Run what was kept or is open again, up to `runs` times: three times, then the least sure.

        Of a set and the one that it was added to, that with fewer runs is next.
        """
        base = self.rows[0]
        sets = {
            tuple(row.techniques): row
            for row in self.rows
            if row.status == "ok" and not row.failed and (row is base or row.on is not None)
        }
        while True:
            rows = [row for row in sets.values() if row is not base and tuple(row.on) in sets]
            for row in rows:
                self.judge(row)
            rows = sorted(filter(self.asks, rows), key=least_sure)
            pairs = [(row, sets[tuple(row.on)]) for row in rows]
            fewer = [min(pair, key=lambda row: len(row.runs)) for pair in pairs]
            due = [row for row in fewer if len(row.runs) < self.runs and self.fits(row)]
            if not due:
                return
            if not self.repeat(due[0]):
                del sets[tuple(due[0].techniques)]  # not again

    @staticmethod
    def asks(row):
        """Return whether more runs of a row are wanted."""
        return row.kept or not row.settled and row.verdict is not Verdict.TRIED_AGAIN


def build_parser():
    """Return the parser of the driver's own options."""
    parser = Parser("running.sh", USAGE, ABOUT)
    parser.epilog = "OPTION ... go to the scripts that have them: ./running.sh 5 -- --lr 0.2"
    names = [name for choices in groups().values() for choice in choices for name in choice]
    add = parser.add_argument
    add("EPOCHS", type=int, help="of each run; short epochs become more; 2 or more for a staircase")
    add("DATASET", type=Path, nargs="?", help="train/<class>/* and val/<class>/* (default: digits)")
    add(
        "--minutes",
        type=float,
        metavar="N",
        help=f"time limit for all runs (default: {MINUTES} without DATASET, none with one)",
    )
    add(
        "--runs",
        type=int,
        default=4,
        metavar="N",
        help="most runs of a technique (default: 4); 1: a quick look",
    )
    add(
        "--part",
        choices=["cells", "staircase", "all"],
        help="cells: one process, DP and DDP, each with amp and cudnn; staircase: technique after "
        "technique, each kept if it gains (default: all; without DATASET on a GPU: staircase)",
    )
    more = dict(action="append", default=[], choices=names, metavar="TECHNIQUE")
    add("--with", dest="wanted", help="try it, although the default leaves it out", **more)
    add("--without", help=f"leave it out; TECHNIQUE is one of {', '.join(sorted(names))}", **more)
    parser.add_result_dir()
    return parser


def parse(arguments):
    """Return (options of the driver, options for the scripts); the latter come behind a --."""
    parser, (own, options) = build_parser(), split(arguments)
    args = parser.parse_args(own)
    if min(args.EPOCHS, args.runs) < 1 or args.minutes is not None and not args.minutes > 0:
        parser.error("EPOCHS, --runs and --minutes have to be above 0")
    if args.part == "staircase" and args.EPOCHS == 1:
        parser.error("the staircase needs 2 EPOCHS or more, because the first one warms up")
    for word in options:  # argparse takes the start of a name for the name
        for name in ("--epochs", "--dataset", "--result_dir"):
            if len(word) > 2 and name.startswith(word.split("=")[0]):
                parser.error(
                    f"{word} cannot stand behind the --: EPOCHS, DATASET and --result_dir "
                    "before it set the same for all scripts"
                )
    need_packages()
    for name in compose.TECHNIQUES:  # a technique's options are checked before any run
        if (words := options_of([name], options)) != options_of([], options):
            check_options(ROOT / "src" / f"train_{name}.py", words, "running.sh")
    return args, options


def digits():
    """Return the folder of digits, which is the default dataset; draw them if need be."""
    made = subprocess.run([sys.executable, ROOT / "make_dataset.py", "digits"])
    if made.returncode:
        sys.exit(made.returncode)
    return ROOT / "data" / "digits"


def grid():
    """Return [(row, column, techniques), ...] of the grid; the baseline is the first."""
    return [
        (row, column, report.ROWS[row] + report.COLUMNS[column])
        for row in report.ROWS
        for column in report.COLUMNS
    ]


def gpu_workload(options, gigabytes):
    """Return options that keep a GPU busy with the digits; none if `options` choose a workload.

    With train.py's defaults, a small network and small images, the host is what is measured.
    """
    if {word.split("=")[0] for word in options} & {"--model", "--image_size", "--batch_size"}:
        return []
    batch = next(images for least, images in GPU_BATCHES.items() if gigabytes >= least)
    words = [*GPU_WORKLOAD, "--batch_size", str(batch)]
    say(f"Without a DATASET all runs get {' '.join(words)}, which keeps a GPU busy.")
    return words


def plan(args, here, is_quick):
    """Return (the baseline's cell, the other cells, the stairs, {name: why it is left out})."""
    left_out = {
        name: why
        for name, why in reasons_to_leave_out(here, is_quick).items()
        if name in compose.TECHNIQUES and name not in args.wanted
    }
    for name, why in left_out.items():
        say(f"Left out: {name}, because {why}. --with {name} tries it.")
    allowed = {*compose.TECHNIQUES} - {*left_out, *args.without}
    baseline, *cells = [cell for cell in grid() if {*cell[2]} <= allowed]
    part, has_stairs = args.part or "all", args.EPOCHS > 1
    if is_quick and has_stairs and not args.part:
        part, left_out["the grid"] = "staircase", GRID
        say(f"Left out: the grid, because {GRID}. --part all adds it.")
    if part == "all" and not has_stairs:
        names = ", ".join(sorted({name for cell in cells for name in cell[2]}))
        say(
            f"Only {names or 'the baseline'}. No staircase: it needs 2 EPOCHS or more, because the "
            "first one warms up."
        )
    stairs = stairs_of(here["gpus"], allowed) if part != "cells" and has_stairs else []
    return baseline, [] if part == "staircase" else cells, stairs, left_out


def main():
    started = time.monotonic()
    args, options = parse(sys.argv[1:])
    dataset = args.DATASET or digits()
    folder = args.result_dir.resolve() / "running"
    _lock = folder_of_its_own(folder, "running.sh")  # held until the process ends
    shared = setting("./running.sh")
    here = shared["machine"]
    is_quick = bool(here["gpus"]) and not args.DATASET
    baseline, cells, stairs, left_out = plan(args, here, is_quick)

    # for how long, and with what
    if is_quick:
        options = [*gpu_workload(options, gpu_gigabytes()), *options]
    minutes = args.minutes or (math.inf if args.DATASET else MINUTES)
    if minutes < math.inf:
        say(f"This takes at most {minutes:g} minutes.")
    table = (TimedTable if minutes < math.inf else Table)(
        ["--dataset", str(dataset.resolve()), *options],
        args.EPOCHS,
        args.runs,
        minutes,
        started + 60 * minutes - CLOSING_SECONDS,
        folder,
        {**shared, "processes": here["gpus"] or 2, "left_out": left_out},
        forking.Server(ROOT / "src" / "train.py", variables_of()),
        calibration.QUICK_SHARE if is_quick else calibration.SHARE,
    )
    table.count = 1 + len(cells) + sum(len(names) for _, names in stairs)
    interrupted = ""
    try:
        table.calibrate()
        table.attempt(*baseline)
        table.climb(stairs, cells)
        for cell in cells:
            table.attempt(*cell)
        table.confirm()
        table.close()
    except Stopped as reason:
        interrupted = f"Stopped by {reason} after {len(table.rows)} of {table.count} runs."
        say(interrupted)
    conclude(table.rows, report.write, args.result_dir / "running", interrupted)


if __name__ == "__main__":
    guarded(main, "running.sh")
