"""What a run does from step to step: generators that go on with each step of the script."""

import gc
import itertools
import random
import statistics
import time

import torch

from whatif import parts, search, stats, techniques
from whatif.inside import files, gpu, places, state
from whatif.inside.clock import compiled, numbers
from whatif.techniques import amp

WATCHED = 10  # steps, at least, that are watched
SETTING_UP = 3  # steps after the first one, at most, before that
WATCH_SECONDS = 2.0, 20.0  # the least, and the most
CHECKED = 0.2  # seconds between two checks of several processes whether that is over
WINDOW = {"cuda": 0.2, "cpu": 0.7}  # seconds; what drifts within seconds cancels in short ones
TURNS = 30.0  # seconds for turns, at least, or half of what is left
LONGER = 1.5  # times its length, from which a first window counts
LEAST = 3  # steps of a window on a CPU and of other measurements; steps that warm up what is slow
SHORTEST = {"cuda": 1, "cpu": LEAST}  # steps of a window, at least
ALONE = 8  # windows of the script as it is, if nothing is tried
ROUND = 3  # windows of sets in a round, at least
WARM = {"cuda": 1, "cpu": 2}  # steps before a window, after a switch
FIRST_WARM = 6, 80, 240.0  # the first time: at least and at most so many steps, or seconds, ...
LONG = 0.1  # ... but LEAST steps if one takes longer than these seconds, and nothing compiles
SLOW = 5.0, 2.0  # times a plain step, and seconds, from which two steps in a row are given up
SHARE = 0.1  # of the watched time, from which long gaps between steps count, as rollouts
WARMUP = 3.0  # seconds of a whole process before its clock begins
GRACE = 20.0  # seconds after the deadline, for sets that have begun
COSTLY = 25.0  # seconds before it, in which nothing begins to compile
BUSY = 0.9  # a GPU whose own time is a larger share of a step does not wait for the host
GRAPHS = "compile reduce-overhead"
COUNTED = 2.0  # seconds after which a process that trains beside the first one tells its rate
BESIDE = 3.0  # seconds in which steps and the loader run at once
WAITS, QUEUED, KERNELS = 3, 5, 10  # steps in which these are looked for, at most


def watch(run):
    """Watch some steps as the script does them; then choose the models."""
    begin, began, worked = time.perf_counter(), time.time(), 0.0
    run.times = [0.0]  # when each step ended, without validation and waits for data
    moments = [begin]  # and with them
    run.clock.begin()
    set_up = {}  # what the first steps took; an evaluation between them may take most of it
    check = 0  # the step after which all processes ask the first one whether that is all
    while True:
        yield
        moments.append(time.perf_counter())
        run.times.append(worked + run.clock.seconds() - run.clock.counts["wait"])
        steps, took = len(run.times) - 1, moments[-1] - begin
        if not set_up:
            if run.agree(steps >= SETTING_UP or took >= WATCH_SECONDS[1]):
                first = run.clock.end()
                set_up = dict(next=first["seconds"], other=first["whole"] - first["seconds"])
                set_up |= dict(set_up=steps, compiled=compiled() > 0)  # CUDA graphs come later
                begin, worked = moments[-1], run.times[-1]
                run.clock.begin()
            continue
        if run.ranks()[1] > 1 and steps < check:
            continue
        after = steps - set_up["set_up"]
        more = int(CHECKED * after / took)
        is_over, more = run.agree((has_seen_enough(run, moments, after), more))
        if is_over:
            break
        check = steps + 1 + max(0, min(more, WATCHED))
    run.cycle = cycle_of(run.times)
    run.watched = run.clock.end() | dict(
        batches=run.loaders.batches / run.steps,
        began=began,
        gaps=[round(after - before, 6) for before, after in zip(run.times, run.times[1:])],
        cycle=run.cycle if is_regular(run.times) else 1,
        **set_up,
    )
    run.loaders.ends = run.spec.get("epochs") or any(
        places.counts_batches(*each) for each in run.places.frames()
    )
    run.models.choose(run.steps)
    run.send(facts=run.facts(), watched=run.watched)


