"""The same picture in over 100 kinds of files: what each script reads, and what it refuses."""

import io
import os
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import ROOT, SRC, TINY, assert_one_line, flags, run_forked, tiny
from picture_variants import RGB, TURN, XMP, save, variants
from runs import module_of
from test_data_sources import keeping_batches

VARIANTS = {variant.name: variant for variant in variants()}
NUMBERS = "float, signed or 32 bits"  # the kind that every script refuses
every_kind = pytest.mark.fault(
    "PNG named as a JPEG",
    "CMYK JPEG",
    "grey JPEG",
    "transparent image",
    "16-bit PNG",
    "EXIF orientation",
    "PGM, PPM and 16 bits",
    "float and 32-bit TIFF",
    "format that DALI cannot read",
)


def resized(folder, size, *options):
    """Run resize_imagenet.py on all variants; return (its process, {name: bytes} of its copies)."""
    src = folder / "src"
    if not src.exists():
        src.mkdir()
        for variant in VARIANTS.values():
            (src / variant.name).write_bytes(variant.content)
    dst = folder / f"dst {size} {' '.join(options)}"
    words = ["--src", src, "--dst", dst, "--max-size", size, "--workers", 2, "--quality", 95]
    done = run_forked(ROOT / "resize_imagenet.py", *words, *options)
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


@pytest.mark.fault(
    "transparent image",
    "16-bit PNG",
    "EXIF orientation",
    "PGM, PPM and 16 bits",
    "float and 32-bit TIFF",
    "format that DALI cannot read",
)
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
            wanted = np.asarray(
                Image.alpha_composite(Image.new("RGBA", source.size, "white"), source).convert(
                    "RGB"
                )
            )
        if image.getexif().get(0x0112, 1) != 1 and "xmp" not in image.info:
            assert image.format == "JPEG"  # copied as it is
            wanted = np.asarray(
                Image.fromarray(variant.pixels).transpose(
                    {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[image.getexif()[0x0112]]
                )
            )
        if size == 16:
            height, width = wanted.shape[:2]
            smaller = (16, 24) if height > width else (24, 16)
            wanted = np.asarray(Image.fromarray(wanted).resize(smaller, Image.BICUBIC))
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
        "not a picture, damaged, or of a kind that Pillow cannot read", ""
    )


@pytest.mark.fault("PGM, PPM and 16 bits", "format that DALI cannot read")
def test_what_resize_copied_unchanged_is_plain(folder):
    """A small picture that the scripts would not all read alike is converted, not copied."""
    _, copies = resized(folder, 64)
    same = {name for name, content in copies.items() if content == VARIANTS[name].content}
    assert {
        "rgb.jpg",
        "cmyk.jpg",
        "exif 6.jpg",
        "rgb.png",
        "grey 8 bits.png",
        "rgb.webp",
        "rgb.lossless.webp",
        "xmp 6.jpg",
    } <= same
    others = {name for name in same if VARIANTS[name].kind not in ("plain", "XMP only")}
    assert others <= {"rgb 16 bits.png"}  # Pillow and DALI take the upper 8 bits


def jpeg_with(*blocks, header=b"Exif\0\0"):
    """Return a JPEG with these EXIF blocks."""
    plain = save(RGB, "JPEG", quality=95, subsampling=0)
    return (
        plain[:2]
        + b"".join(
            b"\xff\xe1" + struct.pack(">H", len(header + block) + 2) + header + block
            for block in blocks
        )
        + plain[2:]
    )


def png_with(name, content):
    """Return a PNG with one more chunk after its header."""
    plain = save(RGB, "PNG")
    return (
        plain[:33]
        + struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
        + plain[33:]
    )


def block(turn, form=3, entries=1):
    """Return an EXIF block of one number, whose type is `form`."""
    packed = struct.pack("<H" if form == 3 else "<B", turn).ljust(4, b"\0")
    return struct.pack("<2sHIHHHI", b"II", 42, 8, entries, 0x0112, form, 1) + packed + bytes(4)


