"""Is what whatif measures true? Change copies of a script as it says, and time those alone.

    python benchmarks/forecast.py [--seconds 600] EXAMPLES/imagenet/main.py FOUND ARGUMENT ...

The script is imagenet/main.py or mnist/main.py of pytorch/examples, FOUND is what whatif's --json
wrote about it. Each set that whatif measured by turns is written into a copy beside the script, by
the replacements below. The copy repeats 8 batches, as whatif does, and is run with ARGUMENTs. Its
speed is that of the progress lines that it prints. The script itself is run first and last. Then
the confirmed set and the script run with real loading. What was measured is added to FOUND:
samples/s as "by_hand" of each row, "plain_by_hand", "loading_by_hand", and the script's folder.
FOUND becomes a page of results/ as results/<machine and script>/forecast.json.
"""

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import folders  # noqa: F401  it finds report.py

import report
from whatif import report as printed

# of each script: what calls the model, backward and step, the loader, and what is timed
SCRIPTS = {
    "imagenet": dict(
        model="model.module",
        forward="\n        output = model(images)\n",
        backward="        loss.backward()\n        optimizer.step()",
        images="images.to(device, non_blocking=True",
        loader="num_workers=args.workers, pin_memory=True, sampler=train_sampler",
        workers="num_workers={}, persistent_workers=True, pin_memory=True, sampler=train_sampler",
        epoch=0,
        first=31,
        last=10,
    ),  # steps of the first epoch
    "mnist": dict(
        model="model",
        forward="\n        output = model(data)\n",
        backward="        loss.backward()\n        optimizer.step()",
        images="data.to(device",
        loader="{'num_workers': 1,",
        workers="{{'num_workers': {},",
        epoch=2,
        first=1,
        last=700,
    ),
}  # samples of the second epoch
LINE = r"Epoch: \[?(\d+)\]?\s*\[\s*(\d+)/(\d+)"
KEPT = "kept batches"
CACHED = """
KEPT = []
def cached(loader):
    import itertools
    KEPT.extend([] if KEPT else itertools.islice(loader, 8))
    yield from itertools.islice(itertools.cycle(KEPT), len(loader))
"""


def replaced(text, old, new):
    if old not in text:
        sys.exit(f"forecast.py: the script does not hold {old!r}")
    return text.replace(old, new)


def above_optimizer(text, line):
    return re.sub(r"\n( *)(optimizer = )", rf"\n\1{line}\n\1\2", text)


def changed(text, technique, about):
    """Return the script's text with one technique, written as whatif says."""
    model, kind = about["model"], technique.split()[0]
    if kind == "amp":
        text = replaced(
            text,
            about["forward"],
            (
                f"\n        with torch.autocast(device.type, torch.{technique.split()[1]}):\n    "
                f"{about['forward'][1:]}        output = output.float()\n"
            ),
        )
        if technique == "amp float16":
            text = above_optimizer(text, 'global scaler; scaler = torch.amp.GradScaler("cuda")')
            text = replaced(
                text,
                about["backward"],
                "        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()",
            )
        return text
    if kind == "channels_last":
        text = above_optimizer(text, f"{model}.to(memory_format=torch.channels_last)")
        return replaced(
            text, about["images"], f"{about['images']}, memory_format=torch.channels_last"
        )
    if kind == "workers":
        return replaced(text, about["loader"], about["workers"].format(technique.split()[1]))
    if technique == KEPT:
        text = replaced(text, "\ndef main():", f"\n{CACHED}\n\ndef main():")
        return replaced(text, "in enumerate(train_loader):", "in enumerate(cached(train_loader)):")
    if kind == "fused":
        return replaced(
            text,
            "weight_decay=args.weight_decay)",
            (
                "weight_decay=args.weight_decay, fused=True)\n    for one in model.parameters():\n"
                "        optimizer.state[one]['momentum_buffer'] = torch.zeros_like(one)"
            ),
        )
    return above_optimizer(
        text,
        {
            "compile": f"{model}.compile()",
            "compile reduce-overhead": f'{model}.compile(mode="reduce-overhead")',
            "cudnn": "torch.backends.cudnn.benchmark = True",
            "tf32": 'torch.set_float32_matmul_precision("high")',
        }[technique],
    )


