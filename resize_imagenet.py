# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy", "pillow", "torch>=2.11", "torchvision>=0.26", "tqdm"]
# ///
"""Make a smaller copy of a data set of pictures, for quick ideas.

    python resize_imagenet.py --src imagenet --dst imagenet_256 --max-size 256

The smaller edge becomes at most --max-size, antialiased; a picture that is small enough is copied
byte for byte. Folders and names stay, and what a name says is what the file becomes: a PNG named
.JPEG is written as a JPEG. Grey stays grey, CMYK becomes RGB, transparency becomes white, 16 bits
become 8, a picture that EXIF turns is turned. Files that are no pictures are passed over.

It may be stopped at any moment: run again, it goes on where it was and redoes what has changed in
--src (by size and time). Pictures that are gone from --src stay in --dst.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import fcntl
import functools
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import stat
import sys
import threading
import time
import types
import warnings
import zlib
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from tqdm import tqdm

FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP",
           ".ppm": "PPM", ".pgm": "PPM", ".tif": "TIFF", ".tiff": "TIFF"}
READABLE = sorted({*FORMATS.values(), "GIF"})  # no others: EPS would start a program
BACKGROUND = "white"  # what shows through a transparent picture
MOST_PIXELS = 100_000_000  # a worker holds three bytes of each, of some kinds a dozen
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit gives way to this one
NOTE, PARTS = ".resize_imagenet.json", ".resize_imagenet.part"
# EXIF orientation: (rows become columns, edges then flipped) of a (channel, row, column) tensor
TURNS = {2: (False, [2]), 3: (False, [1, 2]), 4: (False, [1]), 5: (True, []), 6: (True, [2]),
         7: (True, [1, 2]), 8: (True, [1])}
STOPS = {signal.SIGINT, signal.SIGTERM}
# of the machine's cores, those that this process may use
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
warnings.filterwarnings("ignore", module="PIL")  # they name no file, and the pictures are whole


def shown(path):
    """A path on one line of any terminal: what cannot be printed is escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(path))


@functools.cache
def codec():
    """torchvision.io.image, without the seconds that the rest of torchvision takes to import."""
    package = types.ModuleType("torchvision")
    package.__path__ = importlib.util.find_spec("torchvision").submodule_search_locations
    sys.modules.setdefault("torchvision", package)
    return importlib.import_module("torchvision.io.image")


def decode_jpeg(content, grey):
    """A whole JPEG as a (channel, row, column) tensor; CMYK becomes RGB. Raises ValueError.

    Where data is missing, torchvision raises. Of damage that leaves the length as it is, libjpeg
    only says a line on stderr, which is a pipe in a worker. Extraneous bytes in the header do no
    harm, nor do up to three before the end; damage leaves more.
    """
    import torch  # seconds to import: not before the options are known to be right

    modes, wrong, said = codec().ImageReadMode, "", b""
    try:
        pixels = codec().decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8),
                                     modes.GRAY if grey else modes.RGB)
    except RuntimeError as error:
        wrong = str(error).splitlines()[0].split(" ")[-1]
    with contextlib.suppress(BlockingIOError):
        said = os.read(COMPLAINTS, 1 << 16)
    for line in said.decode(errors="replace").splitlines():
        if not re.search("unknown|Invalid SOS| [123] extraneous|extraneous .* 0x(?!d9)", line):
            wrong = wrong or line
    if wrong:
        raise ValueError(f"damaged or cut short ({wrong})")
    return pixels


def flatten(image):
    """A Pillow picture of any mode as 8 bits of grey or RGB."""
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, BACKGROUND), image)
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def encode(pixels, format, quality, profile):
    """A tensor of one or three channels as the bytes of a file, with its ICC profile."""
    if profile and profile[16:20] != (b"GRAY" if len(pixels) == 1 else b"RGB "):
        profile = None  # a CMYK picture's, whose colours are no more
    if format == "JPEG":
        content = codec().encode_jpeg(pixels, quality).numpy().tobytes()
        pieces = [profile[i:i + 65519] for i in range(0, len(profile or b""), 65519)]
        segments = [b"\xff\xe2" + (len(piece) + 16).to_bytes(2, "big") + b"ICC_PROFILE\0"
                    + bytes([i, len(pieces)]) + piece for i, piece in enumerate(pieces, 1)]
        start = 4 + int.from_bytes(content[4:6], "big")  # behind the first segment
        return content[:start] + b"".join(segments) + content[start:]
    image = Image.fromarray((pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).numpy())
    options = {"quality": quality} if format == "WEBP" else {}
    image.save(file := io.BytesIO(), format, icc_profile=profile, **options)
    return file.getvalue()


