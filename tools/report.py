"""Tables and charts, made from records. `python tools/report.py` renews those in README.md."""

import ast
import difflib
import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# what the drivers run: name of a row or column of the table, and the techniques it stands for
ROWS = {"single": [], "DP": ["DP"], "DDP": ["DDP"]}
COLUMNS = {"plain": [], "+cudnn": ["cudnn"], "+amp": ["amp"], "+cudnn +amp": ["cudnn", "amp"]}


def images_per_second(row):
    """0 where a run did not end well."""
    return row["images_per_second"] if row["status"] == "ok" else 0


def ratio(row, baseline):
    """How many times as fast in training as `baseline`; None where either did not end well."""
    if row["status"] != "ok" or baseline["status"] != "ok":
        return None
    return baseline["train_seconds"] / row["train_seconds"]


def cell(row, baseline):
    """'12.3 s (1.45x)', or FAIL or SKIP."""
    if row["status"] != "ok":
        return row["status"].upper()
    times = ratio(row, baseline)
    return f"{row['train_seconds']:.2f} s" + (f" ({times:.2f}x)" if times else "")


def summary(row, baseline):
    """The line that the driver prints when a run has ended."""
    if row["status"] != "ok":
        return f"{row['status'].upper()}: {row['error']} (log: {row['log']})"
    return (f"{cell(row, baseline):<18} {row['images_per_second']:>9,.0f} images/s  "
            f"top-1 {row['val_top1']:.2%}")


def machine(row):
    """One line: where and with what the row was measured."""
    env = row["environment"]
    gpu = "no GPU; "
    if env["gpu"]:
        gpu = f"{env['gpus']}x {env['gpu']}, driver {env['driver']}, CUDA {env['cuda']}"
        gpu += f", cuDNN {env['cudnn']}; " if "cudnn" in env else "; "
    packages = "".join(f"{name} {version}, " for name, version in sorted(
        row.get("packages", {}).items()))
    return (f"{gpu}{env['cores']} cores of {env['cpu']}; torch {env['torch']}, {packages}Python "
            f"{env['python']}; {row['date']}; `{row['command']}`")


def caveat(row, techniques):
    """What figures of this machine do not say, if they are of `techniques`; '' where nothing."""
    gpus = row["environment"]["gpus"]
    if gpus == 0:
        return (f"There is no GPU here: DP and cudnn then change nothing, DDP is "
                f"{row['processes']} gloo processes on the same cores, and amp is bfloat16. These "
                "figures show that the scripts work and how large this machine's noise is, not "
                "what a GPU gains.")
    if gpus == 1 and techniques & {"DP", "DDP"}:
        return "With one GPU, DP and DDP show what they cost, not what they gain."
    return ""


