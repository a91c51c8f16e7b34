"""The printed report, and the record for --json, of what was measured: a Result.

All speedups are compared with the baseline, the script as it is. Each has the ends of its interval
of 95 %, `low` and `high`. Nothing here needs torch.
"""

import dataclasses
import math
import shlex
import sys
import textwrap
import time

from . import advice, parts

VERSION = 1  # of the record
WAITS = 0.2  # from this data time on, loading is what holds a script back
DRIFT = 1.25  # the baseline's fast windows to its slow ones, from which that is told
WIDTH = 100
NAME = 24  # columns of a set's name, at least
FASTER, SLOWER, SAME, OPEN = "faster", "slower", "not significant", "open"
KERNELS = {  # what holds a busy GPU back, by what most of its time goes into
    "products": ("The device", "convolutions and products"),
    "memory": (
        "The device's memory",
        "kernels that read and write more than they compute (norms, "
        "activations, copies, the optimizer)",
    ),
    "communication": ("Communication between GPUs", "NCCL"),
}
BRAKES = {  # what slows a script down wherever it is
    "no set_epoch": "DistributedSampler without set_epoch(epoch): each epoch has the same order",
    "DataParallel": "DataParallel copies the model in each step; use DistributedDataParallel "
    "(src/train_DDP.py)",
    "SyncBatchNorm": "SyncBatchNorm makes all processes wait in each of its layers",
}


@dataclasses.dataclass
class Row:
    """A set of techniques and its speedup over the baseline, by turns in one process."""

    techniques: tuple
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    verdict: str = OPEN  # FASTER, SLOWER, SAME or OPEN
    needs: float | None = None  # seconds that an open row would need, if that is known
    memory: int | None = None  # bytes of the GPU at most
    note: str = ""


def empty(factory):
    return dataclasses.field(default_factory=factory)


@dataclasses.dataclass
class Result:
    """What a session has found. All but the first five may be left as they are.

    baseline: rate, n, memory (bytes), step_seconds, data_time (a share of the time); what is not
        known may be missing or None
    extra: workers (for each loader), times (of a batch), for the advice
    failed, excluded, not_tried: {a technique's name or a set: why}; excluded is what is there
        already or is not possible
    loader: what inside/loading.py's measure_loader gives
    forecast: [{techniques, speedup, low, high, how}]; how is "longer", "sum" or "range"
    confirmation: techniques, speedup, low, high, n, confirmed, why (if it is not), off (which part
        of the forecast was, and by how much)
    losses: [what loss_line takes]
    notes: sentences, as of windows that were thrown away
    seconds: {what was done: how long it took}
    parts: {part of parts.py: seconds}, from the script's start until it had been watched
    """

    script: str
    arguments: list
    unit: str  # "samples" or "steps"
    facts: dict  # of inside/facts.py and inside/watch.py
    baseline: dict
    rows: list = empty(list)  # of Row, as they were measured
    best: tuple = ()  # the techniques that are advised
    extra: dict = empty(dict)
    failed: dict = empty(dict)
    excluded: dict = empty(dict)
    not_tried: dict = empty(dict)
    loader: dict | None = None
    forecast: list = empty(list)
    confirmation: dict | None = None
    losses: list = empty(list)
    notes: list = empty(list)
    seconds: dict = empty(dict)
    parts: dict = empty(dict)
    writing: object = None  # writing.Writing, with --write
    by_turns: bool = True  # or a process a trial; then a note says why
    stopped: bool = False  # by Ctrl-C


# ------------------------------------------------------------------------------------ small texts
def name_of(techniques):
    """Return "amp bfloat16 + compile"; the empty set is the baseline."""
    return techniques if isinstance(techniques, str) else " + ".join(techniques) or "baseline"


def speed(rate):
    """Return a speed as a short text, without its unit."""
    return "-" if rate is None else f"{rate:,.{0 if rate > 99 else 1 if rate >= 1 else 3}f}"


