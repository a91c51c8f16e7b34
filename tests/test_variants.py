"""Each technique's own promises: equal to the baseline, and what it adds."""

import gzip
import json
import re

import pytest
import torch
from torchvision.transforms import v2 as transforms

import compose
from helpers import (
    SOON,
    SRC,
    TINY,
    assert_one_line,
    edited,
    learned,
    load_checkpoint,
    replaced,
    run_forked,
    same_bits,
    spy,
    tiny,
    train,
    weights,
)

SGD = "torch.optim.SGD(model.parameters(), args.lr, 0.9, weight_decay=5e-4, nesterov=True)"
OPTIMIZERS = {
    "SGD": SGD,
    "SGD, plain": "torch.optim.SGD(model.parameters(), args.lr)",
    "SGD, a part": "torch.optim.SGD([*model.parameters()][-9:], args.lr, 0.9)",
    "Adam": "torch.optim.Adam(model.parameters(), args.lr / 100)",
    "AdamW": "torch.optim.AdamW(model.parameters(), args.lr / 100)",
    "RMSprop": "torch.optim.RMSprop(model.parameters(), args.lr / 100, momentum=0.9)",
}


def composed(folder, *techniques):
    """Write the script that joins these techniques."""
    script = folder / ("_".join(["train", *techniques]) + ".py")
    script.write_text(compose.join(techniques))
    return script


def in_float64(name, folder):
    """Write a copy that computes in float64: small differences in float32 grow step by step.

    It has two convolutions, which compile sooner than eleven.
    """
    return edited(
        name,
        folder,
        ("range(1, 12)", "range(1, 3)"),
        ("(images / 255", "(images.double() / 255"),
        ("model = model.to(device)", "model = model.to(device).double()"),
    )


def assert_equal_epochs(one, other, tolerance=1e-6):
    """Check losses to the tolerance, and accuracies exactly."""
    assert len(one["epochs"]) == len(other["epochs"])
    for e, f in zip(one["epochs"], other["epochs"]):
        assert e["loss"] == pytest.approx(f["loss"], abs=tolerance)
        assert e["val_top1"] == f["val_top1"]


# ---------------------------------------------------------------------------------- equality
@pytest.mark.parametrize(
    "name, more",
    [("DP", []), ("cudnn", []), ("graphs", []), ("profile", []), ("progressive", ["--small", 1])],
)
def test_equal_to_the_baseline_bit_for_bit(name, more, digits, tmp_path):
    options = tiny(digits, tmp_path, image_size=20, augment="crop")
    baseline, _ = train(SRC / "train.py", *options)
    variant, _ = train(SRC / f"train_{name}.py", *options, *more)
    assert same_bits(weights(tmp_path, "train"), weights(tmp_path, f"train_{name}"))
    assert learned(baseline["epochs"]) == learned(variant["epochs"])


@pytest.mark.parametrize(
    "name", ["fused", "channels_last", pytest.param("compile", marks=pytest.mark.compiler)]
)
def test_equal_to_the_baseline_after_24_steps_of_float64(name, digits, tmp_path):
    options = tiny(digits, tmp_path, epochs=4, steps=6)
    one, _ = train(in_float64("train", tmp_path), *options)
    other, _ = train(in_float64(f"train_{name}", tmp_path), *options)
    assert one["epochs"][3]["loss"] < one["epochs"][0]["loss"]
    assert_equal_epochs(one, other)


@pytest.mark.parametrize(
    "script",
    [path for path in SRC.glob("train_*.py") if "float16" in path.read_text()],
    ids=lambda path: path.stem,
)
def test_training_and_validation_compute_in_bfloat16(script, digits, tmp_path):
    seen = spy(tmp_path / "seen", script, *tiny(digits, tmp_path, epochs=1, steps=1))
    for trains in (True, False):
        assert {scores.dtype for scores in seen("Linear", trains)} == {torch.bfloat16}


def test_amp_learns(digits, tmp_path):
    """On a CPU, by bfloat16, later than the baseline; test_gpu.py compares accuracies."""
    options = tiny(digits, tmp_path, epochs=6, steps=6)
    losses = [epoch["loss"] for epoch in train(SRC / "train_amp.py", *options)[0]["epochs"]]
    assert losses[-1] < 0.8 * losses[0], losses


def test_graphs_of_an_older_pytorch_are_refused(digits, tmp_path):
    script = edited(
        "train_graphs",
        tmp_path,
        (
            'torch.cuda.is_available() and torch.__version__ < "2.14.0a0"',
            'torch.__version__ < "99"',
        ),
    )
    done = run_forked(script, *tiny(digits, tmp_path))
    assert_one_line(done, 2, "graphs need PyTorch 2.14", torch.__version__)


