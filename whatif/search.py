"""The greedy search for the fastest set of techniques, of whatif and of tools/running.py.

Both add one technique after another to a set and keep what gains. `due` decides what comes next on
top of a set. `Search` uses it for windows by turns in one process: it says which sets get windows
in the next round. tools/running.py uses it for whole runs.

A set is a tuple of names of techniques, () the script as it is. At most one technique of a kind
can be in a set: "amp bfloat16" and "amp float16" are of the kind "amp".
"""

import dataclasses
import enum

from whatif import stats
from whatif.stats import LEAST_WINDOWS, Estimate, Verdict, quotient, verdict

COSTLY = ("compile",)  # kinds that start slowly
MOST_COSTLY = 6  # sets with one of those that have to be compiled
UNCOMPILED = ("fused", "cudnn")  # kinds that leave compiled code as it is
RECOMPILING = ("tf32",)  # what is compiled is compiled again when one of these is switched
NEVER_KEPT = ("batch",)  # kinds that are measured, but never kept
HOPELESS, HOPELESS_WINDOWS = 0.9, 3  # after so many windows, all of them slower than this


def kind(name):
    """Return "amp" for "amp bfloat16"."""
    return name.split()[0]


# ------------------------------------------------------------------------------ what comes next
class Turn(enum.IntEnum):
    """What is to be done with a technique on top of a set, the most promising first."""

    REST = 0  # measure it: others of its kind have been measured on top of this set
    GAINS = 1  # it gains: keep it, or measure it here if that was on top of another set
    NEW = 2  # measure it: it was never tried on top of this set
    AGAIN = 3  # the same, but it was slower on top of another set
    OPEN = 4  # it was measured, and more measurements may change the verdict


@dataclasses.dataclass(frozen=True)
class Step:
    """What is known of a technique that was added to the set `on`.

    `estimate` compares the set with it to `on`. It is None if `on` itself did not run; then `rate`
    tells how promising it is.
    """

    on: tuple = ()
    estimate: Estimate | None = None
    is_settled: bool = False
    failed: bool = False
    rate: float = 0.0

    def turn(self, on, begun, gains):
        """Return the Turn of this technique on top of the set `on`; None: there is none."""
        if self.failed:
            return None
        if self.estimate is None or gains(self.estimate):
            return Turn.GAINS
        if self.on != on:
            is_slower = self.estimate.high is not None and self.estimate.high < 1
            return Turn.AGAIN if is_slower else Turn.REST if begun else Turn.NEW
        return None if self.is_settled else Turn.OPEN

    def promise(self, turn):
        """Return how much the technique may gain, to sort those of the same turn."""
        if turn is Turn.GAINS:
            return self.estimate.speedup if self.estimate else self.rate
        return self.estimate.high if turn is Turn.OPEN else 0


def due(on, names, steps, kind=kind, gains=stats.gains, first=(), last=()):
    """Return [(Turn, name), ...]: what to do next on top of the set `on`, the best first.

    `steps` is {name: its last Step}. The order is that of Turn, then what gains most, then that of
    `names`. If names are given as `first`, they come before others that have not been tried, and
    before others that have. Those in `last` come after others that gain.
    """
    found, kinds = [], {*map(kind, on)}
    for place, name in enumerate(names):
        if kind(name) in kinds:
            continue
        begun = any(
            other in steps and steps[other].on == on for other in names if kind(other) == kind(name)
        )
        step = steps.get(name)
        turn = step.turn(on, begun, gains) if step else Turn.REST if begun else Turn.NEW
        if turn is not None:
            found.append(
                (
                    turn > Turn.NEW,
                    bool(first) and name not in first,
                    turn,
                    turn is Turn.GAINS and name in last,
                    -(step.promise(turn) if step else 0),
                    place,
                    name,
                )
            )
    return [(each[2], each[-1]) for each in sorted(found)]


