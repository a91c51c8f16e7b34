"""make_dataset.py: the same bytes every time, whatever interrupts it."""

import hashlib
import os
import random
import signal
import sys
import time

import pytest
from helpers import ROOT, run, start
from PIL import Image

import make_dataset

SCRIPT = ROOT / "make_dataset.py"


def tree(folder):
    """{relative path: hash of the bytes} of all files."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def make(*words):
    done = run(sys.executable, SCRIPT, *words)
    assert done.returncode == 0, done.stderr
    return done


def test_digits_are_the_same_bytes_every_time_and_from_any_number_of_workers(tmp_path):
    make("digits", "--dst", tmp_path / "a", "--train", 5, "--val", 2)
    make("digits", "--dst", tmp_path / "b", "--train", 5, "--val", 2, "--workers", 1)
    make("digits", "--dst", tmp_path / "c", "--train", 5, "--val", 2, "--seed", 1)
    one, same, other = (tree(tmp_path / name) for name in "abc")
    assert one == same and len(one) == 70 + 1
    pictures = [name for name in one if name.endswith(".png")]
    assert all(one[name] != other[name] for name in pictures)
    assert len({one[name] for name in pictures}) == 70
    with Image.open(tmp_path / "a" / pictures[0]) as picture:
        assert picture.size == (32, 32) and picture.mode == "L"
    assert {name.split("/")[1] for name in pictures} == set("0123456789")


def test_a_smaller_set_is_the_start_of_a_larger(tmp_path):
    make("digits", "--dst", tmp_path / "small", "--train", 2, "--val", 1)
    make("digits", "--dst", tmp_path / "large", "--train", 3, "--val", 1)
    small, large = tree(tmp_path / "small"), tree(tmp_path / "large")
    assert all(large[name] == small[name] for name in small if name != "made.json")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_and_run_again(number, tmp_path):
    make("digits", "--dst", tmp_path / "whole", "--train", 40, "--val", 9)
    words = [sys.executable, SCRIPT, "digits", "--dst", tmp_path / "cut", "--train", 40, "--val", 9]
    cut, wait = 0, random.Random(0)

    def drawn():
        return sum(name.endswith(".png") for _, _, names in os.walk(tmp_path / "cut.part")
                   for name in names)
    for _ in range(6):
        enough = drawn() + wait.randrange(1, 120)  # not before it has begun
        process = start(words)
        while process.poll() is None and drawn() < enough:
            time.sleep(0.001)
        if process.poll() is None:
            process.send_signal(number)
            cut += 1
        _, err = process.communicate(timeout=20)
        assert "Traceback" not in err, err
        # under its final name there is the whole set or nothing
        assert not (tmp_path / "cut").exists() or tree(tmp_path / "cut") == tree(tmp_path / "whole")
    make(*words[2:])
    assert cut >= 1
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "whole"]


def test_made_before_with_other_options_is_refused(tmp_path):
    make("digits", "--dst", tmp_path / "a", "--train", 2, "--val", 1)
    again = make("digits", "--dst", tmp_path / "a", "--train", 2, "--val", 1)
    assert "there already" in again.stdout
    for words in (["--train", 3, "--val", 1], ["--train", 2, "--val", 1, "--seed", 5]):
        done = run(sys.executable, SCRIPT, "digits", "--dst", tmp_path / "a", *words)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("important")
    done = run(sys.executable, SCRIPT, "digits", "--dst", tmp_path / "mine")
    assert done.returncode == 1 and (tmp_path / "mine" / "thesis.txt").exists()


def test_photos_have_imagenets_size_and_weight(tmp_path):
    make("photos", "--dst", tmp_path / "photos", "--train", 10, "--val", 1)
    paths = sorted((tmp_path / "photos" / "train").rglob("*.JPEG"))
    assert len(paths) == 100 and len({path.parent for path in paths}) == 10
    sizes = []
    for path in paths:
        with Image.open(path) as picture:
            assert picture.mode == "RGB" and picture.format == "JPEG"
            sizes.append(picture.size)
    width, height = (sum(size) / 100 for size in zip(*sizes))
    assert abs(width - 469) < 30 and abs(height - 387) < 30
    mean = sum(path.stat().st_size for path in paths) / 100
    assert 95_000 < mean < 125_000


def test_pairs_match_and_blurry_is_blurred(tmp_path):
    import numpy as np
    make("pairs", "--dst", tmp_path / "pairs", "--train", 2, "--val", 1)
    for split, count in (("train", 20), ("test", 10)):
        root = tmp_path / "pairs" / split
        sharp, blurry = (sorted(path.relative_to(root / kind)
                                for path in (root / kind).rglob("*.png"))
                         for kind in ("sharp", "blurry"))
        assert sharp == blurry and len(sharp) == count
        for path in sharp[:3]:
            detail = []
            for kind in ("sharp", "blurry"):
                with Image.open(root / kind / path) as picture:
                    detail.append(np.diff(np.asarray(picture, float), axis=1).std())
            assert detail[1] < 0.7 * detail[0]


@pytest.mark.parametrize("name", ["mnist", "cifar10", "imagenette"])
def test_no_network(name, tmp_path):
    """A proxy that nobody answers at stands for a network that is not there."""
    proxy = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = run(sys.executable, SCRIPT, name, "--dst", tmp_path / name, env=proxy)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "network" in done.stderr and name in done.stderr
    assert not (tmp_path / name).exists()


class Downloaded:
    """Stands for a torchvision dataset after its download, which a test has no network for."""

    def __init__(self, cache, train, download):
        assert download
        self.classes = ["0 - zero", "1 - one"]
        self.pictures = [(Image.new("L", (28, 28), 9 * i + train), i % 2) for i in range(7)]

    def __getitem__(self, i):
        return self.pictures[i]

    def __len__(self):
        return len(self.pictures)


def test_downloaded_pictures_become_class_folders(tmp_path, monkeypatch):
    from torchvision import datasets
    monkeypatch.setattr(datasets, "MNIST", Downloaded)
    make_dataset.download(tmp_path, "mnist", tmp_path / "cache")
    names = sorted(tree(tmp_path))
    assert names[:4] == ["train/0/00000.png", "train/0/00002.png", "train/0/00004.png",
                         "train/0/00006.png"]
    assert len(names) == 14
    with Image.open(tmp_path / "val" / "1" / "00003.png") as picture:
        assert picture.getpixel((5, 5)) == 27


def test_imagenette_keeps_the_files_bytes(tmp_path, monkeypatch):
    from torchvision import datasets
    source = tmp_path / "cache" / "imagenette2" / "train" / "n01" / "a.JPEG"
    source.parent.mkdir(parents=True)
    Image.new("RGB", (40, 30), (9, 99, 199)).save(source, "JPEG")

    class Imagenette:
        def __init__(self, cache, split):
            self.classes = [("tench", "Tinca tinca"), ("English springer",)]
            self._samples = [(str(source), 1)]
    monkeypatch.setattr(datasets, "Imagenette", Imagenette)
    make_dataset.download(tmp_path / "out", "imagenette", tmp_path / "cache")
    for split in ("train", "val"):
        made = tmp_path / "out" / split / "English_springer" / "a.JPEG"
        assert made.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("words", [[], ["nothing"], ["digits", "--train", "0"],
                                   ["mnist", "--train", "3"], ["digits", "--seed", "-1"]])
def test_wrong_use(words, tmp_path):
    done = run(sys.executable, SCRIPT, *words, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = run(sys.executable, SCRIPT, "digits", "--dst", tmp_path / "file" / "digits")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "empty").mkdir()
    make("digits", "--dst", tmp_path / "empty", "--train", 1, "--val", 1)
    assert len(tree(tmp_path / "empty")) == 21


def test_an_interrupted_unpacking_is_done_again(tmp_path, monkeypatch):
    from torchvision import datasets
    left = tmp_path / "cache" / "unpacking" / "imagenette2" / "train" / "n01" / "left.JPEG"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half a pic")

    class Imagenette:
        def __init__(self, root, split, download=False):
            folder = root / "imagenette2" / split / "n01"
            if download:
                assert not left.exists()
                folder.mkdir(parents=True)
                (folder.parent.parent / "val" / "n01").mkdir(parents=True, exist_ok=True)
                (folder / "a.JPEG").write_bytes(b"a picture")
            self.classes = [("tench",)]
            self._samples = [(str(path), 0) for path in folder.iterdir()]
    monkeypatch.setattr(datasets, "Imagenette", Imagenette)
    make_dataset.download(tmp_path / "out", "imagenette", tmp_path / "cache")
    assert (tmp_path / "out" / "train" / "tench" / "a.JPEG").read_bytes() == b"a picture"
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["imagenette2"]
