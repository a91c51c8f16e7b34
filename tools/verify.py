"""Run a user's script before and after techniques were added, and compare what both do.

`compose.sh --into FILE TECHNIQUE ... --verify -- OPTION ...` calls `verify`. verify_run.py runs the
scripts, in processes that are forked from this one, so PyTorch is imported once.
"""

import contextlib
import importlib
import itertools
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

import verify_run
from terminal import show

NUMBER = re.compile(
    r"(?<![\w.-])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?(?:e[-+]?\d+)?"
    r"|\b(?:nan|inf)\b",
    re.I,
)
# a random name: letters after digits, or hexadecimal digits
CODE = re.compile(
    r"(?<![a-z\d.])(?=[a-z\d]{6})(?:[a-z]*\d+[a-z][a-z\d]*|[a-f]+\d+)(?![a-z\d])", re.I
)
DATE = re.compile(r"\d+[-:/]\d+[-:/]\d+\S*|\d+:\d\d\b|0x[0-9a-f]+")
# numbers that are not compared: those that follow or precede such words
CLOCK = re.compile(
    r"(time|wait|(?<![a-z])(sec(ond)?s?(_\w+)?|eta)|took|speed|elapsed|memory|"
    r"_bytes|throughput)\W*$",
    re.I,
)
UNIT = re.compile(r" ?(s|ms|sec(ond)?s?|min(ute)?s?(?! ?-?\d)|[kMG]i?B|\w+/s)\b(?!-)")
# what scripts import: each run is a fork that has them already
for name in (
    "torch._dynamo",
    "torchvision.models",
    "torchvision.transforms.v2",
    "PIL.Image",
    "tqdm",
    "lmdb",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
TEXTS = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".log", ".md", ".yaml", ".yml")


class Run(NamedTuple):
    """One run of a script: `ranks` 0 is without a launcher."""

    text: str
    ranks: int = 0
    exact: bool = True  # without what only changes rounding
    calm: bool = False  # comparable for any number of processes
    resumed: bool = False  # from the files of the same run when it had its first checkpoint
    number: int = 0
    source: "Run | None" = None  # resumed from the first checkpoint of this run, not of its own


def unbroken(run):
    """Return the same run from the beginning."""
    return run._replace(resumed=False, source=None)


class Result(NamedTuple):
    error: str  # its last lines, or ""
    seen: list = []  # what verify_run.Recorder has kept, for each rank
    numbers: dict = {}  # {(file or "the output", line with # for numbers): [[numbers], ...]}
    states: dict = {}  # {name in a checkpoint: tensor of float64}


def numbers_of(text):
    """Return the numbers in each line of `text`: {the line with # for them: [[(number, digit)]]}.

    `digit` is what 1 in the last place is worth, 0 for a whole number. Times are left out.
    """
    found = defaultdict(list)
    for line in re.split(r"[\r\n]+", text):
        line, numbers = CODE.sub("*", DATE.sub("*", line)), []

        def take(match):
            if CLOCK.search(line[: match.start()]) or UNIT.match(line, match.end()):
                return "*"
            _, _, decimals = match[0].partition(".")
            digits, _, exponent = decimals.lower().partition("e")
            numbers.append(
                (
                    float(match[0].replace(",", "")),
                    10.0 ** (int(exponent or 0) - len(digits)) if decimals else 0.0,
                )
            )
            return "#"

        line = re.sub(r"\d{6,}", "*", NUMBER.sub(take, line))
        if numbers and not re.search(r"%\|", line):  # a progress bar
            found[line].append(numbers)
    return found


def without_codes(name):
    """Return a file's name with * for what is new in each run: a time, a random number."""
    return re.sub(r"\d{6,}", "*", CODE.sub("*", str(name)))