RAW = b"Raw profile type exif\0"  # as ImageMagick wrote EXIF into a PNG
HEX = (b"Exif\0\0" + block(6)).hex().encode()
ODD = {  # {name: (file, the orientation that Pillow finds)}; DALI finds another one
    "a header twice.jpg": (jpeg_with(block(6), header=b"Exif\0\0Exif\0\0"), 6),
    "two blocks.jpg": (jpeg_with(block(6), block(1)), 6),
    "a byte.jpg": (jpeg_with(block(6, form=1)), 1),
    "cut short.jpg": (jpeg_with(block(6, entries=500)), 6),
    "text.png": (png_with(b"tEXt", RAW + b"\nexif\n%8d\n" % (len(HEX) // 2) + HEX), 6),
    "broken text.png": (png_with(b"tEXt", RAW + b"\nexif\n 99\n??\n"), 1),
    "long text.png": (png_with(b"zTXt", b"workflow\0\0" + zlib.compress(bytes(3 * 2**20))), 1),
}


@pytest.mark.fault("EXIF orientation", "corrupt EXIF")
def test_resize_does_not_copy_what_scripts_turn_differently(tmp_path):
    """Reports: Pillow#8348, #4460 and #8363."""
    plain = {
        "plain.jpg": jpeg_with(block(6)),
        "none.jpg": jpeg_with(),
        "xmp.png": png_with(b"tEXt", RAW.replace(b"exif", b"xmp") + XMP),
    }
    (tmp_path / "src").mkdir()
    for name, content in (plain | {name: content for name, (content, _) in ODD.items()}).items():
        (tmp_path / "src" / name).write_bytes(content)
    done, copies = resized(tmp_path, 64)
    assert done.returncode == 0 and copies.keys() == plain.keys() | ODD.keys(), done.stderr
    assert {
        name for name in copies if copies[name] == (tmp_path / "src" / name).read_bytes()
    } == plain.keys()
    for name, (_, turn) in ODD.items():
        image = Image.open(io.BytesIO(copies[name]))
        assert not {"exif", "Raw profile type exif", "workflow"} & image.info.keys()
        off = np.abs(np.asarray(image).astype(int) - TURN[turn](RGB))
        assert off.max() <= 12, name


@pytest.mark.fault("empty image", "image cut in half")
def test_resize_names_a_png_with_a_wrong_checksum(tmp_path):
    """Report: Pillow#5800. Pillow reads one, DALI does not."""
    plain = save(RGB, "PNG")
    at = plain.index(b"IDAT")
    at += 4 + int.from_bytes(plain[at - 4 : at], "big")  # the checksum
    (tmp_path / "src").mkdir()
    for name, content in {
        "plain.png": plain,
        "longer.png": plain + b"more",
        "sum.png": plain[:at] + bytes([plain[at] ^ 1]) + plain[at + 1 :],
        "end.png": plain[:-12],
    }.items():
        (tmp_path / "src" / name).write_bytes(content)
    done, copies = resized(tmp_path, 64)
    assert done.returncode == 1 and copies.keys() == {"plain.png", "longer.png"}
    assert sorted(line.split("/src/")[1][:25] for line in done.stderr.splitlines()) == [
        "end.png: damaged or cut s",
        "sum.png: damaged or cut s",
    ]  # two processes report


# -------------------------------------------------------------------------------- the scripts
def cut(pixels):
    """Return the center square of 32 pixels as a tensor (3, 32, 32)."""
    top, left = (edge // 2 - 16 for edge in pixels.shape[:2])
    return torch.from_numpy(pixels[top : top + 32, left : left + 32].copy()).permute(2, 0, 1).int()


def has_few_bits(variant):
    """Return whether an image is a PNG of less than 8 bits, which DALI reads wrong on a GPU."""
    return variant.content[:1] == b"\x89" and variant.content[24] < 8


def is_refused(name, dali, on_gpu=False):
    """Return whether scripts have to refuse a variant, DALI's or the others."""
    variant = VARIANTS[name]
    if not dali:
        image = Image.open(io.BytesIO(variant.content)) if variant.pixels is not None else None
        return image is None or image.mode[0] == "I"  # 16 bits of grey
    first = variant.content[:1]
    return (
        on_gpu
        and has_few_bits(variant)
        or first in b"PIMG"
        or "AVIF" in name
        or name == "16 bits a pixel.bmp"
    )


def check(name, dali, read):
    """Check that read(), of a variant, gives the right pixels, or an error that names it."""
    try:
        pixels = read()
    except OSError as error:
        assert name in str(error) and len(str(error).splitlines()) == 1
        assert "damaged" not in str(error) or name in ("half.tif", "double.tif", "float rgb.tif")
        assert is_refused(name, dali) or dali and VARIANTS[name].kind == "lossless WebP with EXIF"
    else:
        assert not is_refused(name, dali), name
        off = (pixels.int() - cut(VARIANTS[name].pixels)).abs().max()
        assert off <= VARIANTS[name].tolerance + (2 if dali else 0), (name, off)


@every_kind
@pytest.mark.parametrize("name", ["train", "train_LMDB", "loader", "loader_LMDB"])
def test_pillows_scripts_read_it_or_name_it(name, folder):
    resized(folder, 64)  # writes the variants
    module = module_of(SRC / f"{name}.py")
    for variant in VARIANTS:
        path = folder / "src" / variant
        arguments = (path, path) if "loader" in name else (path,)
        check(variant, False, lambda: cut(np.asarray(module.load_image(*arguments))))  # noqa: B023


def dali_dataset(folder):
    """Return train_DALI.py and a dataset of one image, after writing the variants."""
    resized(folder, 64)
    (folder / "set/a").mkdir(parents=True, exist_ok=True)
    (folder / "set/a/rgb.png").write_bytes(VARIANTS["rgb.png"].content)
    module = module_of(SRC / "train_DALI.py")
    return module, module.datasets.ImageFolder(folder / "set")


@every_kind
def test_dali_reads_it_or_names_it(folder):
    module, dataset = dali_dataset(folder)
    for variant in VARIANTS:
        dataset.samples[0] = str(folder / "src" / variant), 0

        def read():
            loader = module.DALILoader(dataset, 32, "none", False, 0, batch_size=1)
            ((images, _),) = loader
            return images[0]

        check(variant, True, read)


@pytest.mark.gpu
@every_kind
def test_dali_reads_it_or_names_it_on_a_gpu(folder):
    """What it reads comes from one pipeline; of what it refuses, one of each kind is tried."""
    module, dataset = dali_dataset(folder)
    read, refused = [], {}
    for name, variant in VARIANTS.items():
        if is_refused(name, True, on_gpu=True):
            refused["few bits" if has_few_bits(variant) else variant.kind] = name
        elif variant.kind != "lossless WebP with EXIF":  # DALI may refuse these
            read.append(name)
    dataset.samples = [(str(folder / "src" / name), 0) for name in read]
    dataset.targets = [0] * len(read)
    loader = module.DALILoader(dataset, 32, "none", True, 0, batch_size=1)
    off = {
        name: (images[0].cpu().int() - cut(VARIANTS[name].pixels)).abs().max().item()
        for name, (images, _) in zip(read, loader, strict=True)
    }
    # a GPU's decoder spreads the colours of a JPEG otherwise
    assert not {name: most for name, most in off.items() if most > VARIANTS[name].tolerance + 4}
    assert len(refused) > 3 and "few bits" in refused
    dataset.targets = [0]
    for name in refused.values():
        dataset.samples = [(str(folder / "src" / name), 0)]
        with pytest.raises(OSError, match=re.escape(name)):
            list(module.DALILoader(dataset, 32, "none", True, 0, batch_size=1))


def classes_of(folder, names):
    """Write a dataset with a class for each of the variants `names`, so that labels tell them."""
    for split in ("train", "val"):
        for i, name in enumerate(names):
            (folder / split / f"{i:03}").mkdir(parents=True)
            (folder / split / f"{i:03}" / name).write_bytes(VARIANTS[name].content)
    return folder


@pytest.mark.fault("PGM, PPM and 16 bits", "float and 32-bit TIFF", "format that DALI cannot read")
@pytest.mark.parametrize(
    "name",
    ["loader", "loader_DALI", "loader_LMDB", "train", "train_DALI", "train_LMDB", "train_cache"],
)
def test_what_is_not_refused_in_one_run(name, tmp_path):
    dali = "DALI" in name
    names = [
        each
        for each in VARIANTS
        if not is_refused(each, dali)
        and not (dali and VARIANTS[each].kind == "lossless WebP with EXIF")
    ]
    data = classes_of(tmp_path / "set", names)
    if "loader" in name:
        target = tmp_path / "batches.pt"
        options = flags(dataset=data, split="test", resize=0, image_size=32, epochs=1, workers=1)
        words = [ROOT / "tests/capture.py", target, SRC / f"{name}.py", *options]
        done = run_forked(*words, "--result_dir", tmp_path / "r")
        assert done.returncode == 0, done.stderr
        batches = torch.load(target)[0]
    else:
        script = keeping_batches(SRC / f"{name}.py", tmp_path)
        done = run_forked(script, *tiny(data, tmp_path, image_size=32, epochs=1, batch_size=8))
        assert done.returncode == 0, done.stderr
        ((_, batches),) = [each for each in torch.load(tmp_path / "0.batches") if each[0] == "val"]
    images, labels = (torch.cat(parts) for parts in zip(*batches))
    assert sorted(labels.tolist()) == list(range(len(names))) and len(names) > 75
    for image, label in zip(images.int(), labels.tolist()):
        off = (image - cut(VARIANTS[names[label]].pixels)).abs().max()
        assert off <= VARIANTS[names[label]].tolerance + (2 if dali else 0), (names[label], off)


REFUSED = ["grey 16 bits.png", "int32.tif", "float to 1.tif", "maximum 15.pgm", "GIF named.jpg"]
REFUSED += ["AVIF named.png", "1 bit.tif", "exif 1.lossless.webp", "half.tif"]


@pytest.mark.fault("PGM, PPM and 16 bits", "float and 32-bit TIFF", "format that DALI cannot read")
@pytest.mark.parametrize(
    "name, variant",
    [
        *((name, variant) for name in ("train_DALI", "loader_DALI") for variant in REFUSED[1:]),
        *((name, variant) for name in ("train", "loader", "train_LMDB") for variant in REFUSED[:3]),
    ],
)
def test_a_refused_picture_is_one_line_that_names_it(name, variant, tmp_path):
    data = classes_of(tmp_path / "set", ["rgb.png", "grey.png", "rgb.jpg", "exif 6.jpg"])
    for split in ("train", "val"):
        (data / split / "001" / variant).write_bytes(VARIANTS[variant].content)
    sizes = ["--resize", 0, "--image_size", 32, "--workers", 1, "--epochs", 1, "--batch_size", 4]
    if "train" in name:
        sizes = [*TINY, "--batch_size", 4, "--image_size", 32]
    done = run_forked(SRC / f"{name}.py", "--dataset", data, *sizes, "--result_dir", tmp_path / "r")
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"{name}.py: error: ")]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert variant in lines[0] and "Traceback" not in done.stderr
    if "DALI" in name and variant not in ("int32.tif", "float to 1.tif", "half.tif"):
        assert "resize_imagenet.py" in lines[0] and "damaged" not in lines[0]


@pytest.mark.fault("format that DALI cannot read")
def test_dali_reads_what_resize_makes(folder, tmp_path):
    """`--format png` is the way out of each refusal that tells of it."""
    _, copies = resized(folder, 64, "--format", "png")
    module = module_of(SRC / "train_DALI.py")
    (tmp_path / "a").mkdir()
    for name, content in copies.items():
        assert content[24] == 8, name  # bits: on a GPU, DALI shows a PNG of fewer wrong
        (tmp_path / "a" / name).write_bytes(content)
    dataset = module.datasets.ImageFolder(tmp_path)
    loader = module.DALILoader(dataset, 32, "none", False, 0, batch_size=10)
    assert sum(len(images) for images, _ in loader) == len(copies) > 70


@pytest.mark.fault("other folder layouts")
@pytest.mark.parametrize("name", ["train", "loader"])
def test_a_very_thin_picture_is_refused_before_it_is_resized(name, tmp_path):
    data = classes_of(tmp_path / "set", ["rgb.png", "grey.png"])
    for split in ("train", "val"):
        Image.new("RGB", (20_000, 1)).save(data / split / "001/thin.png")
    sizes = (
        ["--resize", 224, "--epochs", 1, "--workers", 0]
        if name == "loader"
        else [*TINY, "--image_size", 224, "--batch_size", 3]
    )
    done = run_forked(SRC / f"{name}.py", "--dataset", data, *sizes, "--result_dir", tmp_path / "r")
    assert_one_line(done, 1, "thin.png", "100 times as long as wide")
