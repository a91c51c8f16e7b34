"""Checkpoints: resuming, kills at any moment, damaged files, full disks."""

import functools
import os
import random
import re
import shutil
import signal
import zipfile

import pytest
import torch

from helpers import (
    SOON,
    SRC,
    TINY,
    Forked,
    Hostile,
    SmallDisk,
    assert_one_line,
    change,
    edited,
    learned,
    load_checkpoint,
    params,
    run_forked,
    same_bits,
    spy,
    tiny,
    train,
    wait_awhile,
    wait_until,
    weights,
)

SCRIPTS = sorted(SRC.glob("train*.py"))


@pytest.fixture(scope="module")
def checkpoint(digits, tmp_path_factory):
    """train.py's checkpoint after one epoch."""
    folder = tmp_path_factory.mktemp("checkpoint")
    train(SRC / "train.py", *tiny(digits, folder, epochs=1))
    return folder / "train.pt"


def schedule(rate, epochs, done=0, steps=3):
    """Return the learning rates of the steps that a run of `epochs` with `done` ones takes."""
    total = epochs * steps
    return [
        rate * min(1, (step + 1) / (0.2 * total), (total - step) / (0.8 * total))
        for step in range(done * steps, total)
    ]


# ---------------------------------------------------------------------------------- resuming
@pytest.mark.fault("resume with other options")
@pytest.mark.parametrize("name", ["train", "train_fused", "train_amp"])
def test_the_rates_are_those_of_the_run_that_resumes(name, checkpoint, digits, tmp_path):
    seen = spy(
        tmp_path / "seen",
        SRC / f"{name}.py",
        *tiny(digits, tmp_path / "r", resume=checkpoint, lr=0.3, epochs=4),
    )
    rates = torch.cat(seen("lr", True)).tolist()
    assert rates == pytest.approx(schedule(0.3, 4, done=1)) and len(rates) == 9
    assert min(rates) > 0


@pytest.mark.fault("resume with other options")
def test_one_line_says_whose_learning_rate_holds(checkpoint, digits, tmp_path):
    shutil.copy(checkpoint, tmp_path)
    options = tiny(digits, tmp_path, resume="auto")
    _, output = train(SRC / "train.py", *options, "--lr", 0.3, "--epochs", 3)
    assert "train: 1 of 3 epochs are done; lr is by this run's options\n" in output
    # from a finished run the first step's rate is not 0
    seen = spy(tmp_path / "seen", SRC / "train.py", *options, "--lr", 0.3, "--epochs", 4)
    assert torch.cat(seen("lr", True)).tolist() == pytest.approx(schedule(0.3, 4, done=3))


def test_resuming_a_finished_run_says_so_and_changes_nothing(digits, tmp_path):
    options = tiny(digits, tmp_path, resume="auto")
    first, output = train(SRC / "train.py", *options)
    assert "epochs are done" not in output
    before = (tmp_path / "train.pt").read_bytes()
    again, output = train(SRC / "train.py", *options)
    assert "train: 2 of 2 epochs are done; " in output
    assert learned(again["epochs"]) == learned(first["epochs"])
    assert (tmp_path / "train.pt").read_bytes() == before


@pytest.mark.fault("other classes at a resume")
@pytest.mark.parametrize("name", ["train", "train_DDP"])
@pytest.mark.parametrize("change", ["renamed", "swapped", "replaced"])
def test_a_checkpoint_of_other_classes_is_refused(name, change, digits, tmp_path):
    """The folders were renamed in place, or others took their place; their number is the same."""
    data, script = tmp_path / "data", SRC / f"{name}.py"
    shutil.copytree(digits, data)
    train(script, *tiny(data, tmp_path, epochs=1))
    assert load_checkpoint(tmp_path / f"{name}.pt")["classes"] == list("0123456789")
    for split in ("train", "val"):
        (data / split / "7").rename(data / split / ("x" if change == "renamed" else "70"))
        if change == "swapped":  # 70 is now where 8 was
            (data / split / "8").rename(data / split / "7")
    ranks = 2 if name == "train_DDP" else 0
    done = run_forked(script, *tiny(data, tmp_path, resume="auto"), ranks=ranks)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    number = 8 if change == "swapped" else 7
    assert f"({number}, '{number}')" in done.stderr, done.stderr