def duration(seconds):
    """Return a short text of a time: "3.2 ms", "40 s", "6 min"."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"


def times(speedup, low=None, high=None):
    """Return "1.52x ±0.01" with the larger half of the interval.

    Both halves, "1.44x +0.80 -0.10", where the larger one alone would reach over 1 and neither does.
    """
    if speedup is None or not math.isfinite(speedup):
        return "-"
    text = f"{speedup:.2f}x"
    if low is None or high is None:
        return text
    up, down = high - speedup, speedup - low
    half = max(up, down)
    if (low > 1 or high < 1) and 0.005 < abs(speedup - 1) <= half and math.isfinite(half):
        return f"{text} +{up:.2f} -{down:.2f}"
    if half < 0.005:
        return f"{speedup:.3f}x ±{half:.3f}"
    return f"{text} ±{half:.2f}" if math.isfinite(half) else f"{text} ±?"


def paragraph(text, indent=2):
    """Return `text` in lines of 100 columns."""
    space = indent * " "
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=space,
        subsequent_indent=space,
        break_on_hyphens=False,
        break_long_words=False,
    )


def grouped(reasons):
    """Return a line for each reason, with all names that it holds for."""
    return [
        paragraph(f"{', '.join(name_of(name) for name in reasons if reasons[name] == why)}: {why}")
        for why in dict.fromkeys(reasons.values())
    ]


# -------------------------------------------------------------------------------------- the table
def width_of(rows):
    return max([NAME, *(len(name_of(row.techniques)) for row in rows if row.techniques)])


def heading(width=NAME):
    return f"{'set':<{width}}  {'speedup (95 %)':<15} {'n':>3}  {'GPU GB':>6}  verdict"


def verdict_of(row):
    """Return a row's verdict; of an open one also the time that it would need."""
    text = row.verdict
    if text == OPEN and row.needs is not None and math.isfinite(row.needs):
        text += f": about {duration(max(1, row.needs))} more"
    return text


def line_of(row, width=NAME):
    """Return a row's line of the table."""
    memory = f"{row.memory / 1e9:.2f}" if row.memory else "-"
    return (
        f"{name_of(row.techniques):<{width}}  {times(row.speedup, row.low, row.high):<15} "
        f"{row.n:>3}  {memory:>6}  {verdict_of(row)}"
    )


def baseline_line(result, width=NAME):
    """Return the table's line of the script as it is."""
    plain, memory = result.baseline, result.baseline.get("memory")
    told = f"{speed(plain.get('rate'))} {result.unit}/s"
    if plain.get("data_time") is not None:
        told += f", data time {plain['data_time']:.0%}"
    memory = f"{memory / 1e9:.2f}" if memory else "-"
    return f"{'baseline':<{width}}  {'1':<15} {plain.get('n', 0):>3}  {memory:>6}  {told}"


def drift_lines(result):
    """Return the lines that tell that the baseline's own speed changed, if it did."""
    low, high = (result.baseline.get(name) for name in ("low", "high"))
    if not low or high < DRIFT * low:
        return []
    told = (
        f"baseline: eight of ten of its windows had {speed(low)} to {speed(high)} {result.unit}/s: "
        "its steps differ, or the speed of this machine does; each speedup is over the baseline's "
        "windows right beside it"
    )
    return [paragraph(told)]


def table(result):
    """Return the lines of the table."""
    width = width_of(result.rows)
    return [
        heading(width),
        baseline_line(result, width),
        *(line_of(row, width) for row in result.rows),
        *drift_lines(result),
        *(paragraph(f"{name_of(row.techniques)}: {row.note}") for row in result.rows if row.note),
    ]


# -------------------------------------------------------------------- loader, forecast and losses
def loader_row(row, loader):
    """Return a line of the loader's table: what a number of workers gives."""
    count, as_is = row["workers"], loader.get("as_is", {})
    name = f"{count or 'no'} worker{'' if count == 1 else 's'}" + ", pinned" * bool(
        row.get("pinned")
    )
    told = f"{speed(row['rate'])} batches/s" if row["rate"] else row.get("reason") or "no rate"
    if row["rate"] and as_is.get("batch"):
        told += f", {speed(row['rate'] * as_is['batch'])} samples/s"
    is_own = all(row.get(key, False) == as_is.get(key, False) for key in ("workers", "pinned"))
    notes = ["as it is"] * is_own + ["of few batches"] * bool(row.get("rough"))
    return f"  {name:<20} {told}" + f"  ({', '.join(notes)})" * bool(notes)


