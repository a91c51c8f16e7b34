"""The same picture in over 100 kinds of files: what each script reads, and what it refuses."""

import io
import os

import numpy as np
import pytest
from helpers import ROOT, run_forked
from picture_variants import variants
from PIL import Image

VARIANTS = {variant.name: variant for variant in variants()}
NUMBERS = "float, signed or 32 bits"  # the kind that every script refuses


def distance(pixels, variant):
    """Return the largest difference to what has to be read, 255 if the sizes differ."""
    if pixels.shape != variant.pixels.shape:
        return 255
    return int(np.abs(pixels.astype(int) - variant.pixels).max())


def resized(folder, size, *options):
    """Run resize_imagenet.py on all variants; return (its process, {name: bytes} of its copies)."""
    src = folder / "src"
    if not src.exists():
        src.mkdir()
        for variant in VARIANTS.values():
            (src / variant.name).write_bytes(variant.content)
    dst = folder / f"dst {size} {' '.join(options)}"
    done = run_forked(ROOT / "resize_imagenet.py", "--src", src, "--dst", dst, "--max-size", size,
                      "--workers", 2, "--quality", 95, *options)
    return done, {path.name: path.read_bytes() for path in dst.iterdir() if path.suffix != ".json"}


def read(content):
    """Return an RGB picture, which has to be upright and 8 bits as it is."""
    image = Image.open(io.BytesIO(content))
    assert image.mode in ("L", "RGB", "CMYK") and not image.has_transparency_data
    return image


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("variants")


def test_there_are_over_80_variants():
    assert len(VARIANTS) > 130
    assert len({variant.kind for variant in VARIANTS.values()}) > 7
    for variant in VARIANTS.values():  # the generator's own files are what they say they are
        if variant.kind == "plain":
            Image.open(io.BytesIO(variant.content)).load()


@pytest.mark.fault(9, 10, 11, 78, 79, 80)
@pytest.mark.parametrize("size, ending", [(64, None), (16, None), (64, "png"), (16, "jpg")])
def test_resize_makes_the_same_picture_of_each_or_names_it(size, ending, folder):
    done, copies = resized(folder, size, *(["--format", ending] if ending else []))
    taken, refused = {}, set()
    for name in sorted(VARIANTS):
        target = f"{os.path.splitext(name)[0]}.{ending}" if ending else name
        if taken.setdefault(target, name) != name:
            continue
        variant = VARIANTS[name]
        if variant.pixels is None:
            assert target not in copies
            assert sum(f"/src/{name}: " in line for line in done.stderr.splitlines()) == 1
            refused.add(name)
            continue
        image = read(copies[target])
        wanted = variant.pixels
        if variant.kind == "transparent":  # white shows through
            source = Image.open(io.BytesIO(variant.content)).convert("RGBA")
            wanted = np.asarray(Image.alpha_composite(
                Image.new("RGBA", source.size, "white"), source).convert("RGB"))
        if image.getexif().get(0x0112, 1) != 1 and "xmp" not in image.info:
            assert image.format == "JPEG"  # copied as it is
            wanted = np.asarray(Image.fromarray(variant.pixels).transpose(
                {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[image.getexif()[0x0112]]))
        if size == 16:
            height, width = wanted.shape[:2]
            smaller = (16, 24) if height > width else (24, 16)
            wanted = np.asarray(Image.fromarray(wanted).resize(smaller, Image.BILINEAR))
        pixels = np.asarray(image.convert("RGB"))
        assert pixels.shape == wanted.shape, name
        off = np.abs(pixels.astype(int) - wanted)
        is_exact = image.format in ("PNG", "BMP", "PPM", "TIFF") and size == 64
        hard = "key" in name or "alpha" in name or "GIF" in name or "palette" in name  # edges
        assert off.mean() <= (0.5 + variant.tolerance / 2 if is_exact else 12 if hard else 4), name
        assert off.max() <= variant.tolerance + (1 if is_exact else 120 if hard else 24), name
    assert len(refused) == sum(each.kind == NUMBERS for each in VARIANTS.values()) >= 9
    lines = [line for line in done.stderr.splitlines() if "the same name" not in line]
    assert len(lines) == len(refused) and "damaged" not in done.stderr.replace(
        "not a picture, damaged, or of a kind that Pillow cannot read", "")


@pytest.mark.fault(78, 80)
def test_what_resize_copied_unchanged_is_plain(folder):
    """A small picture that the scripts would not all read alike is converted, not copied."""
    _, copies = resized(folder, 64)
    same = {name for name, content in copies.items() if content == VARIANTS[name].content}
    assert {"rgb.jpg", "cmyk.jpg", "exif 6.jpg", "rgb.png", "grey 8 bits.png", "rgb.webp",
            "rgb.lossless.webp", "xmp 6.jpg"} <= same
    others = {name for name in same if VARIANTS[name].kind not in ("plain", "XMP only")}
    assert others <= {"rgb 16 bits.png"}  # Pillow and DALI take the upper 8 bits
