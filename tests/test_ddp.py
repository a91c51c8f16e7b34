"""train_DDP.py with two processes on a CPU: equal to one process, launching, killed ranks."""

import functools
import json
import re
import shutil
import signal
import sys

import psutil
import pytest
import torch

from helpers import (
    DDP_WORKERS,
    SRC,
    TINY,
    TORCHRUN,
    Forked,
    Hostile,
    assert_one_line,
    draw_digits,
    edited,
    free_port,
    processes_of,
    run_forked,
    spy,
    start,
    tiny,
    torchrun,
    train,
    wait_until,
    weights,
)
from test_loader import classes
from test_resume import Pipe, assert_same_in_the_end, stamp

SCRIPT = SRC / "train_DDP.py"
# a torchrun that restarts its processes must not give them the killed ones' store: pytorch#135712
RESTARTS = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def without_batch_norm(name, folder):
    """Write a copy whose model has no batch norm, so that images of a batch do not interact."""
    return edited(name, folder, ("1 if i % 3 else 2)", "1 if i % 3 else 2, norm_layer=None)"))


# ---------------------------------------------------------------------------------- equality
def test_equal_to_the_baseline_on_the_same_global_batches(digits, tmp_path):
    options = tiny(digits, tmp_path, steps=6)
    baseline, _ = train(without_batch_norm("train", tmp_path), *options)
    ddp, _ = train(without_batch_norm("train_DDP", tmp_path), *options)
    one, many = weights(tmp_path, "train"), weights(tmp_path, "train_DDP")
    assert max(value.abs().max() for value in one.values()) > 0.01
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=0, atol=1e-5)
    for e, f in zip(baseline["epochs"], ddp["epochs"]):
        assert f["loss"] == pytest.approx(e["loss"], abs=1e-5)
        assert f["val_top1"] == e["val_top1"] and f["val_top5"] == e["val_top5"]


@pytest.mark.fault("not divisible by batch or processes")
def test_validation_counts_each_picture_once(tmp_path):
    """70 pictures over 1, 2 and 3 processes, with weights that stand still."""
    digits = draw_digits(tmp_path / "digits", train=5, val=7)
    options = tiny(digits, tmp_path, epochs=1, batch_size=42, steps=1, lr=1e-30)
    baseline, _ = train(without_batch_norm("train", tmp_path), *options)
    counts = {(baseline["epochs"][0]["val_top1"], baseline["epochs"][0]["val_top5"])}
    script = without_batch_norm("train_DDP", tmp_path)
    for processes in (2, 3):
        done = run_forked(script, *options, ranks=processes)
        assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr[-2000:]
        (epoch,) = json.loads((tmp_path / "train_DDP.json").read_text())["epochs"]
        counts.add((epoch["val_top1"], epoch["val_top5"]))
    ((top1, top5),) = counts
    assert round(top1 * 70, 3) == round(top1 * 70) and 0 < top5 < 1


def test_a_process_without_validation_images(digits, tmp_path):
    for part, count in (("train", 20), ("val", 1)):
        for folder in sorted((digits / part).iterdir())[:2]:
            copied = tmp_path / "two" / part / folder.name
            copied.mkdir(parents=True)
            for image in sorted(folder.iterdir())[:count]:
                shutil.copy(image, copied)
    options = tiny(tmp_path / "two", tmp_path, epochs=1, batch_size=30)
    done = run_forked(SCRIPT, *options, ranks=3)
    assert done.returncode == 0, done.stderr[-2000:]
    (epoch,) = json.loads((tmp_path / "train_DDP.json").read_text())["epochs"]
    assert epoch["val_top1"] in (0, 0.5, 1)


@pytest.mark.fault("augmentation without workers")
@pytest.mark.parametrize("workers", sorted({0, DDP_WORKERS}))
def test_ranks_draw_different_crops_and_dropout(workers, digits, tmp_path):
    """All pictures are one, so that only the crops and flips can make a difference."""
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    pictures = sorted((data / "train").rglob("*.png"))
    for path in pictures:
        path.write_bytes(pictures[33].read_bytes())
    options = tiny(
        data,
        tmp_path / "r",
        model="squeezenet1_1",
        image_size=32,
        lr=0.01,
        augment="resized",
        workers=workers,
    )
    seen = spy(tmp_path / "seen", SCRIPT, *options, ranks=2)
    for layer in ("Normalize", "Dropout"):
        drawn = [tensor for rank in (0, 1) for tensor in seen(layer, True, rank)]
        assert len(drawn) == 2 * 2 * 3  # ranks, epochs, steps
        for k, one in enumerate(drawn):
            assert not any(torch.equal(one, other) for other in drawn[:k]), layer
    again = spy(tmp_path / "again", SCRIPT, *options, ranks=2)
    for rank in (0, 1):
        for one, other in zip(seen("Normalize", True, rank), again("Normalize", True, rank)):
            assert torch.equal(one, other)


