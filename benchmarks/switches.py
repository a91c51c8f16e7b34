"""Time ResNet-50's whole training steps with precision, layout, compile and batch switched.

    python benchmarks/switches.py --result_dir results/<machine>-switches [--seconds 200]

One process holds all variants. The batches stay on the GPU, so nothing is loaded. Each round times
a window of each variant, in a new order. A step is: forward, loss, backward, SGD with momentum,
for float16 with GradScaler. What does not fit in --seconds is left out and named. It needs torch
and torchvision, and writes switches.json; the page of the record comes from tools/report.py.
"""

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import folders  # noqa: F401  it finds report.py

import records
import report


class Variant(NamedTuple):
    """What is switched on, and the batch."""

    precision: str = "float32"
    layout: str = "NCHW"
    compiled: str = ""
    batch: int = 256
    benchmark: bool = False
    checkpointing: bool = False


# the most useful first: what does not fit in --seconds is left out
VARIANTS = [
    Variant(),
    Variant(layout="channels_last"),
    Variant("float16"),
    Variant("float16", "channels_last"),
    Variant("bfloat16"),
    Variant("bfloat16", "channels_last"),
    Variant(benchmark=True),
    Variant("float16", "channels_last", benchmark=True),
    Variant("bfloat16", "channels_last", checkpointing=True),
    Variant("bfloat16", "channels_last", batch=32),
    Variant("bfloat16", compiled="default"),
    Variant("bfloat16", "channels_last", "default"),
    Variant("bfloat16", "channels_last", "reduce-overhead", 32),
    Variant("bfloat16", "channels_last", "default", 32),
    Variant("float16", "channels_last", "default"),
    Variant("float32", compiled="default"),
    Variant("bfloat16", "channels_last", "reduce-overhead"),
]


