"""On NVIDIA GPUs: every set of techniques, float16, equality. Skipped where there is none."""

import functools
import gzip
import itertools
import json
import re
import sys

import pytest
import torch

import helpers
from helpers import (
    ROOT,
    SRC,
    draw_digits,
    edited,
    flags,
    load_checkpoint,
    params,
    run,
    same_bits,
    tiny,
    torchrun,
    weights,
)
from test_compose import SETS, WHOLE
from test_ddp import without_batch_norm
from test_variants import assert_equal_epochs, composed, in_float64

GPUS = torch.cuda.device_count()
ONE_PROCESS = sorted(
    path.stem for path in SRC.glob("train*.py") if path.stem not in ("train_DDP", "train_profile")
)
train = functools.partial(helpers.train, forked=False)  # as a user starts it


def start_all(script, *options, processes):
    done = run(*torchrun(script, *options, processes=processes))
    assert done.returncode == 0, done.stderr[-3000:]


def fours():
    """Yield sets of at most four techniques; each pair that can be joined is in one of them."""
    left, possible = {each for each in SETS if len(each) == 2}, set(SETS)
    while left:
        chosen = min(left)
        while len(chosen) < 4:

            def new(name):
                return sum(tuple(sorted((name, each))) in left for each in chosen)

            names = [name for (name,) in SINGLE if tuple(sorted({*chosen, name})) in possible]
            best = max(sorted({*names} - {*chosen}), key=new, default=None)
            if not best or not new(best):
                break
            chosen = tuple(sorted({*chosen, best}))
        left -= {*itertools.combinations(chosen, 2)}
        yield chosen


SINGLE = [each for each in SETS if len(each) == 1]


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", params([*SINGLE, *fours(), *WHOLE]))
def test_each_set_runs(chosen, digits, tmp_path):
    if GPUS > 1 and "DP" in chosen and {"compile", "channels_last"} & set(chosen):
        pytest.skip("DataParallel on several GPUs takes neither: docs/techniques.md")
    script = composed(tmp_path, *chosen)
    options = tiny(digits, tmp_path, workers=1, augment="crop")
    if "DDP" in chosen:
        start_all(script, *options, processes=GPUS if 40 % GPUS == 0 else 1)
        record = json.loads(script.with_suffix(".json").read_text())
    else:
        record, _ = train(script, *options)
    assert len(record["epochs"]) == 2 and 0 < record["epochs"][1]["loss"] < 10
    assert 0 < record["peak_memory_bytes"] < 4e9
    parts = load_checkpoint(tmp_path / f"{script.stem}.pt")["parts"]
    assert ("scale" in parts.get("scaler", {})) == ("amp" in chosen)


def seen_by_whatif(script, digits, folder, epochs):
    """Run a script under whatif; return (its record, its output)."""
    found = folder / "found.json"
    words = ["--only", "plain", *flags(minutes=2, json=found), script]
    options = flags(dataset=digits, batch_size=20, epochs=epochs, result_dir=folder)
    done = run(sys.executable, ROOT / "whatif", *words, *options)
    assert done.returncode == 0, done.stderr
    return json.loads(found.read_text()), done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["train", "train_cache", "train_channels_last", "train_fused"])
def test_no_step_waits_for_the_gpu(name, digits, tmp_path):
    """As their comments say; whatif finds lines that wait."""
    # the cache's steps go on epoch by epoch
    record, _ = seen_by_whatif(SRC / f"{name}.py", digits, tmp_path, epochs=9999)
    assert record["machine"]["device"] == "cuda" and record["windows"]
    assert "busy" in record["facts"] and record["host_waits"] == []  # it has looked for them


@pytest.mark.gpu
def test_whatif_sees_captured_graphs(digits, tmp_path):
    record, _ = seen_by_whatif(SRC / "train_graphs.py", digits, tmp_path, epochs=9999)
    assert record["windows"] and "graphs" in record["facts"]["seen"]


