"""Pictures with random damage: each is decoded or refused, and nothing crashes or hangs.

FUZZ is their number, by default 50. `pytest -s` shows how many each script decodes.
"""

import itertools
import json
import os
import random
import tarfile
import zlib
from pathlib import Path

import pytest
from PIL import Image

from helpers import SRC, error_of, flags, run_forked
from test_loader import FAULTY, SHARED, photo
from test_resize import encoded, is_clean, resize

COUNT = int(os.environ.get("FUZZ", 50))
CUT = ("--resize", 64, "--image_size", 48)

# Run a loader's main(), but read each sample alone in place of all. The log gets the outcome of
# each; a sample without one is the one at which the process died.
DRIVER = """
import copy, runpy, signal, sys

log, *sys.argv = sys.argv[1:]
names = runpy.run_path(sys.argv[0])["main"].__globals__
DALILoader = names.get("DALILoader")

def read(dataset, args, sampler):
    if not DALILoader:
        return dataset[0]
    sampler = copy.copy(sampler)
    sampler.data_source = dataset
    (pictures, labels), = DALILoader(dataset, args, sampler)
    return pictures[0], labels[0]

def read_each(dataset, *how):
    with open(log, "w", 1) as file:
        for name, label in dataset.samples:
            file.write(f"{name} ")
            file.flush()
            one = copy.copy(dataset)
            one.samples = [(name, label)]
            signal.alarm(300)  # ends a sample that hangs
            try:
                picture, found = read(one, *how)
                is_right = picture.shape == (3, 48, 48) and found == label
                outcome = "decoded" if is_right else f"{picture.shape}, {found}"
            except OSError as error:
                outcome = "refused" if name in str(error) else f"not named: {error}"
            except Exception as error:
                outcome = repr(error)
            file.write(ascii(outcome)[1:-1] + "\\n")
    sys.exit()

if DALILoader:
    names["DALILoader"] = read_each
else:
    names["torch"].utils.data.DataLoader = lambda dataset, *_, **__: read_each(dataset, None, None)
names["main"]()
"""
MODES = ["RGB", "L", "P", "RGBA", "LA", "I;16", "1"]


def sources():
    """Return the bytes of good JPEGs and of good PNGs, real ones if there are any."""
    if not FAULTY.exists():
        pictures = [photo(i, (150, 100 + 10 * i)) for i in range(12)]
        jpegs = [encoded(each, "JPEG", progressive=i % 3 == 0) for i, each in enumerate(pictures)]
        return jpegs, [
            encoded(each.convert(mode), "PNG")
            for each, mode in zip(pictures, itertools.cycle(MODES))
        ]
    paths = sorted(SHARED.glob("imagenet_sample/*/*/*"), key=lambda path: path.stat().st_size)[:16]
    faulty = [path for path in sorted(FAULTY.iterdir()) if path.stat().st_size < 40_000]
    jpegs = [path.read_bytes() for path in [*paths, *faulty] if path.suffix in (".jpg", ".JPEG")]
    pngs = [path.read_bytes() for path in faulty if path.suffix == ".png"]
    for path, mode in zip(paths, itertools.cycle(MODES)):
        with Image.open(path) as image:
            small = image.convert("RGB").resize((120, 90)).convert(mode)
        pngs.append(encoded(small, "PNG"))
    with tarfile.open(SHARED / "mnist_png.tar.xz", "r|xz") as digits:
        some = (digits.extractfile(each) for each in digits if each.name.endswith(".png"))
        pngs += [file.read() for file in itertools.islice(some, 16)]
    return jpegs, pngs


def damaged(rng, one, other):
    """Return the file `one` with a random fault, some of them with a piece of `other`."""
    data = bytearray(one)
    start = rng.randrange(len(data))
    end = min(len(data), start + int(2 ** rng.uniform(0, 13)))
    kind = rng.randrange(9)
    if kind < 3:  # two of three of these in the header
        for _ in range(rng.randint(1, 20)):
            data[rng.randrange(min(700, len(data)) if kind else len(data))] ^= rng.randint(1, 255)
    elif kind == 3:
        del data[start:]
    elif kind == 4:
        data[start:] = other[rng.randrange(len(other)) :]
    elif kind == 5:
        at = rng.randrange(len(other))
        data[start:start] = other[at : at + end - start]
    elif kind == 6:
        data[start:end] = bytes([rng.choice([0, 255])]) * (end - start)
    elif kind == 7:
        data[start:start] = data[start:end]
    else:
        del data[start:end]
    return data