def build(variant, classes=1000):
    """Return a function that does one training step of `variant` and returns its loss."""
    import torch
    from torch.utils.checkpoint import checkpoint
    from torchvision import models

    layout = torch.channels_last if variant.layout == "channels_last" else torch.contiguous_format
    torch.manual_seed(0)
    images = torch.randn(variant.batch, 3, 224, 224, device="cuda").to(memory_format=layout)
    labels = torch.randint(classes, (variant.batch,), device="cuda")
    model = models.resnet50().cuda().to(memory_format=layout)
    if variant.checkpointing:  # the activations of the four stages are computed twice
        for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
            forward = stage.forward
            stage.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=5e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=variant.precision == "float16")
    half = getattr(torch, variant.precision)
    net, loss_function = model, torch.nn.CrossEntropyLoss()
    if variant.compiled:
        net = torch.compile(model, mode=variant.compiled, dynamic=False)

    def step():
        with torch.autocast("cuda", half, enabled=half != torch.float32):
            loss = loss_function(net(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def window(step, variant, seconds):
    """Return images/s of steps that take about so many seconds in all."""
    import torch

    torch.backends.cudnn.benchmark = variant.benchmark
    for _ in range(2):  # also gives the allocator this variant's blocks
        step()
    torch.cuda.synchronize()
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(max(1, 1024 // variant.batch)):
            step()
            steps += 1
        torch.cuda.synchronize()
    return steps * variant.batch / (time.perf_counter() - start)


def prepare(variant):
    """Return (the step, bytes of peak memory, seconds until the steps are steady)."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.backends.cudnn.benchmark = variant.benchmark
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    step = build(variant)
    for _ in range(6):
        loss = step()
    if not loss.isfinite():
        raise RuntimeError(f"the loss is {loss.item()}")
    torch.cuda.synchronize()
    return step, torch.cuda.max_memory_allocated() - before, time.perf_counter() - start


def measure(seconds, rounds, length):
    """Return (rows of the record, names of what did not fit)."""
    import torch

    end, ready, rows, left_out = time.monotonic() + seconds, [], [], []
    for variant in VARIANTS:
        # the windows' time is kept free; compiling takes about as long as the slowest so far
        spare = end - time.monotonic() - rounds * length * 1.5 * (len(ready) + 1)
        slowest = max([row["warmup_seconds"] for row in rows if row["compiled"]], default=40)
        if spare < (1.2 * slowest if variant.compiled else 5):
            left_out.append(name_of(variant._asdict()))
            continue
        try:
            step, memory, warmup = prepare(variant)
        except Exception as error:  # out of memory, or no compiler
            left_out.append(f"{name_of(variant._asdict())}: {str(error).splitlines()[0]:.120}")
            continue
        rows.append(
            dict(
                variant._asdict(),
                images_per_second=[],
                peak_memory_bytes=memory,
                warmup_seconds=warmup,
            )
        )
        ready.append((variant, step, rows[-1]))
        print(f"{name_of(rows[-1])}: ready after {warmup:.1f} s", flush=True)
    for _ in range(rounds):
        for variant, step, row in random.sample(ready, len(ready)):
            row["images_per_second"].append(window(step, variant, length))
        torch.cuda.synchronize()
    return rows, left_out


def machine():
    """Return what the figures depend on, as other records of results/ have it."""
    import subprocess

    import torch
    import torchvision

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return dict(
        cpu=cpu[0] if cpu else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        gpus=1,
        gpu=torch.cuda.get_device_name(),
        driver=driver[0] if driver else "",
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        python=platform.python_version(),
        packages=dict(torch=torch.__version__, torchvision=torchvision.__version__),
    )


# ------------------------------------------------------------------------------ the page
def name_of(row):
    """Return a variant's name."""
    words = [
        row["precision"],
        "channels_last" if row["layout"] == "channels_last" else "",
        row["compiled"] and f"compile {row['compiled']}".removesuffix(" default"),
        "cudnn.benchmark" if row["benchmark"] else "",
        "checkpointing" if row["checkpointing"] else "",
        f"batch {row['batch']}" if row["batch"] != 256 else "",
    ]
    return ", ".join(word for word in words if word)


def speed(row):
    """Return the median of a row's windows, in images/s."""
    return statistics.median(row["images_per_second"])


def markdown(record):
    """Return the page of a record."""
    base = record["rows"][0]
    rows = [
        [
            name_of(row),
            f"{speed(row):,.0f}",
            f"{speed(row) / speed(base):.2f}x",
            f"{min(row['images_per_second']):,.0f} to {max(row['images_per_second']):,.0f}",
            f"{row['peak_memory_bytes'] / 1e9:.1f}",
            f"{row['warmup_seconds']:.1f}",
            str(len(row["images_per_second"])),
        ]
        for row in record["rows"]
    ]
    return report.text_of(
        [
            report.table(
                "| | images/s | to float32 | least to most | GPU GB | warm-up s | n |", rows
            ),
            "ResNet-50, 224 px, batch 256 unless a row says another; whole training steps on batches "
            "that stay on the GPU, in one process, in windows by turns: median, least and most of n. "
            "float32 is PyTorch's default (TF32 convolutions); float16 has a GradScaler. `GPU GB` is "
            "the peak of the first steps, `warm-up s` the time until they were done.",
            [f"- Left out: {each}" for each in record["left_out"]],
            report.setting(records.Row.read(record)),
        ],
        [],
    )


def shows(record):
    """Return (machine, workload, what it shows, date), as tools/report.py asks for."""
    best, base = max(record["rows"], key=speed), record["rows"][0]
    return (
        report.place(records.Row.read(record)),
        "resnet50, 224 px, batch 256 and 32, no loading",
        f"{name_of(best)}: {speed(best) / speed(base):.2f}x",
        record["date"],
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=200, help="for all, about (default: 200)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="windows of each variant (default: 5)"
    )
    parser.add_argument(
        "--window", type=float, default=0.6, help="seconds of a window (default: 0.6)"
    )
    parser.add_argument(
        "--result_dir", type=Path, default=Path("runs"), help="of switches.json (default: runs)"
    )
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.exit(1, f"{parser.prog}: error: it needs an NVIDIA GPU\n")
    rows, left_out = measure(args.seconds, args.rounds, args.window)
    options = " ".join(sys.argv[1:])
    record = dict(
        date=datetime.date.today().isoformat(),
        machine=machine(),
        rows=rows,
        left_out=left_out,
        command=f"python benchmarks/switches.py {options}".strip(),
    )
    args.result_dir.mkdir(parents=True, exist_ok=True)
    (args.result_dir / "switches.json").write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        print(
            f"{name_of(row):60} {speed(row):8,.0f} images/s {speed(row) / speed(rows[0]):.2f}x  "
            f"{row['peak_memory_bytes'] / 1e9:.1f} GB"
        )
    print(*(f"left out: {each}" for each in left_out), sep="\n")


if __name__ == "__main__":
    main()
