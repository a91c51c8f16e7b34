"""Run a user's script before and after techniques were added, and compare what both do.

`compose.sh --into FILE TECHNIQUE ... --verify -- OPTION ...` calls `verify`. watch.py runs the
scripts, in processes that are forked from this one, so PyTorch is imported once.
"""

import contextlib
import importlib
import math
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import torch
import watch

NUMBER = re.compile(r"(?<![\w.-])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?(?:e[-+]?\d+)?"
                    r"|\b(?:nan|inf)\b", re.I)
DATE = re.compile(r"\d+[-:/]\d+[-:/]\d+\S*|\d+:\d\d\b|0x[0-9a-f]+")
# numbers that are not compared: those that follow or precede such words
CLOCK = re.compile(r"(time|wait|sec\w*|took|speed|elapsed|eta|memory|_bytes|throughput)\W*$", re.I)
UNIT = re.compile(r" ?(s|ms|sec\w*|min\w*|[kMG]i?B|\w+/s)\b")
# what scripts import: each run is a fork that has them already
for name in ("torch._dynamo", "torchvision.models", "torchvision.transforms.v2", "PIL.Image", "tqdm",
             "lmdb"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
TEXTS = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".log", ".md", ".yaml", ".yml")
CHECKPOINTS = (".pt", ".pth", ".ckpt")


class Run(NamedTuple):
    """One run of a script: `ranks` 0 is without a launcher."""
    text: str
    ranks: int = 0
    exact: bool = True  # without what only changes rounding
    calm: bool = False  # comparable for any number of processes
    resumed: bool = False  # from the files of the same run when it had its first checkpoint
    number: int = 0


class Result(NamedTuple):
    error: str  # its last lines, or ""
    seen: list = []  # what watch.Recorder has kept, for each rank
    printed: dict = {}  # {(source, line with # for its numbers): [[numbers], ...]}
    written: dict = {}  # the same for text files
    states: dict = {}  # {name in a checkpoint: tensor of float32}


def numbers_of(text):
    """Return the numbers in each line of `text`: {the line with # for them: [[(number, digit)]]}.

    `digit` is what 1 in the last place is worth, 0 for a whole number. Times are left out.
    """
    found = defaultdict(list)
    for line in re.split(r"[\r\n]+", text):
        line, numbers = DATE.sub("*", line), []

        def take(match):
            if CLOCK.search(line[:match.start()]) or UNIT.match(line, match.end()):
                return "*"
            _, _, decimals = match[0].partition(".")
            digits, _, exponent = decimals.lower().partition("e")
            numbers.append((float(match[0].replace(",", "")),
                            10.0 ** (int(exponent or 0) - len(digits)) if decimals else 0.0))
            return "#"
        line = NUMBER.sub(take, line)
        if numbers and not re.search(r"%\|", line):  # a progress bar
            found[line].append(numbers)
    return found


