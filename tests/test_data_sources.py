"""train_DALI.py and train_cache.py: the baseline's pictures, and what happens on faults."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2 as transforms

from helpers import (
    ROOT,
    SRC,
    TINY,
    assert_one_line,
    edited,
    error_of,
    flags,
    learned,
    on_gpu,
    run,
    run_forked,
    same_bits,
    tiny,
    train,
    weights,
    with_little_memory,
)
from runs import module_of
from test_loader import (
    CORRUPT_EXIF,
    ODD_NAMES,
    classes,
    faulty_kinds,
    needs_faulty,
    photo,
    read_faulty,
    save,
    spoil,
    unusual,
    unusual_kinds,
)
from test_resize import claims

SMALL = flags(epochs=2, batch_size=4, image_size=32, val_size=36, width=2, workers=2)
each_source = pytest.mark.parametrize("name", ["train_DALI", "train_cache"])
cpu_and_gpu = pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])


def keeping_batches(script, folder):
    """Return a copy of `script` that keeps its batches in <folder>/<rank>.batches."""
    folder.mkdir(exist_ok=True)
    return edited(
        script,
        folder,
        (", train_loader)", ", keep_batches('train', train_loader))"),
        ("in val_loader:", "in keep_batches('val', val_loader):"),
        (
            "def main():\n",
            f"""def keep_batches(split, loader):
    path = f"{folder}/{{os.environ.get('RANK', 0)}}.batches"
    kept = torch.load(path) if os.path.exists(path) else []
    kept.append((split, []))
    for images, labels in loader:
        kept[-1][1].append((images.cpu().clone(), labels.cpu().clone()))
        torch.save(kept, path)
        yield images, labels


def main():
""",
        ),
    )


def batches_of(script, folder, *options, **details):
    """Run a training script; return its epochs: "train" or "val", and (images, labels) a batch."""
    train(keeping_batches(script, folder), *options, "--result_dir", folder, **details)
    return torch.load(folder / "0.batches")


def loader_of(photos, on_gpu=False, augment="none", order=range(26)):
    """Return a DALILoader of the photos for training, four a batch, and their ImageFolder."""
    module = module_of(SRC / "train_DALI.py")
    folder = module.open_folder(photos, "train", None)
    loader = module.DALILoader(
        folder,
        32,
        augment,
        on_gpu,
        torch.initial_seed() % 2**31,
        sampler=order,
        batch_size=4,
        num_workers=2,
        pin_memory=on_gpu,
        prefetch_factor=4,
    )
    return loader, folder


def dali_crops(path, count, size, augment, device):
    """Return `count` crops (count, size, size, 3) that DALI draws of one picture."""
    name, on_gpu = np.frombuffer(os.fsencode(path), np.uint8), device == "gpu"
    pipeline = module_of(SRC / "train_DALI.py").image_pipeline(
        lambda: [name] * count,
        size=size,
        augment=augment,
        on_gpu=on_gpu,
        seed=1,
        batch_size=count,
        num_threads=2,
        device_id=0 if on_gpu else None,
    )
    return torch.from_dlpack(pipeline.run()[0].as_tensor()).cpu()


# ------------------------------------------------------------------------------------- DALI
@pytest.mark.fault("grey JPEG", "EXIF orientation")
@pytest.mark.parametrize("steps", [6, 2])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cpu", marks=pytest.mark.gpu, id="cpu_to_gpu"),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
)
def test_dali_gives_the_baselines_pictures(device, steps, photos, tmp_path):
    """In the baseline's order, of all validation pictures, and after epochs that end early."""
    options = ["--dataset", photos, *SMALL, "--steps", steps]
    baseline = batches_of(SRC / "train.py", tmp_path / "baseline", *options)
    dali = batches_of(SRC / "train_DALI.py", tmp_path / "dali", *options, "--dali_device", device)
    assert len(baseline) == len(dali) == 4
    for (split, batches), (_, others) in zip(baseline, dali):
        assert len(batches) == len(others) == {"train": steps, "val": 4}[split]
        for (images, labels), (pictures, numbers) in zip(batches, others):
            assert torch.equal(labels, numbers) and images.shape == pictures.shape
            assert pictures.dtype == torch.uint8
            off = (images.int() - pictures.int()).abs()
            if device == "cpu":
                assert (off <= 2).float().mean() >= 0.99 and off.max() <= 8, off.max()
            else:
                assert off.float().mean((1, 2, 3)).max() < 1


