"""The training scripts as a user starts them: options, records, pictures, accuracy, wrong use."""

import fcntl
import os
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from torchvision.transforms import v2 as transforms

from helpers import (
    DDP_WORKERS,
    ROOT,
    SOON,
    SRC,
    TINY,
    SmallDisk,
    assert_one_line,
    draw_digits,
    edited,
    flags,
    params,
    run_forked,
    start,
    tiny,
    train,
    weights,
)
from runs import module_of
from test_loader import faulty_kinds, is_pillows, needs_faulty, photo, read_faulty, save, spoil
from test_resize import claims

SCRIPTS = sorted(SRC.glob("train*.py"))
MNIST = ROOT.parent / "shared" / "data" / "mnist_png.tar.xz"


# -------------------------------------------------------------------------- options, records
def test_options_and_defaults_are_the_same_everywhere():
    """The help shows the defaults, such as the batch size."""

    def options(path):
        return {
            action.dest: (
                action.option_strings,
                action.default,
                action.choices,
                action.nargs,
                action.help,
                getattr(action.type, "__qualname__", action.type),
            )
            for action in module_of(path).build_parser()._actions
        }

    for kind, default in (("train", 120), ("loader", 64)):
        baseline = options(SRC / f"{kind}.py")
        assert len(baseline) >= 13
        for path in SRC.glob(f"{kind}*.py"):
            own = options(path)
            assert {name: own[name] for name in baseline} == baseline, path
            shown = module_of(path).build_parser().format_help()
            assert f"(default: {default})" in " ".join(shown.split()), path
        for name in baseline.keys() - {"help"}:
            assert f"--{name}" in baseline[name][0]


def test_as_many_workers_as_usable_cores():
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(usable)])
    try:
        train_options, options = (
            vars(module_of(SRC / f"{name}.py").build_parser().parse_args([]))
            for name in ("train", "loader")
        )
    finally:
        os.sched_setaffinity(0, usable)
    assert (train_options["workers"], options["workers"]) == (1, 1)


@pytest.mark.parametrize("script", params(SCRIPTS))
def test_each_variant_writes_its_record(script, digits, tmp_path):
    workers = DDP_WORKERS if script.stem == "train_DDP" else 1
    if script.stem == "train_compile":  # test_variants.py compiles it
        script = edited(script.stem, tmp_path, SOON)
    folder = tmp_path / "r"
    record, output = train(script, *tiny(digits, folder, workers=workers))
    assert record["script"] == script.stem
    assert record["options"]["batch_size"] == 40 and record["options"]["lr"] == 0.1
    assert record["classes"] == list("0123456789")
    parameters = sum(
        part.numel()
        for name, part in weights(folder, script.stem).items()
        if "running" not in name and "num_b" not in name
    )
    assert output.count(f"{parameters:,} parameters") == 1
    assert len(record["epochs"]) == 2
    for epoch in record["epochs"]:
        assert epoch.keys() == {
            "loss",
            "val_top1",
            "val_top5",
            "seconds",
            "images_per_second",
            "data_wait",
            "val_seconds",
            "save_seconds",
        }
        assert 0 <= epoch["val_top1"] <= epoch["val_top5"] <= 1
        assert epoch["val_seconds"] > 0 and epoch["save_seconds"] > 0
        assert 0 <= epoch["data_wait"] <= 1
        assert epoch["images_per_second"] == pytest.approx(3 * 40 / epoch["seconds"])
    # the first epoch warms up and, in train_profile.py, is profiled
    assert record["images_per_second"] == record["epochs"][1]["images_per_second"]
    assert record["train_seconds"] == record["epochs"][1]["seconds"]
    assert record["warmup_seconds"] > record["epochs"][0]["seconds"]
    assert 0 < record["first_step_seconds"] <= record["epochs"][0]["seconds"]
    assert record["val_top1"] == record["epochs"][-1]["val_top1"]
    assert record["peak_memory_bytes"] == 0  # of the GPU
    assert [line[:17] for line in output.splitlines() if line.startswith("epoch ")] == [
        "epoch 1/2  loss 2",
        "epoch 2/2  loss 2",
    ]
    assert {path.name for path in folder.iterdir() if "trace" not in path.name} == {
        f"{script.stem}.json",
        f"{script.stem}.pt",
    }