def tensors_of(state, name=""):
    """Yield (name, tensor) for each tensor and number in a checkpoint."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from tensors_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, (list, tuple)):
        for key, value in enumerate(state):
            yield from tensors_of(value, f"{name}.{key}")
    elif torch.is_tensor(state):
        yield name, state.detach().double().flatten()


class Bench:
    """Runs versions of the script at `path` with `words` as its options, in temporary folders."""

    def __init__(self, path, words, folder, jobs=None):
        self.path, self.words = Path(os.path.abspath(path)), words
        self.folder, self.places, self.done, self.stores = Path(folder), {}, {}, []
        self.sample = self.folder / "sample"  # a small part of the data set, or None for all
        self.cores = len(os.sched_getaffinity(0))
        self.gpus = torch.cuda.device_count()  # does not start CUDA, which could not be forked
        self.longest = 0.0
        self.jobs = jobs or (1 if self.gpus else min(self.cores, 6))

    def results(self, *runs):
        """Return the Result of each run. Those not done yet run side by side."""
        waiting, active = [run for run in dict.fromkeys(runs) if run not in self.done], {}
        try:
            while waiting or active:
                busy = sum(len(processes) for processes, _ in active.values())
                if waiting and (not busy or busy + max(1, waiting[0].ranks) <= self.jobs):
                    run = waiting.pop(0)
                    active[run] = self.start(run), time.monotonic()
                    continue
                wait([process.sentinel for processes, _ in active.values()
                      for process in processes if process.is_alive()], 0.5)
                for run, (processes, started) in [*active.items()]:
                    lasted = time.monotonic() - started
                    if (error := self.error(run, processes, lasted)) is not None:
                        self.kill(processes)
                        self.done[run] = self.collect(run, error)
                        self.longest = max(self.longest, lasted)
                        del active[run]
        finally:
            for processes, _ in active.values():
                self.kill(processes)
        return [self.done[run] for run in runs]

    def place(self, run):
        """Return the folder of a run."""
        return self.places.setdefault(run, self.folder / str(len(self.places)))

    def start(self, run):
        """Return the processes of a run, started."""
        place = self.place(run)
        place.mkdir(parents=True)
        if run.resumed:
            shutil.copytree(self.place(run._replace(resumed=False)) / "stopped", place / "files")
        (place / "files").mkdir(exist_ok=True)
        variables = {}
        if run.ranks:
            store = torch.distributed.TCPStore("localhost", 0, is_master=True,
                                               wait_for_workers=False)
            self.stores.append(store)  # it lives as long as the run
            variables = {"WORLD_SIZE": run.ranks, "LOCAL_WORLD_SIZE": run.ranks, "MASTER_PORT":
                         store.port, "MASTER_ADDR": "localhost", "GROUP_WORLD_SIZE": 1,
                         "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True}
        if run.calm and self.gpus < 2:  # two processes cannot share a GPU
            variables["CUDA_VISIBLE_DEVICES"] = ""
        processes = []
        for rank in range(max(1, run.ranks)):
            own = {"RANK": rank, "LOCAL_RANK": rank} if run.ranks else {}
            processes.append(multiprocessing.get_context("fork").Process(
                target=watch.run_script, kwargs=dict(
                    path=self.path, text=run.text.encode("utf-8", "surrogateescape"),
                    words=self.words, folder=place, rank=rank, exact=run.exact, calm=run.calm,
                    threads=max(1, self.cores // self.jobs), halves=not run.ranks,
                    variables={key: str(value) for key, value in {**variables, **own}.items()},
                    sample=self.sample, options={
                        "--result_dir": place / "files" / "runs", "--lmdb": self.folder,
                             **({"--resume": "auto"} if run.resumed else {})})))
            processes[-1].start()
        return processes

    def kill(self, processes):
        """End the processes and the workers that they have started."""
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                process.kill()  # it has no group of its own yet
            process.join()

    def error(self, run, processes, lasted):
        """Return None while a run goes on, "" when it ended well, or what went wrong."""
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed:
            errors = [self.place(run) / f"err{rank}" for rank in failed]
            first = min(errors, key=lambda path: path.stat().st_mtime)
            lines = [line for line in first.read_text(errors="replace").splitlines() if line]
            code = processes[failed[0]].exitcode
            return "\n".join(lines[-4:]) or f"it ended with status {code}"
        if all(process.exitcode == 0 for process in processes):
            return ""
        limit = 300 + 20 * self.longest + (0 if run.exact else 900)  # compiling takes minutes
        return f"it did not end in {limit:.0f} s" if lasted > limit else None

    def read(self, path):
        """Return the text of a run's file without the names of the temporary folders."""
        text = path.read_text(errors="replace")
        return re.sub(rf"{re.escape(str(self.folder))}/\d+", "", text)

    def collect(self, run, error):
        """Return what a run has left as a Result."""
        place = self.place(run)
        if error:
            return Result(error)
        seen = [torch.load(place / f"seen{rank}") for rank in range(max(1, run.ranks))]
        lines = numbers_of(self.read(place / "out0") + self.read(place / "err0"))
        written, states = {}, {}
        for path in sorted((place / "files").rglob("*.*")):
            name = str(path.relative_to(place / "files"))
            if path.suffix in TEXTS:
                written |= {(name, line): rows
                            for line, rows in numbers_of(self.read(path)).items()}
            if path.suffix in CHECKPOINTS:
                try:
                    state = torch.load(path, map_location="cpu", weights_only=True)
                except Exception:  # not a dict of tensors
                    continue
                states |= {f"{name}: {key}": value for key, value in tensors_of(state)}
        return Result("", seen, {("", line): rows for line, rows in lines.items()}, written, states)


