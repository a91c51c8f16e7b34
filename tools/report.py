"""Make every table and chart from the records: `python tools/report.py`.

It writes results/<folder>/README.md and its chart, results/README.md, and what stands between
<!-- NAME WORD ... --> and <!-- /NAME --> in README.md and docs/*.md. NAME is one of PARTS.
"""

import argparse
import difflib
import importlib
import io
import itertools
import re
import statistics
import tokenize
from pathlib import Path

from paths import ROOT

import hazards
import records
from ratios import MOVED, compare, doubt_of
from records import Row, Verdict
from whatif import parts
from whatif.stats import ADVISED

# the grid of running.sh: the name of a row or column, and the techniques it stands for
ROWS = {"single": [], "DP": ["DP"], "DDP": ["DDP"]}
COLUMNS = {"plain": [], "+cudnn": ["cudnn"], "+amp": ["amp"], "+cudnn +amp": ["cudnn", "amp"]}
COLORS = {
    "baseline": "tab:blue",
    "kept": "tab:green",
    "left out": "lightgrey",
    "no difference": "lightgrey",
    "slower": "silver",
    "gains less": "palegreen",
    "ran once": "palegreen",
    "tried again": "palegreen",
    "not clear": "palegreen",
    "single": "tab:blue",
    "DP": "tab:orange",
    "DDP": "tab:purple",
}


# ------------------------------------------------------------------------------ a record
def speeds(row, key="images_per_second"):
    """Return images/s of the epochs after the first, of all runs; other keys of the first run."""
    if row.runs is not None and key == "images_per_second":
        return [rate for run in row.runs for rate in run["rates"]]
    return [epoch[key] for epoch in row.epochs[1:] or row.epochs]


def runs(row):
    """Return the runs of a row. A row of loading.sh has one."""
    return row.runs or [dict(number=0, images_per_second=row.images_per_second, rates=speeds(row))]


def ratio(row, base):
    """Return '1.67x': how many times as fast a row is; '' where a run did not end well."""
    if row.status != "ok" or base.status != "ok":
        return ""
    return f"{compare(runs(row), runs(base)).speedup:.2f}x"


def to_baseline(row, rows):
    """Return '3.77x ±0.33': the ratio of a row of running.sh to the baseline, by all runs."""
    if row.status != "ok" or rows[0].status != "ok" or not row.techniques:
        return ratio(row, rows[0])
    sets = {tuple(each.techniques): runs(each) for each in rows if each.status == "ok"}
    found = compare(runs(row), runs(rows[0]), doubt_of(sets.values()))
    return f"{found.speedup:.2f}x ±{found.spread:.2f}"


def gain(row):
    """Return '1.67x ±0.05', the ratio that the verdict on a row is about."""
    return f"{row.ratio:.2f}x ±{row.spread:.2f}" if row.ratio is not None else ""


def verdict(row):
    """Return the verdict on a row of the staircase; '' for the baseline."""
    if row.kept:
        return f"kept, {row.verdict.value}" if kept_although(row) else "kept"
    if row.verdict is Verdict.FASTER:
        return "gains less"
    return row.verdict.value if row.verdict else "left out" if row.on is not None else ""


def kept_although(row):
    """Return whether a technique was kept after its first run, and all runs say something else."""
    return bool(row.kept and row.verdict not in (None, Verdict.FASTER))


def warmup(row):
    """Return the warm-up of the first run, which may compile; of the baseline, the median."""
    return (
        row.warmup_seconds
        if row.techniques
        else statistics.median(run.get("warmup_seconds", row.warmup_seconds) for run in runs(row))
    )


def whole(row):
    """Return the seconds of a row's run, with warm-up and without validation."""
    first = row.epochs[0]
    images = first["seconds"] * first["images_per_second"]
    return warmup(row) + (len(row.epochs) - 1) * images / row.images_per_second


def pays_back(row, base):
    """Return after how many steps a set has made up for its longer warm-up, in words."""
    if row is base or base.status != "ok" or row.verdict not in (None, Verdict.FASTER):
        return ""
    if row.images_per_second < ADVISED * base.images_per_second:
        return "never"
    batch, first = row.options["batch_size"], row.epochs[0]
    extra = (warmup(row) - warmup(base)) / (
        batch / base.images_per_second - batch / row.images_per_second
    )
    steps = first["seconds"] * first["images_per_second"] / batch  # the first epoch's
    return f"{steps + extra:,.0f} steps" if extra > 0 else "the first epoch"