def markdown(rows):
    """The table of training seconds, and a line for each run."""
    baseline = rows[0]
    columns = [name for name in COLUMNS
               if any(row["row"] in ROWS and row["column"] == name for row in rows)]
    lines = ["| training seconds | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name in ROWS:
        cells = {row["column"]: cell(row, baseline) for row in rows if row["row"] == name}
        if cells:
            lines.append(f"| {name} | " + " | ".join(cells.get(at, "") for at in columns) + " |")
    if [row["row"] for row in rows[1:2]] == ["staircase"]:
        lines = []  # there are no other cells
    lines += staircase(rows)
    lines += ["", "| run | images/s: median (least to most) | top-1 | peak memory, first device | "
              "data wait | warm-up |", "|---|---|---|---|---|---|"]
    for row in {script_name(row): row for row in rows}.values():
        name = script_name(row)
        if row["status"] != "ok":
            lines.append(f"| {name} | {row['status'].upper()}: {row['error']} | | | | |")
            continue
        memory = row["peak_memory_bytes"]
        memory = "not known" if memory is None else f"{memory / 2 ** 20:,.0f} MB"
        lines.append(f"| {name} | {spread(row)} | {row['val_top1']:.2%} | "
                     f"{memory} | {data_wait(row):.0%} | {row['warmup_seconds']:.1f} s |")
    logs = [f"- {name} failed; its log: {log}" for name, log in dict.fromkeys(
        (script_name(row), row["log"]) for row in rows if row["status"] == "fail")]
    good = next((row for row in rows if row["status"] == "ok"), None)
    if good:
        alone = "" if len(good["epochs"]) > 1 else ": take 2 epochs or more to compare"
        lines += ["", f"Seconds and images/s are of {which_epochs(good)}{alone}, in training "
                  "alone; the warm-up is start and first epoch. Each run was made once.", "",
                  machine(good)]
        said = caveat(good, {name for row in rows for name in row["techniques"]})
        lines += ["", said] if said else []
    lines += ["", *logs] if logs else []
    lines += stopped(rows)
    return "\n".join(lines).lstrip("\n") + "\n"


def script_name(row):
    """The name of the joined script that a row is of."""
    return "_".join(["train", *row["techniques"]])


def staircase(rows):
    """The lines of the table of techniques, each on top of what has paid so far."""
    steps = [row for row in rows if row["row"] == "staircase"]
    if not steps:
        return []
    lines = ["", "| staircase | images/s | to the baseline | of this step | top-1 | |",
             "|---|---|---|---|---|---|"]
    by_name = {script_name(row): images_per_second(row) for row in rows}
    for row in [rows[0], *steps]:
        name = row["column"] if row in steps else "baseline"
        if row["status"] != "ok":
            lines.append(f"| {name} | {row['status'].upper()}: {row['error']} | | | | |")
            continue
        speed, first = row["images_per_second"], images_per_second(rows[0])
        before = by_name["_".join(["train", *row["on"]])] if "on" in row else 0
        lines.append(f"| {name} | {speed:,.0f} | {f'{speed / first:.2f}x' if first else ''} | "
                     f"{f'{speed / before:.2f}x' if before else ''} | {row['val_top1']:.2%} | "
                     f"{'' if 'kept' not in row else 'kept' if row['kept'] else 'left out'} |")
    best = ([rows[0]] + [row for row in steps if row.get("kept")])[-1]
    if best["techniques"]:
        lines += ["", "Each technique is added to those kept before it (those that exclude each "
                  "other to the same ones), and kept if that is at least 1 % faster; one left out "
                  "is tried again when others have been kept since. "
                  f"The fastest set: `./compose.sh {' '.join(best['techniques'])} > my_train.py`"]
    return lines


def steady(row):
    """The epochs that count: those after the first, which warms up."""
    return row["epochs"][1:] or row["epochs"]


def which_epochs(row):
    """Those epochs in words."""
    n = len(row["epochs"]) - 1
    return (f"the {n} epochs after the first" if n > 1 else "the second epoch" if n else
            "the only epoch, which warms up as well")


def speeds(row):
    """images/s of each epoch that counts."""
    return [epoch["images_per_second"] for epoch in steady(row)]


def spread(row):
    """images/s in words: their median, and the least and the most of the epochs that count."""
    return (f"{row['images_per_second']:,.0f} ({min(speeds(row)):,.0f} to "
            f"{max(speeds(row)):,.0f})")


def stopped(rows):
    """The lines under a table of a run that was stopped before its end."""
    return [line for row in rows if "stopped" in row for line in ("", row["stopped"])]


def data_wait(row):
    """The share of its time that a step waits for data: the median of the epochs that count."""
    return statistics.median(epoch["data_wait"] for epoch in steady(row))


def storage_line(storage):
    """One line: what the data set lies on, and how one knows."""
    words = [f"The data set lies on {storage['kind']} ({storage['file_system']} on "
             f"{storage['device']})"]
    if storage["rotational"] is not None:
        words[0] += f", which the kernel calls {'' if storage['rotational'] else 'not '}rotating"
    if storage["droppable"]:
        words.append(f"read alone it gives {storage['cold_megabytes_per_second']:,.1f} MB/s "
                     f"cold, and it answers in {1000 * storage['answer_seconds']:.2f} ms")
    elif storage["kind"] != "memory":
        words.append("the kernel does not forget its files when told to, so there is no cold run")
    if storage["droppable"] and storage.get("cached", 0) is None:
        words.append("whether a file is cached cannot be told here, so cold may be warm")
    return "; ".join(words) + "."


def loading_summary(row):
    """The line that the driver prints when a run has ended."""
    if row["status"] != "ok":
        return f"{row['status'].upper()}: {row['error']} (log: {row['log']})"
    return (f"{row['images_per_second']:>9,.0f} images/s  {row['megabytes_per_second']:>9,.1f} MB/s"
            f"  {row['seconds']:.2f} s an epoch")


def loading_markdown(rows):
    """The table of loaders, what holds each back, and on what machine."""
    lines = ["| loader | page cache | images/s: median (least to most) | to the baseline | MB/s | "
             "seconds an epoch | cores busy | GPU busy |", "|---|---|---|---|---|---|---|---|"]
    base = {row["cache"]: row for row in rows if row["loader"] == rows[0]["loader"]
            and row["status"] == "ok"}
    for row in rows:
        if row["status"] != "ok":
            lines.append(f"| {row['loader']} | {row['cache']} | {row['status'].upper()}: "
                         f"{row['error']} | | | | | |")
            continue
        times = ""
        if row["cache"] in base:
            times = f"{row['images_per_second'] / base[row['cache']]['images_per_second']:.2f}x"
        gpu = "" if row["gpu_busy"] is None else f"{row['gpu_busy']:.0%}"
        lines.append(f"| {row['loader']} | {row['cache']} | {spread(row)} | {times} | "
                     f"{row['megabytes_per_second']:,.1f} | {row['seconds']:.2f} | "
                     f"{row['cores_busy']:.1f} | {gpu} |")
    lines += [""]
    lines += [f"- {row['loader']} is held back by **{row['bottleneck']}**: {row['evidence']}."
              for row in rows if "bottleneck" in row]
    lines += [f"- {row['loader']} failed; its log: {row['log']}" for row in rows
              if row["status"] == "fail"]
    good = next((row for row in rows if row["status"] == "ok"), None)
    if good:
        which = which_epochs(good)
        if len(good["epochs"]) > 2:
            which = f"medians of {which}"
        lines += ["", f"{good['samples']:,} samples, {good['bytes'] / 1e6:,.1f} MB an epoch; "
                  f"{which}. {storage_line(good['storage'])}", "",
                  machine(good)]
    lines += stopped(rows)
    return "\n".join(lines) + "\n"


def write_loading(rows, stem):
    """Writes rows to <stem>.json and .md."""
    stem.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    stem.with_suffix(".md").write_text(loading_markdown(rows))


def chart(rows, path):
    """Bars of images/s with their ratio to the baseline and the accuracy: cells and staircase."""
    from matplotlib.figure import Figure
    done = [row for row in rows if row["status"] == "ok"]
    cells = [row for row in done if row["row"] != "staircase"]
    steps = [row for row in done if row["row"] == "staircase"]
    parts = [part for part in (cells if len(cells) > 1 else [], cells[:1] + steps if steps else [])
             if part] or [done]
    colours = {"single": "tab:blue", "DP": "tab:orange", "DDP": "tab:green"}
    figure = Figure(figsize=(8, 1.2 * len(parts) + 0.36 * sum(map(len, parts))),
                    layout="constrained")
    axes = figure.subplots(len(parts), squeeze=False, height_ratios=list(map(len, parts)))[:, 0]
    for axis, part in zip(axes, parts):
        names = [row["column"] if row["row"] == "staircase" else script_name(row) for row in part]
        bars = axis.barh(range(len(part)), [row["images_per_second"] for row in part], color=[
            colours.get(row["row"], "tab:green" if row.get("kept") else "lightgrey")
            for row in part], tick_label=names)
        texts = [f"{row['images_per_second'] / rows[0]['images_per_second']:.2f}x, "
                 f"top-1 {row['val_top1']:.2%}" + (", left out" if row.get("kept") is False else "")
                 if rows[0]["status"] == "ok" else "" for row in part]
        axis.bar_label(bars, texts, padding=4)
        axis.invert_yaxis()
        axis.margins(x=0.35)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("images/s in training")
    env = done[0]["environment"]
    axes[0].set_title(f"{env['gpus']}x {env['gpu']}" if env["gpu"] else f"{env['cores']} CPU cores",
                      fontsize=10)
    figure.savefig(path, dpi=120)


def write(rows, stem):
    """Writes rows to <stem>.json, .md and .png."""
    stem.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(rows))
    stem.with_suffix(".png").unlink(missing_ok=True)
    if any(row["status"] == "ok" for row in rows):
        chart(rows, stem.with_suffix(".png"))


