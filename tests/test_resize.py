"""resize_imagenet.py as a user runs it: on good pictures, bad ones, and in mid-run faults."""

import io
import os
import shutil
import signal
import sys
import zlib

import numpy as np
import pytest
from helpers import ROOT, SmallDisk, processes_of, run, start, wait_awhile, wait_until
from PIL import Image, ImageCms, ImageOps

SCRIPT = ROOT / "resize_imagenet.py"
SHARED = ROOT.parent / "shared" / "data" / "faulty"
N = 48
COLOURS = [[(200, 30, 30), (30, 200, 30)], [(30, 30, 200), (200, 200, 30)]]


def draw(width=96, height=72, seed=0):
    """Four colours in the corners, so that any turn shows, and a little noise of `seed`."""
    pixels = np.array(COLOURS).repeat(height // 2, 0).repeat(width // 2, 1)
    noise = np.random.default_rng(seed).normal(0, 8, pixels.shape)
    return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


def encoded(image, format, **options):
    """A picture as the bytes of a file."""
    image.save(file := io.BytesIO(), format, **options)
    return file.getvalue()


JPEG = encoded(draw(), "JPEG", quality=90)


def turned(orientation):
    """A JPEG that EXIF says to turn, and how it looks then."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(draw(96, 72), "JPEG", quality=95, exif=exif)
    return content, ImageOps.exif_transpose(Image.open(io.BytesIO(content)))


def claims(width, height):
    """A PNG of a few bytes whose header promises `width` x `height` pixels."""
    def chunk(name, content):
        check = zlib.crc32(name + content)
        return len(content).to_bytes(4, "big") + name + content + check.to_bytes(4, "big")
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def text_bomb():
    """A PNG with a text of 100 MB in some 100 kB."""
    bomb = b"zTXtkey\0\0" + zlib.compress(bytes(100_000_000), 9)
    png = encoded(draw(), "PNG")
    chunk = (len(bomb) - 4).to_bytes(4, "big") + bomb + zlib.crc32(bomb).to_bytes(4, "big")
    return png[:33] + chunk + png[33:]


GREY16 = Image.fromarray(np.linspace(0, 65535, 96 * 72).reshape(72, 96).astype(np.uint16))
NOISY = Image.fromarray(np.random.default_rng(0).integers(0, 256, (150, 200, 3), dtype=np.uint8))
PALETTE = draw().convert("RGB").quantize(16)
CLEAR = Image.merge("RGBA", (*draw().split(), Image.new("L", (96, 72))))  # nothing to be seen
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
    "row12/bad_exif.jpg": encoded(draw(), "JPEG", quality=90,
                                   exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x09" + b"\xff" * 20),
    "row15/small.JPEG": encoded(draw(200, 48), "JPEG", quality=77),
    "row15/smaller.png": encoded(draw(10, 8), "PNG"),
    "row15/turned.JPEG": encoded(draw(40, 30), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12"
                                 b"\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"),
    "row16/wide.jpg": encoded(draw(1000, 66), "JPEG"),
    "row16/line.png": encoded(Image.new("RGB", (1, 5000)), "PNG"),
    "row21/-dash and 'quote' \"two\".JPEG": JPEG,
    "row21/new\nline é 猫.JPEG": JPEG,
    "row21/" + "x" * 250 + ".JPEG": JPEG,
    "row22/" + os.fsdecode(b"caf\xe9.JPEG"): JPEG,
    **{f"row26/a{end}": encoded(draw(), format) for end, format in
       {".JPEG": "JPEG", ".jpg": "JPEG", ".JPG": "JPEG", ".png": "PNG", ".WebP": "WEBP",
        ".bmp": "BMP", ".ppm": "PPM", ".tif": "TIFF"}.items()},
    "row28/a.JPEG": JPEG,
    "row28/a.png": encoded(draw(), "PNG"),
    "row28/A.JPEG": encoded(draw(80, 60, seed=1), "JPEG"),
    "noisy.png": encoded(NOISY, "PNG"),
    "icc.jpg": encoded(draw(), "JPEG", icc_profile=ImageCms.ImageCmsProfile(
        ImageCms.createProfile("sRGB")).tobytes()),
}
CUTS = [2, 20, len(JPEG) // 4, len(JPEG) // 2, len(JPEG) - 40]
BAD = {
    "row1/zero.JPEG": b"",
    **{f"row2/cut{cut}.JPEG": JPEG[:cut] for cut in CUTS},
    "row2/half, with an end.JPEG": JPEG[:len(JPEG) // 2] + b"\xff\xd9",
    "row2/half of a small one.JPEG": (small := encoded(draw(40, 30), "JPEG"))[:len(small) * 3 // 4],
    "row2/half.png": (png := encoded(draw(), "PNG"))[:len(png) // 2],
    "row2/hole.JPEG": JPEG[:-900] + bytes(range(1, 201)) + JPEG[-700:],
    "row3/last_two.JPEG": JPEG[:-2],
    "row3/last_one.JPEG": JPEG[:-1],
    "row5/page.JPEG": b"<html><body>404</body></html>",
    "row13/claim.png": claims(30_000, 30_000),
    "row13/claim.JPEG": claims(30_000, 30_000),
    "row14/bomb.png": text_bomb(),
    "row22/" + os.fsdecode(b"bad\n\xe9.JPEG"): b"text",
}
PASSED_OVER = ["a.txt", "row25/Thumbs.db", "row25/.DS_Store", "row25/._plain.JPEG", "row25/none"]


def write(folder, files):
    """Writes {relative path: bytes}."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def words(src, dst, max_size=N, *options):
    """The command line of a run, with two processes."""
    return [sys.executable, SCRIPT, "--src", src, "--dst", dst, "--max-size", str(max_size),
            "--workers", "2", *options]


def tree(folder):
    """{relative path: bytes} of a folder's files, without the script's note."""
    return {os.path.relpath(os.path.join(where, name), folder):
            open(os.path.join(where, name), "rb").read()
            for where, _, files in os.walk(folder) for name in files
            if name != ".resize_imagenet.json"}


def is_clean(done, status):
    """Whether a run ended with `status` and said no more than its own lines on stderr."""
    lines = done.stderr.splitlines()
    return done.returncode == status and all(
        line.startswith("resize_imagenet.py: ") for line in lines)


class Done:
    """A finished run over an album with every kind of picture."""


@pytest.fixture(scope="module")
def album(tmp_path_factory):
    """GOOD, BAD, PASSED_OVER and links of all kinds, and what one run makes of them."""
    done, folder = Done(), tmp_path_factory.mktemp("album")
    done.src, done.dst, elsewhere = folder / "src", folder / "dst", folder / "elsewhere"
    write(done.src, GOOD | BAD | dict.fromkeys(PASSED_OVER, JPEG))
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
    done.run = run(*words(done.src, done.dst))
    done.files = tree(done.dst)
    return done


def picture(album, name):
    """An output of the album, decoded, as a viewer shows it."""
    image = Image.open(io.BytesIO(album.files[name]))
    image.load()
    return ImageOps.exif_transpose(image)


def difference(one, other):
    """The mean difference of two pictures of one size, in levels of 255."""
    assert one.size == other.size
    return np.abs(np.asarray(one, dtype=float) - np.asarray(other, dtype=float)).mean()


def check_refused(album, row):
    """Every bad picture of a row is named in one line and not in the output."""
    names = [name for name in BAD if name.startswith(f"row{row}/")]
    lines = album.run.stderr.splitlines()
    assert names
    for name in names:
        assert name not in album.files
        assert len([line for line in lines if f"{album.src / name}: " in line]) == 1, name
    assert is_clean(album.run, 1)


def test_the_album_is_done_but_for_what_is_bad(album):
    assert is_clean(album.run, 1), album.run.stderr
    ours = {name for name in album.files if not name.startswith("shared")}
    assert ours == {*GOOD, *(f"row24/{name}.JPEG" for name in
                             ("file", "folder/folder", "same folder/folder"))}
    bad = [line for line in album.run.stderr.splitlines() if f"{album.src}/shared" not in line]
    assert len(bad) == len(BAD) + 2  # and two links
    assert not [name for name in os.listdir(album.dst) if name.endswith(".part")]
    profile = picture(album, "icc.jpg").info["icc_profile"]
    assert profile == Image.open(io.BytesIO(GOOD["icc.jpg"])).info["icc_profile"]


def test_f01_zero_bytes(album):
    """A JPEG of zero bytes -> it is named on one line and left out; exit 1."""
    check_refused(album, 1)


def test_f02_truncated(album):
    """JPEGs cut at five places, with a hole, or with an end put on half of one, half a PNG, part of
    a small JPEG -> each is named on one line and left out; exit 1."""
    check_refused(album, 2)


def test_f03_without_the_last_bytes(album):
    """A JPEG without its last byte, or its last two -> it is named on one line and left out; exit
    1."""
    check_refused(album, 3)


def test_f05_html_named_jpeg(album):
    """HTML named .JPEG -> it is named on one line and left out; exit 1."""
    check_refused(album, 5)


def test_f06_png_named_jpeg_becomes_a_jpeg(album):
    """A PNG named .JPEG, large or small enough as it is -> a real JPEG in RGB, under the same
    name."""
    for name, size in (("png_inside", (64, 48)), ("small png_inside", (40, 30))):
        image = picture(album, f"row 6/{name}.JPEG")
        assert (image.format or "JPEG", image.mode, image.size) == ("JPEG", "RGB", size)
        assert album.files[f"row 6/{name}.JPEG"][:3] == b"\xff\xd8\xff"


def test_f07_cmyk_becomes_rgb_of_the_same_colours(album):
    """A CMYK JPEG -> RGB, its colours not inverted."""
    image = picture(album, "row7/cmyk.JPEG")
    assert image.mode == "RGB"
    assert difference(image, draw().resize((64, 48), Image.BILINEAR)) < 12


def test_f08_grey_stays_grey(album):
    """A grey JPEG -> it stays grey, of one channel."""
    image = picture(album, "row8/grey.jpg")
    assert image.mode == "L"
    assert difference(image, draw().convert("L").resize((64, 48), Image.BILINEAR)) < 4


def test_f09_transparency_is_filled_with_white(album):
    """Wholly clear RGBA and LA PNGs, a palette with a clear colour -> all become RGB, the clear
    ones white."""
    for name in ("rgba", "la"):
        image = picture(album, f"row9/{name}.png")
        assert image.mode == "RGB" and image.getextrema() == ((255, 255),) * 3
    assert picture(album, "row9/palette.png").mode == "RGB"


def test_f10_16_bits_are_scaled_to_8(album):
    """A 16-bit grey PNG -> its values are scaled to 8 bits, 65535 to 255."""
    image = picture(album, "row10/grey16.png")
    wanted = Image.fromarray((np.asarray(GREY16) / 257).round().astype(np.uint8))
    assert image.mode == "L"
    assert difference(image, wanted.resize((64, 48), Image.BILINEAR)) < 1


def test_f11_exif_rotation(album):
    """JPEGs of EXIF orientation 1 to 8 -> a viewer shows the smaller ones just as turned."""
    for i in range(1, 9):
        image, wanted = picture(album, f"row11/{i}.jpg"), turned(i)[1]
        wanted = wanted.resize((48, 64) if i > 4 else (64, 48), Image.BILINEAR)
        assert difference(image, wanted) < 4, i


def test_f12_corrupt_exif(album):
    """A JPEG with a corrupt EXIF block -> the same pixels as without the block."""
    assert difference(picture(album, "row12/bad_exif.jpg"), picture(album, "plain.JPEG")) == 0


def test_f13_900_megapixels(album):
    """A header that claims 30000x30000 pixels, of a PNG named .png and .JPEG -> named on one line
    with that size, and left out; exit 1."""
    check_refused(album, 13)
    assert "30000x30000" in album.run.stderr


def test_f14_png_text_bomb(album):
    """A PNG with a text of 100 MB in some 100 kB -> it is named on one line and left out; exit
    1."""
    check_refused(album, 14)


def test_f15_small_pictures_are_copied(album):
    """Pictures whose smaller edge is at most --max-size, one turned by EXIF -> copied byte for
    byte."""
    for name in ("small.JPEG", "smaller.png", "turned.JPEG"):
        assert album.files[f"row15/{name}"] == GOOD[f"row15/{name}"]


def test_f16_thin_pictures(album):
    """Pictures of 1000x66 and 1x5000 -> 727x48, and 1x5000 as it was."""
    assert picture(album, "row16/wide.jpg").size == (727, 48)  # 1000 * 48 / 66 = 727.3
    assert picture(album, "row16/line.png").size == (1, 5000)


@pytest.mark.parametrize("size", ["0", "-5", "abc", "1.5", ""])
def test_f17_max_size(tmp_path, size):
    """--max-size 0, -5, abc, 1.5 or '', --quality 0 or 101, --workers 0 -> one line, exit 2,
    nothing written."""
    write(tmp_path / "src", {"a.JPEG": JPEG})
    for options in ((), ("--quality", "0"), ("--quality", "101"), ("--workers", "0")):
        done = run(*words(tmp_path / "src", tmp_path / "dst", N if options else size, *options))
        assert is_clean(done, 2) and len(done.stderr.splitlines()) == 1, done.stderr
    assert os.listdir(tmp_path) == ["src"]


def test_f18_src_and_dst_apart(tmp_path):
    """--src that is --dst, or one inside the other, also by a link or by .. -> one line, exit 2,
    nothing written."""
    write(tmp_path / "src", {"a/b.JPEG": JPEG})
    (tmp_path / "link").symlink_to(tmp_path / "src")
    before = tree(tmp_path)
    for src, dst in (("src", "src"), ("src", "src/new"), ("src/a", "src"), ("src", "link"),
                     ("src", "link/a"), ("link", "src"), ("src", "src/a/../new")):
        done = run(*words(tmp_path / src, tmp_path / dst))
        assert is_clean(done, 2) and len(done.stderr.splitlines()) == 1, (src, dst)
    assert tree(tmp_path) == before and not (tmp_path / "src" / "new").exists()


def test_f19_nothing_to_do(tmp_path):
    """--src missing, empty, without a picture, or a text file -> an error names it, exit 2; --dst
    is not made."""
    (tmp_path / "empty").mkdir()
    write(tmp_path / "texts", {"a/b.txt": b"text"})
    for src in ("missing", "empty", "texts", "texts/a/b.txt"):
        done = run(*words(tmp_path / src, tmp_path / "dst"))
        assert is_clean(done, 2) and str(tmp_path / src) in done.stderr
    assert not (tmp_path / "dst").exists()


def check_refused_as_dst(folder, places):
    """Each of the places within `folder` is refused in one line that names it; nothing changes."""
    before = tree(folder)
    for dst in places:
        done = run(*words(folder / "src", folder / dst))
        assert done.returncode in (1, 2) and is_clean(done, done.returncode), done.stderr
        assert len(done.stderr.splitlines()) == 1 and str(folder / dst) in done.stderr
    assert tree(folder) == before


def test_f20_dst_that_holds_something_else(tmp_path):
    """--dst a file, below a file, or holding something else -> one line names it, exit 1 or 2;
    nothing there is changed."""
    write(tmp_path, {"src/a.JPEG": JPEG, "file": b"mine", "full/mine.txt": b"mine"})
    check_refused_as_dst(tmp_path, ["file", "file/in", "full"])


def test_f20_dst_that_is_read_only(tmp_path):
    """--dst on a read-only disk (where none can be mounted, in a folder without the right to write)
    -> one line names it, exit 1 or 2; nothing is made."""
    write(tmp_path, {"src/a.JPEG": JPEG})
    with SmallDisk(tmp_path / "closed", 1024) as disk:
        disk.make_read_only()
        check_refused_as_dst(tmp_path, ["closed", "closed/in"])


def test_f21_f22_names(album):
    """Names with spaces, quotes, a dash first, a newline, other letters, 255 bytes, or not UTF-8 ->
    done, under the same names."""
    for name in (name for name in GOOD if name.startswith(("row21", "row22"))):
        assert picture(album, name).size == (64, 48)


def test_f22_a_bad_picture_whose_name_is_not_utf_8_is_named_on_one_line(album):
    """Text named .JPEG, in a name with a newline and not UTF-8 -> named on one line, those two
    escaped."""
    line, = [line for line in album.run.stderr.splitlines() if "row22" in line]
    assert r"/row22/bad\n\udce9.JPEG: " in line


def test_f24_links(album):
    """Links to a file, to folders, in a loop, to nowhere and to itself -> it ends; the file is
    done, no output is a link; the last two are named on a line each."""
    lines = [line for line in album.run.stderr.splitlines() if "/row24/" in line]
    assert len(lines) == 2
    assert all(any(name in line for line in lines) for name in ("dangling.JPEG", "itself"))
    assert album.files["row24/file.JPEG"] == album.files["plain.JPEG"]
    assert not any((album.dst / name).is_symlink() for name in album.files)


def test_f25_no_pictures_are_passed_over(album):
    """A .txt, Thumbs.db, .DS_Store, ._plain.JPEG and a name without an ending -> passed over, not a
    word."""
    assert not any(name in album.files or name in album.run.stderr for name in PASSED_OVER)


def test_f26_endings(album):
    """Pictures named .JPEG .jpg .JPG .png .WebP .bmp .ppm .tif -> resized, each in its own
    format."""
    for name in (name for name in GOOD if name.startswith("row26")):
        image = Image.open(io.BytesIO(album.files[name]))
        assert image.size == (64, 48)
        assert image.format == Image.open(io.BytesIO(GOOD[name])).format


def test_f28_every_source_has_its_own_output(album):
    """a.JPEG, a.png and A.JPEG in one folder -> each has an output of its own.

    Names never change, so two sources meet only where case is not told apart, as on macOS.
    """
    sizes = {name: picture(album, f"row28/{name}").size for name in ("a.JPEG", "a.png", "A.JPEG")}
    is_case_told = not (album.src / "PLAIN.jpeg").exists()
    assert len({album.files[f"row28/{name}"] for name in sizes}) == 3 - (not is_case_told)


def test_f28_sources_that_would_share_an_output(tmp_path):
    """a.JPEG and A.JPEG, d/ and D/ for a --dst that does not tell A from a (a file named as the
    script's note, in capitals, stands for one) -> one of each is named and left out, no more than
    those; exit 1."""
    src, dst = tmp_path / "src", tmp_path / "dst"
    write(src, dict.fromkeys(["a.JPEG", "A.JPEG", "b.JPEG", "d/c.JPEG", "D/c.JPEG", "B.txt",
                              "e.txt", "E.txt", "f.JPEG", "F/f.JPEG"], JPEG))
    write(dst, {".RESIZE_IMAGENET.JSON": b""})
    done = run(*words(src, dst))
    assert is_clean(done, 1) and done.stderr.count("does not tell A from a") == 2
    made = [name for name in tree(dst) if name.endswith("JPEG")]
    assert sorted(made) == ["A.JPEG", "D/c.JPEG", "F/f.JPEG", "b.JPEG", "f.JPEG"]


def test_f02_f11_f12_f14_real_faulty_files(album):
    """Pillow's own damaged files, an ImageNet picture turned by EXIF -> the six beyond rescue are
    named and left out, the others done, that one upright."""
    if not SHARED.is_dir():
        pytest.skip("needs the pictures of ../shared/data/faulty")
    bad = {"truncated_jpeg.jpg", "broken.png", "truncated_image.png", "broken_data_stream.png",
           "png_decompression_dos.png", "truncated_end_chunk.png"}
    for name in os.listdir(album.src / "shared"):
        is_named = f"{album.src}/shared/{name}: " in album.run.stderr
        is_picture = not name.endswith((".gif", ".pillow-tests"))
        assert is_named == (name in bad), name
        assert (f"shared/{name}" in album.files) == (is_picture and name not in bad), name
    source = ImageOps.exif_transpose(Image.open(album.src / "shared/n02951585_can_opener.JPEG"))
    image = picture(album, "shared/n02951585_can_opener.JPEG")
    assert difference(image, source.resize(image.size, Image.BILINEAR)) < 4


def psnr(pixels, wanted):
    return 10 * np.log10(255**2 / np.mean((pixels.astype(float) - wanted)**2))


def test_the_resize_is_as_exact_as_pillows(album):
    """To a lossless file, against the triangle filter in float64."""
    wanted = np.asarray(NOISY, dtype=np.float64)
    for axis, size in ((1, 64), (0, N)):
        scale = wanted.shape[axis] / size
        places = (np.arange(size)[:, None] + 0.5) * scale
        away = np.abs(np.arange(wanted.shape[axis])[None] + 0.5 - places) / scale
        weights = (1 - away).clip(0)
        weights /= weights.sum(1, keepdims=True)
        wanted = np.moveaxis(np.tensordot(weights, wanted, (1, axis)), 0, axis)
    ours = psnr(np.asarray(picture(album, "noisy.png")), wanted)
    pillows = psnr(np.asarray(NOISY.resize((64, N), Image.BILINEAR)), wanted)
    assert ours > 55 and ours > pillows - 0.05


# ----------------------------------------------------------------------------------- mid-run faults
@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A set whose pictures take a second or more, and the tree that one clean run makes of it."""
    many = Done()
    many.src = tmp_path_factory.mktemp("many") / "src"
    contents = [encoded(draw(1200, 900, seed), "JPEG", quality=95) for seed in range(5)]
    write(many.src, {f"class{i % 7}/{i}.JPEG": contents[i % 5] for i in range(200)})
    dst = many.src.parent / "clean"
    assert is_clean(run(*words(many.src, dst)), 0)
    many.tree = tree(dst)
    assert len(many.tree) == 200
    return many


def begun(many, dst, **options):
    """A run that has written a picture and goes on."""
    process = start(words(many.src, dst), **options)
    wait_until(lambda: any(dst.glob("class*/*")) or process.poll() is not None)
    assert process.poll() is None
    return process


def test_f30_killed_10_times_then_run_again(many, rng, tmp_path):
    """10 SIGKILLs, each at a moment left to chance, then run to its end -> no half picture under a
    final name, none done twice, no process or temporary file left; the files of one clean run."""
    dst, times = tmp_path / "dst", {}

    def made():
        return {os.path.relpath(path, dst) for path in dst.glob("class*/*")}
    for number in range(10):
        process = start(words(many.src, dst))
        if number % 4:  # else as it starts
            wait_until(lambda: len(made()) > len(times))
        wait_awhile(rng.uniform(0, 0.05 if number % 4 else 1), lambda: len(made()) > len(times) + 5)
        assert process.poll() is None
        process.kill()
        process.communicate()
        wait_until(lambda: not processes_of(dst), 20)  # no orphans
        there = tree(dst)
        for name, content in there.items():
            if ".part" not in name:
                assert content == many.tree[name]
        now = {name: (dst / name).stat().st_ctime_ns for name in there if ".part" not in name}
        assert all(now[name] == times[name] for name in times)  # what was finished is not redone
        times = now
    done = run(*words(many.src, dst))
    assert is_clean(done, 0) and f"{len(times):,} were there" in done.stdout
    assert tree(dst) == many.tree and len(times) < len(many.tree)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_f31_stopped(many, tmp_path, stop):
    """Ctrl-C to all its processes, or SIGTERM to the first -> one line, exit 1, within 20 seconds;
    no process, temporary file or half picture is left."""
    process = begun(many, tmp_path / "dst", start_new_session=True)
    if stop == signal.SIGINT:
        os.killpg(process.pid, stop)  # as a terminal does: to the workers too
    else:
        process.send_signal(stop)
    out, err = process.communicate(timeout=20)
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
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and len(err.splitlines()) == 1 and "worker was killed" in err
    assert not processes_of(tmp_path / "dst")
    assert tree(tmp_path / "dst").items() <= many.tree.items()


def test_f32_other_settings_are_refused(album):
    """Run again with another --max-size or --quality into the same --dst -> refused in one line,
    exit 2; nothing is changed."""
    for size, options in ((N + 1, ()), (N, ("--quality", "80"))):
        done = run(*words(album.src, album.dst, size, *options))
        assert is_clean(done, 2) and len(done.stderr.splitlines()) == 1
        assert "other settings" in done.stderr
    assert tree(album.dst) == album.files


def test_f33_a_changed_source_is_redone(tmp_path):
    """Run again after two sources changed and one became text -> the two are redone, the third is
    named and its old output removed, exit 1; the others stay."""
    files = {f"{i}.JPEG": encoded(draw(seed=i), "JPEG") for i in range(5)}
    src, dst = tmp_path / "src", tmp_path / "dst"
    write(src, files)
    assert is_clean(run(*words(src, dst)), 0)
    before, times = tree(dst), {path.name: path.stat().st_ctime_ns for path in dst.glob("*.JPEG")}
    old = (src / "1.JPEG").stat()
    write(src, {"0.JPEG": encoded(draw(seed=9), "JPEG"), "2.JPEG": b"text",
                "1.JPEG": encoded(draw(120, 90), "JPEG")})
    os.utime(src / "1.JPEG", ns=(old.st_atime_ns, old.st_mtime_ns))  # of another size only
    done = run(*words(src, dst))
    assert is_clean(done, 1) and "2.JPEG" in done.stderr and "2 were there" in done.stdout
    after = tree(dst)
    assert sorted(after) == ["0.JPEG", "1.JPEG", "3.JPEG", "4.JPEG"]
    assert after["0.JPEG"] != before["0.JPEG"] and after["1.JPEG"] != before["1.JPEG"]
    for name in ("3.JPEG", "4.JPEG"):
        assert (dst / name).stat().st_ctime_ns == times[name]


def test_f29_disk_full(many, tmp_path):
    """A full disk (a tmpfs of 400 kB; without root, a limit on file sizes) -> one line, exit 1,
    only whole pictures; with room again the same command completes."""
    with SmallDisk(tmp_path / "disk", 400, 512) as disk:
        command = words(many.src, disk.folder / "dst")
        done = run(*command, **disk.options)
        assert is_clean(done, 1) and len(done.stderr.splitlines()) == 1, done.stderr
        assert "cannot write" in done.stderr and "run it again" in done.stderr
        assert tree(disk.folder).keys() <= {f"dst/{name}" for name in many.tree}
        assert all(many.tree[name.removeprefix("dst/")] == content
                   for name, content in tree(disk.folder).items())
        disk.make_room()
        assert is_clean(run(*command), 0)
        assert tree(disk.folder / "dst") == many.tree


def test_memory_does_not_grow_with_the_pictures(tmp_path):
    """Neither the parent's nor a worker's; ten times the pictures, with room for chance."""
    content, peaks = encoded(draw(4, 4), "PNG"), []
    # by way of a small process: Linux counts the memory of the process that starts another, too
    measured = ("import resource, subprocess, sys\n"
                "subprocess.run(sys.argv[1:], check=True)\n"
                "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    for count in (200, 4000):
        write(tmp_path / str(count), {f"{i % 20}/{i}.png": content for i in range(count)})
        command = words(tmp_path / str(count), tmp_path / f"{count} out")
        done = run(sys.executable, "-c", measured, *command)
        assert done.returncode == 0 and f"{count:,} of {count:,}" in done.stdout, done.stderr
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] < peaks[0] + 16 * 1024  # kB