def spread(row):
    """Return images/s as 'median (least to most)'."""
    median, least, most = row.images_per_second, min(speeds(row)), max(speeds(row))
    return f"{median:,.0f} ({least:,.0f} to {most:,.0f})"


def data_wait(row):
    """Return the share of its time that a step waits for data: the median of the epochs."""
    return statistics.median(speeds(row, "data_wait"))


def which_epochs(row):
    """Return the epochs that count in words."""
    n = len(row.epochs) - 1
    return (
        f"the {n} epochs after the first"
        if n > 1
        else "the second epoch"
        if n
        else "the only epoch, which also warms up: take 2 or more to compare"
    )


def first_good(rows):
    """Return the first row that ended well, or None."""
    return next((row for row in rows if row.status == "ok"), None)


def problem(row):
    """Return why a run did not end well, and where its log is."""
    return f"{row.status.upper()}: {row.error}" + (
        f" (log: {row.log})" if row.log is not None else ""
    )


def place(row):
    """Return the machine in a few words."""
    here = row.machine
    return (
        f"{here['gpus']}x {here['gpu']}"
        if here["gpus"]
        else f"{here['cores']} cores of {here['cpu']}"
    )


def workload(row):
    """Return what was trained or read, in a few words."""
    options = row.options
    if not options:
        return "not measured"
    dataset = Path(options.get("dataset") or options["data_source"]).name  # its name until 2026
    if "model" not in options:
        return f"{dataset}, batch {options['batch_size']:,}"
    width = f" {options['width']} wide" if options["model"] == "conv11" else ""
    return (
        f"{options['model']}{width}, {options['image_size']} px, "
        f"{dataset}, batch {options['batch_size']:,}"
    )


def recipe(row):
    """Return what was trained or read and for how long, in a few words."""
    epochs, steps = row.options["epochs"], row.options.get("steps")
    return f"{workload(row)}, {epochs} epochs" + (f" of {steps} steps" if steps else "")


def setting(row):
    """Return one line: where, with what, when and how a row was measured."""
    here = row.machine
    gpus = (
        f"{place(row)}, driver {here['driver']}, CUDA {here['cuda']}, cuDNN {here['cudnn']}"
        if here["gpus"]
        else "no GPU"
    )
    versions = "".join(f"{name} {version}, " for name, version in sorted(here["packages"].items()))
    return (
        f"{gpus}; {here['cores']} cores of {here['cpu']}; {versions}Python {here['python']}; "
        f"{row.date}; `{row.command}`"
    )


# ------------------------------------------------------------------------------ tables
def table(head, rows):
    """Return the lines of a table of cells; `head` is its first line, short rows are filled up."""
    columns = head.count("|") - 1
    return [
        head,
        "|" + "---|" * columns,
        *(
            "| "
            + " | ".join(cell.replace("|", "\\|") for cell in cells)
            + " |" * (columns - len(cells) + 1)
            for cells in rows
        ),
    ]


def text_of(parts, stopped=()):
    """Return the text of paragraphs, given as str or as [line, ...], and why the run stopped."""
    parts = [*parts, *filter(None, stopped)]
    return (
        "\n\n".join(part if isinstance(part, str) else "\n".join(part) for part in parts if part)
        + "\n"
    )


def save(markdown, rows, stem):
    """Write rows to <stem>.json and markdown(rows), their tables, to <stem>.md; never half."""
    records.write(rows, stem.with_suffix(".json"))
    records.replace(stem.with_suffix(".md"), markdown(rows))


# ------------------------------------------------------------------------------ running.sh
def summary(row, baseline):
    """Return the line that the driver prints when a run has ended."""
    if row.status != "ok":
        return problem(row)
    return (
        f"{row.train_seconds:.2f} s  {row.images_per_second:,.0f} images/s  "
        f"{ratio(row, baseline)}  top-1 {row.val_top1:.2%}"
    )


def warning(rows):
    """Return what was wrong with the baseline; '' if it was steady."""
    first, told = rows[0], []
    if first.status != "ok":
        return "There are no ratios: the baseline did not end well."
    if first.failed:
        told.append(f"**A later run of the baseline did not end well** ({first.failed}).")
    for one, other in itertools.pairwise(run["images_per_second"] for run in runs(first)):
        if max(one, other) > MOVED * min(one, other):
            told.append(
                f"**The baseline's speed changed:** it trained {one:,.0f} images/s and "
                f"then {other:,.0f}. Something else used the machine, or loading varied."
            )
            break
    return " ".join(told)