def loader_lines(loader):
    """Return the lines about the loader by itself, of what inside/loading.py gives."""
    if not loader:
        return []
    lines = ["", "The loader by itself"]
    lines += [loader_row(row, loader) for row in loader.get("rows", ())]
    if (between := loader.get("between") or {}).get("as_is") is not None:
        kept = between.get("persistent")
        lines.append(
            f"  between epochs: {duration(between['as_is'])}"
            + (
                f", with persistent_workers=True {duration(kept)}"
                if kept is not None and between["as_is"] > 1.1 * kept
                else ""
            )
        )
    if loader.get("shares"):
        told = ", ".join(f"{each['what']} {each['share']:.0%}" for each in loader["shares"])
        lines.append(paragraph(f"A worker's time: {told}"))
    lines += [
        f"    {each['share']:>4.0%}  {each['at']}  {each['text']}"
        for each in loader.get("lines", ())
    ]
    notes = [loader.get("summary"), *loader.get("notes", ())]
    return lines + [paragraph(note) for note in dict.fromkeys(filter(None, notes))]


def forecast_line(one):
    """Return the forecast of a set, a range where loading and steps share cores."""
    ends = (one["low"], one["high"]) if one["how"] == "range" else (one["speedup"],)
    told = " to ".join(dict.fromkeys(map(times, ends)))
    how = {
        "longer": "the longer of compute and loading",
        "sum": "compute and loading, one after the other",
        "range": "loading and steps share the cores",
    }[one["how"]]
    return f"  {name_of(one['techniques'])}: {told} ({how})"


def confirmation_lines(confirmation):
    """Return the lines of the set that ran in whole processes with real loading."""
    if not confirmation:
        return []
    name, n = name_of(confirmation["techniques"]), confirmation["n"]
    told = times(confirmation["speedup"], confirmation["low"], confirmation["high"])
    if confirmation["confirmed"]:
        title, text = "Confirmed", f"{name}: {told} in whole runs with real loading (n={n})"
    else:
        title, text = "Not confirmed", f"{name}: not confirmed" + f": {told} (n={n})" * bool(n)
        text += f"; {confirmation['why']}"
    if confirmation["off"]:
        text += f". The forecast was off: {confirmation['off']}"
    return ["", title, paragraph(text)]


def option_lines(options):
    """Return the line of a run by the script's own options: {words, speedup, why}."""
    if not options:
        return []
    told = (
        f"{times(options['speedup'])} in one whole run"
        if options["speedup"]
        else (f"it failed: {options['why']}")
    )
    return [paragraph(f"by the script's own {' '.join(options['words'])}: {told}")]


def loss_line(one):
    """Return the sentence about a set's losses.

    `one` is {techniques, changes, why, culprit}: changes is None if it cannot be said, why is a
    clause, and culprit is the technique that does it, if that is known.
    """
    told = {
        True: "this changes the training",
        False: "no change seen",
        None: "it cannot be said whether it changes the training",
    }[one["changes"]]
    culprit = f". Without {one['culprit']} it does not" if one["culprit"] else ""
    return f"{name_of(one['techniques'])}: {told}: {one['why']}{culprit}"


def loss_lines(losses):
    """Return the lines about losses, with what such a comparison can find."""
    if not losses:
        return []
    lines = ["", "Losses", *(paragraph(loss_line(one)) for one in losses)]
    if any(one["changes"] is not None for one in losses):
        lines.append("  This finds a broken training, not a slightly worse one.")
    return lines