def test_progress_bar_on_a_terminal_and_plain_lines_in_a_log(digits, tmp_path):
    words = [sys.executable, SRC / "train.py", *tiny(digits, tmp_path)]
    assert run_forked(*words[1:]).stderr == ""
    controller, terminal = os.openpty()
    os.set_blocking(controller, False)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = start(words, stderr=terminal)
    process.communicate()
    assert process.returncode == 0 and "epoch 2" in os.read(controller, 100_000).decode()
    os.close(terminal)


def test_models_of_torchvision_and_larger_validation(digits, tmp_path):
    options = dict(epochs=1, steps=1, model="resnet18", val_size=48, augment="resized")
    record, output = train(SRC / "train.py", *tiny(digits, tmp_path, **options))
    assert "11,181,642 parameters" in output
    assert record["options"]["val_size"] == 48


# --------------------------------------------------------------------------------- accuracy
@pytest.fixture(scope="module")
def accuracy_of(tmp_path_factory):
    """A function: the validation accuracy that a script reaches on 1,200 digits."""
    folder = tmp_path_factory.mktemp("accuracy")
    draw_digits(folder / "digits", train=120, val=60)

    def accuracy_of(name, **options):
        record, _ = train(
            SRC / f"{name}.py",
            *flags(
                dataset=folder / "digits",
                image_size=16,
                width=4,
                workers=DDP_WORKERS,
                result_dir=folder / name,
                **options,
            ),
        )
        return record["val_top1"]

    return accuracy_of


@pytest.mark.slow  # test_ddp.py and test_variants.py compare the same steps, test_gpu.py accuracies
@pytest.mark.parametrize(
    "name, below, options",
    [
        ("DDP", 0.01, dict(epochs=8, batch_size=40)),
        ("amp", 0.02, dict(epochs=5, batch_size=20, lr=0.05)),
    ],
    ids=["DDP", "amp"],
)
def test_accuracy_is_hardly_below_the_baselines(name, below, options, accuracy_of):
    baseline = accuracy_of("train", **options)
    assert baseline > 0.97 and accuracy_of(f"train_{name}", **options) >= baseline - below


@pytest.mark.skipif(not MNIST.exists(), reason="needs the real MNIST in ../shared/data")
def test_real_mnist_reads_and_trains(tmp_path):
    """Its 10,000 test pictures, of which 1,000 validate: 70,000 files take long to write."""
    command = ["tar", "-xJf", MNIST, "-C", tmp_path, "mnist_png/testing"]
    subprocess.run(command, check=True)
    (tmp_path / "mnist_png" / "testing").rename(tmp_path / "train")
    for folder in sorted((tmp_path / "train").iterdir()):
        (tmp_path / "val" / folder.name).mkdir(parents=True)
        for path in sorted(folder.iterdir())[::10]:
            path.rename(tmp_path / "val" / folder.name / path.name)
    record, output = train(
        SRC / "train.py",
        *flags(
            dataset=tmp_path,
            epochs=1,
            steps=30,
            batch_size=64,
            width=8,
            image_size=16,
            result_dir=tmp_path,
        ),
    )
    assert " 8,996 images" in output and record["val_top1"] > 0.5


# ---------------------------------------------------------------------------------- pictures
@pytest.mark.fault("other files among the images")
def test_layout_of_mnist_png_and_files_that_are_no_pictures(digits, tmp_path):
    data = tmp_path / "mnist_like"
    shutil.copytree(digits / "train", data / "training")
    shutil.copytree(digits / "val", data / "testing")
    for name in ("readme.txt", "Thumbs.db", ".DS_Store"):
        (data / "training" / "3" / name).write_text("no picture")
    _, output = train(SRC / "train.py", *tiny(data, tmp_path / "r"))
    assert " 240 images" in output