def tensors_of(state, name=""):
    """Yield (name, tensor) for each tensor in a checkpoint."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from tensors_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, (list, tuple)):
        for key, value in enumerate(state):
            yield from tensors_of(value, f"{name}.{key}")
    elif torch.is_tensor(state):
        yield name, state.detach().double().flatten()


class Bench:
    """Runs versions of the script at `path` with the options `words`, each in a folder of its own.

    The folders are in `folder`. The processes of a run share `cores` threads.
    """

    def __init__(self, path, words, folder):
        self.path, self.words, self.folder = Path(os.path.abspath(path)), words, Path(folder)
        self.places, self.done, self.stores, self.longest = {}, {}, [], 0.0
        self.options = {}  # for the scripts that have them
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sample = self.folder / "sample"  # a part of the dataset; None: the whole
        self.cores = len(os.sched_getaffinity(0))
        self.gpus = torch.cuda.device_count()  # it does not start CUDA, which could not be forked

    def results(self, *runs):
        """Return the Result of each run; those that are not done yet run now."""
        for run in runs:
            if run in self.done:
                continue
            processes, started = self.start(run), time.monotonic()
            try:
                while (error := self.error(run, processes, time.monotonic() - started)) is None:
                    show(f"run {len(self.done) + 1}: {time.monotonic() - started:.0f} s")
                    wait([each.sentinel for each in processes if each.is_alive()], 0.5)
            finally:
                kill(processes)
                show("")
            self.done[run] = Result(error) if error else self.collect(run)
            self.longest = max(self.longest, time.monotonic() - started)
        return [self.done[run] for run in runs]

    def place(self, run):
        """Return the folder of a run."""
        return self.places.setdefault(run, self.folder / str(len(self.places)))

    def start(self, run):
        """Start the processes of a run and return them."""
        place, variables = self.place(run), {}
        place.mkdir()
        stopped = self.place(run.source or unbroken(run)) / "stopped"
        if run.resumed and stopped.exists():
            shutil.copytree(stopped, place / "files")
        (place / "files").mkdir(exist_ok=True)
        if run.ranks:
            self.stores.append(
                torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            )
            variables = {
                "WORLD_SIZE": run.ranks,
                "LOCAL_WORLD_SIZE": run.ranks,
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": self.stores[-1].port,
                "GROUP_WORLD_SIZE": 1,
                "TORCHELASTIC_RESTART_COUNT": 0,
                "TORCHELASTIC_USE_AGENT_STORE": True,
            }
        if run.calm and self.gpus < 2:  # two processes cannot share a GPU: these are on the CPU
            variables["CUDA_VISIBLE_DEVICES"] = ""
        elif self.gpus > 1 and not run.ranks:  # so that DataParallel does not split batches
            variables["CUDA_VISIBLE_DEVICES"] = os.getenv("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        common = dict(
            path=self.path,
            text=run.text.encode("utf-8", "surrogateescape"),
            words=self.words,
            folder=place,
            threads=max(1, self.cores // max(1, run.ranks)),
            sample=self.sample,
            exact=run.exact,
            calm=run.calm,
            halves=not run.ranks,
            options={"--result_dir": place / "files" / "runs", "--lmdb": self.folder}
            | self.options
            | ({"--resume": "auto"} if run.resumed else {})
            | ({"--batch_size": 32} if run.calm and self.gpus == 1 else {}),
        )
        processes = []
        for rank in range(max(1, run.ranks)):
            own = {"RANK": rank, "LOCAL_RANK": rank} if run.ranks else {}
            own = {name: str(value) for name, value in (variables | own).items()}
            processes.append(
                multiprocessing.get_context("fork").Process(
                    target=verify_run.run_script, kwargs=common | dict(rank=rank, variables=own)
                )
            )
            processes[-1].start()
        return processes

    def error(self, run, processes, lasted):
        """Return None while a run goes on, "" if it has ended well, or what went wrong."""
        if failed := [rank for rank, process in enumerate(processes) if process.exitcode]:
            errors = [self.place(run) / f"err{rank}" for rank in failed]
            first = min(errors, key=lambda path: path.stat().st_mtime)
            lines = [line for line in first.read_text(errors="replace").splitlines() if line]
            return "\n".join(lines[-4:]) or f"status {processes[failed[0]].exitcode}"
        if all(process.exitcode == 0 for process in processes):
            return ""
        limit = 300 + 20 * self.longest + (0 if run.exact else 900)  # compiling takes minutes
        return f"it had not ended after {limit:.0f} s" if lasted > limit else None

    def read(self, path):
        """Return the text of a file without the runs' folders, a GPU's number and line numbers."""
        text = path.read_text(errors="replace")
        return re.sub(rf"{re.escape(str(self.folder))}/\d+|(?<=\bcuda):\d+|(?<=\.py):\d+", "", text)

    def collect(self, run):
        """Return the Result of a run that has ended well."""
        place, numbers, states = self.place(run), {}, {}
        printed = self.read(place / "out0") + self.read(place / "err0")
        texts = {"the output": printed}
        for path in sorted((place / "files").rglob("*.*")):
            if path.suffix in TEXTS:
                name = without_codes(path.relative_to(place / "files"))
                texts[name] = texts.get(name, "") + self.read(path)
            elif path.suffix in verify_run.CHECKPOINTS:
                with contextlib.suppress(Exception):  # it holds more than tensors
                    state = torch.load(path, map_location="cpu", weights_only=True)
                    states |= {
                        f"{without_codes(path.name)}: {name}": each
                        for name, each in tensors_of(state)
                    }
        for name, text in texts.items():
            numbers |= {(name, line): rows for line, rows in numbers_of(text).items()}
        return Result(
            "",
            [torch.load(place / f"seen{rank}") for rank in range(max(1, run.ranks))],
            numbers,
            states,
        )


def kill(processes):
    """End the processes of a run and the workers that they have started."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()  # it has no group of its own yet
        process.join()