@pytest.mark.gpu
def test_whatif_names_what_waits_inside_a_line(digits, tmp_path):
    """torchvision's Normalize copies mean and std to the GPU each time that it is called."""
    script = edited(
        "train",
        tmp_path,
        (
            "return (images / 255 - mean) / std",
            "return transforms.Normalize([.485, .456, .406], [.229, .224, .225])(images / 255)",
        ),
    )
    record, output = seen_by_whatif(script, digits, tmp_path, epochs=99)
    assert any(
        re.search(r"return transforms.Normalize.*\(\S*torchvision\S+_misc.py:\d+\)", each["text"])
        for each in record["host_waits"]
    ), output


@pytest.mark.gpu
def test_bfloat16_has_no_scaler(digits, tmp_path):
    script, saved = SRC / "train_amp.py", tmp_path / "train_amp.pt"
    train(script, *tiny(digits, tmp_path, amp_dtype="bfloat16"))
    assert load_checkpoint(saved)["parts"]["scaler"] == {}
    record, _ = train(script, *tiny(digits, tmp_path / "float16", epochs=3, resume=saved))
    assert len(record["epochs"]) == 3


@pytest.mark.gpu
def test_float16_reaches_the_baselines_accuracy(tmp_path):
    options = flags(dataset=draw_digits(tmp_path / "digits"), result_dir=tmp_path)
    graphs = composed(tmp_path, "amp", "cache", "channels_last", "cudnn", "fused", "graphs")
    baseline, *others = (
        train(script, *options)[0]["val_top1"]
        for script in (SRC / "train.py", SRC / "train_amp.py", graphs)
    )
    assert baseline > 0.97
    assert all(abs(top1 - baseline) <= 0.01 for top1 in others)


@pytest.mark.gpu
def test_fused_leaves_out_a_first_step_that_overflows(digits, tmp_path):
    """The weights are then those of a run without fused, up to float16's rounding."""
    records = []
    for techniques in (["amp"], ["amp", "fused"]):
        script = edited(
            composed(tmp_path, *techniques),
            tmp_path,
            (
                "torch.amp.GradScaler(",
                "torch.amp.GradScaler(init_scale=2.0 ** 127, backoff_factor=2.0 ** -117, ",
            ),
        )
        records.append(train(script, *tiny(digits, tmp_path))[0])
    for one, other in zip(*(record["epochs"] for record in records)):
        assert one["loss"] == pytest.approx(other["loss"], abs=0.02)


@pytest.mark.gpu
@pytest.mark.fault("checkpoint of another variant")
@pytest.mark.parametrize("names", params(zip(ONE_PROCESS, ONE_PROCESS[1:] + ONE_PROCESS[:1])))
def test_checkpoints_resume_across_variants(names, digits, tmp_path):
    source, to = (SRC / f"{name}.py" for name in names)
    train(source, *tiny(digits, tmp_path / "a", epochs=1))
    saved = tmp_path / "a" / f"{source.stem}.pt"
    record, _ = train(to, *tiny(digits, tmp_path / "b", resume=saved))
    assert len(record["epochs"]) == 2


@pytest.mark.gpu
def test_profile_of_a_gpu(digits, tmp_path):
    _, output = train(SRC / "train_profile.py", *tiny(digits, tmp_path))
    found = re.search(r"wait for data (\d+)% of the time, the device works (\d+)% of it", output)
    assert found and 0 < int(found[2]) and int(found[1]) + int(found[2]) <= 110
    assert re.search(r"Self CUDA %.*\n(.*\n)*.*(wgrad|dgrad|fprop|gemm)", output)


@pytest.mark.gpu
@pytest.mark.compiler
def test_profile_of_a_compiled_model_shows_kernels(digits, tmp_path):
    script = composed(tmp_path, "compile", "profile")
    _, output = train(script, *tiny(digits, tmp_path))
    assert re.search(r"Self CUDA %.*\n(.*\n)*.*(wgrad|dgrad|fprop|triton_)", output), output
    with gzip.open(tmp_path / f"{script.stem}_trace0.json.gz") as file:
        assert any(
            event.get("cat") == "kernel" and event["name"].startswith("triton_")
            for event in json.load(file)["traceEvents"]
        )


