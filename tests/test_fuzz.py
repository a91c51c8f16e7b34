"""Pictures with random damage, seeded: resize_imagenet.py and the loaders read or name each one.

FUZZ is their number, 200 where it is not set; the README tells of FUZZ=2000. `pytest -s` shows how
many each script decoded.
"""

import importlib.metadata
import itertools
import json
import os
import random
import re
import sys
import tarfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import lmdb
import pytest
from helpers import ROOT, SRC, Forked, run, run_forked
from PIL import Image
from test_loader import SHARED, error_of, photo
from test_resize import encoded, is_clean, words

COUNT = int(os.environ.get("FUZZ", 200))
CUT = ("--resize", 64, "--crop", 48)

# Runs a loader's main(), but where that would read all samples, reads each alone, in the same way.
# It leaves an outcome of each in a log: a sample without one is that at which the process died.
DRIVER = """
import copy, runpy, signal, sys

log, *sys.argv = sys.argv[1:]
names = runpy.run_path(sys.argv[0])["main"].__globals__
DALILoader = names.get("DALILoader")

def read(dataset, args, sampler, order):
    if not DALILoader:
        return dataset[0]
    sampler = copy.copy(sampler)
    sampler.data_source = dataset
    (pictures, labels), = DALILoader(dataset, args, sampler, order)
    return pictures[0], labels[0]

def read_each(dataset, *how):
    with open(log, "w", 1) as file:
        for name, label in dataset.samples:
            file.write(f"{name} ")
            file.flush()
            one = copy.copy(dataset)
            one.samples = [(name, label)]
            signal.alarm(30)  # the death of one that hangs
            try:
                picture, found = read(one, *how)
                is_right = picture.shape == (3, 48, 48) and found == label
                outcome = "decoded" if is_right else f"{picture.shape}, {found}"
            except OSError as error:
                outcome = "named" if name in str(error) else f"not named: {error}"
            except Exception as error:
                outcome = repr(error)
            file.write(ascii(outcome)[1:-1] + "\\n")
    sys.exit()

if DALILoader:
    names["DALILoader"] = read_each
else:
    names["DataLoader"] = lambda dataset, *_, **__: read_each(dataset, None, None, None)
names["main"]()
"""
MODES = ["RGB", "L", "P", "RGBA", "LA", "I;16", "1"]


def sources():
    """The bytes of whole JPEGs and of PNGs: real ones where there are any."""
    if not SHARED.exists():
        pictures = [photo(i, (150, 100 + 10 * i)) for i in range(12)]
        jpegs = [encoded(each, "JPEG", progressive=i % 3 == 0) for i, each in enumerate(pictures)]
        return jpegs, [encoded(each.convert(mode), "PNG")
                       for each, mode in zip(pictures, itertools.cycle(MODES))]
    paths = sorted(SHARED.glob("imagenet_sample/*/*/*"), key=lambda path: path.stat().st_size)[:16]
    faulty = [path for path in sorted(SHARED.glob("faulty/*")) if path.stat().st_size < 40_000]
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
    """The file `one` with a fault, for which it may take a piece of `other`."""
    data = bytearray(one)
    start = rng.randrange(len(data))
    end = min(len(data), start + int(2 ** rng.uniform(0, 13)))
    kind = rng.randrange(9)
    if kind < 3:  # most, in the header
        for _ in range(rng.randint(1, 20)):
            data[rng.randrange(min(700, len(data)) if kind else len(data))] ^= rng.randint(1, 255)
    elif kind == 3:
        del data[start:]
    elif kind == 4:
        data[start:] = other[rng.randrange(len(other)):]
    elif kind == 5:
        at = rng.randrange(len(other))
        data[start:start] = other[at:at + end - start]
    elif kind == 6:
        data[start:end] = bytes([rng.choice([0, 255])]) * (end - start)
    elif kind == 7:
        data[start:start] = data[start:end]
    else:
        del data[start:end]
    return data