# ------------------------------------------------------------------------------------ comparing
class Figure(NamedTuple):
    """A figure of a run before and after, and how far they differ."""

    quantity: str
    where: str
    before: object
    after: object
    difference: float
    time: str = ""  # which one, of lines that are printed several times


class Row(NamedTuple):
    """A line of the table. `first` is the first Figure that differs too much, or None."""

    view: str
    quantity: str
    count: int
    largest: float
    allowed: float
    first: Figure


def distance(one, other, scale=None):
    """Return how far two tensors are apart, relative to the norm of `scale`, or of the first."""
    if one.shape != other.shape:
        return math.inf
    if one.nan_to_num().equal(other.nan_to_num()):
        return 0.0
    return ((one - other).norm() / (one if scale is None else scale).norm().clamp(min=1e-8)).item()


def whole(parts):
    """Return the batch of which process k has every k-th image, or None."""
    batch = torch.zeros(sum(map(len, parts)), *parts[0].shape[1:], dtype=torch.float64)
    for k, part in enumerate(parts):
        if batch[k :: len(parts)].shape != part.shape:
            return None
        batch[k :: len(parts)] = part
    return batch


def tensor(value):
    """Return a tensor of float64."""
    return torch.tensor(value, dtype=torch.float64)


def figures(before, after):
    """Yield a Figure for all that two Results have in common."""
    yield from figures_of_batches(before, after)
    yield from figures_of_weights(before, after)
    yield from figures_of_files(before, after)


def figures_of_batches(before, after):
    """Yield a Figure for the images and the loss of each step."""
    images = [
        [whole(parts) for parts in zip(*[each["images"] for each in result.seen])]
        for result in (before, after)
    ]
    for k, (one, other) in enumerate(itertools.zip_longest(*images), 1):
        gap = math.inf
        if one is not None and other is not None and one.shape == other.shape:
            gap = ((one - other).abs().mean() / one.std().clamp(min=1e-12)).item()
        yield Figure(
            "images",
            f"batch {k}",
            *[
                "none" if each is None else f"mean {each.mean():.4g} of {each.shape[0]}"
                for each in (one, other)
            ],
            gap,
        )
    losses = [
        [sum(ranks) / len(ranks) for ranks in zip(*[each["losses"] for each in result.seen])]
        for result in (before, after)
    ]
    for (epoch, step), one, other in zip(before.seen[0]["steps"], *losses):
        yield Figure(
            "loss", f"epoch {epoch}, step {step}", one, other, distance(tensor(one), tensor(other))
        )
    if len(losses[0]) != len(losses[1]):
        yield Figure("loss", "number of steps", *map(len, losses), math.inf)