def gains(rows):
    """Return [(row, the row that it was added to, its ratio to that)] of the staircase."""
    sets = {tuple(row.techniques): row for row in rows}
    steps = [(row, sets[tuple(row.on)]) for row in rows if row.on is not None]
    return [(row, on, gain(row).split(" ")[0] or ratio(row, on)) for row, on in steps]


def fastest(rows):
    """Return the last row of the staircase that gains, or the baseline if none does.

    Without a staircase it is the row with most images/s.
    """
    if any(row.on is not None for row in rows):
        kept = [row for row in rows if row.kept and (row.ratio or ADVISED) >= ADVISED]
        return kept[-1] if kept else rows[0]
    return max(rows, key=lambda row: row.images_per_second if row.status == "ok" else 0)


def staircase(rows):
    """Return the table of techniques, each on top of those kept before it, and the fastest sets."""
    cells = []
    for row, on, times in [(rows[0], rows[0], ""), *gains(rows)]:
        name = row.column if row.on is not None else "baseline"
        cells.append(
            [name, problem(row)]
            if row.status != "ok"
            else [
                name,
                f"{row.images_per_second:,.0f}",
                to_baseline(row, rows),
                gain(row) or times,
                str(row.n or len(runs(row))),
                pays_back(row, on),
                f"{row.val_top1:.2%}",
                verdict(row),
            ]
        )
    if len(cells) == 1:
        return []
    lines = table(
        "| staircase | images/s | to the baseline | to the step before | runs | "
        "pays back after | top-1 | |",
        cells,
    )
    lines += [
        "",
        "Each technique is added to those kept before it, and kept if it gains. One that "
        "was left out is tried again",
        "after others have been kept, if time is left.",
    ]
    if any(row.verdict in (Verdict.RAN_ONCE, Verdict.NOT_CLEAR) for row in rows):
        lines += ["Ran once, not clear: more --minutes or --runs give a verdict."]
    if any(map(kept_although, rows)):
        lines += ["Kept, with another verdict: it gained in its first run, but not clearly in all."]
    sets = [
        row
        for row in rows
        if row.status == "ok" and (row is rows[0] or row.kept or row.verdict is Verdict.FASTER)
    ]
    if sets and rows[0].status == "ok":
        best, quick = fastest(rows), min(sets, key=whole)
        others = {"the fastest per step": best, "the baseline": rows[0]}
        seconds = [
            f"; {name} takes {whole(row):.1f} s"
            for name, row in others.items()
            if row is not quick and row.status == "ok"
        ]
        lost = [row.column[1:] for row in rows if row.kept and row.ratio and row.ratio < 1]
        lost = [name for name in lost if name in best.techniques]
        lines += [
            "",
            f"- Fastest per step, of what was kept: {command(best, rows[0])}"
            + (f" (faster in its first run only: {', '.join(lost)})" if lost else ""),
            f"- Fastest over the whole of {len(quick.epochs)} epochs, with warm-up:",
            f"  {command(quick, rows[0])},",
            "".join([f"  {whole(quick):.1f} s without validation", *seconds]),
        ]
    return lines


def own_words(row, base):
    """Return '--compile_mode reduce-overhead': options that a row was given and its base lacks."""
    return " ".join(
        f"--{name}" if value is True else f"--{name} {value}"
        for name, value in row.options.items()
        if name not in (row.options if base.options is None else base.options)
        and f"--{name}" in re.split(r"[\s=]", row.command)
    )


def command(row, base):
    """Return the command that makes the script of a row, and options that the baseline lacks."""
    if not row.techniques:
        return "`src/train.py`, the baseline"
    given = own_words(row, base)
    return f"`./compose.sh {' '.join(row.techniques)} > my_train.py`" + (
        f"\n  with `{given}`" if given else ""
    )


def grid(rows):
    """Return the table of training seconds; nothing if only the baseline is there."""
    texts = {
        (row.row, row.column): row.status.upper()
        if row.status != "ok"
        else f"{row.train_seconds:.2f} s ({to_baseline(row, rows) or '?'})"
        for row in rows
        if row.row in ROWS
    }
    if len(texts) < 2:
        return []
    columns = [column for column in COLUMNS if any(column == at for _, at in texts)]
    cells = [
        [name, *(texts.get((name, column), "") for column in columns)]
        for name in ROWS
        if any(name == at for at, _ in texts)
    ]
    return table(f"| training seconds | {' | '.join(columns)} |", cells)


