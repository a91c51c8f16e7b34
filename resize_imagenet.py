# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "cykooz-resizer>=4.0.1; platform_machine == 'x86_64'",
#     "numpy",
#     "pillow>=10.1",
#     "simplejpeg>=1.9",
#     "tqdm",
# ]
# ///
"""Make a smaller copy of a folder of pictures, and check each picture on the way.

    python resize_imagenet.py --src imagenet --dst imagenet_256 --max-size 256

The smaller edge of each picture becomes at most --max-size pixels; pictures are never enlarged.
Names and folders stay the same, and the name decides the format: a PNG named .JPEG becomes a JPEG.
Grey stays grey, CMYK becomes RGB, transparency becomes white, 1 to 16 bits become 8, and EXIF
rotation is applied. A picture that is small enough and needs none of this is copied byte for byte.
Damaged pictures, and those of floating-point or 32-bit numbers, are named and left out. Files that
are not pictures and hidden folders are ignored. --format jpg or png writes all pictures in that
format, with its ending.

You can stop it at any time. Run it again to continue; pictures that changed in --src since then
(by size or time) are made again. Pictures that were deleted from --src stay in --dst.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import struct
import sys
import threading
import time
import warnings
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageOps, PngImagePlugin, UnidentifiedImageError
from tqdm import tqdm

try:
    import cykooz_resizer as fast
except ImportError:  # it has no wheel for this machine
    fast = None

FORMATS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".png": "PNG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".ppm": "PPM",
    ".pgm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
}
OTHERS = {".gif": "GIF", ".avif": "AVIF", ".jp2": "JPEG2000"}  # read, but not written
Image.init()  # not EPS: Pillow would start a program to read it; AVIF is not in every Pillow
READABLE = sorted({*FORMATS.values(), *OTHERS.values()} & Image.OPEN.keys())
MOST_PIXELS = 100_000_000  # a worker needs 3 to 12 bytes of memory for each
Image.MAX_IMAGE_PIXELS = None  # MOST_PIXELS replaces Pillow's own limit
MOST_TEXT = PngImagePlugin.MAX_TEXT_CHUNK  # Pillow refuses a PNG with longer compressed text ...
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY  # ... but can read this much
NOTE, PARTS = ".resize_imagenet.json", ".resize_imagenet.part"
CORES = len(os.sched_getaffinity(0))
warnings.filterwarnings("ignore", module="PIL")  # its warnings name no file and are harmless


def printable(text):
    """Return `text` with line breaks and characters that no terminal can show escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(text))


def flatten(image):
    """Return a Pillow image as 8 bits of grey or RGB. Raise ValueError if its range is unknown."""
    if image.mode in ("I", "F") and image.format != "PPM":
        raise ValueError(
            "floating-point, signed or 32-bit numbers: their range is not known, scale "
            "them to 8 or 16 bits with a program of your own"
        )
    if image.mode.startswith("I"):  # 16 bits
        image = image.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    mode = "L" if image.mode in ("1", "L") else "RGB"
    return image if image.mode == mode else image.convert(mode)


def is_damage(error, content):
    """Return whether simplejpeg's `error` about the JPEG `content` means damaged pixels."""
    # Pictures that are whole may have up to three bytes too many before the end marker 0xd9, and
    # some phones write wrong SOS parameters.
    if re.search(" [123] extraneous bytes before marker 0xd9|Invalid SOS", str(error)):
        return False
    try:
        simplejpeg.decode_jpeg_header(content, strict=True)
    except ValueError:
        return False  # an unusual header, which Pillow may still understand
    return True


def is_plain(image, content):
    """Return whether all scripts read a JPEG, PNG or WebP alike; the image is that of `content`."""
    if image.format not in ("JPEG", "MPO"):
        texts = (value for value in image.info.values() if isinstance(value, (bytes, str)))
        return (
            image.mode in ("L", "RGB")
            and not image.has_transparency_data
            and not {"exif", "Raw profile type exif"} & image.info.keys()
            and (image.format != "PNG" or content[24] == 8)  # the bits of a number
            and all(len(text) <= MOST_TEXT for text in texts)
        )
    blocks = [block for name, block in image.applist if name == "APP1" and block[:4] == b"Exif"]
    return not blocks or len(blocks) == 1 and has_plain_exif(blocks[0])