def shrink(file, format, max_size, quality):
    """The bytes of the smaller picture, or the file's own where it is small enough and sound.

    `file` is an open binary file. Raises Exception, of many types, where the picture cannot be
    read: too large, damaged, cut short, none at all.
    """
    import torch

    with Image.open(file, formats=READABLE) as image:
        if image.width * image.height > MOST_PIXELS:  # known from the header
            raise ValueError(f"{image.width}x{image.height}, more than {MOST_PIXELS:,} pixels")
        profile, turn = image.info.get("icc_profile"), None
        is_jpeg = image.format in ("JPEG", "MPO")
        if not is_jpeg:
            pixels = torch.from_numpy(np.array(flatten(image)))
        with contextlib.suppress(Exception):  # a corrupt block says nothing of the pixels
            turn = image.getexif().get(ExifTags.Base.Orientation)
        file.seek(0)
        content = file.read()
        if is_jpeg:
            pixels = decode_jpeg(content, image.mode == "L").permute(1, 2, 0)
        is_named_right = format == ("JPEG" if is_jpeg else image.format)
    size = pixels.shape[:2]
    edge = min(size)
    if edge <= max_size and is_named_right:
        return content
    # made anew as rows of pixels, it is known to be channels_last, which is fast
    pixels = pixels.reshape(1, *size, -1).permute(0, 3, 1, 2)
    if edge > max_size:
        size = [(2 * length * max_size + edge) // (2 * edge) for length in size]
        pixels = torch.nn.functional.interpolate(pixels, size, mode="bilinear", antialias=True)
    pixels = pixels[0]
    if turn in TURNS:
        is_across, flips = TURNS[turn]
        pixels = (pixels.transpose(1, 2) if is_across else pixels).flip(flips)
    return encode(pixels, format, quality, profile)


def begin():
    """In a worker: one core, Ctrl-C is the parent's, and no worker outlives a killed parent."""
    import torch
    global COMPLAINTS

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    COMPLAINTS, stderr = os.pipe()
    for end in (COMPLAINTS, stderr):
        os.set_blocking(end, False)
    os.dup2(stderr, 2)


def put(part, target, content, stamp):
    """Writes a file, with its time, whole or not at all. Raises OSError with the name `target`."""
    try:
        with open(part, "wb") as file:
            file.write(content)
        os.utime(part, ns=(stamp, stamp))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(part, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, target) from None


def do_pictures(src, dst, max_size, quality, names):
    """Does the pictures `names` of `src`: returns counts and [(name, why it cannot be done)].

    An output's time is its source's second and a checksum of that one's time and size: what it was
    made from. Raises OSError where `dst` cannot be written.
    """
    counts, failures = collections.Counter(), []
    part = os.path.join(dst, PARTS, str(os.getpid()))
    for name in names:
        source, target = os.path.join(src, name), os.path.join(dst, name)
        try:
            found = os.stat(source)
            check = zlib.crc32(f"{found.st_mtime_ns} {found.st_size}".encode()) % 1_000_000
            stamp = (found.st_mtime_ns // 10**9 * 10**6 + check) * 1000
            if not stat.S_ISREG(found.st_mode) or not found.st_size:
                raise ValueError("empty, or not a regular file")
            with contextlib.suppress(OSError):
                there = os.stat(target)
                if there.st_mtime_ns == stamp and there.st_size:
                    counts["kept"] += 1
                    continue
            format = FORMATS[os.path.splitext(name)[1].lower()]
            with open(source, "rb") as file:
                content = shrink(file, format, max_size, quality)
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or repr(error)
            if isinstance(error, UnidentifiedImageError):  # it would show an object's address
                reason = "not a picture, or a damaged one"
            failures.append((name, reason))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target)  # made from what this picture was before
            continue
        put(part, target, content, stamp)
        counts.update(done=1, read=found.st_size, written=len(content))
    return counts, failures


def find_pictures(src, dst, failed, is_case_told=True):
    """Yields the paths within `src` of its pictures, through links too, and holds none of them.

    No folder is entered again below itself, nor is `dst`. Links to nowhere and folders that cannot
    be read go to failed(name, reason), and so does, where `dst` takes a and A for one name, what
    would share its name with another.
    """
    folders = [("", {str(src), str(dst)})]
    while folders:
        folder, above = folders.pop()
        try:
            entries = os.scandir(src / folder)
        except OSError as error:
            failed(folder, error.strerror)
            continue
        taken = set()

        def is_free(name):
            """Whether no other has this name in `dst`."""
            if is_case_told:
                return True
            if name.casefold() in taken:
                failed(name, "another has this name in --dst, which does not tell A from a")
                return False
            taken.add(name.casefold())
            return True
        for entry in entries if is_case_told else sorted(entries, key=lambda entry: entry.name):
            name = os.path.join(folder, entry.name)
            if entry.is_symlink() and not os.path.exists(entry.path):
                failed(name, "a link to nowhere")
            elif entry.is_dir():
                real = os.path.realpath(entry.path)
                if real not in above and entry.name != PARTS and is_free(name):
                    folders.append((name, above | {real}))
            elif (os.path.splitext(name)[1].lower() in FORMATS
                  and not entry.name.startswith("._")  # a file system's notes
                  and is_free(name)):
                yield name


def do_all(job, names, workers, batch):
    """Yields what `job` returns for the names, a batch at a time, from so many processes.

    Raises what `job` raises, and BrokenProcessPool where a process was killed.
    """
    codec()  # here, so that forked workers have it at once
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    batches = iter(lambda: list(itertools.islice(names, batch)), [])
    waiting = set()
    with concurrent.futures.ProcessPoolExecutor(workers, context, begin) as pool:
        try:
            while True:
                signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # a new worker is not ready for any
                for some in itertools.islice(batches, 4 * workers - len(waiting)):
                    waiting.add(pool.submit(job, some))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
                if not waiting:
                    return
                done, waiting = concurrent.futures.wait(waiting, return_when="FIRST_COMPLETED")
                for future in done:
                    yield future.result()
        except BaseException:
            for stop in STOPS:
                signal.signal(stop, signal.SIG_IGN)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def claim(dst, settings):
    """Makes `dst`, or takes up what a run with the same `settings` has left there.

    Returns its note, a file that is locked while this run or a worker of it lives. Raises
    ValueError where there is anything else, OSError where `dst` cannot be written.
    """
    dst.mkdir(parents=True, exist_ok=True)
    if not (dst / NOTE).exists() and any(not name.startswith(".") for name in os.listdir(dst)):
        raise ValueError(f"--dst {dst} holds something else: name another")
    note = open(dst / NOTE, "a+")
    try:
        fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for the run that is writing to --dst", flush=True)
        fcntl.flock(note, fcntl.LOCK_EX)
    note.seek(0)
    text = note.read()
    if text not in ("", json.dumps(settings)):
        raise ValueError(f"--dst {dst} was made with other settings, {text.strip()}: remove it "
                         "or name another")
    note.write("" if text else json.dumps(settings))
    note.flush()
    shutil.rmtree(dst / PARTS, ignore_errors=True)  # what a killed run was writing
    (dst / PARTS).mkdir()
    return note


def main():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    fail = f"{parser.prog}: error:"
    parser.error = lambda message: parser.exit(2, f"{fail} {shown(message)}\n")
    parser.add_argument("--src", type=Path, required=True, help="folder of pictures, at any depth")
    parser.add_argument("--dst", type=Path, required=True, help="where the smaller ones go")
    parser.add_argument("--max-size", type=int, required=True, help="pixels of the smaller edge")
    parser.add_argument("--quality", type=int, default=90, help="of JPEG and WebP, 1 to 100 (90)")
    parser.add_argument("--workers", type=int, default=CORES, help="processes (all cores)")
    args = parser.parse_args()
    if min(args.max_size, args.workers) < 1 or not 1 <= args.quality <= 100:
        parser.error("--max-size and --workers are 1 or more, --quality 1 to 100")
    try:
        src, dst = args.src.resolve(strict=True), args.dst.resolve()
        os.scandir(src).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        parser.error(f"--src {args.src}: {getattr(error, 'strerror', error)}")
    if src in (dst, *dst.parents) or dst in src.parents:
        parser.error("--src and --dst are the same, or one lies inside the other")

    note, message, failures, counts, total = None, "", [], collections.Counter(), 0
    start = time.perf_counter()
    try:
        total = sum(1 for _ in find_pictures(src, dst, lambda *_: None))
        if not total:
            parser.error(f"--src {src}: no pictures there (names that end in {' '.join(FORMATS)})")
        note = claim(dst, dict(src=str(src), max_size=args.max_size, quality=args.quality))
        names = find_pictures(src, dst, lambda *failure: failures.append(failure),
                              not (dst / NOTE.upper()).exists())
        job = functools.partial(do_pictures, str(src), str(dst), args.max_size, args.quality)
        batch = max(1, min(16, total // (8 * args.workers)))
        with (tqdm(total=total, unit="image", disable=None) as bar,
              contextlib.closing(do_all(job, names, args.workers, batch)) as results):
            for some, failed in results:
                counts += some
                failures += failed
                saved = (counts["read"] - counts["written"]) / 1e6
                bar.set_postfix_str(f"{saved:,.1f} MB saved", refresh=False)
                bar.update(some["done"] + some["kept"] + len(failed))
    except KeyboardInterrupt:
        message = f"{parser.prog}: stopped; run it again and it goes on"
    except BrokenProcessPool:
        message = (f"{fail} a worker was killed, for want of memory perhaps; run it again and it "
                   "goes on, with fewer --workers if need be")
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        message = (f"{fail} cannot write {shown(error.filename)}: {error.strerror}; mend that, run "
                   "it again and it goes on")
    finally:
        if note:
            shutil.rmtree(dst / PARTS, ignore_errors=True)
    for name, reason in failures:
        print(f"{fail} {shown(src / name)}: {shown(reason)}", file=sys.stderr)
    seconds = time.perf_counter() - start
    print(f"{counts['done']:,} of {total:,} pictures done, {counts['kept']:,} were there, "
          f"{len(failures):,} cannot be done; {counts['read'] / 1e6:,.1f} MB became "
          f"{counts['written'] / 1e6:,.1f}; {counts['done'] / seconds:,.0f} images/s", flush=True)
    sys.exit(message or bool(failures))


if __name__ == "__main__":
    main()