def has_seen_enough(run, moments, after):
    """Return whether the steps that ended at these moments, `after` of them once set up, do."""
    least, most = WATCH_SECONDS
    took, steps = moments[-1] - moments[-1 - after], len(moments) - 1
    if steps >= WATCHED:
        is_between = awaits(run.times) or run.loaders.at_an_end()
        return took >= most or took >= least and not is_between
    gaps = [later - before for before, later in itertools.pairwise(moments)]
    is_slow = steps * statistics.median_low(gaps) >= most  # with what the first steps took
    return is_slow or took >= most and after >= LEAST  # a single gap may be an evaluation


def gaps_of(times):
    """Return (seconds between steps, without the first two; numbers of the long ones)."""
    gaps = [after - before for before, after in zip(times, times[1:])][2:]
    if not gaps:
        return [], []
    middle = statistics.median(gaps)
    return gaps, [number for number, gap in enumerate(gaps) if parts.is_long(gap, middle)]


def awaits(times):
    """Return whether there is work between steps whose period is not known yet."""
    gaps, long = gaps_of(times)
    return (
        bool(long) and len(long) < 3 and sum(gaps[number] for number in long) > (SHARE * sum(gaps))
    )


def cycle_of(times):
    """Return after how many steps the script does other work (a rollout), or 1."""
    gaps, long = gaps_of(times)
    once = max(gaps, default=0)  # done once, such as an evaluation, it hides a stall of the machine
    if len(long) < 2 or sum(gaps[number] for number in long) - once < SHARE * (sum(gaps) - once):
        return 1
    # the most frequent distance: stalls of the machine between two rollouts make shorter ones
    return max(statistics.multimode(after - before for before, after in zip(long, long[1:])))


def is_regular(times):
    """Return whether other work comes again after the same number of steps, which stalls do not."""
    _, long = gaps_of(times)
    return len(long) > 2 and len({after - before for before, after in zip(long, long[1:])}) == 1


def watch_only(run):
    """Count the steps of a process that trains beside the first one, and leave it as it is."""
    run.models.stop()
    run.send(beside={})  # it is not the one that is measured, though it may end first
    while True:
        run.clock.begin()
        begin = time.perf_counter()
        while time.perf_counter() - begin < COUNTED:
            yield
        run.send(beside=run.clock.end())


def calm_down(run, least=FIRST_WARM[0], plain=None):
    """Take steps until nothing compiles any more, and the scaler leaves out no step.

    What is on fails if its steps take many times `plain`, the seconds of one without it.
    """
    begin, calm, steps, slow = time.perf_counter(), 0, 0, 0
    wanted = amp.CALM if run.scaler else 2
    if run.ranks()[1] > 1:  # each rank has to take as many
        for _ in range(max(12, wanted)):
            yield
        return
    while (
        not run.failed
        and steps < FIRST_WARM[1]
        and (time.perf_counter() - begin < FIRST_WARM[2])
        and (steps < least or calm < wanted)
    ):
        before, scale = compiled(), amp.scale_of(run)
        run.skipped, begun = False, time.perf_counter()
        yield
        steps, took = steps + 1, time.perf_counter() - begun
        is_skipped = run.skipped or amp.scale_of(run) < scale
        calm = calm + 1 if compiled() == before and not is_skipped else 0
        slow = slow + 1 if calm and plain and took > max(SLOW[0] * plain, SLOW[1]) else 0
        if slow > 1:
            run.failed = f"a step takes {took:.1f} s, {took / plain:.0f} times as long as without"