def has_plain_exif(block):
    """Return whether all decoders find the same orientation in a JPEG's EXIF block, or none."""
    order = {b"Exif\0\0II*\0": "<", b"Exif\0\0MM\0*": ">"}.get(block[:10])
    try:
        (start,) = struct.unpack_from(f"{order}I", block, 10)
        (count,) = struct.unpack_from(f"{order}H", block, 6 + start)
        tags = [struct.unpack_from(f"{order}HHI", block, 8 + start + 12 * i) for i in range(count)]
    except struct.error:  # another header, or cut short
        return False
    found = [form for tag, *form in tags if tag == ExifTags.Base.Orientation]
    return found in ([], [[3, 1]])  # one number of 16 bits


def decode(image, content, size):
    """Return the pixels as a uint8 array (height, width, 1 or 3). Raise Exception on damage.

    A large JPEG is decoded at a fraction of its size, at least 1.4 times `size` (width, height).
    """
    if image.format in ("JPEG", "MPO"):
        try:
            return simplejpeg.decode_jpeg(
                content,
                "GRAY" if image.mode == "L" else "RGB",
                min_width=math.ceil(1.4 * size[0]),
                min_height=math.ceil(1.4 * size[1]),
                min_factor=2,
                strict=True,
            )
        except ValueError as error:
            if is_damage(error, content):
                raise ValueError(f"damaged or cut short ({error})") from None
    if image.format == "PNG":
        try:
            Image.open(io.BytesIO(content)).verify()  # decoding compares no checksums
        except Exception as error:
            raise ValueError(f"damaged or cut short ({error})") from None
    return np.atleast_3d(np.asarray(flatten(image)))  # Pillow finds files that were cut short


def resize(pixels, size, new_size):
    """Return `pixels` as decode() gave them of a picture of `size`, resized to `new_size`.

    The filter is Pillow's bicubic, which cykooz_resizer computes several times as fast.
    """
    height, width, channels = pixels.shape
    # Where `size` is no multiple of 8, the last decoded column stands for a part of one.
    scale = 8 * max(width, height) // max(size) / 8
    box = 0, 0, size[0] * scale, size[1] * scale
    if not fast:
        image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
        return np.atleast_3d(np.asarray(image.resize(new_size, Image.BICUBIC, box)))
    kind = fast.PixelType.U8 if channels == 1 else fast.PixelType.U8x3
    bicubic = fast.ResizeAlg.convolution(fast.FilterType.catmull_rom)
    source = fast.ImageData(width, height, kind, pixels.tobytes())
    target = fast.ImageData(*new_size, kind)
    options = fast.ResizeOptions(bicubic, crop_box=fast.CropBox(*box))
    fast.Resizer().resize(source, target, options)
    return np.frombuffer(target.get_buffer(), np.uint8).reshape(*new_size[::-1], channels)


def encode(pixels, orientation, profile, format, quality):
    """Return `pixels`, turned as EXIF's `orientation` says, as the bytes of a file."""
    is_grey = pixels.shape[2] == 1
    if profile and profile[16:20] != (b"GRAY" if is_grey else b"RGB "):
        profile = None  # it was made for CMYK
    if format == "PNG" and len(profile or "") > MOST_TEXT:
        profile = None  # Pillow would refuse to read it
    if format == "JPEG" and not profile and orientation in (None, 1):  # most; faster than Pillow
        spaces = ("GRAY", "Gray") if is_grey else ("RGB", "420")
        return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, *spaces)
    image = Image.fromarray(pixels[:, :, 0] if is_grey else pixels)
    image.getexif()[ExifTags.Base.Orientation] = orientation
    image = ImageOps.exif_transpose(image)
    options = {"quality": quality} if format in ("JPEG", "WEBP") else {}
    image.save(file := io.BytesIO(), format, icc_profile=profile, **options)
    return file.getvalue()


def shrink(content, format, max_size, quality):
    """Return the smaller picture as the bytes of a file, or `content` itself if it needs no change.

    Raise Exception, of many types, if the picture is too large, damaged or not a picture.
    """
    with Image.open(io.BytesIO(content), formats=READABLE) as image:
        if image.width * image.height > MOST_PIXELS:  # known from the header
            raise ValueError(f"{image.width}x{image.height}, more than {MOST_PIXELS:,} pixels")
        for key in ("xmp", "XML:com.adobe.xmp"):  # most programs know EXIF's orientation only
            image.info.pop(key, None)
        old, size, edge, orientation = image.size, image.size, min(image.size), None
        if edge > max_size:
            size = [round(length * max_size / edge) for length in old]
        stays = format == image.format.replace("MPO", "JPEG") in (
            "JPEG",
            "PNG",
            "WEBP",
        ) and is_plain(image, content)
        pixels = decode(image, content, size)
        if edge <= max_size and stays:
            return content
        with contextlib.suppress(Exception):  # the pixels can be good when the EXIF block is not
            orientation = image.getexif().get(ExifTags.Base.Orientation)
        profile = image.info.get("icc_profile")
    del image  # frees its pixels
    if edge > max_size:
        pixels = resize(pixels, old, size)
    return encode(pixels, orientation, profile, format, quality)