# ------------------------------------------------------------------------------------ graphs
def assert_equal_with_graphs(scripts, start, digits, folder):
    """Check that two scripts, without graphs and with them, learn the same."""
    records, states = [], []
    for script in scripts:
        place = folder / script.stem
        start(script, *tiny(digits, place, epochs=4, steps=6, image_size=32, workers=2))
        records.append(json.loads((place / f"{script.stem}.json").read_text()))
        states.append(weights(place, script.stem))
    assert_equal_epochs(*records)
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("more", params([(), ("channels_last", "fused"), ("DALI", "progressive")]))
def test_graphs_learn_what_eager_steps_learn(more, digits, tmp_path):
    """To capture leaves no trace in weights, statistics and counts; each size has its graphs."""
    scripts = [
        in_float64(composed(tmp_path, *names) if names else "train", tmp_path)
        for names in (more, (*more, "graphs"))
    ]
    assert_equal_with_graphs(scripts, train, digits, tmp_path)


@pytest.mark.gpu
def test_graphs_below_ddp(digits, tmp_path):
    """Two processes share a GPU, which NCCL refuses, so gloo averages."""
    one_gpu = ('"nccl" if on_gpu else "gloo"', '"gloo"'), ('os.environ["LOCAL_RANK"]', "0")
    scripts = [
        edited(in_float64(composed(tmp_path, *names), tmp_path), tmp_path, *one_gpu)
        for names in (["DDP"], ["DDP", "graphs"])
    ]
    start = functools.partial(start_all, processes=2)
    assert_equal_with_graphs(scripts, start, digits, tmp_path)


def without_tf32(script, folder):
    """Write a copy without TF32, whose rounding differs between batch sizes."""
    seed = "    torch.manual_seed(seed)\n"
    return edited(script, folder, (seed, f"{seed}    torch.backends.cudnn.allow_tf32 = False\n"))


@pytest.mark.gpus
def test_ddp_equals_the_baseline_on_the_same_global_batches(digits, tmp_path):
    options = tiny(digits, tmp_path, steps=6, width=8, image_size=32, workers=2)
    scripts = [
        without_tf32(without_batch_norm(name, tmp_path), tmp_path)
        for name in ("train", "train_DDP")
    ]
    train(scripts[0], *options)
    start_all(scripts[1], *options, processes=2)
    one, many = weights(tmp_path, "train"), weights(tmp_path, "train_DDP")
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=0, atol=1e-4)


@pytest.mark.gpus
def test_sync_bn_equals_one_gpu(digits, tmp_path):
    options = tiny(digits, tmp_path, epochs=1, lr=0.01, width=8, image_size=32, workers=2)
    train(without_tf32("train", tmp_path), *options)
    start_all(without_tf32("train_DDP", tmp_path), *options, "--sync_bn", processes=2)
    one, many = weights(tmp_path, "train"), weights(tmp_path, "train_DDP")
    assert not same_bits(one, many)
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-3, atol=1e-3)


@pytest.mark.gpus
def test_whatif_measures_on_the_gpu_that_trains(tmp_path):
    """The script names cuda:1, and leaves cuda:0 the current device."""
    script = tmp_path / "second.py"
    script.write_text("""\
import torch

device = torch.device("cuda:1")
net = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 1)).to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.001)
while True:
    loss = net(torch.randn(4096, 2048, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""")
    found = tmp_path / "found.json"
    words = ["--only", "fused,compile", *flags(minutes=1, json=found), script]
    done = run(sys.executable, ROOT / "whatif", *words)
    assert done.returncode == 0, done.stderr
    record = json.loads(found.read_text())
    assert record["facts"]["busy"] > 0 and record["facts"]["kernels"]
    assert all(each["memory"] > 2048 * 4096 for each in record["windows"])  # beyond what it holds