# ------------------------------------------------------------------------------ what holds it back
def held_back_by(facts, baseline):
    """Return a sentence: what holds the script back, with its evidence."""
    wait, step = baseline.get("data_time"), baseline.get("step_seconds")
    if not step:
        return "Unknown: no step was timed."
    if facts["device"] == "cuda" and (wait or 0) <= WAITS:
        # kernels are timed on kept batches; the steps that were watched are the first, and slower
        step = baseline.get("compute_seconds") or step
    told = f"a step takes {duration(step)}"
    if (cycle := baseline.get("cycle", 1)) > 1:
        told += f", with its share of what is done every {cycle} steps,"
    if wait is not None:
        told += f" and its data time is {wait:.0%}"
    if (wait or 0) > WAITS:
        return f"Data: {told}."
    if facts["device"] != "cuda":
        return f"The CPU, which computes the steps: {told}."
    if not facts.get("busy"):
        return f"The host or the GPU; its kernels could not be timed: {told}."
    busy, kinds = min(1, facts["busy"] / step), facts.get("kernels") or {}
    told = f"the GPU works in {busy:.0%} of a step; {told}"
    if busy < 0.8:
        return f"The host, which runs Python and starts kernels: {told}."
    most = max(kinds, key=kinds.get, default="products")
    what, where = KERNELS[most]
    share = f"; {kinds[most]:.0%} of the GPU's time goes into {where}" if kinds else ""
    return f"{what}: {told}{share}."


def also_seen(facts):
    """Return a line for each known slowdown that is in the script."""
    lines = []
    for loader in (facts["loaders"][number] for number in facts["training"]):
        if not loader["workers"] and not loader.get("threaded"):
            lines.append(
                f"{loader['at']}: a DataLoader without workers (num_workers) loads while "
                "no step runs"
            )
        elif (
            loader["workers"]
            and loader["method"] != "fork"
            and not (loader["persistent"] or loader.get("changed"))
        ):
            lines.append(
                f"{loader['at']}: without persistent_workers=True, {loader['method']} "
                "starts all workers again in each epoch"
            )
        if loader["workers"] and loader.get("changed"):
            lines.append(
                f"{loader['changed']}: this changes the dataset, which workers that stay for all "
                "epochs (persistent_workers=True) do not see"
            )
        if facts["device"] == "cuda" and not loader["pin"]:
            lines.append(
                f"{loader['at']}: pin_memory=True lets .to(device, non_blocking=True) "
                "copy while the GPU works"
            )
    for model in facts["models"]:
        if model.get("role") == "frozen":
            lines.append(
                f"{[*model['calls'], model['at']][0]}: {model['local']} ({model['kind']}) does "
                "not train, but each step computes it"
            )
    return [
        *dict.fromkeys(lines),
        *(line for what, line in BRAKES.items() if what in facts["seen"]),
    ]


def brake_lines(result):
    """Return the lines about what holds the script back."""
    facts = result.facts
    lines = ["", "What holds it back", paragraph(held_back_by(facts, result.baseline))]
    if facts.get("lines"):
        lines.append("  In each step these lines make the host wait for the GPU:")
        lines += [f"    {place}  {text}" for place, text in facts["lines"]]
    return lines + [paragraph(line) for line in also_seen(facts)]


def part_lines(found):
    """Return the lines about where the time went, from the start until all had been watched."""
    if not found:
        return []
    told = parts.legend(found, parts.shares(found))
    return [
        "",
        f"Where the script's first {duration(sum(found.values()))} went",
        f"  {parts.bar(found)}",
        paragraph(told),
    ]


# ------------------------------------------------------------------------------------- the report
def advice_lines(result):
    """Return the lines to write for the best set."""
    done = result.writing.written() if result.writing else ()
    names = [name for name in result.best if name not in done]
    if not names:
        return []
    lines = ["", "What to write"]
    for name in names:
        lines += [f"  {name}", f"        {advice.write(name, result.facts, result.extra)}"]
    return lines


