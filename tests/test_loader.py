"""The loaders: equal pictures from all, every sample once an epoch, and faults."""

import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import ROOT, SRC, SmallDisk, error_of, flags, on_gpu, run_forked
from runs import module_of
from test_resize import claims

LOADERS = sorted(path.stem for path in SRC.glob("loader*.py"))
SHARED = ROOT.parent / "shared" / "data"
FAULTY = SHARED / "faulty"
CAPTURE = ROOT / "tests" / "capture.py"
SMALL = ("--resize", 48, "--image_size", 40, "--batch_size", 4)
needs_faulty = pytest.mark.skipif(
    not FAULTY.exists(), reason="needs the pictures of ../shared/data/faulty"
)
# what unusual() saves and what FAULTY holds
unusual_kinds = pytest.mark.fault(
    "PNG named as a JPEG", "CMYK JPEG", "grey JPEG", "EXIF orientation", "endings in any case"
)
faulty_kinds = pytest.mark.fault(
    "image cut in half", "CMYK JPEG", "transparent image", "EXIF orientation", "corrupt EXIF"
)
CORRUPT_EXIF = b"Exif\0\0" + b"II*\0\x08\0\0\0\xff\xff\x12\x01\x03\0\x01\0" + b"\xff" * 9
each_loader = pytest.mark.parametrize("loader", LOADERS)
each_layout = pytest.mark.parametrize("layout", ["classes", "pairs"])
each_decoder = pytest.mark.parametrize("loader", ["loader", "loader_DALI", on_gpu("loader_DALI")])


@pytest.fixture
def load(tmp_path):
    """load(loader, data, option ...) runs a loader.

    Returns its returncode, stdout, stderr, record, and with capture=True the batches: for each
    epoch a list of (first, second).
    """

    def run_loader(loader, data, *options, capture=False):
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        folder.mkdir()
        batches = folder / "batches.pt"
        words = [SRC / f"{loader}.py", "--dataset", data, "--result_dir", folder, *options]
        if "--epochs" not in options:
            words += ["--epochs", 1]
        if "--workers" not in options:
            words += ["--workers", 2]
        if loader == "loader_LMDB" and "--lmdb" not in options:
            words += ["--lmdb", tmp_path]
        if capture:
            words = [CAPTURE, batches, *words]
        done = run_forked(*words, cwd=folder)
        record = folder / f"{loader}.json"
        return SimpleNamespace(
            returncode=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            record=json.loads(record.read_text()) if record.exists() else None,
            batches=torch.load(batches, map_location="cpu") if batches.exists() else None,
        )

    return run_loader


