"""resize_imagenet.py, run as a user runs it: good pictures, bad pictures, interruptions."""

import io
import os
import re
import shutil
import signal
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from helpers import (
    HANG,
    ROOT,
    SmallDisk,
    processes_of,
    run,
    run_forked,
    start,
    wait_awhile,
    wait_until,
)

SCRIPT = ROOT / "resize_imagenet.py"
# takes the options that benchmarks/resizing.py gives to vipsthumbnail
THUMBNAIL = f"""#!{sys.executable}
import os, sys
from PIL import Image
size, output, pictures = sys.argv[2], sys.argv[4], sys.argv[5:]
assert sys.argv[1:5:2] == ["--size", "--output"] and os.environ["VIPS_CONCURRENCY"] == "1"
for path in pictures:
    image = Image.open(path)
    assert (image.width >= image.height) == size.startswith("x")
    scale = 256 / min(image.size)
    image = image.resize([round(length * scale) for length in image.size], Image.NEAREST)
    image.save(output.split("[")[0] % os.path.basename(path)[:-4], quality=90)
"""
SHARED = ROOT.parent / "shared" / "data" / "faulty"
N = 48
COLOURS = [[(200, 30, 30), (30, 200, 30)], [(30, 30, 200), (200, 200, 30)]]


def draw(width=96, height=72, seed=0):
    """Return a picture with another colour in each corner, which shows any turn, and noise."""
    pixels = np.array(COLOURS).repeat(height // 2, 0).repeat(width // 2, 1)
    noise = np.random.default_rng(seed).normal(0, 8, pixels.shape)
    return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


def encoded(image, format, **options):
    """Return a picture as the bytes of a file."""
    image.save(file := io.BytesIO(), format, **options)
    return file.getvalue()


JPEG = encoded(draw(), "JPEG", quality=90)


def turned(orientation):
    """Return a JPEG with this EXIF orientation, and the picture as it should be seen."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(draw(96, 72), "JPEG", quality=95, exif=exif)
    return content, ImageOps.exif_transpose(Image.open(io.BytesIO(content)))


def claims(width, height):
    """Return a PNG of a few bytes whose header claims `width` x `height` pixels."""

    def chunk(name, content):
        check = zlib.crc32(name + content)
        return len(content).to_bytes(4, "big") + name + content + check.to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def text_bomb():
    """Return a PNG of 400 kB with a text of 100 MB."""
    bomb = b"zTXtkey\0\0" + zlib.compress(bytes(100_000_000), 1)
    png = encoded(draw(), "PNG")
    chunk = (len(bomb) - 4).to_bytes(4, "big") + bomb + zlib.crc32(bomb).to_bytes(4, "big")
    return png[:33] + chunk + png[33:]


GREY16 = Image.fromarray(np.linspace(0, 65535, 96 * 72).reshape(72, 96).astype(np.uint16))
NOISY = Image.fromarray(np.random.default_rng(0).integers(64, 192, (150, 200, 3), dtype=np.uint8))
PALETTE = draw().convert("RGB").quantize(16)
BLOCKS = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 26, 3), dtype=np.uint8))
LARGE = BLOCKS.resize((1003, 757), Image.BICUBIC)  # JPEGs of it are decoded at 1/8 of the size
CLEAR = Image.merge("RGBA", (*draw().split(), Image.new("L", (96, 72))))  # nothing to be seen
TIFF = b"Exif\0\0MM\0*\0\0\0\x08\0"  # the start of an EXIF block
GOOD = {
    "plain.JPEG": JPEG,
    "row 6/png_inside.JPEG": encoded(draw(), "PNG"),
    "row 6/small png_inside.JPEG": encoded(draw(40, 30), "PNG"),
    "row7/cmyk.JPEG": encoded(draw().convert("CMYK"), "JPEG", quality=95),
    "row8/grey.jpg": encoded(draw().convert("L"), "JPEG"),
    "row9/rgba.png": encoded(CLEAR, "PNG"),
    "row9/la.png": encoded(CLEAR.convert("LA"), "PNG"),
    "row9/palette.png": encoded(PALETTE, "PNG", transparency=0),
    "row10/grey16.png": encoded(GREY16, "PNG"),
    **{f"row11/{i}.jpg": turned(i)[0] for i in range(1, 9)},
    "row12/bad_exif.jpg": encoded(draw(), "JPEG", quality=90, exif=TIFF + b"\x09" + b"\xff" * 20),
    "row15/small.JPEG": encoded(draw(200, 48), "JPEG", quality=77),
    "row15/smaller.png": encoded(draw(10, 8), "PNG"),
    "row15/turned.JPEG": encoded(
        draw(40, 30), "JPEG", exif=TIFF + b"\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    ),
    "row16/wide.jpg": encoded(draw(1000, 66), "JPEG"),
    "row16/line.png": encoded(Image.new("RGB", (1, 5000)), "PNG"),
    "row21/-dash and 'quote' \"two\".JPEG": JPEG,
    "row21/new\nline é 猫.JPEG": JPEG,
    "row21/" + "x" * 250 + ".JPEG": JPEG,
    "row22/" + os.fsdecode(b"caf\xe9.JPEG"): JPEG,
    **{
        f"row26/a{end}": encoded(draw(), Image.registered_extensions()[end.lower()])
        for end in (".JPEG", ".jpg", ".JPG", ".png", ".WebP", ".bmp", ".ppm", ".tif")
    },
    "row28/a.JPEG": JPEG,
    "row28/a.png": encoded(draw(), "PNG"),
    "row28/A.JPEG": encoded(draw(80, 60, seed=1), "JPEG"),
    "noisy.png": encoded(NOISY, "PNG"),
    "large.png": encoded(LARGE, "JPEG", quality=95),
    "extra bytes at the end.JPEG": JPEG[:-2] + bytes(5) + JPEG[-2:],
    "extra bytes in the header.JPEG": JPEG[:20] + b"abc" + JPEG[20:],
    "icc.jpg": encoded(
        draw(),
        "JPEG",
        icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
    ),
}
HOLE = JPEG[:-900] + bytes(range(1, 201))
CUTS = [2, 20, len(JPEG) // 4, len(JPEG) // 2, len(JPEG) - 40]
BAD = {
    "row1/zero.JPEG": b"",
    **{f"row2/cut{cut}.JPEG": JPEG[:cut] for cut in CUTS},
    "row2/half, with an end.JPEG": JPEG[: len(JPEG) // 2] + b"\xff\xd9",
    "row2/half of a small one.JPEG": (small := encoded(draw(40, 30), "JPEG"))[
        : len(small) * 3 // 4
    ],
    "row2/half.png": (png := encoded(draw(), "PNG"))[: len(png) // 2],
    "row2/hole in a large one.JPEG": (large := encoded(LARGE, "JPEG"))[:9000] + large[9500:],
    "row2/hole.JPEG": HOLE + JPEG[-700:],
    "row2/hole and a stray marker.JPEG": HOLE + JPEG[-700:-2] + b"\xff\xd4\xff\xd9",
    "row3/last_two.JPEG": JPEG[:-2],
    "row3/last_one.JPEG": JPEG[:-1],
    "row5/page.JPEG": b"<html><body>404</body></html>",
    "row13/claim.png": claims(30_000, 30_000),
    "row13/claim.JPEG": claims(30_000, 30_000),
    "row14/bomb.png": text_bomb(),
    "row22/" + os.fsdecode(b"bad\n\xe9.JPEG"): b"text",
}
IGNORED = [
    "a.txt",
    *(f"row25/{name}" for name in ("Thumbs.db", ".DS_Store", "._plain.JPEG", "none")),
]
IGNORED += ["row87/.ipynb_checkpoints/plain.JPEG"]


def write(folder, files):
    """Write {relative path: bytes} into `folder`."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def words(src, dst, max_size=N, *options):
    """Return the command line of a run with two processes."""
    options = ["--max-size", str(max_size), "--workers", "2", *options]
    return [sys.executable, SCRIPT, "--src", src, "--dst", dst, *options]


def resize(*settings):
    """Do in a fork what the command line does."""
    return run_forked(*words(*settings)[1:])


def tree(folder):
    """Return {relative path: bytes} of a folder's files, without the script's note."""
    return {
        os.path.relpath(os.path.join(where, name), folder): open(
            os.path.join(where, name), "rb"
        ).read()
        for where, _, files in os.walk(folder)
        for name in files
        if name != ".resize_imagenet.json"
    }


def is_clean(done, status):
    """Return whether a run ended with `status` and wrote only lines of its own to stderr."""
    lines = done.stderr.splitlines()
    return done.returncode == status and all(
        line.startswith("resize_imagenet.py: ") for line in lines
    )


@pytest.fixture(scope="module")
def album(tmp_path_factory):
    """Return one run over GOOD, BAD, IGNORED and links of all kinds, with its `files`."""
    done, folder = SimpleNamespace(), tmp_path_factory.mktemp("album")
    done.src, done.dst, elsewhere = folder / "src", folder / "dst", folder / "elsewhere"
    write(done.src, GOOD | BAD | dict.fromkeys(IGNORED, JPEG))
    write(elsewhere, {"in/folder.JPEG": JPEG, "file": JPEG})
    (links := done.src / "row24").mkdir()
    (links / "file.JPEG").symlink_to(elsewhere / "file")
    (links / "folder").symlink_to(elsewhere / "in")
    (links / "same folder").symlink_to(elsewhere / "in")
    (links / "loop").symlink_to(links)
    (links / "dangling.JPEG").symlink_to("nowhere")
    (links / "itself").symlink_to("itself")
    if SHARED.is_dir():
        shutil.copytree(SHARED, done.src / "shared")
    done.run = resize(done.src, done.dst)
    done.files = tree(done.dst)
    return done


def picture(album, name):
    """Return an output of the album, decoded and turned as a viewer shows it."""
    image = Image.open(io.BytesIO(album.files[name]))
    image.load()
    return ImageOps.exif_transpose(image)


def difference(one, other):
    """Return the mean difference of two pictures of the same size, 0 to 255."""
    assert one.size == other.size
    return np.abs(np.asarray(one, dtype=float) - np.asarray(other, dtype=float)).mean()


def test_all_good_pictures_are_done(album):
    assert is_clean(album.run, 1), album.run.stderr
    ours = {name for name in album.files if not name.startswith("shared")}
    assert ours == {
        *GOOD,
        *(f"row24/{name}.JPEG" for name in ("file", "folder/folder", "same folder/folder")),
    }
    bad = [line for line in album.run.stderr.splitlines() if f"{album.src}/shared" not in line]
    assert len(bad) == len(BAD) + 2  # and two links
    assert not [name for name in os.listdir(album.dst) if name.endswith(".part")]


def test_an_icc_profile_is_kept(album):
    profile = picture(album, "icc.jpg").info["icc_profile"]
    assert profile == Image.open(io.BytesIO(GOOD["icc.jpg"])).info["icc_profile"]


@pytest.mark.fault(
    "empty image",
    "image cut in half",
    "JPEG without its end",
    "text named as an image",
    "header of a huge image",
    "PNG text bomb",
    "name that is not UTF-8",
)
def test_bad_pictures_are_named_and_left_out(album):
    lines = album.run.stderr.splitlines()
    for name in BAD:
        assert name not in album.files
        path = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)
        assert len([line for line in lines if f"{album.src}/{path}: " in line]) == 1, name
    assert r"/row22/bad\n\udce9.JPEG: " in album.run.stderr
    assert "30000x30000" in album.run.stderr