# -------------------------------------------------------------------------------- wrong use
@pytest.mark.fault("errors of PyTorch")
def test_local_rank_alone_is_no_launcher(digits, tmp_path):
    """Some schedulers and editors set LOCAL_RANK."""
    words = SCRIPT, "--dataset", digits
    done = run_forked(*words, cwd=tmp_path, env={"LOCAL_RANK": "0"})
    assert_one_line(done, 2, "torchrun --standalone --nproc_per_node=gpu train_DDP.py")


@pytest.mark.fault("errors of PyTorch")
def test_sync_bn_without_a_gpu_is_refused(digits, tmp_path):
    done = run_forked(SCRIPT, *tiny(digits, tmp_path), "--sync_bn", ranks=2)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "train_DDP.py: error: --sync_bn needs GPUs" in done.stderr


def test_without_a_launcher_one_line_says_how(digits, tmp_path):
    done = run_forked(SCRIPT, "--dataset", digits, cwd=tmp_path)
    assert_one_line(done, 2, "torchrun --standalone --nproc_per_node=gpu train_DDP.py")


@pytest.mark.fault("wrong options")
def test_batch_that_is_no_multiple_of_the_processes(digits, tmp_path):
    done = run_forked(SCRIPT, "--dataset", digits, "--batch_size", 41, cwd=tmp_path, ranks=2)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: --batch_size 41 is not a multiple of 2 processes" in done.stderr


@pytest.mark.fault("dataset smaller than a batch")
def test_fewer_pictures_than_a_batch(tmp_path):
    data = classes(classes(tmp_path / "data"), "val")
    options = tiny(data, tmp_path / "r")
    done = run_forked(SCRIPT, *options, "--batch_size", 14, ranks=2)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--batch_size 14: there are only 12 training images" in done.stderr
    record, _ = train(SCRIPT, *options, "--batch_size", 12)
    assert len(record["epochs"]) == 2


@pytest.mark.fault("loss not finite")
def test_loss_that_is_not_finite(digits, tmp_path):
    done = run_forked(SCRIPT, *tiny(digits, tmp_path, lr="1e30"), ranks=2)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search("train_DDP: error: .* in epoch 1, step 2: ", done.stderr), done.stderr
    assert not (tmp_path / "train_DDP.json").exists()


@pytest.mark.fault("unusable checkpoint", "pickle in a checkpoint")
def test_checkpoints_that_are_refused(digits, tmp_path):
    (tmp_path / "text.pt").write_text("<html></html>")
    torch.save({"parts": {"model": Hostile(str(tmp_path / "trap"))}}, tmp_path / "pickle.pt")
    for name in ("text.pt", "pickle.pt"):
        done = run_forked(SCRIPT, *tiny(digits, tmp_path / "r", resume=tmp_path / name), ranks=2)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert f"train_DDP.py: error: --resume {tmp_path / name}: " in done.stderr
    assert not (tmp_path / "trap").exists()


# --------------------------------------------------------------------------------- launching
def test_two_machines_resume_from_a_folder_that_both_see(digits, tmp_path):
    """Two torchruns stand for two machines."""
    options = tiny(digits, tmp_path)
    train(SCRIPT, *options, "--epochs", 1)
    words = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=7"]
    words += [f"--rdzv_endpoint=localhost:{free_port()}", SCRIPT, *options, "--resume", "auto"]
    command = [*TORCHRUN, *words]
    ends = [agent.wait() for agent in [Forked(*command) for _ in range(2)]]
    out = "".join(end.stdout for end in ends)
    assert [end.returncode for end in ends] == [0, 0], ends
    assert "1 of 2 epochs are done" in out and out.count("epoch 2/2") == 1


@pytest.mark.parametrize("second", ["no checkpoint", "another checkpoint"])
def test_machines_without_the_same_checkpoint_say_so(second, digits, tmp_path):
    """The two processes have folders of their own, as machines have."""
    options = ["--dataset", digits, *TINY]
    train(SCRIPT, *options, "--epochs", 1, "--result_dir", tmp_path / "0")
    if second == "another checkpoint":
        train(SCRIPT, *options, "--epochs", 1, "--seed", 1, "--result_dir", tmp_path / "1")
    machine = tmp_path / "machine.py"
    machine.write_text("""\
import os, runpy, sys
sys.argv = [*sys.argv[1:], "--result_dir", os.environ["RANK"]]
runpy.run_path(sys.argv[0], run_name="__main__")
""")
    done = run_forked(machine, SCRIPT, *options, "--resume", "auto", cwd=tmp_path, ranks=2)
    assert done.returncode and "epoch 2/2" not in done.stdout, done.stderr
    assert "error: --resume: process 0 has another checkpoint: copy its " in done.stderr


# ------------------------------------------------------------------------------ killed ranks
def ranks_of(agent):
    """Return the processes that a torchrun has started as ranks, without their workers."""
    try:
        return [
            child
            for child in psutil.Process(agent.pid).children()
            if "train_DDP.py" in " ".join(child.cmdline())
        ]
    except psutil.Error:  # gone while it was looked at
        return []


def new_ranks(agent, old=()):
    """Wait for both ranks of a torchrun, others than the old ones."""
    old = {rank.pid for rank in old}
    return wait_until(
        lambda: (
            len(found := ranks_of(agent)) == 2
            and not ({rank.pid for rank in found} & old)
            and found
        )
    )