def checked(png):
    """A PNG whose checksums are right again, as far as its chunks go."""
    at = 8
    while at + 12 <= len(png):
        end = at + 8 + int.from_bytes(png[at:at + 4], "big")
        if end + 4 <= len(png):
            png[end:end + 4] = zlib.crc32(png[at + 4:end]).to_bytes(4, "big")
        at = end + 4
    return png


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory):
    """A data set of COUNT damaged files: half JPEGs, half PNGs, by whatever name."""
    rng = random.Random(0)
    kinds = sources()
    folder = tmp_path_factory.mktemp("fuzz") / "data"
    files = []
    for i in range(COUNT):
        file = damaged(rng, rng.choice(kinds[i % 2]), rng.choice(rng.choice(kinds)))
        if i % 4 == 1:
            file = checked(file)  # else no decoder looks beyond them
        files.append(folder / "train" / "abcd"[i // 2 % 4] /
                     f"{i:04}{rng.choice(['.JPEG', '.jpg', '.png'])}")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        files[-1].write_bytes(file)
    return SimpleNamespace(folder=folder, files=sorted(map(str, files)), results={})


def count(script, decoded, named):
    """Shows the counts; they have to add up."""
    print(f"\n{script}: {COUNT:,} files, {len(decoded):,} decoded, {len(named):,} named", end=" ")
    assert len(decoded) + len(named) == COUNT and not {*decoded} & {*named}
    readme = (ROOT / "README.md").read_text()
    versions = [f"{name} {importlib.metadata.version(package)}" for name, package in (
        ("Pillow", "pillow"), ("torchvision", "torchvision"), ("DALI", "nvidia-dali-cuda120"))]
    if COUNT == 2000 and SHARED.exists() and all(version in readme for version in versions):
        assert f"| {len(decoded):,} | {len(named):,} |" in readme, "the README's counts are old"


def read_each(fuzz, loader, *options):
    """What a loader decodes and what it names, of all files, each read alone in one process."""
    key = (loader, *options)
    if key not in fuzz.results:
        driver, log = fuzz.folder.parent / "driver.py", fuzz.folder.parent / f"{loader}.log"
        driver.write_text(DRIVER)
        done = run_forked(driver, log, SRC / f"{loader}.py", "--data_source", fuzz.folder, *CUT,
                          "--batch_size", 1, *options, timeout=400)
        lines = log.read_text().splitlines()
        assert done.returncode == 0, f"{done.returncode} at {lines[-1]}\n{done.stderr[-2000:]}"
        outcomes = dict(line.split(" ", 1) for line in lines)
        assert sorted(outcomes) == fuzz.files
        found = {"decoded": [], "named": []}
        for name, outcome in outcomes.items():
            found.setdefault(outcome, []).append(name)
        assert len(found) == 2, {key: found[key] for key in [*found][2:]}
        fuzz.results[key] = found["decoded"], found["named"]
    return fuzz.results[key]


def place(folder, name):
    """Where the data set of `linked` has the file."""
    return folder / "train" / os.path.relpath(name, Path(name).parents[1])


def linked(folder, names):
    """A data set of these files."""
    for name in names:
        path = place(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(name, path)
    return folder


def read_together(tmp_path, loader, decoded, named, *options):
    """A run over all that can be decoded, and twelve over a few of them and a bad one."""
    words = [SRC / f"{loader}.py", *CUT, "--epochs", 1, "--num_workers", 2, "--result_dir",
             tmp_path, *options, "--data_source"]
    done = run_forked(*words, linked(tmp_path / "good", decoded))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / f"{loader}.json").read_text())["samples"] == len(decoded)
    rng = random.Random(0)
    for i, bad in enumerate(rng.sample(named, min(12, len(named)))):
        folder = linked(tmp_path / f"bad{i}", [*rng.sample(decoded, 5), bad])
        line = error_of(run_forked(*words, folder, "--batch_size", 2), loader)
        assert str(place(folder, bad)) in line


def test_fuzz_resize(fuzz, tmp_path):
    """Damaged pictures -> each is in --dst and can be decoded, or is named on a line."""
    done = run(*words(fuzz.folder, tmp_path / "out", 64))
    assert is_clean(done, 1), done.stderr
    named = [line.removeprefix("resize_imagenet.py: error: ").split(": ")[0]
             for line in done.stderr.splitlines()]
    decoded = []
    for name in fuzz.files:
        made = tmp_path / "out" / os.path.relpath(name, fuzz.folder)
        if made.exists():
            with Image.open(made) as image:
                image.load()
            decoded.append(name)
    count("resize_imagenet.py", decoded, named)
    assert sorted([*decoded, *named]) == fuzz.files
    assert f"{len(decoded):,} of {COUNT:,} pictures done" in done.stdout
    assert f"{len(named):,} cannot be done" in done.stdout