def named(name, ending):
    """Return the path of a picture's copy: `name`, with another ending unless that is None."""
    return f"{os.path.splitext(name)[0]}.{ending}" if ending else name


def do_pictures(src, dst, max_size, quality, ending, names):
    """Make the pictures `names` of `src` in `dst`. Return a Counter and {name: reason} of failures.

    `ending` is that of all copies, or None. Files are written whole or not at all. Raise OSError if
    `dst` cannot be written.
    """
    counts, failures = Counter(), {}
    part = os.path.join(dst, PARTS, str(os.getpid()))
    for name in names:
        source, target = os.path.join(src, name), os.path.join(dst, named(name, ending))
        try:
            found = os.stat(source)
            # the output's time shows what it was made from: the source's time plus its size
            stamp = (found.st_mtime_ns // 1000 + found.st_size) * 1000
            if os.path.exists(target) and os.stat(target).st_mtime_ns == stamp:
                counts["kept"] += 1
                continue
            format = FORMATS[os.path.splitext(target)[1].lower()]
            content = shrink(Path(source).read_bytes(), format, max_size, quality)
        except Exception as error:
            failures[name] = getattr(error, "strerror", None) or str(error) or repr(error)
            if isinstance(error, UnidentifiedImageError):  # its text is an object's address
                failures[name] = "not a picture, damaged, or of a kind that Pillow cannot read"
            Path(target).unlink(missing_ok=True)  # made from an earlier version of this picture
            continue
        Path(part).write_bytes(content)
        os.utime(part, ns=(stamp, stamp))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(part, target)
        counts.update(done=1, read=found.st_size, written=len(content))
    return counts, failures


def find_pictures(src, dst, endings):
    """Return the sorted paths of the pictures in `src` and {path: reason} of what is unreadable.

    A picture's name has one of the `endings`. Paths are relative to `src`. Links are followed, but
    not into a parent folder or `dst`. Hidden folders are ignored.
    """
    names, unreadable = [], {}
    folders = [("", {src, dst})]  # each with the real paths of itself and its parents
    while folders:
        folder, above = folders.pop()
        try:
            entries = list(os.scandir(os.path.join(src, folder)))
        except OSError as error:
            unreadable[folder] = error.strerror
            continue
        for entry in entries:
            name = os.path.join(folder, entry.name)
            if entry.is_symlink() and not os.path.exists(entry.path):
                unreadable[name] = "a link to nowhere"
            elif entry.is_dir():
                real = os.path.realpath(entry.path)
                if real not in above and not entry.name.startswith("."):
                    folders.append((name, above | {real}))
            elif (
                os.path.splitext(name)[1].lower() in endings
                and entry.is_file()
                and not entry.name.startswith("._")
            ):  # macOS keeps notes in such files
                names.append(name)
    return sorted(names), unreadable


@contextlib.contextmanager
def claim(dst, settings):
    """Make the folder `dst`, or continue what a run with the same `settings` began there.

    In the with block it has a folder for unfinished files. Raise ValueError if `dst` holds anything
    else, OSError if it cannot be written.
    """
    dst.mkdir(parents=True, exist_ok=True)
    note, text = dst / NOTE, json.dumps(settings)
    before = note.read_text() if note.exists() else ""
    if before not in ("", text):
        raise ValueError(
            f"--dst {dst} was made with the settings {before}: use those, delete it "
            "or choose another folder"
        )
    if not before and any(not name.startswith(".") for name in os.listdir(dst)):
        raise ValueError(f"--dst {dst} already holds other files: choose another folder")
    note.write_text(text)
    (dst / PARTS).mkdir(exist_ok=True)
    try:
        yield
    finally:
        shutil.rmtree(dst / PARTS, ignore_errors=True)


def begin():
    """Prepare a worker: leave Ctrl-C to the parent, end when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libtiff writes there, without the file's name


def do_all(job, names, workers):
    """Run `job` on all `names`, in `workers` processes. Return the sums of what it returns.

    Raise what `job` raises, and BrokenProcessPool if a worker is killed.
    """
    counts, failures = Counter(), {}
    context = multiprocessing.get_context("fork")
    size = max(1, min(16, len(names) // (32 * workers)))
    with (
        concurrent.futures.ProcessPoolExecutor(workers, context, begin) as pool,
        tqdm(total=len(names), unit="image", disable=None) as bar,
    ):
        try:
            futures = [pool.submit(job, names[i : i + size]) for i in range(0, len(names), size)]
            for future in concurrent.futures.as_completed(futures):
                count, failed = future.result()
                counts += count
                failures |= failed
                bar.update(count["done"] + count["kept"] + len(failed))
        except BaseException:
            for stop in (signal.SIGINT, signal.SIGTERM):
                signal.signal(stop, signal.SIG_IGN)  # a second Ctrl-C changes nothing
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    return counts, failures


def parse():
    """Return (the options, a function that ends with one line). --src and --dst are real paths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def fail(message, status=1):
        parser.exit(status, f"{parser.prog}: error: {printable(message)}\n")

    parser.error = functools.partial(fail, status=2)
    parser.add_argument("--src", type=Path, required=True, help="folder of pictures, at any depth")
    parser.add_argument("--dst", type=Path, required=True, help="folder for the smaller copy")
    parser.add_argument("--max-size", type=int, required=True, help="smaller edge in pixels")
    parser.add_argument("--quality", type=int, default=90, help="of JPEG and WebP, 1 to 100 (90)")
    parser.add_argument(
        "--format",
        choices=("jpg", "png"),
        help=f"of all copies, as their ending; reads {' '.join(OTHERS)} too (as the names say)",
    )
    parser.add_argument("--workers", type=int, default=CORES, help="processes (one per core)")
    args = parser.parse_args()
    if min(args.max_size, args.workers) < 1 or not 1 <= args.quality <= 100:
        parser.error("--max-size and --workers must be at least 1, --quality 1 to 100")
    src, dst = Path(os.path.realpath(args.src)), Path(os.path.realpath(args.dst))
    if not src.is_dir():
        parser.error(f"--src {args.src}: no such folder")
    if src in (dst, *dst.parents) or dst in src.parents:
        parser.error("--src and --dst must be two folders, neither inside the other")
    args.src, args.dst = src, dst
    return args, fail


def main():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args, fail = parse()
    src, dst, program = args.src, args.dst, Path(sys.argv[0]).name
    start = time.perf_counter()
    try:
        endings = [*FORMATS, *(OTHERS if args.format else ())]
        names, unreadable = find_pictures(str(src), str(dst), endings)
        if not names:
            fail(f"--src {src}: no pictures there (names that end in {' '.join(endings)})", 2)
        settings = {"src": str(src), "max_size": args.max_size, "quality": args.quality}
        with claim(dst, settings | ({"format": args.format} if args.format else {})):
            # on some disks a and A are the same name
            fold, taken = str.casefold if (dst / NOTE.upper()).exists() else str, {}
            for name in names:
                other = taken.setdefault(fold(named(name, args.format)), name)
                if other != name:
                    unreadable[name] = f"its copy would have the same name as that of {other}"
            names = [name for name in names if name not in unreadable]
            job = functools.partial(
                do_pictures, str(src), str(dst), args.max_size, args.quality, args.format
            )
            counts, failures = do_all(job, names, args.workers)
    except KeyboardInterrupt:
        sys.exit(f"{program}: stopped; run it again to continue")
    except BrokenProcessPool:
        fail(
            "a worker was killed, perhaps for lack of memory; run it again to continue, with "
            "fewer --workers if need be"
        )
    except ValueError as error:
        fail(str(error), 2)
    except OSError as error:
        fail(f"cannot write to --dst {dst}: {error.strerror}; run it again to continue")
    failures |= unreadable
    for name, reason in failures.items():
        print(f"{program}: error: {printable(f'{src / name}: {reason}')}", file=sys.stderr)
    print(
        f"{counts['done']:,} of {len(names):,} pictures done, {counts['kept']:,} were there "
        f"already, {len(failures):,} cannot be done; {counts['read'] / 1e6:,.1f} MB became "
        f"{counts['written'] / 1e6:,.1f}; {counts['done'] / (time.perf_counter() - start):,.0f} "
        "images/s"
    )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