@cpu_and_gpu
def test_each_epoch_of_dali_is_whole(device, photos):
    """Also after an epoch that was left after one batch."""
    loader, folder = loader_of(photos, device == "gpu")
    assert len(loader) == 7
    for _ in range(2):
        first, _ = next(iter(loader))
        epoch = list(loader)
        assert torch.equal(epoch[0][0], first)
        assert [len(images) for images, _ in epoch] == [4] * 6 + [2]
        assert torch.cat([labels for _, labels in epoch]).tolist() == folder.targets
    empty, _ = loader_of(photos, device == "gpu", order=range(0))  # a process without a picture
    assert list(empty) == []


def test_dali_gives_the_labels_of_the_dataset(photos):
    module = module_of(SRC / "train_DALI.py")
    folder = module.open_folder(photos, "train", None)
    folder.target_transform = lambda label: 7 + label
    loader = module.DALILoader(
        folder, 32, "none", False, 0, sampler=[25, 0], batch_size=2, num_workers=1
    )
    ((_, labels),) = loader
    assert labels.tolist() == [7 + folder.targets[25], 7 + folder.targets[0]]


@cpu_and_gpu
def test_dali_draws_by_the_seed_of_the_epoch(device, photos):
    epochs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loader, _ = loader_of(photos, device == "gpu", augment="resized")
        epochs += [torch.cat([images.cpu() for images, _ in loader]) for _ in range(2)]
    first, second, again, second_again, other, _ = epochs
    assert torch.equal(first, again) and torch.equal(second, second_again)
    for different in (second, other):
        assert (first != different).float().mean() > 0.5


@cpu_and_gpu
def test_dali_draws_crops_as_torchvision_does_and_flips_half(device, tmp_path):
    """A picture whose colours are its coordinates tells where each crop was cut."""
    edges = torch.tensor([256.0, 160])  # width, height
    down, across = torch.meshgrid(torch.arange(160), torch.arange(256), indexing="ij")
    picture = torch.stack([across, down, 0 * down], 2).to(torch.uint8).numpy()
    Image.fromarray(picture).save(tmp_path / "a.png")
    count, size = 1000, 32
    crops = dali_crops(tmp_path / "a.png", count, size, "resized", device).float()
    assert crops.shape == (count, size, size, 3)
    # from the middle of the first pixel to that of the last, and half a pixel more at both ends
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
    for mine, other in (
        (extent / edges, theirs / edges),
        (corner / edges, place / edges),
        *[[(each[:, :1] / each[:, 1:]).log() for each in (extent, theirs)]],
    ):
        assert (mine.sort(0).values - other.sort(0).values).abs().max() < 0.07


@pytest.mark.gpu
def test_dali_does_not_overwrite_a_batch_that_a_step_still_reads(photos):
    loader, _ = loader_of(photos, on_gpu=True, order=[*range(26)] * 8)
    wanted = [images.cpu() for images, _ in loader]
    copies = []
    for images, _ in loader:
        torch.cuda._sleep(20_000_000)  # keeps the GPU busy; the host goes on
        copies.append(images.clone())
    assert all(torch.equal(one.cpu(), other) for one, other in zip(copies, wanted, strict=True))