@pytest.mark.fault("other classes at a resume")
def test_an_old_checkpoint_without_classes_resumes(checkpoint, digits, tmp_path):
    saved = load_checkpoint(checkpoint)
    del saved["classes"]
    torch.save(saved, tmp_path / "old.pt")
    record, _ = train(SRC / "train.py", *tiny(digits, tmp_path, resume=tmp_path / "old.pt"))
    assert len(record["epochs"]) == 2


@pytest.mark.fault("neighbouring seeds")
@pytest.mark.parametrize("name", ["train", "train_DDP", "train_cache"])
def test_no_epoch_of_a_seed_is_an_epoch_of_another(name, digits, tmp_path):
    """Neither the order nor the crops: the images of all steps of four epochs of two seeds."""
    batches = []
    for seed in (0, 1):
        seen = spy(
            tmp_path / str(seed),
            SRC / f"{name}.py",
            *tiny(digits, tmp_path / "r", epochs=4, augment="crop", seed=seed),
            ranks=2 if name == "train_DDP" else 0,
        )
        batches += [images.numpy().tobytes() for images in seen("Normalize", True)]
    assert len(batches) == len({*batches}) == 2 * 4 * 3


@pytest.mark.fault("checkpoint of another variant")
def test_a_checkpoint_of_a_scaler_that_was_off_resumes_with_one(digits, tmp_path):
    """The copy scales on a CPU too, as float16 does on a GPU."""
    options = tiny(digits, tmp_path)
    train(SRC / "train_amp.py", *options, "--epochs", 1)
    off = "GradScaler(enabled=amp_dtype == torch.float16)", 'GradScaler("cpu")'
    saved = shutil.copy(tmp_path / "train_amp.pt", tmp_path / "off.pt")
    record, _ = train(edited("train_amp", tmp_path, off), *options, "--resume", saved)
    assert len(record["epochs"]) == 2


def test_the_first_epoch_after_a_resume_warms_up(checkpoint, digits, tmp_path):
    record, _ = train(SRC / "train.py", *tiny(digits, tmp_path, epochs=3, resume=checkpoint))
    assert len(record["epochs"]) == 3
    assert record["warmup_seconds"] > record["epochs"][1]["seconds"]


def test_a_resume_of_one_epoch_has_only_that_in_its_record(checkpoint, digits, tmp_path):
    shutil.copy(checkpoint, tmp_path / "train.pt")
    same = tmp_path / ".." / tmp_path.name / "train.pt"
    record, output = train(SRC / "train.py", *tiny(digits, tmp_path, epochs=2, resume=same))
    assert "1 of 2 epochs are done" in output and len(record["epochs"]) == 2


@pytest.mark.fault("checkpoint of another variant")
@pytest.mark.parametrize("script", params(SCRIPTS))
def test_any_checkpoint_resumes_any_variant(script, checkpoint, digits, tmp_path):
    """Epoch 1 by train.py, epoch 2 by the variant, epoch 3 by train.py."""
    if script.stem == "train_compile":
        script = edited(script.stem, tmp_path, SOON)
    options = tiny(digits, tmp_path / "r", epochs=3)
    before = checkpoint
    for epochs, each in enumerate((script, SRC / "train.py"), 2):
        record, output = train(each, *options, "--epochs", epochs, "--resume", before)
        assert len(record["epochs"]) == epochs and f"epoch {epochs - 1}/" not in output
        assert record["epochs"][:-1] == load_checkpoint(before)["epochs"]
        before = shutil.copy(tmp_path / "r" / f"{each.stem}.pt", tmp_path / f"{epochs}.pt")
        parts = load_checkpoint(before)["parts"]
        assert not any("module." in name or "_orig_mod" in name for name in parts["model"])
        assert parts.keys() - {"scaler"} == {"model", "optimizer"}


# ------------------------------------------------------------------------------------- kills
def assert_same_in_the_end(folder, other, name):
    """Check that two runs have the same weights, losses and accuracies, bit for bit."""
    assert same_bits(weights(folder, name), weights(other, name))
    one, two = (load_checkpoint(each / f"{name}.pt")["epochs"] for each in (folder, other))
    assert learned(one) == learned(two)


class Pipe:
    """A pipe in place of the file that a checkpoint is written to: a save waits to be read."""

    def __init__(self, saved):
        self.path, self.content = saved.with_name(f"{saved.name}.part"), b""
        self.path.unlink(missing_ok=True)
        os.mkfifo(self.path)
        self.end = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def has_read(self, amount):
        try:
            self.content += os.read(self.end, min(1 << 16, amount - len(self.content)))
        except BlockingIOError:
            pass
        return len(self.content) >= amount

    def close(self):
        """Leave what was written, as a kill leaves it of a file."""
        os.close(self.end)
        self.path.unlink()
        self.path.write_bytes(self.content)