@pytest.mark.fault("other folder layouts")
@pytest.mark.parametrize("name", ["train", "train_LMDB", "train_DALI"])
def test_a_hidden_folder_and_a_link_to_a_parent_are_named(name, digits, tmp_path):
    data = tmp_path / ".hidden above" / "data"  # which is nothing to complain of
    shutil.copytree(digits, data)
    words = [SRC / f"{name}.py", *tiny(data, tmp_path / "r")]
    for split in ("train", "val"):
        save(photo(1), data / split / ".ipynb_checkpoints/1-checkpoint.jpg")
    assert_one_line(run_forked(*words), 2, f"{name}.py: error: ", "hidden", "['.ipynb_checkpo")
    for split in ("train", "val"):
        shutil.rmtree(data / split / ".ipynb_checkpoints")
    for split, to in (("train", ".."), ("val", ".."), ("val", "."), ("train", data)):
        (data / split / "3/up").symlink_to(to)
        line = f"data/{split}/3/up/", "a link to one above it repeats images"
        assert_one_line(run_forked(*words), 2, f"{name}.py: error: ", *line)
        (data / split / "3/up").unlink()
    (data / "train/3/link.png").symlink_to(
        data / "train/4/0_00000.png"
        if (data / "train/4/0_00000.png").exists()
        else next((data / "train/4").iterdir())
    )
    assert run_forked(*words).returncode == 0  # a link to an image is one


@pytest.mark.fault("empty image", "image cut in half", "text named as an image")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["zero bytes", "half", "text"])
def test_damaged_picture(kind, workers, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "set")
    bad = tmp_path / "set/train/b" / os.fsdecode(b"caf\xe9.jpg")
    shutil.move(tmp_path / "set/train/b/7.jpg", bad)
    spoil(bad, kind)
    done = run_forked(
        SRC / "train.py",
        *tiny(tmp_path / "set", tmp_path / "r", steps=6, batch_size=4, workers=workers),
    )
    assert_one_line(done, 1, "train.py: error: ", str(bad.parent / "caf"))


@pytest.mark.fault("header of a huge image")
@pytest.mark.parametrize("width, height", [(30_000, 30_000), (2**31 + 28, 28)])
def test_a_header_that_claims_too_much(width, height, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "set")
    bad = tmp_path / "set/train/b/bad.png"
    bad.write_bytes(claims(width, height))
    done = run_forked(
        SRC / "train.py", *tiny(tmp_path / "set", tmp_path / "r", steps=6, batch_size=4)
    )
    assert_one_line(done, 1, "train.py: error: ", str(bad))


@needs_faulty
@faulty_kinds
@pytest.mark.fault("PNG text bomb")
def test_real_faulty_files_are_read_or_named(photos, recwarn, capfd):
    module = module_of(SRC / "train.py")
    cut = [transforms.Resize(16), transforms.CenterCrop(16), transforms.PILToTensor()]
    folder = module.open_folder(photos, "train", transforms.Compose(cut))

    def read(path):
        folder.samples[0] = path, 0
        assert folder[0][0].shape == (3, 16, 16)

    assert {"truncated_jpeg.jpg", "png_decompression_dos.png"} <= read_faulty(read)
    assert all(map(is_pillows, recwarn)) and not capfd.readouterr().err


# --------------------------------------------------------------------------------- wrong use
@pytest.mark.fault("dataset smaller than a batch", "wrong options", "wrong numbers")
@pytest.mark.parametrize(
    "options",
    [
        ["--epochs", "0"],
        ["--epochs", "-1"],
        ["--epochs", "a[$(touch x)]"],
        ["--batch_size", "0"],
        ["--steps", "0"],
        ["--image_size", "0"],
        ["--batch_size", "100000"],
        ["--nothing"],
        ["--lr", "x"],
        ["--seed", "x"],
        ["--augment"],
        ["--augment", "mine"],
    ],
    ids=" ".join,
)
def test_wrong_options(options, digits, tmp_path):
    done = run_forked(SRC / "train.py", "--dataset", digits, *TINY, *options, cwd=tmp_path)
    assert_one_line(done, 2, "train.py: error: ", options[0])
    assert "epoch 1" not in done.stdout
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.json"))


@pytest.mark.fault("wrong options", "wrong numbers")
@pytest.mark.parametrize(
    "options, said",
    [
        (["--model", "nothing"], "Unknown model nothing"),
        (["--workers", "-1"], "num_workers"),
        (["--model", "vit_b_16", "--image_size", "32"], "Wrong image height"),
        (["--lr", "-0.1"], "Invalid learning rate: -0.1"),
        (["--lr", "inf"], "--lr"),
        (["--lr", "nan"], "--lr"),
        (["--seed", "99999999999999999999"], "Overflow"),
    ],
    ids=lambda each: "_".join(each) if isinstance(each, list) else "",
)
def test_what_pytorch_refuses_ends_in_its_message(options, said, digits, tmp_path):
    done = run_forked(SRC / "train.py", "--dataset", digits, *TINY, *options, cwd=tmp_path)
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1], done.stderr
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.json"))