class Choice:
    """Which sets get windows next: the part of Turns that looks at what there is."""

    def look_for(self, names):
        """Search the best set of these techniques."""
        self.names, self.search = (
            names,
            search.Search(
                names, margin=(stats.MARGIN_GPU if self.run.device == "cuda" else stats.MARGIN_CPU)
            ),
        )

    def reasons(self):
        """Return {technique: why it is not tried}, and tell it."""
        found = self.run.facts()
        why = techniques.reasons(found, techniques.NAMES)
        self.run.send(facts=found, why_not=why)
        return why

    def estimates(self):
        """Return {set: Estimate} of the windows until now."""
        return stats.estimates(
            [stats.Window(tuple(each["names"]), each["rate"], each["at"]) for each in self.windows]
        )

    def needed(self):
        """Return how many batches/s the best set computes, or None; a step may take several."""
        rates = [
            each["steps"] / each["seconds"]
            for each in self.windows
            if tuple(each["names"]) == self.search.best(self.estimates(), self.failed)
        ]
        return statistics.median(rates) * (self.run.watched["batches"] or 1) if rates else None

    def wanted(self):
        """Return the sets of the next round, in a new order; none if there is no time left."""
        sets, found = [], self.estimates()
        if self.run.ranks()[0] == 0:
            self.until = self.deadline
            if not self.search.best(found, self.failed):  # nothing to confirm but workers
                half, waiting = self.run.spec.get("waiting", (0, 0.0))
                last = half if self.may_gain_workers(waiting) else self.run.spec.get("last", 0)
                self.until = max(self.deadline, last)
            left = self.until - time.time()
            sets = [
                names
                for names in self.search_now(left, found).wanted(found, self.failed)
                if left > 0
                and (names in found or self.cost(names) < left + GRACE)
                or left > -GRACE
                and names in found
                and found[names].low is None
            ]
            self.order.shuffle(sets)
            self.is_explored = all(
                names in found and found[names].n >= stats.LEAST_WINDOWS for names in sets
            )
        return self.agree(sets)

    def may_gain_workers(self, waiting):
        """Return whether steps wait for data and workers can be tried, in whole processes."""
        watched = parts.only_steps(self.run.watched, self.known.get((), 0.0))
        return (
            "workers" in self.run.spec["only"]
            and "workers" not in self.why
            and (watched["wait"] > waiting * watched["seconds"])
        )

    def search_now(self, left, found):
        """Return the search; near the end without costly techniques that have no windows yet."""
        if left > COSTLY:
            return self.search
        known = {name for names in found for name in names}
        return search.Search(
            [name for name in self.names if name in known or not self.is_costly((name,))],
            margin=self.search.margin,
            most_costly=0,
        )

    def cost(self, names):
        """Return about how many seconds the next window of a set takes, and the plain one."""
        step, steps = self.known.get((), 0), self.steps_of(names) + WARM.get(self.run.device, 2)
        return step * (2 * steps + (0 if names in self.known else FIRST_WARM[0]))

    @staticmethod
    def is_costly(names):
        return any(techniques.kind(name) in search.COSTLY for name in names)

    def consider_graphs(self):
        """Let CUDA graphs be tried if the GPU waits for the host under the best set."""
        run = self.run
        known = GRAPHS in self.names or GRAPHS in self.why  # why not is known to rank 0
        if self.agree(known or "compile" not in run.spec["only"]):
            return False
        run.switch(self.agree(self.search.best(self.estimates(), self.failed)))
        yield from calm_down(run, LEAST)
        steps = self.agree(max(1, min(QUEUED, int(QUEUED / self.known.get((), 1.0)))))
        share = self.agree((yield from gpu.queued_share(run, steps)) or 0.0)
        run.switch(())
        self.state.put_back()
        self.why[GRAPHS] = (
            f"a step of the best set takes {share:.0%} of its time if its kernels are queued "
            "before, so the host does not hold the GPU back"
        )
        if share < BUSY:
            del self.why[GRAPHS]
            self.look_for([*self.names, GRAPHS])
        run.send(why_not=self.why)
        return share < BUSY


def peak(run):
    """Return the most memory that torch has allocated on a GPU, or None."""
    return torch.cuda.max_memory_allocated() if run.device == "cuda" else None


