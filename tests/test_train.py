"""The training scripts as a user runs them: records, equivalence, resuming, launching, errors."""

import fcntl
import functools
import gzip
import itertools
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import zipfile
from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2 as transforms
from helpers import (ROOT, SRC, change, free_port, module_of, run, run_forked, start, torchrun,
                      train)
from test_loader import Hostile

SCRIPTS = sorted(SRC.glob("train*.py"))
MNIST = ROOT.parent / "shared" / "data" / "mnist_png.tar.xz"
TINY = ["--epochs", 2, "--batch_size", 40, "--steps", 3, "--width", 8, "--workers", 1]
BARE = [*TINY, "--workers", 0, "--image_size", 16, "--width", 4]


def ids(path):
    return path.stem


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def weights(folder, stem):
    return load(folder / f"{stem}.pt")["parts"]["model"]


def same_bits(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def changed(name, folder, *edits):
    """A copy of src/<name>.py in which each (old, new) of `edits` is done."""
    text = (SRC / f"{name}.py").read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / f"{name}.py").write_text(text)
    return folder / f"{name}.py"


def without_batch_norm(script, folder):
    """A copy of `script` whose model has no batch norm, in which a batch's pictures do not meet."""
    return changed(script.stem, folder, (
        "bias=False),\n                       nn.BatchNorm2d(wider), ",
        "bias=True),\n                       "))


# -------------------------------------------------------------------------- options, records
def parser_of(path):
    return module_of(path).build_parser()


def test_options_and_defaults_are_the_same_everywhere():
    def options(parser):
        return {action.dest: (action.option_strings, action.default, action.choices, action.nargs,
                              action.help, getattr(action.type, "__qualname__", action.type))
                for action in parser._actions}
    baseline = options(parser_of(SRC / "train.py"))
    assert len(baseline) >= 14
    for path in SCRIPTS:
        own = options(parser_of(path))
        assert {name: own[name] for name in baseline} == baseline, path
        # what a variant adds stands in its blocks, and no two scripts give one name two meanings
        for name in own.keys() - baseline.keys():
            assert f'"--{name}"' in path.read_text()
    for name in baseline.keys() - {"help"}:
        assert f"--{name}" in baseline[name][0]
        assert f"--{name.replace('_', '-')}" in baseline[name][0]


@pytest.mark.parametrize("script", SCRIPTS, ids=ids)
def test_docstring_and_help_are_the_baselines(script):
    done = run_forked(script, "--help")
    assert done.returncode == 0 and "default: 120" in done.stdout


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no way to take cores away here")
@pytest.mark.parametrize("name", ["train", "loader"])
def test_as_many_workers_as_cores_that_it_may_use(name):
    done = run(sys.executable, SRC / f"{name}.py", "--help",
               preexec_fn=lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]))
    assert re.search(r"--(num_)?workers.*?\(default: 1\)", done.stdout, re.DOTALL)


@pytest.mark.parametrize("script", SCRIPTS, ids=ids)
def test_each_variant_writes_its_record(script, digits, tmp_path):
    record, output = train(script, "--dataset", digits, *TINY, "--result_dir", tmp_path,
                           forked=script.stem not in ("train", "train_DDP"))
    assert record["script"] == script.stem
    assert record["options"]["batch_size"] == 40 and record["options"]["lr"] == 0.1
    assert {"python", "torch", "cuda", "cudnn", "gpu", "gpus", "driver", "cpu",
            "cores"} <= record["environment"].keys()
    assert record["environment"]["torch"] == torch.__version__
    assert record["parameters"] == sum(p.numel() for name, p in weights(
        tmp_path, script.stem).items() if "running" not in name and "num_b" not in name)
    assert len(record["epochs"]) == 2
    for epoch in record["epochs"]:
        assert epoch.keys() == {"loss", "val_top1", "val_top5", "seconds", "images_per_second",
                                "data_wait"}
        assert 0 <= epoch["val_top1"] <= epoch["val_top5"] <= 1
        assert 0 <= epoch["data_wait"] <= 1
        assert epoch["images_per_second"] == pytest.approx(3 * 40 / epoch["seconds"])
    assert record["images_per_second"] == record["epochs"][1]["images_per_second"]
    assert record["train_seconds"] == record["epochs"][1]["seconds"]
    assert record["val_top1"] == record["epochs"][-1]["val_top1"]
    assert record["warmup_seconds"] > record["epochs"][0]["seconds"]
    assert record["peak_memory_bytes"] > 1e6
    # one process speaks, in plain lines
    lines = output.splitlines()
    assert output.count(f"{record['parameters']:,} parameters") == 1
    assert [line[:17] for line in lines if line.startswith("epoch ")] == [
        "epoch 1/2  loss 2", "epoch 2/2  loss 2"]
    more = {"train_cache": 1, "train_profile": 11, "train_stem": 1}  # what they are there to say
    assert len(lines) == 3 + more.get(script.stem, 0)
    assert {path.name for path in tmp_path.iterdir() if "trace" not in path.name} == {
        f"{script.stem}.json", f"{script.stem}.pt"}


def test_progress_bar_on_a_terminal_and_plain_lines_in_a_log(digits, tmp_path):
    words = [sys.executable, SRC / "train.py", "--dataset", digits, *TINY, "--result_dir", tmp_path]
    assert run(*words).stderr == ""
    controller, terminal = os.openpty()
    os.set_blocking(controller, False)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE,
                               stderr=terminal)
    process.communicate(timeout=100)
    assert "epoch 2" in os.read(controller, 100_000).decode()
    os.close(terminal)


def test_models_of_torchvision_and_larger_validation(digits, tmp_path):
    record, _ = train(SRC / "train.py", "--dataset", digits, *TINY, "--model", "resnet18",
                      "--val_size", 48, "--augment", "--result_dir", tmp_path)
    assert record["parameters"] == 11_181_642
    assert record["options"]["val_size"] == 48


def test_a_model_with_auxiliary_outputs(digits, tmp_path):
    train(SRC / "train.py", "--dataset", digits, "--epochs", 1, "--steps", 1, "--batch_size", 2,
          "--model", "googlenet", "--result_dir", tmp_path)


def test_f25_layout_of_mnist_png_and_what_is_no_picture(digits, tmp_path):
    """readme.txt, Thumbs.db, .DS_Store and ._0.png among the pictures -> passed over: it trains on
    the pictures alone.

    In folders named training and testing, as mnist_png has them.
    """
    data = tmp_path / "mnist_like"
    shutil.copytree(digits / "train", data / "training")
    shutil.copytree(digits / "val", data / "testing")
    for name in ("readme.txt", "Thumbs.db", ".DS_Store", "._0.png"):
        (data / "training" / "3" / name).write_text("no picture")
    _, output = train(SRC / "train.py", "--dataset", data, *TINY, "--result_dir", tmp_path / "r")
    assert " 240 pictures" in output


