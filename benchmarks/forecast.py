"""Is the forecast of whatif.py true? Change copies of a script as it says, and time those alone.

    python benchmarks/forecast.py [--seconds 600] EXAMPLES/imagenet/main.py FOUND ARGUMENT ...

The script is imagenet/main.py or mnist/main.py of pytorch/examples, FOUND is what whatif.py --json
wrote about it. Each set of techniques that whatif.py measured is written into a copy beside the
script, by the replacements below, and the copy is run with ARGUMENTs. Its speed is that of the
progress lines that it prints. The script itself is run first and last. What was measured is added
to FOUND: samples/s as "by_hand" of each row, a list as "plain_by_hand", and the script's folder.
FOUND becomes a page of results/ as results/<machine and script>/forecast.json.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))
import report

# of each script: what calls the model, backward and step, the loader, and what is timed
SCRIPTS = {
    "imagenet": dict(
        model="model.module", forward="\n        output = model(images)\n",
        backward="        loss.backward()\n        optimizer.step()",
        images="images.to(device, non_blocking=True",
        loader="num_workers=args.workers, pin_memory=True, sampler=train_sampler",
        workers="num_workers={}, persistent_workers=True, pin_memory=True, sampler=train_sampler",
        epoch=0, first=31, last=10),  # steps of the first epoch
    "mnist": dict(
        model="model", forward="\n        output = model(data)\n",
        backward="        loss.backward()\n        optimizer.step()",
        images="data.to(device", loader="{'num_workers': 1,", workers="{{'num_workers': {},",
        epoch=2, first=1, last=700)}  # samples of the second epoch
LINE = r"Epoch: \[?(\d+)\]?\s*\[\s*(\d+)/(\d+)"
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
    """Return the script's text with one technique, as whatif.py says that it is to be written."""
    model, kind = about["model"], technique.split()[0]
    if kind == "amp":
        text = replaced(text, about["forward"], (
            f'\n        with torch.autocast(device.type, torch.{technique.split()[1]}):\n    '
            f'{about["forward"][1:]}        output = output.float()\n'))
        if technique == "amp float16":
            text = above_optimizer(text, 'global scaler; scaler = torch.amp.GradScaler("cuda")')
            text = replaced(text, about["backward"], "        scaler.scale(loss).backward(); "
                            "scaler.step(optimizer); scaler.update()")
        return text
    if kind == "channels_last":
        text = above_optimizer(text, f"{model}.to(memory_format=torch.channels_last)")
        return replaced(text, about["images"],
                        f"{about['images']}, memory_format=torch.channels_last")
    if kind == "workers":
        workers = max(1, min(16, len(os.sched_getaffinity(0))))
        return replaced(text, about["loader"], about["workers"].format(workers))
    if kind == "no_loading":
        text = replaced(text, "\ndef main():", f"\n{CACHED}\n\ndef main():")
        return replaced(text, "in enumerate(train_loader):", "in enumerate(cached(train_loader)):")
    if kind == "fused":
        return replaced(text, "weight_decay=args.weight_decay)", (
            "weight_decay=args.weight_decay, fused=True)\n    for one in model.parameters():\n"
            "        optimizer.state[one]['momentum_buffer'] = torch.zeros_like(one)"))
    return above_optimizer(text, {
        "compile": f"{model}.compile()",
        "compile reduce-overhead": f'{model}.compile(mode="reduce-overhead")',
        "cudnn": "torch.backends.cudnn.benchmark = True",
        "tf32": 'torch.set_float32_matmul_precision("high")'}[technique])


