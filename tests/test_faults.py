"""Training's faults by number: odd pictures and names, full disks, kills at any moment, ranks."""

import contextlib
import os
import re
import shutil
import signal
import sys
import time

import psutil
import pytest
import torch
from PIL import Image
from helpers import (SRC, Forked, SmallDisk, free_port, module_of, on_gpu, processes_of, run,
                      run_forked, start, torchrun, train, wait_awhile, wait_until)
from test_loader import (ODD_NAMES, SHARED, Hostile, classes, edit, photo, save, spoil,
                         unusual)
from test_resize import claims
from test_train import (BARE, assert_one_line, batches, load, same_bits, weights,
                        with_captured_batches)
from torchvision.transforms import v2 as transforms

SOURCES = ["train", "train_DALI", "train_LMDB", "train_cache"]
each_source = pytest.mark.parametrize("name", SOURCES)


# -------------------------------------------------------------------------------- bad inputs
@pytest.fixture(scope="module")
def odd_pictures(tmp_path_factory):
    """A data set of pictures of each kind, one with a corrupt EXIF block; the same in both."""
    folder = tmp_path_factory.mktemp("odd") / "set"
    unusual(folder / "train/a")
    exif = b"Exif\0\0" + b"II*\0\x08\0\0\0\xff\xff\x12\x01\x03\0\x01\0" + b"\xff" * 9
    save(photo(5), folder / "train/b/corrupt exif.jpg", exif=exif)
    shutil.copytree(folder / "train", folder / "val")
    return folder


@each_source
def test_f06_f07_f08_f10_f11_f12_f26_odd_pictures(name, odd_pictures, tmp_path):
    """PNG named JPEG, CMYK, grey, 16 bits, turned by EXIF, corrupt EXIF, any ending -> training
    gets the pixels that loader.py gets, through DALI to 2/255, and no warning is printed."""
    script = with_captured_batches(SRC / f"{name}.py", tmp_path)
    done = run_forked(script, "--dataset", odd_pictures, *BARE, "--image_size", 40, "--epochs", 1,
                      "--batch_size", 4, "--result_dir", tmp_path, *(
                          ["--lmdb", tmp_path] if name == "train_LMDB" else []))
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if "arn" in line], done.stderr
    ((what, seen),) = [each for each in batches(tmp_path) if each[0] == "val"]
    seen = torch.cat([images for images, _ in seen]).int()
    paths = sorted((odd_pictures / "val").glob("*/*"))
    reader = module_of(SRC / "loader.py")
    cut = transforms.Compose([transforms.Resize(40), transforms.CenterCrop(40),
                              transforms.PILToTensor()])
    assert len(seen) == len(paths) == 22
    for path, pixels in zip(paths, seen):
        off = (pixels - cut(reader.load_image(path, path)).int()).abs()
        close = (off <= (2 if name == "train_DALI" else 0)).float().mean().item()
        assert close >= 0.99 if name == "train_DALI" else close == 1, f"{path}: {close:.2%}"


@each_source
def test_f21_f22_f23_f25_f26_odd_names(name, tmp_path):
    """Spaces, quotes, a line feed, a dash, 255 bytes, no UTF-8 in the names, [ ] * in the path, and
    files that are no pictures -> the pictures are trained on, the others passed over."""
    data = tmp_path / "a [b] *c d"
    for split in ("train", "val"):
        for k, odd in enumerate([*ODD_NAMES, os.fsdecode(b"caf\xe9.jpg"), "b.JPEG", "c.PNG"]):
            save(photo(k), data / split / "it's -1" / odd)
            save(photo(k), data / split / "[x] Zoë" / odd)
        for other in ("a.txt", "Thumbs.db", ".DS_Store", "._x.JPEG"):
            (data / split / "it's -1" / other).write_bytes(b"none")
    record, output = train(SRC / f"{name}.py", "--dataset", data, *BARE, "--batch_size", 4,
                           "--result_dir", tmp_path / "r")
    assert f" {2 * (len(ODD_NAMES) + 3)} pictures, " in output and len(record["epochs"]) == 2


@pytest.mark.parametrize("script", ["loader", "loader_DALI", *SOURCES, on_gpu("loader_DALI"),
                                    on_gpu("train_DALI")])