def photo(seed, size=(96, 72), mode="RGB"):
    """Return a picture with smooth parts, edges and a camera's noise, which is mostly grey."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(size)
    pixels = np.asarray(coarse).astype(int) + rng.integers(-12, 12, (size[1], size[0], 1))
    pixels[size[1] // 3 : size[1] // 2, size[0] // 4 : size[0] // 2] = rng.integers(0, 256, 3)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


def save(picture, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        picture.save(
            file,
            options.pop("format", None) or Image.registered_extensions()[path.suffix.lower()],
            **options,
        )
    return path


def classes(folder, split="train", count=6):
    """Make <folder>/<split>/{cat,dog}/*.jpg with `count` pictures in each class."""
    for k, name in enumerate(("cat", "dog")):
        for i in range(count):
            save(photo([k, i], (96, 72 + 4 * i)), folder / split / name / f"{i}.jpg", quality=95)
    return folder


def pairs(folder, split="train", count=5, size=(80, 64)):
    """Make pairs: red is 3x, green is 3y, blue is the pair's number, plus 100 in sharp."""
    x, y = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    for i in range(count):
        for name, more in (("blurry", 0), ("sharp", 100)):
            pixels = np.stack([3 * x, 3 * y, np.full_like(x, i + more)], -1).astype(np.uint8)
            save(Image.fromarray(pixels), folder / split / name / "scene one" / f"{i:02}.png")
    return folder


# --------------------------------------------------------------------------------- agreement
def unusual(folder):
    """Save one picture of each kind that data sets hold; return the names, sorted."""
    wide, high = photo(1, (150, 100)), photo(2, (90, 160))
    for name, picture, options in [
        ("wide.jpg", wide, {}),
        ("high.jpg", high, {}),
        ("odd.jpg", photo(3, (101, 77)), {}),
        ("grey.jpg", wide.convert("L"), {}),
        ("cmyk.jpg", high.convert("CMYK"), {}),
        ("progressive.JPG", wide, {"progressive": True}),
        ("full.jpeg", high, {"subsampling": 0}),
        ("png.JPEG", wide, {"format": "PNG"}),
        ("colour.png", high, {}),
        ("grey.png", wide.convert("L"), {}),
        ("palette.png", high.convert("P"), {}),
        ("web.webp", wide, {"quality": 90}),
        ("bit.bmp", high, {}),
    ]:
        quality = {"quality": 92} if name.lower().endswith(("jpg", "jpeg")) else {}
        save(picture, folder / name, **{**quality, **options})
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x112] = orientation
        save(high, folder / f"exif{orientation}.jpg", quality=92, exif=exif)
    return sorted(path.name for path in folder.iterdir())


def one_a_class(data, paths):
    """Copy each picture to a class of its own, so that its label says which one it is."""
    paths = list(paths)
    for i, path in enumerate(paths):
        (data / "test" / f"{i:03}").mkdir(parents=True)
        shutil.copy(path, data / "test" / f"{i:03}")
    return [path.name for path in paths]


def pixels_of(done):
    """Return the first epoch's pictures in the order of their labels."""
    assert done.returncode == 0, done.stderr
    firsts, labels = (torch.cat(parts) for parts in zip(*done.batches[0]))
    assert labels.sort().values.tolist() == list(range(len(firsts)))
    return firsts[labels.argsort()].int()


def assert_agree(load, data, names, *options):
    """LMDB's pixels equal the baseline's; DALI's on a CPU differ by 2 at most, for 99 of 100."""
    options = ("--split", "test", *options)
    reference = pixels_of(load("loader", data, *options, capture=True))
    assert len(reference) == len(names) and reference.shape[1] == 3
    assert pixels_of(load("loader_LMDB", data, *options, capture=True)).equal(reference)
    dali = pixels_of(load("loader_DALI", data, *options, "--dali_device", "cpu", capture=True))
    for name, one, other in zip(names, reference, dali):
        close = ((one - other).abs() <= 2).float().mean().item()
        assert close >= 0.99, f"{name}: {close:.2%} of the pixels within 2"


@unusual_kinds
@pytest.mark.fault("16-bit PNG")
@pytest.mark.parametrize("resize, crop", [(64, 56), (0, 75)])
def test_loaders_agree_on_every_kind_of_picture(load, tmp_path, resize, crop):
    unusual(tmp_path / "kinds")
    names = one_a_class(tmp_path / "data", sorted((tmp_path / "kinds").iterdir()))
    assert_agree(load, tmp_path / "data", names, "--resize", resize, "--image_size", crop)


@pytest.mark.fault("CMYK JPEG", "EXIF orientation")
@needs_faulty
def test_loaders_agree_on_real_pictures(load, tmp_path):
    names = one_a_class(
        tmp_path / "data",
        [
            *sorted(SHARED.glob("imagenet_sample/val/*/*"))[:24],
            *FAULTY.glob("hopper_or*"),
            *FAULTY.glob("pil_sample_cmyk.jpg"),
            *FAULTY.glob("n02951585*"),
        ],
    )
    assert_agree(load, tmp_path / "data", names)


@pytest.mark.fault("CMYK JPEG", "transparent image")
def test_pixels_are_the_colours_meant(load, tmp_path):
    """CMYK is not inverted, transparent parts have the colours that they hide."""
    red = Image.new("RGB", (64, 64), (200, 30, 40))
    clear = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    palette = Image.new("P", (64, 64), 0)
    palette.putpalette([10, 20, 30] * 256)
    data = tmp_path / "data" / "test"
    save(red.convert("CMYK"), data / "1/x.jpg", quality=95)
    save(clear, data / "3/x.png")
    save(clear.convert("LA"), data / "4/x.png")
    save(palette, data / "5/x.png", transparency=0)
    save(Image.new("RGBA", (64, 64), (200, 30, 40, 255)), data / "6/x.png")
    pixels = pixels_of(load("loader", tmp_path / "data", "--split", "test", capture=True))
    middle = pixels[:, :, 112, 112].tolist()
    for found, expected in zip(
        middle, [(200, 30, 40), (0, 0, 0), (0, 0, 0), (10, 20, 30), (200, 30, 40)]
    ):
        assert max(abs(a - b) for a, b in zip(found, expected)) <= 4, middle


