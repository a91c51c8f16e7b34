"""train_LMDB.py and loader_LMDB.py: the same pictures from one file, and faults of that file."""

import functools
import json
import os
import pickle
import shutil
import signal
import time

import lmdb
import pytest
from PIL import Image

from helpers import (
    ROOT,
    SRC,
    Forked,
    Hostile,
    SmallDisk,
    error_of,
    flags,
    learned,
    run,
    run_forked,
    train,
    wait_awhile,
    wait_until,
    with_little_memory,
)
from test_loader import ODD_NAMES, classes, pairs, photo, save, spoil, unusual, unusual_kinds

LOADER = flags(resize=48, image_size=40, batch_size=4, workers=0, epochs=1)
TRAIN = flags(batch_size=4, image_size=16, width=2, workers=0, epochs=1)
each_script = pytest.mark.parametrize("name", ["loader_LMDB", "train_LMDB"])


def command(name, data, home, *options):
    """Return the words that start a script whose LMDB file is <home>/<data's name>_train.lmdb."""
    words = flags(result_dir=data.parent / "runs", dataset=data, lmdb=home)
    return [SRC / f"{name}.py", *words, *(TRAIN if name == "train_LMDB" else LOADER), *options]


def one_class(data, count, size):
    """Make train and val of one class of PNGs."""
    for split in ("train", "val"):
        for i in range(count):
            save(photo(i, size), data / split / "cat" / f"{i}.png")


def splits(folder, count=6):
    """Make train and val of two classes."""
    return classes(classes(folder, "train", count), "val", count)


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A function: the folder in which a script has built its file of 12 training images."""

    @functools.cache
    def once(name):
        folder = tmp_path_factory.mktemp(name)
        done = run_forked(*command(name, splits(folder / "data"), folder))
        assert done.returncode == 0, done.stderr
        return folder

    return once


@pytest.fixture
def built(once, name, tmp_path):
    """Return a script's command and its LMDB file of 12 training images, built."""
    shutil.copytree(once(name), tmp_path, dirs_exist_ok=True)
    return command(name, tmp_path / "data", tmp_path), tmp_path / "data_train.lmdb"


def edit(path, change):
    """Open an LMDB file for writing and call `change` with a transaction."""
    with lmdb.open(str(path), subdir=False, lock=False, map_size=2**26) as store:
        with store.begin(write=True) as transaction:
            change(transaction)


def edit_index(path, change):
    def put(transaction):
        index = json.loads(transaction.get(b"index 2"))
        change(index)
        transaction.put(b"index 2", json.dumps(index).encode())

    edit(path, put)


# ------------------------------------------------------------------------------ what they read
def test_both_scripts_read_what_either_has_built(tmp_path):
    for first, second in (("loader_LMDB", "train_LMDB"), ("train_LMDB", "loader_LMDB")):
        home, data = tmp_path / first, splits(tmp_path / "data")
        home.mkdir()
        for name in (first, second):
            done = run_forked(*command(name, data, home))
            assert done.returncode == 0 and "12 " in done.stdout, done.stderr
            if name == first:
                made = (home / "data_train.lmdb").stat().st_mtime_ns
        assert (home / "data_train.lmdb").stat().st_mtime_ns == made
        assert sorted(path.name for path in home.iterdir()) == ["data_test.lmdb", "data_train.lmdb"]


@unusual_kinds
@pytest.mark.fault(
    "corrupt EXIF",
    "odd file names",
    "name that is not UTF-8",
    "brackets in the path",
    "other files among the images",
)
def test_training_is_the_baselines_bit_for_bit(tmp_path):
    """Pictures of all kinds and names, in a folder whose name has special characters."""
    data = tmp_path / "a [b] *c d"
    for split in ("train", "val"):
        unusual(data / split / "a")
        for odd in [*ODD_NAMES, os.fsdecode(b"caf\xe9.jpg")]:
            save(photo(len(odd)), data / split / "it's -1" / odd)
        for other in ("a.txt", "Thumbs.db", ".DS_Store"):
            (data / split / "a" / other).write_bytes(b"no picture")
    options = [*TRAIN, *flags(epochs=2, augment="resized", result_dir=tmp_path, dataset=data)]
    plain, _ = train(SRC / "train.py", *options)
    for _ in ("built", "read"):
        record, _ = train(SRC / "train_LMDB.py", *options)
        assert learned(record["epochs"]) == learned(plain["epochs"])
        assert record["val_top1"] == plain["val_top1"]