@pytest.mark.parametrize("width, height", [(30_000, 30_000), (2 ** 31 + 28, 28)])
def test_f13_a_header_that_claims_too_much(script, width, height, photos, tmp_path):
    """A PNG whose header claims 900 megapixels, or more columns than 31 bits count, tried four
    times in loading and training -> a line names it, exit 1, no traceback, no crash."""
    shutil.copytree(photos, tmp_path / "set")
    bad = tmp_path / "set/train/b/bad.png"
    bad.write_bytes(claims(width, height))
    options = ["--data_source", tmp_path / "set"] if "loader" in script else [
        "--dataset", tmp_path / "set", *BARE, "--steps", 6, "--batch_size", 4]
    for _ in range(4):  # what crashes is a thread, now and then
        done = run_forked(SRC / f"{script}.py", *options, "--result_dir", tmp_path / "r")
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert [line for line in done.stderr.splitlines()
                if line.startswith(f"{script}.py: error: ") and str(bad) in line], done.stderr


@pytest.mark.skipif(not SHARED.exists(), reason="needs the pictures of ../shared/data/faulty")
@pytest.mark.parametrize("script", ["loader", "loader_DALI", "train", "train_DALI",
                                    on_gpu("loader_DALI"), on_gpu("train_DALI")])
def test_f02_f07_f09_f11_f12_f14_real_faulty_files(script, photos, tmp_path):
    """Each of Pillow's own damaged and unusual files among good pictures, in loading and training
    -> it is read, exit 0, or a line names it, exit 1, no traceback, no warning; the cut ones
    are named, and so is a text bomb, but by DALI, which passes texts over."""
    shutil.copytree(photos, tmp_path / "set")
    options = ["--data_source", tmp_path / "set", "--resize", 48, "--crop", 40, "--epochs", 1]
    if "train" in script:
        options = ["--dataset", tmp_path / "set", *BARE, "--steps", 6, "--batch_size", 4]
    named, read = set(), set()
    for file in sorted((SHARED / "faulty").iterdir()):
        if file.suffix not in (".png", ".jpg", ".JPEG"):
            continue
        odd = tmp_path / "set/train/b" / file.name
        shutil.copy(file, odd)
        done = run_forked(SRC / f"{script}.py", *options, "--result_dir", tmp_path / "r")
        assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
        if done.returncode:
            assert [line for line in done.stderr.splitlines() if str(odd) in line
                    and line.startswith(f"{script}.py: error: ")], (file, done)
            assert done.returncode == 1
        (named if done.returncode else read).add(file.name)
        odd.unlink()
    assert {"truncated_jpeg.jpg", "truncated_image.png", "broken.png"} <= named
    assert ("png_decompression_dos.png" in named) == ("DALI" not in script)  # which skips texts
    assert {"n02951585_can_opener.JPEG", "pil_sample_cmyk.jpg", "hopper_bad_exif.jpg",
            "hopper_orientation_6.jpg", "pil123rgba.png"} <= read


@pytest.mark.parametrize("name", [*SOURCES, on_gpu("train_DALI"), on_gpu("train_cache")])
@pytest.mark.parametrize("kind", ["zero bytes", "half", "text"])
def test_f01_f02_f05_f46_damaged_picture(name, kind, photos, tmp_path):
    """A JPEG of zero bytes, cut in half, or HTML, for training by each source of data -> a line
    names it, exit 1, no traceback; train.py says no more than that line."""
    shutil.copytree(photos, tmp_path / "set")
    bad = tmp_path / "set/train/b" / os.fsdecode(b"caf\xe9.jpg")
    shutil.move(tmp_path / "set/train/b/7.jpg", bad)
    spoil(bad, kind)
    more = ["--dali_batch", 12] if name == "train_DALI" and kind != "zero bytes" else []
    done = run_forked(SRC / f"{name}.py", "--dataset", tmp_path / "set", *BARE, "--steps", 6,
                      "--batch_size", 4, *more, "--result_dir", tmp_path / "r")
    line, = [line for line in done.stderr.splitlines() if f"{name}.py: error: " in line]
    assert done.returncode == 1 and str(bad.parent / "caf") in line
    assert "Traceback" not in done.stderr and (name != "train" or done.stderr == f"{line}\n")


