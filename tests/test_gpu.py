"""On an NVIDIA GPU: every variant and composition, float16, equivalence. Skipped without one."""

import functools
import gzip
import json
import re
import sys

import pytest
import torch
import conftest
from helpers import ROOT, SRC, run, torchrun
from test_compose import PAIRS, SETS, WHOLE, compose
from test_train import (AT_ONCE, PHOTOS, SCRIPTS, TINY, assert_equal_epochs, batches, in_float64,
                        module_of, same_bits, weights, with_captured_batches, without_batch_norm)

GPUS = torch.cuda.device_count()
train = functools.partial(conftest.train, forked=False)  # as a user starts it


def start_all(script, *options, processes):
    done = run(*torchrun(script, *options, processes=processes))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", [*[each for each in SETS if len(each) == 1], *PAIRS, *WHOLE],
                         ids="_".join)
def test_each_set_runs(chosen, digits, tmp_path):
    if GPUS > 1 and {"DP", "compile"} <= set(chosen):
        pytest.skip("DataParallel cannot copy a compiled model, and says so")
    script = tmp_path / ("_".join(["train", *chosen]) + ".py")
    script.write_text(compose(*chosen).stdout)
    options = ["--dataset", digits, *TINY, "--augment", "--result_dir", tmp_path]
    if "DDP" in chosen:
        start_all(script, *options, processes=GPUS if 40 % GPUS == 0 else 1)
        record = json.loads(script.with_suffix(".json").read_text())
    else:
        record, _ = train(script, *options)
    assert record["environment"]["gpu"] and record["environment"]["gpus"] == GPUS
    assert re.fullmatch(r"[\d.]+", record["environment"]["driver"])
    assert len(record["epochs"]) == 2 and 0 < record["epochs"][1]["loss"] < 10
    assert 0 < record["peak_memory_bytes"] < 4e9
    state = torch.load(tmp_path / f"{script.stem}.pt", map_location="cpu", weights_only=True)
    assert ("scale" in state["parts"].get("scaler", {})) == ("amp" in chosen)
    assert len(state["rng"]) == 2


@pytest.mark.gpu
def test_bfloat16_has_no_scaler(digits, tmp_path):
    train(SRC / "train_amp.py", "--dataset", digits, *TINY, "--amp_dtype", "bfloat16",
          "--result_dir", tmp_path)
    state = torch.load(tmp_path / "train_amp.pt", map_location="cpu", weights_only=True)
    assert state["parts"]["scaler"] == {}
    record, _ = train(SRC / "train_amp.py", "--dataset", digits, *TINY, "--epochs", 3, "--resume",
                      tmp_path / "train_amp.pt", "--result_dir", tmp_path / "float16")
    assert len(record["epochs"]) == 3


@pytest.mark.gpu
def test_float16_reaches_the_baselines_accuracy(tmp_path):
    data = tmp_path / "digits"
    assert run(sys.executable, ROOT / "make_dataset.py", "digits", "--dst", data).returncode == 0
    records = [train(SRC / name, "--dataset", data, "--result_dir", tmp_path)[0]
               for name in ("train.py", "train_amp.py")]
    assert records[0]["val_top1"] > 0.97
    assert abs(records[0]["val_top1"] - records[1]["val_top1"]) <= 0.01


@pytest.mark.gpu
def test_f59_checkpoints_resume_across_variants(digits, tmp_path):
    """Each one-process script's checkpoint in the next such script -> the run goes on from its
    epoch."""
    one_process = [path for path in SCRIPTS if path.stem not in ("train_DDP", "train_profile")]
    for source, to in zip(one_process, one_process[1:] + one_process[:1]):
        train(source, "--dataset", digits, *TINY, "--epochs", 1, "--result_dir", tmp_path / "a")
        record, _ = train(to, "--dataset", digits, *TINY, "--result_dir", tmp_path / "b",
                          "--resume", tmp_path / "a" / f"{source.stem}.pt")
        assert len(record["epochs"]) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("at_once, steps", AT_ONCE)
def test_f08_f11_dali_decodes_the_baselines_pictures_on_the_gpu(at_once, steps, photos, tmp_path):
    """Grey JPEGs and some that EXIF turns, decoded by DALI on the GPU -> the baseline's batches,
    order and labels; each picture off by less than 1/255 in the mean."""
    both = []
    for name, more in (("train", []), ("train_DALI", at_once)):
        (tmp_path / name).mkdir()
        train(with_captured_batches(SRC / f"{name}.py", tmp_path / name), "--dataset", photos,
              *PHOTOS, "--steps", steps, *more, "--result_dir", tmp_path / name)
        both.append(batches(tmp_path / name))
    for (_, baseline), (_, dali) in zip(*both, strict=True):
        for (images, labels), (others, numbers) in zip(baseline, dali, strict=True):
            assert torch.equal(labels, numbers) and others.dtype == torch.uint8
            assert (images.float() - others.float()).abs().mean((1, 2, 3)).max() < 1