def figures_of_weights(before, after):
    """Yield a Figure for the learning rates of each step and for the weights at the end."""
    (old, *_), new = before.seen, after.seen
    for rank, each in enumerate(new):
        of = f" in process {rank}" if rank else ""
        for k, (one, other) in enumerate(zip(old["rates"], each["rates"]), 1):
            yield Figure(
                "learning rates", f"step {k}{of}", one, other, distance(tensor(one), tensor(other))
            )
        for k, (one, other) in enumerate(zip(old["end"], each["end"])):
            moved = one - old["start"][k] if one.shape == old["start"][k].shape else one
            yield Figure(
                "weights",
                f"their norm at the end{of}",
                one.norm().item(),
                other.norm().item(),
                distance(one, other, moved),
            )
            if rank:
                yield Figure(
                    "equal weights",
                    f"norm in process 0 and{of}",
                    new[0]["end"][k].norm().item(),
                    other.norm().item(),
                    distance(new[0]["end"][k], other),
                )


def figures_of_files(before, after):
    """Yield a Figure for each tensor of a checkpoint, and each number printed or written."""
    for name, one in before.states.items():
        other = after.states.get(name, torch.zeros(0))
        yield Figure(
            "checkpoint",
            f"norm of {name}",
            one.norm().item(),
            other.norm().item() if len(other) else "missing",
            distance(one, other),
        )
    for (name, line), rows in before.numbers.items():
        quantity = "printed numbers" if name == "the output" else "files"
        others, where = after.numbers.get((name, line), []), f"{line.strip()!r} in {name}"
        if len(rows) != len(others):
            yield Figure(quantity, f"number of lines {where}", len(rows), len(others), math.inf)
        for turn, (row, other) in enumerate(zip(rows, others), 1):
            for k, ((x, digit), (y, _)) in enumerate(zip(row, other), 1):
                gap = max(0.0, abs(x - y) - 1.01 * digit) / max(abs(x), 1e-12)
                if not math.isfinite(gap):
                    gap = 0.0 if str(x) == str(y) else math.inf
                yield Figure(quantity, f"# {k} of {where}", x, y, gap, f", time {turn}")


QUANTITIES = [
    "images",
    "loss",
    "learning rates",
    "equal weights",
    "weights",
    "checkpoint",
    "printed numbers",
    "files",
]
TEXTUAL = QUANTITIES[5:]
EXACT, TWO, RESUMED, AS_IT_IS = "exact", "two processes", "resumed", "as it is"
OLD = "old checkpoint"  # resumed from one that the copy before has written
# the largest relative difference in float64; it is 1e-13 where a technique is right
ALLOWED = 1e-6
# for runs as they are, in float32 or less: the losses of the first steps, by technique; else 0.01
ROUNDING, STEPS = {"amp": 0.05, "DALI": 0.05}, 2
# DALI's images, in standard deviations: it decodes and resizes JPEGs a little differently (0.002)
DALI_IMAGES = 0.02


class Noise:
    """What two runs of the copy before differ in: the spread, and numbers to leave out."""

    def __init__(self, one, other, steps=None):
        self.left_out, found = set(), defaultdict(list)
        for each in figures(one, other):
            if each.quantity in TEXTUAL and each.difference > ALLOWED:
                self.left_out.add(each.where)
            found[each.quantity].append(each.difference)
        found["loss"] = found["loss"][:steps]
        self.spread = {
            quantity: max(gaps, default=0.0)
            for quantity, gaps in found.items()
            if quantity not in TEXTUAL
        }


def compare(view, before, after, noise, techniques):
    """Return the Rows of two Results, one for each quantity that can be compared."""
    found, table = defaultdict(list), []
    for each in figures(before, after):
        if each.where not in noise.left_out:
            found[each.quantity].append(each)
    other_images = "DALI" in techniques and any(each.difference for each in found["images"])
    for quantity in filter(found.get, QUANTITIES):
        allowed = max(ALLOWED, 3 * noise.spread.get(quantity, 0.0))
        if quantity == "images" and "DALI" in techniques:
            allowed = max(allowed, DALI_IMAGES)
        elif quantity not in ("images", "learning rates", "equal weights") and (
            view == AS_IT_IS or other_images
        ):
            if quantity != "loss" or view in (RESUMED, OLD):
                continue
            allowed = max([allowed, *(ROUNDING.get(name, 0.01) for name in techniques)])
            # later steps amplify rounding, and what differs between images
            found[quantity] = found[quantity][: 1 if other_images else STEPS]
        bad = [each for each in found[quantity] if not each.difference <= allowed]
        table.append(
            Row(
                view,
                quantity,
                len(found[quantity]),
                max(each.difference for each in found[quantity]),
                allowed,
                bad[0] if bad else None,
            )
        )
    return table