# ------------------------------------------------------------------------------ equivalence
@pytest.fixture(scope="module")
def default_digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("default") / "digits"
    assert run(sys.executable, ROOT / "make_dataset.py", "digits", "--dst", folder).returncode == 0
    return folder


@pytest.fixture(scope="module")
def baseline_accuracy(default_digits, tmp_path_factory):
    record, _ = train(SRC / "train.py", "--dataset", default_digits, "--result_dir",
                      tmp_path_factory.mktemp("accuracy"))
    return record["val_top1"]


def test_baseline_passes_97_per_cent(baseline_accuracy):
    assert baseline_accuracy > 0.97


@pytest.mark.parametrize("name", ["amp", "DDP"])
def test_accuracy_is_within_a_point(name, default_digits, baseline_accuracy, tmp_path):
    record, _ = train(SRC / f"train_{name}.py", "--dataset", default_digits, "--result_dir",
                      tmp_path)
    assert abs(record["val_top1"] - baseline_accuracy) <= 0.01


@pytest.mark.parametrize("name", ["DP", "cudnn", "LMDB", "profile", "cache"])
def test_equal_to_the_baseline_bit_for_bit(name, digits, tmp_path):
    """With the same augmentation too; only the cache draws its own."""
    options = ["--dataset", digits, *TINY, "--result_dir", tmp_path]
    options += [] if name == "cache" else ["--augment"]
    baseline, _ = train(SRC / "train.py", *options)
    variant, _ = train(SRC / f"train_{name}.py", *options)
    assert same_bits(weights(tmp_path, "train"), weights(tmp_path, f"train_{name}"))
    for key in ("loss", "val_top1", "val_top5"):
        assert [e[key] for e in baseline["epochs"]] == [e[key] for e in variant["epochs"]]


