"""Sets that turns cannot measure, each in whole processes beside the script as it is.

These are the sets that ran out of memory by turns, where whatif holds copies of weights, and all
techniques of a training that turns cannot change.
"""

import time

from whatif import confirm, report, search, stats, techniques

SINGLES = ("amp", "fused", "cudnn", "tf32")  # kinds that need no other model
MEMORY = "OutOfMemoryError"
SHARE = 0.6  # of the time, if turns cannot be taken; the rest is for the best set


class Trials(confirm.Confirmation):
    """Runs of sets in processes of their own, and the rows that they give."""

    def __init__(self, session, show):
        super().__init__(session, show, names=())
        self.pairs = {}  # {set: [[a run of the script as it is, one with the set], ...]}

    def measure(self):
        """Run what is to be tried, while there is time."""
        session, begin = self.session, time.monotonic()
        self.until = session.left() * ((1 - SHARE) if "no_turns" in session.found else 0)
        if "no_turns" in session.found:
            names = [
                (name,)
                for name in session.names()
                if search.kind(name) in SINGLES and name != "amp float16"
            ]
            for pairs in range(1, confirm.PAIRS + 1):  # all once, before any runs again
                for one in names:
                    if one not in self.errors and len(self.runs.get(one, ())) < pairs:
                        self.pair(one)
        else:
            for one in self.without_memory():
                self.pair(one)
        if self.took:
            session.seconds["own processes"] = time.monotonic() - begin
        session.trials = [self.row(names) for names in self.pairs]
        session.failed = [
            [names, why]
            for names, why in session.failed
            if names not in {*self.pairs, *self.errors}
        ] + [
            [names, f"{why} (in a process of its own)"]
            for names, why in self.errors.items()
            if names
        ]

    def without_memory(self):
        """Return the sets that ran out of memory by turns; a larger batch is no set."""
        return [
            names
            for names, why in self.session.failed
            if why.startswith(MEMORY)
            and not any(search.kind(name) in techniques.NEVER_KEPT for name in names)
        ]

    def pair(self, names):
        """Run the script as it is and a set, one after the other, if there is time for both."""
        seconds = self.share(2 * confirm.PAIRS, self.session.seconds.get("start", 15.0))
        k = len(self.runs.get(names, ()))
        order = [(), names] if k % 2 == 0 else [names, ()]
        if not self.fits(2, seconds) or self.session.left() < self.until:
            return
        found = {one: self.run(one, k, seconds) for one in order if names not in self.errors}
        if all(found.get(one) for one in order):
            self.pairs.setdefault(names, []).append([found[one] for one in ((), names)])

    def row(self, names):
        """Return the row of the report's table."""
        plain, mine = zip(*([self.rate(each) for each in pair] for pair in self.pairs[names]))
        found, margin = stats.of_pairs(plain, mine), self.session.margin()
        memory = [pair[1]["memory"] for pair in self.pairs[names] if pair[1]["memory"]]
        why = dict(self.session.failed).get(names, "")
        note = "by turns it ran out of memory; " * why.startswith(MEMORY)
        return report.Row(
            names,
            found.speedup,
            found.low,
            found.high,
            found.n,
            stats.verdict(found, margin).value,
            None,
            max(memory, default=None),
            f"{note}in {'a process' if found.n == 1 else 'processes'} of its own",
        )
