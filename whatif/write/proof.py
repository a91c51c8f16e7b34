"""Prove a patch: the script as it is and its changed copy by turns, with nothing but a clock.

Only the changed files are copied, into the session's folder, and laid over the originals at import.
A patch is proved if its copy runs, is faster for certain, keeps the training by the rule of
stats.changes_training, and exchanges its states with the original.
"""

import math
import os
import statistics
import time

from whatif import confirm, report, run, stats
from whatif.stats import LEAST_PAIRS, LEAST_PLAIN

from . import extras, overlay, patch

WARM = 3.0  # seconds before the window, at least
LEAST_SECONDS = 3.0  # of a window
MOST_PAIRS = 12
IDLE = 20  # losses that are the same in all runs if mixed precision has no effect
FAILS, CHANGES, SAME = "fails", "changes", "same"  # what is wrong with a patch
PLAIN, MAIN, MORE = "plain", "patch", "extras"  # the sides of a proof


def times_of(found):
    return f"{report.times(found.speedup, found.low, found.high)} (n={found.n})"


class Evidence:
    """What the runs of a script and of its changed copies say."""

    def __init__(self, session, patches):
        self.session, self.patches = session, patches  # {side: Patch}
        self.runs = {side: [] for side in (PLAIN, *patches)}
        self.kind, self.why, self.steps = "", "", None  # what failed; the steps of a window
        self.took = {}  # {side: seconds} of its last run
        self.before = time.monotonic() - session.began  # seconds

    def rates(self, side):
        return [each["steps"] / each["seconds"] for each in self.runs[side] if each["is_timed"]]

    def estimate(self, side, base=PLAIN):
        pairs = [*zip(self.rates(base), self.rates(side))]
        return stats.of_pairs(*zip(*pairs)) if pairs else None

    def is_idle(self, side):
        """Return whether mixed precision does nothing: losses of equal seeds are the same."""
        pairs = [*zip(self.runs[PLAIN], self.runs[side])]
        has_amp = any(name.startswith("amp") for name in self.patches[side].techniques())
        return (
            bool(pairs)
            and has_amp
            and all(plain["losses"][:IDLE] == mine["losses"][:IDLE] != [] for plain, mine in pairs)
        )

    def seconds_of(self, *sides):
        """Return what a run of each of the sides takes, by the last ones or the script's start."""
        if self.took:
            known = statistics.fmean(self.took.values())
        else:
            known = self.session.seconds.get("start", 6.0) + WARM + LEAST_SECONDS
        return sum(self.took.get(side, known) for side in sides)

    def minutes(self):
        """Return the option with about the minutes that three pairs need."""
        runs = self.seconds_of(*[PLAIN] * LEAST_PLAIN, *[MAIN] * LEAST_PAIRS)
        return confirm.minutes_for(runs, self.before, self.session.args)

    def losses(self, side):
        """Return what the report says of the losses of a side."""
        return confirm.loss_of(self.patches[side].techniques(), self.runs[PLAIN], self.runs[side])

    def off(self, side):
        """Return what the report says if the forecast was more than 10 % off; or ""."""
        if not self.session.found.get("loading") or not self.estimate(side):
            return ""
        steps = [1 / statistics.median(self.rates(each)) for each in (PLAIN, side)]
        names = (*self.patches[side].techniques(),)
        return confirm.Outlook(self.session).step_off(names, *steps)

    def judge(self, side):
        """Return what the record has of a side: whether it is proved, and why not."""
        found, losses = self.estimate(side), self.losses(side)
        kind, why = self.kind, self.why
        if not why and losses["changes"]:
            kind, why = CHANGES, f"the training changes: {losses['why']}"
        elif not why and self.is_idle(side):
            kind, why = SAME, "mixed precision has no effect: all losses are those of the script"
        elif not why and (found is None or found.n < LEAST_PAIRS):
            kind, why = "time", f"there was no time for three pairs of runs ({self.minutes()})"
        elif not why and found.low is not None and found.high < 1:
            kind, why = SAME, f"it is slower: {times_of(found)}"
        elif not why and not stats.gains(found):
            kind, why = SAME, f"it is not faster for certain: {times_of(found)}"
        elif not why and losses["changes"] is None:
            kind, why = "time", f"its losses cannot be compared: {losses['why']}"
        memory = [each["memory"] for each in self.runs[side] if each["memory"]]
        return dict(
            techniques=self.patches[side].techniques(),
            extras=self.patches[side].extras,
            proved=not why,
            kind=kind,
            why=why,
            speedup=found and found.speedup,
            low=found and found.low,
            high=found and found.high,
            n=found.n if found else 0,
            steps=self.steps,
            memory=max(memory, default=None),
            rates=self.rates(PLAIN),
            rates_with=self.rates(side),
            losses=losses,
            off=self.off(side),
        )


