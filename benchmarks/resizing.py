"""Time resize_imagenet.py beside vipsthumbnail, whole runs by turns, and compare their pictures.

    python benchmarks/resizing.py PHOTOS [--runs 5] [--workers 2]

PHOTOS is a folder of JPEGs, such as some of ImageNet. Two sets are made of them: copies of the
photos, and photos enlarged to 12 megapixels, with noise, as JPEGs of quality 90 with half the
chroma resolution (4:2:0). Both programs write a smaller edge of 256 pixels with that quality and
chroma, in --workers processes. Times include the start. A ratio above 1 says that
resize_imagenet.py is faster; its interval of 95 % is Student's, of the runs' ratios. A difference
is the mean over pixels, 0 to 255, to what Pillow's bicubic filter makes of the whole picture.
The machine should be idle; the seconds of all cores together (CPU) depend less on that.
vipsthumbnail is in Debian's libvips-tools.
"""

import argparse
import concurrent.futures
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

import folders  # noqa: F401  it finds paths.py
import paths

from whatif import stats

EDGE, QUALITY = 256, 90


def make_sets(photos, folder, copies, large):
    """Make the sets in `folder`; return {name: paths}, of `copies` and `large` pictures."""
    (folder / "photos").mkdir()
    (folder / "large").mkdir()
    noise, enlarged = np.random.default_rng(0), []
    for photo in photos[:: max(1, len(photos) // 20)][: min(20, large)]:
        with Image.open(photo) as image:
            size = (4000, 3000) if image.width >= image.height else (3000, 4000)
            pixels = np.asarray(image.convert("RGB").resize(size, Image.BICUBIC)).astype(np.int16)
        pixels += noise.integers(-12, 13, (*pixels.shape[:2], 1), dtype=np.int16)
        enlarged.append(folder / f"{photo.stem}.jpg")
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(enlarged[-1], quality=QUALITY, subsampling="4:2:0")
    sets = {}
    for name, sources, count in (("photos", photos, copies), ("large", enlarged, large)):
        sets[name] = [folder / name / f"{i}.jpg" for i in range(count)]
        for source, path in zip(itertools.cycle(sources), sets[name]):
            shutil.copyfile(source, path)
    return sets


def ours(pictures, target, workers):
    """Run resize_imagenet.py."""
    words = ["--src", pictures[0].parent, "--dst", target, "--max-size", EDGE, "--quality", QUALITY]
    script = paths.ROOT / "resize_imagenet.py"
    words = [sys.executable, script, *words, "--workers", workers]
    subprocess.run([*map(str, words)], check=True, stdout=subprocess.DEVNULL)


def vips(pictures, target, workers, is_wide):
    """Run vipsthumbnail in `workers` processes of one thread.

    It has a size for the width or the height, so each process runs twice: for pictures of which
    `is_wide` is true, and for the others.
    """
    target.mkdir()
    program, form = shutil.which("vipsthumbnail"), f"{target}/%s.jpg[Q={QUALITY},subsample_mode=on]"

    def part(start):
        for size, wide in ((f"x{EDGE}", True), (f"{EDGE}x", False)):
            mine = [path for path in pictures[start::workers] if is_wide[path] == wide]
            if mine:
                command = [program, "--size", size, "--output", form, *mine]
                subprocess.run(command, check=True, env=os.environ | {"VIPS_CONCURRENCY": "1"})

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(part, range(workers)))


def difference(source, copy):
    """Return the mean difference of a copy to Pillow's bicubic copy of the whole source."""
    with Image.open(source) as image, Image.open(copy) as smaller:
        wanted = ImageOps.exif_transpose(image).convert("RGB").resize(smaller.size, Image.BICUBIC)
        return np.abs(np.asarray(smaller.convert("RGB"), np.int16) - np.asarray(wanted)).mean()


def timed(run):
    """Run a function that starts processes; return (seconds, their CPU seconds)."""
    before, start = os.times(), time.perf_counter()
    run()
    seconds, after = time.perf_counter() - start, os.times()
    return seconds, sum(after[2:4]) - sum(before[2:4])


def ratio(one, other):
    """Return how many times as fast one is, from its seconds and those of the other, as text."""
    found = stats.of_pairs([1 / value for value in other], [1 / value for value in one])
    interval = f" ({found.low:.2f} to {found.high:.2f})" if found.low else ""
    return f"{found.speedup:.2f}x{interval}"


def compare(name, pictures, folder, runs, workers):
    """Print the times of both programs, their ratio and the differences of their pictures."""
    is_wide = {}
    for path in pictures:
        with Image.open(path) as image:
            size = ImageOps.exif_transpose(image).size
        is_wide[path] = size[0] >= size[1]
    programs = {
        "resize_imagenet.py": lambda target: ours(pictures, target, workers),
        "vipsthumbnail": lambda target: vips(pictures, target, workers, is_wide),
    }
    times, differences = {program: [] for program in programs}, {}
    for turn in range(runs + 1):  # the first only warms up
        for program in list(programs)[:: 1 if turn % 2 else -1]:
            target = folder / "copies"
            times[program].append(timed(lambda: programs[program](target)))
            if not turn:
                some = pictures[: 20 if name == "large" else 100]
                found = [difference(path, target / path.name) for path in some]
                differences[program] = float(np.mean(found))
            count = len(list(target.glob("*.jpg")))
            if count != len(pictures):
                sys.exit(f"resizing.py: error: {program} wrote {count} of {len(pictures)} pictures")
            shutil.rmtree(target)
    (seconds, cpu), (their_seconds, their_cpu) = (zip(*each[1:]) for each in times.values())
    print(f"{name}, {len(pictures)} pictures, n={runs}: {ratio(seconds, their_seconds)}, ", end="")
    print(f"CPU {ratio(cpu, their_cpu)}")
    for program, each in times.items():
        every = " ".join(f"{second:.2f}" for second, _ in each[1:])
        middle = np.median(each[1:], axis=0)
        print(f"  {program}: {middle[0]:.2f} s ({every}), CPU {middle[1]:.2f} s, ", end="")
        print(f"difference {differences[program]:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path, help="folder of JPEGs, at any depth")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each program (5)")
    parser.add_argument("--workers", type=int, default=2, help="processes of each program (2)")
    parser.add_argument(
        "--pictures", type=int, nargs=2, default=(641, 160), help="of the two sets (641 160)"
    )
    args = parser.parse_args()
    photos = sorted(path for path in args.photos.rglob("*") if path.suffix.lower()[:3] == ".jp")
    if not photos or min(args.runs, args.workers, *args.pictures) < 1:
        parser.error("PHOTOS has to hold JPEGs, and the numbers have to be at least 1")
    if not shutil.which("vipsthumbnail"):
        parser.error("there is no vipsthumbnail: apt-get install libvips-tools")
    with tempfile.TemporaryDirectory() as folder:
        sets = make_sets(photos, Path(folder), *args.pictures)
        for name, pictures in sets.items():
            compare(name, pictures, Path(folder), args.runs, args.workers)


if __name__ == "__main__":
    main()
