"""Make every table and chart from the records: `python tools/report.py`.

It writes results/<folder>/README.md and its chart, results/README.md, and what stands between
<!-- NAME WORD ... --> and <!-- /NAME --> in README.md and docs/*.md. NAME is one of PARTS.
"""

import difflib
import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOVED = 1.1  # ratios are not usable if the baseline's two runs differ by more than so many times

# the grid of running.sh: the name of a row or column, and the techniques it stands for
ROWS = {"single": [], "DP": ["DP"], "DDP": ["DDP"]}
COLUMNS = {"plain": [], "+cudnn": ["cudnn"], "+amp": ["amp"], "+cudnn +amp": ["cudnn", "amp"]}


# ------------------------------------------------------------------------------ a record
def images_per_second(row):
    """Return the median of the epochs that count; 0 where a run did not end well."""
    return row["images_per_second"] if row.get("status", "ok") == "ok" else 0


def ratio(row, base):
    """Return '1.67x', the ratio of two medians of images/s; '' where a run did not end well."""
    times = images_per_second(row) / (images_per_second(base) or float("inf"))
    return f"{times:.2f}x" if times else ""


def steady(row):
    """Return the epochs that count: those after the first, which warms up."""
    return row["epochs"][1:] or row["epochs"]


def speeds(row):
    """Return images/s of each epoch that counts."""
    return [epoch["images_per_second"] for epoch in steady(row)]


def spread(row):
    """Return images/s as 'median (least to most)'."""
    return (f"{row['images_per_second']:,.0f} ({min(speeds(row)):,.0f} to "
            f"{max(speeds(row)):,.0f})")


def data_wait(row):
    """Return the share of its time that a step waits for data: the median of the epochs."""
    return statistics.median(epoch["data_wait"] for epoch in steady(row))


def which_epochs(row):
    """Return the epochs that count in words."""
    n = len(row["epochs"]) - 1
    return (f"the {n} epochs after the first" if n > 1 else "the second epoch" if n else
            "the only epoch, which also warms up: take 2 or more to compare")


def first_good(rows):
    """Return the first row that ended well, or None."""
    return next((row for row in rows if row.get("status", "ok") == "ok"), None)


def place(row):
    """Return the machine in a few words."""
    here = row["machine"]
    return (f"{here['gpus']}x {here['gpu']}" if here["gpus"] else
            f"{here['cores']} cores of {here['cpu']}")


def workload(row):
    """Return what was trained or read, in a few words."""
    options = row["options"]
    if "data_source" in options:
        return f"{Path(options['data_source']).name}, batch {options['batch_size']:,}"
    width = f" {options['width']} wide" if options["model"] == "conv11" else ""
    return (f"{options['model']}{width}, {options['image_size']} px, "
            f"{Path(options['dataset']).name}, batch {options['batch_size']:,}")


def setting(row):
    """Return one line: where, with what, when and how a row was measured."""
    here = row["machine"]
    gpus = "no GPU; "
    if here["gpus"]:
        gpus = (f"{place(row)}, driver {here['driver']}, CUDA {here['cuda']}, cuDNN "
                f"{here['cudnn']}; ")
    versions = "".join(f"{name} {version}, " for name, version in sorted(here["packages"].items()))
    return (f"{gpus}{here['cores']} cores of {here['cpu']}; {versions}Python {here['python']}; "
            f"{row['date']}; `{row['command']}`")


def stopped(rows):
    """Return the lines under a table of a run that was stopped."""
    return [line for row in rows if "stopped" in row for line in ("", row["stopped"])]


# ------------------------------------------------------------------------------ running.sh
def script_name(row):
    """Return the name of the joined script that a row is of."""
    return "_".join(["train", *row["techniques"]])


def summary(row, baseline):
    """Return the line that the driver prints when a run has ended."""
    if row["status"] != "ok":
        return f"{row['status'].upper()}: {row['error']}" + (
            f" (log: {row['log']})" if "log" in row else "")
    return (f"{row['train_seconds']:.2f} s  {row['images_per_second']:,.0f} images/s  "
            f"{ratio(row, baseline)}  top-1 {row['val_top1']:.2%}")