def test_extra_bytes_are_harmless(album):
    """Some real pictures have up to three bytes too many before the end, or some in the header."""
    for name in ("extra bytes at the end.JPEG", "extra bytes in the header.JPEG"):
        assert album.files[name] == album.files["plain.JPEG"]


def test_a_large_jpeg_looks_as_if_decoded_in_full(album):
    """Its sides are no multiples of 8, the scale at which it is decoded."""
    image, whole = picture(album, "large.png"), Image.open(io.BytesIO(GOOD["large.png"]))
    assert difference(image, whole.resize(image.size, Image.BICUBIC)) < 1


@pytest.mark.fault("PNG named as a JPEG")
def test_a_png_named_jpeg_becomes_a_jpeg(album):
    for name, size in (("png_inside", (64, 48)), ("small png_inside", (40, 30))):
        image = picture(album, f"row 6/{name}.JPEG")
        assert (image.format or "JPEG", image.mode, image.size) == ("JPEG", "RGB", size)
        assert album.files[f"row 6/{name}.JPEG"][:3] == b"\xff\xd8\xff"


@pytest.mark.fault("CMYK JPEG")
def test_cmyk_becomes_rgb_of_the_same_colours(album):
    image = picture(album, "row7/cmyk.JPEG")
    assert image.mode == "RGB"
    assert difference(image, draw().resize((64, 48), Image.BICUBIC)) < 12