@each_source
def test_f51_fewer_pictures_than_a_batch(name, tmp_path):
    """12 training pictures for a batch of 13, and of 12 -> one line names --batch_size and the 12;
    the batch of 12 is trained on."""
    data = classes(classes(tmp_path / "data"), "val")
    options = ["--dataset", data, *BARE, "--result_dir", tmp_path / "r"]
    done = run_forked(SRC / f"{name}.py", *options, "--batch_size", 13)
    assert_one_line(done, 2, "--batch_size 13", "only 12 training pictures")
    record, _ = train(SRC / f"{name}.py", *options, "--batch_size", 12)
    assert len(record["epochs"]) == 2


def test_f51_fewer_pictures_than_a_batch_of_all_ranks(tmp_path):
    """12 training pictures on two ranks, for a batch of 14, and of 12 -> the ranks end in lines
    that name --batch_size and the 12; the batch of 12 is trained on."""
    data = classes(classes(tmp_path / "data"), "val")
    options = ["--dataset", data, *BARE, "--result_dir", tmp_path / "r"]
    done = run_forked(SRC / "train_DDP.py", *options, "--batch_size", 14, ranks=2)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--batch_size 14: only 12 training pictures" in done.stderr
    record, _ = train(SRC / "train_DDP.py", *options, "--batch_size", 12)
    assert len(record["epochs"]) == 2


@pytest.mark.parametrize("name", ["train_amp", "train_DDP"])
def test_f63_loss_that_is_not_finite(name, digits, tmp_path):
    """--lr 1e30 in amp and on two ranks -> a line names epoch, step and --lr; no record."""
    done = run_forked(SRC / f"{name}.py", "--dataset", digits, *BARE, "--lr", "1e30",
                      "--result_dir", tmp_path, ranks=2 if name == "train_DDP" else 0)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{name}: error: the loss stops being finite at epoch 1, step 2" in done.stderr
    assert not (tmp_path / f"{name}.json").exists()


@pytest.mark.parametrize("name, option", [("train_DALI", "--dali_device"),
                                          ("train_cache", "--cache_device")])
def test_f61_unknown_device(name, option, digits, tmp_path):
    """--dali_device tpu, --cache_device tpu -> one line names the option, exit 2."""
    done = run_forked(SRC / f"{name}.py", "--dataset", digits, option, "tpu", cwd=tmp_path)
    assert_one_line(done, 2, option, "tpu")


@pytest.mark.parametrize("name, option", [("train_DALI", "--dali_device"),
                                          ("train_cache", "--cache_device")])
def test_f47_without_a_gpu(name, option, digits, tmp_path):
    """--dali_device gpu, --cache_device gpu where no GPU is to be seen -> the CPU decodes; the
    cache is in memory, as its first line says."""
    done = run(sys.executable, SRC / f"{name}.py", "--dataset", digits, *BARE, option, "gpu",
               cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0 and "epoch 2/2" in done.stdout, done.stderr
    assert name == "train_DALI" or "MB of cpu's memory" in done.stdout


# ------------------------------------------------------------------------------------- LMDB
@pytest.fixture
def one_file(digits, tmp_path):
    """The options of a run of train_LMDB.py, and its file of the training pictures, built."""
    options = ["--dataset", digits, *BARE, "--epochs", 1, "--steps", 6, "--result_dir",
               tmp_path / "r", "--lmdb", tmp_path / "files"]
    (tmp_path / "files").mkdir()
    train(SRC / "train_LMDB.py", *options)
    return options, tmp_path / "files" / f"{digits.name}_train.lmdb"


def test_f35_more_data_than_a_map_begins_with(tmp_path):
    """Some megabytes of pictures for train_LMDB.py -> the file holds every one."""
    data = tmp_path / "data"
    for i in range(24):
        for split in ("train", "val"):
            save(photo(i, (300, 300)), data / split / "cat" / f"{i:02}.png")
    train(SRC / "train_LMDB.py", "--dataset", data, *BARE, "--batch_size", 12, "--result_dir",
          tmp_path / "r")
    assert (tmp_path / "data_train.lmdb").stat().st_size > 3e6
    reader = module_of(SRC / "loader_LMDB.py").ImageFolderLMDB(tmp_path / "data_train.lmdb")
    assert [reader[i][0].tobytes() for i in range(len(reader))] == [
        Image.open(path).tobytes() for path in sorted((data / "train/cat").iterdir())]


def test_f39_wrong_path(digits, tmp_path):
    """train_LMDB.py with --lmdb in a folder that is none -> one line names it; nothing is left."""
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "no/such", tmp_path / "file"):
        done = run_forked(SRC / "train_LMDB.py", "--dataset", digits, *BARE, "--lmdb", place,
                          "--result_dir", tmp_path / "r")
        assert done.returncode in (1, 2)
        assert_one_line(done, done.returncode, str(place))
    assert not list(tmp_path.rglob("*lmdb*"))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_f41_workers(method, one_file, tmp_path):
    """train_LMDB.py's workers by fork, spawn and forkserver -> all read the file."""
    options, _ = one_file
    copy = tmp_path / "train_LMDB.py"
    copy.write_text((SRC / "train_LMDB.py").read_text().replace(
        "    try:\n        main()", "    import multiprocessing\n    multiprocessing."
        f"set_start_method({method!r})\n    try:\n        main()"))
    record, _ = train(copy, *options, "--workers", 1)
    plain, _ = train(SRC / "train.py", *options[:-2])
    assert record["epochs"][0]["loss"] == pytest.approx(plain["epochs"][0]["loss"], abs=1e-6)