def chance(row):
    """Return what to say of a baseline that has hardly learned anything, or ""."""
    count = len(row.other.get("classes", ()))
    if row.status != "ok" or not count or row.val_top1 >= 2 / count:
        return ""
    return (
        f"The baseline's top-1 is hardly better than chance ({1 / count:.1%} with {count:,} "
        "classes): a training as short as this shows speed. Compare accuracy in a longer one."
    )


def markdown(rows):
    """Return the tables of a run of running.sh."""
    cells, problems = [], {}  # of those that are in no table above: {why: [name, ...]}
    for name, row in {"_".join(["train", *row.techniques]): row for row in rows}.items():
        if row.status != "ok":
            problems.setdefault(problem(row), []).append(name)
            continue
        if row.failed is not None:
            problems.setdefault(row.failed, []).append(f"{name}, a later run")
        memory = row.peak_memory_bytes
        later = [run["warmup_seconds"] for run in runs(row)[1:]]
        cells.append(
            [
                name,
                str(len(later) + 1),
                spread(row),
                f"{row.val_top1:.2%}",
                f"{memory / 2**20:,.0f} MB" if memory else "",
                f"{data_wait(row):.0%}",
                f"{row.warmup_seconds:.1f} s"
                + (f", then {statistics.median(later):.1f} s" if later else ""),
            ]
        )
    pieces = [
        warning(rows),
        staircase(rows),
        grid(rows),
        table(
            "| run | runs | images/s: median (least to most) | top-1 | "
            "peak memory, first GPU | data wait | warm-up |",
            cells,
        ),
        [f"- {', '.join(names)}: {why}" for why, names in problems.items()],
        chance(rows[0]),
    ]
    if good := first_good(rows):
        spent = parts_of(rows)
        validated = f", validation on {good.validated}" if good.validated else ""
        pieces += [
            parts_table(spent),
            import_note(good, spent),
            f"{recipe(good)}{validated}. Seconds and images/s are of {which_epochs(good)}; the "
            "warm-up is start and first epoch. A ratio compares each run with the other set's speed "
            "at that time, so it can differ from the quotient of two images/s; ± is its 95 % "
            "uncertainty.",
            setting(good),
        ]
        if good.left_out:
            reasons = [f"{name}, because {why}" for name, why in good.left_out.items()]
            pieces.append(f"Left out: {'; '.join(reasons)}.")
        if not good.machine["gpus"]:
            pieces.append(
                f"There is no GPU here: DDP is {good.processes} processes on the same "
                "cores, and amp is bfloat16. This does not show what a GPU gains."
            )
    return text_of(pieces, [row.stopped for row in rows])


def parts_table(found):
    """Return the table of where the time of runs went: `found` is {name: {part: seconds}}."""
    if not found:
        return []
    names = [name for name in parts.PARTS if any(name in each for each in found.values())]
    head = " | ".join(parts.PARTS[name][0] for name in names)
    cells = [
        [
            name,
            f"{sum(each.values()):.1f} s",
            *map(parts.shares(each).get, names),
            f"`{parts.bar(each)}`",
        ]
        for name, each in found.items()
    ]
    return [*table(f"| whole run | seconds | {head} | |", cells), "", f"{parts.legend(names)}."]


def parts_of(rows):
    """Return {name: {part: seconds}} of the first run of each set of running.sh."""
    return {
        " + ".join(row.techniques) or "baseline": found
        for row in rows
        if row.status == "ok" and (found := runs(row)[0].get("parts"))
    }


def import_note(row, where):
    """Return the sentence about what forked runs save, if they were forked."""
    seconds = row.other.get("import_seconds")
    return (
        where
        and seconds
        and (
            f"These are of the first run of each set. A run here is a fork of a process that has "
            f"imported PyTorch; one that you start takes {seconds:.1f} s longer to start. DDP's is not "
            "a fork."
        )
    )


def color(kind):
    """Return the color of a bar: of a verdict, or of a row of the grid."""
    return COLORS.get(kind, "tab:olive")  # kept, but not clearly faster