@pytest.mark.fault("grey JPEG")
def test_grey_stays_grey(album):
    image = picture(album, "row8/grey.jpg")
    assert image.mode == "L"
    assert difference(image, draw().convert("L").resize((64, 48), Image.BICUBIC)) < 4


@pytest.mark.fault("transparent image")
def test_transparency_is_filled_with_white(album):
    for name in ("rgba", "la"):
        image = picture(album, f"row9/{name}.png")
        assert image.mode == "RGB" and image.getextrema() == ((255, 255),) * 3
    assert picture(album, "row9/palette.png").mode == "RGB"


@pytest.mark.fault("16-bit PNG")
def test_16_bits_are_scaled_to_8(album):
    image = picture(album, "row10/grey16.png")
    wanted = Image.fromarray((np.asarray(GREY16) / 257).round().astype(np.uint8))
    assert image.mode == "L"
    assert difference(image, wanted.resize((64, 48), Image.BICUBIC)) < 1


@pytest.mark.fault("EXIF orientation")
def test_exif_rotation_is_kept_true(album):
    for i in range(1, 9):
        image, wanted = picture(album, f"row11/{i}.jpg"), turned(i)[1]
        wanted = wanted.resize((48, 64) if i > 4 else (64, 48), Image.BICUBIC)
        assert difference(image, wanted) < 4, i