def measure(script, techniques, arguments, limit):
    """Return what a changed copy trains a second, in samples or batches; None if it failed."""
    about, text = SCRIPTS[script.parent.name], script.read_text()
    for technique in techniques:
        text = changed(text, technique, about)
    copy = script.with_name("_".join(["hand", *techniques]).replace(" ", "_") + ".py")
    copy.write_text(text)
    process = subprocess.Popen([sys.executable, "-u", copy.name, *arguments], cwd=script.parent,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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


def cells(row, base):
    """Return the cells of a row of the table; `base` is the plain script's speed by hand."""
    runs, is_plain, hand = row["runs"], row["name"] == "as it is", row.get("by_hand")
    if not runs:
        return [row["name"], *[""] * 8, row["verdict"]]
    gain = hand / base if hand else 0
    rate, hand = (speed(each) if each else "" for each in (row["rate"], base if is_plain else hand))
    memory = [run["memory"] for run in runs if run["memory"] is not None]
    return [row["name"], rate, hand, "" if is_plain else report.gain(row),
            f"{gain:.2f}x" if gain else "", f"{gain / row['ratio'] - 1:+.0%}" if gain else "",
            f"{statistics.fmean(run['wait'] for run in runs):.0%}",
            f"{statistics.fmean(memory) / 1e9:.2f}" if any(memory) else "", str(len(runs)),
            row["verdict"]]


def machine(facts):
    """Return the machine in a few words."""
    return f"{facts['processes']}x {facts['gpu']}" if "gpu" in facts else f"{facts['cores']} cores"


def markdown(found):
    """Return the table of what whatif.py said of a script, and of what was measured by hand."""
    facts, unit, plain = found["facts"], found["unit"], found["plain_by_hand"]
    rates = ", ".join(f"{rate:,.0f}" for rate in plain)
    cores = f", {facts['cores']} cores" if "gpu" in facts else ""
    return report.text_of([
        report.table(
            f"| | {unit}/s | by hand | as fast | by hand | apart | waits | GPU GB | n | verdict |",
            [cells(row, statistics.mean(plain)) for row in found["rows"]]),
        f"The script as it is: {found['rows'][0]['rate']:,.0f} {unit}/s by whatif.py; "
        f"{rates} by hand.",
        "`by hand` is a copy of the script that was changed as whatif.py says and ran once without "
        "whatif.py: its speed, then how many times as fast it is as the script as it is (the mean "
        "by hand). `apart`: how far the gain by hand is from the forecast.",
        "`n` is the number of runs, ± the uncertainty of 95 %.",
        [f"- Not tried: {name}: {why}" for name, why in found["left_out"].items()],
        f"{machine(facts)}{cores}; torch {facts['torch']}, Python {facts['python']}; "
        f"{found['date']}; `{found['command']}`"], [])


def shows(found):
    """Return (machine, workload, what it shows, date), as tools/report.py asks for."""
    facts, base = found["facts"], statistics.mean(found["plain_by_hand"])
    row = next(each for each in found["rows"] if each["name"] == found["best"])
    told = f"{found['best']}: {report.gain(row)}"
    told += f", by hand {row['by_hand'] / base:.2f}x" if "by_hand" in row else ""
    batches = [facts["loaders"][number]["batch"] for number in facts["training"]]
    what = [found["script"], *(model["kind"] for model in facts["models"]),
            *(f"batch {batch:,}" for batch in batches if batch)]
    return machine(facts), ", ".join(what), told, found["date"]


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", type=Path, help="imagenet/main.py or mnist/main.py")
    parser.add_argument("found", type=Path, help="what whatif.py --json wrote about it")
    parser.add_argument("--seconds", type=float, default=600, help="for all runs together")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    args = parser.parse_args()
    script, found = args.script.resolve(), json.loads(args.found.read_text())
    rows = {row["name"]: row for row in found["rows"] if "ratio" in row}
    deadline, batch = time.monotonic() + args.seconds, found["facts"]["loaders"][0]["batch"]
    scale = batch if script.parent.name == "imagenet" else 1  # its lines count batches
    # the best set first, then the single techniques that change most
    names = sorted((name for name in rows if "batch" not in name and name != "as it is"),
                   key=lambda name: (name != found["best"], name.count("+"),
                                     -abs(rows[name]["ratio"] - 1)))
    plain, measured = [measure(script, [], args.arguments, args.seconds)], []
    for name in names:
        if time.monotonic() > deadline - 30:
            print("no time left for", name)
            continue
        rate = measure(script, name.split(" + "), args.arguments, deadline - time.monotonic())
        if rate:
            measured.append((name, rate))
    plain = [scale * each for each in (*plain, measure(script, [], args.arguments, 120)) if each]
    if not plain:
        sys.exit("forecast.py: the script as it is gave no speed")
    found |= dict(plain_by_hand=plain, script=f"{script.parent.name}/{script.name}")
    print(f"as it is: {', '.join(f'{rate:,.0f}' for rate in plain)} samples/s by hand, "
          f"{rows['as it is']['rate']:,.0f} under whatif.py")
    for name, rate in measured:
        row = rows[name]
        row["by_hand"] = scale * rate
        ratio = row["by_hand"] / statistics.mean(plain)
        print(f"{name:<50} {row['ratio']:.2f}x +- {row['spread']:.2f}, by hand {ratio:.2f}x, "
              f"{ratio / row['ratio'] - 1:+.0%}")
    args.found.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