def checked(png):
    """Set the checksums of a PNG right, so that decoders read on."""
    at = 8
    while at + 12 <= len(png):
        end = at + 8 + int.from_bytes(png[at : at + 4], "big")
        if end + 4 <= len(png):
            png[end : end + 4] = zlib.crc32(png[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return png


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory):
    """Make a data set of COUNT damaged files, half of them JPEGs and half PNGs, with any ending."""
    rng = random.Random(0)
    kinds = sources()
    folder = tmp_path_factory.mktemp("fuzz") / "data"
    for i in range(COUNT):
        file = damaged(rng, rng.choice(kinds[i % 2]), rng.choice(rng.choice(kinds)))
        if i % 4 == 1:
            file = checked(file)
        path = folder / "train" / "abcd"[i // 2 % 4] / f"{i:04}{rng.choice(['.JPEG', '.png'])}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file)
    return folder


def files_of(fuzz):
    return sorted(map(str, fuzz.rglob("*.*")))


def count(script, decoded, refused):
    """Show the counts; they have to add up."""
    print(
        f"\n{script}: {COUNT:,} files, {len(decoded):,} decoded, {len(refused):,} refused", end=" "
    )
    assert len(decoded) + len(refused) == COUNT and not {*decoded} & {*refused}


def read_each(fuzz, loader, *options):
    """Return the files that a loader decodes and those it refuses, each read alone."""
    driver, log = fuzz.parent / "driver.py", fuzz.parent / f"{loader}.log"
    driver.write_text(DRIVER)
    done = run_forked(
        driver, log, SRC / f"{loader}.py", "--dataset", fuzz, *CUT, "--batch_size", 1, *options
    )
    assert log.exists(), done.stderr[-2000:]
    lines = log.read_text().splitlines()
    assert done.returncode == 0, f"{done.returncode} at {lines[-1]}\n{done.stderr[-2000:]}"
    outcomes = dict(line.split(" ", 1) for line in lines)
    assert sorted(outcomes) == files_of(fuzz)
    assert {*outcomes.values()} == {"decoded", "refused"}, {*outcomes.values()}
    return [
        [name for name in outcomes if outcomes[name] == found] for found in ("decoded", "refused")
    ]


def place(folder, name):
    """Return the path of a file of `fuzz` in the data set that `linked` made."""
    return folder / "train" / os.path.relpath(name, Path(name).parents[1])


def linked(folder, names):
    """Make a data set of these files."""
    for name in names:
        path = place(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(name, path)
    return folder


def read_together(tmp_path, loader, decoded, refused, *options):
    """Run the loader on all good files, then a few times on some of them with a bad one."""
    own = flags(epochs=1, workers=2, result_dir=tmp_path)
    words = [SRC / f"{loader}.py", *CUT, *own, *options, "--dataset"]
    done = run_forked(*words, linked(tmp_path / "good", decoded))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / f"{loader}.json").read_text())["samples"] == len(decoded)
    rng = random.Random(0)
    for i, bad in enumerate(rng.sample(refused, min(4, len(refused)))):
        folder = linked(tmp_path / f"bad{i}", [*rng.sample(decoded, 5), bad])
        line = error_of(run_forked(*words, folder, "--batch_size", 2), loader)
        assert str(place(folder, bad)) in line


@pytest.mark.fault(
    "empty image",
    "image cut in half",
    "JPEG without its end",
    "text named as an image",
    "corrupt EXIF",
    "header of a huge image",
)
def test_fuzz_resize(fuzz, tmp_path):
    """Each picture is in --dst and can be decoded, or is named."""
    done = resize(fuzz, tmp_path / "out", 64)
    assert is_clean(done, 1), done.stderr
    refused = [
        line.removeprefix("resize_imagenet.py: error: ").split(": ")[0]
        for line in done.stderr.splitlines()
    ]
    decoded = []
    for name in files_of(fuzz):
        made = tmp_path / "out" / os.path.relpath(name, fuzz)
        if made.exists():
            with Image.open(made) as image:
                image.load()
            decoded.append(name)
    count("resize_imagenet.py", decoded, refused)
    assert sorted([*decoded, *refused]) == files_of(fuzz)


@pytest.mark.fault("empty image", "image cut in half", "text named as an image", "corrupt EXIF")
@pytest.mark.parametrize("loader", ["loader", "loader_DALI"])
def test_fuzz_loader(fuzz, tmp_path, loader):
    """Each picture is decoded or ends the run with one line that names it."""
    decoded, refused = read_each(fuzz, loader)
    count(loader, decoded, refused)
    read_together(tmp_path, loader, decoded, refused)


@pytest.mark.gpu
@pytest.mark.fault("empty image", "image cut in half", "text named as an image", "corrupt EXIF")
def test_fuzz_loader_dali_on_a_gpu(fuzz, tmp_path):
    """A start takes seconds on a GPU, so a few pictures are read in each of some runs."""
    rng, ends = random.Random(0), []
    for i in range(5):
        folder = linked(tmp_path / str(i), rng.sample(files_of(fuzz), 3))
        done = run_forked(
            SRC / "loader_DALI.py",
            *CUT,
            *flags(epochs=1, batch_size=2, workers=4, result_dir=tmp_path, dataset=folder),
        )
        if done.returncode:
            error_of(done, "loader_DALI")
        ends.append(done.returncode)
    print(f"\nloader_DALI on a GPU: {ends.count(0)} of {len(ends)} runs decoded all", end=" ")