@pytest.mark.fault("unusable target folder", "wrong numbers")
@pytest.mark.parametrize("is_file", [False, True])
def test_a_result_dir_that_cannot_be_written_to(is_file, digits, tmp_path):
    with SmallDisk(tmp_path / "disk", 1024) as disk:
        place = disk.folder / "results"
        if is_file:
            place.write_text("")
        else:
            disk.make_read_only()
        done = run_forked(SRC / "train.py", *tiny(digits, place))
    assert_one_line(done, 1, str(place))
    assert "epoch 1" not in done.stdout


@pytest.mark.fault("no images in the source", "class missing or empty")
def test_datasets_without_pictures_or_classes(digits, tmp_path):
    def tried(folder):
        return run_forked(SRC / "train.py", "--dataset", folder, *TINY, cwd=tmp_path)

    assert_one_line(tried(tmp_path / "nothing"), 2, "--dataset", str(tmp_path / "nothing"))
    empty = tmp_path / "empty"
    (empty / "train").mkdir(parents=True)
    assert_one_line(tried(empty), 1, str(empty))
    (empty / "val").mkdir()
    assert_one_line(tried(empty), 1, str(empty))
    lacking = tmp_path / "lacking"
    shutil.copytree(digits, lacking)
    (lacking / "train" / "7").rename(lacking / "train" / "seven")
    assert_one_line(tried(lacking), 2, "'7'", "'seven'")
    shutil.rmtree(lacking / "val" / "7")
    assert_one_line(tried(lacking), 2, "'seven'")
    for split in ("train", "val"):
        bare = tmp_path / f"bare in {split}"
        shutil.copytree(digits, bare)
        (bare / split / "none here").mkdir()
        assert_one_line(tried(bare), 1, "none here")
    a_file = tmp_path / "file"
    a_file.write_text("")
    assert_one_line(tried(a_file), 2, str(a_file))


@pytest.mark.fault("no images in the source")
def test_the_default_dataset_is_missing(project):
    done = run_forked(project / "src" / "train.py", cwd=project / "src")
    assert_one_line(done, 2, "make_dataset.py digits", "--dataset")


@pytest.mark.fault("loss not finite")
@pytest.mark.parametrize("name", ["train", "train_amp", "train_fused"])
def test_a_loss_that_is_not_finite(name, digits, tmp_path):
    done = run_forked(SRC / f"{name}.py", *tiny(digits, tmp_path, epochs=1, lr="1e30"))
    assert_one_line(done, 1, f"{name}: error: ", "epoch 1", "step 2:", "--lr")
    assert not (tmp_path / f"{name}.json").exists() and not (tmp_path / f"{name}.pt").exists()


# --------------------------------------------------------------------------- ways to start it
def test_from_its_own_folder(project):
    made = run_forked("make_dataset.py", "digits", "--train", 24, "--val", 7, cwd=project)
    assert made.returncode == 0
    done = run_forked("train_DP.py", *TINY, cwd=project / "src")
    assert done.returncode == 0, done.stderr
    assert (project / "src" / "runs" / "train_DP.json").exists()
    # started from elsewhere
    record, _ = train(
        project / "src" / "train_amp.py", *TINY, "--result_dir", project / "runs", cwd="/"
    )
    assert Path(record["options"]["dataset"]).resolve() == (project / "data/digits").resolve()


def test_workers_started_as_on_other_systems(digits, tmp_path):
    """By spawn, as Windows and macOS do; Python 3.14's forkserver demands the same of a script."""
    begin = 'if __name__ == "__main__":\n'
    spawn = f'{begin}    torch.multiprocessing.set_start_method("spawn")\n'
    script = edited("train", tmp_path, (begin, spawn))
    done = run_forked(script, *tiny(digits, tmp_path, epochs=1, workers=1))
    assert done.returncode == 0 and "epoch 1/1" in done.stdout, done.stderr