def test_training_reads_the_file_and_not_the_folder(tmp_path):
    data = splits(tmp_path / "data")
    options = [*TRAIN, "--result_dir", tmp_path, "--dataset", data]
    first, _ = train(SRC / "train_LMDB.py", *options)
    for path in data.rglob("*.jpg"):  # of the same size and time as before, but no picture
        status = path.stat()
        path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    again, _ = train(SRC / "train_LMDB.py", *options)
    assert again["epochs"][0]["loss"] == first["epochs"][0]["loss"]


@pytest.mark.parametrize("name", ["loader_LMDB"])
def test_used_like_imagefolder(built, tmp_path):
    (tmp_path / "code.py").write_text(f"""
import sys; sys.path.insert(0, {str(SRC)!r})
import os
from torchvision.datasets import ImageFolder
from loader_LMDB import ImageFolderLMDB
many, one = ImageFolder({str(built[1].parent / "data/train")!r}), ImageFolderLMDB({str(built[1])!r})
assert one.classes == many.classes and one.class_to_idx == many.class_to_idx
assert len(one) == len(many) == len(one.samples)
other = ImageFolderLMDB({str(built[1])!r}, transform=lambda picture, label: (picture.size, label))
for i in range(len(one)):
    assert one[i][1] == many[i][1] and one[i][0].tobytes() == many[i][0].tobytes()
    assert other[i] == (many[i][0].size, many[i][1])
    assert one.size(one.samples[i][0]) == os.path.getsize(many.samples[i][0])
one.files()  # closes the file: pages that are mapped cannot be dropped from the page cache
assert {built[1].name!r} not in open("/proc/self/maps").read()
print("same")
""")
    done = run_forked(tmp_path / "code.py")
    assert done.stdout == "same\n", done.stderr


@pytest.mark.parametrize("name", ["loader_LMDB"])
def test_loader_needs_no_folder_once_the_file_is_built(built, tmp_path):
    words, path = built
    shutil.rmtree(tmp_path / "data")
    done = run_forked(*words)
    assert done.returncode == 0 and "12 samples" in done.stdout, done.stderr


def test_folders_of_other_pairs_are_refused(tmp_path):
    data = pairs(tmp_path / "data")
    words = command("loader_LMDB", data, tmp_path)
    assert run_forked(*words).returncode == 0
    shutil.copytree(data / "train/blurry", data / "train/noisy")
    line = error_of(run_forked(*words, "--pair", "noisy", "sharp"), "loader_LMDB")
    assert "holds other files" in line
    assert run_forked(*words).returncode == 0


# ------------------------------------------------------------------------- other pictures
def grow(data):
    shutil.copy(data / "train/cat/0.jpg", data / "train/cat/new.jpg")


def rename(data):
    (data / "train/cat/5.jpg").rename(data / "train/cat/9.jpg")


def change_time(data):
    os.utime(data / "train/dog/2.jpg", ns=(1, 1))


def change_size(data):
    path = data / "train/dog/2.jpg"
    time_ns = path.stat().st_mtime_ns
    save(photo(77, (50, 50)), path)
    os.utime(path, ns=(time_ns, time_ns))


@each_script
@pytest.mark.fault("images replaced under an LMDB file")
@pytest.mark.parametrize(
    "change", [grow, rename, change_time, change_size], ids=lambda change: change.__name__
)
def test_pictures_have_changed(built, name, change, tmp_path):
    words, path = built
    change(tmp_path / "data")
    line = error_of(run_forked(*words), name)
    assert f"{path} holds other files than {tmp_path}/data/train: remove it" in line
    path.unlink()
    assert run_forked(*words).returncode == 0


@each_script
@pytest.mark.fault("images replaced under an LMDB file")
def test_another_dataset_of_the_same_names(built, name, tmp_path):
    other = splits(tmp_path / "elsewhere/data")
    line = error_of(run_forked(*command(name, other, tmp_path)), name)
    assert f"{tmp_path}/data_train.lmdb holds other files than {other}/train" in line
    assert run_forked(*built[0]).returncode == 0


