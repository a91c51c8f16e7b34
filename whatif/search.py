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


def is_out(one, failed):
    """Return whether a set contains one that failed."""
    return any({*bad} <= {*one} for bad in failed)


def ratio(one, other, estimates):
    """Return the Estimate of a set relative to another one."""
    return quotient(estimates[one], estimates[other] if other else None)


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
        return self._explore(estimates, failed)[1]

    def best(self, estimates, failed=()):
        """Return the fastest set that is known now, () if nothing gains.

        Each of its techniques gained when it was added to the others before it.
        """
        best, proven = self._explore(estimates, failed)[0], {()}
        for one in sorted(estimates, key=lambda one: (len(one), one)):
            if (
                not is_out(one, failed)
                and not {*one} & {*self.never}
                and any(
                    stats.gains(ratio(one, on, estimates))
                    for on in proven
                    if len(on) == len(one) - 1 and {*on} < {*one}
                )
            ):
                proven.add(one)
        ordered = sorted(
            proven - {()}, key=lambda one: (len(one), [*map(self.candidates.index, one)])
        )
        while better := [one for one in ordered if stats.gains(ratio(one, best, estimates))]:
            best = better[0]  # the simplest; it goes on while another one is clearly faster
        return best

    def verdict(self, one, estimates):
        """Return the Verdict on a set relative to the script as it is."""
        return verdict(estimates.get(one), self.margin)

    def join(self, on, *names):
        """Return the set `on` with more techniques, in the order of the candidates."""
        return tuple(name for name in self.candidates if name in on or name in names)

    # -------------------------------------------------------------------------- what is known
    def _n(self, one, estimates):
        return estimates[one].n if one in estimates else 0

    def _is_hopeless(self, one, on, estimates):
        """Return whether the first windows of a set are all much slower than the set before it."""
        base = estimates[on].speedup if on else 1
        return self._n(one, estimates) >= HOPELESS_WINDOWS and (
            max(estimates[one].ratios) < HOPELESS * base
        )

    def _can_afford(self, one, estimates):
        """Return whether a set is not costly, or compiled already, or one more may be compiled."""

        def compiled(other):
            return tuple(name for name in other if kind(name) not in UNCOMPILED)

        costly, alone = {*self.costly}, {(name,) for name in self.costly}
        begun = alone | {compiled(other) for other in estimates if {*other} & costly}
        return not {*one} & costly or compiled(one) in begun or len(begun) < self.most_costly

    def _step(self, name, chain, estimates, failed):
        """Return the last Step of a technique, on top of one of the sets in `chain`; or None.

        What is clearly slower on top of one set counts as failed on top of later ones.
        """
        for on in reversed(chain):
            one = self.join(on, name)
            if (
                is_out(one, failed)
                or self._is_hopeless(one, on, estimates)
                or (on == chain[-1] and not self._can_afford(one, estimates))
            ):
                return Step(on, failed=True)
            if self._n(one, estimates) >= LEAST_WINDOWS:
                found = ratio(one, on, estimates)
                told = verdict(found, self.margin)
                return Step(on, found, told is not Verdict.OPEN, told is Verdict.SLOWER)
        return None

    def _due(self, chain, names, estimates, failed):
        """Return (what is due on top of the last set of `chain`, the Steps)."""
        steps = {
            name: step for name in names if (step := self._step(name, chain, estimates, failed))
        }
        return due(chain[-1], names, steps), steps

    # -------------------------------------------------------------------------- the phases
    def _explore(self, estimates, failed):
        """Return (the best set, the sets to measure next)."""
        chain, known = [()], (estimates, failed)
        singles = [
            [(name,) for name in names] for names in (self.cheap, self.costly, self.candidates)
        ]
        contenders = self._contenders(*known)
        if wanted := self._lacking(singles[0], *known):
            self._climb(chain, contenders, *known)
            return chain[-1], wanted
        wanted = (
            self._climb(chain, contenders, *known)
            or self._climb(chain, self.costly, *known)
            or self._lacking(self._unknown(singles[1], estimates), *known)
            or self._add_rest(chain, *known)
            or self._lacking(self._unknown(singles[2], estimates), *known, hopeless=True)
            or self._open(chain, *known)
        )
        return chain[-1], wanted

    def _lacking(self, sets, estimates, failed, hopeless=False):
        """Return the sets that have too few windows, the hopeless ones only if asked."""
        return [
            one
            for one in sets
            if not is_out(one, failed)
            and self._n(one, estimates) < LEAST_WINDOWS
            and (hopeless or not self._is_hopeless(one, (), estimates))
        ]

    def _unknown(self, sets, estimates):
        """Return those of the sets, without the costly ones that a larger set has shown."""
        known = {
            kind(name)
            for one, found in estimates.items()
            if len(one) > 1 and found.n >= LEAST_WINDOWS
            for name in one
            if name in self.costly
        }
        return [one for one in sets if not (one[0] in self.costly and kind(one[0]) in known)]

    def _contenders(self, estimates, failed):
        """Return the techniques that may be part of the sum, the most promising first.

        Alone they gain, or may do so, and no other of their kind is clearly faster.
        """
        found = {
            name: estimates[name,]
            for name in self.cheap
            if (name,) in estimates
            and not is_out((name,), failed)
            and not self._is_hopeless((name,), (), estimates)
            and (stats.gains(estimates[name,]) or self.verdict((name,), estimates) is Verdict.OPEN)
        }
        kept = [
            name
            for name in found
            if not any(
                kind(other) == kind(name)
                and verdict(quotient(found[name], found[other]), self.margin) is Verdict.SLOWER
                for other in found
            )
        ]
        return sorted(kept, key=lambda name: -found[name].speedup)

    def _climb(self, chain, names, estimates, failed):
        """Add what gains to the last set of `chain`; return the set to measure before more.

        `chain` grows in place: it begins with () and holds each set that was kept.
        """
        while True:
            turns, steps = self._due(chain, names, estimates, failed)
            turn, name = turns[0] if turns else (Turn.OPEN, None)
            if turn > Turn.NEW:
                return []
            if turn is not Turn.GAINS or steps[name].on != chain[-1]:
                return [self.join(chain[-1], name)]
            chain.append(self._first_alike(name, chain[-1], turns, steps, estimates))

    def _first_alike(self, name, on, turns, steps, estimates):
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
            if not stats.gains(ratio(self.join(on, name), one, estimates))
        )

    def _add_rest(self, chain, estimates, failed):
        """Try what was left out on top of the best set, first all of it together."""
        while True:
            on, (turns, steps) = chain[-1], self._due(chain, self.cheap, estimates, failed)
            kept = [name for turn, name in turns if turn is Turn.GAINS and steps[name].on == on]
            if not kept:
                break
            chain.append(self._first_alike(kept[0], on, turns, steps, estimates))
        rest = list(
            {
                kind(name): name
                for turn, name in reversed(turns)
                if turn <= Turn.NEW and not ({*on} & {*self.costly} and name in RECOMPILING)
            }.values()
        )[::-1]
        both = self.join(on, *rest)
        if len(rest) > 1 and not is_out(both, failed):
            together = [
                ratio(one, on, estimates)
                for one in estimates
                if {*rest} <= {*one} - {*on} <= {*self.cheap}
                and {*on} < {*one}
                and self._n(one, estimates) >= LEAST_WINDOWS
            ]
            if not all(map(stats.gains, together)) or self._is_hopeless(both, on, estimates):
                return []
            if not together:
                return [both] if self._can_afford(both, estimates) else []
        return [self.join(on, rest[0])] if rest else []

    def _open(self, chain, estimates, failed):
        """Return the sets whose verdict is open, first those that decide on the best set."""
        names = [*self.cheap, *self.costly]
        open_ = [
            self.join(chain[-1], name)
            for turn, name in self._due(chain, names, estimates, failed)[0]
            if turn is Turn.OPEN
        ]
        wanted = [*open_, *([chain[-1]] if open_ and chain[-1] else [])]
        wanted += [
            one
            for one in estimates
            if not is_out(one, failed) and self.verdict(one, estimates) is Verdict.OPEN
        ]
        return list(dict.fromkeys(wanted))