# ------------------------------------------------------------------------------------ cache
def test_cache_equals_the_baseline_bit_for_bit(digits, tmp_path):
    """Without --augment, weights and all: decoding the cache draws no random numbers."""
    records, models = [], []
    for name in ("train", "train_cache"):
        script = edited(name, tmp_path, ("len(val_set)).to", "len(val_loader.dataset)).to"))
        record, _ = train(script, *tiny(digits, tmp_path, workers=1, val_size=20))
        records.append(learned(record["epochs"]))
        models.append(weights(tmp_path, name))
    assert records[0] == records[1] and same_bits(*models)


def test_the_cache_decodes_while_the_first_epoch_trains(digits, tmp_path):
    """First what its batches need, and all before the second epoch, however few steps it takes."""
    script = edited(
        "train_cache",
        tmp_path,
        (
            "    try:\n        image = Image",
            '    print("I", end="")\n    try:\n        image = Image',
        ),
        (
            "            output = net(images)",
            '            print("S", end="")\n            output = net(images)',
        ),
    )
    done = run_forked(script, *tiny(digits, tmp_path, batch_size=40, workers=0, epochs=2, steps=3))
    first, second = re.findall("[IS]{3,}", done.stdout)
    assert first.rstrip("I") == "S".join(["I" * 40, "I" * 40, "I" * 160, ""]) and second == "SSS"


def test_the_cache_decodes_what_an_epoch_that_ends_early_has_left(digits, tmp_path):
    """A copy that looks at a batch before it trains gets no images that are not yet decoded."""
    records = []
    for look in ("", "    next(iter(train_loader))\n"):
        line = "    # every validation image, in order\n"
        script = edited("train_cache", tmp_path, (line, look + line))
        records.append(learned(train(script, *tiny(digits, tmp_path))[0]["epochs"]))
    assert records[0] == records[1]


def test_cached_crops_of_an_epoch_are_the_same_after_a_resume(digits, tmp_path):
    script, options = SRC / "train_cache.py", ["--dataset", digits, *TINY, "--augment", "resized"]
    whole = batches_of(script, tmp_path / "whole", *options)
    batches_of(script, tmp_path / "parts", *options, "--epochs", 1)
    parts = batches_of(script, tmp_path / "parts", *options, "--resume", "auto")
    assert [split for split, _ in parts] == ["train", "val"] * 2
    for (_, batches), (_, others) in zip(whole, parts, strict=True):
        for (images, _), (pictures, _) in zip(batches, others, strict=True):
            assert torch.equal(images, pictures)


@pytest.mark.parametrize("augment", ["resized", "crop"])
def test_the_cache_keeps_a_transform_of_your_own_before_the_crop(augment, digits, tmp_path):
    copy, text = tmp_path / "copy.py", (SRC / "train_cache.py").read_text()
    copy.write_text(
        text.replace(
            "Compose([*crop, ", "Compose([transforms.Lambda(transforms.functional.invert), *crop, "
        )
    )
    inverted, images = (
        torch.cat(
            [
                each
                for split, batches in batches_of(
                    script, tmp_path / script.stem, *TINY, "--dataset", digits, "--augment", augment
                )
                if split == "train"
                for each, _ in batches
            ]
        ).int()
        for script in (copy, SRC / "train_cache.py")
    )
    inside = images.amin((1, 2, 3)) > 0 if augment == "crop" else slice(None)  # no black border
    assert len(images[inside]) and (255 - inverted - images)[inside].abs().max() <= 2


