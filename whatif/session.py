"""One call of whatif: turns in one process, the loader, the confirmation, and the report."""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from whatif import confirm, copies, machine, report, run, search, trials
from whatif.measured import Measured
from whatif.techniques import KINDS
from whatif.write import writing

COMPUTE_SHARE, COMPUTE_MOST = 0.5, 180.0  # of --minutes, and seconds, for the turns
WRITE_SHARE = 0.3  # with --write, whose proof takes the place of the confirmation
LOADER_SHARE, LOADER_MOST = 0.08, 24.0
CLOSING = 5.0  # seconds that are kept for the report
WAITING = 0.1, 0.02  # data time from which workers may gain; with --write, which has to prove it
SPARE = 10.0  # seconds of --minutes that turns leave where nothing has to be confirmed
AGAIN = 20.0  # seconds with which a process is worth starting once more
SLACK = 60.0  # seconds after the deadline, after which a process is cut off


def progress(text):
    """Show what is under way, in place, on a terminal."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]}\033[K", end="", flush=True)


def say(text):
    """Print a line or more."""
    progress("")
    print(text, flush=True)


def beside(result):
    """Return which other processes train beside the first one, or ""."""
    rates = {
        pid: each["beside"]["steps"] / each["beside"]["seconds"]
        for pid, each in result.get("others", {}).items()
        if each.get("beside")
    }
    if not rates:
        return ""
    are = "more processes train" if len(rates) > 1 else "more process trains"
    told = ", ".join(f"pid {pid} at {report.speed(rate)} steps/s" for pid, rate in rates.items())
    return f"{len(rates)} {are} beside it: {told}"


class Session(Measured):
    """One call: it starts processes that measure, while time is left."""

    def __init__(self, args, command, cwd, folder):
        super().__init__([each for each in args.only if each != "plain"])
        self.args, self.command, self.cwd, self.folder = args, command, str(cwd), folder
        self.began, self.number = time.monotonic(), 0
        self.epochs = False  # whether repeated epochs end as they do
        self.source = self.cwd  # with --copy the folder that was copied

    def left(self):
        """Return the seconds left of --minutes."""
        return self.began + 60 * self.args.minutes - CLOSING - time.monotonic()

    def spec(self, mode, names=(), **more):
        """Return what the processes of the next run have to know."""
        self.number += 1
        roots = {self.cwd, str(self.args.script.resolve().parent) if self.args.script else self.cwd}
        return (
            dict(
                mode=mode,
                techniques=list(names),
                only=self.only,
                cwd=self.cwd,
                roots=sorted(roots),
                folder=os.path.join(self.folder, str(self.number)),
                cores=machine.cores(),
                # a step may take a minute; who names amp has it tried
                emulates={*self.only} == {*KINDS} and not machine.has_bfloat16(),
                seconds=self.args.seconds,
                least_steps=confirm.STEPS,
                training=self.facts().get("training", []),
                workers=self.found.get("workers", 0),
                changing=[
                    number
                    for number, each in enumerate(self.facts().get("loaders", ()))
                    if each.get("changed")
                ],
                seed=None,
            )
            | more
        )

    def show(self, result):
        """Show what a process does now."""
        names = result.get("now")
        what = result.get("phase", "start")
        if what == "turns" and names is not None:
            what = f"by turns: {report.name_of(tuple(names))}, {len(result['windows'])} windows"
        progress(f"{time.monotonic() - self.began:.0f} s  {what}")

    # ---- by turns
    def take_turns(self):
        """Measure all sets by turns. Return an error that leaves nothing to report, or ""."""
        part = WRITE_SHARE if self.args.write else COMPUTE_SHARE
        share = min(60 * part * self.args.minutes, COMPUTE_MOST)
        deadline = time.time() + share
        loader = min(LOADER_SHARE * 60 * self.args.minutes, LOADER_MOST)
        self.clock = time.time()
        last = max(deadline, time.time() + self.left() - loader - SPARE)  # nothing to confirm
        # or workers alone, if the loader says so after the turns: --write leaves time to prove them
        half = max(deadline, time.time() + self.left() / 2) if self.args.write else deadline
        while True:
            limit = last - time.time() + loader + SLACK
            failed, epochs = len(self.failed), self.epochs
            result = run.run_once(
                self.command,
                self.spec(
                    "turns",
                    deadline=deadline,
                    last=last,
                    waiting=(half, WAITING[bool(self.args.write)]),
                    loader_seconds=loader,
                    turns=self.windows,
                    failed=self.failed,
                    epochs=self.epochs,
                ),
                limit,
                self.show,
            )
            self.first = self.first or result.get("watched")
            if "start" not in self.seconds and result.get("turns_began"):
                self.seconds["start"] = result["turns_began"] - self.clock
            gained = self.take(result)
            if "turns_over" in result or "no_turns" in result and self.windows:
                self.seconds["compute"] = result.get("turns_over", time.time()) - self.clock
                break
            if result["error"] and not self.windows and (self.epochs or "now" not in result):
                return result
            until = deadline if self.best() else last
            if (
                not self.goes_on(result)
                or until - time.time() < AGAIN
                or (gained < 3 and len(self.failed) == failed and self.epochs == epochs)
            ):
                break
        if result["error"] and self.epochs != epochs:
            self.goes_on(result)  # there is no time to find out whether epochs are why
        if result["error"] and not self.windows:
            return result
        self.seconds.setdefault("compute", time.time() - self.clock)
        self.seconds["loader"] = time.time() - self.clock - self.seconds["compute"]
        return None

    def take(self, result):
        """Keep what a process has told; return how many windows it gave."""
        windows = [dict(each, names=tuple(each["names"])) for each in result["windows"]]
        self.windows += windows
        self.failed += [[tuple(names), why] for names, why in result["failed"]]
        self.found |= {
            key: value for key, value in result.items() if key not in ("windows", "failed")
        }
        self.notes += [
            f"whatif itself failed in a process of the script: {fault.strip().splitlines()[-1]}"
            for fault in result.get("faults", ())
        ]
        if told := beside(result):
            self.beside = [told]
        return len(windows)

    def goes_on(self, result):
        """Return whether a process that ended early is worth another one; note why it ended."""
        names = tuple(result.get("now") or ())
        is_cut = result.get("is_cut")  # it took too long
        if result["error"] and "now" in result and not self.epochs and not is_cut:
            self.epochs = True  # it may rely on the length of an epoch
            return True
        if result["error"] and names:
            self.failed.append([names, result["error"]])
            return True
        if result["error"]:
            self.notes.append(f"The measurement ended early: {result['error']}")
            return False
        if result.get("ended"):
            self.notes.append(
                f"The script came to its own end after {result['steps']} steps, "
                "which ended a part of the measurement."
            )
            return True
        if not result.get("done"):  # multiprocessing ends its processes without their atexit
            self.notes.append(
                "The measured process ended early, which ended a part of the measurement."
            )
        return not result.get("done")


def result_of(session, confirmed, stopped=False, written=None):
    """Return the report's Result."""
    args, found = session.args, session.found
    facts = session.facts() | {
        key: found[key] for key in ("lines", "busy", "kernels") if key in found
    }
    if confirmed and confirmed.options and confirmed.options["why"]:
        facts |= dict(options=[])  # they failed, so lines are advised
    best = confirmed.names if confirmed else session.best()
    units = [each["unit"] for each in session.windows]
    only = {
        name: why
        for name, why in found.get("why_not", {}).items()
        if search.kind(name) in session.only
    }
    losses = confirmed.losses if confirmed else []
    best = best if confirmed is None or confirmed.is_advised() else ()
    if written and written.verdict:
        best, losses = written.best(best), [written.verdict["losses"]]
    confirmation = confirmed.line() if confirmed and not (written and written.verdict) else None
    return report.Result(
        script=args.name,
        arguments=session.command[2:] if args.kind == "script" else [],
        unit=units[0] if units else "steps",
        facts=facts,
        baseline=session.baseline(),
        rows=session.rows(),
        best=best,
        extra=session.extra(),
        writing=written,
        failed={tuple(names): why for names, why in session.failed},
        excluded=only,
        not_tried=session.not_tried(),
        loader=found.get("loading"),
        forecast=confirmed.forecast_lines() if confirmed else [],
        confirmation=confirmation,
        losses=losses,
        notes=[
            *dict.fromkeys(
                [*session.notes, *session.beside, *filter(None, [found.get("no_turns")])]
            )
        ],
        seconds=session.seconds,
        parts=session.parts(),
        by_turns="no_turns" not in found,
        stopped=stopped,
    )