# ---------------------------------------------------------------------------- while it is built
def test_both_scripts_build_and_open_a_file_with_the_same_code():
    """So one of them shows what kills and runs at once do."""
    one, other = (
        [
            block
            for block in (SRC / f"{name}.py").read_text().split("# new #\n")
            if "def build_lmdb(" in block or "def open_lmdb(" in block
        ]
        for name in ("loader_LMDB", "train_LMDB")
    )
    assert one == other and len(one) == 2


@each_script
@pytest.mark.fault("full disk")
def test_disk_full_while_building(name, tmp_path):
    """The error names the file. No file has the final name; with room the same command succeeds."""
    data = tmp_path / "data"
    one_class(data, 24, (300, 300))
    with SmallDisk(tmp_path / "small", 1024) as disk:
        words = command(name, data, disk.folder)
        done = disk.run(*words)
        assert done.returncode == 1, done.stderr
        line = f"{name}.py: error: cannot build {disk.folder}/data_train.lmdb: mdb_"
        assert done.stderr.splitlines()[-1].startswith(line), done.stderr
        assert [path.name for path in disk.folder.iterdir()] == ["data_train.lmdb.part"]
        disk.make_room()
        assert run_forked(*words).returncode == 0
        assert not list(disk.folder.glob("*.part"))


@each_script
@pytest.mark.fault("LMDB file that has to grow")
def test_large_and_many_files(name, tmp_path):
    """Every byte of files far larger than a page, and of more small ones than a page holds."""
    data = tmp_path / "data"
    for split in ("train", "val"):
        for i in range(4):
            save(photo(i, (900, 700)), data / split / "large" / f"{i}.png")
        for i in range(300):
            save(Image.new("RGB", (8, 8), (i % 256, 0, 0)), data / split / "small" / f"{i:03}.png")
    done = run_forked(*command(name, data, tmp_path, "--batch_size", 100))
    assert done.returncode == 0, done.stderr
    with (
        lmdb.open(
            str(tmp_path / "data_train.lmdb"), subdir=False, readonly=True, lock=False
        ) as store,
        store.begin() as transaction,
    ):
        index = json.loads(transaction.get(b"index 2"))
        assert len(index["files"]) == 304
        for i, (path, size, _) in enumerate(index["files"]):
            content = (data / "train" / path).read_bytes()
            assert transaction.get(b"%d" % i) == content and size == len(content)


@each_script
@pytest.mark.fault("LMDB file that has to grow")
def test_built_with_little_address_space(name, tmp_path):
    """As under `ulimit -v`, which batch systems set: lmdb maps the largest size that a file may get."""
    words = command(name, splits(tmp_path / "data"), tmp_path)
    done = run_forked(with_little_memory(tmp_path), *words)
    assert done.returncode == 0 and (tmp_path / "data_train.lmdb").exists(), done.stderr


@pytest.mark.fault("kill while resizing", "kill while building an LMDB file")
@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_while_building(times, rng, tmp_path):
    """A half-built file never has the final name; the last run makes that of a clean build."""
    data, built = tmp_path / "data", "data_train.lmdb"
    one_class(data, 200, (200, 150))

    def begin(home):
        """Start a run; return it and the moment at which it began to build."""
        home.mkdir(exist_ok=True)
        part = home / f"{built}.part"
        before = part.stat().st_mtime_ns if part.exists() else 0
        process = Forked(*command("loader_LMDB", data, home))
        wait_until(
            lambda: (
                (home / built).exists() or (part.exists() and part.stat().st_mtime_ns != before)
            ),
            pause=0,
        )
        return process, time.monotonic()

    process, since = begin(tmp_path / "clean")
    wait_until((tmp_path / "clean" / built).exists, pause=0)
    seconds = time.monotonic() - since
    assert process.wait().returncode == 0
    clean = {path.name: path.read_bytes() for path in (tmp_path / "clean").iterdir()}
    final, killed = tmp_path / "killed" / built, 0
    while killed < times:
        process, since = begin(final.parent)
        wait_awhile(rng.uniform(0, seconds), final.exists)
        process.kill()
        assert process.wait().returncode in (0, -signal.SIGKILL)
        if final.exists():  # the kill came too late
            assert final.read_bytes() == clean[built]
            final.unlink()
        else:
            killed += 1
    assert run_forked(*command("loader_LMDB", data, final.parent)).returncode == 0
    assert {path.name: path.read_bytes() for path in final.parent.iterdir()} == clean