class Proof(Evidence):
    """Runs of one patch, perhaps also of one with extras, by turns with the script as it is."""

    def __init__(self, session, patches, show, speedup=1.0):
        super().__init__(session, patches)
        self.show, self.expected, self.warm = show, max(1.0, speedup), None
        self.is_own = False
        self.is_of_extras = False  # whether what failed may be the extras' fault
        self.folder = os.path.join(session.folder, f"proof-{session.number}")
        os.makedirs(os.path.join(self.folder, "states"), exist_ok=True)
        self.starter = os.path.join(self.folder, "start.py")
        with open(self.starter, "w") as file:
            file.write(overlay.STARTER)
        self.files = {side: self.copies(side, each) for side, each in patches.items()}

    def copies(self, side, one):
        """Write the changed files; return {path: path of the copy}."""
        folder, found = os.path.join(self.folder, side), {}
        os.makedirs(folder, exist_ok=True)
        for number, (path, text) in enumerate(one.files.items()):
            found[path] = os.path.join(folder, f"{number}-{os.path.basename(path)}")
            with open(found[path], "wb") as file:
                file.write(text)
        return found

    def run(self, side, k, seconds, is_timed=True):
        """Run a side with seeds shifted by k; return what it gave, or None if it failed."""
        session, begin = self.session, time.monotonic()
        states = os.path.join(self.folder, "states")
        others = [
            each
            for each in ([MAIN, MORE] if side == PLAIN else [PLAIN])
            if os.path.exists(f"{states}/{each}.pt")
        ]
        spec = session.spec(
            "proof",
            seed=k,
            seconds=seconds,
            warm_seconds=min(WARM, session.args.seconds),
            warm=self.warm if is_timed else 1,
            steps=self.steps if is_timed else 3,
            starter=self.starter,
            files=self.files.get(side, {}),
            save_to=f"{states}/{side}.pt",
            load_from=f"{states}/{others[-1]}.pt" if others else None,
        )
        spec["free"] = [*run.free_paths(spec["folder"]), self.folder]
        command, options = session.command, session.facts().get("options", ())
        if side != PLAIN:
            command = patch.new_command(command, session.args.kind, self.patches[side], options)
        name = "the script as it is" if side == PLAIN else "the changed copy"
        limit = max(60.0, session.left() + 30)
        result = run.run_once(
            command,
            spec,
            limit,
            lambda _: self.show(
                f"{time.monotonic() - session.began:.0f} s  proof: {name}, "
                f"run {len(self.runs[side]) + 1}"
            ),
        )
        self.took[side] = time.monotonic() - begin
        if why := self.wrong_with(side, result, is_timed):
            self.kind, self.why = FAILS, f"{name}: {why}"
            self.is_own = side == PLAIN and not result.get("states")  # those are the copy's
            self.is_of_extras = not self.is_own and (side == MORE or bool(self.runs.get(MORE)))
            self.traceback = result.get("traceback", "")
            return None
        self.runs[side].append(
            result["windows"][0]
            | dict(
                losses=confirm.numbers(result.get("losses", [])),
                memory=result.get("memory"),
                is_timed=is_timed,
                first=result["first"],
                ended=bool(result.get("ended")),
            )
        )
        return self.runs[side][-1]

    def wrong_with(self, side, result, is_timed):
        """Return what is wrong with the result of a run, or ""."""
        if result["error"] or not result["windows"]:
            return result["error"] or "it ended before it was measured"
        ended = result.get("ended")
        if ended and result.get("code"):
            last = "".join(f": {line}" for line in result["log"].splitlines()[-1:])
            return f"it ended with status {result['code']} after {result['total']} steps{last}"
        others = [
            each
            for one in self.runs
            if (one == PLAIN) != (side == PLAIN)
            for each in self.runs[one]
            if each["is_timed"] and each["ended"]
        ]
        if others and is_timed and not ended:
            return "it goes on where the other side ends by itself"
        if result.get("states"):
            return "; ".join(result["states"])
        before, after = (
            map(math.isfinite, confirm.numbers(result.get(key) or ()))
            for key in ("losses", "compared")
        )
        is_lost = all(before) and not all(after)
        return "losses are not finite after it has loaded the other's state" * is_lost

    def fits(self, *sides):
        """Return whether there is time for a run of each of the sides."""
        return self.session.left() > self.seconds_of(*sides)

    def measure(self):
        """Run rounds until the result is clear or a run fails; their order swaps."""
        sides = [MAIN, PLAIN]
        overhead = max(10.0, self.session.seconds.get("start", 0))
        each = self.session.left() / (len(sides) * LEAST_PAIRS + 1) - overhead
        seconds = min(self.session.args.seconds, max(LEAST_SECONDS, each))
        for k in range(MOST_PAIRS):
            lacking = max(1, LEAST_PAIRS - k) if k else 1  # the first pair tells what one takes
            if not self.fits(*sides * lacking):
                if k < LEAST_PAIRS:  # nothing is proved, so no losses are compared
                    return
                break
            for side in sides[::-1] if k % 2 else sides:
                if not self.run_or_blame(side, k, seconds):
                    return
            if k == 0 and MORE in self.patches:
                if self.fits(*sides * (LEAST_PAIRS - 1), PLAIN, *[MORE] * LEAST_PAIRS):
                    sides.append(MORE)
                    if not self.run_or_blame(MORE, k, seconds):
                        return
                else:  # the patch comes first: without time its extras are left out
                    del self.patches[MORE], self.runs[MORE]
            if self.is_idle(MAIN):
                return
            if self.options_do_little():
                self.kind = SAME
                self.why = f"its options gain less than measured: {times_of(self.estimate(MAIN))}"
                return
            if k + 1 >= LEAST_PAIRS and stats.is_clear(self.estimate(MAIN)):
                break
        while (k := len(self.runs[PLAIN])) < LEAST_PLAIN and self.fits(PLAIN):
            if not self.run(PLAIN, k, 0, is_timed=False):
                return

    def options_do_little(self):
        """Return whether the patch has options and gains so little that lines may gain more."""
        found, one = self.estimate(MAIN), self.patches[MAIN]
        return bool(one.options and one.words() and found.high) and (
            found.high < self.expected**0.5 and self.fits(*[MAIN, PLAIN] * LEAST_PAIRS)
        )

    def run_or_blame(self, side, k, seconds):
        """Run a side; return whether that worked. The first run chooses the steps of a window."""
        found = self.run(side, k, seconds / self.expected)
        if not found:
            self.blame(side)
        elif self.steps is None:
            self.warm, self.steps = found["first"], found["steps"]
        return found is not None

    def blame(self, side):
        """If the script as it is ends like its failed copy, say that of the script."""
        if side == PLAIN or self.runs[PLAIN] or not self.fits(PLAIN):
            return
        said = self.kind, self.why, self.traceback
        self.run(PLAIN, 0, LEAST_SECONDS)
        if not self.is_own:
            self.kind, self.why, self.traceback = said


