"""The loaders: that they agree, that each sample comes once an epoch, faults by number."""

import json
import os
import pickle
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import (ROOT, SRC, Forked, SmallDisk, change, module_of, on_gpu, run, run_forked,
                      start, wait_awhile, wait_until)
from PIL import Image

import loading

LOADERS = sorted(path.stem for path in SRC.glob("loader*.py"))
SHARED = ROOT.parent / "shared" / "data"
CAPTURE = ROOT / "tests" / "capture.py"
each_loader = pytest.mark.parametrize("loader", LOADERS)

@pytest.fixture
def load(tmp_path):
    """load(loader, data, option ...) runs a loader.

    Returns its returncode, stdout, stderr, record, and with capture=True the batches: of each
    epoch a list of (first, second).
    """
    def run_loader(loader, data, *options, capture=False, timeout=120):
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        folder.mkdir()
        batches = folder / "batches.pt"
        words = [SRC / f"{loader}.py", "--data_source", data, "--result_dir", folder, *options]
        if "--epochs" not in options:
            words += ["--epochs", 1]
        if "--num_workers" not in options:
            words += ["--num_workers", 2]
        if capture:
            words = [CAPTURE, batches, *words]
        done = run_forked(*words, cwd=folder, timeout=timeout)
        record = folder / f"{loader}.json"
        import torch
        return SimpleNamespace(
            returncode=done.returncode, stdout=done.stdout, stderr=done.stderr,
            record=json.loads(record.read_text()) if record.exists() else None,
            batches=torch.load(batches, map_location="cpu") if batches.exists() else None)
    return run_loader


def changed_dali(folder, *changes):
    """A copy of loader_DALI.py in `folder` with new text for old, named as load() wants it."""
    script = folder / "loader_DALI.py"
    shutil.copy(SRC / script.name, script)
    for old, new in changes:
        change(script, old, new)
    return str(script.with_suffix(""))


def photo(seed, size=(96, 72), mode="RGB"):
    """A picture with smooth parts, edges and the noise of a camera, which is mostly grey."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(size)
    pixels = np.asarray(coarse).astype(int) + rng.integers(-12, 12, (size[1], size[0], 1))
    pixels[size[1] // 3:size[1] // 2, size[0] // 4:size[0] // 2] = rng.integers(0, 256, 3)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


def save(picture, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        picture.save(file, options.pop("format", None) or Image.registered_extensions()[
            path.suffix.lower()], **options)
    return path


def classes(folder, split="train", count=6):
    """DATASET/<split>/{cat,dog}/*.jpg: `count` pictures a class."""
    for k, name in enumerate(("cat", "dog")):
        for i in range(count):
            save(photo([k, i], (96, 72 + 4 * i)), folder / split / name / f"{i}.jpg", quality=95)
    return folder


def pairs(folder, split="train", count=5, size=(80, 64)):
    """Pairs whose red is x and whose green is y; blue is the pair's number, plus 100 in sharp."""
    x, y = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    for i in range(count):
        for name, more in (("blurry", 0), ("sharp", 100)):
            pixels = np.stack([3 * x, 3 * y, np.full_like(x, i + more)], -1).astype(np.uint8)
            save(Image.fromarray(pixels), folder / split / name / "scene one" / f"{i:02}.png")
    return folder


SMALL = ("--resize", 48, "--crop", 40, "--batch_size", 4)


def error_of(done, loader, code=1):
    """The one line of an error; what C libraries print on their own may stand before it."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    own = [line for line in done.stderr.splitlines() if line.startswith(loader)]
    assert len(own) == 1 and ": error: " in own[0], done.stderr
    return own[0]


# --------------------------------------------------------------------------------- agreement
def unusual(folder):
    """One picture of each kind that a data set holds."""
    wide, high = photo(1, (150, 100)), photo(2, (90, 160))
    for name, picture, options in [
            ("wide.jpg", wide, {}), ("high.jpg", high, {}), ("odd.jpg", photo(3, (101, 77)), {}),
            ("grey.jpg", wide.convert("L"), {}), ("cmyk.jpg", high.convert("CMYK"), {}),
            ("progressive.JPG", wide, {"progressive": True}),
            ("full.jpeg", high, {"subsampling": 0}),
            ("png.JPEG", wide, {"format": "PNG"}), ("colour.png", high, {}),
            ("grey.png", wide.convert("L"), {}), ("palette.png", high.convert("P"), {}),
            ("web.webp", wide, {"quality": 90}), ("bit.bmp", high, {})]:
        quality = {"quality": 92} if name.lower().endswith(("jpg", "jpeg")) else {}
        save(picture, folder / name, **{**quality, **options})
    deep = np.asarray(wide.convert("L")).astype(np.uint16) * 257
    save(Image.fromarray(deep), folder / "deep.png")
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x112] = orientation
        save(high, folder / f"exif{orientation}.jpg", quality=92, exif=exif)
    return sorted(path.name for path in folder.iterdir())


def pixels_of(done):
    """All first pictures of the first epoch, and what stands beside them."""
    import torch
    assert done.returncode == 0, done.stderr
    firsts, seconds = zip(*done.batches[0])
    return torch.cat(firsts).int(), torch.cat(seconds)


def assert_agree(load, data, names, *options):
    reference, labels = pixels_of(load("loader", data, "--split", "test", *options, capture=True))
    assert len(reference) == len(names) and reference.shape[1] == 3
    lmdb, lmdb_labels = pixels_of(load("loader_LMDB", data, "--split", "test", *options,
                                       "--lmdb", f"{data}.lmdb", capture=True))
    assert (lmdb == reference).all() and (lmdb_labels == labels).all()
    dali, dali_labels = pixels_of(load("loader_DALI", data, "--split", "test", *options,
                                       "--dali_device", "cpu", capture=True))
    assert (dali_labels == labels).all()
    for name, one, other in zip(names, reference, dali):
        close = ((one - other).abs() <= 2).float().mean().item()
        assert close >= 0.99, f"{name}: {close:.2%} of the pixels within 2"


def test_f06_f07_f08_f10_f11_f26_agreement_on_every_kind_of_picture(load, tmp_path):
    """A PNG named .JPEG, CMYK, grey, 16 bits, EXIF 2 to 8, seven endings -> RGB, the same from all
    loaders: LMDB's to the bit, DALI's on the CPU to 2/255 in 99% of each."""
    names = unusual(tmp_path / "data" / "test" / "all")
    assert_agree(load, tmp_path / "data", names, "--resize", 64, "--crop", 56)
    assert_agree(load, tmp_path / "data", names, "--resize", 0, "--crop", 75)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real pictures of ../shared/data")
def test_f07_f11_agreement_on_real_pictures(load, tmp_path):
    """Real pictures: 24 of ImageNet, 4 that EXIF turns, one in CMYK -> the same from all loaders:
    LMDB's to the bit, DALI's on the CPU to 2/255 in 99% of each."""
    folder = tmp_path / "data" / "test" / "all"
    folder.mkdir(parents=True)
    faulty = SHARED / "faulty"
    for path in [*sorted(SHARED.glob("imagenet_sample/val/*/*"))[:24],
                 *faulty.glob("hopper_or*"), *faulty.glob("pil_sample_cmyk.jpg"),
                 *faulty.glob("n02951585*")]:
        shutil.copy(path, folder)
    assert_agree(load, tmp_path / "data", sorted(path.name for path in folder.iterdir()))