# -------------------------------------------------------------------------------- comparing
class Figure(NamedTuple):
    """One number, or several, of a run before and after, and how far they differ."""
    quantity: str
    where: str
    before: object
    after: object
    difference: float
    time: str = ""  # of lines that are printed several times


QUANTITIES = ["images", "loss", "learning rates", "weights", "weights of the processes",
              "checkpoint", "printed numbers", "numbers in files"]
ALLOWED = 1e-6  # relative, in float64
ROUNDING = {"amp": 0.05, "DALI": 0.05}  # of a loss in the script's own precision; other techniques:
OTHERS = 0.01
DALI_IMAGES = 0.05  # of their standard deviation: DALI decodes and resizes JPEGs a little otherwise


def distance(one, other, scale=None):
    """Return how far two tensors are apart, relative to the norm of `scale`, or of the first."""
    if one.shape != other.shape:
        return math.inf
    if one.nan_to_num().equal(other.nan_to_num()):
        return 0.0
    return ((one - other).norm() / (one if scale is None else scale).norm().clamp(min=1e-12)).item()


def mean(ranks):
    """Return the mean over processes of equally long lists."""
    return [sum(each) / len(each) for each in zip(*ranks)]


def figures(before, after):
    """Yield a Figure for all that two Results have in common, in the order of QUANTITIES."""
    def tensor(value):
        return torch.tensor(value, dtype=torch.float64)
    old, new = before.seen, after.seen
    for k, ones in enumerate(zip(*[each["inputs"] for each in old])):
        others = [each["inputs"][k] for each in new if len(each["inputs"]) > k]
        one, other = (torch.stack(ranks, 1).flatten(0, 1) if len(ranks) > 1 and len(
            {rank.shape for rank in ranks}) == 1 else torch.cat(ranks or [torch.zeros(0)])
            for ranks in (ones, others))
        same = one.shape == other.shape
        gap = ((one - other).abs().mean() / one.std().clamp(min=1e-12)).item() if same else math.inf
        yield Figure("images", f"step {k + 1}", [*one.shape], [*other.shape], gap)
    losses = [mean([each["losses"] for each in results]) for results in (old, new)]
    for (epoch, step), one, other in zip(old[0]["steps"], *losses):
        yield Figure("loss", f"epoch {epoch}, step {step}", one, other,
                     distance(tensor(one), tensor(other)))
    if len(losses[0]) != len(losses[1]):
        yield Figure("loss", "number of steps", *map(len, losses), math.inf)
    for each in new:
        for k, (one, other) in enumerate(zip(old[0]["rates"], each["rates"])):
            yield Figure("learning rates", f"step {k + 1}", one, other,
                         distance(tensor(one), tensor(other)))
        for one, other, start in zip(old[0]["end"], each["end"], old[0]["start"]):
            moved = one - start if one.shape == start.shape else one
            yield Figure("weights", "after the last step", one.norm().item(), other.norm().item(),
                         distance(one, other, moved))
        for one, other in zip(new[0]["end"], each["end"]) if each is not new[0] else ():
            yield Figure("weights of the processes", "after the last step", one.norm().item(),
                         other.norm().item(), distance(one, other))
    for name, one in before.states.items():
        other = after.states.get(name, torch.zeros(0))
        yield Figure("checkpoint", name, one.norm().item(), other.norm().item() if len(
            other) else "missing", distance(one, other))
    for quantity, olds, news in (("printed numbers", before.printed, after.printed),
                                 ("numbers in files", before.written, after.written)):
        for (name, line), rows in olds.items():
            others = news.get((name, line), [])
            where = f"{name or 'the line'} {line.strip()!r}"
            if len(rows) != len(others):
                yield Figure(quantity, f"how often {where} comes", len(rows), len(others), math.inf)
            for time, (row, other) in enumerate(zip(rows, others), 1):
                for k, ((x, digit), (y, _)) in enumerate(zip(row, other), 1):
                    gap = max(0.0, abs(x - y) - 1.01 * digit) / max(abs(x), 1e-12)
                    if math.isnan(gap) or gap == math.inf:
                        gap = 0.0 if str(x) == str(y) else math.inf
                    yield Figure(quantity, f"number {k} in {where}", x, y, gap, f", time {time}")


