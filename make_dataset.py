"""Make a data set of class folders, out of nothing or from torchvision's downloads.

    python make_dataset.py digits            the default of the training scripts, a few seconds
    python make_dataset.py photos            JPEGs of ImageNet's size and weight, for loading
    python make_dataset.py pairs             blurry and sharp pictures, for image restoration
    python make_dataset.py mnist             the real ones, downloaded: mnist, cifar10, imagenette

Writes data/<name> or --dst. It may be stopped at any moment: run again, it goes on where it was.
"""

import argparse
import concurrent.futures
import functools
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent
# of the machine's cores, those that this process may use
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def draw_digit(digit, rng):
    """A grey 32x32 picture of `digit` (0..9), moved, turned, thickened and made noisy by `rng`.

    The font is the one that Pillow embeds.
    """
    font = ImageFont.load_default(int(rng.integers(64, 100)))
    canvas = Image.new("L", (128, 128))
    x, y = rng.uniform(54, 74, 2)
    ImageDraw.Draw(canvas).text((x, y), str(digit), fill=int(rng.integers(140, 256)), font=font,
                                anchor="mm", stroke_width=int(rng.integers(0, 5)))
    canvas = canvas.rotate(rng.uniform(-15, 15), Image.Resampling.BILINEAR)
    pixels = np.asarray(canvas.resize((32, 32), Image.Resampling.BOX), dtype=np.float64)
    pixels = pixels + rng.uniform(0, 60) + rng.normal(0, rng.uniform(4, 16), pixels.shape)
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def draw_photo(label, rng):
    """A colour picture with a photograph's size, spectrum, edges and weight as a JPEG.

    Sides vary about ImageNet's mean of 469x387. Noise of the amplitude 1/f, which natural scenes
    have (Field 1987, Relations between the statistics of natural images), makes the ground;
    `label` sets the number of corners and the hue of the shapes on it.
    """
    scale = rng.uniform(0.75, 1.25)
    width, height = int(510 * scale), int(346 * scale)
    if rng.random() < 0.25:
        width, height = height, width
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    channels = []
    for _ in range(3):
        spectrum = np.fft.rfft2(rng.standard_normal((height, width))) / frequency
        spectrum[0, 0] = 0
        ground = np.fft.irfft2(spectrum, (height, width))
        channels.append(ground / ground.std())
    grey, *colour = channels
    ground = np.stack([grey + 0.35 * colour[0], grey, grey + 0.35 * colour[1]], axis=-1)
    picture = Image.fromarray((118 + 42 * ground).clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    for _ in range(int(rng.integers(4, 9))):
        hue = (label * 36 + rng.uniform(-10, 10)) % 360
        colour = f"hsl({hue:.0f}, {rng.uniform(30, 90):.0f}%, {rng.uniform(25, 70):.0f}%)"
        circle = (rng.uniform(0, width), rng.uniform(0, height), rng.uniform(10, height / 5))
        draw.regular_polygon(circle, 3 + label % 7, rng.uniform(0, 360), fill=colour)
    pixels = np.asarray(picture, dtype=np.float64) + rng.normal(0, 8, (height, width, 1))
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def blur(picture, rng):
    """`picture` as a camera in motion sees it: the mean along a straight path, then a soft lens."""
    angle, length = rng.uniform(0, np.pi), int(rng.integers(7, 18))
    pixels = np.asarray(picture, dtype=np.float64)
    path = [np.rint(step * np.array([np.sin(angle), np.cos(angle)])).astype(int)
            for step in np.linspace(-length / 2, length / 2, length)]
    margin = length
    wide = np.pad(pixels, ((margin, margin), (margin, margin), (0, 0)), mode="reflect")
    height, width = pixels.shape[:2]
    mean = sum(wide[margin + dy:margin + dy + height, margin + dx:margin + dx + width]
               for dy, dx in path) / length
    return Image.fromarray(mean.round().astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.7))


def encoded(picture, format, **options):
    """`picture` as the bytes of a file."""
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def digits_files(rng, split, label, i):
    """One digit: {relative path: bytes}."""
    return {f"{split}/{label}/{label}_{i:05}.png": encoded(draw_digit(label, rng), "PNG")}


def photos_files(rng, split, label, i):
    """One photograph: {relative path: bytes}. Their mean, 105 kB, is near ImageNet's 110."""
    path = f"{split}/class{label}/class{label}_{i:05}.JPEG"
    return {path: encoded(draw_photo(label, rng), "JPEG", quality=92)}


def pairs_files(rng, split, label, i):
    """One sharp photograph and the same blurred, at paths that match: {relative path: bytes}."""
    sharp = draw_photo(label, rng)
    path = f"scene{label}/{i:05}.png"
    return {f"{split}/sharp/{path}": encoded(sharp, "PNG"),
            f"{split}/blurry/{path}": encoded(blur(sharp, rng), "PNG")}


# name: (files of one picture, the held-out split, pictures a class in training, held out)
DRAWN = {
    "digits": (digits_files, "val", 250, 60),
    "photos": (photos_files, "val", 100, 20),
    "pairs": (pairs_files, "test", 20, 4),
}


def put(root, path, content):
    """Writes a file whole or not at all."""
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.part")
    beside.write_bytes(content)
    os.replace(beside, target)