# ----------------------------------------------------------------------------------- compile
# it compiles soon and logs as with TORCH_LOGS="dynamo,recompiles"
LOGGED = (
    SOON,
    (
        "args = build_parser().parse_args()\n",
        "args = build_parser().parse_args()\n"
        "    torch._logging.set_logs(dynamo=20, recompiles=True)\n",
    ),
)


def test_compile_compiles_once(digits, tmp_path):
    """Not again for a smaller last batch of validation, for its size, or after a resume."""
    script = edited("train_compile", tmp_path, *LOGGED)
    options = tiny(digits, tmp_path, batch_size=20, resume="auto")
    for epochs, more in ((2, []), (3, ["--val_size", 24])):
        done = run_forked(script, *options, "--epochs", epochs, *more)
        assert done.returncode == 0 and f"epoch {epochs}/{epochs}" in done.stdout, done.stderr
        assert done.stderr.count("Step 1: torchdynamo start tracing") == 1
        assert "Recompiling" not in done.stderr


def test_compile_compiles_once_for_each_size(digits, tmp_path):
    """In the first steps, and not again in later epochs."""
    script = edited(composed(tmp_path, "compile", "progressive"), tmp_path, *LOGGED)
    done = run_forked(script, *tiny(digits, tmp_path, epochs=5, image_size=32))
    assert done.returncode == 0 and "epoch 5/5" in done.stdout, done.stderr
    assert done.stderr.count("Step 1: torchdynamo start tracing") == 3
    assert "Recompiling" in done.stderr  # so the test above would see it


# ------------------------------------------------------------------------------- progressive
@pytest.mark.parametrize("size, small, sizes", [(32, 0.5, (16, 24, 32)), (28, 0.25, (8, 16, 28))])
def test_progressive_trains_on_small_images_first(size, small, sizes, digits, tmp_path):
    """Also after a resume. The first three steps try each size; validation has the full size."""
    options = tiny(digits, tmp_path, steps=4, image_size=size)
    plain = spy(tmp_path / "plain", SRC / "train.py", *options, "--epochs", 5)("Normalize", True)
    options += ["--small", small, "--resume", "auto"]
    first, then = (
        spy(tmp_path / str(epochs), SRC / "train_progressive.py", *options, "--epochs", epochs)
        for epochs in (2, 5)
    )
    wanted = [*sizes, sizes[0]] + [size] * 4 + [sizes[1]] * 8 + [size] * 4
    for images, whole, side in zip(
        [*first("Normalize", True), *then("Normalize", True)], plain, wanted, strict=True
    ):
        assert torch.equal(images, transforms.Resize(side)(whole))
    assert {images.shape[-1] for images in first("Normalize", False)} == {size}


@pytest.mark.parametrize("small", ["0", "-1", "1.5", "nan", "x"])
def test_progressive_refuses_a_wrong_size(small, digits, tmp_path):
    done = run_forked(
        SRC / "train_progressive.py", "--dataset", digits, *TINY, "--small", small, cwd=tmp_path
    )
    assert_one_line(done, 2, "train_progressive.py: error: ", "--small")


