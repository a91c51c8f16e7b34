"""compose.sh --into --verify: it finds what a technique changes, and the copy is never lost."""

import os
import re
import signal
import time

import pytest

import compose
from helpers import (
    ROOT,
    SRC,
    change,
    edited,
    flags,
    processes_of,
    run,
    run_forked,
    start,
    wait_until,
)
from verify import Bench, numbers_of

SMALL = flags(width=4, image_size=16, batch_size=20, steps=2, workers=0)
KILLS = int(os.environ.get("KILLS", 3))  # more of them take longer: KILLS=20 pytest -m slow
CORRECT = "        correct = losses.new_zeros(min(5, len(classes)))\n"
STACK = "                correct += (output.topk(len(correct)).indices.T == labels).sum(1)\n"


def verify(path, digits, *words):
    """Do what compose.sh --into PATH WORD ... --verify -- --dataset DIGITS ... does."""
    command = [ROOT / "tools" / "compose.py", "--into", path, *words, "--verify"]
    return run_forked(*command, "--", "--dataset", digits, *SMALL)


def test_a_harmless_technique_is_the_same(digits, tmp_path):
    mine = edited(
        "train", tmp_path, ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(label_smoothing=0.1)")
    )
    mine = mine.rename(tmp_path / "my train.py")
    done = verify(mine, digits, "fused", "channels_last", "progressive")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with --small 1" in done.stdout  # so that all images keep their size
    assert done.stdout.splitlines()[-1] == "the same"
    for view in ("exact", "resumed", "old checkpoint", "as it is"):
        assert any(line.startswith(view) for line in done.stdout.splitlines())
    assert "different" not in done.stdout
    assert mine.read_text().count("# new #") == 7 and "label_smoothing=0.1" in mine.read_text()
    added = [line for line in done.stderr.splitlines() if "added" in line]
    lines = mine.read_text().splitlines()
    for line in added:
        for number in line.split(" at lines ")[1].split(", "):
            assert lines[int(number) - 1].strip() == "# new #"
    assert len(added) == 3
    assert os.listdir(tmp_path) == [mine.name]  # the runs were elsewhere


@pytest.mark.compiler
def test_compiled_dropout_draws_the_same_numbers(digits, tmp_path):
    mine = edited(
        "train",
        tmp_path,
        ("range(1, 12)", "range(1, 2)"),  # small: each run compiles it
        ("nn.Flatten(), nn.Linear", "nn.Flatten(), nn.Dropout(0.5), nn.Linear"),
    )
    done = verify(mine, digits, "compile")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = re.findall(r"^as it is +loss +\d+ +(\S+)", done.stdout, re.MULTILINE)
    assert float(row) < 1e-5


def test_a_device_and_the_line_of_a_warning_are_no_figures(tmp_path):
    bench, path = Bench("my_train.py", [], tmp_path / "runs"), tmp_path / "out"
    path.write_text(f"7 images, cuda\n{tmp_path}/runs/3/x.py:5: UserWarning: step 2\n")
    before = numbers_of(bench.read(path))
    path.write_text(f"7 images, cuda:1\n{tmp_path}/runs/12/x.py:8: UserWarning: step 2\n")
    assert numbers_of(bench.read(path)) == before
    path.write_text(f"8 images, cuda\n{tmp_path}/runs/3/x.py:5: UserWarning: step 2\n")
    assert numbers_of(bench.read(path)) != before


@pytest.mark.parametrize(
    "line, count",
    [
        ("macro F-beta 0.0357, theta: 0.2, secondary_loss=0.4", 3),
        ("mean 0.83 min 0.21", 2),
        ("majority recall 0.83 minority recall 0.41", 2),
        ("loss 1.2 ms-ssim 0.9", 2),
        (
            "eta 0:12, 3.1 s, took 4.5, train_seconds: 7.1, sec_per_step 0.3, 5 min, 31.5 images/s",
            0,
        ),
    ],
)
def test_times_are_no_figures_but_metrics_are(line, count):
    assert sum(map(len, sum(numbers_of(line).values(), []))) == count