# ------------------------------------------------------------------------------------- README
def changes(variant, base):
    """(lines added, lines replaced) of two scripts' texts: those with text on them."""
    lines = [line for line in difflib.ndiff(base.splitlines(), variant.splitlines())
             if line[2:].strip()]
    return tuple([line[2:] for line in lines if line.startswith(sign)] for sign in "+-")


def own_options(added):
    """The options that are in these lines."""
    return re.findall(r'add\("(--\w+)"(?!, help=argparse.SUPPRESS)', "\n".join(added))


def variants_table(base):
    """A line for each variant of src/<base>.py: how much it differs, and its own options."""
    baseline = (ROOT / "src" / f"{base}.py").read_text()
    lines = ["| script | blocks | lines it adds | lines it replaces | options it adds |",
             "|---|---|---|---|---|"]
    for path in sorted((ROOT / "src").glob(f"{base}_*.py")):
        added, replaced = changes(path.read_text(), baseline)
        lines.append(f"| [{path.name}](src/{path.name}) | "
                     f"{sum(line.strip() == '# new #' for line in added)} | {len(added)} | "
                     f"{len(replaced)} | "
                     f"{', '.join(f'`{option}`' for option in own_options(added))} |")
    return "\n".join(lines)


# whose faults a file of tests is about, in the table's order
TESTED = {"test_resize": "resize_imagenet.py", "test_loader": "loaders",
          "test_train": "training scripts", "test_faults": "training scripts",
          "test_gpu": "training on a GPU", "test_running": "running.sh",
          "test_loading": "loading.sh", "test_compose": "compose.sh"}