def panels_of(rows):
    """Return [(title, [(a bar's name, its kind, row), ...]), ...] of the chart."""
    done = [row for row in rows if row.status == "ok"]
    steps = [(row.column, verdict(row), row) for row in done if row.on is not None]
    cells = [
        (f"{row.row} {row.column}" if row.techniques else "baseline", row.row, row)
        for row in done
        if row.row in ROWS
    ]
    panels = []
    if steps:
        title = "Technique after technique, each added to those kept above it"
        panels.append((title, [("baseline", "baseline", rows[0]), *steps]))
    if len(cells) > 1 or not steps:
        panels.append(("Processes, cuDNN's search and mixed precision", cells))
    return panels


def draw(axis, bars, rows):
    """Draw bars of images/s with their spread; behind each its ratio, accuracy and kind."""
    for i, (name, kind, row) in enumerate(bars):
        median, least, most = row.images_per_second, min(speeds(row)), max(speeds(row))
        axis.barh(
            i,
            median,
            xerr=[[median - least], [most - median]],
            color=color(kind),
            error_kw={"capsize": 2, "elinewidth": 1, "ecolor": "dimgrey"},
        )
        axis.annotate(
            f"{to_baseline(row, rows)}  top-1 {row.val_top1:.1%}"
            + (f"  {kind}" if i and kind not in name else ""),
            (most, i),
            (6, 0),
            textcoords="offset points",
            va="center",
        )
    axis.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.9 * max(max(speeds(row)) for *_, row in bars))
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def draw_parts(axis, spent):
    """Draw a stacked bar of seconds for each of {name: {part: seconds}}."""
    left = [0] * len(spent)
    for name, (told, _) in parts.PARTS.items():
        seconds = [each.get(name, 0) for each in spent.values()]
        if any(seconds):
            axis.barh(range(len(spent)), seconds, left=left, label=told)
            left = [sum(pair) for pair in zip(left, seconds)]
    axis.set_title("Where the seconds of a whole run went", loc="left", fontsize=10)
    axis.set_yticks(range(len(spent)), spent)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("seconds of the first run")


def chart(rows, path):
    """Draw what was measured, if the baseline ended well."""
    if rows[0].status != "ok":
        return
    from matplotlib.figure import Figure

    panels, spent = panels_of(rows), parts_of(rows)
    sizes = [len(bars) for _, bars in panels] + [max(5, len(spent))] * bool(spent)
    figure = Figure(figsize=(9, 0.5 + 0.75 * len(sizes) + 0.3 * sum(sizes)), layout="constrained")
    figure.suptitle(f"{place(rows[0])}: {workload(rows[0])}", fontsize=11, fontweight="bold")
    axes = figure.subplots(len(sizes), squeeze=False, height_ratios=sizes)[:, 0]
    for axis, (title, bars) in zip(axes, panels):
        axis.set_title(title, loc="left", fontsize=10)
        draw(axis, bars, rows)
    if spent:
        draw_parts(axes[-1], spent)
    axes[len(panels) - 1].set_xlabel(
        "images/s in training: median of the epochs, lines from least to most"
    )
    figure.savefig(path, dpi=100)


def write(rows, stem):
    """Write rows to <stem>.json, .md and, if the baseline ended well, .png."""
    save(markdown, rows, stem)
    stem.with_suffix(".png").unlink(missing_ok=True)
    chart(rows, stem.with_suffix(".png"))


# ------------------------------------------------------------------------------ loading.sh
def write_loading(rows, stem):
    """Write rows to <stem>.json and .md."""
    save(loading_markdown, rows, stem)


def storage_line(storage):
    """Return one line: what the dataset is stored on, and what that gives."""
    line = f"The dataset is on {storage['kind']} ({storage['file_system']} on {storage['device']})"
    if storage["kind"] != "memory":
        line += (
            f"; read alone it gives {storage['cold_megabytes_per_second']:,.1f} MB/s cold "
            f"and answers in {1000 * storage['answer_seconds']:.2f} ms"
        )
    return line + "."


def loading_summary(row):
    """Return the line that the driver prints when a run has ended."""
    if row.status != "ok":
        return problem(row)
    return (
        f"{row.images_per_second:>9,.0f} images/s  {row.megabytes_per_second:>9,.1f} MB/s"
        f"  {row.seconds:.2f} s an epoch"
    )