@pytest.mark.fault("corrupt EXIF")
def test_a_corrupt_exif_block_does_no_harm(album):
    assert difference(picture(album, "row12/bad_exif.jpg"), picture(album, "plain.JPEG")) == 0


@pytest.mark.fault("small enough already")
def test_small_pictures_are_copied(album):
    for name in ("small.JPEG", "smaller.png", "turned.JPEG"):
        assert album.files[f"row15/{name}"] == GOOD[f"row15/{name}"]


@pytest.mark.fault("very long image")
def test_thin_pictures_keep_their_shape(album):
    assert picture(album, "row16/wide.jpg").size == (727, 48)  # 1000 * 48 / 66 = 727.3
    assert picture(album, "row16/line.png").size == (1, 5000)


@pytest.mark.fault("wrong --max-size")
@pytest.mark.parametrize(
    "option, value",
    [
        *(("--max-size", value) for value in ("0", "-5", "abc", "1.5", "")),
        *(("--quality", value) for value in ("0", "101")),
        ("--workers", "0"),
    ],
)
def test_wrong_options(tmp_path, option, value):
    write(tmp_path / "src", {"a.JPEG": JPEG})
    done = run(*words(tmp_path / "src", tmp_path / "dst", N, option, value))
    assert is_clean(done, 2) and len(done.stderr.splitlines()) == 1, done.stderr
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.fault("source and target overlap")
def test_src_and_dst_must_be_apart(tmp_path):
    """One inside the other is refused, also through a link or `..`."""
    write(tmp_path / "src", {"a/b.JPEG": JPEG})
    (tmp_path / "link").symlink_to(tmp_path / "src")
    before = tree(tmp_path)
    for src, dst in (
        ("src", "src"),
        ("src", "src/new"),
        ("src/a", "src"),
        ("src", "link"),
        ("src", "link/a"),
        ("link", "src"),
        ("src", "src/a/../new"),
    ):
        done = run(*words(tmp_path / src, tmp_path / dst))
        assert is_clean(done, 2) and len(done.stderr.splitlines()) == 1, (src, dst)
    assert tree(tmp_path) == before and not (tmp_path / "src" / "new").exists()