def test_f07_f09_f10_what_the_pixels_have_to_be(load, tmp_path):
    """CMYK, 16 bits, clear RGBA, LA and palette, opaque RGBA, read by loader.py -> the colours
    meant: not inverted, scaled to 8 bits, white where clear."""
    folder = tmp_path / "data" / "test" / "all"
    red = Image.new("RGB", (64, 64), (200, 30, 40))
    save(red.convert("CMYK"), folder / "1.jpg", quality=95)
    save(Image.fromarray(np.full((64, 64), 65535 // 2, np.uint16)), folder / "2.png")
    clear = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    save(clear, folder / "3.png")
    save(clear.convert("LA"), folder / "4.png")
    half = Image.new("P", (64, 64), 0)
    half.putpalette([10, 20, 30] * 256)
    save(half, folder / "5.png", transparency=0)
    save(Image.new("RGBA", (64, 64), (200, 30, 40, 255)), folder / "6.png")
    pixels, _ = pixels_of(load("loader", tmp_path / "data", "--split", "test", capture=True))
    middle = pixels[:, :, 112, 112].tolist()
    for found, expected in zip(middle, [(200, 30, 40), (127, 127, 127), (255, 255, 255),
                                        (255, 255, 255), (255, 255, 255), (200, 30, 40)]):
        assert max(abs(a - b) for a, b in zip(found, expected)) <= 4, middle


@pytest.mark.gpu
def test_f06_f07_f08_f10_f11_f26_agreement_of_the_gpu_decoder(load, tmp_path):
    """A PNG named .JPEG, CMYK, grey, 16 bits, EXIF 2 to 8, decoded by DALI on a GPU -> loader.py's
    pictures, off by less than 1/255 in the mean of each."""
    names = unusual(tmp_path / "data" / "test" / "all")
    if SHARED.exists():
        for path in sorted(SHARED.glob("imagenet_sample/val/*/*"))[:24]:
            shutil.copy(path, tmp_path / "data" / "test" / "all")
        names = sorted(path.name for path in (tmp_path / "data" / "test" / "all").iterdir())
    options = (tmp_path / "data", "--split", "test", "--num_workers", 4, "--batch_size", 8)
    reference, labels = pixels_of(load("loader", *options, capture=True))
    dali, dali_labels = pixels_of(load("loader_DALI", *options, capture=True))
    assert (labels == dali_labels).all()
    means = (reference - dali).abs().float().mean((1, 2, 3))
    assert means.mean() < 0.5
    assert means.max() < 1, names[means.argmax()]  # it spreads colours of 4:2:0 a little otherwise


# ----------------------------------------------------------------------- samples and their order
@pytest.fixture(scope="session")
def numbered(tmp_path_factory):
    """13 classes of one picture each, so that a label tells which sample it is; 13 pairs."""
    folder = tmp_path_factory.mktemp("numbered")
    for split in ("train", "test"):
        for i in range(13):
            save(photo(i, (60 + i, 50)), folder / "classes" / split / f"{i:02}" / "a.jpg")
        pairs(folder / "pairs", split, 13)
    return folder


def numbers_of(epoch, layout):
    """Which samples an epoch brought, in order."""
    if layout == "classes":
        return [label for _, labels in epoch for label in labels.tolist()]
    return [blue for first, _ in epoch for blue in first[:, 2, 0, 0].tolist()]


@each_loader
@pytest.mark.parametrize("layout", ["classes", "pairs"])
def test_f48_every_sample_once_an_epoch_in_a_new_order(load, numbered, tmp_path, loader, layout):
    """13 samples in batches of 4, 13 and 20, in each loader -> every epoch brings each once, in a
    new order; of the test split, in the folder's order."""
    more = ("--lmdb", tmp_path / "x.lmdb") if loader == "loader_LMDB" else ()
    for batch_size, workers in ((4, 2), (13, 0), (20, 1)):
        orders = []
        for seed in (0, 0, 1):
            if seed == 1 and batch_size != 4 or (batch_size == 20 and orders):
                continue
            done = load(loader, numbered / layout, "--resize", 48, "--crop", 40, "--epochs", 3,
                        "--batch_size", batch_size, "--num_workers", workers, "--seed", seed, *more,
                        capture=True)
            assert done.returncode == 0, done.stderr
            assert [len(epoch) for epoch in done.batches] == [-(-13 // batch_size)] * 3
            orders.append([numbers_of(epoch, layout) for epoch in done.batches])
            for order in orders[-1]:
                assert sorted(order) == list(range(13))
            assert orders[-1][0] != orders[-1][1] != orders[-1][2] != orders[-1][0]
        assert orders[0] == orders[:2][-1]
        assert batch_size != 4 or orders[2] != orders[0]
    test = load(loader, numbered / layout, "--split", "test", "--resize", 48, "--crop", 40,
                "--batch_size", 4, "--epochs", 2, capture=True,
                *(("--lmdb", tmp_path / "y.lmdb") if more else ()))
    assert [numbers_of(epoch, layout) for epoch in test.batches] == [list(range(13))] * 2


@pytest.mark.parametrize("where", ["cpu", on_gpu("gpu")])
@pytest.mark.parametrize("layout", ["classes", "pairs"])
def test_f48_two_pipelines(load, numbered, tmp_path, layout, where):
    """13, 9 and 11 samples in batches of 5, 4 and 3, by two of DALI's pipelines, as on a GPU ->
    each comes once an epoch, in the baseline's order; of classes in train, in a new one."""
    dali = changed_dali(
        tmp_path, ("2 if two else 1", "2 if two else 1; print(self.shards, 'pipelines')"),
        *[("two = self.on_gpu and", "two =")] * (where == "cpu"))
    for split, batch_size, samples in (("train", 5, 13), ("test", 4, 9), ("train", 3, 11)):
        orders = []
        for loader in ("loader", dali):
            done = load(loader, numbered / layout, "--split", split, "--resize", 48, "--crop", 40,
                        "--samples", samples, "--batch_size", batch_size, "--num_workers", 4,
                        "--epochs", 3, capture=True,
                        *(("--dali_device", where) if loader != "loader" else ()))
            assert done.returncode == 0, done.stderr
            sizes = [min(batch_size, samples - i) for i in range(0, samples, batch_size)]
            assert [[len(first) for first, _ in epoch] for epoch in done.batches] == [sizes] * 3
            orders.append([numbers_of(epoch, layout) for epoch in done.batches])
        assert "2 pipelines" in done.stdout
        assert [*map(sorted, orders[0])] == [*map(sorted, orders[1])] == [sorted(orders[0][0])] * 3
        if split == "test" or layout == "pairs":
            assert orders[0] == orders[1]
        else:  # DALI's file reader shuffles as well
            assert len(set(map(tuple, orders[1]))) == 3


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_f48_shards_of_the_iterator(numbered, shards, tmp_path):
    """13 pairs over 2, 3 and 5 shards of DALI's iterator -> equally many batches in each; it begins
    with its share, and the shares hold each pair once.

    Reshuffled in the second epoch.
    """
    code = f"""
import sys; sys.path.insert(0, {str(SRC)!r})
from types import SimpleNamespace
from loader_DALI import ExternalInputIterator, Pictures
samples = Pictures({str(numbered / "pairs/train")!r}).samples
orders = [list(range(13)), list(range(12, -1, -1))]
for epoch in range(2):
    seen, steps = [], set()
    for shard in range({shards}):
        source, count = ExternalInputIterator(samples, 2, orders.__getitem__, shard, {shards}), 0
        numbers = []
        try:
            while True:
                *files, number = source(SimpleNamespace(
                    epoch_idx=epoch, iteration=count // 2, idx_in_epoch=count))
                assert [file.tobytes() for file in files] == [
                    open(name, "rb").read() for name in samples[number[0]]]
                numbers.append(int(number[0]))
                count += 1
        except StopIteration:
            pass
        own = orders[epoch][13 * shard // {shards}:13 * (shard + 1) // {shards}]
        assert numbers[:len(own)] == own
        seen += own
        steps.add(count / 2)
    assert sorted(seen) == list(range(13)) and len(steps) == 1, (seen, steps)
print("good")
"""
    (tmp_path / "code.py").write_text(code)
    done = run_forked(tmp_path / "code.py")
    assert done.stdout == "good\n", done.stderr


@each_loader
def test_repeated_to_the_bit_by_its_seed(load, numbered, tmp_path, loader):
    more = ("--lmdb", tmp_path / "x.lmdb") if loader == "loader_LMDB" else ()
    runs = [load(loader, numbered / "classes", *SMALL, "--seed", seed, *more, capture=True)
            for seed in (3, 3, 4)]
    one, two, other = (pixels_of(done)[0] for done in runs)
    assert (one == two).all() and not (one == other).all()


@each_loader
def test_both_pictures_of_a_pair_get_the_same_crop_and_flip(load, numbered, tmp_path, loader):
    more = ("--lmdb", tmp_path / "x.lmdb") if loader == "loader_LMDB" else ()
    done = load(loader, numbered / "pairs", "--resize", 0, "--crop", 40, "--batch_size", 5,
                "--epochs", 3, *more, capture=True)
    assert done.returncode == 0, done.stderr
    corners, flips = set(), set()
    for first, second in [batch for epoch in done.batches for batch in epoch]:
        first, second = first.int(), second.int()
        assert (first[:, :2] == second[:, :2]).all()  # x and y of each pixel
        assert (second[:, 2] - first[:, 2] == 100).all()
        for red, green, _ in first:
            step = (red[0, 1] - red[0, 0]).item()
            assert step in (3, -3) and (green[1] - green[0] == 3).all()
            flips.add(step)
            corners.add((red.min().item(), green[0, 0].item()))
    assert flips == {3, -3} and len(corners) > 20


def test_files_in_the_page_cache_are_read_and_others_mapped(load, tmp_path):
    """40 pictures that the page cache holds -> DALI read()s them; dropped from it -> maps them."""
    dali = changed_dali(tmp_path, ("def read(self):", """def read(self):
        first = next(self.joined())
        maps = Path("/proc/self/maps").read_text()
        print("maps", sum(line.endswith(".jpg") for line in maps.splitlines()))
        yield first["picture 0"].permute(0, 3, 1, 2), self.labels[first["number"].flatten()]
        return"""))
    data = classes(tmp_path / "data", count=20)
    pictures = sorted(data.rglob("*.jpg"))
    for share in (1, 0):
        if not share:
            module_of(SRC / "loader.py").drop_from_cache(pictures)
        if loading.cached(pictures) != share:
            pytest.skip("a file system that does not tell what is cached, or drops nothing")
        done = load(dali, data, *SMALL)
        assert done.returncode == 0, done.stderr
        mapped = int(done.stdout.split("maps ")[1].split()[0])
        assert mapped == 0 if share else mapped > 0


@each_loader
def test_samples_record_and_options(load, tmp_path, loader):
    data = classes(tmp_path / "data")
    done = load(loader, data, *SMALL, "--samples", 7, "--epochs", 3, "--cold", capture=True)
    assert done.returncode == 0, done.stderr
    assert [sum(len(first) for first, _ in epoch) for epoch in done.batches] == [7] * 3
    record = done.record
    assert record["script"] == loader and record["samples"] == 7 and len(record["epochs"]) == 3
    assert 0 < record["bytes"] < sum(path.stat().st_size for path in data.rglob("*.jpg"))
    assert record["options"]["crop"] == 40 and record["environment"]["torch"]
    seconds = sorted(epoch["seconds"] for epoch in record["epochs"][1:])
    assert record["seconds"] == pytest.approx(sum(seconds) / 2)
    assert record["images_per_second"] > 0 and record["megabytes_per_second"] > 0
    assert len([line for line in done.stdout.splitlines() if "images/s" in line]) == 3
    for first, _ in done.batches[0]:
        assert first.shape[1:] == (3, 40, 40) and str(first.dtype) == "torch.uint8"


def test_options_and_defaults_are_the_same_everywhere(tmp_path):
    """Each loader has the baseline's options with the same defaults, and some of its own."""
    code = ("import runpy, sys; p = runpy.run_path(sys.argv[1])['build_parser']();"
            "print({a.option_strings[0]: str(a.default) for a in p._actions})")
    (tmp_path / "code.py").write_text(code)
    texts = {name: run_forked(tmp_path / "code.py", SRC / f"{name}.py") for name in LOADERS}
    options = {name: eval(done.stdout) for name, done in texts.items()}
    for name in LOADERS:
        assert {key: options[name][key] for key in options["loader"]} == options["loader"]


@each_loader
def test_f61_wrong_options(load, tmp_path, loader):
    """--batch_size 0, --samples -1, --crop abc or above --resize, an unknown --split -> one line
    names the option, exit 2; no LMDB file is made."""
    data = classes(tmp_path / "data")
    for options, word in ((("--batch_size", 0), "--batch_size"), (("--crop", "abc"), "--crop"),
                          (("--crop", 300), "--resize 256"), (("--split", "other"), "--split"),
                          (("--samples", -1), "--samples")):
        assert word in error_of(load(loader, data, *options), loader, 2)
    assert not (tmp_path / "data_train.lmdb").exists()


# ------------------------------------------------------------------------------------- faults
def spoil(path, kind):
    good = path.read_bytes()
    path.write_bytes({"zero bytes": b"", "half": good[:len(good) // 2],
                      "text": b"<html>404</html>\n" * 90}[kind])


@pytest.mark.parametrize("loader", [*LOADERS, on_gpu("loader_DALI")])
@pytest.mark.parametrize("kind", ["zero bytes", "half", "text"])
@pytest.mark.parametrize("layout", ["classes", "pairs"])
def test_f01_f02_f05_f46_damaged_picture(load, tmp_path, loader, kind, layout):
    """A picture of zero bytes, cut in half, or HTML -> one line names it, exit 1, also where DALI
    maps files into memory; LMDB leaves it out while building, exit 1, and reads the others when
    run again."""
    data = tmp_path / "data"
    bad = (classes(data) / "train/dog/3.jpg" if layout == "classes"
           else pairs(data) / "train/sharp/scene one/02.png")
    spoil(bad, kind)
    if loader != "loader_LMDB":
        # four for DALI on a GPU to have two pipelines
        done = load(loader, data, *SMALL, "--num_workers", 4)
        assert str(bad) in error_of(done, loader)
        if (loader, layout) == ("loader_DALI", "classes"):  # that was by read(); now mapped
            dali = changed_dali(tmp_path, ("and self.in_memory()", "and False"))
            done = load(dali, data, *SMALL, "--num_workers", 4)
            assert str(bad) in error_of(done, loader)
        return
    done = load(loader, data, *SMALL)
    assert "without 1 samples" in error_of(done, loader)
    assert f"left out: cannot read the picture {bad}" in done.stderr
    again = load(loader, data, *SMALL, capture=True)
    assert again.returncode == 0, again.stderr
    assert again.record["samples"] == (11 if layout == "classes" else 4)


@each_loader
def test_f12_corrupt_exif_is_no_error(load, tmp_path, loader):
    """A JPEG with a corrupt EXIF block -> read like the others, exit 0, not a word on stderr."""
    data = classes(tmp_path / "data")
    exif = b"Exif\0\0" + b"II*\0\x08\0\0\0\xff\xff\x12\x01\x03\0\x01\0" + b"\xff" * 9
    save(photo(5), data / "train/dog/odd.jpg", exif=exif)
    done = load(loader, data, *SMALL, capture=True)
    assert done.returncode == 0 and done.record["samples"] == 13, done.stderr
    assert done.stderr == ""


@each_loader
def test_f19_source_missing_empty_or_without_classes(load, tmp_path, loader):
    """--data_source missing, empty, without classes, with an empty class or empty pair folders ->
    one line names it, exit 2; no LMDB file is made."""
    assert "nowhere" in error_of(load(loader, tmp_path / "nowhere"), loader, 2)
    (tmp_path / "empty").mkdir()
    assert "empty" in error_of(load(loader, tmp_path / "empty"), loader, 2)
    save(photo(1), tmp_path / "flat/train/1.jpg")
    assert "flat" in error_of(load(loader, tmp_path / "flat"), loader, 2)
    (tmp_path / "none/train/cat").mkdir(parents=True)
    assert "none" in error_of(load(loader, tmp_path / "none"), loader, 2)
    for split in ("blurry", "sharp"):
        (tmp_path / "no pairs/train" / split).mkdir(parents=True)
    assert "no pairs" in error_of(load(loader, tmp_path / "no pairs"), loader, 2)
    assert not list(tmp_path.glob("*.lmdb*"))


ODD_NAMES = ["with space.jpg", "it's.jpg", 'say "x".jpg', "-dash.jpg", "new\nline.jpg",
             "Zoë☃.jpg", "x" * 251 + ".jpg", "[a]*?.jpg", "%s%d.jpg"]


@each_loader
@pytest.mark.parametrize("layout", ["classes", "pairs"])
def test_f21_f23_odd_names(load, tmp_path, loader, layout):
    """Names with spaces, quotes, a dash first, a newline, other letters, 255 bytes, in a path with
    spaces, `[`, `]` and `*` -> all are read."""
    data = tmp_path / "a [b] *c d"
    for name in ODD_NAMES:
        for folder in ("cat", "dog") if layout == "classes" else ("blurry", "sharp"):
            save(photo(len(name)), data / "train" / folder / name)
    done = load(loader, data, *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.record["samples"] == len(ODD_NAMES) * (2 if layout == "classes" else 1)


@each_loader
def test_f22_name_that_is_not_utf8(load, tmp_path, loader):
    """A name that is not UTF-8 -> read, but not by DALI, nor where the picture is none: named with
    that byte escaped, exit 1."""
    data = classes(tmp_path / "data", count=2)
    name = os.fsdecode(os.fsencode(data / "train/cat") + b"/caf\xe9.jpg")
    shutil.copy(data / "train/cat/0.jpg", name)
    done = load(loader, data, *SMALL)
    if loader == "loader_DALI":
        assert "not UTF-8" in error_of(done, loader) and "caf\\udce9.jpg" in done.stderr
        return
    assert done.returncode == 0 and done.record["samples"] == 5, done.stderr
    Path(name).write_bytes(b"no picture")
    Path(f"{data}_train.lmdb").unlink(missing_ok=True)
    done = load(loader, data, *SMALL)
    assert done.returncode == 1 and "caf\\udce9.jpg" in done.stderr, done.stderr


@each_loader
def test_f25_f26_other_files_and_endings(load, tmp_path, loader):
    """notes.txt, Thumbs.db, .DS_Store and ._0.jpg beside .jpg .JPEG .jpeg .JPG .PNG .Png .webp ->
    the pictures are read, the rest is passed over."""
    data = classes(tmp_path / "data", count=2)
    for name in ("notes.txt", "Thumbs.db", ".DS_Store", "._0.jpg"):
        (data / "train/cat" / name).write_bytes(b"no picture")
    for name in ("a.JPEG", "b.jpeg", "c.JPG", "d.PNG", "e.webp", "f.Png"):
        save(photo(7), data / "train/dog" / name)
    done = load(loader, data, *SMALL)
    assert done.returncode == 0 and done.record["samples"] == 10, done.stderr


@each_loader
def test_f49_pairs_that_do_not_match(load, tmp_path, loader):
    """A pair of two sizes, a partner missing on either side -> one line names the file: with both
    sizes, exit 1; the missing one, exit 2."""
    data = pairs(tmp_path / "sizes")
    save(photo(1, (81, 64)), data / "train/sharp/scene one/03.png")
    line = error_of(load(loader, data, *SMALL), loader)
    assert "03.png" in line and "(81, 64)" in line and "(80, 64)" in line
    data = pairs(tmp_path / "missing")
    (data / "train/sharp/scene one/01.png").unlink()
    assert str(data / "train/sharp/scene one/01.png") in error_of(load(loader, data), loader, 2)
    data = pairs(tmp_path / "more")
    save(photo(1), data / "train/sharp/scene one/09.png")
    assert str(data / "train/blurry/scene one/09.png") in error_of(load(loader, data), loader, 2)
    data = pairs(tmp_path / "named")
    (data / "train/blurry").rename(data / "train/noisy")
    assert load(loader, data, *SMALL, "--pair", "noisy", "sharp").returncode == 0


@each_loader
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("layout", ["classes", "pairs"])
def test_f50_picture_smaller_than_the_crop(load, tmp_path, loader, split, layout):
    """A picture, or a pair of them, lower than --crop under --resize 0 -> one line names it and its
    size, exit 1, in each loader; under --resize 40 it is read."""
    data = (classes if layout == "classes" else pairs)(tmp_path / "data", split)
    for folder in ["dog"] if layout == "classes" else ["blurry", "sharp"]:
        save(photo(1, (120, 39)), data / split / folder / "low.jpg")
    line = error_of(load(loader, data, "--split", split, "--resize", 0, "--crop", 40), loader)
    assert "low.jpg" in line and "(120, 39)" in line and "--crop" in line
    assert load(loader, data, "--split", split, "--resize", 40, "--crop", 40).returncode == 0


def test_f47_without_dali(tmp_path):
    """loader_DALI.py where DALI cannot be imported -> one line says what to install, exit 1."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['nvidia.dali'] = None\n")
    done = run(sys.executable, SRC / "loader_DALI.py", env={"PYTHONPATH": str(tmp_path)})
    assert "pip install nvidia-dali-cuda120" in error_of(done, "loader_DALI")


def test_f47_without_a_gpu_dali_runs_on_the_cpu(load, tmp_path):
    """--dali_device gpu on a machine without a GPU -> it reads all the same, exit 0.

    Where there is a GPU, it reads with that.
    """
    words = [SRC / "loader_DALI.py", "--data_source", classes(tmp_path / "data"), *SMALL]
    done = run(sys.executable, *words, "--dali_device", "gpu", cwd=tmp_path,
               env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0 and "to cpu" in done.stdout, done.stderr


# --------------------------------------------------------------------------------------- LMDB
@pytest.fixture
def built(load, tmp_path):
    """A data set of classes with its LMDB file, which the folder's pictures made."""
    data = classes(tmp_path / "data")
    assert load("loader_LMDB", data, *SMALL).returncode == 0
    return data, Path(f"{data}_train.lmdb")


def edit(path, change):
    """Opens an LMDB file for writing and lets `change` at a transaction."""
    import lmdb
    with lmdb.open(str(path), subdir=False, lock=False, map_size=2 ** 26) as store:
        with store.begin(write=True) as transaction:
            change(transaction)


def edit_index(path, change):
    def put(transaction):
        index = json.loads(transaction.get(b"index"))
        change(index)
        transaction.put(b"index", json.dumps(index).encode())
    edit(path, put)


def test_lmdb_is_used_like_imagefolder(tmp_path, built):
    data, path = built
    code = f"""
import sys; sys.path.insert(0, {str(SRC)!r})
from torchvision.datasets import ImageFolder
from loader_LMDB import ImageFolderLMDB
many, one = ImageFolder({str(data / "train")!r}), ImageFolderLMDB({str(path)!r})
assert one.classes == many.classes and one.class_to_idx == many.class_to_idx
assert one.targets == many.targets and len(one) == len(many) == len(one.samples)
other = ImageFolderLMDB({str(path)!r}, transform=lambda picture: picture.size)
for i in range(len(one)):
    assert one[i][1] == many[i][1] and one[i][0].tobytes() == many[i][0].tobytes()
    assert other[i] == (many[i][0].size, many[i][1])
print("same")
"""
    done = run(sys.executable, "-c", code)
    assert done.stdout == "same\n", done.stderr


def test_lmdb_needs_no_folder_once_it_is_built(load, built, tmp_path):
    data, path = built
    shutil.rmtree(data)
    assert load("loader_LMDB", data, *SMALL).returncode == 0
    assert load("loader_LMDB", tmp_path / "elsewhere", *SMALL, "--lmdb", path).returncode == 0


def test_lmdb_of_other_pairs_is_refused(load, tmp_path):
    data = pairs(tmp_path / "data")
    assert load("loader_LMDB", data, *SMALL).returncode == 0
    shutil.copytree(data / "train/blurry", data / "train/noisy")
    line = error_of(load("loader_LMDB", data, *SMALL, "--pair", "noisy", "sharp"), "loader_LMDB", 2)
    assert "--pair" in line
    line = error_of(load("loader_LMDB", data, *SMALL, "--split", "test", "--lmdb",
                         f"{data}_train.lmdb"), "loader_LMDB", 2)
    assert "--split" in line


def test_f29_disk_full(load, tmp_path):
    """A full disk while building LMDB (a tmpfs of 1 MB; without root, RLIMIT_FSIZE) -> one line
    says so, exit 1, no file left; with room again the same command builds."""
    data = tmp_path / "data"
    for i in range(24):
        save(photo(i, (300, 300)), data / "train/cat" / f"{i}.png")
    with SmallDisk(tmp_path / "small", 1024) as disk:
        words = [sys.executable, SRC / "loader_LMDB.py", "--data_source", data, "--lmdb",
                 disk.folder / "x.lmdb", "--result_dir", tmp_path, "--num_workers", "0",
                 "--epochs", "1"]
        line = error_of(run(*words, **disk.options), "loader_LMDB")
        assert "x.lmdb" in line and "disk full" in line, line
        assert list(disk.folder.iterdir()) == []
        disk.make_room()
        assert run(*words).returncode == 0


@each_loader
def test_f29_disk_full_for_the_record(loader, tmp_path):
    """A full disk (a tmpfs; without root, RLIMIT_FSIZE) where the record goes -> one line names it,
    exit 1, and there is no half record."""
    data = classes(tmp_path / "data")
    with SmallDisk(tmp_path / "small", 4, 512) as disk:
        if disk.mounted:
            (disk.folder / "other").write_bytes(bytes(4096))
        done = run(sys.executable, SRC / f"{loader}.py", "--data_source", data, "--result_dir",
                   disk.folder, "--num_workers", "0", *SMALL, **disk.options)
        if not disk.mounted and loader == "loader_LMDB":
            pytest.skip("no tmpfs can be mounted, and a limit on files stops the build first")
        assert f"cannot write {disk.folder}/{loader}.json" in error_of(done, loader)
        assert not list(disk.folder.glob("*.json*"))


def test_f35_more_data_than_the_map(load, tmp_path):
    """More data than LMDB's map of 1 MB -> it grows; all pictures are there, to the bit."""
    data = tmp_path / "data"
    for i in range(24):
        save(photo(i, (300, 300)), data / "test/cat" / f"{i:02}.png")
    done = load("loader_LMDB", data, "--split", "test", capture=True)
    assert Path(f"{data}_test.lmdb").stat().st_size > 3e6
    plain = load("loader", data, "--split", "test", capture=True)
    assert (pixels_of(done)[0] == pixels_of(plain)[0]).all() and len(pixels_of(done)[0]) == 24


def test_f36_killed_while_building(load, tmp_path):
    """SIGKILL while LMDB is built -> no file under its name; the half one, named so, is an error:
    to be built again. The same command then makes the file of a clean build."""
    data = tmp_path / "data"
    for i in range(40):
        save(photo(i, (400, 400)), data / "train/cat" / f"{i}.png")
    path = Path(f"{data}_train.lmdb")
    part = Path(f"{path}.part")
    process = start([sys.executable, SRC / "loader_LMDB.py", "--data_source", data, "--num_workers",
                     "0", "--epochs", "1", "--result_dir", tmp_path])
    until = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 2 ** 20) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert part.exists() and not path.exists()
    shutil.copy(part, tmp_path / "copy.lmdb")
    line = error_of(load("loader_LMDB", data, "--lmdb", tmp_path / "copy.lmdb"), "loader_LMDB")
    assert "copy.lmdb" in line and "built again" in line
    assert load("loader_LMDB", data).returncode == 0
    assert not part.exists()
    clean = tmp_path / "clean.lmdb"
    assert load("loader_LMDB", data, "--lmdb", clean).returncode == 0
    assert clean.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("loader", ["loader_LMDB", "train_LMDB"])
def test_f30_f36_killed_10_times_while_building(loader, rng, tmp_path):
    """10 SIGKILLs while loader_LMDB.py or train_LMDB.py builds its file, at moments left to chance,
    then run to its end -> never a half file under the final name; then the bytes of one clean
    build, and nothing temporary."""
    data = tmp_path / "data"
    for split in ("train", "test"):
        for i in range(200):
            save(photo(i, (200, 150)), data / split / "cat" / f"{i:03}.png")
    options = ["--data_source", data, "--num_workers", 0] if loader == "loader_LMDB" else [
        "--dataset", data, "--workers", 0, "--batch_size", 20, "--steps", 1, "--width", 2]

    def begun(folder):
        """A run, and the moment at which it began to build."""
        folder.mkdir(exist_ok=True)
        part = folder / f"{built}.part"
        before = part.stat().st_mtime_ns if part.exists() else 0
        process = Forked(SRC / f"{loader}.py", *options, "--epochs", 1, "--result_dir", tmp_path,
                         "--lmdb", folder / (built if loader == "loader_LMDB" else ""))
        wait_until(lambda: (folder / built).exists() or (
            part.exists() and part.stat().st_mtime_ns != before), pause=0)
        return process, time.monotonic()
    built, killed = "data_train.lmdb", 0
    process, since = begun(tmp_path / "clean")
    wait_until((tmp_path / "clean" / built).exists, pause=0)
    seconds = time.monotonic() - since
    assert process.wait().returncode == 0
    clean = {path.name: path.read_bytes() for path in (tmp_path / "clean").iterdir()}
    final = tmp_path / "killed" / built
    sizes = set()
    while killed < 10:
        process, since = begun(tmp_path / "killed")
        wait_awhile(rng.uniform(0, seconds), final.exists)
        process.kill()
        assert process.wait().returncode in (0, -signal.SIGKILL)
        if final.exists():  # it had come so far
            assert final.read_bytes() == clean[built]
            final.unlink()
        else:
            sizes.add(Path(f"{final}.part").stat().st_blocks)
            killed += 1
    assert len(sizes) > 3
    assert begun(tmp_path / "killed")[0].wait().returncode == 0
    assert {path.name: path.read_bytes() for path in final.parent.iterdir()} == clean


def test_f37_data_file_cut_short(load, built):
    """An LMDB file cut short, at seven lengths -> one line names it: to be built again; exit 1."""
    data, path = built
    whole = path.read_bytes()
    for length in (100, 4096, 8192, 12288, len(whole) // 2, len(whole) - 4096, len(whole) - 1):
        path.write_bytes(whole[:length])
        line = error_of(load("loader_LMDB", data, *SMALL), "loader_LMDB")
        assert str(path) in line and "built again" in line


@pytest.mark.parametrize("content", [b"", b"\0" * 20000, os.urandom(20000)], ids=len)
def test_f38_garbage(load, built, content):
    """An LMDB file of zero bytes, of zeros or of noise -> one line names it: to be built again;
    exit 1."""
    data, path = built
    path.write_bytes(content)
    line = error_of(load("loader_LMDB", data, *SMALL), "loader_LMDB")
    assert str(path) in line and "built again" in line


def test_f39_wrong_path(load, built, tmp_path):
    """--lmdb in a folder that is not there, --lmdb a folder, a new --lmdb of no --data_source -> an
    error, exit 1 or 2; no file is left behind."""
    data, _ = built
    before = sorted(tmp_path.glob("*"))
    line = error_of(load("loader_LMDB", data, "--lmdb", tmp_path / "no/such/x.lmdb"), "loader_LMDB")
    assert "no/such/x.lmdb" in line
    assert str(data) in error_of(load("loader_LMDB", data, "--lmdb", data), "loader_LMDB")
    wrong = tmp_path / "nowhere"
    error_of(load("loader_LMDB", wrong, "--lmdb", tmp_path / "new.lmdb"), "loader_LMDB", 2)
    assert [path for path in sorted(tmp_path.glob("*")) if not path.name.startswith("run")] == [
        path for path in before if not path.name.startswith("run")]


def test_f41_workers_by_fork_spawn_and_forkserver(tmp_path, built):
    """LMDB opened in the parent, then read by workers of fork, spawn and forkserver -> all read the
    same sums of pixels."""
    _, path = built
    script = tmp_path / "use.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(SRC)!r})
import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from loader_LMDB import ImageFolderLMDB
if __name__ == "__main__":
    transform = v2.Compose([v2.CenterCrop(40), v2.PILToTensor()])
    dataset = ImageFolderLMDB({str(path)!r}, transform)
    sums = [dataset[i][0].sum().item() for i in range(len(dataset))]  # opened here first
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(dataset, 5, num_workers=1, multiprocessing_context=method)
        assert [x.sum().item() for images, _ in loader for x in images] == sums, method
    print("same")
""")
    done = run(sys.executable, script)
    assert done.stdout == "same\n", done.stderr


def test_f42_read_only_folder(load, built, tmp_path):
    """An LMDB file on a read-only disk (where none can be mounted, in a folder without the right to
    write) -> it is read, nothing is made beside it; to build one there is an error, exit 1."""
    data, path = built
    with SmallDisk(tmp_path / "fixed", 4096) as disk:
        shutil.move(path, disk.folder / "x.lmdb")
        disk.make_read_only()
        done = load("loader_LMDB", data, *SMALL, "--lmdb", disk.folder / "x.lmdb")
        assert done.returncode == 0, done.stderr
        assert [each.name for each in disk.folder.iterdir()] == ["x.lmdb"]
        line = error_of(load("loader_LMDB", data, *SMALL, "--lmdb", disk.folder / "y.lmdb"),
                        "loader_LMDB")
        assert "y.lmdb" in line


class Hostile:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("key", [b"3.0", b"index"])
def test_f43_a_pickle_is_never_executed(load, built, tmp_path, key):
    """A pickle as a record of an LMDB file, or as its index -> one line names the file, exit 1;
    nothing is executed."""
    data, path = built
    trap = tmp_path / "trap"
    edit(path, lambda transaction: transaction.put(key, pickle.dumps(Hostile(str(trap)))))
    assert str(path) in error_of(load("loader_LMDB", data, *SMALL), "loader_LMDB")
    assert not trap.exists()


def test_f44_records_that_do_not_fit(load, built):
    """LMDB of another format, without a record, with a label out of range or no number, an index
    too short -> one line names the format, record or file; exit 1."""
    data, path = built
    whole = path.read_bytes()
    edit_index(path, lambda index: index.update(format=2))
    assert "format 2" in error_of(load("loader_LMDB", data, *SMALL), "loader_LMDB")
    path.write_bytes(whole)
    edit(path, lambda transaction: transaction.delete(b"5.0"))
    line = error_of(load("loader_LMDB", data, *SMALL), "loader_LMDB")
    assert "5.0" in line and str(path) in line
    for label in (7, -1, "cat", None):
        path.write_bytes(whole)
        edit_index(path, lambda index: index["samples"][4].__setitem__(0, label))
        line = error_of(load("loader_LMDB", data, *SMALL), "loader_LMDB")
        assert "4.0" in line and str(label) in line
    path.write_bytes(whole)
    edit_index(path, lambda index: index["samples"].pop())
    assert str(path) in error_of(load("loader_LMDB", data, *SMALL), "loader_LMDB")


def test_f62_two_builds_at_once(load, tmp_path):
    """Two runs at once that build one LMDB file -> both read all samples, exit 0; one file, nothing
    beside it."""
    data = tmp_path / "data"
    for i in range(30):
        save(photo(i, (300, 300)), data / "train/cat" / f"{i}.png")
    words = [sys.executable, SRC / "loader_LMDB.py", "--data_source", data, "--num_workers", "0",
             "--epochs", "1", "--result_dir"]
    both = [start([*words, tmp_path / str(i)]) for i in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "30 samples" in out
    assert sorted(path.name for path in tmp_path.glob("*lmdb*")) == ["data_train.lmdb"]