def not_usable(rows):
    """Return why the ratios of a table cannot be used; '' if the baseline was steady."""
    first, again = rows[0], next((row for row in rows if row["row"] == "again"), rows[0])
    if first["status"] != "ok":
        return "There are no ratios: the baseline did not end well."
    if again["status"] != "ok":
        return ("**The ratios of this table are not usable:** the baseline did not end well when "
                f"it was measured again ({again['error']}). Was the machine busy?")
    one, other = images_per_second(first), images_per_second(again)
    if max(one, other) <= MOVED * min(one, other):
        return ""
    return (f"**The ratios of this table are not usable:** the baseline trained {one:,.0f} images/s"
            f" at the start and {other:,.0f} at the end, which differ by more than "
            f"{MOVED - 1:.0%}. Something else used the machine; run it again.")


def staircase(rows):
    """Return the lines of the table of techniques, each on top of those kept before it."""
    steps = [row for row in rows if row["row"] == "staircase"]
    if not steps:
        return []
    lines = ["| staircase | images/s | to the baseline | to the step before | top-1 | |",
             "|---|---|---|---|---|---|"]
    by_name = {script_name(row): row for row in rows if row["row"] != "again"}
    for row in [rows[0], *steps]:
        name = row["column"] if row in steps else "baseline"
        if row["status"] != "ok":
            lines.append(f"| {name} | {summary(row, row)} | | | | |")
            continue
        before = ratio(row, by_name[script_name({"techniques": row["on"]})]) if "on" in row else ""
        verdict = "" if "kept" not in row else "kept" if row["kept"] else "left out"
        lines.append(f"| {name} | {row['images_per_second']:,.0f} | {ratio(row, rows[0])} | "
                     f"{before} | {row['val_top1']:.2%} | {verdict} |")
    best = best_set(rows)
    if best["techniques"]:
        lines += ["", "Each technique is added to those kept before it, and kept if training is "
                  "at least 1 % faster with it. One that was left out is tried again after others "
                  "have been kept. The fastest set: "
                  f"`./compose.sh {' '.join(best['techniques'])} > my_train.py`"]
    return [*lines, ""]


def best_set(rows):
    """Return the row of the last technique that the staircase kept, or of the baseline."""
    return ([rows[0]] + [row for row in rows if row.get("kept")])[-1]