def test_f42_read_only_folder(one_file, digits, tmp_path):
    """train_LMDB.py's files on a read-only disk (where none can be mounted, in a folder without the
    right to write) -> they are read, and nothing is made beside them."""
    options, path = one_file
    with SmallDisk(tmp_path / "fixed", 4096) as disk:
        for file in path.parent.iterdir():
            shutil.move(file, disk.folder)
        before = sorted(disk.folder.iterdir())
        disk.make_read_only()
        done = run_forked(SRC / "train_LMDB.py", *options[:-1], disk.folder)
        assert done.returncode == 0 and sorted(disk.folder.iterdir()) == before, done.stderr


@pytest.mark.parametrize("key", [b"3.0", b"index"])
def test_f43_a_pickle_is_never_executed(key, one_file, tmp_path):
    """A pickle for a record of train_LMDB.py's file -> one line names the file; it is not
    loaded."""
    import pickle
    options, path = one_file
    trap = tmp_path / "trap"
    edit(path, lambda transaction: transaction.put(key, pickle.dumps(Hostile(str(trap)))))
    done = run_forked(SRC / "train_LMDB.py", *options)
    assert_one_line(done, 1, str(path))
    assert not trap.exists()


def test_f44_a_record_is_missing(one_file):
    """A key is gone from train_LMDB.py's file -> one line names file and key."""
    options, path = one_file
    edit(path, lambda transaction: transaction.delete(b"7.0"))
    assert_one_line(run_forked(SRC / "train_LMDB.py", *options), 1, str(path), "7.0")