@pytest.mark.fault("no images in the source")
def test_src_without_pictures_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "texts", {"a/b.txt": b"text"})
    for src in ("missing", "empty", "texts", "texts/a/b.txt"):
        done = run(*words(tmp_path / src, tmp_path / "dst"))
        assert is_clean(done, 2) and str(tmp_path / src) in done.stderr
    assert not (tmp_path / "dst").exists()


def check_refused_as_dst(folder, places):
    """Check that each of these places is refused in one line and that nothing changes."""
    before = tree(folder)
    for dst in places:
        done = run(*words(folder / "src", folder / dst))
        assert done.returncode in (1, 2) and is_clean(done, done.returncode), done.stderr
        assert len(done.stderr.splitlines()) == 1 and str(folder / dst) in done.stderr
    assert tree(folder) == before


@pytest.mark.fault("unusable target folder")
def test_dst_that_holds_something_else(tmp_path):
    write(tmp_path, {"src/a.JPEG": JPEG, "file": b"mine", "full/mine.txt": b"mine"})
    check_refused_as_dst(tmp_path, ["file", "file/in", "full"])


@pytest.mark.fault("unusable target folder")
def test_dst_that_is_read_only(tmp_path):
    write(tmp_path, {"src/a.JPEG": JPEG})
    with SmallDisk(tmp_path / "closed", 1024) as disk:
        disk.make_read_only()
        check_refused_as_dst(tmp_path, ["closed", "closed/in"])


@pytest.mark.fault("odd file names", "name that is not UTF-8")
def test_unusual_names_are_kept(album):
    for name in (name for name in GOOD if name.startswith(("row21", "row22"))):
        assert picture(album, name).size == (64, 48)


@pytest.mark.fault("symbolic links")
def test_links_are_followed_and_loops_end(album):
    lines = [line for line in album.run.stderr.splitlines() if "/row24/" in line]
    assert len(lines) == 2
    assert all(any(name in line for line in lines) for name in ("dangling.JPEG", "itself"))
    assert album.files["row24/file.JPEG"] == album.files["plain.JPEG"]
    assert not any((album.dst / name).is_symlink() for name in album.files)


@pytest.mark.fault("other files among the images")
def test_other_files_are_ignored(album):
    assert not any(name in album.files or name in album.run.stderr for name in IGNORED)


@pytest.mark.fault("endings in any case")
def test_every_ending_keeps_its_format(album):
    for name in (name for name in GOOD if name.startswith("row26")):
        image = Image.open(io.BytesIO(album.files[name]))
        assert image.size == (64, 48)
        assert image.format == Image.open(io.BytesIO(GOOD[name])).format


@pytest.mark.fault("two images for one output")
def test_every_source_has_its_own_output(album):
    """Names never change, so only a disk without upper and lower case can mix them up."""
    sizes = {name: picture(album, f"row28/{name}").size for name in ("a.JPEG", "a.png", "A.JPEG")}
    is_case_told = not (album.src / "PLAIN.jpeg").exists()
    assert len({album.files[f"row28/{name}"] for name in sizes}) == 3 - (not is_case_told)