def test_names_that_are_new_in_each_run_are_no_difference(digits, tmp_path):
    """A folder named by the time, and a random number in a printed line and in a log."""
    place = "    warmup_seconds = 0\n"
    mine = edited(
        "train",
        tmp_path,
        (
            place,
            """\
    import time
    import uuid
    code = "a1" + uuid.uuid4().hex[:8]  # digits alone would be a number
    history = args.result_dir / f"exp_{time.time_ns()}_{code}" / "history.csv"
    history.parent.mkdir()
    print(f"tracking run {code}, {args.epochs} epochs")
"""
            + place,
        ),
        (
            "        epochs.append(results)\n",
            """\
        with open(history, "a") as file:
            file.write(f"{code},{epoch},{loss},{top[0]}\\n")
        epochs.append(results)
""",
        ),
    )
    done = verify(mine, digits, "fused")
    assert done.returncode == 0 and "not compared, since" not in done.stdout, (
        done.stdout + done.stderr
    )
    row = re.search(r"^exact +files +(\d+)", done.stdout, re.MULTILINE)
    assert row and int(row[1]) > 6


def test_float64_starts_from_the_weights_of_float32(digits, tmp_path):
    """So what is allowed for the losses is rounding, and not how far other weights are apart."""
    mine = edited(
        "train",
        tmp_path,
        ("nn.CrossEntropyLoss()", "lambda x, y: nn.functional.mse_loss(x, torch.rand(x.shape))"),
    )
    done = verify(mine, digits, "channels_last")
    (row,) = re.findall(r"^as it is +loss +\d+ +\S+ +(\S+)", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and float(row) == 0.01, done.stdout + done.stderr


def test_a_model_that_takes_one_size_fails_with_progressive(digits, tmp_path):
    mine = edited(
        "train",
        tmp_path,
        (
            "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels",
            "nn.Flatten(), nn.Linear(4 * channels",
        ),
    )
    done = verify(mine, digits, "progressive")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "progressive makes your copy fail without --small 1:" in done.stdout
    assert "mat1 and mat2 shapes cannot be multiplied" in done.stdout


@pytest.mark.fault("clean merge that is wrong")
def test_a_difference_is_named_with_its_technique(digits, tmp_path):
    """Each process divides its own hits by its own count, which no merge can see."""
    mine = edited(
        "train",
        tmp_path,
        (CORRECT, CORRECT + "        mine = 0\n"),
        (STACK, STACK + "                mine += len(labels)\n"),
        ("(correct.cumsum(0) / len(val_set))", "(correct.cumsum(0) / mine)"),
    )
    before = mine.read_bytes()
    done = verify(mine, digits, "cudnn", "DDP")
    assert done.returncode == 1 and mine.read_bytes() == before, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("different: printed numbers (two processes)") and "top-1" in last
    assert last.endswith("DDP brings it.")
    assert f"{mine} is as it was" in done.stderr
    # the same is told at once, by the pattern in the line
    assert "`mine += len(labels)`: each process has only its share" in done.stderr


@pytest.mark.fault("fused or foreach of your own")
def test_a_copy_that_goes_wrong_from_an_old_checkpoint(digits, tmp_path):
    """SGD(fused=True) steps wrong where a checkpoint has its momentum in another layout."""
    mine = edited("train", tmp_path, ("nesterov=True)", "nesterov=True, fused=True)"))
    text = mine.read_text()
    done = verify(mine, digits, "channels_last")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^old checkpoint .* different$", done.stdout, re.MULTILINE)
    assert re.search(r"^resumed +weights(?!.*different)", done.stdout, re.MULTILINE)
    assert "channels_last brings it" in done.stdout and mine.read_text() == text
    done = verify(mine, digits, "channels_last", "fused")
    assert done.returncode == 0, done.stdout + done.stderr


def test_anyway_changes_the_copy(digits, tmp_path):
    """It is verified as it was before, also when the technique is there already."""
    mine = edited(
        "train",
        tmp_path,
        ("0.9, weight_decay=5e-4, nesterov=True", "0.9, weight_decay=5e-4, dampening=0.9"),
    )
    done = verify(mine, digits, "fused", "--anyway")
    assert done.returncode == 1 and "fused brings it" in done.stdout, done.stdout + done.stderr
    assert "dampening" in done.stderr and 'group["fused"] = ' in mine.read_text()
    after = mine.read_bytes()
    done = verify(mine, digits, "fused")
    assert done.returncode == 1 and "fused brings it" in done.stdout, done.stdout + done.stderr
    assert mine.read_bytes() == after


def test_the_copys_own_failure_is_told_as_its_own(digits, tmp_path):
    mine = edited("train", tmp_path, ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss().no_such()"))
    before = mine.read_bytes()
    done = verify(mine, digits, "amp")
    assert done.returncode == 1 and mine.read_bytes() == before
    assert "your own copy fails, without amp:" in done.stdout and "no_such" in done.stdout


@pytest.mark.slow
@pytest.mark.fault("clean merge that is wrong")
def test_killed_at_random_moments_it_loses_nothing(digits, tmp_path, rng):
    mine = tmp_path / "mine.py"
    before, after = ((SRC / f"{name}.py").read_bytes() for name in ("train", "train_cudnn"))
    for _ in range(KILLS):
        mine.write_bytes(before)
        words = ["--into", mine, "cudnn", "--verify", "--", "--dataset", digits, *SMALL]
        process = start([ROOT / "compose.sh", *words], cwd=tmp_path)
        time.sleep(rng.uniform(0, 12))
        number = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        process.send_signal(number)
        process.communicate()
        assert process.returncode in (0, -number, 130, 143)
        assert mine.read_bytes() in (before, after)
        wait_until(lambda: not processes_of(mine))  # the runs end too


@pytest.mark.parametrize(
    "technique, line, said",
    [
        ("amp", "            nn.utils.clip_grad_norm_(model.parameters(), 1)", "unscale_"),
        ("DDP", "        total += len(labels)", "all_reduce"),
        ("DDP", "        scheduler.step(val_loss)", "all_reduce"),
        ("DDP", "        open('log.csv', 'a').write(line)", "rank == 0"),
        ("DDP", "            if epoch == 1: weight.requires_grad_(True)", "None instead"),
        ("DDP", "    loss_function = nn.CrossEntropyLoss(reduction='sum')", "world_size"),
        ("fused", "    o = torch.optim.SGD(weights, 0.1, 0.9, dampening=0.9)", "momentum"),
        ("compile", "    best = net.state_dict()", "use model"),
        ("DDP", "        predictions = torch.cat(all_outputs)", "all_reduce"),
        ("profile", "            if step == 3: continue", "at its end"),
        ("LMDB", "    train_set = datasets.ImageFolder(root, loader=mine)", "not call this loader"),
        ("DALI", "    def __getitem__(self, i):", "DALI does not call it"),
        ("cache", "        return {'image': image, 'label': label}", "no dicts"),
        ("cache", "    crop = [transforms.ColorJitter(0.1)]", "once for each image"),
        (
            "fused",
            "    optimizer = torch.optim.SGD(weights, 0.1, foreach=True)",
            "goes before fused",
        ),
        (
            "channels_last",
            "    optimizer = torch.optim.SGD(weights, 0.1, fused=True)",
            "add fused too",
        ),
        ("channels_last", "    model = DistributedDataParallel(model)", "are permuted"),
        ("DDP", "    net = net.to(memory_format=torch.channels_last)", "before net is made"),
    ],
)
def test_a_line_that_shows_a_hazard_is_said(technique, line, said):
    text, others = compose.script("train"), [compose.script("train")]
    place = "    steps = min(len(train_loader), args.steps or 1e9)\n"
    assert place in text
    mine = text.replace(place, place + line + "\n")
    number = mine.split("\n").index(line) + 1
    told = compose.hazards(mine, others, {technique})
    assert (
        technique != "channels_last"
        or "fused=True" not in line
        or not compose.hazards(mine, others, {technique, "fused"})
    )  # its block mends it
    assert any(
        each.startswith(f"line {number} with {technique}: `{line.strip()}`: ") and said in each
        for each in told
    ), told
    assert compose.hazards(text, others, {*compose.TECHNIQUES}) == []
    if said == "rank == 0":
        mine = text.replace(place, f"{place}    if rank == 0:\n{line}\n")
        assert compose.hazards(mine, others, {technique}) == []


def test_a_hazard_is_said_also_of_a_technique_that_is_there_already(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text((SRC / "train_amp.py").read_text())
    change(
        mine,
        "            scheduler.step()\n",
        "            scheduler.step()\n            nn.utils.clip_grad_value_(weights, 1)\n",
    )
    done = run(ROOT / "compose.sh", "--into", mine, "cudnn")
    assert done.returncode == 0 and "with amp: `nn.utils.clip_grad_value_" in done.stderr
    assert "--verify -- YOUR OPTIONS" in done.stderr.splitlines()[-1]