# ------------------------------------------------------------------------------ windows by turns
class Known:
    """What estimates until now say of a Search's sets; it holds for these estimates only."""

    def __init__(self, search, estimates, failed):
        self.search, self.estimates, self.failed = search, estimates, failed

    def n(self, one):
        return self.estimates[one].n if one in self.estimates else 0

    def is_out(self, one):
        """Return whether a set contains one that failed."""
        return any({*bad} <= {*one} for bad in self.failed)

    def ratio(self, one, other):
        """Return the Estimate of a set relative to another one."""
        return quotient(self.estimates[one], self.estimates[other] if other else None)

    def gains(self, one, other):
        return stats.gains(self.ratio(one, other))

    def is_open(self, one):
        return self.search.verdict(one, self.estimates) is Verdict.OPEN

    def is_hopeless(self, one, on=()):
        """Return whether the first windows of a set are all much slower than the set before it."""
        base = self.estimates[on].speedup if on else 1
        return self.n(one) >= HOPELESS_WINDOWS and (
            max(self.estimates[one].ratios) < HOPELESS * base
        )

    def can_afford(self, one):
        """Return whether a set is not costly, or compiled already, or one more may be compiled."""

        def compiled(other):
            return tuple(name for name in other if kind(name) not in UNCOMPILED)

        costly = {*self.search.costly}
        begun = {(name,) for name in costly}
        begun |= {compiled(other) for other in self.estimates if {*other} & costly}
        return not {*one} & costly or compiled(one) in begun or len(begun) < self.search.most_costly

    def step(self, name, chain):
        """Return the last Step of a technique, on top of one of the sets in `chain`; or None.

        What is clearly slower on top of one set counts as failed on top of later ones.
        """
        for on in reversed(chain):
            one = self.search.join(on, name)
            if (
                self.is_out(one)
                or self.is_hopeless(one, on)
                or (on == chain[-1] and not self.can_afford(one))
            ):
                return Step(on, failed=True)
            if self.n(one) >= LEAST_WINDOWS:
                found = self.ratio(one, on)
                told = verdict(found, self.search.margin)
                return Step(on, found, told is not Verdict.OPEN, told is Verdict.SLOWER)
        return None

    def due(self, chain, names):
        """Return (what is due on top of the last set of `chain`, the Steps)."""
        steps = {name: step for name in names if (step := self.step(name, chain))}
        return due(chain[-1], names, steps), steps

    def lacking(self, sets, hopeless=False):
        """Return the sets that have too few windows, the hopeless ones only if asked."""
        return [
            one
            for one in sets
            if not self.is_out(one)
            and self.n(one) < LEAST_WINDOWS
            and (hopeless or not self.is_hopeless(one))
        ]

    def unknown(self, names):
        """Return the names as sets, without the costly ones that a larger set has shown."""
        costly = self.search.costly
        shown = {
            kind(name)
            for one, found in self.estimates.items()
            if len(one) > 1 and found.n >= LEAST_WINDOWS
            for name in one
            if name in costly
        }
        return [(name,) for name in names if not (name in costly and kind(name) in shown)]

    def contenders(self):
        """Return the techniques that may be part of the sum, the most promising first.

        Alone they gain, or may do so, and no other of their kind is clearly faster.
        """
        found = {
            name: self.estimates[name,]
            for name in self.search.cheap
            if (name,) in self.estimates
            and not self.is_out((name,))
            and not self.is_hopeless((name,))
            and (stats.gains(self.estimates[name,]) or self.is_open((name,)))
        }
        kept = [
            name
            for name in found
            if not any(
                kind(other) == kind(name)
                and verdict(quotient(found[name], found[other]), self.search.margin)
                is Verdict.SLOWER
                for other in found
            )
        ]
        return sorted(kept, key=lambda name: -found[name].speedup)