@pytest.mark.fault("two images for one output")
def test_sources_that_would_share_an_output(tmp_path):
    """The note's name in capitals stands for a disk on which a and A are the same name."""
    src, dst = tmp_path / "src", tmp_path / "dst"
    names = "a.JPEG A.JPEG b.JPEG d/c.JPEG D/c.JPEG B.txt e.txt E.txt f.JPEG F/f.JPEG".split()
    write(src, dict.fromkeys(names, JPEG))
    write(dst, {".RESIZE_IMAGENET.JSON": b""})
    done = resize(src, dst)
    assert is_clean(done, 1) and done.stderr.count("would have the same name as") == 2
    made = [name for name in tree(dst) if name.endswith("JPEG")]
    assert sorted(made) == ["A.JPEG", "D/c.JPEG", "F/f.JPEG", "b.JPEG", "f.JPEG"]


@pytest.mark.fault("image cut in half", "EXIF orientation", "corrupt EXIF", "PNG text bomb")
def test_real_faulty_files(album):
    if not SHARED.is_dir():
        pytest.skip("needs the pictures of ../shared/data/faulty")
    bad = {"truncated_jpeg.jpg", "broken.png", "truncated_image.png", "broken_data_stream.png"}
    bad |= {"truncated_end_chunk.png", "hopper_bad_exif.jpg"}  # its pixels are damaged, too
    for name in os.listdir(album.src / "shared"):
        is_named = f"{album.src}/shared/{name}: " in album.run.stderr
        is_picture = not name.endswith((".gif", ".pillow-tests"))
        assert is_named == (name in bad), name
        assert (f"shared/{name}" in album.files) == (is_picture and name not in bad), name
    source = ImageOps.exif_transpose(Image.open(album.src / "shared/n02951585_can_opener.JPEG"))
    image = picture(album, "shared/n02951585_can_opener.JPEG")
    assert difference(image, source.resize(image.size, Image.BICUBIC)) < 4


def psnr(pixels, wanted):
    return 10 * np.log10(255**2 / np.mean((pixels.astype(float) - wanted) ** 2))


def test_the_resize_is_as_exact_as_pillows(album):
    """Both are compared with the bicubic filter in float64; no value is cut off at 0 or 255."""
    wanted = np.asarray(NOISY, dtype=np.float64)
    for axis, size in ((1, 64), (0, N)):
        scale = wanted.shape[axis] / size
        places = (np.arange(size)[:, None] + 0.5) * scale
        away = np.abs(np.arange(wanted.shape[axis])[None] + 0.5 - places) / scale
        near, far = 1.5 * away**3 - 2.5 * away**2 + 1, -0.5 * away**3 + 2.5 * away**2 - 4 * away + 2
        weights = np.where(away < 1, near, np.where(away < 2, far, 0))
        weights /= weights.sum(1, keepdims=True)
        wanted = np.moveaxis(np.tensordot(weights, wanted, (1, axis)), 0, axis)
    ours = psnr(np.asarray(picture(album, "noisy.png")), wanted)
    pillows = psnr(np.asarray(NOISY.resize((64, N), Image.BICUBIC)), wanted)
    assert ours > 55 and ours > pillows - 0.05


def test_without_the_fast_resizer_pillow_makes_the_same(tmp_path):
    """As on a machine that cykooz_resizer has no wheel for."""
    files = {
        name: GOOD[name]
        for name in ("noisy.png", "large.png", "row8/grey.jpg", "row9/rgba.png", "row16/wide.jpg")
    }
    write(tmp_path, {f"src/{name}": content for name, content in files.items()})
    missing = b"open(__file__ + '.tried', 'w')\nraise ImportError"
    write(tmp_path, {"none/cykooz_resizer.py": missing})
    assert is_clean(resize(tmp_path / "src", tmp_path / "fast"), 0)
    done = run(
        *words(tmp_path / "src", tmp_path / "slow"),
        env=os.environ | {"PYTHONPATH": str(tmp_path / "none")},
    )
    assert is_clean(done, 0)
    one, other = tree(tmp_path / "fast"), tree(tmp_path / "slow")
    assert one.keys() == other.keys() == files.keys()
    for name in files:
        images = [Image.open(io.BytesIO(content)) for content in (one[name], other[name])]
        assert images[0].mode == images[1].mode and difference(*images) < 1, name
    assert (tmp_path / "none/cykooz_resizer.py.tried").exists()