def loading_markdown(rows):
    """Return the table of loaders, and what holds each back."""
    base = {row.cache: row for row in rows if row.loader == rows[0].loader}
    cells = [
        [
            row.loader,
            row.cache,
            *(
                [problem(row)]
                if row.status != "ok"
                else [
                    spread(row),
                    ratio(row, base.get(row.cache, Row(status="not run"))),
                    f"{row.megabytes_per_second:,.1f}",
                    f"{row.seconds:.2f}",
                    f"{row.cores_busy:.1f}",
                    "" if row.gpu_busy is None else f"{row.gpu_busy:.0%}",
                ]
            ),
        ]
        for row in rows
    ]
    parts = [
        table(
            "| loader | page cache | images/s: median (least to most) | to the baseline | "
            "MB/s | seconds an epoch | cores busy | GPU busy |",
            cells,
        ),
        [
            f"- {row.loader} is limited by **{row.bottleneck}**: {row.evidence}."
            for row in rows
            if row.bottleneck is not None
        ],
    ]
    if good := first_good(rows):
        parts += [
            f"{good.samples:,} samples, {good.bytes / 1e6:,.1f} MB an epoch; medians "
            f"of {which_epochs(good)}. {storage_line(good.storage)}",
            setting(good),
        ]
    return text_of(parts, [row.stopped for row in rows])


# ------------------------------------------------------------------------------ results/
def running_shows(rows):
    """Return (machine, workload, what it shows, date) of a record of running.sh."""
    best = fastest(rows)
    told = f"{' '.join(best.techniques) or 'the baseline'}: {to_baseline(best, rows)}"
    return place(rows[0]), workload(rows[0]), told, rows[0].date


def loading_shows(rows):
    """Return (machine, workload, what it shows, date) of a record of loading.sh."""
    last, base = rows[-1], {row.cache: row for row in rows[::-1]}
    told = (
        f"{last.loader}: "
        + ", ".join(
            f"{ratio(row, base[row.cache])} {base[row.cache].loader} {row.cache}"
            for row in rows
            if row.loader == last.loader
        )
        + (f", limited by {last.bottleneck}" if last.bottleneck else "")
    )
    return place(rows[0]), workload(rows[0]), told, rows[0].date


# The functions of each kind of record: markdown(record) returns its tables, and shows(record)
# (machine, workload, what it shows, date). results/<folder>/K.json is of kind K. Kinds that are
# not here have these two functions in benchmarks/K.py.
KINDS = {"running": (markdown, running_shows), "loading": (loading_markdown, loading_shows)}


def functions(kind):
    """Return (markdown, shows) of a kind of record; None if it has none."""
    if kind in KINDS:
        return KINDS[kind]
    if not (ROOT / "benchmarks" / f"{kind}.py").exists():
        return None
    module = importlib.import_module(kind)
    return module.markdown, module.shows


def all_records():
    """Return {folder's name: (kind, record)} of results/; a folder holds one record."""
    return {
        path.parent.name: (path.stem, records.read(path))
        for path in sorted((ROOT / "results").glob("*/*.json"))
        if functions(path.stem)
    }


def results():
    """Return those of all_records() that running.sh and loading.sh have made: lists of rows."""
    return {
        name: (kind, rows)
        for name, (kind, rows) in all_records().items()
        if kind in ("running", "loading")
    }


def pages():
    """Return {path: text} of every page that is made from records or files."""
    found, index = {}, []
    for name, (kind, record) in all_records().items():
        tables, shows = functions(kind)
        where, what, told, date = shows(record)
        image = "![bars of images/s](running.png)\n\n" if kind == "running" else ""
        found[ROOT / "results" / name / "README.md"] = (
            f"# {where}: {what}\n\n{image}{tables(record)}"
        )
        index.append([f"[{name}]({name}/README.md)", where, what, told, date])
    found[ROOT / "results" / "README.md"] = "\n".join(
        [
            "# Results",
            "",
            "`python tools/report.py` makes these pages from the records in each folder.",
            "",
            *table("| folder | machine | workload | what it shows | date |", index),
            "",
        ]
    )
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        found[path] = renewed(path.read_text(), "" if path.parent == ROOT else "../")
    return found


# ------------------------------------------------------------------------------ parts of pages
def diff(base, variant):
    """Return the lines of the diff between two scripts, without unchanged lines."""
    lines = difflib.unified_diff(
        base.read_text().splitlines(), variant.read_text().splitlines(), n=0, lineterm=""
    )
    return [re.sub(r"^@@ .*\+(\d+).*", r"@@ line \1 @@", line) for line in lines][2:]