# -------------------------------------------------------------------------------- full disks
def test_f29_f56_disk_full_while_saving(digits, tmp_path):
    """A full disk (a tmpfs; where none can be mounted, RLIMIT_FSIZE) while a checkpoint is saved ->
    one line; the checkpoint before it still loads, and with room again --resume auto goes on."""
    options = ["--dataset", digits, *BARE, "--resume", "auto", "--result_dir"]
    train(SRC / "train.py", *options, tmp_path / "first", "--epochs", 1)
    before = (tmp_path / "first/train.pt").read_bytes()
    with SmallDisk(tmp_path / "small", len(before) * 3 // 2048, len(before) // 2) as disk:
        words = [sys.executable, SRC / "train.py", *options, disk.folder]
        (disk.folder / "train.pt").write_bytes(before)
        assert_one_line(run(*words, **disk.options), 1, "train.py: error: ", "train.pt")
        assert (disk.folder / "train.pt").read_bytes() == before
        disk.make_room()
        assert run(*words).returncode == 0
        assert len(load(disk.folder / "train.pt")["epochs"]) == 2


def test_f29_disk_full_while_building(photos, tmp_path):
    """A full disk (as there) while train_LMDB.py builds its file -> one line names it; nothing is
    left of it, and with room again the same command goes through."""
    with SmallDisk(tmp_path / "small", 40) as disk:
        words = [sys.executable, SRC / "train_LMDB.py", "--dataset", photos, *BARE, "--batch_size",
                 4, "--lmdb", disk.folder, "--result_dir", tmp_path / "r"]
        assert_one_line(run(*words, **disk.options), 1, "set_train.lmdb", "disk full")
        assert list(disk.folder.iterdir()) == []
        disk.make_room()
        assert run(*words).returncode == 0


# ------------------------------------------------------------------------- kills at any moment
LONG = ["--batch_size", 40, "--steps", 2, "--width", 16, "--image_size", 8, "--workers", 0,
        "--augment"]  # short epochs with checkpoints of 4 MB


class Kills:
    """The moments of the kills of a run that saves `saved`: in turn during a save, while it starts,
    and twice some time after a checkpoint, of which it lets no more than three pass.
    """

    def __init__(self, saved, rng):
        self.saved, self.part, self.rng = saved, saved.with_name(f"{saved.name}.part"), rng
        saved.parent.mkdir()
        self.number, self.pipe = 0, None
        self.prepare()

    def prepare(self):
        """For a kill during a save, lays a pipe where the run will write: it waits to be read."""
        self.is_in_a_save = self.number % 4 == 0
        if self.is_in_a_save:
            self.part.unlink(missing_ok=True)
            os.mkfifo(self.part)
            self.pipe = os.open(self.part, os.O_RDONLY | os.O_NONBLOCK)

    def stamp(self):
        return self.saved.stat().st_mtime_ns if self.saved.exists() else 0

    def wait(self, start_seconds):
        """Waits for the moment."""
        before, seen, self.read = self.stamp(), set(), b""

        def checkpoints(most):
            seen.update({self.stamp()} - {before})
            return len(seen) >= most

        def has_read(amount):
            with contextlib.suppress(BlockingIOError):
                self.read += os.read(self.pipe, 1 << 16)
            return len(self.read) >= amount
        if self.is_in_a_save:
            amount = self.rng.randrange(1, 3_000_000)
            wait_until(lambda: has_read(amount), pause=0.0005)
        elif self.number % 4 == 1:
            wait_awhile(self.rng.uniform(0, start_seconds), lambda: checkpoints(1))
        else:
            wait_until(lambda: checkpoints(1), pause=0.0005)
            wait_awhile(self.rng.uniform(0, 0.2), lambda: checkpoints(3))

    def done(self):
        """Leaves what was written of a file, and prepares for the next."""
        if self.is_in_a_save:
            os.close(self.pipe)
            self.part.unlink()
            self.part.write_bytes(self.read)
        self.number += 1
        self.prepare()


def assert_same_in_the_end(folder, other, name):
    """The weights of both runs' checkpoints to the bit, and what their epochs say of learning."""
    assert same_bits(weights(folder, name), weights(other, name))
    one, two = (load(each / f"{name}.pt")["epochs"] for each in (folder, other))
    for key in ("loss", "val_top1", "val_top5"):
        assert [epoch[key] for epoch in one] == [epoch[key] for epoch in two]


def test_f55_killed_20_times(digits, rng, tmp_path):
    """20 SIGKILLs at random moments of one run of train.py, five of them during a save, each
    followed by --resume auto -> the weights in the end are those of an unbroken run, bit for
    bit."""
    options = ["--dataset", digits, *LONG, "--epochs", 120, "--resume", "auto", "--result_dir"]
    begun = time.monotonic()
    train(SRC / "train.py", *options, tmp_path / "c", "--epochs", 1)
    seconds = time.monotonic() - begun
    train(SRC / "train.py", *options, tmp_path / "a")
    kills = Kills(tmp_path / "b/train.pt", rng)
    while kills.number < 20:
        process = Forked(SRC / "train.py", *options, tmp_path / "b")
        kills.wait(seconds)
        process.kill()
        assert process.wait().returncode == -signal.SIGKILL
        kills.done()
    kills.part.unlink()  # the pipe of a 21st
    train(SRC / "train.py", *options, tmp_path / "b")
    assert_same_in_the_end(tmp_path / "a", tmp_path / "b", "train")


# ------------------------------------------------------------------------------------ ranks
def ranks_of(agent):
    """The processes that a torchrun has started as ranks, without their workers."""
    try:
        return [child for child in psutil.Process(agent.pid).children()
                if "train_DDP.py" in " ".join(child.cmdline())]
    except psutil.Error:  # gone while it was looked at
        return []


def begun(options, *, log, script=SRC / "train_DDP.py", restarts=0):
    """A torchrun of two ranks, of one thread as forked ones have, whose output goes to `log`."""
    command = torchrun(script, *options)
    with open(log, "w") as file:
        return start([*command[:3], f"--max-restarts={restarts}", *command[3:]],
                     env={"OMP_NUM_THREADS": "1"}, stdout=file, stderr=file)


def new_ranks(agent, old=()):
    """Waits for both ranks of a torchrun, others than the old ones."""
    old = {rank.pid for rank in old}
    return wait_until(lambda: len(found := ranks_of(agent)) == 2 and not (
        {rank.pid for rank in found} & old) and found, 120)


TWICE = [("raising", "killed"), ("hanging", "raising"), ("killed", "raising")]


@pytest.mark.parametrize("first, second", TWICE[:2] + [  # restarts of killed ranks: further below
    pytest.param(*both, marks=pytest.mark.gpus, id="-".join(both) + "-by_nccl") for both in TWICE])
def test_f54_a_rank(first, second, digits, tmp_path):
    """One of two ranks killed, raising or hanging (stopped; the limit lowered to 20 s), by gloo and
    by NCCL, under --max-restarts=1 --resume auto, and then one more -> the first time both are
    started again and go on from the last checkpoint; the second time torchrun ends, exit 1, and no
    process is left, no worker of a rank either."""
    data, script, log = tmp_path / "data", tmp_path / "train_DDP.py", tmp_path / "log"
    shutil.copytree(digits, data)
    picture = data / "train/3/3_00005.png"
    whole, text = picture.read_bytes(), (SRC / "train_DDP.py").read_text()
    assert text.count("store=store,") == 1
    script.write_text(text.replace("store=store,", "store=store, timeout=__import__("
                                   "'datetime').timedelta(seconds=20),"))

    def fail(fault):
        if fault == "raising":  # a worker of the one that reads it
            picture.write_bytes(b"")
        else:
            ranks[1].send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

    def epochs():
        return [int(number) for number in re.findall(r"^epoch (\d+)/", log.read_text(), re.M)]
    agent = begun(["--dataset", data, *BARE, "--epochs", 9999, "--steps", 6, "--workers", 2,
                   "--resume", "auto", "--result_dir", tmp_path / "r"],
                  log=log, script=script, restarts=1)
    wait_until((tmp_path / "r/train_DDP.pt").exists)  # an epoch's line comes before it is saved
    ranks = new_ranks(agent)
    fail(first)
    wait_until(lambda: not any(rank in ranks_of(agent) for rank in ranks), 120)
    picture.write_bytes(whole)
    before, ranks = max(epochs()), new_ranks(agent, ranks)
    wait_until(lambda: max(epochs()) > before + 1)
    assert epochs().count(1) == 1
    fail(second)
    assert agent.wait(150) == 1
    wait_until(lambda: not processes_of(tmp_path), 20)
    assert {"killed": "exitcode  : -9", "raising": "3_00005.png: cannot identify image file"}[
        second] in log.read_text()


def test_f62_two_torchruns_at_once(digits, tmp_path):
    """Two torchruns of train_DDP.py on one host at once, and a third by torch.distributed.launch ->
    no clash of ports: all end well."""
    options = ["--dataset", digits, *BARE, "--result_dir"]
    commands = [torchrun(SRC / "train_DDP.py", *options, tmp_path / str(k)) for k in range(2)]
    commands.append([sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2",
                     f"--master_port={free_port()}", SRC / "train_DDP.py", *options,
                     tmp_path / "2"])
    for process in [start(command) for command in commands]:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err[-3000:]
    assert len(list(tmp_path.glob("?/train_DDP.json"))) == 3


def test_f54_f55_ranks_killed_3_times(digits, rng, tmp_path):
    """3 SIGKILLs of one of two ranks at random moments of a torchrun --max-restarts=20 of
    train_DDP.py --resume auto, one of them of the rank that saves, during a save -> the weights
    are those of an unbroken run, bit for bit."""
    log, ranks = tmp_path / "log", []
    options = ["--dataset", digits, *LONG, "--epochs", 60, "--resume", "auto", "--result_dir"]
    train(SRC / "train_DDP.py", *options, tmp_path / "a")
    kills = Kills(tmp_path / "b/train_DDP.pt", rng)
    agent = begun([*options, tmp_path / "b"], log=log, restarts=20)
    while kills.number < 3:
        ranks = new_ranks(agent, ranks)
        victim = rng.choice(ranks)
        if kills.is_in_a_save:
            victim = next(rank for rank in ranks if rank.environ().get("RANK") == "0")
        kills.wait(3)
        victim.kill()
        victim.wait(10)
        kills.done()
    assert agent.wait(400) == 0, log.read_text()[-3000:]
    assert_same_in_the_end(tmp_path / "a", tmp_path / "b", "train_DDP")