class Prover:
    """Finds the largest part of a set whose patch can be proved."""

    def __init__(self, session, names, extra, show):
        self.session, self.extra, self.show = session, extra, show
        self.facts, self.names, self.reasons = session.facts(), tuple(names), {}
        self.proof, self.verdict, self.with_options = None, None, True
        self.extras = extras.NAMES if self.facts.get("device") == "cuda" else ()
        self.patch = self.make(self.names)

    def make(self, names, with_extras=()):
        """Return the Patch for a set."""
        session = self.session
        found = patch.make(
            self.facts, names, self.extra, session.cwd, with_extras, self.with_options
        )
        if session.args.copy and found.root not in ("", os.path.realpath(session.cwd)):
            return patch.Patch(
                reasons=dict.fromkeys(
                    names, f"--copy: it would change files outside of {session.source}"
                )
            )
        if session.args.copy and found.root:
            found.root = os.path.realpath(session.source)  # where it is applied
        return found

    def expected(self, names):
        """Return the speedup that a set should have, for the length of a window."""
        found = self.session.estimates().get(tuple(names))
        return found.speedup if found else 1.0

    def prove(self):
        """Prove the patch, or a smaller one. The verdict is None if there is nothing to prove."""
        if self.patch.is_empty():
            return
        begin = time.monotonic()
        try:
            while not self.patch.is_empty():  # a smaller one may be
                self.once()
                if self.verdict["proved"] or not self.shrink():
                    break
        finally:
            self.session.seconds["proof"] = time.monotonic() - begin

    def once(self):
        """Prove the patch as it is, beside one with extras on a GPU."""
        patches = {MAIN: self.patch}
        more = self.make(self.patch.techniques(), self.extras)
        if more.extras:
            patches[MORE] = more
        self.proof = Proof(self.session, patches, self.show, self.expected(self.names))
        self.proof.measure()
        self.verdict = self.proof.judge(MAIN)
        if MORE not in patches:
            return
        if self.verdict["proved"]:
            both, better = self.proof.judge(MORE), self.proof.estimate(MORE, MAIN)
            if both["proved"] and better.speedup >= 1:
                self.patch, self.verdict = more, both
        elif self.proof.kind == FAILS and self.proof.is_of_extras:
            self.extras = ()
            self.once()

    def shrink(self):
        """Leave out the technique that breaks the patch; return whether another can be tried."""
        names, kind, why = self.patch.techniques(), self.verdict["kind"], self.verdict["why"]
        if kind == SAME and self.patch.options and self.patch.words():
            self.with_options = False  # an option may do nothing here
            self.patch = self.make(names)
            return not self.patch.is_empty()
        if kind not in (FAILS, CHANGES) or self.proof.is_own or len(names) < 2:
            return False
        for name in self.order(kind, names):
            rest = self.make(tuple(each for each in names if each != name))
            trial = Proof(self.session, {MAIN: rest}, self.show)
            if rest.is_empty() or not trial.fits(MAIN, PLAIN):
                continue
            if kind == FAILS and trial.run(PLAIN, 0, LEAST_SECONDS, False):
                trial.run(MAIN, 0, LEAST_SECONDS, False)
                is_right = not trial.why
            else:
                trial.runs[PLAIN] = self.proof.runs[PLAIN]
                is_right = all(trial.run(MAIN, k, 0, False) for k in range(2)) and (
                    trial.losses(MAIN)["changes"] is False
                )
            if is_right:
                self.reasons[name] = f"with it {why}"
                self.names = tuple(each for each in self.names if each != name)
                self.patch = rest
                return True
        return False

    def order(self, kind, names):
        """Return techniques in the order in which one is left out: what costs least is first."""
        if kind == CHANGES:
            return dict.fromkeys(each for each in (*confirm.LOOSEST, *names) if each in names)
        return sorted(names, key=lambda name: self.expected((name,)))

    def not_written(self):
        """Return {technique: why it is not in the patch}."""
        return {**self.patch.reasons, **self.reasons}

    def status(self):
        """Return the exit status: 0, 3 or 4."""
        if self.verdict and not self.verdict["proved"]:
            return 4
        return 3 if self.not_written() else 0