def test_fuzz_lmdb_build(fuzz, tmp_path):
    """Damaged pictures -> each is in the file or named on a line; the second run reads it."""
    path = tmp_path / "x.lmdb"
    words = [sys.executable, SRC / "loader_LMDB.py", "--data_source", fuzz.folder, "--lmdb", path,
             *CUT, "--epochs", 1, "--num_workers", 2, "--result_dir", tmp_path]
    done = run(*words)
    line = error_of(done, "loader_LMDB")
    lines = [line for line in done.stderr.splitlines() if line.startswith("left out: ")]
    assert len(lines) == len(done.stderr.splitlines()) - 1, done.stderr
    assert f"without {len(lines)} samples" in line
    named = [re.match("left out: cannot read the picture (.*?): ", line)[1] for line in lines]
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as store:
        with store.begin() as transaction:
            samples = json.loads(transaction.get(b"index"))["samples"]
    decoded = [str(fuzz.folder / "train" / names[0]) for _, names, *_ in samples]
    count("loader_LMDB.py", decoded, named)
    assert (decoded, named) == read_each(fuzz, "loader")
    again = run(*words)
    assert again.returncode == 0 and not again.stderr, again.stderr
    assert f"{len(decoded):,} samples" in again.stdout


def test_fuzz_loader(fuzz, tmp_path):
    """Damaged pictures -> each is decoded, or ends a run with one line that names it."""
    decoded, named = read_each(fuzz, "loader")
    count("loader.py", decoded, named)
    read_together(tmp_path, "loader", decoded, named)


def test_fuzz_loader_dali(fuzz, tmp_path):
    """Damaged pictures, DALI -> each is decoded, or ends a run with a line that names it."""
    decoded, named = read_each(fuzz, "loader_DALI", "--dali_device", "cpu")
    count("loader_DALI.py", decoded, named)
    read_together(tmp_path, "loader_DALI", decoded, named, "--dali_device", "cpu")


@pytest.mark.gpu
def test_fuzz_loader_dali_on_gpu(fuzz, tmp_path):
    """Damaged pictures, DALI on a GPU -> what it decodes on the CPU, and 24 that it does not, are
    decoded, or end a run with a line that names one.

    Together, and eight runs at once, since a start takes three seconds on a GPU: what is named is
    left out of the next runs.
    """
    decoded, named = read_each(fuzz, "loader_DALI", "--dali_device", "cpu")
    print(f"\n{len(decoded)} decoded on the CPU, {len(named)} named", flush=True)
    numbers = itertools.count()

    def refused(groups, *more):
        """For each group of pictures None, or the one that the end of the run over them names."""
        started = []
        for names in groups:
            folder = linked(tmp_path / f"set{next(numbers)}", names)
            started.append((folder, names, Forked(
                SRC / "loader_DALI.py", *CUT, "--epochs", 1, "--num_workers", 2, "--result_dir",
                folder, "--data_source", folder, *more)))
        for folder, names, process in started:
            done = process.wait()
            if not done.returncode:
                record = json.loads((folder / "loader_DALI.json").read_text())
                assert record["samples"] == len(names)
                yield None
                continue
            line = error_of(done, "loader_DALI")
            bad, = [name for name in names if str(place(folder, name)) in line]
            yield bad
    good, left_out = [decoded[i::8] for i in range(8)], []
    while bad := {*refused([names for names in good if names])} - {None}:
        good = [[name for name in names if name not in bad] for names in good]
        left_out += bad
        print(f"{len(left_out)} of them named on the GPU", flush=True)
        assert len(left_out) <= COUNT // 10
    good = sum(good, [])
    rng = random.Random(0)
    tried, found = rng.sample(named, min(24, len(named))), []
    for at in range(0, len(tried), 8):
        for bad, said in zip(tried[at:at + 8], refused(
                [[*rng.sample(good, 5), bad] for bad in tried[at:at + 8]], "--batch_size", 2)):
            assert said in (None, bad)
            found.append(said)
    print(f"loader_DALI.py, GPU: {len(good):,} decoded, {len(left_out)} named that the CPU "
          f"decodes; of {len(found)} that the CPU names {found.count(None)} decoded", end=" ")
