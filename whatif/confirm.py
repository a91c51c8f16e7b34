"""The best set beside the script as it is, in whole processes with real loading, and its losses."""

import math
import statistics
import time

from whatif import advice, forecast, report, run, scriptoptions, stats, techniques

STEPS = 60  # of a run, at least, so that losses can be compared
LEAST_SECONDS = 3.0  # that a run measures
PAIRS = stats.LEAST_PAIRS
MOST_BEFORE = 0.8  # of --minutes: of more of them what comes before runs needs no larger share
CLEARLY = 1.05  # so much faster, other workers are proposed: the loader is measured once
LOOSEST = (
    "amp float16",
    "amp bfloat16",
    "tf32",
    "compile",
    "compile reduce-overhead",
    "fused",
    "channels_last",
    "cudnn",
)  # numerically, first


def numbers(losses):
    """Return losses as numbers; those that are not finite came as text."""
    return [float(each) for each in losses]


def minutes_for(runs, before, args):
    """Return the option with about the minutes that whole runs need, of `runs` seconds in all.

    `before` is how many seconds passed before them, which may be as large a share again.
    """
    share = min(MOST_BEFORE, before / (60 * args.minutes))
    enough = math.ceil(1.1 * max(before + runs, runs / (1 - share)) / 60)
    return f"--minutes {max(enough, int(args.minutes) + 1)}"


class Outlook:
    """The part of a Confirmation that forecasts, from compute and loading by themselves."""

    def __init__(self, session):
        self.session = session

    def with_workers(self, names):
        """Return the set with workers, if the loader by itself says that more of them pay."""
        found = self.session.found
        loading, plain = found.get("loading") or {}, self.session.baseline()
        enough, now = loading.get("enough"), loading.get("as_is", {}).get("workers")
        if (
            "workers" not in self.session.only
            or not enough
            or not plain["compute_seconds"]
            or ("workers" in found.get("why_not", {}))
            or enough["workers"] in (0, now)
        ):
            return names
        found["workers"] = enough["workers"]
        before, after = (self.forecast_of(each) for each in (names, (*names, "workers")))
        if forecast.speedup(before, after)[0] < CLEARLY:
            found["workers"] = 0
            return names
        return techniques.ordered({*names, "workers"})

    def forecast_of(self, names, is_beside=True):
        """Return the Forecast of a set with real loading: what a step takes.

        Both sides of a comparison have to know what loading beside steps takes, or none.
        """
        session, found = self.session, self.session.found
        facts, watched = session.facts(), found.get("watched") or {}
        compute_names = tuple(each for each in names if each not in techniques.LOADING)
        loading, one = found.get("loading") or {}, session.estimates().get(compute_names)
        compute = (session.baseline()["compute_seconds"] or 0) / (one.speedup if one else 1)
        about = [facts["loaders"][number] for number in facts["training"]][:1]
        workers = max((each["workers"] for each in about), default=0)
        rate = loading.get("rate")
        if "workers" in names:
            workers, rate = found["workers"], loading["enough"]["rate"]
        steps, batches = watched.get("steps") or 1, watched.get("batches") or 1
        both = next(
            (
                (each["compute"], batches * each["loading"])
                for each in found.get("beside", ())
                if is_beside
                and (each["workers"] == workers)
                and tuple(each["names"]) == compute_names
            ),
            None,
        )
        return forecast.forecast(
            compute,
            batches / rate if rate else 0.0,
            forecast.between_steps(watched.get("whole", 0), steps, watched.get("seconds", 0)),
            prefetches=bool(workers) or any(each["threaded"] for each in about),
            shares_cores=facts["device"] != "cuda" or workers >= facts["cores"],
            beside=both,
        )

    def off(self):
        """Return which part of the forecast was off, if it differs by more than 10 %; or ""."""
        low, high = forecast.speedup(self.forecast_of(()), self.forecast_of(self.names))
        speedup = self.estimate().speedup
        if low / (1 + forecast.APART) <= speedup <= high * (1 + forecast.APART):
            return ""
        told = []
        for names in (), self.names:
            timed = [each for each in self.runs[names] if each["is_timed"]]
            mean = [
                statistics.median(each[key] / each["steps"] for each in timed)
                for key in ("whole", "wait", "seconds")
            ]
            parts = forecast.parts_off(
                self.forecast_of(names), forecast.Confirmed(mean[0], mean[1], mean[0] - mean[2])
            )
            told += [
                f"{part} of {report.name_of(names)} by {report.duration(abs(seconds))} a step"
                for part, seconds in parts
            ]
        return ", ".join(told) or "no single part by more than 10 %"

    def step_off(self, names, before, after):
        """Return what a step took beside its forecast, if the speedup is more than 10 % off; or "".

        `before` and `after` are the seconds of a step of the script and of its copy with a set.
        """
        sides = [self.forecast_of(each) for each in ((), names)]
        low, high = forecast.speedup(*sides)
        if low / (1 + forecast.APART) <= before / after <= high * (1 + forecast.APART):
            return ""
        told = [" to ".join(dict.fromkeys(f"{each:.2f}x" for each in (low, high)))]
        for one, seconds in zip(sides, (before, after)):
            wanted = " to ".join(dict.fromkeys(map(report.duration, (one.low, one.high))))
            told.append(f"{report.duration(seconds)} in place of {wanted}")
        return "The forecast was {}: a step of the script took {}, one of its copy {}.".format(
            *told
        )

    def forecast_lines(self):
        """Return what the report says of the forecasts of the set and of its techniques."""
        if not self.names or "no_turns" in self.session.found:
            return []
        lines = []
        alone = [(name,) for name in self.names if (name,) in self.session.estimates()]
        for names in dict.fromkeys([*alone, self.names]):
            plain, one = (self.forecast_of(each, names == self.names) for each in ((), names))
            low, high = forecast.speedup(plain, one)
            how = (
                "range"
                if low < high
                else "longer"
                if one.low < (one.compute + one.loading + one.between)
                else "sum"
            )
            lines.append(
                dict(techniques=names, speedup=(low * high) ** 0.5, low=low, high=high, how=how)
            )
        return lines if self.session.found.get("loading") else []