FUZZED = {"resize": "resize_imagenet.py", "loader": "loaders", "lmdb": "loaders"}


def fault_numbers(name):
    """The numbers of ../shared/FAULTS.md that a test's name says it covers."""
    found = re.match(r"test((?:_f\d\d)+)_", name)
    return [int(number) for number in re.findall(r"\d\d", found[1])] if found else []


def faults_table(folder=ROOT / "tests"):
    """A line for each test of a fault, from its name and docstring, by number; fuzzing comes last.

    Raises ValueError where a docstring does not begin with 'WHAT WAS TRIED -> WHAT HAPPENS.'
    """
    rows = []
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            name = getattr(node, "name", "")
            numbers, about = fault_numbers(name), TESTED.get(path.stem)
            if path.stem == "test_fuzz" and name.startswith("test_fuzz_"):
                about = FUZZED[name.split("_")[2]]
            elif not numbers:
                continue
            text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if not about or " -> " not in text:
                raise ValueError(f"{path.name}: {name} wants " + (
                    "a docstring that begins 'WHAT WAS TRIED -> WHAT HAPPENS.'" if about else
                    f"{path.stem} in report.TESTED"))
            tried, happens = text.replace("|", r"\|").split(" -> ", 1)
            place = (*TESTED, path.stem).index(path.stem)
            rows.append(((numbers or [100])[0], place, node.lineno, "| " + " | ".join([
                ", ".join(map(str, numbers)) or "fuzz", f"[{about}](tests/{path.name})", tried,
                happens.removesuffix(".")]) + " |"))
    return "\n".join(["| fault | in | tried | what happens |", "|---|---|---|---|",
                      *(line for *_, line in sorted(rows))])


def does_not_pay(name, readme):
    """When, in the words of the technique's section of the README."""
    section = readme.partition(f"### train_{name}.py: ")[2].partition("\n##")[0]
    words = " ".join(section.split()).partition("Does not pay ")[2]
    return re.sub(r"[.:,]? \*\*.*|[.:]( .*)?$", "", words)


def gains(rows):
    """({technique: (times, cell, whether it ran)} on top of what the staircase had kept before it,
    the same on the baseline alone) of one run of running.sh. Of one GPU not those for several.
    """
    by_name = {script_name(row): row for row in rows}
    found = {}, {}
    for row in rows:
        tried = row["row"] == "staircase" and "on" in row  # tried again: the last counts
        name = row["column"].removeprefix("+") if tried else "_".join(row["techniques"])
        ran = row["status"] == "ok"
        before = by_name["_".join(["train", *row["on"]])] if tried else rows[0]
        before = images_per_second(before)
        times = images_per_second(row) / before if before else 0
        if tried:
            text = f"{times:.2f}x" if before else "faster" if row["kept"] else ""
            text = f"**{text}**" if row["kept"] else text
        elif row["row"] in ROWS and len(row["techniques"]) == 1 and (
                name not in ROWS or ran and row["environment"]["gpus"] > 1):
            text = f"{times:.2f}x alone" if times else ""
        else:
            continue
        found[not tried][name] = times, text if ran else row["status"].upper(), ran
    return found