def begin(script, *options, log, restarts, forked=True):
    """Start a torchrun of two ranks whose output goes to `log`."""
    command = torchrun(script, *options)
    command[3:3] = [f"--max-restarts={restarts}"]
    if forked:
        return Forked(*command[1:], env=RESTARTS, log=log)
    with open(log, "w") as file:
        return start(command, env=RESTARTS, stdout=file, stderr=file)


@pytest.mark.fault("DDP process killed")
@pytest.mark.parametrize(
    "faults",
    [
        ["raising", "hanging", "killed"],  # and goes on after a kill: in the next test
        pytest.param(
            ["killed", "hanging", "raising", "killed"], marks=pytest.mark.gpus, id="by_nccl"
        ),
    ],
)
def test_a_rank_fails(faults, digits, tmp_path):
    """torchrun restarts both from the last checkpoint, and after the last fault it ends all."""
    data, log, saved = tmp_path / "data", tmp_path / "log", tmp_path / "r" / "train_DDP.pt"
    shutil.copytree(digits, data)
    picture = data / "train/3/3_00005.png"
    whole = picture.read_bytes()
    # a user's limit for a rank that hangs
    limit = 'timeout=__import__("datetime").timedelta(seconds=15))'
    script = edited("train_DDP", tmp_path, ('else "gloo")', f'else "gloo",\n        {limit}'))

    def fail(fault):
        if fault == "raising":  # the rank that reads it, or its worker
            picture.write_bytes(b"")
        else:
            ranks[1].send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

    def epochs():
        return [int(number) for number in re.findall(r"^epoch (\d+)/", log.read_text(), re.M)]

    agent = begin(
        script,
        *tiny(data, saved.parent, epochs=9999, steps=6, workers=DDP_WORKERS, resume="auto"),
        log=log,
        restarts=len(faults) - 1,
    )
    wait_until(lambda: saved.exists() or agent.poll() is not None)
    ranks = new_ranks(agent)
    for fault in faults[:-1]:
        fail(fault)
        if fault == "hanging":  # wake it to be ended: torchrun would kill it only 30 s later
            wait_until(lambda: ranks[0] not in ranks_of(agent))
            ranks[1].send_signal(signal.SIGCONT)
        wait_until(lambda: not any(rank in ranks_of(agent) for rank in ranks))
        picture.write_bytes(whole)
        before, ranks = max(epochs()), new_ranks(agent, ranks)
        wait_until(lambda: max(epochs()) > before + 1 or agent.poll() is not None)
        assert epochs().count(1) == 1 and agent.poll() is None, log.read_text()[-5000:]
    fail(faults[-1])
    wait_until(lambda: agent.poll() is not None)
    assert agent.poll() == 1
    wait_until(lambda: not processes_of(tmp_path))
    for line in ("exitcode  : -9", "3_00005.png: cannot identify image file"):
        assert line in log.read_text()


@pytest.mark.slow
@pytest.mark.fault("DDP process killed", "kill while training", "two runs at once")
def test_ranks_killed_twice(digits, rng, tmp_path):
    """The rank that saves, in a save, and any rank after a checkpoint.

    Beside this torchrun, which waits in its save, torch.distributed.launch runs from start to end.
    """
    options = functools.partial(
        tiny, digits, epochs=30, steps=2, image_size=8, augment="resized", resume="auto"
    )
    train(SCRIPT, *options(tmp_path / "a"))
    size = (tmp_path / "a" / "train_DDP.pt").stat().st_size
    log, saved, ranks = tmp_path / "log", tmp_path / "b" / "train_DDP.pt", []
    saved.parent.mkdir()
    pipe = Pipe(saved)
    agent = begin(SCRIPT, *options(saved.parent), log=log, restarts=20, forked=False)
    launch = [
        "-m",
        "torch.distributed.launch",
        "--nproc_per_node=2",
        f"--master_port={free_port()}",
    ]
    options = tiny(digits, tmp_path / "c", workers=DDP_WORKERS)
    beside = start([sys.executable, *launch, SCRIPT, *options])
    _, err = beside.communicate()
    assert beside.returncode == 0 and (tmp_path / "c" / "train_DDP.json").exists(), err[-3000:]
    for kill in range(2):
        ranks, before = new_ranks(agent, ranks), stamp(saved)
        victim = rng.choice(ranks)
        if kill == 0:
            (victim,) = [rank for rank in ranks if rank.environ().get("RANK") == "0"]
            amount = rng.randrange(1, size - 100_000)
            wait_until(lambda: pipe.has_read(amount) or agent.poll() is not None)
        else:
            wait_until(lambda: stamp(saved) != before or agent.poll() is not None, pause=0.0005)
        assert agent.poll() is None, log.read_text()[-5000:]
        victim.kill()
        if kill == 0:
            victim.wait()
            pipe.close()
    assert agent.wait() == 0, log.read_text()[-5000:]
    assert_same_in_the_end(tmp_path / "a", tmp_path / "b", "train_DDP")