def in_float64(script, folder):
    """A copy of `script` that computes in float64: float32's rounding turns single ReLUs on and
    off, which grows by each step until two good runs differ in the second digit."""
    copy = folder / script.name
    text = script.read_text()
    for old, new in ((".float32, scale", ".float64, scale"),
                     ("model = model.to(device)", "model = model.to(device).double()")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    copy.write_text(text)
    return copy


def assert_equal_epochs(one, other):
    """The losses to 1e-6, the accuracies to the bit."""
    assert len(one["epochs"]) == len(other["epochs"])
    for e, f in zip(one["epochs"], other["epochs"]):
        assert e["loss"] == pytest.approx(f["loss"], abs=1e-6)
        assert e["val_top1"] == f["val_top1"]


@pytest.mark.parametrize("name", ["fused", "channels_last", "compile"])
def test_equal_to_the_baseline_after_24_steps_of_float64(name, digits, tmp_path):
    options = ["--dataset", digits, "--epochs", 4, "--batch_size", 40, "--width", 4, "--image_size",
               24, "--workers", 0, "--result_dir", tmp_path]
    one, _ = train(in_float64(SRC / "train.py", tmp_path), *options)
    other, _ = train(in_float64(SRC / f"train_{name}.py", tmp_path), *options)
    assert one["epochs"][3]["loss"] < one["epochs"][0]["loss"]
    assert_equal_epochs(one, other)


@pytest.mark.parametrize("model, size, changed", [
    ("resnet18", 33, 2), ("squeezenet1_1", 40, 4), ("mobilenet_v3_small", 32, 1),
    ("conv11", 32, 0)])
def test_the_stem_is_the_baselines_in_float64(model, size, changed, digits, tmp_path):
    """Also of pictures of odd size, pools that round up, and models without such layers; pools as
    when compiled."""
    options = ["--dataset", digits, "--epochs", 2, "--steps", 2, "--batch_size", 16, "--model",
               model, "--image_size", size, "--workers", 0, "--lr", 0.01, "--result_dir", tmp_path]
    one, _ = train(in_float64(SRC / "train.py", tmp_path), *options)
    script = in_float64(SRC / "train_stem.py", tmp_path)
    change(script, "not torch.compiler.is_compiling()", "False")
    other, output = train(script, *options)
    assert f"train_stem: {changed or 'nothing to do: no'} layers" in output
    assert_equal_epochs(one, other)
    names = [list(load(tmp_path / f"{name}.pt")["parts"]["model"])
             for name in ("train", "train_stem")]
    assert names[0] == names[1]


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("size, stride, padding", [
    (3, 2, 0), (3, 2, 1), (4, 2, 2), (4, 3, 1), (5, 2, 2), (5, 3, 0), (7, 2, 3), (7, 4, 1)])
def test_the_stems_pool_is_torchs_when_compiled(size, stride, padding, ceil_mode, monkeypatch):
    """Values, and which of equal ones has the gradient, of pictures down to the smallest."""
    module, smallest = module_of(SRC / "train_stem.py"), max(1, size - 2 * padding)
    pools = [torch.nn.MaxPool2d(size, stride, padding, ceil_mode=ceil_mode) for _ in range(2)]
    pools[1].__class__ = module.SplitMaxPool2d
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for height, width in itertools.product(range(smallest, smallest + 9), repeat=2):
        images = torch.randint(3, (2, 3, height, width)).double()
        images = images.to(memory_format=torch.channels_last).requires_grad_()
        one, other = (pool(images) for pool in pools)
        assert torch.equal(one, other) and one.stride() == other.stride()
        weights = torch.rand_like(one)
        gradients = [torch.autograd.grad(each, images, weights)[0] for each in (one, other)]
        torch.testing.assert_close(*gradients)
    assert pools[1](images[0]).shape == pools[0](images[0]).shape  # one picture


def test_the_stem_leaves_a_pool_that_is_not_compiled(monkeypatch):
    module, pool, passes = module_of(SRC / "train_stem.py"), torch.nn.MaxPool2d(3, 2, 1), []
    images, max_pool2d = torch.rand(2, 3, 9, 9), torch.nn.functional.max_pool2d
    expected = pool(images)
    pool.__class__ = module.SplitMaxPool2d
    monkeypatch.setattr(torch.nn.functional, "max_pool2d", lambda *args, **more: (
        passes.append(args), max_pool2d(*args, **more))[1])
    assert torch.equal(pool(images), expected) and len(passes) == 1


def with_captured_batches(script, folder):
    """A copy of `script` that keeps all batches of each process in <folder>/<rank>.batches."""
    text = script.read_text()
    for old, new in (
            ("islice(train_loader,", "islice(captured('train', train_loader),"),
            ("in val_loader:", "in captured('val', val_loader):"),
            ("def main():\n", f"""def captured(what, loader):
    path = f"{folder}/{{os.environ.get('RANK', 0)}}.batches"
    kept = torch.load(path) if os.path.exists(path) else []
    kept.append((what, []))
    for images, labels in loader:
        kept[-1][1].append((images.cpu().clone(), labels.cpu().clone()))
        torch.save(kept, path)
        yield images, labels


def main():
""")):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy = folder / script.name
    copy.write_text(text)
    return copy


def batches(folder, rank=0):
    return torch.load(folder / f"{rank}.batches", map_location="cpu")


PHOTOS = ["--epochs", 2, "--batch_size", 4, "--image_size", 32, "--val_size", 36, "--width", 2,
          "--workers", 2]


# train_DALI.py's options, and --steps; 17 are four batches of 4 at once
AT_ONCE = [([], 6), (["--dali_batch", 17], 6), (["--dali_batch", 17], 2)]


@pytest.mark.parametrize("at_once, steps", AT_ONCE)
def test_f08_f11_dali_feeds_the_baselines_pictures(at_once, steps, photos, tmp_path):
    """Grey JPEGs and some that EXIF turns, fed by DALI on the CPU -> the baseline's batches, order
    and labels; 99% of the pixels within 2/255."""
    both = []
    for name, more in (("train", []), ("train_DALI", at_once)):
        folder = tmp_path / name
        folder.mkdir()
        train(with_captured_batches(SRC / f"{name}.py", folder), "--dataset", photos, *PHOTOS,
              "--steps", steps, *more, "--result_dir", folder)
        both.append(batches(folder))
    assert len(both[0]) == len(both[1]) == 4
    for (what, baseline), (_, dali) in zip(*both):
        assert len(baseline) == len(dali) == {"train": steps, "val": 4}[what]
        for (images, labels), (others, numbers) in zip(baseline, dali):
            assert torch.equal(labels, numbers) and images.shape == others.shape
            assert others.dtype == torch.uint8
            off = (images.int() - others.int()).abs()
            assert (off <= 2).float().mean() >= 0.99 and off.max() <= 8, off.max()


def test_dali_decodes_the_batches_of_several_steps_at_once(photos):
    """26 pictures in batches of 4, two and four at once, also where an epoch ends early."""
    module, given = module_of(SRC / "train_DALI.py"), []
    make = module.transforms
    transform = make.Compose([make.Resize(32), make.CenterCrop(32), make.PILToTensor()])
    folder = module.class_folders(None, photos, ("train",), transform)

    def noted(paths):
        return lambda: given.append(paths()) or given[-1]
    for at_once, sizes in ((None, [4] * 6 + [2]), (3, [4] * 6 + [2]), (8, [8, 8, 8, 2]),
                           (17, [16, 10])):
        loader = module.DALILoader(folder, range(26), 32, False, "cpu", at_once,
                                   torch.device("cpu"), batch_size=4, num_workers=1,
                                   generator=torch.Generator(), pin_memory=False)
        loader.paths = noted(loader.paths)
        first, _ = next(iter(loader))
        given.clear()
        whole = list(loader)
        assert torch.equal(whole[0][0], first) and len(loader) == 7
        assert [len(names) for names in given] == sizes
        assert [len(pictures) for pictures, _ in whole] == [4] * 6 + [2]
        assert torch.cat([labels for _, labels in whole]).tolist() == folder.targets


def test_memory_that_does_not_suffice_for_dali(photos, tmp_path):
    """Each picture can be read alone, not all at once -> one line says so, with what to lower."""
    script = changed("train_DALI", tmp_path, ("            pictures, ends = self.pipeline.run(", (
        "            raise RuntimeError('Critical error:\\nCannot allocate 9 bytes on device 0.')\n"
        "            pictures, ends = self.pipeline.run(")))
    done = run_forked(script, "--dataset", photos, *PHOTOS, "--result_dir", tmp_path)
    assert_one_line(done, 1, "DALI cannot read", "at once", "--dali_batch", "allocate 9 bytes")


LAST = "Compose([*crop, transforms.PILToTensor()])\n\n    # uint8"


@pytest.mark.parametrize("name, old, new, more", [
    ("train_DALI", LAST, LAST.replace("PILTo", "RandomRotation(5), transforms.PILTo"), []),
    ("train_DALI", "Resize(val_size)", "Resize(val_size * 8 // 7)", []),
    ("train_DALI", "Crop(args.image_size), transforms.RandomH",
     "Crop(args.image_size, (0.2, 1)), transforms.RandomH", ["--augment"]),
    ("train_cache", LAST, LAST.replace("PILTo", "ColorJitter(0.1), transforms.PILTo"),
     ["--augment"])])
def test_transforms_that_a_source_of_data_would_leave_out_are_refused(
        name, old, new, more, digits, tmp_path):
    script = changed(name, tmp_path, (old, new))
    done = run_forked(script, "--dataset", digits, *TINY, *more, "--result_dir", tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode in (1, 2) and "error: " in line and "not your Compose(" in line
    assert any(word in line.partition("not your")[2] for word in (
        "RandomRotation", "size=[36]", "scale=(0.2, 1)", "ColorJitter"))


def test_dali_turns_labels_as_the_data_set_does(digits, tmp_path):
    script = changed("train_DALI", tmp_path, ("    if odd := set(train_set.classes)", (
        "    train_set.target_transform = val_set.target_transform = lambda label: 7\n"
        "    if odd := set(train_set.classes)")))
    record, _ = train(script, "--dataset", digits, *TINY, "--steps", 8, "--result_dir", tmp_path)
    assert record["val_top1"] == 1


@pytest.mark.parametrize("name", ["train_DALI", "train_cache", "train_LMDB"])
def test_options_of_dataloader_do_no_harm_to_others(name, digits, tmp_path):
    script = changed(
        name, tmp_path, ("pin_memory=on_gpu,", "pin_memory=on_gpu, prefetch_factor=4,"))
    train(script, "--dataset", digits, *TINY, "--lmdb" if name == "train_LMDB" else "--result_dir",
          tmp_path, "--result_dir", tmp_path)


def test_cache_takes_any_data_set_of_bytes(digits, tmp_path):
    """Of pictures that no folder holds; floats are named."""
    mine = """
class Drawn(torch.utils.data.Dataset):
    classes = list("ab")
    def __len__(self):
        return 80
    def __getitem__(self, i):
        return torch.full((3, 32, 32), i, dtype=torch.uint8), i % 2

class Conv11("""
    sets = [(f"    {part}_set = class_folders(parser, args.dataset, {names}, {part}_transform)\n",
             f"    {part}_set = Drawn()\n") for part, names in (
                 ("train", '("train", "training")'), ("val", '("val", "test", "testing")'))]
    script = changed("train_cache", tmp_path, ("class Conv11(", mine.lstrip()), *sets)
    train(script, *TINY, "--result_dir", tmp_path)
    script.write_text(script.read_text().replace("torch.uint8), i", "torch.float32), i"))
    done = run_forked(script, *TINY, "--result_dir", tmp_path)
    assert done.returncode == 1 and "held as bytes, not torch.float32" in done.stderr


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_dali_draws_crops_as_torchvision_does_and_mirrors_half(device, tmp_path):
    """A picture whose colours are its coordinates tells where each crop was cut."""
    edges = torch.tensor([256., 160])  # the width, the height
    down, across = torch.meshgrid(torch.arange(160), torch.arange(256), indexing="ij")
    picture = torch.stack([across, down, 0 * down], 2).to(torch.uint8).numpy()
    Image.fromarray(picture).save(tmp_path / "a.png")
    name = np.frombuffer(os.fsencode(tmp_path / "a.png"), np.uint8)
    count, size = 1000, 32
    pipeline = module_of(SRC / "train_DALI.py").pictures_pipeline(
        lambda: [name] * count, size=size, augment=True, on_gpu=device == "gpu", seed=1,
        batch_size=count, num_threads=2, device_id=0 if device == "gpu" else None)
    crops = torch.from_dlpack(pipeline.run()[0].as_tensor()).float().cpu()
    assert crops.shape == (count, size, size, 3)
    # from the first pixel's middle to the last one's, and half a pixel more at both ends
    first, last = crops[:, 0, 0, :2], crops[:, -1, -1, :2]
    extent = (last - first) * size / (size - 1)
    assert (extent[:, 1] > 0).all() and 0.45 < (extent[:, 0] < 0).float().mean() < 0.55
    extent = extent.abs()
    corner = torch.minimum(first, last) - extent / size / 2
    torch.manual_seed(1)
    draw = transforms.RandomResizedCrop(size).make_params
    drawn = [draw([torch.empty(1, 160, 256)]) for _ in range(count)]
    theirs = torch.tensor([[each["width"], each["height"]] for each in drawn])
    place = torch.tensor([[each["left"], each["top"]] for each in drawn])
    for mine, other in ((extent / edges, theirs / edges), (corner / edges, place / edges),
                        *[[(each[:, :1] / each[:, 1:]).log() for each in (extent, theirs)]]):
        assert (mine.sort(0).values - other.sort(0).values).abs().max() < 0.07


@pytest.mark.parametrize("name", ["DALI", "cache", "LMDB"])
def test_f48_data_sources_under_ddp(name, photos, tmp_path):
    """26 pictures in batches of 4, 13 to validate, two ranks, DALI, LMDB or cache -> as many
    batches on each rank, together the baseline's; validation has each picture once."""
    done = run(ROOT / "compose.sh", "DDP", name)
    (tmp_path / "joined.py").write_text(done.stdout)
    for script in (tmp_path / "joined.py", SRC / "train.py"):
        (tmp_path / script.stem).mkdir()
        more = ["--dali_batch", 4] if name == "DALI" and script.stem == "joined" else []
        train(with_captured_batches(script, tmp_path / script.stem), "--dataset", photos, *PHOTOS,
              "--steps", 5, *more, "--result_dir", tmp_path / script.stem)
    ranks, whole = [batches(tmp_path / "joined", rank) for rank in (0, 1)], batches(
        tmp_path / "train")

    def same(pictures, others):
        """Whether they are the same pictures in any order: DALI's have no equal bytes."""
        far = [[(a.int() - b.int()).abs().float().mean().item() for b in others] for a in pictures]
        nearest = [min(range(len(others)), key=row.__getitem__) for row in far]
        return sorted(nearest) == list(range(len(pictures))) and all(min(row) < 2 for row in far)
    for epoch, (what, batches_of_one) in enumerate(whole):
        shares = [rank[epoch][1] for rank in ranks]
        assert [rank[epoch][0] for rank in ranks] == [what] * 2
        if what == "train":
            assert len(shares[0]) == len(shares[1]) == len(batches_of_one) == 5
            for (images, _), (one, _), (two, _) in zip(batches_of_one, *shares):
                assert len(one) == len(two) == 2 and same(images, torch.cat([one, two]))
        else:
            together = torch.cat([images for share in shares for images, _ in share])
            assert len(together) == 13 and same(
                torch.cat([images for images, _ in batches_of_one]), together)


def test_cache_takes_the_memory_that_it_announces(digits, tmp_path):
    options = ["--dataset", digits, "--epochs", 1, "--steps", 1, "--batch_size", 2, "--width", 1,
               "--workers", 0, "--image_size", 512, "--val_size", 32, "--result_dir", tmp_path]
    ballast = b"x" * 2 ** 30  # what the process that starts a run holds is not the run's
    baseline, _ = train(SRC / "train.py", *options)
    cached, output = train(SRC / "train_cache.py", *options)
    assert cached["peak_memory_bytes"] < len(ballast)
    (announced,) = re.findall(r"the decoded pictures take ([\d,.]+) MB of cpu's memory", output)
    announced = float(announced.replace(",", "")) * 1e6
    assert announced == pytest.approx(3 * (240 * 512 ** 2 + 70 * 32 ** 2), abs=1e5)
    taken = cached["peak_memory_bytes"] - baseline["peak_memory_bytes"]
    assert taken == pytest.approx(announced, rel=0.1)


def test_a_set_that_fits_nowhere_is_told_before_it_is_decoded(digits, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    (data / "train/0/0_00000.png").write_bytes(b"not decoded")
    done = run_forked(SRC / "train_cache.py", "--dataset", data, "--image_size", 50_000,
                      cwd=tmp_path)
    assert_one_line(done, 2, "the decoded pictures take", "more than", "--image_size")


def test_cached_crops_are_those_of_torchvision():
    """Sizes, shapes, places and flips have RandomResizedCrop's distribution; and replay by seed."""
    module = module_of(SRC / "train_cache.py")
    side, size, n = 64, 32, 3000
    x, y = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy")
    picture = torch.stack([4 * x, 4 * y, torch.zeros_like(x)]).to(torch.uint8)
    first, again = (module.random_crops(picture.expand(n, 3, side, side), size,
                                        torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again) and first.shape == (n, 3, size, size)
    assert first.dtype == torch.uint8

    def measured(crops):
        """Of crops of a picture whose colours are its coordinates: edges, centres, flips."""
        crops = crops.float() / 4
        across, down = (crops[:, 0, size // 2, -3] - crops[:, 0, size // 2, 2],
                        crops[:, 1, -3, size // 2] - crops[:, 1, 2, size // 2])
        middle = crops[:, :2, size // 2 - 1:size // 2 + 1, size // 2 - 1:size // 2 + 1].mean((2, 3))
        return torch.stack([across.abs() * size / (size - 5), down * size / (size - 5),
                            middle[:, 0], middle[:, 1], (across < 0).float()])
    torch.manual_seed(0)
    crop = transforms.Compose([transforms.RandomResizedCrop(size),
                               transforms.RandomHorizontalFlip()])
    wanted = measured(torch.stack([crop(picture) for _ in range(n)]))
    found = measured(first)
    for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
        q = torch.tensor(quantile)
        torch.testing.assert_close(found[:4].quantile(q, 1), wanted[:4].quantile(q, 1), rtol=0,
                                   atol=2.5)
    assert found[4].mean().item() == pytest.approx(0.5, abs=0.04)


def test_compile_compiles_once(digits, tmp_path):
    """No second time for a ragged validation batch, another of its sizes, or after a resume: traced
    once, whatever makes kernels of it."""
    script = changed("train_compile", tmp_path, ("mode=args.compile_mode", 'backend="eager"'))
    options = ["--dataset", digits, "--batch_size", 50, "--width", 2, "--image_size", 16,
               "--workers", 0, "--result_dir", tmp_path, "--resume", "auto"]
    for epochs, more in ((2, []), (3, ["--val_size", 24])):
        done = run(sys.executable, script, *options, "--epochs", epochs, *more,
                   env={"TORCH_LOGS": "recompiles,dynamo"})
        assert done.returncode == 0 and f"epoch {epochs}/{epochs}" in done.stdout, done.stderr
        assert done.stderr.count("Step 1: torchdynamo start tracing") == 1
        assert "Recompiling" not in done.stderr


def test_profile_prints_and_leaves_a_trace(digits, tmp_path):
    _, output = train(SRC / "train_profile.py", "--dataset", digits, *TINY, "--result_dir",
                      tmp_path)
    assert re.search(r"aten::\w*convolution\w* +\d+\.\d%", output), output
    assert re.search(r"of each step it waits \d+% for data; the [CG]PU is busy \d+%: it is held "
                     "back by (loading data|computing|the host)", output)
    with gzip.open(tmp_path / "train_profile_trace0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert sum("ProfilerStep" in event.get("name", "") for event in events) >= 2


def test_profile_names_the_loading_that_holds_it_back(digits, tmp_path):
    slow = tmp_path / "train_slow.py"
    slow.write_text((SRC / "train_profile.py").read_text().replace(
        "        with Image.open(", "        time.sleep(0.01)\n        with Image.open("))
    _, output = train(slow, "--dataset", digits, *BARE, "--result_dir", tmp_path)
    assert "held back by loading data" in output


def test_lmdb_is_built_once_and_serves_the_loader_too(digits, tmp_path):
    data = tmp_path / "a set"
    shutil.copytree(digits, data)
    options = ["--dataset", data, *BARE, "--result_dir", tmp_path]
    first, _ = train(SRC / "train_LMDB.py", *options)
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.lmdb*")}
    assert made.keys() == {"a set_train.lmdb", "a set_test.lmdb"}
    for picture in data.rglob("*.png"):  # from here on the files alone are read
        picture.write_bytes(b"")
    again, _ = train(SRC / "train_LMDB.py", *options)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.lmdb*")} == made
    assert [e["loss"] for e in first["epochs"]] == [e["loss"] for e in again["epochs"]]
    done = run_forked(SRC / "loader_LMDB.py", "--data_source", data, "--epochs", 1, "--resize", 0,
                      "--crop", 16, "--num_workers", 0, cwd=tmp_path)
    assert done.returncode == 0 and "240 samples" in done.stdout, done.stderr
    (data / "train/3/one_more.png").write_bytes(b"")
    done = run_forked(SRC / "train_LMDB.py", *options)
    assert_one_line(done, 1, "a set_train.lmdb", "other pictures", "remove it")


@pytest.mark.parametrize("kind", ["cut short", "garbage", "empty", "of another format",
                                  "killed in mid-build"])
def test_f36_f37_f38_f44_lmdb_file_that_is_not_whole(kind, digits, tmp_path):
    """An LMDB file cut short, empty, of garbage or of another format -> one line names it: remove
    it; exit 1. A .part file of 11 bytes, for what a kill leaves, is built over."""
    options = ["--dataset", digits, *BARE, "--result_dir", tmp_path / "r", "--lmdb", tmp_path]
    path = tmp_path / f"{digits.name}_train.lmdb"
    if kind == "killed in mid-build":  # what was left is built over
        Path(f"{path}.part").write_bytes(b"half a file")
        train(SRC / "train_LMDB.py", *options)
        assert [each.name for each in tmp_path.glob("*.part")] == []
        return
    train(SRC / "train_LMDB.py", *options, "--epochs", 1)
    content = path.read_bytes()
    if kind == "of another format":
        path.unlink()
        with lmdb.open(str(path), subdir=False, lock=False) as store, store.begin(
                write=True) as transaction:
            transaction.put(b"index", b'{"format": 2, "samples": [[0]]}')
        content = path.read_bytes()
    path.write_bytes({"of another format": content, "cut short": content[:len(content) // 2],
                      "empty": b"", "garbage": b"no" * 5000}[kind])
    assert_one_line(run_forked(SRC / "train_LMDB.py", *options), 1, str(path), "remove it")


def test_f62_lmdb_builders_that_wait_for_one_that_fails(digits, tmp_path):
    """Three runs at once that build one LMDB file, the first fails in mid-build -> that one is an
    error, exit 1; the others train; only whole files are there."""
    script = tmp_path / "train_LMDB.py"
    script.write_text((SRC / "train_LMDB.py").read_text().replace(
        "            content = Path(name).read_bytes()\n", f"""\
            content = Path(name).read_bytes()
            time.sleep(0.02)
            if i == 50 and not os.path.exists("{tmp_path}/failed"):
                open("{tmp_path}/failed", "w").close()
                raise OSError("no more")
"""))
    started = [start([sys.executable, script, "--dataset", digits, *BARE, "--epochs", 1, "--lmdb",
                      tmp_path, "--result_dir", tmp_path / f"r{k}"]) for k in range(3)]
    ends = [process.communicate(timeout=100)[1] for process in started]
    assert sorted(process.returncode for process in started) == [0, 0, 1], ends
    assert sum("error: no more" in end for end in ends) == 1 and "Traceback" not in str(ends)
    assert sorted(path.name for path in tmp_path.glob("*.lmdb*")) == [
        f"{digits.name}_test.lmdb", f"{digits.name}_train.lmdb"]


def test_ddp_equals_the_baseline_on_the_same_global_batches(digits, tmp_path):
    options = ["--dataset", digits, "--epochs", 2, "--batch_size", 40, "--width", 8, "--workers",
               0, "--result_dir", tmp_path]
    baseline, _ = train(without_batch_norm(SRC / "train.py", tmp_path), *options)
    ddp, _ = train(without_batch_norm(SRC / "train_DDP.py", tmp_path), *options)
    one, many = weights(tmp_path, "train"), weights(tmp_path, "train_DDP")
    started = max((one[name] - torch.zeros(())).abs().max() for name in one)
    assert started > 0.01
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=0, atol=1e-5)
    for e, f in zip(baseline["epochs"], ddp["epochs"]):
        assert f["loss"] == pytest.approx(e["loss"], abs=1e-5)
        assert f["val_top1"] == e["val_top1"] and f["val_top5"] == e["val_top5"]


def test_ddp_gets_the_size_of_its_buckets(digits, tmp_path):
    kept = "    net.broadcast_buffers = False"
    script = changed("train_DDP", tmp_path, (
        kept, f"    print('at once:', net.bucket_bytes_cap)\n{kept}"))
    _, output = train(script, "--dataset", digits, *BARE, "--bucket_cap_mb", 200, "--result_dir",
                      tmp_path)
    assert f"at once: {200 * 2 ** 20}\n" in output


def test_f48_validation_counts_each_picture_once(digits, tmp_path):
    """70 pictures to validate over 1, 2 and 3 processes -> each counts once: the same top-1 and
    top-5.

    With weights that stand still.
    """
    options = ["--dataset", digits, "--epochs", 1, "--batch_size", 42, "--steps", 1, "--lr", 1e-30,
               "--width", 8, "--workers", 0, "--result_dir", tmp_path]
    counts = set()
    baseline, _ = train(without_batch_norm(SRC / "train.py", tmp_path), *options)
    counts.add((baseline["epochs"][0]["val_top1"], baseline["epochs"][0]["val_top5"]))
    script = without_batch_norm(SRC / "train_DDP.py", tmp_path)
    for processes in (2, 3):
        done = run_forked(script, *options, ranks=processes)
        assert done.returncode == 0, done.stderr[-2000:]
        (epoch,) = json.loads((tmp_path / "train_DDP.json").read_text())["epochs"]
        counts.add((epoch["val_top1"], epoch["val_top5"]))
    ((top1, top5),) = counts
    assert round(top1 * 70, 3) == round(top1 * 70) and 0 < top5 < 1


def test_order_is_that_of_distributed_sampler():
    from torch.utils.data import DistributedSampler, RandomSampler
    data = list(range(101))
    for epoch in (0, 1, 7):
        sampler = RandomSampler(data, generator=torch.Generator())
        sampler.generator.manual_seed(5 + epoch)
        order = list(sampler)
        ranks = []
        for rank in range(2):
            shards = DistributedSampler(data, 2, rank, seed=5, drop_last=True)
            shards.set_epoch(epoch)
            ranks.append(list(shards))
        for k in range(100 // 10):
            together = ranks[0][5 * k:5 * k + 5] + ranks[1][5 * k:5 * k + 5]
            assert sorted(together) == sorted(order[10 * k:10 * k + 10])


@pytest.mark.skipif(not MNIST.exists(), reason="needs the real MNIST in ../shared/data")
def test_real_mnist_reads_and_trains(tmp_path):
    subprocess.run(["tar", "-xJf", MNIST, "-C", tmp_path], check=True)
    record, output = train(SRC / "train_amp.py", "--dataset", tmp_path / "mnist_png", "--epochs", 1,
                           "--steps", 60, "--result_dir", tmp_path)
    assert " 60,000 pictures" in output and record["val_top1"] > 0.5


# --------------------------------------------------------------------------------- resuming
def options_for_resuming(digits, folder, *more):
    return ["--dataset", digits, "--epochs", 3, "--batch_size", 40, "--width", 8, "--workers", 2,
            "--result_dir", folder, "--resume", "auto", *more]


@pytest.mark.parametrize("more", [["--augment"], ["--model", "squeezenet1_1"]],
                         ids=["augment", "dropout"])
def test_f55_killed_and_resumed_is_bit_for_bit_the_unbroken(more, digits, tmp_path):
    """SIGKILL once or twice at a moment left to chance after the first checkpoint, each time
    --resume auto -> weights, loss and accuracy of an unbroken run, bit for bit, on the CPU."""
    script = SRC / "train.py"
    unbroken, _ = train(script, *options_for_resuming(digits, tmp_path / "a", *more))
    kills, seed = 0, random.Random(1)
    for _ in range(2):
        words = [sys.executable, script, *options_for_resuming(digits, tmp_path / "b", *more)]
        process = start(words, start_new_session=True)
        while process.poll() is None and not (tmp_path / "b" / "train.pt").exists():
            time.sleep(0.01)
        time.sleep(seed.uniform(0, 0.3))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()
        if kills == 1:
            first_kill = load(tmp_path / "b" / "train.pt")
    resumed, _ = train(script, *options_for_resuming(digits, tmp_path / "b", *more))
    assert kills >= 1 and len(first_kill["epochs"]) < 3
    assert same_bits(weights(tmp_path / "a", "train"), weights(tmp_path / "b", "train"))
    for key in ("loss", "val_top1", "val_top5"):
        assert [e[key] for e in resumed["epochs"]] == [e[key] for e in unbroken["epochs"]]


def test_resuming_a_finished_run_changes_nothing(digits, tmp_path):
    first, _ = train(SRC / "train.py", *options_for_resuming(digits, tmp_path))
    before = (tmp_path / "train.pt").read_bytes()
    again, _ = train(SRC / "train.py", *options_for_resuming(digits, tmp_path))
    assert again["epochs"] == first["epochs"]
    assert (tmp_path / "train.pt").read_bytes() == before


@pytest.fixture(scope="module")
def checkpoint_of(digits, tmp_path_factory):
    """A function: a script's checkpoint after one epoch, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def checkpoint_of(name):
        train(SRC / f"{name}.py", "--dataset", digits, *BARE, "--epochs", 1, "--result_dir", folder,
              "--seed", 1)
        return folder / f"{name}.pt"
    return checkpoint_of


@pytest.mark.parametrize("script", SCRIPTS, ids=ids)
def test_f59_any_checkpoint_resumes_any_variant(script, checkpoint_of, digits, tmp_path):
    """Each variant's checkpoint in the baseline, the baseline's in each variant -> the run goes on
    from its epoch.

    They are of one form, so any resumes any.
    """
    for source, to in {(script, SRC / "train.py"), (SRC / "train.py", script)}:
        checkpoint = checkpoint_of(source.stem)
        record, output = train(to, "--dataset", digits, *BARE, "--result_dir", tmp_path, "--resume",
                               checkpoint)
        assert record["epochs"][0] == load(checkpoint)["epochs"][0]
        assert len(record["epochs"]) == 2 and "epoch 1/2" not in output
        parts = load(tmp_path / f"{to.stem}.pt")["parts"]
        assert not any("module." in name or "_orig_mod" in name for name in parts["model"])
        assert parts.keys() - {"scaler"} == {"model", "optimizer", "scheduler"}


def test_f59_a_checkpoint_does_not_turn_fused_off(checkpoint_of, digits, tmp_path):
    """The baseline's checkpoint in train_fused.py -> it goes on with the fused optimizer.

    Under amp, with scaled gradients, an unfused step would be a wrong one.
    """
    for name, fused in (("train", None), ("train_fused", True)):
        groups = load(checkpoint_of(name))["parts"]["optimizer"]["param_groups"]
        assert [group["fused"] for group in groups] == [fused]
    train(SRC / "train_fused.py", "--dataset", digits, *BARE, "--result_dir", tmp_path, "--resume",
          checkpoint_of("train"))
    state = load(tmp_path / "train_fused.pt")["parts"]["optimizer"]
    assert [group["fused"] for group in state["param_groups"]] == [True]
    assert state["param_groups"][0]["momentum"] == 0.9 and state["param_groups"][0]["nesterov"]


def test_fused_momentum_is_whole_before_the_first_step(digits, tmp_path):
    """Under amp a first step that overflows is left out in the kernel, which then fills nothing."""
    text = (SRC / "train_fused.py").read_text()
    copy = tmp_path / "train_fused.py"
    copy.write_text(text.replace("    # the learning rate rises", """\
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert len(momenta) == len(list(model.parameters())) and not any(m.any() for m in momenta)
    print("whole")

    # the learning rate rises"""))
    _, output = train(copy, "--dataset", digits, *BARE, "--result_dir", tmp_path)
    assert output.count("whole") == 1


def test_the_first_epoch_after_a_resume_warms_up(digits, tmp_path):
    options = ["--dataset", digits, *BARE, "--result_dir", tmp_path, "--resume", "auto"]
    train(SRC / "train.py", *options, "--epochs", 2)
    record, _ = train(SRC / "train.py", *options, "--epochs", 4)
    assert len(record["epochs"]) == 4
    assert record["train_seconds"] == record["epochs"][3]["seconds"]
    assert record["images_per_second"] == record["epochs"][3]["images_per_second"]


def damage(path, kind):
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "zero bytes":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(content[:len(content) // 2])
    elif kind == "a bit flipped":
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        at = largest.header_offset + 200 + largest.file_size // 2
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1:])
    elif kind == "text":
        path.write_text("<html>not found</html>")


@pytest.mark.parametrize("kind", ["missing", "zero bytes", "truncated", "a bit flipped", "text"])
def test_f57_damaged_checkpoint(kind, checkpoint_of, digits, tmp_path):
    """--resume of a file that is missing, empty, cut in half, text, or has one bit flipped -> one
    line names it, exit 2."""
    checkpoint = tmp_path / "train.pt"
    shutil.copy(checkpoint_of("train"), checkpoint)
    damage(checkpoint, kind)
    words = [checkpoint] if kind == "missing" else ["auto"]
    done = run_forked(SRC / "train.py", "--dataset", digits, *BARE, "--result_dir",
               tmp_path, "--resume", *words)
    assert_one_line(done, 2, str(checkpoint), "--resume")


def test_f57_a_bit_flipped_anywhere(checkpoint_of, digits, tmp_path):
    """A checkpoint with one bit flipped, 60 times at places left to chance -> one line names it,
    exit 2; or where the bit is of no weight (a date, say) the run goes on as from the whole one."""
    options = ["--dataset", digits, *BARE, "--result_dir"]
    train(SRC / "train.py", *options, tmp_path / "whole", "--resume", checkpoint_of("train"))
    content, rng, refused = checkpoint_of("train").read_bytes(), random.Random(0), 0
    flipped = tmp_path / "flipped.pt"
    for number in range(60):  # half of them where the archive's names and lengths are
        at = rng.randrange(len(content) if number % 2 else 3000)
        at = len(content) - 1 - at if number % 4 == 0 else at
        flipped.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)])
                            + content[at + 1:])
        done = run_forked(SRC / "train.py", *options, tmp_path / "r", "--resume", flipped)
        if done.returncode:
            assert_one_line(done, 2, str(flipped), "--resume")
            refused += 1
        else:
            assert same_bits(weights(tmp_path / "r", "train"), weights(tmp_path / "whole", "train"))
    assert refused >= 40


def test_f57_f58_checkpoints_that_ranks_refuse(digits, tmp_path):
    """A checkpoint that is no file, or holds a pickle, for two ranks of train_DDP.py -> they end in
    a line that names it, no traceback; nothing is executed."""
    (tmp_path / "text.pt").write_text("<html></html>")
    torch.save({"parts": {"model": Hostile(str(tmp_path / "trap"))}}, tmp_path / "pickle.pt")
    for name in ("missing.pt", "text.pt", "pickle.pt"):
        done = run_forked(SRC / "train_DDP.py", "--dataset", digits, *BARE, "--result_dir",
                          tmp_path / "r", "--resume", tmp_path / name, ranks=2)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert f"train_DDP.py: error: --resume {tmp_path / name}: " in done.stderr
    assert not (tmp_path / "trap").exists()


def test_f57_checkpoint_of_another_model(checkpoint_of, digits, tmp_path):
    """--resume of a checkpoint of another --width -> one line names it and says that it is of
    another model, exit 2."""
    done = run_forked(SRC / "train.py", "--dataset", digits, *BARE, "--width", 8,
               "--result_dir", tmp_path, "--resume", checkpoint_of("train"))
    assert_one_line(done, 2, str(checkpoint_of("train")), "another model")


def test_f58_hostile_checkpoint(digits, tmp_path):
    """--resume of a checkpoint whose pickle would run a command -> one line names it, exit 2;
    nothing is executed."""
    torch.save({"parts": {"model": Hostile(str(tmp_path / "executed"))}}, tmp_path / "bad.pt")
    done = run_forked(SRC / "train.py", "--dataset", digits, *BARE, "--result_dir",
               tmp_path / "r", "--resume", tmp_path / "bad.pt")
    assert_one_line(done, 2, str(tmp_path / "bad.pt"))
    assert not (tmp_path / "executed").exists()


# -------------------------------------------------------------------------------- launching
def test_from_its_own_folder(project, digits):
    made = run(sys.executable, "make_dataset.py", "digits", "--train", 24, "--val", 7, cwd=project)
    assert made.returncode == 0
    options = ["--epochs", "1", "--batch_size", "40", "--steps", "1"]
    done = run(sys.executable, "train_DP.py", *options, cwd=project / "src")
    assert done.returncode == 0, done.stderr
    assert (project / "src" / "runs" / "train_DP.json").exists()


def test_two_agents_resume_from_what_only_the_first_machine_has(digits, tmp_path):
    """Two torchrun agents as on two machines: they share no folder, not even for the checkpoint."""
    endpoint = f"localhost:{free_port()}"

    def job(epochs):
        agents = [start([sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                         "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}",
                         "--rdzv_id=7", SRC / "train_DDP.py", "--dataset", digits, *TINY,
                         "--epochs", epochs, "--result_dir", tmp_path / str(machine), "--resume",
                         "auto"])
                  for machine in (0, 1)]
        ends = [agent.communicate(timeout=200) for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], ends
        return ends
    job(1)
    (first,) = tmp_path.glob("*/train_DDP.pt")  # one of the two, whichever is process 0
    second_home = tmp_path / ("1" if first.parent.name == "0" else "0")
    out = "".join(out for out, _ in job(2))
    assert out.count("epoch 2/2") == 1
    lengths = [len(load(path)["epochs"]) for path in tmp_path.glob("*/train_DDP.pt")]
    assert max(lengths) == 2 and (not second_home.exists() or second_home.is_dir())
    assert "epoch 1/2" not in out or len(lengths) == 2


def test_ddp_without_a_launcher_says_how(digits, tmp_path):
    done = run(sys.executable, SRC / "train_DDP.py", "--dataset", digits, cwd=tmp_path)
    assert_one_line(done, 2, "torchrun --nproc_per_node=gpu train_DDP.py")


# ------------------------------------------------------------------------------- bad inputs
def assert_one_line(done, status, *parts):
    assert done.returncode == status, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr


@pytest.mark.parametrize("options", [
    ["--epochs", "0"], ["--epochs", "-1"], ["--epochs", "abc"], ["--epochs", "a[$(touch x)]"],
    ["--batch_size", "0"], ["--batch-size", "-1"], ["--batch_size", "abc"], ["--model", "nothing"],
    ["--model", "fasterrcnn_resnet50_fpn"], ["--workers", "-1"], ["--steps", "0"],
    ["--image_size", "0"], ["--batch_size", "100000"], ["--nothing"], ["--lr", "x"]],
    ids=" ".join)
def test_f51_f61_wrong_use(options, digits, tmp_path):
    """--batch_size 0, -1, abc or above the data set, an unknown model or option, other wrong values
    -> one line names the option, exit 2, nothing written."""
    done = run_forked(SRC / "train.py", "--dataset", digits, *options, cwd=tmp_path)
    assert_one_line(done, 2, options[0].replace("-", "_").replace("__", "--"))
    assert list(tmp_path.iterdir()) == []


def test_f61_batch_not_divisible_by_the_processes(digits, tmp_path):
    """--batch_size 41 on two processes -> an error says that it does not divide by 2, no traceback
    of the script, exit not 0."""
    done = run(*torchrun(SRC / "train_DDP.py", "--dataset", digits, "--batch_size", "41"),
               cwd=tmp_path)
    assert done.returncode != 0
    assert "error: --batch_size 41 does not divide by 2 processes" in done.stderr
    assert 'train_DDP.py", line' not in done.stderr  # torchrun has a traceback of its own


@pytest.mark.parametrize("name", ["train", "train_DALI", "train_LMDB", "train_cache"])
def test_f19_f27_datasets_that_are_none(name, digits, tmp_path):
    """--dataset missing, empty, a file, without val, with classes that differ or, in either split,
    one without pictures -> one line names it or the class, exit 2."""
    def tried(folder):
        return run_forked(SRC / f"{name}.py", "--dataset", folder, *BARE, cwd=tmp_path)
    assert_one_line(tried(tmp_path / "nothing"), 2, "--dataset", str(tmp_path / "nothing"))
    empty = tmp_path / "empty"
    (empty / "train").mkdir(parents=True)
    assert_one_line(tried(empty), 2, str(empty))
    (empty / "val").mkdir()
    assert_one_line(tried(empty), 2, str(empty))
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
        assert_one_line(tried(bare), 2, "none here")
    a_file = tmp_path / "file"
    a_file.write_text("")
    assert_one_line(tried(a_file), 2, str(a_file))
    assert not list(tmp_path.rglob("*.lmdb*"))


def test_f19_the_default_dataset_is_missing(project):
    """No --dataset, and the default one not made yet -> one line says how to make it, exit 2."""
    done = run(sys.executable, "train.py", cwd=project / "src")
    assert_one_line(done, 2, "make_dataset.py digits", "--dataset")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("content", [b"", b"<html></html>", None], ids=["empty", "html", "cut"])
def test_f01_f02_f05_damaged_picture(content, workers, digits, tmp_path):
    """A picture of zero bytes, cut short, or HTML, read with workers and without -> one line names
    it, exit 1."""
    data = tmp_path / "digits"
    shutil.copytree(digits, data)
    picture = sorted((data / "train" / "4").iterdir())[5]
    picture.write_bytes(picture.read_bytes()[:300] if content is None else content)
    done = run_forked(SRC / "train.py", "--dataset", data, "--epochs", 1, "--batch_size", 60,
                      "--workers", workers, "--result_dir", tmp_path / "r")
    assert_one_line(done, 1, str(picture), "error")


def test_f63_loss_that_is_not_finite(digits, tmp_path):
    """A loss that is not finite, by --lr 1e30 -> one line names epoch, step and --lr, exit 1; no
    record is written."""
    done = run_forked(SRC / "train.py", "--dataset", digits, *BARE, "--lr", "1e30",
               "--result_dir", tmp_path)
    assert_one_line(done, 1, "epoch 1", "step 2", "--lr")
    assert not (tmp_path / "train.json").exists()


def test_workers_started_by_spawn(digits, tmp_path):
    """As on Windows and macOS; by forkserver, as by Python 3.14, are test_f41_workers'."""
    text = (SRC / "train.py").read_text().replace(
        "    try:\n        main()", "    import multiprocessing\n    multiprocessing."
        "set_start_method('spawn')\n    try:\n        main()")
    copy = tmp_path / "train.py"
    copy.write_text(text)
    record, _ = train(copy, "--dataset", digits, *TINY, "--result_dir", tmp_path / "r")
    assert len(record["epochs"]) == 2


def test_f20_a_result_dir_that_cannot_be_is_told_before_training(digits, tmp_path):
    """--result_dir that is a file -> one line names it, exit 1, before the first epoch."""
    (tmp_path / "file").write_text("")
    done = run_forked(SRC / "train.py", "--dataset", digits, *BARE, "--result_dir",
               tmp_path / "file")
    assert_one_line(done, 1, str(tmp_path / "file"))
    assert "epoch" not in done.stdout


def test_resuming_with_other_options_keeps_to_the_schedule(checkpoint_of, digits, tmp_path):
    """More epochs of fewer steps: the learning rate goes on falling to zero, never below."""
    train(SRC / "train.py", "--dataset", digits, *BARE, "--epochs", 4, "--steps", 1,
          "--result_dir", tmp_path, "--resume", checkpoint_of("train"))
    scheduler = load(tmp_path / "train.pt")["parts"]["scheduler"]
    assert scheduler["last_epoch"] == 4 and scheduler["_last_lr"] == [0.0]


def test_the_default_dataset_is_found_from_any_folder_of_the_project(project):
    made = run(sys.executable, project / "make_dataset.py", "digits", "--train", 24, "--val", 7)
    assert made.returncode == 0
    composed = project / "my_train.py"
    composed.write_text((SRC / "train_amp.py").read_text())
    record, _ = train(composed, *TINY, "--result_dir", project / "runs", cwd="/")
    assert record["options"]["dataset"] == str(project / "data" / "digits")


def test_sync_bn_without_a_gpu_gets_a_line(digits, tmp_path):
    done = run(*torchrun(SRC / "train_DDP.py", "--dataset", digits, "--sync_bn"), cwd=tmp_path)
    assert done.returncode != 0 and "train_DDP.py: error: --sync_bn needs GPUs" in done.stderr
