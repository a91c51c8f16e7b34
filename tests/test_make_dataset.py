"""make_dataset.py gives the same bytes every time, also after an interruption."""

import hashlib
import os
import signal
import sys

import numpy as np
import pytest
from PIL import Image

import make_dataset
from helpers import ROOT, processes_of, run, run_forked, start, wait_until

SCRIPT = ROOT / "make_dataset.py"


def tree(folder):
    """Return {relative path: hash of the bytes} of all files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def make(*words):
    """Run the script to a good end."""
    done = run(sys.executable, SCRIPT, *words)
    assert done.returncode == 0, done.stderr
    return done


def test_digits_are_the_same_with_any_number_of_workers(tmp_path):
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


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL],
)
def test_interrupted_and_run_again(number, tmp_path, rng):
    make("digits", "--dst", tmp_path / "whole", "--train", 20, "--val", 5)
    words = [sys.executable, SCRIPT, "digits", "--dst", tmp_path / "cut", "--train", 20, "--val", 5]

    def drawn():
        return sum(
            name.endswith(".png")
            for _, _, names in os.walk(tmp_path / ".cut.part")
            for name in names
        )

    cut = 0
    for _ in range(3):
        process, enough = start(words), rng.randrange(1, 120)
        wait_until(lambda: process.poll() is not None or drawn() >= enough)
        process.send_signal(number)
        _, err = process.communicate()
        cut += process.returncode != 0
        assert "Traceback" not in err, err
        wait_until(lambda: not processes_of(tmp_path / "cut"))
        assert number == signal.SIGKILL or not (tmp_path / ".cut.part").exists()
        # under the final name there is the whole set or nothing
        assert not (tmp_path / "cut").exists() or tree(tmp_path / "cut") == tree(tmp_path / "whole")
    assert cut
    make(*words[2:])
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "whole"]


def test_two_at_once_make_one_set(tmp_path):
    words = [sys.executable, SCRIPT, "digits", "--dst", tmp_path / "set", "--train", 40, "--val", 9]
    first = start(words)
    wait_until(lambda: (tmp_path / ".set.part").exists() or first.poll() is not None)
    second = run(*words)
    assert first.wait() == second.returncode == 0, second.stderr
    assert second.stdout.endswith("is there already\n")
    assert len([*(tmp_path / "set").rglob("*.png")]) == 10 * 49


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
    make("photos", "--dst", tmp_path / "photos", "--train", 5, "--val", 1)
    paths = sorted((tmp_path / "photos" / "train").rglob("*.JPEG"))
    assert len(paths) == 50 and len({path.parent for path in paths}) == 10
    sizes = []
    for path in paths:
        with Image.open(path) as picture:
            assert picture.mode == "RGB" and picture.format == "JPEG"
            sizes.append(picture.size)
    width, height = (sum(size) / 50 for size in zip(*sizes))
    assert abs(width - 469) < 30 and abs(height - 387) < 30
    mean = sum(path.stat().st_size for path in paths) / 50
    assert 95_000 < mean < 125_000


def test_pairs_match_and_blurry_is_blurred(tmp_path):
    make("pairs", "--dst", tmp_path / "pairs", "--train", 1, "--val", 1)
    for split, count in (("train", 10), ("test", 10)):
        root = tmp_path / "pairs" / split
        sharp, blurry = (
            sorted(path.relative_to(root / kind) for path in (root / kind).rglob("*.png"))
            for kind in ("sharp", "blurry")
        )
        assert sharp == blurry and len(sharp) == count
        for path in sharp[:3]:
            detail = []
            for kind in ("sharp", "blurry"):
                with Image.open(root / kind / path) as picture:
                    detail.append(np.diff(np.asarray(picture, float), axis=1).std())
            assert detail[1] < 0.7 * detail[0]


@pytest.mark.parametrize("name", ["mnist", "cifar10"])  # each has its own way to fail
def test_no_network(name, tmp_path):
    """A proxy that does not answer stands for a missing network."""
    proxy = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = run_forked(SCRIPT, name, "--dst", tmp_path / name, env=proxy)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "network" in done.stderr and name in done.stderr
    assert not (tmp_path / name).exists()


class Downloaded:
    """Stand for a torchvision dataset after its download: tests have no network."""

    def __init__(self, root, train, download):
        assert download
        root.mkdir(exist_ok=True)
        self.classes = ["0 - zero", "1 - one"]
        self.pictures = [(Image.new("L", (28, 28), 9 * i + train), i % 2) for i in range(7)]

    def __getitem__(self, i):
        return self.pictures[i]

    def __len__(self):
        return len(self.pictures)


def test_downloaded_pictures_become_class_folders(tmp_path, monkeypatch):
    from torchvision import datasets

    monkeypatch.setattr(datasets, "MNIST", Downloaded)
    make_dataset.download(tmp_path, "mnist")
    names = sorted(tree(tmp_path))
    assert names[:4] == [
        "train/0/00000.png",
        "train/0/00002.png",
        "train/0/00004.png",
        "train/0/00006.png",
    ]
    assert len(names) == 14
    with Image.open(tmp_path / "val" / "1" / "00003.png") as picture:
        assert picture.getpixel((5, 5)) == 27


def test_imagenette_keeps_the_files_bytes(tmp_path, monkeypatch):
    from torchvision import datasets

    class Imagenette:
        def __init__(self, root, split, download):
            for split in ("train", "val"):
                folder = root / "imagenette2" / split / "n02102040"
                folder.mkdir(parents=True)
                (folder / "a.JPEG").write_bytes(b"a picture")
            self.wnids, self.classes = ["n02102040"], [("English springer", "a spaniel")]

    monkeypatch.setattr(datasets, "Imagenette", Imagenette)
    make_dataset.download(tmp_path, "imagenette")
    assert sorted(tree(tmp_path)) == [
        f"{split}/English_springer/a.JPEG" for split in ("train", "val")
    ]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing"],
        ["digits", "--train", "0"],
        ["mnist", "--train", "3"],
        ["digits", "--seed", "-1"],
    ],
)
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