# ----------------------------------------------------------------------------- fused and amp
def users_copy(text, optimizer):
    """Return `text` with another optimizer, a scheduler and a hook, and what came of them."""
    return replaced(
        text,
        (
            SGD,
            f"""{OPTIMIZERS[optimizer]}
    users_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    steps_seen = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: steps_seen.append(
        optimizer.param_groups[0]["lr"]))""",
        ),
        (
            "    scheduler = torch.optim.lr_scheduler.LambdaLR(\n"
            "        optimizer, lambda step: lr_factor(done + step, args.epochs * steps)\n    )\n",
            "    scheduler = users_scheduler\n",
        ),
        (
            "    # the record\n",
            """    print("rates", steps_seen)
    print("state", sorted(next(iter(optimizer.state.values()), [])))

    # the record\n""",
        ),
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fused_keeps_a_users_optimizer_scheduler_and_hook(optimizer, digits, tmp_path):
    options = tiny(digits, tmp_path)
    ends = []
    for name in ("train", "train_fused"):
        script = in_float64(name, tmp_path)
        script.write_text(users_copy(script.read_text(), optimizer))
        record, output = train(script, *options)
        ends.append((record, re.findall("^(?:rates|state) .*", output, re.M)))
    assert_equal_epochs(ends[0][0], ends[1][0])
    (rates, state), (fused_rates, fused_state) = ends[0][1], ends[1][1]
    assert rates == fused_rates and rates.count(",") == 5
    if optimizer == "SGD, plain":  # has a buffer that it does not use
        assert (state, fused_state) == ("state []", "state ['momentum_buffer']")
    else:
        assert state == fused_state
    groups = load_checkpoint(tmp_path / "train_fused.pt")["parts"]["optimizer"]["param_groups"]
    assert [group.get("fused") for group in groups] == [None if "RMSprop" in optimizer else True]


STEPS = "    steps = min(len(train_loader), "


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fused_under_amp_with_a_scaler(optimizer, digits, tmp_path):
    """The optimizer unscales, or the scaler does where the optimizer cannot; never both.

    On a CPU a user's scaler stands for float16's. Its first step overflows and is left out. A group
    of weights comes later, as in a training that unfreezes layers.
    """
    options = tiny(digits, tmp_path, image_size=8, batch_size=20)
    records = []
    for techniques in (["amp"], ["amp", "fused"]):
        script = edited(
            composed(tmp_path, *techniques),
            tmp_path,
            (SGD, OPTIMIZERS[optimizer]),
            (
                "torch.amp.GradScaler(enabled=amp_dtype == torch.float16)",
                'torch.amp.GradScaler("cpu", init_scale=2.0 ** 127, backoff_factor=2.0 ** -117)',
            ),
            (
                STEPS,
                "    fused = optimizer.param_groups[0].get('fused')\n"
                "    optimizer.add_param_group({'params': [torch.ones(1)], 'fused': fused})\n\n"
                + STEPS,
            ),
        )
        records.append(train(script, *options)[0])
    assert_equal_epochs(*records, tolerance=0.02)


@pytest.mark.parametrize(
    "source, to", [("train", ["channels_last", "fused"]), ("train_channels_last", ["fused"])]
)
def test_fused_goes_on_in_another_memory_layout(source, to, digits, tmp_path):
    """PyTorch's kernel on a CPU would add each momentum to another weight, and say nothing."""
    options = tiny(digits, tmp_path, lr=0.05)
    train(SRC / f"{source}.py", *options, "--epochs", 2)
    again = [*options, "--epochs", 3, "--resume", tmp_path / f"{source}.pt"]
    other, _ = train(composed(tmp_path, *to), *again)
    one, _ = train(SRC / f"{source}.py", *again)
    assert other["epochs"][2]["loss"] == pytest.approx(one["epochs"][2]["loss"], abs=1e-3)


def test_fused_goes_on_from_a_checkpoint_of_the_baseline(digits, tmp_path):
    options = tiny(digits, tmp_path)
    train(SRC / "train.py", *options, "--epochs", 1)
    train(SRC / "train_fused.py", *options, "--resume", tmp_path / "train.pt")
    state = load_checkpoint(tmp_path / "train_fused.pt")["parts"]["optimizer"]
    assert [group["fused"] for group in state["param_groups"]] == [True]
    assert state["param_groups"][0]["momentum"] == 0.9 and state["param_groups"][0]["nesterov"]


# ----------------------------------------------------------------------------------- profile
def test_profile_prints_and_leaves_a_trace(digits, tmp_path):
    record, output = train(SRC / "train_profile.py", *tiny(digits, tmp_path, epochs=3))
    assert re.search(r"aten::\w*convolution", output), output
    found = re.findall(
        r"steps wait for data (\d+)% of the time, the device works (\d+)% of it: what "
        "holds them back is (loading data|computing)",
        output,
    )
    assert len(found) == 1 and all(0 <= int(share) <= 100 for share in found[0][:2])
    # the first epoch's speed is not in the record's
    speeds = [epoch["images_per_second"] for epoch in record["epochs"]]
    assert record["images_per_second"] == pytest.approx(sum(speeds[1:]) / 2)
    with gzip.open(tmp_path / "train_profile_trace0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    steps = [each for each in events if each.get("name") == "Optimizer.step#SGD.step"]
    assert len(steps) == 2  # after the first of three


def test_profile_names_slow_loading(digits, tmp_path):
    script = edited(
        "train_profile",
        tmp_path,
        (
            "        image = Image.open(",
            "        __import__('time').sleep(0.02)\n        image = Image.open(",
        ),
    )
    _, output = train(script, *tiny(digits, tmp_path))
    assert "holds them back is loading data" in output