@pytest.mark.gpu
@unusual_kinds
@pytest.mark.fault("16-bit PNG")
@pytest.mark.parametrize("batch_size", [8, 100])  # with two of DALI's pipelines and with one
def test_gpu_decoder_agrees(load, tmp_path, batch_size):
    """The GPU spreads the colours of a JPEG a little otherwise: means differ by less than 1."""
    unusual(tmp_path / "kinds")
    names = one_a_class(
        tmp_path / "data",
        [
            *sorted((tmp_path / "kinds").iterdir()),
            *sorted(SHARED.glob("imagenet_sample/val/*/*"))[:24],
        ],
    )
    options = (tmp_path / "data", "--split", "test", "--workers", 4, "--batch_size", batch_size)
    reference = pixels_of(load("loader", *options, capture=True))
    dali = pixels_of(load("loader_DALI", *options, capture=True))
    means = (reference - dali).abs().float().mean((1, 2, 3))
    assert means.mean() < 0.5
    assert means.max() < 1, names[means.argmax()]


# ----------------------------------------------------------------------- samples and their order
@pytest.fixture(scope="session")
def numbered(tmp_path_factory):
    """13 classes of one picture each and 13 pairs, so that a batch tells which samples it has."""
    folder = tmp_path_factory.mktemp("numbered")
    for split in ("train", "test"):
        for i in range(13):
            save(photo(i, (60 + i, 50)), folder / "classes" / split / f"{i:02}" / "a.jpg")
        pairs(folder / "pairs", split, 13)
    return folder


def dali_loader(module, dataset, sampler, batch_size, device="cpu"):
    """Return loader_DALI.py's DALILoader, in this process."""
    words = flags(dali_device=device, batch_size=batch_size, workers=2, resize=48, image_size=40)
    args = module.build_parser().parse_args([str(word) for word in words])
    return module.DALILoader(dataset, args, sampler)


def numbers_of(epoch, layout):
    """Return the numbers of an epoch's samples, in order."""
    if layout == "classes":
        return [label for _, labels in epoch for label in labels.tolist()]
    return [blue for first, _ in epoch for blue in first[:, 2, 0, 0].tolist()]


