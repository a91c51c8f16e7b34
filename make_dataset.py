"""Make a dataset of class folders: drawn here, or downloaded by torchvision.

    python make_dataset.py digits     the default of the training scripts, takes a few seconds
    python make_dataset.py photos     JPEGs of ImageNet's size and weight, to time loading
    python make_dataset.py pairs      blurry and sharp pictures, for image restoration
    python make_dataset.py mnist      a real one: mnist, cifar10 or imagenette

The set is written to data/<name> or --dst, once it is complete.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
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
CORES = len(os.sched_getaffinity(0))


def draw_digit(digit, rng):
    """Return a grey 32x32 picture of `digit` (0..9): shifted, turned, thickened and noisy.

    The font is Pillow's own.
    """
    font = ImageFont.load_default(int(rng.integers(64, 100)))
    canvas = Image.new("L", (128, 128))
    x, y = rng.uniform(54, 74, 2)
    ImageDraw.Draw(canvas).text(
        (x, y),
        str(digit),
        fill=int(rng.integers(140, 256)),
        font=font,
        anchor="mm",
        stroke_width=int(rng.integers(0, 5)),
    )
    canvas = canvas.rotate(rng.uniform(-15, 15), Image.Resampling.BILINEAR)
    pixels = np.asarray(canvas.resize((32, 32), Image.Resampling.BOX), dtype=np.float64)
    pixels = pixels + rng.uniform(0, 60) + rng.normal(0, rng.uniform(4, 16), pixels.shape)
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def draw_photo(label, rng):
    """Return a colour picture that loads like a photograph: similar size, spectrum and edges.

    Sizes vary around ImageNet's mean of 469x387. The background is 1/f noise, as in natural scenes
    (Field 1987, Relations between the statistics of natural images). `label` sets the number of
    corners and the hue of the shapes on it.
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
    """Return `picture` blurred, more along one axis than along the other."""
    return picture.filter(ImageFilter.GaussianBlur(tuple(rng.uniform(1, 4, 2))))


def encoded(picture, format, **options):
    """Return `picture` as the bytes of a file."""
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def digits_files(rng, split, label, i):
    """Return {relative path: bytes} of one digit."""
    return {f"{split}/{label}/{label}_{i:05}.png": encoded(draw_digit(label, rng), "PNG")}


def photos_files(rng, split, label, i):
    """Return {relative path: bytes} of one photograph: 105 kB on average, ImageNet's have 110."""
    path = f"{split}/class{label}/class{label}_{i:05}.JPEG"
    return {path: encoded(draw_photo(label, rng), "JPEG", quality=92)}


def pairs_files(rng, split, label, i):
    """Return {relative path: bytes} of a sharp photograph and the same one blurred."""
    sharp = draw_photo(label, rng)
    path = f"scene{label}/{i:05}.png"
    return {
        f"{split}/sharp/{path}": encoded(sharp, "PNG"),
        f"{split}/blurry/{path}": encoded(blur(sharp, rng), "PNG"),
    }


# name: (function, name of the validation split, training and validation pictures per class)
DRAWN = {
    "digits": (digits_files, "val", 250, 60),
    "photos": (photos_files, "val", 100, 20),
    "pairs": (pairs_files, "test", 20, 4),
}