def drawn_job(root, name, seed, job):
    """Draws picture `job` = (split, label, i) of data set `name` unless it is there."""
    files_of, held_out = DRAWN[name][:2]
    split, label, i = job
    done = root / ".done" / f"{split}_{label}_{i}"
    if not done.exists():
        rng = np.random.default_rng([seed, split == held_out, label, i])
        for path, content in files_of(rng, split, label, i).items():
            put(root, path, content)
        done.touch()


def leave_with_parent():
    """In a worker: Ctrl-C is the parent's to handle, and no worker outlives a killed parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def draw(root, name, seed, train, val, workers):
    """Draws `train` and `val` pictures a class of data set `name` into folder `root`."""
    held_out = DRAWN[name][1]
    jobs = [(split, label, i) for split, count in (("train", train), (held_out, val))
            for label in range(10) for i in range(count)]
    (root / ".done").mkdir(parents=True, exist_ok=True)
    job = functools.partial(drawn_job, root, name, seed)
    with concurrent.futures.ProcessPoolExecutor(workers, initializer=leave_with_parent) as pool:
        try:
            results = pool.map(job, jobs, chunksize=max(1, min(32, len(jobs) // (4 * workers))))
            for _ in tqdm(results, name, total=len(jobs), unit="picture", disable=None):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    shutil.rmtree(root / ".done")


def download(root, name, cache):
    """Lays out a set that torchvision downloads into `cache` as class folders in `root`."""
    from torchvision import datasets  # seconds to import, and drawing needs none of it

    if name == "imagenette":
        for split in ("train", "val"):
            # unpacked beside its place: torchvision takes a half unpacked folder for a whole one
            if not (cache / "imagenette2").exists():
                shutil.rmtree(cache / "unpacking", ignore_errors=True)
                datasets.Imagenette(cache / "unpacking", split, download=True)
                os.rename(cache / "unpacking" / "imagenette2", cache / "imagenette2")
                shutil.rmtree(cache / "unpacking")
            pictures = datasets.Imagenette(cache, split)
            for path, label in tqdm(pictures._samples, split, unit="picture", disable=None):
                folder = pictures.classes[label][0].replace(" ", "_")
                if not (target := root / split / folder / Path(path).name).exists():
                    put(root, target.relative_to(root), Path(path).read_bytes())
        return
    dataset = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[name]
    for split in ("train", "val"):
        pictures = dataset(cache, train=split == "train", download=True)
        for i, (picture, label) in enumerate(tqdm(pictures, split, unit="picture", disable=None)):
            folder = pictures.classes[label].split(" - ")[0]  # "7 - seven" is 7
            if not (target := root / split / folder / f"{i:05}.png").exists():
                put(root, target.relative_to(root), encoded(picture, "PNG"))


def main():
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*DRAWN, "mnist", "cifar10", "imagenette"])
    parser.add_argument("--dst", type=Path, help="where to (default: data/<name> here)")
    parser.add_argument("--train", type=int, help="drawn sets: training pictures a class")
    parser.add_argument("--val", type=int, help="drawn sets: held-out pictures a class")
    parser.add_argument("--seed", type=int, default=0, help="drawn sets: which pictures (0)")
    parser.add_argument("--workers", type=int, default=CORES, help="processes that draw")
    args = parser.parse_args()
    drawn = args.name in DRAWN
    dst = (args.dst or ROOT / "data" / args.name).resolve()
    made = {"name": args.name}
    if drawn:
        train = DRAWN[args.name][2] if args.train is None else args.train
        val = DRAWN[args.name][3] if args.val is None else args.val
        if min(train, val, args.workers) < 1 or args.seed < 0:
            parser.error("--train, --val and --workers are 1 or more, --seed 0 or more")
        made |= {"train": train, "val": val, "seed": args.seed}
    elif (args.train, args.val) != (None, None):
        parser.error(f"--train and --val are for the drawn sets; {args.name} comes whole")

    # built beside its place and moved there whole; what an interrupted run has made is kept
    building = dst.with_name(dst.name + ".part")
    for folder, note in ((dst, dst / "made.json"), (building, building / "made.json")):
        if note.exists() or folder.is_file() or folder.exists() and any(folder.glob("[!.]*")):
            there = json.loads(note.read_text()) if note.exists() else None
            if there != made:
                sys.exit(f"make_dataset.py: error: {folder} holds something else: remove it, or "
                         "name another place with --dst")
    if (dst / "made.json").exists():
        print(f"{dst} is there already")
        return
    try:
        put(building, "made.json", json.dumps(made).encode())
        if drawn:
            draw(building, args.name, args.seed, train, val, args.workers)
        else:
            download(building, args.name, dst.with_name("downloads"))
        os.rename(building, dst)
    except KeyboardInterrupt:
        sys.exit(f"\nmake_dataset.py: stopped; run it again and it goes on ({building})")
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if "urlopen" in reason or "download" in reason:
            reason = f"cannot download it, is there a network? `digits` needs none ({reason:.200})"
        sys.exit(f"make_dataset.py: error: {args.name}: {reason}")
    print(f"made {dst}")


if __name__ == "__main__":
    main()