class Search:
    """Which sets get windows next, and which set is best, given the estimates until now.

    It keeps nothing between calls: the same estimates give the same answer. `estimates` is {set:
    Estimate relative to the script as it is}, `failed` holds sets that cannot run. The order:

    1. six windows for each technique alone, without the costly ones
    2. the sum: what gains alone, most first, is added to the best set, one after the other, and
       kept if the set with it is clearly faster than without it, by 2 % or more
    3. the costly techniques on top of that set; alone only if there is no such set
    4. what may gain only on top of the best set: all of it together, then one by one if it gains
    5. techniques that are never kept, and the rest of those that were hopeless at once
    6. more windows for every set whose verdict is open, for sets that decide on the best one, and
       for those that gain until that is known to within the margin
    """

    def __init__(self, candidates, margin=stats.MARGIN_GPU, most_costly=MOST_COSTLY):
        self.candidates, self.margin, self.most_costly = list(candidates), margin, most_costly
        self.costly = [name for name in self.candidates if kind(name) in COSTLY]
        self.never = [name for name in self.candidates if kind(name) in NEVER_KEPT]
        self.cheap = [
            name for name in self.candidates if name not in self.costly and name not in self.never
        ]

    def wanted(self, estimates, failed=()):
        """Return the sets that get windows in the next round, the most important first.

        [] means that every verdict has been reached. Draw their order within a round anew.
        """
        return self._explore(Known(self, estimates, failed))[1]

    def best(self, estimates, failed=()):
        """Return the fastest set that is known now, () if nothing gains.

        Each of its techniques gained when it was added to the others before it.
        """
        known = Known(self, estimates, failed)
        best, proven = self._explore(known)[0], {()}
        for one in sorted(estimates, key=lambda one: (len(one), one)):
            if (
                not known.is_out(one)
                and not {*one} & {*self.never}
                and any(
                    known.gains(one, on)
                    for on in proven
                    if len(on) == len(one) - 1 and {*on} < {*one}
                )
            ):
                proven.add(one)
        ordered = sorted(
            proven - {()}, key=lambda one: (len(one), [*map(self.candidates.index, one)])
        )
        while better := [one for one in ordered if known.gains(one, best)]:
            best = better[0]  # the simplest; it goes on while another one is clearly faster
        return best

    def verdict(self, one, estimates):
        """Return the Verdict on a set relative to the script as it is."""
        return verdict(estimates.get(one), self.margin)

    def join(self, on, *names):
        """Return the set `on` with more techniques, in the order of the candidates."""
        return tuple(name for name in self.candidates if name in on or name in names)

    # -------------------------------------------------------------------------- the phases
    def _explore(self, known):
        """Return (the best set, the sets to measure next)."""
        chain, contenders = [()], known.contenders()
        if wanted := known.lacking([(name,) for name in self.cheap]):
            self._climb(chain, contenders, known)
            return chain[-1], wanted
        wanted = (
            self._climb(chain, contenders, known)
            or self._climb(chain, self.costly, known)
            or known.lacking(known.unknown(self.costly))
            or self._add_rest(chain, known)
            or known.lacking(known.unknown(self.candidates), hopeless=True)
            or self._open(chain, known)
        )
        return chain[-1], wanted

    def _climb(self, chain, names, known):
        """Add what gains to the last set of `chain`; return the set to measure before more.

        `chain` grows in place: it begins with () and holds each set that was kept.
        """
        while True:
            turns, steps = known.due(chain, names)
            turn, name = turns[0] if turns else (Turn.OPEN, None)
            if turn > Turn.NEW:
                return []
            if turn is not Turn.GAINS or steps[name].on != chain[-1]:
                return [self.join(chain[-1], name)]
            chain.append(self._first_alike(name, chain[-1], turns, steps, known))

    def _first_alike(self, name, on, turns, steps, known):
        """Return `on` with a technique that gains, or with an earlier one of its kind.

        The earlier one is the simpler one: it is taken if the other is not clearly faster.
        """
        alike = [
            self.join(on, other)
            for turn, other in turns
            if turn is Turn.GAINS and steps[other].on == on and kind(other) == kind(name)
        ]
        return next(
            one
            for one in sorted(alike, key=lambda one: [*map(self.candidates.index, one)])
            if not known.gains(self.join(on, name), one)
        )

    def _add_rest(self, chain, known):
        """Try what was left out on top of the best set, first all of it together."""
        while True:
            on, (turns, steps) = chain[-1], known.due(chain, self.cheap)
            kept = [name for turn, name in turns if turn is Turn.GAINS and steps[name].on == on]
            if not kept:
                break
            chain.append(self._first_alike(kept[0], on, turns, steps, known))
        rest = list(
            {
                kind(name): name
                for turn, name in reversed(turns)
                if turn <= Turn.NEW and not ({*on} & {*self.costly} and name in RECOMPILING)
            }.values()
        )[::-1]
        both = self.join(on, *rest)
        if len(rest) > 1 and not known.is_out(both):
            together = [
                known.gains(one, on)
                for one in known.estimates
                if {*rest} <= {*one} - {*on} <= {*self.cheap}
                and {*on} < {*one}
                and known.n(one) >= LEAST_WINDOWS
            ]
            if not all(together) or known.is_hopeless(both, on):
                return []
            if not together:
                return [both] if known.can_afford(both) else []
        return [self.join(on, rest[0])] if rest else []

    def _open(self, chain, known):
        """Return the sets whose verdict is open, first those that decide on the best set."""
        names = [*self.cheap, *self.costly]
        open_ = [
            self.join(chain[-1], name)
            for turn, name in known.due(chain, names)[0]
            if turn is Turn.OPEN
        ]
        wanted = [*open_, *([chain[-1]] if open_ and chain[-1] else [])]
        wanted += [one for one in known.estimates if not known.is_out(one) and known.is_open(one)]
        return list(dict.fromkeys(wanted))