def write(path, content):
    """Write a file; make its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def draw_job(root, name, seed, job):
    """Draw picture `job` = (split, label, i) of dataset `name`."""
    files_of, validation = DRAWN[name][:2]
    split, label, i = job
    rng = np.random.default_rng([seed, split == validation, label, i])
    for path, content in files_of(rng, split, label, i).items():
        write(root / path, content)


def begin():
    """Prepare a worker: leave Ctrl-C to the parent, end when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def draw(root, name, seed, train, val, workers):
    """Draw `train` and `val` pictures per class of dataset `name` into folder `root`."""
    validation = DRAWN[name][1]
    jobs = [
        (split, label, i)
        for split, count in (("train", train), (validation, val))
        for label in range(10)
        for i in range(count)
    ]
    job = functools.partial(draw_job, root, name, seed)
    with concurrent.futures.ProcessPoolExecutor(workers, initializer=begin) as pool:
        try:
            results = pool.map(job, jobs, chunksize=max(1, min(32, len(jobs) // (4 * workers))))
            for _ in tqdm(results, name, total=len(jobs), unit="picture", disable=None):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def download(root, name):
    """Download dataset `name` and arrange it as class folders in `root`."""
    from torchvision import datasets  # takes seconds, and drawing does not need it

    if name == "imagenette":
        pictures = datasets.Imagenette(root / "download", "train", download=True)
        for split in ("train", "val"):
            (root / split).mkdir()
            for wnid, names in zip(pictures.wnids, pictures.classes):
                folder = root / "download" / "imagenette2" / split / wnid
                folder.rename(root / split / names[0].replace(" ", "_"))
    else:
        dataset = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[name]
        for split in ("train", "val"):
            pictures = dataset(root / "download", train=split == "train", download=True)
            bar = tqdm(pictures, split, unit="picture", disable=None)
            for i, (picture, label) in enumerate(bar):
                folder = pictures.classes[label].split(" - ")[0]  # "7 - seven" becomes 7
                write(root / split / folder / f"{i:05}.png", encoded(picture, "PNG"))
    shutil.rmtree(root / "download")


def main():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*DRAWN, "mnist", "cifar10", "imagenette"])
    parser.add_argument("--dst", type=Path, help="output folder (default: data/<name>)")
    parser.add_argument("--train", type=int, help="drawn sets: training pictures of each class")
    parser.add_argument("--val", type=int, help="drawn sets: validation pictures of each class")
    parser.add_argument("--seed", type=int, default=0, help="drawn sets: random seed (0)")
    parser.add_argument("--workers", type=int, default=CORES, help="drawn sets: processes")
    args = parser.parse_args()
    drawn = args.name in DRAWN
    dst = (args.dst or ROOT / "data" / args.name).resolve()
    made = {"name": args.name}
    if drawn:
        train = DRAWN[args.name][2] if args.train is None else args.train
        val = DRAWN[args.name][3] if args.val is None else args.val
        if min(train, val, args.workers) < 1 or args.seed < 0:
            parser.error("--train, --val and --workers must be at least 1, --seed at least 0")
        made |= {"train": train, "val": val, "seed": args.seed}
    elif (args.train, args.val) != (None, None):
        parser.error(f"--train and --val are for drawn sets; {args.name} has a fixed size")

    with contextlib.suppress(OSError):  # wait for another run that makes a set there
        dst.parent.mkdir(parents=True, exist_ok=True)
        fcntl.flock(os.open(dst.parent, os.O_RDONLY), fcntl.LOCK_EX)
    note = dst / "made.json"
    if note.exists() and json.loads(note.read_text()) == made:
        print(f"{dst} is there already")
        return
    if dst.is_file() or dst.exists() and any(dst.iterdir()):
        sys.exit(
            f"make_dataset.py: error: {dst} holds something else: delete it, or choose "
            "another folder with --dst"
        )
    building = dst.with_name(f".{dst.name}.part")  # moved to dst when it is complete
    try:
        shutil.rmtree(building, ignore_errors=True)  # an earlier run was killed
        write(building / "made.json", json.dumps(made).encode())
        if drawn:
            draw(building, args.name, args.seed, train, val, args.workers)
        else:
            download(building, args.name)
        os.rename(building, dst)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if "urlopen" in reason or "download" in reason:
            reason = f"the download failed; `digits` needs no network ({reason:.200})"
        sys.exit(f"make_dataset.py: error: {args.name}: {reason}")
    finally:
        shutil.rmtree(building, ignore_errors=True)
    print(f"made {dst}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nmake_dataset.py: stopped; run it again")