def grid(rows):
    """Return the lines of the table of training seconds; none if only the baseline is there."""
    columns = [name for name in COLUMNS
               if any(row["row"] in ROWS and row["column"] == name for row in rows)]
    if sum(row["row"] in ROWS for row in rows) < 2:
        return []
    lines = ["| training seconds | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name in ROWS:
        cells = {row["column"]: f"{row['train_seconds']:.2f} s ({ratio(row, rows[0]) or '?'})"
                 if row["status"] == "ok" else row["status"].upper()
                 for row in rows if row["row"] == name}
        if cells:
            lines.append(f"| {name} | " + " | ".join(cells.get(at, "") for at in columns) + " |")
    return [*lines, ""]


def markdown(rows):
    """Return the tables of a run of running.sh."""
    lines = [line for line in (not_usable(rows), "") if not_usable(rows)]
    lines += [*staircase(rows), *grid(rows)]
    lines += ["| run | images/s: median (least to most) | top-1 | peak memory, first GPU | "
              "data wait | warm-up |", "|---|---|---|---|---|---|"]
    missing = {}  # why: what is in no table above
    for row in {(script_name(row), row["row"] == "again"): row for row in rows}.values():
        name = script_name(row) + ", again" * (row["row"] == "again")
        if row["status"] != "ok":
            missing.setdefault(summary(row, row), []).append(name)
            continue
        memory = row["peak_memory_bytes"]
        memory = "" if memory is None else f"{memory / 2 ** 20:,.0f} MB"
        lines.append(f"| {name} | {spread(row)} | {row['val_top1']:.2%} | {memory} | "
                     f"{data_wait(row):.0%} | {row['warmup_seconds']:.1f} s |")
    lines += [""] * bool(missing) + [
        f"- {', '.join(names)}: {why}" for why, names in missing.items()]
    if good := first_good(rows):
        steps = good["options"].get("steps")
        length = f"{len(good['epochs'])} epochs" + (f" of {steps} steps" if steps else "")
        lines += ["", f"{workload(good)}, {length}. Seconds and images/s are of "
                  f"{which_epochs(good)}; the warm-up is start and first epoch. Ratios are of the "
                  "medians of images/s. Each run was made once.", "", setting(good)]
        lines += ["", "Left out: " + "; ".join(
            f"{name}, because {why}" for name, why in good["left_out"].items()) + "."] * bool(
            good["left_out"])
        if not good["machine"]["gpus"]:
            lines += ["", f"There is no GPU here: DDP is {good['processes']} processes on the same "
                      "cores, and amp is bfloat16. What a GPU gains is not to be seen here."]
    return "\n".join(lines + stopped(rows)) + "\n"


def chart(rows, path):
    """Draw bars of images/s with their spread, the ratio to the baseline and the accuracy."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    done = [row for row in rows if row["status"] == "ok" and row["row"] != "again"]
    steps = [row for row in done if row["row"] == "staircase"]
    cells = [row for row in done if row["row"] in ROWS]
    kinds = {"baseline": "tab:blue", "kept": "tab:green", "left out": "lightgrey",
             "single": "tab:blue", "DP": "tab:orange", "DDP": "tab:purple"}

    def kind(row, part):
        if part is cells:
            return row["row"]
        return "baseline" if "kept" not in row else "kept" if row["kept"] else "left out"
    panels = [("Technique after technique, each added to those kept above it",
               [row for row in rows[:1] if row in done] + steps)] * bool(steps)
    panels += [("Processes, cuDNN's search and mixed precision", cells)] * (
        len(cells) > 1 or not steps)
    sizes = [len(part) for _, part in panels]
    figure = Figure(figsize=(9, 0.5 + 0.75 * len(panels) + 0.3 * sum(sizes)), layout="constrained")
    figure.suptitle(f"{place(done[0])}: {workload(done[0])}", fontsize=11, fontweight="bold")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=sizes)[:, 0]
    for axis, (title, part) in zip(axes, panels):
        names = [row["column"] if row["row"] == "staircase" else
                 "baseline" if not row["techniques"] else f"{row['row']} {row['column']}"
                 for row in part]
        medians = [row["images_per_second"] for row in part]
        errors = [[median - min(speeds(row)) for median, row in zip(medians, part)],
                  [max(speeds(row)) - median for median, row in zip(medians, part)]]
        axis.barh(range(len(part)), medians, xerr=errors, tick_label=names,
                  color=[kinds[kind(row, part)] for row in part],
                  error_kw={"capsize": 2, "elinewidth": 1, "ecolor": "dimgrey"})
        for i, row in enumerate(part):
            axis.annotate(f"{ratio(row, rows[0])}  top-1 {row['val_top1']:.1%}",
                          (max(speeds(row)), i), (6, 0), textcoords="offset points", va="center")
        shown = dict.fromkeys(kind(row, part) for row in part)
        axis.legend(handles=[Patch(color=kinds[name], label=name) for name in shown],
                    loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
        axis.set_title(title, loc="left", fontsize=10)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.25 * max(max(speeds(row)) for row in part))
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes[-1].set_xlabel("images/s in training: median of the epochs, lines from least to most")
    figure.savefig(path, dpi=100)


def write(rows, stem):
    """Write rows to <stem>.json, .md and .png."""
    stem.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(rows))
    stem.with_suffix(".png").unlink(missing_ok=True)
    if first_good(rows):
        chart(rows, stem.with_suffix(".png"))


# ------------------------------------------------------------------------------ loading.sh
def storage_line(storage):
    """Return one line: what the data set is stored on, and what that gives."""
    words = [f"The data set is on {storage['kind']} ({storage['file_system']} on "
             f"{storage['device']})"]
    if storage["droppable"]:
        words.append(f"read alone it gives {storage['cold_megabytes_per_second']:,.1f} MB/s cold "
                     f"and answers in {1000 * storage['answer_seconds']:.2f} ms")
    elif storage["kind"] != "memory":
        words.append("the kernel keeps its files in memory, so there is no cold run")
    return "; ".join(words) + "."


def loading_summary(row):
    """Return the line that the driver prints when a run has ended."""
    if row["status"] != "ok":
        return summary(row, row)
    return (f"{row['images_per_second']:>9,.0f} images/s  {row['megabytes_per_second']:>9,.1f} MB/s"
            f"  {row['seconds']:.2f} s an epoch")


def loading_markdown(rows):
    """Return the table of loaders, and what holds each back."""
    lines = ["| loader | page cache | images/s: median (least to most) | to the baseline | MB/s | "
             "seconds an epoch | cores busy | GPU busy |", "|---|---|---|---|---|---|---|---|"]
    base = {row["cache"]: row for row in reversed(rows) if row["loader"] == rows[0]["loader"]}
    for row in rows:
        if row["status"] != "ok":
            lines.append(f"| {row['loader']} | {row['cache']} | {summary(row, row)} | | | | | |")
            continue
        times = ratio(row, base[row["cache"]]) if row["cache"] in base else ""
        gpu = "" if row["gpu_busy"] is None else f"{row['gpu_busy']:.0%}"
        lines.append(f"| {row['loader']} | {row['cache']} | {spread(row)} | {times} | "
                     f"{row['megabytes_per_second']:,.1f} | {row['seconds']:.2f} | "
                     f"{row['cores_busy']:.1f} | {gpu} |")
    lines += ["", *(f"- {row['loader']} is limited by **{row['bottleneck']}**: {row['evidence']}."
                    for row in rows if "bottleneck" in row)]
    if good := first_good(rows):
        lines += ["", f"{good['samples']:,} samples, {good['bytes'] / 1e6:,.1f} MB an epoch; "
                  f"medians of {which_epochs(good)}. {storage_line(good['storage'])}", "",
                  setting(good)]
    return "\n".join(lines + stopped(rows)) + "\n"


def write_loading(rows, stem):
    """Write rows to <stem>.json and .md."""
    stem.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    stem.with_suffix(".md").write_text(loading_markdown(rows))


# ------------------------------------------------------------------------------ single runs
def runs_markdown(records):
    """Return a line for each record of scripts run one by one, named by what differs."""
    options = {name for record in records for name in record["options"]} - {
        "result_dir", "resume", "dataset"}
    varied = [name for name in sorted(options)
              if len({str(record["options"].get(name)) for record in records}) > 1]
    lines = ["| run | top-1 | seconds of training | images/s: median (least to most) | data wait | "
             "warm-up |", "|---|---|---|---|---|---|"]
    for record in records:
        name = ", ".join([record["script"], *(
            f"`--{option} {record['options'][option]}`" for option in varied
            if record["options"].get(option) not in (None, False))])
        lines.append(f"| {name} | {record['val_top1']:.2%} | {record['train_seconds']:.2f} s | "
                     f"{spread(record)} | {data_wait(record):.0%} | "
                     f"{record['warmup_seconds']:.1f} s |")
    commands = dict.fromkeys(record["command"] for record in records[1:]
                             if record["command"] != records[0]["command"])
    lines += ["", f"{workload(records[0])}. Seconds and images/s are of {which_epochs(records[0])};"
              " the warm-up is start and first epoch.", "", setting(records[0])]
    lines += [line for command in commands for line in ("", f"`{command}`")]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------ results/
TABLES = {"running": markdown, "loading": loading_markdown, "runs": runs_markdown}


def read(folder):
    """Return (kind, rows) of the records in a folder of results; (None, []) if it has none."""
    for kind in TABLES:
        if (folder / f"{kind}.json").exists():
            return kind, json.loads((folder / f"{kind}.json").read_text())
    return None, []


def shows(kind, rows):
    """Return what a folder of results shows, in a few words."""
    if kind == "runs":
        return f"{len(rows)} runs, up to {max(map(images_per_second, rows)):,.0f} images/s"
    if kind == "loading":
        last = rows[-1]
        base = next(row for row in rows if row["cache"] == last["cache"])
        limit = f", limited by {last['bottleneck']}" if "bottleneck" in last else ""
        return f"{last['loader']} {ratio(last, base)} {base['loader']}, {last['cache']}{limit}"
    if not_usable(rows).startswith("**The"):
        return "the baseline moved: ratios not usable"
    best = best_set(rows)
    if not best["techniques"]:
        best = max((row for row in rows if row["row"] != "again"), key=images_per_second)
    return f"{' '.join(best['techniques']) or 'the baseline'}: {ratio(best, rows[0])}"


def pages(root=ROOT):
    """Return {path: text} of every page that is made from records or files."""
    found = {}
    index = ["# Results", "", "`python tools/report.py` makes these pages from the records in each "
             "folder.", "", "| folder | machine | workload | what it shows | date |",
             "|---|---|---|---|---|"]
    for folder in sorted((root / "results").glob("*/")):
        kind, rows = read(folder)
        if rows:
            good = first_good(rows)
            image = ["![bars of images/s](running.png)", ""] * (kind == "running")
            found[folder / "README.md"] = "\n".join([
                f"# {place(good)}: {workload(good)}", "", *image, TABLES[kind](rows)])
            index.append(f"| [{folder.name}]({folder.name}/README.md) | {place(good)} | "
                         f"{workload(good)} | {shows(kind, rows)} | {good['date']} |")
    found[root / "results" / "README.md"] = "\n".join(index) + "\n"
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        found[path] = renewed(path.read_text(), root, "" if path.parent == root else "../")
    return found


# ------------------------------------------------------------------------------ parts of pages
def diff(base, variant):
    """Return the lines of the smallest diff between two scripts."""
    lines = difflib.unified_diff(base.read_text().splitlines(), variant.read_text().splitlines(),
                                 n=0, lineterm="")
    return [re.sub(r"^@@ .*\+(\d+).*", r"@@ line \1 @@", line) for line in lines][2:]


def own_options(base, variant):
    """Return the options that a script has and its baseline has not."""
    theirs, own = (re.findall(r'\badd(?:_argument)?\(\s*"(--\w+)"(?!.*SUPPRESS)', path.read_text())
                   for path in (base, variant))
    return [name for name in own if name not in theirs]


def variants_part(base):
    """Return the part that has a line for each variant of src/<base>.py."""
    def part(words, root, up):
        src = root / "src"
        lines = ["| script | blocks | lines added | options added |", "|---|---|---|---|"]
        for path in sorted(src.glob(f"{base}_*.py")):
            added = [line[1:].strip() for line in diff(src / f"{base}.py", path) if line[0] == "+"]
            options = ", ".join(f"`{name}`" for name in own_options(src / f"{base}.py", path))
            lines.append(f"| [{path.name}]({up}src/{path.name}) | {added.count('# new #')} | "
                         f"{sum(map(bool, added))} | {options} |")
        return lines
    return part


def diff_part(words, root, up):
    """Return the whole diff of the script words[0] to its baseline."""
    base, variant = (root / "src" / f"{name}.py" for name in (words[0].split("_")[0], words[0]))
    return ["```diff", *(line for line in diff(base, variant) if line != "+"), "```"]


def chart_part(words, root, up):
    """Return the chart of the folder words[0], with what was measured."""
    _, rows = read(root / "results" / words[0])
    if not rows:
        return ["Not measured yet."]
    caption = f"{workload(first_good(rows))} on {place(first_good(rows))}"
    return [f"![images/s of {caption}]({up}results/{words[0]}/running.png)", "",
            f"*Training {caption}: [tables]({up}results/{words[0]}/README.md).*"]


def table_part(words, root, up):
    """Return the table of the folder words[0], and what may be wrong with it."""
    kind, rows = read(root / "results" / words[0])
    if kind == "running":
        reason = not_usable(rows)
        return [*[reason, ""] * bool(reason), *staircase(rows)]
    return TABLES[kind](rows).split("\n\n")[0].splitlines() if rows else ["Not measured yet."]


def pays_part(words, root, up):
    """Return what each technique gained in up to three staircases: the nine that gained most."""
    titles, columns, most = [], [], {}
    for name in words[:3]:
        _, rows = read(root / "results" / name)
        by_name = {script_name(row): row for row in rows if row["row"] != "again"}
        columns.append({})
        for row in (row for row in rows if "on" in row):  # of one tried again, the last counts
            before = by_name[script_name({"techniques": row["on"]})]
            text = ratio(row, before) if row["status"] == "ok" else ""
            technique = row["column"].removeprefix("+")
            columns[-1][technique] = f"**{text}**" if row["kept"] else text
            gain = float(text.removesuffix("x")) if text.endswith("x") else 0
            most[technique] = max(gain, most.get(technique, 0))
        good = first_good(rows)
        titles.append(f"[{workload(good)}, {place(good)}]({up}results/{name}/README.md)" if good
                      else f"{name}: not measured yet")
    best = sorted(most, key=most.get)[-9:]
    lines = ["| technique | " + " | ".join(titles) + " |", "|---|" + "---|" * len(columns)]
    for technique in (name for name in most if name in best):  # in the order they were tried
        cells = [column.get(technique, "") for column in columns]
        lines.append(f"| [{technique}]({up}src/train_{technique}.py) | {' | '.join(cells)} |")
    return lines


PARTS = {"variants": variants_part("train"), "loaders": variants_part("loader"),
         "diff": diff_part, "chart": chart_part, "table": table_part, "pays": pays_part}


def renewed(text, root=ROOT, up=""):
    """Return a page with its marked parts made anew; `up` leads from the page to `root`."""
    def part(found):
        start, name, words, end = found.groups()
        return "\n".join([start, *PARTS[name](words.split(), root, up)]).rstrip() + f"\n{end}"
    pattern = rf"(<!-- ({'|'.join(PARTS)})\b(.*?) -->)\n.*?(<!-- /\2\b.*? -->)"
    return re.sub(pattern, part, text, flags=re.DOTALL)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
    for path in (ROOT / "results").glob("*/running.json"):
        chart(json.loads(path.read_text()), path.with_suffix(".png"))