def measure_all(session):
    """Measure, and print the report. Return the exit status."""
    confirmed, written, status, stopped = None, None, 0, False
    try:
        if error := session.take_turns():
            progress("")
            sys.stderr.write(error.get("traceback") or "")
            sys.exit(f"whatif: {session.args.name}, as it is: {error['error']}")
        if "no_turns" in session.found:
            trials.Trials(session, progress).measure()
        say("\n".join(report.table(result_of(session, None))))
        confirmed = confirm.Confirmation(session, show=progress)
        if session.args.write:
            written = writing.Writing(session, confirmed.names, session.extra(), progress)
            written.prove()
            status = written.status()
        if not written or not written.verdict:
            confirmed.measure()
        if "no_turns" not in session.found:
            trials.Trials(session, progress).measure()
    except KeyboardInterrupt as stop:
        stopped, status = True, 130
        if written:
            written.stopped = True
        if confirmed is None and hasattr(stop, "result"):
            session.take(stop.result)
    if session.windows or "no_turns" in session.found:
        result = result_of(session, confirmed, stopped, written)
        if written:
            written.save()
        say(report.text_of(result, with_table=stopped))
        if session.args.json:
            record = report.record(result) | dict(windows=session.windows_of_record())
            session.args.json.write_text(json.dumps(record, indent=1) + "\n")
    elif stopped:
        say("Stopped before there was anything to report.")
    return status


def main(args):
    """Run a session. Return the exit status."""
    cwd, command = Path.cwd(), args.command
    new_folder = tempfile.TemporaryDirectory
    with contextlib.ExitStack() as made:
        if args.copy:
            source = cwd
            try:
                say(f"Copying {source}.")
                cwd = made.enter_context(copies.copied(source))
            except OSError as error:
                sys.exit(f"whatif: error: --copy: {str(error)[:200]}")
            except KeyboardInterrupt:
                return 130
            command = copies.moved(command, source, cwd)
        run.catch_signals()
        folder = made.enter_context(new_folder(prefix="whatif-", ignore_cleanup_errors=True))
        say(
            f"{args.name} runs with techniques switched on and off by turns, then beside itself, "
            f"in at most {args.minutes:g} minute{'s' * (args.minutes != 1)}.\n"
            "From the first repeated batch on, what it writes is held back."
            + ("" if args.copy else "  --copy runs all in a copy of the folder.")
        )
        session = Session(args, command, cwd, folder)
        session.source = str(Path.cwd())
        return measure_all(session)