class Noise:
    """What differs between two runs of the copy before: what to leave out, and the spread."""

    def __init__(self, one=None, other=None):
        self.left_out, self.spread = set(), defaultdict(float)
        for each in figures(one, other) if one else ():
            if each.quantity in QUANTITIES[5:]:
                if each.difference > ALLOWED:
                    self.left_out.add((each.quantity, each.where))
            else:
                self.spread[each.quantity] = max(self.spread[each.quantity], each.difference)


class Row(NamedTuple):
    """A line of the table. `first` is the first Figure that differs too much, or None."""
    view: str
    quantity: str
    count: int
    largest: float
    allowed: float
    first: Figure


def compare(view, before, after, noise, techniques):
    """Return the Rows of two Results."""
    rows, loose = defaultdict(list), view == AS_IT_IS
    for each in figures(before, after):
        if (each.quantity, each.where) not in noise.left_out:
            rows[each.quantity].append(each)
    if "DALI" in techniques and any(each.difference for each in rows["images"]):
        loose = True
    table = []
    for quantity in filter(rows.get, QUANTITIES):
        allowed = max(ALLOWED, 3 * noise.spread[quantity])
        if loose and quantity == "loss":
            allowed = max([allowed, *(ROUNDING.get(name, OTHERS) for name in techniques)])
        elif loose and quantity == "images" and "DALI" in techniques:
            allowed = max(allowed, DALI_IMAGES)
        elif loose and quantity not in ("images", "learning rates", "weights of the processes"):
            allowed = math.inf
        if allowed < math.inf:
            bad = [each for each in rows[quantity] if not each.difference <= allowed]
            table.append(Row(view, quantity, len(rows[quantity]), max(
                each.difference for each in rows[quantity]), allowed, bad[0] if bad else None))
    return table


# -------------------------------------------------------------------------------- verifying
EXACT, TWO, RESUMED, AS_IT_IS = "exact", "two processes", "resumed", "as it is"


def views(before, after, one_process=False):
    """Return {view: (the Run before, the Run after)}."""
    def run(text, **others):
        launched = "init_process_group" in text
        return Run(text, ranks=(2 if others.get("calm") else 1) if launched else 0, **others)
    calm = "init_process_group" in after and not one_process
    kinds = {EXACT: {}, TWO: dict(calm=True), RESUMED: dict(calm=calm, resumed=True),
             AS_IT_IS: dict(exact=False)}
    return {view: (run(before, **kind), run(after, **kind)) for view, kind in kinds.items()
            if view != TWO or calm}


def show(rows):
    """Print the table."""
    print(f"{'run':15}{'compared':24}{'figures':>8}{'largest difference':>20}{'allowed':>10}")
    for row in rows:
        print(f"{row.view:15}{row.quantity:24}{row.count:8}{row.largest:20.1e}{row.allowed:10.0e}"
              + ("  differs" if row.first else ""))