@pytest.mark.fault("two runs at once")
def test_three_runs_build_one_file(tmp_path):
    data = tmp_path / "data"
    one_class(data, 60, (300, 300))
    started = [
        Forked(*command("loader_LMDB", data, tmp_path, "--result_dir", tmp_path / f"runs {k}"))
        for k in range(3)
    ]
    for process in started:
        done = process.wait()
        assert done.returncode == 0 and "60 " in done.stdout, done.stderr
    whole = tmp_path / "data_train.lmdb"
    with lmdb.open(str(whole), subdir=False, readonly=True, lock=False) as store:
        assert store.stat()["entries"] == 61


def test_two_processes_of_one_training_build_one_file(tmp_path):
    data = splits(tmp_path / "data")
    (tmp_path / "joined.py").write_text(run(ROOT / "compose.sh", "DDP", "LMDB").stdout)
    options = [*TRAIN, "--result_dir", tmp_path, "--dataset", data]
    record, _ = train(tmp_path / "joined.py", *options)
    plain, _ = train(SRC / "train_DDP.py", *options)
    assert record["epochs"][0]["loss"] == pytest.approx(plain["epochs"][0]["loss"], abs=1e-6)
    assert {"data_test.lmdb", "data_train.lmdb"} <= {path.name for path in tmp_path.iterdir()}


# ------------------------------------------------------------------------------- a bad file
@each_script
@pytest.mark.fault("LMDB file cut short")
def test_cut_short(built, name):
    words, path = built
    whole = path.read_bytes()
    for length in (100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        line = error_of(run_forked(*words), name)
        assert str(path) in line and "remove it to build it again" in line


@each_script
@pytest.mark.fault("garbage as an LMDB file")
@pytest.mark.parametrize(
    "content", [b"", b"\0" * 20000, os.urandom(20000)], ids=["empty", "zeros", "noise"]
)
def test_garbage(built, name, content):
    words, path = built
    path.write_bytes(content)
    line = error_of(run_forked(*words), name)
    assert str(path) in line and "remove it to build it again" in line


@each_script
@pytest.mark.fault("wrong path")
def test_wrong_path(name, tmp_path):
    """A folder that is missing, a file where a folder belongs, a folder where a file belongs."""
    data = splits(tmp_path / "data")
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "no/such", tmp_path / "file"):
        assert str(home) in error_of(run_forked(*command(name, data, home)), name)
    (tmp_path / "data_train.lmdb").mkdir()
    line = error_of(run_forked(*command(name, data, tmp_path)), name)
    assert f"{tmp_path}/data_train.lmdb" in line
    assert not [path for path in tmp_path.rglob("*lmdb*") if path.is_file()]


@pytest.mark.fault("no images in the source")
@each_script
def test_dataset_missing(name, tmp_path):
    done = run_forked(*command(name, tmp_path / "data", tmp_path))
    assert "data" in error_of(done, name, 2) and not list(tmp_path.glob("*lmdb*"))


@pytest.mark.fault("start methods of LMDB workers")
def test_workers_of_each_start_method(tmp_path):
    """The parent reads pictures of both scripts before it starts the workers."""
    (tmp_path / "use.py").write_text(f"""
import shutil, sys; sys.path.insert(0, {str(SRC)!r})
from pathlib import Path
from torch.utils.data import DataLoader
import loader_LMDB, train_LMDB
data, path = Path({str(splits(tmp_path / "data"))!r}), {str(tmp_path / "file.lmdb")!r}

def size(picture, *label):
    return picture.size, *label

if __name__ == "__main__":
    images = train_LMDB.open_folder(data, "train", size)
    train_LMDB.read_from_lmdb(images, path)
    for picture in [*data.rglob("*.jpg")]:
        picture.unlink()
    # a process can open a file once only
    dataset = images + loader_LMDB.ImageFolderLMDB(shutil.copy(path, path + ".copy"), size)
    here = [dataset[i] for i in range(len(dataset))]
    for method in ("fork", "forkserver"):  # spawn asks the same of them
        assert len(here) == 24 and [*DataLoader(
            dataset, None, num_workers=1, collate_fn=tuple, multiprocessing_context=method)] == here
    print("same")
""")
    done = run_forked(tmp_path / "use.py")
    assert done.stdout == "same\n", done.stderr