def test_the_benchmark_compares_times_and_pictures(tmp_path):
    """THUMBNAIL takes the nearest pixel, so its pictures are farther from Pillow's bicubic."""
    write(
        tmp_path,
        {
            "photos/wide.JPEG": encoded(draw(500, 376), "JPEG", quality=95),
            "photos/a/high.jpg": encoded(draw(376, 500, seed=1), "JPEG", quality=95),
            "bin/vipsthumbnail": THUMBNAIL.encode(),
        },
    )
    (tmp_path / "bin/vipsthumbnail").chmod(0o755)
    words = [tmp_path / "photos", "--runs", "3", "--pictures", "5", "2"]
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    variables = {"PATH": path, "TMPDIR": str(tmp_path)}
    done = run(sys.executable, ROOT / "benchmarks/resizing.py", *words, env=variables)
    assert done.returncode == 0, done.stderr
    ratio = r"[\d.]+x \([\d.]+ to [\d.]+\)"
    times = r"[\d.]+ s \([\d.]+ [\d.]+ [\d.]+\), CPU [\d.]+ s, difference (.*)"
    for name, count in (("photos", 5), ("large", 2)):
        found = re.search(
            rf"^{name}, {count} pictures, n=3: {ratio}, CPU {ratio}\n"
            rf"  resize_imagenet.py: {times}\n  vipsthumbnail: {times}$",
            done.stdout,
            re.MULTILINE,
        )
        assert found and 0 < float(found[1]) < float(found[2]), done.stdout