class Confirmation(Outlook):
    """Pairs of runs, and what came out of them."""

    def __init__(self, session, show, names=None):
        self.session, self.show = session, show
        self.names = self.with_workers(session.best()) if names is None else names
        self.runs = {(): [], self.names: []}  # of whole processes, by set
        self.took, self.why, self.errors = [], "", {}
        self.losses, self.began, self.options = [], time.monotonic(), None

    def run(self, names, k, seconds, words=()):
        """Run a set in a process of its own, with seeds shifted by k; return its result.

        `words` are added to the command line, and to the set's name.
        """
        session, begin = self.session, time.monotonic()
        limit = max(60.0, session.left() + 30)
        n = len(self.runs.get((*names, *words), ()))
        what = f"{report.name_of((*names, *words))}, whole run {n + 1}"
        command = scriptoptions.new_command(
            session.command, session.args.kind, words, session.facts().get("options", ())
        )
        result = run.run_once(
            command,
            session.spec("fixed", names, seconds=seconds, seed=k),
            limit,
            lambda _: self.show(f"{time.monotonic() - session.began:.0f} s  {what}"),
        )
        self.took.append(time.monotonic() - begin - seconds)
        names = (*names, *words)
        if result["error"] or not result["windows"]:
            self.errors[names] = result["error"] or "it ended before it was measured"
            return None
        found = result["windows"][0] | dict(
            losses=numbers(result.get("losses", [])),
            memory=result.get("memory"),
            k=k,
            is_timed=seconds > 0,
            seen=result["facts"]["seen"],
        )
        self.runs.setdefault(names, []).append(found)
        return found

    def fits(self, runs, seconds):
        """Return whether there is time for so many runs."""
        each = statistics.fmean(self.took) if self.took else 15.0
        return self.session.left() > runs * (each + seconds)

    def share(self, runs, start):
        """Return for how many seconds each of so many runs can measure."""
        return max(
            LEAST_SECONDS, min(self.session.args.seconds, self.session.left() / runs - 1.1 * start)
        )

    def measure(self):
        """Run pairs until they agree, then what is missing to compare losses."""
        session = self.session
        if not self.names or not session.windows:
            return
        k, seconds = 0, self.share(2 * PAIRS + 1, session.seconds.get("start", 15.0))
        words = self.words()
        while self.fits(2 + bool(words), seconds):
            pair = [(), self.names] if k % 2 == 0 else [self.names, ()]
            if not all([self.run(names, k, seconds) for names in pair]):
                self.why = "; ".join(
                    f"{report.name_of(names)}: {why}" for names, why in self.errors.items()
                )
                break
            k += 1
            if k >= PAIRS and self.is_clear():
                break
            if k < PAIRS:
                seconds = self.share(2 * (PAIRS - k) + 1, statistics.fmean(self.took))
        while len(self.runs[()]) < stats.LEAST_PLAIN and self.fits(1, 0) and not self.errors:
            k += 1
            if not self.run((), k, 0):
                break
        self.compare_losses()
        if words and self.rates(()) and self.is_advised() and self.fits(1, seconds):
            self.try_options(words, seconds)
        session.seconds["confirmation"] = time.monotonic() - self.began

    # ---- the script's own options
    def words(self):
        """Return {technique: the words of the script's own option, which the advice names}."""
        facts, extra = self.session.facts(), self.session.extra()
        found = {name: advice.options_of(name, facts, extra) for name in self.names}
        return {
            name: words for name, words in found.items() if words and advice.are_words(words, facts)
        }

    def try_options(self, words, seconds):
        """Run the set once, with the script's own options in place of what whatif does."""
        rest = tuple(name for name in self.names if name not in words)
        flat = tuple(word for some in words.values() for word in some)
        found = self.run(rest, 0, seconds, flat)
        self.options = dict(
            words=flat,
            why=self.errors.get((*rest, *flat), ""),
            speedup=found and (self.rate(found) / statistics.median(self.rates(()))),
        )

    # ---- what came out
    def rates(self, names):
        timed = [each for each in self.runs[names] if each["is_timed"]]
        return [self.rate(each) for each in timed]

    @staticmethod
    def rate(found):
        return (found["samples"] or found["steps"]) / found["seconds"]

    def estimate(self):
        """Return the Estimate of the pairs, or None."""
        plain, mine = self.rates(()), self.rates(self.names)
        n = min(len(plain), len(mine))
        return stats.of_pairs(plain[:n], mine[:n]) if n else None

    def is_clear(self):
        return stats.is_clear(self.estimate())

    def is_advised(self):
        """Return whether the set is still advised: whole runs do not say that it is slower.

        What was not measured by turns has to be confirmed.
        """
        found = self.estimate()
        if "no_turns" in self.session.found and len(self.names) > 1 and not self.is_clear():
            return False
        changes = any(one["changes"] for one in self.losses)
        return not changes and not (self.is_clear() and found.high < 1)

    def minutes(self):
        """Return the option with about the minutes that the pairs need."""
        start = self.session.seconds.get("start", 15.0)
        each = (statistics.fmean(self.took) if self.took else start) + LEAST_SECONDS
        before = self.began - self.session.began
        return minutes_for((2 * PAIRS + 1) * each, before, self.session.args)

    def line(self):
        """Return what the report says of the confirmation, or None if nothing was to confirm."""
        if not self.names:
            return None
        found, clear = self.estimate(), self.is_clear()
        why = self.why or (
            ""
            if clear
            else f"there was no time for enough runs ({self.minutes()})"
            if not found or found.n < PAIRS
            else "its runs differ too much"
        )
        off = self.off() if clear and "no_turns" not in self.session.found else ""
        memory = [each["memory"] for each in self.runs[self.names] if each["memory"]]
        return dict(
            techniques=self.names,
            speedup=found and found.speedup,
            low=found and found.low,
            high=found and found.high,
            n=found.n if found else 0,
            confirmed=clear,
            why=why,
            off=off,
            options=self.options,
            memory=max(memory, default=None),
            rates=self.rates(()),
            rates_with=self.rates(self.names),
        )

    # ---- losses
    def compare_losses(self):
        """Say whether the set changes the training; if so, find the technique that does."""
        told = loss_of(self.names, self.runs[()], self.runs[self.names])
        if told["changes"] and len(self.names) > 1:
            for name in (each for each in LOOSEST if each in self.names):
                rest = tuple(each for each in self.names if each != name)
                if not self.fits(2, 0) or not all([self.run(rest, k, 0) for k in range(2)]):
                    break
                if loss_of(rest, self.runs[()], self.runs[rest])["changes"] is False:
                    told["culprit"] = name
                    break
        self.losses.append(told)


def loss_of(names, plain, mine):
    """Return what the report says of a set's losses, of runs without the set and with it."""
    means = stats.mean_losses([each["losses"] for each in (*plain, *mine)])
    of_plain, of_mine = (
        [each for each in some if each is not None]
        for some in (means[: len(plain)], means[len(plain) :])
    )
    told = dict(techniques=names, changes=None, culprit="", mean=None, low=None, high=None)
    if not of_mine or not of_plain:
        is_hidden = plain and not any(each["losses"] for each in plain)
        return told | dict(
            why="its losses cannot be seen: it calls backward() with gradients or autograd.grad()"
            if is_hidden
            else f"runs made fewer than {stats.LEAST_LOSSES} steps"
            if plain and mine
            else "there are no whole runs of both"
        )
    verdict = stats.changes_training(of_plain, of_mine)
    return told | dict(
        changes=verdict.changes,
        why=verdict.why,
        mean=verdict.mean,
        low=verdict.low,
        high=verdict.high,
    )