@each_loader
@pytest.mark.fault("not divisible by batch or processes")
@pytest.mark.parametrize("layout, batch_size, workers", [("classes", 4, 2), ("pairs", 20, 1)])
def test_every_sample_once_an_epoch(load, numbered, loader, layout, batch_size, workers):
    """In an order, and with crops, that the seed repeats."""
    options = (
        numbered / layout,
        *flags(resize=48, image_size=40, epochs=3, batch_size=batch_size, workers=workers),
    )
    orders, runs = [], []
    for split, seed in (("train", 0), ("train", 0), ("train", 1), ("test", 0)):
        done = load(loader, *options, "--split", split, "--seed", seed, capture=True)
        assert done.returncode == 0, done.stderr
        assert [len(epoch) for epoch in done.batches] == [-(-13 // batch_size)] * 3
        runs.append(done)
        orders.append([numbers_of(epoch, layout) for epoch in done.batches])
        assert [sorted(order) for order in orders[-1]] == [list(range(13))] * 3
    first, again, other, test = orders
    assert len(set(map(tuple, first))) == 3  # a new order each epoch
    assert first == again != other
    assert test == [list(range(13))] * 3
    if layout == "classes":
        one, two, other = map(pixels_of, runs[:3])
        assert one.equal(two) and not one.equal(other)


@each_layout
@pytest.mark.fault("not divisible by batch or processes")
@pytest.mark.parametrize("batch_size, samples", [(5, 13), (4, 9), (3, 11), (1, 3), (12, 13)])
def test_every_sample_once_from_two_pipelines(numbered, layout, batch_size, samples):
    module = module_of(SRC / "loader_DALI.py")
    dataset = module.Images(numbered / layout / "train")
    dataset.samples = dataset.samples[:samples]
    torch.manual_seed(0)  # of the orders
    loader = dali_loader(module, dataset, torch.utils.data.RandomSampler(dataset), batch_size)
    loader.shards = 2
    epochs = [[(first.clone(), second.clone()) for first, second in loader] for _ in range(3)]
    for epoch in epochs:
        assert sorted(numbers_of(epoch, layout)) == list(range(samples))
        assert all(0 < len(first) == len(second) <= batch_size for first, second in epoch)
    assert len({tuple(numbers_of(epoch, layout)) for epoch in epochs}) > 1


@pytest.mark.gpu
@pytest.mark.fault("not divisible by batch or processes")
@pytest.mark.parametrize(
    "layout, batch_size, samples", [("classes", 5, 13), ("classes", 3, 11), ("pairs", 4, 9)]
)
def test_every_sample_once_on_a_gpu(load, numbered, layout, batch_size, samples):
    done = load(
        "loader_DALI",
        numbered / layout,
        *flags(resize=48, image_size=40, workers=4, epochs=3),
        *flags(samples=samples, batch_size=batch_size),
        capture=True,
    )
    assert done.returncode == 0 and "to cuda" in done.stdout, done.stderr
    orders = [numbers_of(epoch, layout) for epoch in done.batches]
    assert len(set(map(tuple, orders))) == 3
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len(set(orders[0])) == len(orders[0]) == samples


@pytest.mark.fault("not divisible by batch or processes")
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_external_input_iterator(numbered, shards):
    """All shards have equally many full batches, which hold each pair; a new order is used."""
    module = module_of(SRC / "loader_DALI.py")
    samples, order = module.Images(numbered / "pairs/train").samples, list(range(13))
    sources = [
        module.ExternalInputIterator(samples, order, 2, shard, shards) for shard in range(shards)
    ]
    for _ in range(2):
        seen = []
        for first, second, numbers in itertools.chain.from_iterable(zip(*sources, strict=True)):
            assert numbers.shape == (2, 1)
            for one, other, (number,) in zip(first, second, numbers, strict=True):
                assert [one.tobytes(), other.tobytes()] == [
                    Path(name).read_bytes() for name in samples[number]
                ]
                seen.append(int(number))
        assert seen[:13] == order
        order.reverse()


@pytest.mark.parametrize("loader", [*LOADERS, on_gpu("loader_DALI")])
def test_both_pictures_of_a_pair_get_the_same_crop_and_flip(load, numbered, loader):
    done = load(
        loader,
        numbered / "pairs",
        *flags(resize=0, image_size=40, batch_size=5, epochs=3),
        capture=True,
    )
    assert done.returncode == 0, done.stderr
    corners, flips = set(), set()
    for first, second in [batch for epoch in done.batches for batch in epoch]:
        first, second = first.int(), second.int()
        assert (first[:, :2] == second[:, :2]).all()  # each pixel's x and y
        assert (second[:, 2] - first[:, 2] == 100).all()
        for red, green, _ in first:
            step = (red[0, 1] - red[0, 0]).item()
            assert step in (3, -3) and (green[1] - green[0] == 3).all()
            flips.add(step)
            corners.add((red.min().item(), green[0, 0].item()))
    assert flips == {3, -3} and len(corners) > 20


# ------------------------------------------------------------------------- options and record
@each_loader
@each_layout
def test_samples_record_and_cold(load, tmp_path, loader, layout):
    data = (classes if layout == "classes" else pairs)(tmp_path / "data")
    done = load(loader, data, *SMALL, "--samples", 4, "--epochs", 3, "--cold", capture=True)
    assert done.returncode == 0, done.stderr
    assert [sum(len(first) for first, _ in epoch) for epoch in done.batches] == [4] * 3
    record = done.record
    assert record["script"] == loader and record["samples"] == 4 and len(record["epochs"]) == 3
    assert 0 < record["bytes"] < sum(path.stat().st_size for path in data.rglob("*.*"))
    assert record["options"]["image_size"] == 40
    assert record["environment"] == dict(torch=torch.__version__, device="cpu")
    for name in ("seconds", "images_per_second", "megabytes_per_second"):
        assert record[name] == pytest.approx(sum(each[name] for each in record["epochs"][1:]) / 2)
    assert len([line for line in done.stdout.splitlines() if "images/s" in line]) == 3
    for first, _ in done.batches[0]:
        assert first.shape[1:] == (3, 40, 40) and first.dtype == torch.uint8


@pytest.mark.parametrize(
    "option, value, named",
    [
        ("--batch_size", 0, "--batch_size"),
        ("--image_size", "abc", "--image_size"),
        ("--image_size", 300, "--resize 256"),
        ("--split", "other", "--split"),
        ("--samples", -1, "--samples"),
        ("--seed", "1" * 20, "--seed"),
    ],
)
def test_wrong_options(load, tmp_path, option, value, named):
    assert named in error_of(load("loader", classes(tmp_path / "data"), option, value), "loader", 2)


# ------------------------------------------------------------------------------------- faults
def spoil(path, kind):
    good = path.read_bytes()
    path.write_bytes(
        {"zero bytes": b"", "half": good[: len(good) // 2], "text": b"<html>404</html>\n" * 90}[
            kind
        ]
    )


@pytest.mark.fault(
    "empty image", "image cut in half", "text named as an image", "corrupt image in a DALI epoch"
)
@pytest.mark.parametrize(
    "loader, kind, layout",
    [
        *itertools.product(
            ["loader", "loader_DALI"], ["zero bytes", "half", "text"], ["classes", "pairs"]
        ),
        # a process with DALI takes long to start on a GPU: each kind and layout once
        pytest.param("loader_DALI", "zero bytes", "classes", marks=pytest.mark.gpu, id="gpu-zero"),
        pytest.param("loader_DALI", "half", "pairs", marks=pytest.mark.gpu, id="gpu-half"),
        pytest.param("loader_DALI", "text", "classes", marks=pytest.mark.gpu, id="gpu-text"),
    ],
)
def test_damaged_picture(load, tmp_path, loader, kind, layout):
    """Each loader names it."""
    data = tmp_path / "data"
    bad = (
        classes(data) / "train/dog/3.jpg"
        if layout == "classes"
        else pairs(data) / "train/sharp/scene one/02.png"
    )
    spoil(bad, kind)
    done = load(loader, data, *SMALL)
    line = error_of(done, loader)
    assert str(bad) in line
    assert not done.record


def test_two_pipelines_share_an_epoch_on_a_gpu(numbered, monkeypatch):
    """DALI refuses two for one file."""
    module = module_of(SRC / "loader_DALI.py")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    dataset = module.Images(numbered / "classes" / "train")
    shards = [
        dali_loader(module, dataset, order, 2, "gpu").shards for order in ([0, 1, 2], [0, 1], [0])
    ]
    assert shards == [2, 1, 1]


def dali_epoch(folder, layout, monkeypatch):
    """Return (a DALILoader of 20 samples, its folder for training, the pipelines it builds)."""
    module, built = module_of(SRC / "loader_DALI.py"), []
    pipeline = module.image_pipeline

    def counted(*words, **options):
        built.append(pipeline(*words, **options))
        return built[-1]

    monkeypatch.setattr(module, "image_pipeline", counted)
    data = (classes if layout == "classes" else pairs)(folder, count=20)
    dataset = module.Images(data / "train")
    sampler = torch.utils.data.RandomSampler(dataset)
    return dali_loader(module, dataset, sampler, 4), data / "train", built


@each_layout
@pytest.mark.fault("corrupt image in a DALI epoch")
@pytest.mark.parametrize("kind", ["text", "gone"])
def test_one_more_pipeline_finds_the_damaged_picture(tmp_path, layout, kind, monkeypatch):
    """A pipeline on a GPU takes seconds to start, so it is no way to start one a picture.

    DALI's own reader is ahead of the picture that it cannot open.
    """
    loader, folder, built = dali_epoch(tmp_path, layout, monkeypatch)
    bad = sorted((folder / ("dog" if layout == "classes" else "sharp/scene one")).iterdir())[15]
    spoil(bad, "text") if kind == "text" else bad.unlink()
    with pytest.raises(OSError) as error:
        list(loader)
    assert str(bad) in str(error.value) and ("No such file" in str(error.value)) == (kind == "gone")
    assert len(built) == (1 if kind == "gone" and layout == "pairs" else 2)  # Python reads pairs


@each_layout
@pytest.mark.fault("corrupt image in a DALI epoch")
def test_an_error_that_is_no_pictures_names_none(tmp_path, layout, monkeypatch, capsys):
    loader, _, built = dali_epoch(tmp_path, layout, monkeypatch)
    epoch = iter(loader)
    next(epoch)

    def fail():
        raise RuntimeError("the driver is lost")

    monkeypatch.setattr(built[0], "share_outputs", fail)
    with pytest.raises(RuntimeError, match="^the driver is lost$"):
        list(epoch)
    assert len(built) == 2
    assert capsys.readouterr().out == "DALI failed and names no file: reading each file alone\n"


@pytest.mark.fault("header of a huge image")
@pytest.mark.parametrize(
    "loader, width, height",
    [
        ("loader", 30_000, 30_000),
        ("loader", 2**31 + 28, 28),
        ("loader_DALI", 30_000, 30_000),
        ("loader_DALI", 2**31 + 28, 28),
        pytest.param("loader_DALI", 30_000, 30_000, marks=pytest.mark.gpu, id="gpu"),
    ],
)
def test_a_header_that_claims_too_much(load, tmp_path, loader, width, height):
    data = classes(tmp_path / "data")
    bad = data / "train/dog/bad.png"
    bad.write_bytes(claims(width, height))
    line = error_of(load(loader, data, *SMALL), loader)
    assert str(bad) in line


def read_faulty(read):
    """Call `read` with each picture of FAULTY; return the names of those that it refuses.

    An error names the file in its last line.
    """
    refused, done = set(), set()
    for file in sorted(FAULTY.iterdir()):
        if file.suffix not in (".png", ".jpg", ".JPEG"):
            continue
        try:
            read(str(file))
            done.add(file.name)
        except OSError as error:
            line = str(error).splitlines()[-1]
            assert str(file) in line
            refused.add(file.name)
    assert {
        "n02951585_can_opener.JPEG",
        "pil_sample_cmyk.jpg",
        "hopper_bad_exif.jpg",
        "hopper_orientation_6.jpg",
        "pil123rgba.png",
    } <= done
    assert {"truncated_image.png", "broken.png"} <= refused
    return refused


def is_pillows(warning):
    """Return whether a warning is one of Pillow's own code."""
    return "/PIL/" in warning.filename or warning.category is ResourceWarning


@needs_faulty
@faulty_kinds
@pytest.mark.fault("PNG text bomb")
@each_decoder
def test_real_faulty_files_are_read_or_refused(loader, photos, recwarn, capfd, request):
    """DALI passes over a PNG's texts, so it reads a text bomb."""
    module = module_of(SRC / f"{loader}.py")
    dataset = module.Images(photos / "train")
    device = "gpu" if request.node.get_closest_marker("gpu") else "cpu"

    def read(path):
        dataset.samples = [(path, 0)]
        if loader == "loader":
            assert dataset[0][0].mode == "RGB"
        else:
            ((images, _),) = dali_loader(module, dataset, [0], 1, device)
            assert images.shape == (1, 3, 40, 40)

    refused = read_faulty(read)
    assert all(map(is_pillows, recwarn)) and "Warning" not in capfd.readouterr().err
    assert "truncated_jpeg.jpg" in refused or device == "gpu"  # a GPU's decoder reads it
    assert ("png_decompression_dos.png" in refused) == (loader == "loader")


@each_loader
@pytest.mark.fault("corrupt EXIF")
def test_corrupt_exif_is_no_error(load, tmp_path, loader):
    data = classes(tmp_path / "data")
    save(photo(5), data / "train/dog/odd.jpg", exif=CORRUPT_EXIF)
    done = load(loader, data, *SMALL)
    assert done.returncode == 0 and done.record["samples"] == 13, done.stderr
    assert "arning" not in done.stderr and "rror" not in done.stderr


@pytest.mark.fault("no images in the source")
def test_source_missing_empty_or_without_classes(load, tmp_path):
    (tmp_path / "empty").mkdir()
    save(photo(1), tmp_path / "flat/train/1.jpg")
    (tmp_path / "none/train/cat").mkdir(parents=True)
    for name in ("blurry", "sharp"):
        (tmp_path / "no pairs/train" / name).mkdir(parents=True)
    for name in ("nowhere", "empty", "flat", "none", "no pairs"):
        assert name in error_of(load("loader", tmp_path / name), "loader", 2)


ODD_NAMES = [
    "with space.jpg",
    "it's.jpg",
    'say "x".jpg',
    "-dash.jpg",
    "new\nline.jpg",
    "Zoë☃.jpg",
    "x" * 251 + ".jpg",
    "[a]*?.jpg",
    "%s%d.jpg",
]


@each_loader
@each_layout
@pytest.mark.fault("odd file names", "brackets in the path")
def test_odd_names(load, tmp_path, loader, layout):
    data = tmp_path / "a [b] *c d"
    for name in ODD_NAMES:
        for folder in ("cat", "dog") if layout == "classes" else ("blurry", "sharp"):
            save(photo(len(name)), data / "train" / folder / name)
    done = load(loader, data, *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.record["samples"] == len(ODD_NAMES) * (2 if layout == "classes" else 1)


@pytest.mark.fault("name that is not UTF-8")
def test_name_that_is_not_utf8(load, tmp_path):
    """It is read, or named with its odd byte escaped."""
    data = classes(tmp_path / "data", count=2)
    name = os.fsdecode(os.fsencode(data / "train/cat") + b"/caf\xe9.jpg")
    shutil.copy(data / "train/cat/0.jpg", name)
    done = load("loader", data, *SMALL)
    assert done.returncode == 0 and done.record["samples"] == 5, done.stderr
    Path(name).write_bytes(b"no picture")
    assert "caf\\udce9.jpg" in error_of(load("loader", data, *SMALL), "loader")


@each_loader
@pytest.mark.fault("other files among the images", "endings in any case")
def test_other_files_and_endings(load, tmp_path, loader):
    """Pictures are found by any known ending in any case; other files are passed over."""
    data = classes(tmp_path / "data", count=2)
    for name in ("notes.txt", "Thumbs.db", ".DS_Store", "._0.jpg"):
        (data / "train/cat" / name).write_bytes(b"no picture")
    for name in ("a.JPEG", "b.jpeg", "c.JPG", "d.PNG", "e.webp", "f.Png"):
        save(photo(7), data / "train/dog" / name)
    done = load(loader, data, *SMALL)
    assert done.returncode == 0 and done.record["samples"] == 10, done.stderr


@each_loader
@each_layout
@pytest.mark.fault("other folder layouts")
def test_a_hidden_folder_is_passed_over_or_named_and_a_link_to_a_parent(
    load, tmp_path, loader, layout
):
    data = (classes if layout == "classes" else pairs)(tmp_path / ".hidden above/data", count=2)
    plain = load(loader, data, *SMALL)
    assert plain.returncode == 0, plain.stderr
    inner = next(path for path in sorted((data / "train").iterdir()))
    save(photo(7), inner / ".7.jpg")
    save(photo(7), inner / ".ipynb_checkpoints/7.jpg")
    again = load(loader, data, *SMALL)
    assert again.returncode == 0 and again.record["samples"] == plain.record["samples"]
    (inner / "up").symlink_to("..")
    assert "up/" in error_of(load(loader, data, *SMALL), loader, 2)
    (inner / "up").unlink()
    save(photo(7), data / "train/.ipynb_checkpoints/7.jpg")
    if layout == "classes":
        assert ".ipynb_checkpoints" in error_of(load(loader, data, *SMALL), loader, 2)


@each_loader
@pytest.mark.fault("pair without a partner")
@pytest.mark.parametrize("size", [(81, 64), (50, 40)])
def test_sizes_of_a_pair_differ(load, tmp_path, loader, size):
    data = pairs(tmp_path / "data")
    save(photo(1, size), data / "train/sharp/scene one/03.png")
    line = error_of(load(loader, data, *SMALL), loader)
    assert "03.png" in line and str(size) in line and "(80, 64)" in line


@pytest.mark.fault("pair without a partner")
def test_partner_missing(load, tmp_path):
    data = pairs(tmp_path / "missing")
    (data / "train/sharp/scene one/01.png").unlink()
    line = error_of(load("loader", data), "loader", 2)
    assert str(data / "train/sharp/scene one/01.png") in line
    data = pairs(tmp_path / "more")
    save(photo(1), data / "train/sharp/scene one/09.png")
    line = error_of(load("loader", data), "loader", 2)
    assert str(data / "train/blurry/scene one/09.png") in line


@each_loader
def test_other_names_of_the_folders_of_pairs(load, tmp_path, loader):
    data = pairs(tmp_path / "data")
    (data / "train/blurry").rename(data / "train/noisy")
    done = load(loader, data, *SMALL, "--pair", "noisy", "sharp")
    assert done.returncode == 0 and done.record["samples"] == 5, done.stderr


@pytest.mark.fault("image smaller than the crop")
@pytest.mark.parametrize(
    "loader, split, layout",
    [
        *itertools.product(LOADERS, ["train", "test"], ["classes", "pairs"]),
        pytest.param("loader_DALI", "train", "classes", marks=pytest.mark.gpu, id="gpu-classes"),
        pytest.param("loader_DALI", "test", "pairs", marks=pytest.mark.gpu, id="gpu-pairs"),
    ],
)
def test_picture_smaller_than_the_crop(load, tmp_path, loader, split, layout):
    """It is an error that names the picture and its size; with --resize it is read."""
    data = (classes if layout == "classes" else pairs)(tmp_path / "data", split)
    for folder in ["dog"] if layout == "classes" else ["blurry", "sharp"]:
        save(photo(1, (120, 39)), data / split / folder / "low.jpg")
    line = error_of(load(loader, data, "--split", split, "--resize", 0, "--image_size", 40), loader)
    assert "low.jpg" in line and "(120, 39)" in line and "--image_size" in line
    assert load(loader, data, "--split", split, "--resize", 40, "--image_size", 40).returncode == 0


@pytest.mark.fault("full disk")
def test_disk_full_for_the_record(tmp_path):
    """There is no half record."""
    data = classes(tmp_path / "data")
    with SmallDisk(tmp_path / "small", 4, 512) as disk:
        if disk.mounted:
            (disk.folder / "other").write_bytes(bytes(4096))
        done = disk.run(
            SRC / "loader.py", *flags(dataset=data, result_dir=disk.folder, workers=0), *SMALL
        )
        assert error_of(done, "loader")
        assert not list(disk.folder.glob("*.json"))


@pytest.mark.fault("no GPU or no DALI")
@pytest.mark.parametrize("name", ["loader_DALI", "train_DALI"])
def test_without_dali(name, tmp_path):
    """The last line says what is missing; loading.sh knows by it that the run is a skip."""
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia/__init__.py").write_text("")
    (tmp_path / "without.py").write_text("""
import runpy, sys
for each in [each for each in sys.modules if each.startswith("nvidia")]:
    del sys.modules[each]
runpy.run_path(sys.argv[1], run_name="__main__")
""")
    done = run_forked(tmp_path / "without.py", SRC / f"{name}.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'nvidia.dali'"


@pytest.mark.fault("no GPU or no DALI")
def test_without_a_gpu_dali_runs_on_the_cpu(load, tmp_path):
    done = load("loader_DALI", classes(tmp_path / "data"), *SMALL, "--dali_device", "gpu")
    assert done.returncode == 0 and "to cpu" in done.stdout, done.stderr


@pytest.mark.fault("start methods of LMDB workers", "start methods of loading workers")
@pytest.mark.parametrize("method, epochs", [("spawn", 1), ("forkserver", 2)])
def test_each_start_method(method, epochs, tmp_path):
    """forkserver is the default of Python 3.14; workers are started anew in each cold epoch."""
    data, script = classes(tmp_path / "data"), tmp_path / "loader.py"
    text, end = (SRC / "loader.py").read_text(), 'if __name__ == "__main__":\n'
    script.write_text(
        text.replace(end, f'{end}    torch.multiprocessing.set_start_method("{method}")\n')
    )
    options = flags(dataset=data, epochs=epochs, workers=1, batch_size=2, result_dir=tmp_path)
    done = run_forked(script, *options, "--cold")
    assert done.returncode == 0 and f"epoch {epochs}/{epochs}" in done.stdout, done.stderr
    record = json.loads((tmp_path / "loader.json").read_text())
    assert record["samples"] == 12 and all(each["seconds"] > 0 for each in record["epochs"])


@pytest.mark.fault("class missing or empty", "other folder layouts")
@pytest.mark.parametrize("name", ["train", "loader"])
def test_a_class_of_other_endings_is_told_which_count(name, tmp_path):
    data = classes(tmp_path / "data")
    for split in ("train", "val", "test"):
        (data / split / "other").mkdir(parents=True, exist_ok=True)
        (data / split / "other" / "x.gif").write_bytes(b"GIF89a")
    done = run_forked(SRC / f"{name}.py", "--dataset", data, "--result_dir", tmp_path / "r")
    assert done.returncode == {"train": 1, "loader": 2}[name], done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "the classes other" in done.stderr and ".webp" in done.stderr