# ------------------------------------------------------------------------ faults during a run
@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Return a set that takes a second or more, with the tree that one clean run makes of it."""
    many = SimpleNamespace()
    many.src = tmp_path_factory.mktemp("many") / "src"
    contents = [encoded(draw(1200, 900, seed), "JPEG", quality=95) for seed in range(5)]
    write(many.src, {f"class{i % 7}/{i}.JPEG": contents[i % 5] for i in range(200)})
    dst = many.src.parent / "clean"
    assert is_clean(resize(many.src, dst), 0)
    many.tree = tree(dst)
    assert len(many.tree) == 200
    return many


def begun(many, dst, **options):
    """Return a run that has written its first picture and goes on."""
    process = start(words(many.src, dst), **options)
    wait_until(lambda: any(dst.glob("class*/*")) or process.poll() is not None)
    assert process.poll() is None
    return process


@pytest.mark.fault("kill while resizing")
def test_killed_5_times_then_run_again(many, rng, tmp_path):
    dst, times = tmp_path / "dst", {}

    def made():
        return {os.path.relpath(path, dst) for path in dst.glob("class*/*")}

    for number in range(5):
        process = start(words(many.src, dst))
        if number % 4:  # else as it starts
            wait_until(lambda: len(made()) > len(times))
        wait_awhile(rng.uniform(0, 0.05 if number % 4 else 1), lambda: len(made()) > len(times) + 5)
        assert process.poll() is None
        process.kill()
        process.communicate()
        wait_until(lambda: not processes_of(dst))  # no orphans
        there = tree(dst)
        for name, content in there.items():
            if ".part" not in name:
                assert content == many.tree[name]
        now = {name: (dst / name).stat().st_ctime_ns for name in there if ".part" not in name}
        assert all(now[name] == times[name] for name in times)  # what was finished is not redone
        times = now
    done = resize(many.src, dst)
    assert is_clean(done, 0) and f"{len(times):,} were there" in done.stdout
    assert tree(dst) == many.tree and len(times) < len(many.tree)


@pytest.mark.fault("Ctrl-C")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopped(many, tmp_path, stop):
    """Ctrl-C reaches all processes of the run, SIGTERM only the first."""
    process = begun(many, tmp_path / "dst", start_new_session=True)
    if stop == signal.SIGINT:
        os.killpg(process.pid, stop)  # as a terminal does: to the workers too
    else:
        process.send_signal(stop)
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 1
    assert [*map(str.split, err.splitlines())][-1][:2] == ["resize_imagenet.py:", "stopped;"]
    assert len(err.splitlines()) == 1
    assert not processes_of(tmp_path / "dst")
    there = tree(tmp_path / "dst")
    assert there.items() <= many.tree.items() and len(there) < len(many.tree)
    assert not list((tmp_path / "dst").glob(".*.part"))


def test_a_killed_worker_ends_the_run_in_one_line(many, tmp_path):
    process = begun(many, tmp_path / "dst")
    worker = next(each for each in processes_of(tmp_path / "dst") if each.pid != process.pid)
    worker.kill()
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 1 and len(err.splitlines()) == 1 and "worker was killed" in err
    assert not processes_of(tmp_path / "dst")
    assert tree(tmp_path / "dst").items() <= many.tree.items()


@pytest.mark.fault("another --max-size")
def test_other_settings_are_refused(album):
    for size, options in ((N + 1, ()), (N, ("--quality", "80"))):
        done = run(*words(album.src, album.dst, size, *options))
        assert is_clean(done, 2) and len(done.stderr.splitlines()) == 1
        assert "was made with the settings" in done.stderr
    assert tree(album.dst) == album.files


@pytest.mark.fault("source changed since")
def test_a_changed_source_is_redone(tmp_path):
    files = {f"{i}.JPEG": encoded(draw(seed=i), "JPEG") for i in range(5)}
    src, dst = tmp_path / "src", tmp_path / "dst"
    write(src, files)
    assert is_clean(resize(src, dst), 0)
    before, times = tree(dst), {path.name: path.stat().st_ctime_ns for path in dst.glob("*.JPEG")}
    old = (src / "1.JPEG").stat()
    write(src, {"0.JPEG": encoded(draw(seed=9), "JPEG"), "2.JPEG": b"text"})
    write(src, {"1.JPEG": encoded(draw(120, 90), "JPEG")})
    os.utime(src / "1.JPEG", ns=(old.st_atime_ns, old.st_mtime_ns))  # of another size only
    done = resize(src, dst)
    assert is_clean(done, 1) and "2.JPEG" in done.stderr and "2 were there" in done.stdout
    after = tree(dst)
    assert sorted(after) == ["0.JPEG", "1.JPEG", "3.JPEG", "4.JPEG"]
    assert after["0.JPEG"] != before["0.JPEG"] and after["1.JPEG"] != before["1.JPEG"]
    for name in ("3.JPEG", "4.JPEG"):
        assert (dst / name).stat().st_ctime_ns == times[name]


@pytest.mark.fault("full disk")
def test_a_full_disk(many, tmp_path):
    with SmallDisk(tmp_path / "disk", 400, 512) as disk:
        done = run(*words(many.src, disk.folder / "dst"), **disk.options)
        assert is_clean(done, 1) and len(done.stderr.splitlines()) == 1, done.stderr
        assert "cannot write" in done.stderr and "run it again" in done.stderr
        assert tree(disk.folder).keys() <= {f"dst/{name}" for name in many.tree}
        assert all(
            many.tree[name.removeprefix("dst/")] == content
            for name, content in tree(disk.folder).items()
        )
        disk.make_room()
        assert is_clean(resize(many.src, disk.folder / "dst"), 0)
        assert tree(disk.folder / "dst") == many.tree