def measure(script, techniques, arguments, limit):
    """Return what a changed copy trains a second, in samples or batches; None if it failed."""
    about, text = SCRIPTS[script.parent.name], script.read_text()
    for technique in techniques:
        text = changed(text, technique, about)
    copy = script.with_name("_".join(["hand", *techniques]).replace(" ", "_") + ".py")
    copy.write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-u", copy.name, *arguments],
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    start, marks, tail = time.monotonic(), [], []
    timer = threading.Timer(limit, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            tail = [*tail[-5:], line]
            found = re.search(LINE, line)
            epoch, done, whole = map(int, found.groups()) if found else (-1, 0, 0)
            if epoch == about["epoch"] and done >= whole - about["last"]:
                break
            if epoch == about["epoch"] and done >= about["first"]:
                marks.append((done, time.monotonic()))
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        copy.unlink()
    if len(marks) < 3:
        print(f"{copy.name}: no speed after {time.monotonic() - start:.0f} s\n{''.join(tail)}")
        return None
    (first, since), *_, (last, until) = marks
    return (last - first) / (until - since)


# ------------------------------------------------------------------------------ the page
def speed(rate):
    """Return a speed as a short text, without its unit."""
    return f"{rate:,.{0 if rate > 99 else 1}f}"


def machine(about):
    """Return the machine in a few words."""
    if about.get("gpu"):
        return f"{about['processes']}x {about['gpu']}"
    return f"{about['cores']} cores"


def last_line(about, found):
    """Return the line that says where, when and how a table was measured."""
    cores = f", {about['cores']} cores" if about.get("gpu") else ""
    return (
        f"{machine(about)}{cores}; torch {about['torch']}, Python {about['python']}; "
        f"{found['date']}; `{found['command']}`"
    )


def cells(row, base):
    """Return the cells of a set's row; `base` is the plain script's speed by hand."""
    gain = row["by_hand"] / base if row.get("by_hand") else 0
    memory = f"{row['memory'] / 1e9:.2f}" if row["memory"] else ""
    return [
        row["name"],
        times(row),
        f"{gain:.2f}x" if gain else "",
        f"{gain / row['speedup'] - 1:+.1%}" if gain else "",
        memory,
        str(row["n"]),
        row["verdict"],
    ]


def markdown(found):
    """Return the table of what whatif measured of a script, and of what was measured by hand."""
    unit, plain = found["unit"], found["plain_by_hand"]
    rates = ", ".join(map(speed, plain))
    plain_rate = speed(found["baseline"]["rate"])
    return report.text_of(
        [
            report.table(
                "| set | by turns | by hand | apart | GPU GB | n | verdict |",
                [cells(row, statistics.mean(plain)) for row in found["rows"]],
            ),
            f"The script as it is: {plain_rate} {unit}/s by turns; {rates} by hand.",
            "`by turns` is the speedup that whatif measured on kept batches. `by hand` is a copy "
            "of the script that was changed as whatif says, repeats 8 batches and ran once without "
            "whatif: how many times as fast it is as the script as it is (the mean by hand). `apart`: "
            "how far that is from the speedup by turns.",
            loading_line(found),
            "`n` is the number of windows, or of pairs of whole runs, ± the interval of 95 %.",
            [
                f"- Not tried: {name}: {why}"
                for name, why in {
                    **found["excluded"],
                    **found["failed"],
                    **found["not_tried"],
                }.items()
            ],
            last_line(found["machine"], found),
        ],
        [],
    )


def times(row):
    """Return the speedup of a row or of a confirmation, with the larger half of its interval."""
    return printed.times(row["speedup"], row["low"], row["high"])


def loading_line(found):
    """Return the sentence on the confirmed set with real loading, or ""."""
    confirmation, by_hand = found["confirmation"], found.get("loading_by_hand") or {}
    if not confirmation or not by_hand.get("set"):
        return ""
    gain = by_hand["set"] / statistics.mean(by_hand["plain"])
    told = "confirmed" if confirmation["confirmed"] else "not confirmed"
    return (
        f"With real loading, {printed.name_of(confirmation['techniques'])}: "
        f"{times(confirmation)} by whatif ({told}, n={confirmation['n']}), "
        f"{gain:.2f}x by hand, {gain / confirmation['speedup'] - 1:+.1%}."
    )


def shows(found):
    """Return (machine, workload, what it shows, date), as tools/report.py asks for."""
    facts, base = found["facts"], statistics.mean(found["plain_by_hand"])
    batches = [facts["loaders"][number]["batch"] for number in facts["training"]]
    what = [
        found["script"],
        *(model["kind"] for model in facts["models"]),
        *(f"batch {batch:,}" for batch in batches if batch),
    ]
    best = " + ".join(found["best"])
    row = next((each for each in found["rows"] if each["name"] == best), None)
    told = best or "nothing is faster"
    if row:
        told += f": {times(row)}"
        told += f", by hand {row['by_hand'] / base:.2f}x" if row.get("by_hand") else ""
    return machine(facts), ", ".join(what), told, found["date"]


# ------------------------------------------------------------------------------ measuring
def sets_to_measure(found):
    """Return the rows that are written by hand: the best set first, then what changes most."""
    rows = [row for row in found["rows"] if row["speedup"] and "batch" not in row["name"]]
    return sorted(
        rows,
        key=lambda row: (
            row["techniques"] != found["best"],
            len(row["techniques"]),
            -abs(row["speedup"] - 1),
        ),
    )


def numbered(found, names):
    """Return techniques with the number of workers that whatif found to be enough."""
    return [
        f"workers {found['loader']['enough']['workers']}" if name == "workers" else name
        for name in names
    ]


def measure_sets(found, script, arguments, scale, deadline):
    """Add the speeds of all sets on kept batches to `found`, then those with real loading."""

    def speed_of(*names):
        left = deadline - time.monotonic()
        rate = measure(script, names, arguments, left) if left > 30 else None
        if rate is None:
            print("no speed of", " + ".join(names) or "the script as it is")
        return rate and scale * rate

    plain = [speed_of(KEPT)]
    for row in sets_to_measure(found):
        row["by_hand"] = speed_of(KEPT, *row["techniques"])
    found["plain_by_hand"] = [each for each in (*plain, speed_of(KEPT)) if each]
    if confirmation := found["confirmation"]:
        plain = [speed_of()]
        best = speed_of(*numbered(found, confirmation["techniques"]))
        plain = [each for each in (*plain, speed_of()) if each]
        found["loading_by_hand"] = dict(plain=plain, set=best if plain else None)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", type=Path, help="imagenet/main.py or mnist/main.py")
    parser.add_argument("found", type=Path, help="what whatif's --json wrote about it")
    parser.add_argument(
        "--seconds", type=float, default=600, help="for all runs together (default: 600)"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    args = parser.parse_args()
    script, found = args.script.resolve(), json.loads(args.found.read_text())
    if found.get("version") != 1:
        sys.exit(f"forecast.py: {args.found} is not a record of version 1 of whatif's --json")
    batch = found["facts"]["loaders"][0]["batch"]
    scale = batch if script.parent.name == "imagenet" else 1  # its lines count batches
    measure_sets(found, script, args.arguments, scale, time.monotonic() + args.seconds)
    if not found["plain_by_hand"]:
        sys.exit("forecast.py: the script as it is gave no speed")
    found |= dict(script=f"{script.parent.name}/{script.name}")
    args.found.write_text(json.dumps(found, indent=1) + "\n")
    print(markdown(found))


if __name__ == "__main__":
    main()