@pytest.mark.gpu
def test_cache_takes_the_memory_of_the_gpu_that_it_announces(digits, tmp_path):
    options = ["--dataset", digits, "--epochs", 1, "--steps", 1, "--batch_size", 2, "--width", 1,
               "--image_size", 512, "--val_size", 32, "--result_dir", tmp_path]
    baseline, _ = train(SRC / "train.py", *options)
    cached, output = train(SRC / "train_cache.py", *options)
    assert "take 189.0 MB of cuda's memory" in output
    taken = cached["peak_memory_bytes"] - baseline["peak_memory_bytes"]
    assert taken == pytest.approx(189e6, rel=0.1)
    ram, output = train(SRC / "train_cache.py", *options, "--cache_device", "ram")
    assert "take 189.0 MB of cpu's memory" in output
    assert ram["peak_memory_bytes"] - baseline["peak_memory_bytes"] < 10e6


@pytest.mark.gpu
def test_the_stem_compiled_is_the_baselines_in_float64(digits, tmp_path):
    script = tmp_path / "train_channels_last_compile_stem.py"
    script.write_text(compose("channels_last", "compile", "stem").stdout)
    script.write_text(in_float64(script, tmp_path).read_text())
    options = ["--dataset", digits, *TINY, "--model", "resnet18", "--image_size", 64,
               "--result_dir", tmp_path]
    one, _ = train(in_float64(SRC / "train.py", tmp_path), *options)
    other, output = train(script, *options)
    assert "2 layers in blocks or, if compiled, rows" in output
    assert_equal_epochs(one, other)


@pytest.mark.gpu
def test_profile_of_a_gpu(digits, tmp_path):
    _, output = train(SRC / "train_profile.py", "--dataset", digits, *TINY, "--result_dir",
                      tmp_path)
    found = re.search(r"waits (\d+)% for data; the GPU is busy (\d+)%", output)
    assert found and int(found[1]) + int(found[2]) <= 110 and "convolution" in output


@pytest.mark.gpu
def test_profile_of_a_compiled_model_shows_kernels(digits, tmp_path):
    script = tmp_path / "train_compile_profile.py"
    script.write_text(compose("compile", "profile").stdout)
    _, output = train(script, "--dataset", digits, *TINY, "--result_dir", tmp_path)
    table = output.partition("kernel ")[2].partition("of each step")[0]
    assert "calls" in table and re.search(r"wgrad|dgrad|fprop|triton_", table)
    assert not re.search("## Call|Command Buffer|aten::", table)
    with gzip.open(tmp_path / "train_compile_profile_trace0.json.gz") as file:
        assert any(event.get("cat") == "kernel" and event["name"].startswith("triton_")
                   for event in json.load(file)["traceEvents"])


@pytest.mark.gpu
def test_cached_crops_on_a_gpu_are_those_of_the_cpu():
    crops = module_of(SRC / "train_cache.py").random_crops
    images = torch.randint(256, (100, 3, 40, 40), generator=torch.Generator().manual_seed(1),
                           dtype=torch.uint8)
    on_cpu, on_gpu = (crops(images.to(device), 32, torch.Generator().manual_seed(3)).cpu()
                      for device in ("cpu", "cuda"))
    assert on_gpu.shape == (100, 3, 32, 32) and on_cpu.float().std() > 30
    assert (on_gpu.int() - on_cpu.int()).abs().max() <= 1  # rounded from other last bits


@pytest.mark.gpu
def test_more_processes_than_gpus_get_one_line(digits, tmp_path):
    done = run(*torchrun(SRC / "train_DDP.py", "--dataset", digits, "--batch_size",
                         12 * (GPUS + 1), processes=GPUS + 1), cwd=tmp_path)
    assert done.returncode != 0 and f"--nproc_per_node is above {GPUS}" in done.stderr


@pytest.mark.gpus
def test_ddp_equals_the_baseline_on_the_same_global_batches(digits, tmp_path):
    """Without TF32, whose rounding differs between batch sizes."""
    options = ["--dataset", digits, "--epochs", 2, "--batch_size", 40, "--width", 8, "--workers",
               2, "--result_dir", tmp_path]
    scripts = [without_batch_norm(SRC / f"{name}.py", tmp_path) for name in ("train", "train_DDP")]
    for script in scripts:
        script.write_text(script.read_text().replace(
            "    torch.manual_seed(args.seed)\n",
            "    torch.manual_seed(args.seed)\n    torch.backends.cudnn.allow_tf32 = False\n"))
    train(scripts[0], *options)
    start_all(scripts[1], *options, processes=2)
    one, many = weights(tmp_path, "train"), weights(tmp_path, "train_DDP")
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=0, atol=1e-4)


@pytest.mark.gpus
def test_sync_bn_equals_one_gpu(digits, tmp_path):
    """With statistics over the whole batch, two GPUs take the steps of one, batch norm and all."""
    options = ["--dataset", digits, "--epochs", 1, "--steps", 3, "--batch_size", 40, "--lr", 0.01,
               "--width", 8, "--workers", 2, "--result_dir", tmp_path]
    results = {}
    for name, more in (("train", []), ("train_DDP", ["--sync_bn"])):
        script = tmp_path / f"{name}.py"
        script.write_text((SRC / script.name).read_text().replace(
            "    torch.manual_seed(args.seed)\n",
            "    torch.manual_seed(args.seed)\n    torch.backends.cudnn.allow_tf32 = False\n"))
        if more:
            start_all(script, *options, *more, processes=2)
        else:
            train(script, *options)
        results[name] = weights(tmp_path, name)
    one, many = results["train"], results["train_DDP"]
    assert not same_bits(one, many)
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-3, atol=1e-3)