def sum_line(result):
    """Return the line of the set that is advised, or that nothing is."""
    row = next((row for row in result.rows if tuple(row.techniques) == tuple(result.best)), None)
    if not result.best:
        is_open = result.not_tried or any(verdict_of(row).startswith(OPEN) for row in result.rows)
        faster = [row for row in result.rows if verdict_of(row) == FASTER]
        if any(not row.techniques[0].startswith("batch") for row in faster):
            return ""  # it is said above why they are not advised
        if faster:
            yet = " for certain as yet" if is_open else ""
            return f"Only a larger batch is faster{yet}, which is another training."
        return (
            (
                "Nothing is faster for certain as yet: give it more --minutes."
                if is_open
                else "Nothing is faster."
            )
            if result.rows
            else ""
        )
    if row is None:
        return f"Together: {name_of(result.best)}"
    return (
        f"Together, {name_of(result.best)}: {times(row.speedup, row.low, row.high)}"
        if len(result.best) > 1
        else ""
    )


def spent(seconds):
    """Return how long each part took, one after the other; a record's compute includes its start."""
    start = seconds.get("start", 0) if "compute" in seconds else 0
    return seconds | ({"compute": seconds["compute"] - start} if start else {})


def text_of(result, with_table=True):
    """Return the report as one text."""
    lines = ["", *table(result)] if with_table else []
    for title, reasons in (
        ("Failed", result.failed),
        ("Not possible, or there already", result.excluded),
    ):
        lines += ["", title, *grouped(reasons)] if reasons else []
    if not result.by_turns and result.rows:
        lines.append("Each set ran in a process of its own.")
    lines += [paragraph(note, 0) for note in result.notes]
    lines += loader_lines(result.loader)
    if result.forecast:
        lines += ["", "Forecast with loading", *map(forecast_line, result.forecast)]
    lines += confirmation_lines(result.confirmation)
    lines += option_lines((result.confirmation or {}).get("options"))
    if not (result.writing and result.writing.verdict):
        lines += loss_lines(result.losses)
    lines += brake_lines(result) + part_lines(result.parts)
    lines += advice_lines(result)
    if text := sum_line(result):
        lines += ["", text]
    lines += ["", "Not tried", *grouped(result.not_tried)] if result.not_tried else []
    if result.stopped:
        lines = ["", "Stopped: this table is not finished.", *lines]
    if result.seconds:
        parts = [(what, took) for what, took in spent(result.seconds).items() if took >= 0.001]
        lines += ["", f"Time: {', '.join(f'{what} {duration(took)}' for what, took in parts)}"]
    if result.writing:
        lines += result.writing.lines()
    return "\n".join(lines)


# ------------------------------------------------------------------------------------- the record
def clean(value):
    """Return a value for JSON: NaN is null, and sets of techniques are texts as keys."""
    if isinstance(value, dict):
        return {name_of(key): clean(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(clean, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def record(result):
    """Return the record for --json: a dict of what JSON can hold."""
    facts = result.facts
    machine = {
        key: facts.get(key) for key in ("device", "gpu", "cores", "processes", "torch", "python")
    }
    written = (
        result.writing.record() if result.writing else dict.fromkeys(("patch", "proof", "reasons"))
    )
    return clean(
        written
        | dict(
            version=VERSION,
            date=time.strftime("%Y-%m-%d"),
            command=shlex.join(["python", *sys.argv]),
            script=result.script,
            arguments=result.arguments,
            machine=machine,
            unit=result.unit,
            baseline=result.baseline,
            rows=[
                dataclasses.asdict(row) | dict(name=name_of(row.techniques)) for row in result.rows
            ],
            best=result.best,
            by_turns=result.by_turns,
            stopped=result.stopped,
            failed=result.failed,
            excluded=result.excluded,
            not_tried=result.not_tried,
            loader=result.loader,
            forecast=result.forecast,
            confirmation=result.confirmation,
            losses=result.losses,
            held_back_by=held_back_by(facts, result.baseline),
            host_waits=[dict(at=at, text=text) for at, text in facts.get("lines", ())],
            also_seen=also_seen(facts),
            notes=result.notes,
            advice={name: advice.write(name, facts, result.extra) for name in result.best},
            options={
                name: words
                for name in result.best
                if (words := advice.options_of(name, facts, result.extra))
            },
            seconds=result.seconds,
            parts=result.parts,
            facts={key: value for key, value in facts.items() if key not in ("options", "lines")},
        )
    )  # they are long
