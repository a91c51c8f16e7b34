"""What one call has measured: windows by turns, sets that failed, and what follows from them."""

import statistics

from whatif import advice, parts, report, search, stats, techniques


class Measured:
    """Windows, rows and facts of one call, as processes of the script have told them."""

    def __init__(self, only):
        self.only = only  # kinds of techniques that are tried
        self.windows, self.failed, self.notes, self.beside = [], [], [], []
        self.clock = 0.0  # the time at which the turns' first process started
        self.found = {}  # the records of the turns, merged
        self.trials = []  # rows of sets that ran in processes of their own
        self.first = {}  # what the turns' first process watched
        self.seconds = {}

    def facts(self):
        return self.found.get("facts", {})

    def extra(self):
        """Return what advice and patch have to know of the loader."""
        loader = advice.main_loader({"training": [], **self.facts()})
        return dict(workers=self.found.get("workers") or 1, keeps=not loader.get("changed"))

    def estimates(self):
        return stats.estimates(
            [stats.Window(each["names"], each["rate"], each["at"]) for each in self.windows]
        )

    def windows_of_record(self):
        """Return the windows as they go into --json: `at` in seconds since the start."""
        return [each | dict(at=round(each["at"] - self.clock, 3)) for each in self.windows]

    def margin(self):
        return stats.MARGIN_GPU if self.facts().get("device") == "cuda" else stats.MARGIN_CPU

    def names(self):
        """Return the techniques that were tried by turns."""
        why = self.found.get("why_not", {})
        return [
            name
            for name in techniques.NAMES
            if name not in techniques.LOADING and search.kind(name) in self.only and name not in why
        ]

    def best(self):
        """Return the set that is faster than any other, for certain; () if none is.

        Without turns these are all techniques that are faster, each by itself.
        """
        if "no_turns" in self.found:
            return techniques.ordered(
                {
                    name
                    for row in self.trials
                    for name in row.techniques
                    if row.verdict == report.FASTER and row.speedup >= stats.ADVISED
                }
            )
        return self.search().best(self.estimates(), dict(map(tuple, self.failed)))

    def search(self):
        return search.Search(self.names(), margin=self.margin())

    def of_set(self, names, key):
        return [each[key] for each in self.windows if each["names"] == names and each.get(key)]

    def rows(self):
        """Return the table's rows, in the order of measurement."""
        found, rows = self.estimates(), []
        turn = statistics.median([each["seconds"] for each in self.windows] or [1]) * 2.5
        for names in dict.fromkeys(each["names"] for each in self.windows if each["names"]):
            if one := found.get(names):
                needed = stats.windows_needed(one, self.margin())
                lost = not all(each["finite"] for each in self.windows if each["names"] == names)
                rows.append(
                    report.Row(
                        names,
                        one.speedup,
                        one.low,
                        one.high,
                        one.n,
                        stats.verdict(one, self.margin()).value,
                        needed * turn or None,
                        max(self.of_set(names, "memory"), default=None),
                        "a loss was not finite" if lost else "",
                    )
                )
        return rows + self.trials

    def computes(self):
        """Return the seconds that a step of the script as it is takes on kept batches, or None."""
        found = [each["seconds"] / each["steps"] for each in self.windows if not each["names"]]
        return statistics.median(found) if found else None

    def only_steps(self, watched):
        """Return what was watched, where other work between steps counts as such; {} if nothing."""
        return parts.only_steps(watched, self.computes() or 0.0) if watched else {}

    def parts(self):
        """Return {part: seconds} of the time until the script had been watched."""
        return parts.of_watched(self.only_steps(self.first), self.clock)

    def baseline(self):
        """Return what is known of the script as it is."""
        watched, compute = self.only_steps(self.found.get("watched")), self.computes()
        rates = self.of_set((), "rate")
        step = watched["seconds"] / watched["steps"] if watched.get("steps") else None
        tenths = statistics.quantiles(rates, n=10) if len(rates) >= 10 else [None]
        return dict(
            rate=statistics.median(rates) if rates else None,
            low=tenths[0],
            high=tenths[-1],
            n=len(rates),
            memory=max(self.of_set((), "memory"), default=None),
            step_seconds=step or compute,
            data_time=watched["wait"] / watched["seconds"] if watched.get("seconds") else None,
            compute_seconds=compute,
            cycle=watched.get("cycle", 1),
        )

    def not_tried(self):
        """Return {technique, or the set that was due next: why it has no windows}.

        A note says why there are no turns.
        """
        if "no_turns" in self.found:
            return {}
        failed = {names for names, _ in self.failed} | {row.techniques for row in self.trials}
        found = self.estimates()
        shown = {
            search.kind(name)
            for one in found
            if len(one) > 1
            for name in one
            if search.kind(name) in search.COSTLY
        }
        why = "no time was left for it by turns (--minutes)"
        left = {
            name: why
            for name in self.names()
            if not {(name,)} & {*found, *failed} and search.kind(name) not in shown
        }
        for one in self.search().wanted(found, dict(map(tuple, self.failed))):
            if found and len(one) > 1 and one not in found:
                left[report.name_of(one)] = why
        if self.found.get("loading"):
            return left
        excluded = self.found.get("why_not", {})
        loading = (each for each in techniques.LOADING if each in self.only)
        why = "the loader was not measured by itself"
        return left | {name: why for name in loading if name not in excluded}