def test_cached_crops_are_those_of_torchvision():
    """Sizes, shapes, places and flips have the distribution of RandomResizedCrop."""
    module = module_of(SRC / "train_cache.py")
    side, size, n = 64, 32, 3000
    x, y = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy")
    picture = torch.stack([4 * x, 4 * y, torch.zeros_like(x)]).to(torch.uint8)
    crops = []
    for _ in range(2):
        torch.manual_seed(3)
        crops.append(module.random_resized_crop(picture.expand(n, 3, side, side), size))
    assert torch.equal(*crops) and crops[0].shape == (n, 3, size, size)
    assert crops[0].dtype == torch.uint8

    def measured(crops):
        """Return widths, heights, centers and flips; a pixel's colour is where it comes from."""
        crops = crops.float() / 4
        across, down = (
            crops[:, 0, size // 2, -3] - crops[:, 0, size // 2, 2],
            crops[:, 1, -3, size // 2] - crops[:, 1, 2, size // 2],
        )
        middle = crops[:, :2, size // 2 - 1 : size // 2 + 1, size // 2 - 1 : size // 2 + 1].mean(
            (2, 3)
        )
        return torch.stack(
            [
                across.abs() * size / (size - 5),
                down * size / (size - 5),
                middle[:, 0],
                middle[:, 1],
                (across < 0).float(),
            ]
        )

    torch.manual_seed(0)
    crop = transforms.Compose(
        [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    )
    wanted = measured(torch.stack([crop(picture) for _ in range(n)]))
    found = measured(crops[0])
    for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
        q = torch.tensor(quantile)
        torch.testing.assert_close(
            found[:4].quantile(q, 1), wanted[:4].quantile(q, 1), rtol=0, atol=2.5
        )
    assert found[4].mean().item() == pytest.approx(0.5, abs=0.04)


@pytest.mark.gpu
@pytest.mark.parametrize("augment", ["none", "resized", "crop"])
def test_a_cache_in_ram_gives_what_one_on_the_gpu_gives(augment, photos, tmp_path):
    one, other = (
        batches_of(
            SRC / "train_cache.py",
            tmp_path / place,
            *SMALL,
            *flags(dataset=photos, augment=augment, cache_device=place),
        )
        for place in ("gpu", "ram")
    )
    for (_, batches), (_, others) in zip(one, other, strict=True):
        for (images, labels), (pictures, numbers) in zip(batches, others, strict=True):
            assert torch.equal(images, pictures) and torch.equal(labels, numbers)


def test_cache_says_how_much_memory_it_takes(digits, tmp_path):
    for augment, side in (("none", 28), ("resized", 32), ("crop", 28)):
        _, output = train(
            SRC / "train_cache.py", *tiny(digits, tmp_path, image_size=28, augment=augment)
        )
        taken = 3 * (240 * side**2 + 30 * 28**2) / 1e6
        assert f"the decoded images take {taken:.1f} MB of cpu memory" in output


def test_a_kept_cache_is_read_again_and_only_if_nothing_has_changed(digits, tmp_path):
    data, kept, script = tmp_path / "data", tmp_path / "kept", tmp_path / "train_cache.py"
    shutil.copytree(digits, data)
    shutil.copy(SRC / "train_cache.py", script)

    def losses(*more):
        record, _ = train(script, *tiny(data, tmp_path / "r", cache_dir=kept), *more)
        return [epoch["loss"] for epoch in record["epochs"]]

    first = losses()
    assert len([*kept.iterdir()]) == 2  # train and val, and no part of one
    image = data / "train/0/0_00000.png"
    before = image.stat()
    image.write_bytes(b"x" * before.st_size)
    os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert losses() == first  # nothing was decoded
    words = [script, *tiny(data, tmp_path / "r", cache_dir=kept)]
    assert "0_00000.png" in error_of(run_forked(*words, "--augment", "resized"), "train_cache")
    script.write_text(script.read_text() + "# edited\n")
    assert "0_00000.png" in error_of(run_forked(*words), "train_cache")
    shutil.copy(SRC / "train_cache.py", script)
    for path in kept.iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    assert "is damaged, remove it" in error_of(run_forked(*words), "train_cache", 2)
    (kept / "other").write_text("stays")
    for path in (*kept.glob("*.pt"), tmp_path / "file"):
        path.unlink(missing_ok=True)
    image.write_bytes((data / "train/1" / os.listdir(data / "train/1")[0]).read_bytes())
    assert losses() != first and len([*kept.iterdir()]) == 3
    (tmp_path / "file").write_text("no folder")
    line = error_of(run_forked(*words[:-1], tmp_path / "file"), "train_cache")
    assert str(tmp_path / "file") in line


@pytest.mark.gpu
def test_cache_takes_the_memory_of_the_gpu_that_it_says(digits, tmp_path):
    options = flags(
        dataset=digits,
        epochs=1,
        steps=1,
        batch_size=2,
        width=1,
        image_size=512,
        val_size=32,
        result_dir=tmp_path,
    )
    baseline, _ = train(SRC / "train.py", *options)
    cached, output = train(SRC / "train_cache.py", *options)
    assert "take 188.8 MB of cuda memory" in output
    taken = cached["peak_memory_bytes"] - baseline["peak_memory_bytes"]
    assert taken == pytest.approx(189e6, rel=0.1)
    ram, output = train(SRC / "train_cache.py", *options, "--cache_device", "ram")
    assert "take 188.8 MB of cpu memory" in output
    assert ram["peak_memory_bytes"] - baseline["peak_memory_bytes"] < 10e6


def test_a_set_that_does_not_fit_is_an_error_before_it_is_decoded(digits, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    (data / "train/0/0_00000.png").write_bytes(b"not decoded")
    done = run_forked(
        SRC / "train_cache.py", "--dataset", data, "--image_size", 50_000, cwd=tmp_path
    )
    line = error_of(done, "train_cache", 2)
    assert "the decoded images take 2,025,000.0 MB" in line and "more than is free" in line


# ------------------------------------------------------------------------------------- both
def padded_crops(picture):
    """Return (all images that RandomCrop and RandomHorizontalFlip can give, [(y, x, flipped)])."""
    side = picture.shape[-1]
    pad, places = transforms.Pad(side // 8)(picture), range(2 * (side // 8) + 1)
    places = [(y, x, flipped) for y in places for x in places for flipped in (0, 1)]
    crops = [pad[:, y : y + side, x : x + side] for y, x, _ in places]
    return torch.stack(
        [crop.flip(2) if flipped else crop for crop, (*_, flipped) in zip(crops, places)]
    ), places


@cpu_and_gpu
@pytest.mark.parametrize("technique", ["DALI", "cache"])
def test_padded_crops_have_torchvisions_pixels_and_distribution(technique, device, tmp_path):
    count, size = 1000, 32
    picture = torch.randint(1, 256, (3, size, size), dtype=torch.uint8)
    place_of = {image.numpy().tobytes(): place for image, place in zip(*padded_crops(picture))}
    if technique == "cache":
        images = picture.expand(count, 3, size, size).to("cuda" if device == "gpu" else "cpu")
        crops = module_of(SRC / "train_cache.py").random_crop(images, size // 8).cpu()
    else:
        transforms.functional.to_pil_image(picture).save(tmp_path / "a.png")
        crops = dali_crops(tmp_path / "a.png", count, size, "crop", device).permute(0, 3, 1, 2)
    assert crops.shape == (count, 3, size, size)
    places = torch.tensor([place_of[image.numpy().tobytes()] for image in crops])
    for column in places[:, :2].T:
        assert (column.bincount(minlength=9) / count - 1 / 9).abs().max() < 0.05
    assert places[:, 2].float().mean().item() == pytest.approx(0.5, abs=0.07)
    assert places[:, :2].float().T.corrcoef()[0, 1].abs() < 0.15


def test_padded_crops_in_training(photos, tmp_path):
    """In all scripts a batch holds the baseline's images, moved by up to an eighth or flipped."""
    options = ["--dataset", photos, *SMALL]
    plain = batches_of(SRC / "train.py", tmp_path / "plain", *options)
    for name in ("train", "train_DALI", "train_cache"):
        moved, seen = (
            batches_of(SRC / f"{name}.py", tmp_path / name, *options, "--augment", "crop"),
            set(),
        )
        for (split, batches), (_, others) in zip(plain, moved, strict=True):
            for (images, labels), (crops, numbers) in zip(batches, others, strict=True):
                assert torch.equal(labels, numbers)
                for image, crop in zip(images, crops, strict=True):
                    wanted, places = padded_crops(image)
                    off = (wanted.int() - crop.int()).abs().float().mean((1, 2, 3))
                    assert off.min() <= (1 if name == "train_DALI" else 0), name
                    seen.add((split, places[off.argmin()]))
        assert len({place for split, place in seen if split == "train"}) > 20
        assert {place for split, place in seen if split == "val"} == {(4, 4, 0)}


@pytest.mark.fault("not divisible by batch or processes")
@pytest.mark.parametrize("technique", ["DALI", "cache"])
def test_two_processes_share_the_pictures(technique, photos, tmp_path):
    """As many batches on each, together the baseline's; each picture once in validation."""
    joined = tmp_path / "joined.py"
    joined.write_text(run(ROOT / "compose.sh", "DDP", technique).stdout)
    options = ["--dataset", photos, *SMALL, "--steps", 5]
    whole = batches_of(SRC / "train.py", tmp_path / "one", *options)
    ranks = [
        batches_of(joined, tmp_path / "two", *options),
        torch.load(tmp_path / "two" / "1.batches"),
    ]

    def are_same(pictures, others):
        """Return whether they are the same pictures in any order; DALI's differ by rounding."""
        far = [[(a.int() - b.int()).abs().float().mean().item() for b in others] for a in pictures]
        nearest = [min(range(len(others)), key=row.__getitem__) for row in far]
        return sorted(nearest) == list(range(len(pictures))) and all(min(row) < 2 for row in far)

    assert [len(rank) for rank in ranks] == [len(whole)] * 2
    for (split, batches), (_, first), (_, second) in zip(whole, *ranks):
        if split == "train":
            assert len(first) == len(second) == len(batches) == 5
            for (images, _), (one, _), (two, _) in zip(batches, first, second):
                assert len(one) == len(two) == 2 and are_same(images, torch.cat([one, two]))
        else:
            together = torch.cat([images for images, _ in first + second])
            assert len(together) == 13
            assert are_same(torch.cat([images for images, _ in batches]), together)


@pytest.fixture(scope="module")
def odd_pictures(tmp_path_factory):
    """A data set of pictures of each kind, one with a corrupt EXIF block; the same in both."""
    folder = tmp_path_factory.mktemp("odd") / "set"
    unusual(folder / "train/a")
    save(photo(5), folder / "train/b/corrupt exif.jpg", exif=CORRUPT_EXIF)
    shutil.copytree(folder / "train", folder / "val")
    return folder


@pytest.mark.parametrize("name", ["train", "train_DALI", "train_cache"])
@unusual_kinds
@pytest.mark.fault("16-bit PNG", "corrupt EXIF")
def test_odd_pictures(name, odd_pictures, tmp_path):
    """The pixels are those of loader.py, nearly so with DALI."""
    script = keeping_batches(SRC / f"{name}.py", tmp_path)
    done = run_forked(script, *tiny(odd_pictures, tmp_path, image_size=40, epochs=1, batch_size=4))
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.replace("warnings.warn(str(msg))", "").replace(
        "UserWarning: Truncated File Read", ""
    ), done.stderr  # of the corrupt EXIF block
    ((_, batches),) = [each for each in torch.load(tmp_path / "0.batches") if each[0] == "val"]
    seen = torch.cat([images for images, _ in batches]).int()
    load_image = module_of(SRC / "loader.py").load_image
    cut = transforms.Compose(
        [transforms.Resize(40), transforms.CenterCrop(40), transforms.PILToTensor()]
    )
    paths = sorted((odd_pictures / "val").glob("*/*"))
    assert len(seen) == len(paths) == 21
    for path, pixels in zip(paths, seen):
        off = (pixels - cut(load_image(path, path)).int()).abs()
        if name == "train_DALI":
            assert (off <= 2).float().mean() >= 0.99, path
        else:
            assert off.max() == 0, path


@pytest.mark.parametrize("name", ["train", "train_DALI", "train_cache"])
@pytest.mark.fault(
    "odd file names",
    "name that is not UTF-8",
    "brackets in the path",
    "other files among the images",
    "endings in any case",
)
def test_odd_names(name, tmp_path):
    data = tmp_path / "a [b] *c d"
    names = [*ODD_NAMES, os.fsdecode(b"caf\xe9.jpg"), "b.JPEG", "c.PNG"]
    for split in ("train", "val"):
        for k, odd in enumerate(names):
            save(photo(k), data / split / "it's -1" / odd)
            save(photo(k), data / split / "[x] Zoë" / odd)
        for other in ("a.txt", "Thumbs.db", ".DS_Store"):
            (data / split / "it's -1" / other).write_bytes(b"none")
    record, output = train(SRC / f"{name}.py", *tiny(data, tmp_path / "r", batch_size=4))
    assert f" {2 * len(names)} images, " in output and len(record["epochs"]) == 2


@pytest.mark.fault(
    "empty image",
    "image cut in half",
    "text named as an image",
    "header of a huge image",
    "corrupt image in a DALI epoch",
)
@pytest.mark.parametrize("kind", ["zero bytes", "half", "text", "900 megapixels"])
@pytest.mark.parametrize("name", ["train_DALI", "train_cache", on_gpu("train_DALI")])
def test_damaged_picture(name, kind, photos, tmp_path, request):
    """One line names it. DALI's GPU decoder may accept a JPEG that was cut short."""
    shutil.copytree(photos, tmp_path / "set")
    bad = tmp_path / "set/train/b/7.jpg"
    if kind == "900 megapixels":
        bad.write_bytes(claims(30_000, 30_000))
    else:
        spoil(bad, kind)
    done = run_forked(
        SRC / f"{name}.py", *tiny(tmp_path / "set", tmp_path / "r", steps=6, batch_size=4)
    )
    if kind == "half" and request.node.get_closest_marker("gpu") and done.returncode == 0:
        assert "epoch 2/2" in done.stdout
    else:
        assert str(bad) in error_of(done, name)


@pytest.mark.fault("corrupt image in a DALI epoch")
def test_one_more_pipeline_finds_the_damaged_picture(photos, tmp_path):
    """A pipeline on a GPU takes seconds to start, so it is no way to start one a picture."""
    shutil.copytree(photos, tmp_path / "set")
    loader, folder = loader_of(tmp_path / "set")
    spoil(Path(folder.samples[14][0]), "text")
    built, build = [], loader.build
    loader.build = lambda *words, **options: built.append(options) or build(*words, **options)
    with pytest.raises(OSError, match=folder.samples[14][0]):
        list(loader)
    assert len(built) == 2


@pytest.mark.fault("corrupt image in a DALI epoch")
def test_an_error_that_is_no_pictures_names_none(photos, monkeypatch):
    loader, _ = loader_of(photos)
    epoch = iter(loader)
    next(epoch)

    def fail(stream):
        raise RuntimeError("the driver is lost")

    monkeypatch.setattr(loader.pipeline, "run", fail)
    with pytest.raises(RuntimeError, match="^the driver is lost$"):
        list(epoch)


@needs_faulty
@faulty_kinds
def test_real_faulty_files_with_dali(photos):
    """Each is read, or the error names it."""
    module = module_of(SRC / "train_DALI.py")
    folder = module.open_folder(photos, "train", None)

    def read(path):
        folder.samples[0] = path, 0
        loader = module.DALILoader(
            folder, 32, "none", False, 0, sampler=[0], batch_size=1, num_workers=1
        )
        ((images, _),) = loader
        assert images.shape == (1, 3, 32, 32)

    assert "truncated_jpeg.jpg" in read_faulty(read)


@each_source
@pytest.mark.fault("no images in the source")
def test_a_dataset_that_is_missing_or_empty(name, tmp_path):
    for folder, status in (tmp_path / "missing", 2), (tmp_path / "empty", 1):
        done = run_forked(SRC / f"{name}.py", "--dataset", folder, cwd=tmp_path)
        assert str(folder) in error_of(done, name, status)
        (tmp_path / "empty/train").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("name", ["train", "train_DALI", "train_cache"])
@pytest.mark.fault("dataset smaller than a batch")
def test_fewer_pictures_than_a_batch(name, tmp_path):
    """A batch of all pictures is trained on, a larger one is an error."""
    data = classes(classes(tmp_path / "data"), "val")
    options = tiny(data, tmp_path / "r")
    done = run_forked(SRC / f"{name}.py", *options, "--batch_size", 13)
    assert "--batch_size 13: there are only 12" in error_of(done, name, 2)
    record, _ = train(SRC / f"{name}.py", *options, "--batch_size", 12)
    assert len(record["epochs"]) == 2


@pytest.mark.fault("wrong options")
@pytest.mark.parametrize(
    "name, option", [("train_DALI", "--dali_device"), ("train_cache", "--cache_device")]
)
def test_unknown_device(name, option, digits, tmp_path):
    done = run_forked(SRC / f"{name}.py", "--dataset", digits, option, "tpu", cwd=tmp_path)
    assert re.search(f"{option}.*tpu", error_of(done, name, 2))


@pytest.mark.fault("no GPU or no DALI")
@pytest.mark.parametrize(
    "name, option", [("train_DALI", "--dali_device"), ("train_cache", "--cache_device")]
)
def test_gpu_option_without_a_gpu(name, option, digits, tmp_path):
    """The CPU decodes; the cache is in memory, and says so."""
    done = run_forked(SRC / f"{name}.py", "--dataset", digits, *TINY, option, "gpu", cwd=tmp_path)
    assert done.returncode == 0 and "epoch 2/2" in done.stdout, done.stderr
    assert name == "train_DALI" or "MB of cpu memory" in done.stdout


@pytest.mark.fault("memory limit of a container")
@pytest.mark.parametrize(
    "line, limits, is_refused",
    [
        (
            "0::/job/step",
            {"job/memory.max": 10**6, "job/step/memory.max": "max"},
            True,
        ),  # Slurm, v2
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": 10**6}, True),  # v1
        ("4:memory:/docker/1", {"memory/memory.limit_in_bytes": 10**6}, True),  # v1, in a container
        ("0::/", {"memory.max": 10**6}, True),  # v2, in a container
        ("0::/job", {"job/memory.max": 10**12}, False),
        ("0::/", {"memory.max": "max"}, False),
    ],
)
def test_the_limit_of_a_container_or_job_counts(line, limits, is_refused, digits, tmp_path):
    (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    for name, limit in limits.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{limit}\n")
    script = edited(
        "train_cache",
        tmp_path,
        ("/proc/self/cgroup", str(tmp_path / "cgroup")),
        ("/sys/fs/cgroup/", f"{tmp_path}/fs/"),
    )
    done = run_forked(
        script, *tiny(digits, tmp_path / "r", image_size=64)
    )  # 240 and 30 images: 3.3 MB
    assert done.returncode == (2 if is_refused else 0), done.stderr
    if is_refused:
        assert "the decoded images take 3.3 MB of cpu memory, more than is free" in error_of(
            done, "train_cache", 2
        )


@pytest.mark.fault("memory limit of a container")
def test_an_allocation_that_fails_is_one_line(digits, tmp_path):
    """As under `ulimit -v`: 1.3 GB of images are less than is free, and more than is allowed."""
    words = SRC / "train_cache.py", *tiny(digits, tmp_path, image_size=1200)
    done = run_forked(with_little_memory(tmp_path), *words)
    assert_one_line(done, 2, "train_cache.py: error: the images do not fit in memory")