def window_of(run, names, found):
    """Return the record of a window with a set, from what the clock has found."""
    work, loss = found["samples"] or found["steps"], run.last_loss
    return dict(
        names=names,
        rate=work * run.ranks()[1] / found["seconds"],
        at=time.time(),
        steps=found["steps"],
        seconds=found["seconds"],
        unit="samples" if found["samples"] else "steps",
        memory=found.get("memory"),
        finite=loss is None or abs(float(loss)) < float("inf"),
    )


class Turns(Choice):
    """Windows of sets by turns, from one state and on kept batches."""

    def __init__(self, run):
        spec = run.spec
        now, last = time.time(), spec.get("last", 0)  # a start may have taken most of the time
        self.run, self.agree = run, run.agree
        self.deadline = max(spec["deadline"], now + min(TURNS, (last - now) / 2))
        self.until = self.deadline
        self.windows = [dict(each) for each in spec.get("turns", ())]
        self.failed = {tuple(names): why for names, why in spec.get("failed", ())}
        self.known = {}  # seconds a step takes under a set
        self.round, self.is_explored = len(self.windows), False
        self.length = spec.get("window") or WINDOW.get(run.device, 0.7)
        self.shortest = SHORTEST.get(run.device, LEAST)
        self.order, self.base = random.Random(self.round), {}

    def prepare(self):
        """Hold back what the script writes, repeat its batches, and copy its state."""
        run = self.run
        run.send(phase="turns", turns_began=time.time())
        files.hold_everything(run.spec)
        gc.collect()
        gc.freeze()  # what torch and this package have loaded is not looked through in windows
        run.loaders.begin_repeats()
        run.cycle = max(
            [run.cycle, *(kept.cycle(run.watched["batches"]) for kept in run.loaders.kept.values())]
        )
        modules = [*run.models.inner(), *(each for each in run.models.known)]
        schedulers = run.live("schedulers")
        self.state = state.State(
            dict.fromkeys(modules), run.optimizers, schedulers, run.live("scalers")
        )
        state.stand_still(schedulers)
        run.settings = dict(
            cudnn=torch.backends.cudnn.benchmark, tf32=torch.get_float32_matmul_precision()
        )
        if run.device == "cuda":
            torch.cuda.synchronize()
            self.base["memory"] = torch.cuda.memory_allocated()
        self.why = {} if run.ranks()[0] else self.reasons()
        self.look_for(
            [
                name
                for name in techniques.NAMES
                if name not in techniques.LOADING
                and techniques.kind(name) in run.spec["only"]
                and name not in self.why
                and name != GRAPHS
            ]
        )

    def measure(self):
        """Take turns until no set is open, or time is over."""
        yield from self.window(())
        for _ in range(0 if self.names else ALONE - 1):  # --only plain, to compare records
            if self.agree(time.time() < self.deadline):
                yield from self.window(())
        while True:
            sets = self.wanted()
            # before more windows of what is open: a script whose host scatters may stay open
            if self.agree(self.is_explored and time.time() < self.deadline - COSTLY) and (
                yield from self.consider_graphs()
            ):
                continue
            if not sets:
                break
            sets *= -(-ROUND // len(sets))  # a round is worth putting the state back
            for number, names in enumerate(sets, 1):
                if self.agree(time.time() + self.cost(names) > self.until + GRACE):
                    return
                if names in self.failed and number < len(sets):
                    continue
                yield from self.window(names)
                if number == len(sets):  # the next round begins with its plain window
                    self.state.put_back()
                yield from self.window(())
        self.state.put_back()

    def steps_of(self, names):
        """Return how many steps a window of a set takes: whole cycles."""
        step = (
            self.known.get(names)
            or self.known.get(())
            or statistics.median(gaps_of(self.run.times)[0] or [self.length])
        )
        cycle = self.run.cycle
        least = max(self.shortest, -(-self.length // max(step, 1e-6)))
        return int(-(-least // cycle) * cycle)

    def window(self, names):
        """Switch to a set, let it warm up, and time a window of it."""
        run = self.run
        if names in self.failed:  # earlier in this round
            return
        is_new = self.agree(names not in self.known)
        run.send(now=names)
        run.failed = ""
        try:
            run.switch(names)
        except Exception as error:  # an optimizer or a model may refuse it
            run.fail(error)
        if is_new and not run.failed:
            is_long = self.known.get((), 0) > LONG and not self.is_costly(names)
            least = LEAST if not names or is_long else FIRST_WARM[0]
            yield from calm_down(run, least, self.known.get(()))
            run.failed = run.failed or run.models.why_small(names, run.loaders.size())
        for attempt in range(3 + is_new):
            if self.gives_up(names):
                return
            found = yield from self.timed(names)
            if found and not self.gives_up(names):
                self.known[names] = found["seconds"] / max(1, found["steps"])
                # the first one only tells how long a step takes, unless it was long enough
                if attempt or not is_new or self.agree(found["seconds"] > LONGER * self.length):
                    self.add(names, found)
                    return
        if names and self.agree(names not in self.known):
            run.failed = run.failed or "a step compiled or was skipped in each window"
        self.gives_up(names)

    def timed(self, names):
        """Time a window; return its counts, or None if something compiled or a step was skipped."""
        run = self.run
        scale = amp.scale_of(run)  # before the last steps until the window: this waits for the GPU
        for _ in range(WARM.get(self.run.device, 2)):
            yield
        steps, before, run.skipped = self.agree(self.steps_of(names)), compiled(), False
        run.loaders.rewind()
        if run.device == "cuda":
            held = torch.cuda.memory_allocated() - self.base["memory"]
            torch.cuda.reset_peak_memory_stats()
        run.clock.begin(in_flow=True)
        for _ in range(steps):
            yield
        found = run.clock.end()
        if run.device == "cuda":
            found["memory"] = torch.cuda.max_memory_allocated() - max(0, held)
        lost = compiled() != before or run.skipped or amp.scale_of(run) < scale
        if self.agree(found["steps"] < min(steps, LEAST)):  # other work between its steps
            self.shortest, lost = LEAST, lost or steps < LEAST or not found["steps"]
        if self.agree(lost):
            run.send(thrown_away=names)
            return None
        return found

    def gives_up(self, names):
        """Return whether a set has failed; if so, put the state back and do not try it again."""
        run = self.run
        if not self.agree(bool(run.failed)):
            return False
        why = run.failed or "it failed in another process"
        run.failed = ""
        with torch.no_grad():
            run.switch(())
        run.models.forget(names)
        run.scaler = None
        self.state.put_back()
        self.failed[names] = why
        run.send(fails=[names, why])
        return True

    def add(self, names, found):
        """Add a window and tell it."""
        self.windows.append(window_of(self.run, names, found))
        self.run.send(window=self.windows[-1])


def by_turns(run):
    """Watch, measure the sets by turns, then look at waits, kernels and the loader."""
    yield from watch(run)
    turns = None
    if sharded := run.models.sharded():
        run.send(
            no_turns=f"Turns cannot change a model that {sharded} shards.",
            why_not=techniques.reasons(run.facts(), techniques.NAMES),
        )
        yield from as_it_is(run)
    else:
        turns = Turns(run)
        turns.prepare()
        yield from turns.measure()
        run.switch(())
        run.send(turns_over=time.time())
    is_alone = run.ranks()[1] == 1
    if run.device == "cuda" and is_alone:
        yield from gpu.find_waits(run, WAITS)
    if run.ranks()[0] == 0:
        loader, found = measure_loading(run, turns.needed() if turns else None)
        if turns and found and is_alone:
            yield from compute_beside(run, turns, loader, found)
    if run.device == "cuda" and is_alone:  # last: it may slow what comes after it
        busy, kinds = yield from gpu.time_kernels(run, KERNELS)
        run.send(busy=busy, kernels=kinds)
    run.send(facts=run.facts())


def as_it_is(run):
    """Measure the script without any change, with real loading."""
    files.hold_everything(run.spec)
    run.loaders.keeps = False
    step = statistics.median(gaps_of(run.times)[0] or [1.0])
    steps = run.agree(max(LEAST, int(run.spec["seconds"] / max(step, 1e-6))))
    run.clock.begin()
    for _ in range(steps):
        yield
    found = run.clock.end()
    if found["steps"]:
        run.send(window=window_of(run, (), found | dict(memory=peak(run))))


def measure_loading(run, needed):
    """Measure the first training loader by itself; a step could take `needed` batches/s.

    Return the loader and what was found, or None for both.
    """
    numbers = run.loaders.training()
    loader = run.loaders.live.get(numbers[0]) if numbers else None
    if loader is None or not run.spec.get("loader_seconds"):
        return None, None
    from whatif.inside import loading

    run.send(phase="loader")
    found = loading.measure_loader(
        loader, run.spec["loader_seconds"], run.spec["cores"], run.places.is_users, needed
    )
    for each in found.get("lines", ()):
        file, _, line = each["at"].rpartition(":")
        each["at"] = f"{run.places.shown(file)}:{line}"
    run.send(loading=found)
    return loader, found


def compute_beside(run, turns, loader, found):
    """Where steps and workers share the cores, measure both at once: as it is, and the best set."""
    from whatif.inside import loading

    if 2 * LEAST * turns.known.get((), 0) > run.spec["loader_seconds"]:
        return  # slow steps: it would take too long
    as_is, enough = found["as_is"]["workers"], (found.get("enough") or {}).get("workers")
    best = turns.search.best(turns.estimates(), turns.failed)
    wanted = {as_is: [(), best] if best and found.get("rate") else []}
    if best:
        wanted.setdefault(enough, []).append(best)
    for workers, sets in wanted.items():
        if not sets or not workers or run.device == "cuda" and workers < run.spec["cores"]:
            continue
        with loading.Beside(loader, workers) as reading:
            for names in sets:
                run.switch(names)
                yield from both_at_once(run, names, workers, reading)
        run.switch(())


def both_at_once(run, names, workers, reading):
    """Take steps while the loader reads; tell the seconds of a step and of a batch."""
    for _ in range(LEAST):
        yield
    reading.mark()
    run.clock.begin()
    while run.clock.seconds() < BESIDE or run.clock.counts["steps"] < LEAST:
        yield
    both, rate = run.clock.end(), reading.rate()
    if rate and both["steps"]:
        run.send(
            both=dict(
                names=names,
                workers=workers,
                loading=1 / rate,
                compute=both["seconds"] / both["steps"],
            )
        )


def whole(run):
    """Measure the script with a set and real loading, from its first steps on."""
    spec = run.spec
    files.hold_everything(spec)
    run.loaders.keeps = False
    run.settings = dict(
        cudnn=torch.backends.cudnn.benchmark, tf32=torch.get_float32_matmul_precision()
    )
    names = tuple(spec["techniques"])
    yield from watch(run)
    run.switch(tuple(name for name in names if name not in techniques.LOADING))
    yield from calm_down(run)
    while run.ranks()[0]:  # rank 0 ends the run
        yield
    began, steps = time.perf_counter(), run.steps
    ahead = 2 * max(
        (run.loaders.about[number]["workers"] for number in run.loaders.training()), default=0
    )
    while spec["seconds"] and (
        time.perf_counter() - began < WARMUP
        or (run.steps - steps < ahead and time.perf_counter() - began < 3 * WARMUP)
    ):
        yield
    if run.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run.clock.begin()
    windows = []
    while run.clock.seconds() < spec["seconds"] or run.steps < spec["least_steps"]:
        yield
        if run.clock.seconds() > (len(windows) + 1) * max(1, spec["seconds"] / 10):
            windows.append(run.clock.seconds())
            run.send(progress=len(windows) / 10)
    found = run.clock.end()
    run.send(
        whole=found, losses=numbers(run.losses), facts=run.facts(), names=names, memory=peak(run)
    )