def stamp(path):
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.fault("kill while training")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--augment", "resized"], id="augment"),
        pytest.param(["--model", "squeezenet1_1", "--image_size", 32, "--lr", 0.01], id="dropout"),
        pytest.param(["--augment", "crop"], id="crop"),
        pytest.param(["--workers", 2], id="workers"),
    ],
)
def test_resumed_is_the_same_as_unbroken_bit_for_bit(options, digits, tmp_path):
    """The run that resumes draws the same crops, flips and dropout, if it draws them itself."""
    options = ["--dataset", digits, *TINY, *options, "--result_dir"]
    train(SRC / "train.py", *options, tmp_path / "a")
    saved = tmp_path / "b" / "train.pt"
    process = Forked(SRC / "train.py", *options, tmp_path / "b")
    wait_until(lambda: saved.exists() or not process.is_alive())
    process.kill()
    process.wait()
    train(SRC / "train.py", *options, tmp_path / "b", "--resume", "auto")
    assert_same_in_the_end(tmp_path / "a", tmp_path / "b", "train")


def saving_every(seconds, folder):
    """Write a copy of train.py that saves after that many seconds, and says after which epochs."""
    return edited(
        "train",
        folder,
        (
            "            save_at = tick + 30\n",
            (
                f"            save_at = tick + {seconds}\n"
                '            log(f"saved after epoch {epoch + 1}")\n'
            ),
        ),
    )


@pytest.mark.parametrize("seconds, saved", [(1e9, [1, 4]), (0, [1, 2, 3, 4])])
def test_the_first_and_the_last_epoch_are_saved_and_those_that_are_due(
    seconds, saved, digits, tmp_path
):
    options = tiny(digits, tmp_path, resume="auto")
    record, output = train(saving_every(seconds, tmp_path), *options, "--epochs", 4)
    assert [int(each) for each in re.findall(r"saved after epoch (\d+)", output)] == saved
    assert len(load_checkpoint(tmp_path / "train.pt")["epochs"]) == len(record["epochs"]) == 4
    # a run that resumes begins anew: its first epoch is saved, too
    _, output = train(tmp_path / "train.py", *options, "--epochs", 6)
    assert [int(each) for each in re.findall(r"saved after epoch (\d+)", output)] == [5, 6]


@pytest.mark.fault("kill while training")
def test_a_kill_some_epochs_after_the_last_save(digits, tmp_path):
    """The epochs since then are trained again, to the same weights."""
    script = saving_every(1e9, tmp_path)
    change(
        script,
        "    # the record\n",
        """\
        if epoch == 2 and not args.resume and args.result_dir.name == "b":
            os.kill(os.getpid(), 9)

    # the record
""",
    )
    options = ["--dataset", digits, *TINY, "--epochs", 5, "--augment", "crop", "--result_dir"]
    train(script, *options, tmp_path / "a")
    done = run_forked(script, *options, tmp_path / "b")
    assert done.returncode == -signal.SIGKILL and "epoch 3/5" in done.stdout
    assert len(load_checkpoint(tmp_path / "b" / "train.pt")["epochs"]) == 1
    _, output = train(script, *options, tmp_path / "b", "--resume", "auto")
    assert "train: 1 of 5 epochs are done" in output
    assert_same_in_the_end(tmp_path / "a", tmp_path / "b", "train")