class Verifier:
    """Compares versions of a script: versions[0] is without, versions[k] with techniques[:k]."""

    def __init__(self, bench, versions, techniques):
        self.bench, self.versions, self.techniques = bench, versions, techniques
        self.notes, self.noise, self.skipped = [], {}, set()

    def rows(self, view, version):
        """Return (the error of a version in a view or "", the Rows of its comparison)."""
        pair = views(self.versions[0], self.versions[version], TWO in self.skipped)[view]
        before, after = self.bench.results(*pair)
        if after.error:
            return after.error, []
        return "", compare(view, before, after, self.noise.get(view, self.noise[EXACT]),
                           self.techniques[:version])

    def culprit(self, view):
        """Return the first technique that brings an error or a difference in this view."""
        runs = [run for text in self.versions[1:]
                for run in views(self.versions[0], text, TWO in self.skipped).get(view, ())]
        self.bench.results(*[run._replace(resumed=False) for run in runs])
        for k, name in enumerate(self.techniques, 1):
            if view in views(self.versions[0], self.versions[k], TWO in self.skipped):
                error, rows = self.rows(view, k)
                if error or any(row.first for row in rows):
                    return name
        return self.techniques[-1]

    def run(self):
        """Run all versions that are needed. Return what went wrong, or "", and the Rows."""
        pairs = views(self.versions[0], self.versions[-1])
        runs = {view: [run._replace(resumed=False) for run in pair] for view, pair in pairs.items()}
        again = runs[EXACT if self.bench.gpus else AS_IT_IS][0]._replace(number=1)
        self.bench.results(*sum(runs.values(), []), again)
        done = {view: self.bench.results(*pair) for view, pair in runs.items()}
        if error := done[AS_IT_IS][0].error:
            return f"your own copy fails, without {' '.join(self.techniques)}:\n{error}", []
        usable = [view for view in pairs if not done[view][0].error]
        if EXACT not in usable:
            self.notes.append("your copy fails in float64, so only runs in its own precision are "
                              f"compared: {done[EXACT][0].error.splitlines()[-1]}")
            usable, self.noise = [AS_IT_IS], {EXACT: Noise(), AS_IT_IS: Noise()}
        else:
            usable = self.prepare(usable, done, again)
        if RESUMED in usable and not self.can_resume(runs[RESUMED], pairs[RESUMED], done):
            usable.remove(RESUMED)
        table = []
        for view in usable:
            error, rows = self.rows(view, len(self.techniques))
            if error:
                return f"{self.culprit(view)} fails ({view}):\n{error}", table
            table += rows
        for row in table:
            if row.first:
                it = row.first
                return (f"{row.quantity} differ, run {row.view!r}, {it.where}{it.time}: {it.before}"
                        f" before, {it.after} after; {self.culprit(row.view)} brings it", table)
        return "", table

    def prepare(self, usable, done, again):
        """Measure what two runs of the copy before differ in. Return the views to compare."""
        exact = done[EXACT][0]
        noise = Noise(*self.bench.results(again._replace(number=0), again))
        self.noise = {EXACT: noise, AS_IT_IS: Noise(exact, done[AS_IT_IS][0])}
        self.noise[AS_IT_IS].left_out = set()
        if noise.spread["loss"] > ALLOWED:
            self.notes.append(
                f"the losses of two runs of your own copy differ by {noise.spread['loss']:.1e}: "
                "seeds are missing, so smaller differences cannot be seen")
        self.notes += [f"not compared, since two runs of your own copy differ: {where}"
                       for _, where in sorted(noise.left_out)[:5]]
        if done[TWO][0].seen[0]["draws"] if TWO in usable else False:
            self.notes.append("two processes are not compared: the steps of your copy draw random "
                              "numbers, which are others in each process")
            self.skipped.add(TWO)
            usable.remove(TWO)
        if missing := {"--epochs", "--steps"} - {*exact.seen[0]["options"]}:
            self.notes.append(f"your copy takes no {' and no '.join(sorted(missing))}, so its runs "
                              "are as long as it makes them")
        return usable

    def can_resume(self, runs, pair, done):
        """Return whether both versions left a checkpoint to resume from."""
        exact = done[EXACT][0]
        places = [self.bench.place(run) / "stopped" for run in runs]
        if "--resume" in exact.seen[0]["options"] and places[0].exists():
            resumed = self.bench.results(pair[0])[0]
            if resumed.error:
                self.notes.append(f"your own copy cannot resume: {resumed.error.splitlines()[-1]}")
                return False
            losses, unbroken = resumed.seen[0]["losses"], done[RESUMED][0].seen[0]["losses"]
            gap = distance(torch.tensor(losses), torch.tensor(unbroken[-len(losses):]))
            if not gap <= max(ALLOWED, 3 * self.noise[EXACT].spread["loss"]):
                self.notes.append("your own copy, resumed, does not continue as its unbroken run: "
                                  f"the losses differ by {gap:.1e}")
            return True
        self.notes.append("no resumed run is compared: your copy takes no --resume, or writes no "
                          "checkpoint after its first epoch")
        return False


def verify(path, versions, techniques, words):
    """Compare the first and the last of `versions`; print a table. Return whether they agree."""
    torch.set_num_threads(1)  # or OpenMP hangs in forked processes
    if "--augment" in words and {"DALI", "cache"} & {*techniques}:
        words = [word for word in words if word != "--augment"]
        print("without --augment: DALI and cache draw random crops of their own")
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        verifier = Verifier(Bench(path, words, folder), versions, techniques)
        wrong, table = verifier.run()
    show(table)
    for note in verifier.notes:
        print(note)
    print(wrong or "the same")
    return not wrong