def own_options(base, variant):
    """Return the options that a script has and its baseline has not."""
    theirs, own = (
        re.findall(r'\badd(?:_argument)?\(\s*"(--\w+)"(?!.*SUPPRESS)', path.read_text())
        for path in (base, variant)
    )
    return [name for name in own if name not in theirs]


def tokens(text):
    """Return the number of tokens, without comments, line ends and indents. An f-string is one."""
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]  # Python 3.12 splits f-strings
        depth -= name == "FSTRING_END"
        count += depth == 0 and name not in (
            "COMMENT",
            "NL",
            "NEWLINE",
            "INDENT",
            "DEDENT",
            "ENDMARKER",
            "FSTRING_START",
        )
        depth += name == "FSTRING_START"
    return count


def variants_part(words, up):
    """Return a table of the variants of the script words[0]."""
    base, cells = ROOT / "src" / f"{words[0]}.py", []
    for path in sorted(base.parent.glob(f"{base.stem}_*.py")):
        added = [line[1:].strip() for line in diff(base, path) if line[0] == "+"]
        more = tokens(path.read_text()) - tokens(base.read_text())
        cells.append(
            [
                f"[{path.name}]({up}src/{path.name})",
                str(added.count("# new #")),
                str(sum(map(bool, added))),
                f"{more:,}",
                ", ".join(f"`{name}`" for name in own_options(base, path)),
            ]
        )
    return table("| script | blocks | lines added | tokens added | options added |", cells)


def diff_part(words, up):
    """Return the whole diff of the script words[0] to its baseline."""
    base, variant = (ROOT / "src" / f"{name}.py" for name in (words[0].split("_")[0], words[0]))
    return ["```diff", *(line for line in diff(base, variant) if line != "+"), "```"]


def table_part(words, up):
    """Return the first table of the folder words[0]."""
    kind, record = all_records()[words[0]]
    return [next(part for part in functions(kind)[0](record).split("\n\n") if part[0] == "|")]


def pays_part(words, up):
    """Return what each technique gained in the staircases of these folders."""
    head, columns, together = ["technique"], [], ["all that gained 2 % or more"]
    for name in words:
        _, rows = results()[name]
        together.append(f"**{to_baseline(fastest(rows), rows)}**")
        head.append(f"[{workload(rows[0])}, {place(rows[0])}]({up}results/{name}/README.md)")
        columns.append(
            {
                row.column.removeprefix("+"): (
                    f"**{times}**"
                    if verdict(row) == "kept" and float(times[:-1]) >= ADVISED
                    else times
                )
                for row, _, times in gains(rows)
            }
        )  # of one tried again, the last counts
    titles = dict(
        re.findall(
            r"^### train_(\w+)\.py: (.*)$",
            (ROOT / "docs" / "techniques.md").read_text(),
            re.MULTILINE,
        )
    )
    # as they were tried, without those that are gone
    names = dict.fromkeys(name for column in columns for name in column if name in titles)
    return table(
        f"| {' | '.join(head)} |",
        [
            *(
                [
                    f"[{name}]({up}src/train_{name}.py): {titles[name]}",
                    *(column.get(name, "") for column in columns),
                ]
                for name in names
            ),
            together,
        ],
    )


def hazards_part(words, up):
    """Return the table of what compose.sh warns of in the user's own lines."""
    return table(
        "| code | technique | what it means for your line |",
        [
            [rule.code, rule.techniques.replace("!", " without "), rule.sentence]
            for rule in hazards.RULES
        ],
    )


PARTS = {
    "hazards": hazards_part,
    "variants": variants_part,
    "diff": diff_part,
    "table": table_part,
    "pays": pays_part,
}


def renewed(text, up=""):
    """Return a page with its marked parts made anew; `up` leads from the page to the project."""

    def part(found):
        start, name, words, end = found.groups()
        return "\n".join([start, *PARTS[name](words.split(), up), end])

    pattern = rf"(<!-- ({'|'.join(PARTS)})\b(.*?) -->)\n.*?(<!-- /\2\b.*? -->)"
    return re.sub(pattern, part, text, flags=re.DOTALL)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()  # there is --help only
    for path, text in pages().items():
        path.write_text(text)
    for path in (ROOT / "results").glob("*/running.json"):
        chart(records.read(path), path.with_suffix(".png"))