@pytest.mark.fault("kill while training")
@pytest.mark.parametrize("times", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_killed(times, digits, rng, tmp_path):
    """Of four kills one is in a save, one before the first step, two are after a checkpoint."""
    options = functools.partial(
        tiny, digits, epochs=20, steps=2, image_size=8, augment="resized", resume="auto"
    )
    train(SRC / "train.py", *options(tmp_path / "a"))
    size = (tmp_path / "a" / "train.pt").stat().st_size
    assert size > 200_000  # more than a pipe holds
    saved, kills = tmp_path / "b" / "train.pt", 0
    saved.parent.mkdir()
    while kills < times:
        pipe = Pipe(saved) if kills % 4 == 0 else None
        before = stamp(saved)
        process = Forked(SRC / "train.py", *options(saved.parent))
        if pipe:
            amount = rng.randrange(1, size - 100_000)
            wait_until(lambda: pipe.has_read(amount) or not process.is_alive())
        elif kills % 4 == 1:
            wait_until(lambda: "parameters" in process.output() or not process.is_alive())
        else:
            wait_until(lambda: stamp(saved) != before or not process.is_alive(), pause=0.0005)
            wait_awhile(rng.uniform(0, 0.1), lambda: False)
        process.kill()
        status = process.wait().returncode
        if pipe:
            pipe.close()
        if status == 0:  # it was done before the kill: begin again
            assert_same_in_the_end(tmp_path / "a", saved.parent, "train")
            saved.unlink()
        else:
            assert status == -signal.SIGKILL
            kills += 1
    train(SRC / "train.py", *options(saved.parent))
    assert_same_in_the_end(tmp_path / "a", saved.parent, "train")


# ------------------------------------------------------------------- damaged and hostile files
def damage(path, kind):
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "zero bytes":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "a bit flipped":
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        at = largest.header_offset + 200 + largest.file_size // 2
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
    elif kind == "text":
        path.write_text("<html>not found</html>")


@pytest.mark.fault("unusable checkpoint")
@pytest.mark.parametrize("kind", ["missing", "zero bytes", "truncated", "a bit flipped", "text"])
def test_damaged_checkpoint(kind, checkpoint, digits, tmp_path):
    copy = shutil.copy(checkpoint, tmp_path / "train.pt")
    damage(copy, kind)
    done = run_forked(
        SRC / "train.py", *tiny(digits, tmp_path, resume=copy if kind == "missing" else "auto")
    )
    # a file that is not there is the system's message, which names it
    assert done.returncode in ((1, 2) if kind == "missing" else (2,))
    assert_one_line(done, done.returncode, "train.py: error: ", str(copy))
    assert "epoch 1" not in done.stdout


@pytest.mark.fault("unusable checkpoint")
def test_a_bit_flipped_anywhere(checkpoint, digits, tmp_path):
    """Refused; or, where the bit does not matter (a date, say), the run is that of the whole."""
    options = ["--dataset", digits, *TINY, "--result_dir"]
    train(SRC / "train.py", *options, tmp_path / "whole", "--resume", checkpoint)
    content, rng, refused = checkpoint.read_bytes(), random.Random(0), 0
    flipped = tmp_path / "flipped.pt"
    for number in range(20):  # half of them where the archive's names and lengths are
        at = rng.randrange(len(content) if number % 2 else 3000)
        at = len(content) - 1 - at if number % 4 == 0 else at
        flipped.write_bytes(
            content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        )
        done = run_forked(SRC / "train.py", *options, tmp_path / "r", "--resume", flipped)
        if done.returncode:
            assert_one_line(done, 2, str(flipped), "--resume")
            refused += 1
        else:
            assert same_bits(weights(tmp_path / "r", "train"), weights(tmp_path / "whole", "train"))
    assert refused >= 12


@pytest.mark.fault("unusable checkpoint")
def test_checkpoint_of_another_model(checkpoint, digits, tmp_path):
    done = run_forked(SRC / "train.py", *tiny(digits, tmp_path, width=8, resume=checkpoint))
    assert_one_line(done, 2, str(checkpoint), "damaged, or of another model")


@pytest.mark.fault("pickle in a checkpoint")
def test_hostile_checkpoint(digits, tmp_path):
    torch.save({"parts": {"model": Hostile(str(tmp_path / "executed"))}}, tmp_path / "bad.pt")
    done = run_forked(SRC / "train.py", *tiny(digits, tmp_path / "r", resume=tmp_path / "bad.pt"))
    assert_one_line(done, 2, str(tmp_path / "bad.pt"))
    assert not (tmp_path / "executed").exists()


@pytest.mark.fault("full disk", "full disk while saving")
def test_disk_full_while_saving(checkpoint, digits, tmp_path):
    options = ["--dataset", digits, *TINY, "--resume", "auto", "--result_dir"]
    before = checkpoint.read_bytes()
    with SmallDisk(tmp_path / "small", len(before) * 3 // 2048, len(before) // 2) as disk:
        words = [SRC / "train.py", *options, disk.folder]
        (disk.folder / "train.pt").write_bytes(before)
        done = disk.run(*words)
        assert done.returncode == 1 and "inline_container.cc" in done.stderr, done.stderr
        assert (disk.folder / "train.pt").read_bytes() == before
        disk.make_room()
        assert run_forked(*words).returncode == 0
        assert len(load_checkpoint(disk.folder / "train.pt")["epochs"]) == 2