def pays_table(readme, folder=ROOT / "results"):
    """A line for each technique: what it gained in each measured staircase, or else alone on the
    baseline under the same options, and when it does not pay, as its section of the README says.
    """
    columns = {}  # by what was the same: title, folder, gains
    for path in sorted(folder.glob("*/running.json")):
        rows = json.loads(path.read_text())
        good = next((row for row in rows if row["status"] == "ok"), None)
        if good:
            env, options = good["environment"], good["options"]
            width = f" {options['width']} wide" if options["model"] == "conv11" else ""
            gpu = (env["gpu"] or "no GPU").removeprefix("NVIDIA ")
            title = (f"{options['model']}{width}, {options['image_size']} px, batch "
                     f"{options['batch_size']:,}, {env['gpus']}x {gpu}")
            dtypes = {row["options"].get("amp_dtype") for row in rows if row["status"] == "ok"}
            title += ", bfloat16" if "bfloat16" in dtypes else ""
            stairs, alone = gains(rows)
            key = (gpu, env["gpus"], Path(options["dataset"]).name, *(
                str(options[name]) for name in ("model", "width", "image_size", "batch_size")))
            older = columns.get(key, (title, "", {}, {}))
            if older[2] and stairs:  # each staircase has a column of its own
                key, older = (*key, path.parent.name), (title, "", {}, {})
            columns[key] = (title if stairs else older[0],
                            path.parent.name if stairs or not older[1] else older[1],
                            stairs or older[2], older[3] | alone)
    shown = []
    for title, name, stairs, alone in columns.values():
        shown.append((f"[{title}](results/{name}/running.md)", alone | {
            name: gain for name, gain in stairs.items() if gain[2] or name not in alone}))
    most = {}
    for _, column in shown:
        for name, (times, *_) in column.items():
            most[name] = max(times, most.get(name, 0))
    lines = ["| " + " | ".join(["technique", *(title for title, _ in shown), "does not pay"]) +
             " |", "|---|" + "---|" * (len(shown) + 1)]
    for name in sorted(most, key=most.get, reverse=True):
        cells = [column.get(name, (0, ""))[1] for _, column in shown]
        lines.append("| " + " | ".join([f"[{name}](src/train_{name}.py)", *cells,
                                        does_not_pay(name, readme)]) + " |")
    return "\n".join(lines) if most else "Not measured yet."


def training_seconds(record):
    """Of all epochs, at the pace of those that count: the first one's warm-up stands apart."""
    return len(record["epochs"]) * statistics.median(each["seconds"] for each in steady(record))


def runs_markdown(records):
    """A line for each record of scripts run one by one, named by what differs between them."""
    def differ(values):
        return len({*map(str, values)}) > 1
    def varies(option):  # among the scripts that have it
        return differ(r["options"][option] for r in records if option in r["options"])
    options = [option for option in dict.fromkeys(sum((list(r["options"]) for r in records), []))
               if option not in ("result_dir", "resume", "epochs") and varies(option)]
    lines = ["| run | top-1 | seconds of training | images/s: median (least to most) | data wait | "
             "warm-up |", "|---|---|---|---|---|---|"]
    names = []
    for record in records:
        name = [record["script"]] if differ(each["script"] for each in records) else []
        values = [(option, record["options"].get(option)) for option in options]
        name += [f"`--{option}`" if value is True else f"`--{option} {value}`"
                 for option, value in values if value is not False and value is not None]
        names.append(", ".join([*name, f"{len(record['epochs'])} epochs"]))
    for i, (record, name) in enumerate(zip(records, names)):
        if names.count(name) > 1:
            name = f"run {names[:i + 1].count(name)}, {name}"
        lines.append("| " + " | ".join([
            name, f"{record['val_top1']:.2%}", f"{training_seconds(record):.2f} s",
            spread(record) if len(speeds(record)) > 1 else f"{record['images_per_second']:,.0f}",
            f"{data_wait(record):.0%}", f"{record['warmup_seconds']:.1f} s"]) + " |")
    commands = list(dict.fromkeys(record["command"] for record in records))
    lines += ["", "Seconds of training are the median epoch after the first times the number of "
              "epochs; the warm-up is start and first epoch.", "", machine(records[0])]
    lines += [line for command in commands[1:] for line in ("", f"`{command}`")]
    return "\n".join(lines) + "\n"


def measured(name):
    """The table of one folder of results/, with its chart."""
    folder = ROOT / "results" / name
    for file, table in (("loading", loading_markdown), ("runs", runs_markdown)):
        if (folder / f"{file}.json").exists():
            return table(json.loads((folder / f"{file}.json").read_text()))
    rows = json.loads((folder / "running.json").read_text())
    return f"{markdown(rows)}\n![bars of images/s](results/{name}/running.png)"


def readme(text):
    """README.md with everything between <!-- NAME --> and <!-- /NAME --> made anew."""
    for name in re.findall(r"<!-- ([\w-]+) -->", text):
        base = {"variants": "train", "loaders": "loader"}.get(name)
        part = (variants_table(base) if base else faults_table() if name == "faults" else
                pays_table(text) if name == "pays" else measured(name))
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda found, part=part: f"{found[1]}{part.strip()}\n{found[2]}",
                      text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for records in (ROOT / "results").glob("*/running.json"):
        write(json.loads(records.read_text()), records.with_suffix(""))
    for records in (ROOT / "results").glob("*/loading.json"):
        write_loading(json.loads(records.read_text()), records.with_suffix(""))
    (ROOT / "README.md").write_text(readme((ROOT / "README.md").read_text()))