# ------------------------------------------------------------------------------------ verifying
def runs_of(before, after, one_process=False):
    """Return {view: (the Run before, the Run after)}."""
    calm = "init_process_group" in after and not one_process

    def run(text, **others):
        ranks = (2 if others.get("calm") else 1) if "init_process_group" in text else 0
        return Run(text, ranks, **others)

    kinds = {
        EXACT: {},
        TWO: dict(calm=True),
        RESUMED: dict(calm=calm, resumed=True),
        OLD: dict(calm=calm, resumed=True),
        AS_IT_IS: dict(exact=False),
    }
    pairs = {
        view: (run(before, **kind), run(after, **kind))
        for view, kind in kinds.items()
        if view != TWO or calm
    }
    old, new = pairs[OLD]
    return pairs | {OLD: (old, new._replace(source=unbroken(old)))}


class Verifier:
    """Compares versions of a script: versions[k] has the first k of `techniques`."""

    def __init__(self, bench, versions, techniques):
        self.bench, self.versions, self.techniques = bench, versions, techniques
        self.notes, self.noise, self.one_process = [], {}, False
        bench.options = {}
        if "progressive" in techniques:
            bench.options["--small"] = 1
            self.notes.append(
                "progressive changes the sizes of images; it was compared with "
                "--small 1, which keeps them"
            )
        if {"DALI", "cache"} & {*techniques}:
            bench.options["--augment"] = "none"
            self.notes.append(
                "DALI and cache draw random crops of their own; they were compared "
                "with --augment none"
            )

    def rows(self, view, version):
        """Return (the error of a version in a view, or "", the Rows of its comparison)."""
        pair = runs_of(self.versions[0], self.versions[version], self.one_process).get(view)
        if not pair:  # two processes, and no DDP yet
            return "", []
        self.bench.results(*map(unbroken, pair))
        before, after = self.bench.results(*pair)
        if after.error:
            return after.error, []
        return "", compare(view, before, after, self.noise[view], self.techniques[:version])

    def culprit(self, view):
        """Return the first technique that brings an error or a difference in a view."""
        for k, name in enumerate(self.techniques, 1):
            error, rows = self.rows(view, k)
            if error or any(row.first for row in rows):
                return name
        return self.techniques[-1]

    def run(self):
        """Return (what went wrong, or "", and the Rows of the table)."""
        pairs = runs_of(self.versions[0], self.versions[-1])
        again = pairs[EXACT if self.bench.gpus else AS_IT_IS][0]._replace(number=1)
        before = {view: self.bench.results(unbroken(run))[0] for view, (run, _) in pairs.items()}
        if error := before[AS_IT_IS].error:
            if self.bench.sample:  # does it need files that are not in the sample?
                self.bench.sample, self.bench.done, self.bench.places = None, {}, {}
                for path in self.bench.folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                return self.run()
            return f"your own copy fails, without {' '.join(self.techniques)}:\n{error}", []
        if not before[AS_IT_IS].seen[0]["losses"]:
            return "your own copy ends without a training step: there is nothing to compare", []
        table = []
        for view in self.comparable(pairs, before, again):
            error, rows = self.rows(view, len(self.techniques))
            if error:
                return f"{self.culprit(view)} makes your copy fail ({view}):\n{error}", table
            table += rows
        for row in table:
            if row.first:
                it = row.first
                return (
                    f"different: {row.quantity} ({row.view}), {it.where}{it.time}: {it.before} "
                    f"before, {it.after} after. {self.culprit(row.view)} brings it.",
                    table,
                )
        if self.bench.options.pop("--small", None):  # can the model take smaller images, too?
            [small] = self.bench.results(pairs[table[0].view][1]._replace(number=2))
            if small.error:
                return f"progressive makes your copy fail without --small 1:\n{small.error}", table
        return "", table

    def comparable(self, pairs, before, again):
        """Return the views that can be compared; note why others cannot, and what is left out."""
        views = [view for view in pairs if not before[view].error]
        if EXACT not in views:
            again = pairs[AS_IT_IS][0]._replace(number=1)
        own = Noise(*self.bench.results(again._replace(number=0), again))
        self.noise = dict.fromkeys(pairs, own)
        if EXACT not in views:
            self.notes.append(
                "your copy fails in float64, so runs are compared only as they are: "
                + before[EXACT].error.splitlines()[-1]
            )
            return [AS_IT_IS]
        self.noise[AS_IT_IS] = Noise(before[EXACT], before[AS_IT_IS], STEPS)
        if (spread := own.spread.get("loss", 0.0)) > ALLOWED:
            self.notes.append(
                f"the losses of two runs of your own copy differ by {spread:.1e}: it "
                "sets no seeds, so only larger differences can be seen"
            )
        self.notes += [
            f"not compared, since two runs of your own copy differ: {where}"
            for where in sorted(own.left_out)[:5]
        ]
        options = before[EXACT].seen[0]["options"]
        self.notes += [
            f"your copy takes no {name}, so its runs are as long as it makes them"
            for name in ("--epochs", "--steps")
            if name not in options
        ]
        if TWO in pairs and TWO not in views:
            self.notes.append(
                "two processes are not compared: your copy fails with batch norm "
                f"over half batches: {before[TWO].error.splitlines()[-1]}"
            )
        elif TWO in views and before[TWO].seen[0]["draws"]:
            self.notes.append(
                "two processes are not compared: the steps of your copy draw random "
                "numbers, and each process draws its own"
            )
            self.one_process, views = True, [view for view in views if view != TWO]
            pairs = runs_of(self.versions[0], self.versions[-1], True)
        has_option = RESUMED in views and "--resume" in options
        if self.resumes(pairs[RESUMED][0], has_option, spread):
            return views
        return [view for view in views if view not in (RESUMED, OLD)]

    def resumes(self, run, has_option, spread):
        """Return whether resumed runs can be compared; note why they cannot, or what is odd."""
        whole = unbroken(run)
        if not has_option or not (self.bench.place(whole) / "stopped").exists():
            self.notes.append(
                "no resumed run is compared: your copy takes no --resume, or writes "
                "no checkpoint before its last epoch"
            )
            return False
        resumed, whole = self.bench.results(run, whole)
        if resumed.error:
            self.notes.append(f"your own copy cannot resume: {resumed.error.splitlines()[-1]}")
            return False
        losses = torch.tensor(resumed.seen[0]["losses"])
        gap = distance(losses, torch.tensor(whole.seen[0]["losses"])[-len(losses) :])
        if not gap <= max(ALLOWED, 3 * spread):
            self.notes.append(
                "your own copy, resumed, does not continue as its unbroken run: the "
                f"losses differ by {gap:.1e}. Its checkpoint may lack a scheduler, "
                "or workers draw random crops, which --augment none turns off"
            )
        return True


def verify(path, versions, techniques, words):
    """Compare versions of the copy at `path` and print the result. Return whether they agree."""
    torch.set_num_threads(1)  # threads of OpenMP would hang in forked processes
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        verifier = Verifier(Bench(path, words, folder), versions, techniques)
        wrong, table = verifier.run()
    print(f"{'run':15}{'compared':18}{'figures':>8}{'largest difference':>20}{'allowed':>10}")
    for row in table:
        print(
            f"{row.view:15}{row.quantity:18}{row.count:8}{row.largest:20.1e}{row.allowed:10.1e}"
            + ("  different" if row.first else "")
        )
    if "graphs" in techniques and not torch.cuda.is_available():
        verifier.notes.append("graphs do nothing without a GPU, so nothing of them was compared")
    views = runs_of(versions[0], versions[-1])
    same = (
        "the same"
        if len({row.view for row in table}) == len(views)
        else ("the same in what was compared")
    )
    print(*verifier.notes, wrong or same, sep="\n", flush=True)
    return not wrong