@each_script
@pytest.mark.fault("read-only folder")
def test_read_only_folder(built, name, tmp_path):
    """The file is read and nothing is made beside it; building there is an error."""
    with SmallDisk(tmp_path / "fixed", 4096) as disk:
        for path in tmp_path.glob("*.lmdb"):
            shutil.move(path, disk.folder)
        before = sorted(disk.folder.iterdir())
        disk.make_read_only()
        done = run_forked(*command(name, tmp_path / "data", disk.folder))
        assert done.returncode == 0, done.stderr
        other = splits(tmp_path / "other")
        line = error_of(run_forked(*command(name, other, disk.folder)), name)
        assert f"{disk.folder}/other_train.lmdb" in line
        assert sorted(disk.folder.iterdir()) == before


@pytest.mark.fault("pickle in an LMDB record")
@pytest.mark.parametrize("key", [b"3", b"index 2"])
@pytest.mark.parametrize(
    "name, has_folder", [("loader_LMDB", True), ("loader_LMDB", False), ("train_LMDB", True)]
)
def test_a_pickle_is_never_executed(built, name, key, has_folder, tmp_path):
    words, path = built
    trap = tmp_path / "trap"
    edit(path, lambda transaction: transaction.put(key, pickle.dumps(Hostile(str(trap)))))
    if not has_folder:
        shutil.rmtree(tmp_path / "data")
    assert str(path) in error_of(run_forked(*words), name)
    assert not trap.exists()


@each_script
@pytest.mark.fault("LMDB record of another version")
def test_a_record_is_missing(built, name):
    words, path = built
    edit(path, lambda transaction: transaction.delete(b"7"))
    line = error_of(run_forked(*words), name)
    assert "dog/1.jpg" in line and str(path) in line


@each_script
@pytest.mark.fault("kill while building an LMDB file", "LMDB record of another version")
def test_a_file_without_an_index_or_of_another_version(built, name):
    """The index is written last, so a half-built file has none."""
    words, path = built
    edit(path, lambda transaction: transaction.put(b"index", transaction.pop(b"index 2")))
    line = error_of(run_forked(*words), name)
    assert str(path) in line and "remove it to build it again" in line


@pytest.mark.parametrize("name", ["loader_LMDB"])
@pytest.mark.fault("LMDB record of another version")
@pytest.mark.parametrize(
    "change, named",
    [
        (lambda index: index.pop("files"), "'files'"),
        (lambda index: index.pop("classes"), "'classes'"),
        (lambda index: index.update(files=5), "int"),
        (lambda index: index.update(classes=["cat"]), "'dog'"),
        (lambda index: index["files"][3].pop(), "unpack"),
    ],
    ids=["no files", "no classes", "files are a number", "a class is missing", "a short entry"],
)
def test_a_damaged_index_without_the_folder(built, name, change, named, tmp_path):
    words, path = built
    shutil.rmtree(tmp_path / "data")
    edit_index(path, change)
    line = error_of(run_forked(*words), name)
    assert str(path) in line and named in line


@each_script
@pytest.mark.fault("empty image", "image cut in half", "text named as an image")
@pytest.mark.parametrize("kind", ["zero bytes", "half", "text"])
@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_picture(name, kind, workers, tmp_path):
    """It is copied as it is; reading it is an error that names it."""
    data = splits(tmp_path / "data")
    spoil(data / "train/dog/3.jpg", kind)
    for _ in ("built", "read"):
        done = run_forked(*command(name, data, tmp_path, "--workers", workers))
        assert f"dog/3.jpg in {tmp_path}/data_train.lmdb" in error_of(done, name)
    assert not (tmp_path / "runs" / f"{name}.json").exists()
