# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "pillow", "torch>=2.11", "torchvision>=0.26", "tqdm",
# ]
# ///
"""Train an image classifier on DATASET/train/<class>/* and validate it on DATASET/val/<class>/*.

    python train.py --dataset DATASET --epochs 5

Each epoch prints loss, accuracy and images/s. RESULT_DIR/<script name>.pt is saved for --resume:
after the first and the last epoch, and at most every 30 seconds between. After the last epoch it
writes a record of results and times, RESULT_DIR/<script name>.json.
"""

import argparse
import functools
import gc
import json
import os
import sys
import zipfile
from pathlib import Path
from time import perf_counter

# new #
# names what is kept for later runs
import hashlib

import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, ops
from torchvision.transforms import v2 as transforms
from tqdm import tqdm


def fail(message):
    """Print one line on stderr and exit with status 2, which means wrong usage."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


def positive(text):
    """Return an option's whole number. Raises ValueError if it is below 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def build_parser():
    """Return the parser of the options. They have the same defaults in every script."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add(
        "--dataset",
        type=Path,
        default=Path(__file__).parent / "../data/digits",
        help="folder with train/<class>/*, val/<class>/*",
    )
    add("--image_size", type=positive, default=32, help="height and width in training, pixels")
    add("--val_size", type=positive, help="resize and center crop of validation; None: IMAGE_SIZE")
    add(
        "--augment",
        choices=["none", "resized", "crop"],
        default="none",
        help="random flips and crops: resized as for ImageNet, or crop: padded by 1/8",
    )
    add(
        "--workers",
        type=int,
        default=min(16, len(os.sched_getaffinity(0))),
        help="loading processes for training",
    )
    # new #
    # auto is gpu if the images take at most half of the free GPU memory, else ram
    add("--cache_device", choices=["auto", "gpu", "ram"], default="auto", help="where images stay")

    # new #
    # decoding takes long, and gives the same in each run
    add("--cache_dir", type=Path, help="folder that keeps decoded images for later runs")

    add("--width", type=positive, default=16, help="channels of conv11's first layer")
    add("--model", default="conv11", help="conv11 or a classifier of torchvision.models")
    add("--batch_size", type=positive, default=120, help="images in a step, all processes together")
    add("--lr", type=float, default=0.1, help="highest learning rate")
    add("--epochs", type=positive, default=5, help="passes over the training images")
    add("--steps", type=positive, help="end each epoch after this many steps; None: all")
    add("--seed", type=int, default=0, help="sets weights, image order and augmentation")
    add("--result_dir", type=Path, default="runs", help="folder of record and checkpoint")
    add("--resume", help="a checkpoint, or auto: the one in RESULT_DIR if there is one")
    return parser


def load_image(path):
    """Return the image at `path` in RGB, turned by its EXIF. Raises OSError with the path."""
    try:
        image = Image.open(path)
        # modes I, I;16 and F
        assert image.mode[0] not in "IF", "more than 8 bits: resize_imagenet.py converts up to 16"
        assert 0.01 < image.width / image.height < 100, "over 100 times as long as wide"
        image.info["XML:com.adobe.xmp"] = " "  # by EXIF only, as DALI: Pillow reads no XMP then
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise OSError(f"cannot read {path}: {error}") from None


def open_folder(dataset, names, transform):
    """Return an ImageFolder over the first of the folders `names` in DATASET."""
    for name in names.split():
        if (dataset / name).is_dir():
            found = datasets.ImageFolder(dataset / name, transform, loader=load_image)
            for path, _ in found.samples:
                if path.count("/") > 40:
                    fail(f"{path}: over 40 folders deep, so a link to one above it repeats images")
            return found
    fail(
        f"--dataset {dataset}: it has no {' or '.join(names.split())}/<class>/*; "
        "`python make_dataset.py digits` makes the default"
    )


# new #
# RandomHorizontalFlip for a batch
def random_flip(images):
    """Return images (N, 3, H, W) with half of them mirrored."""
    mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return images.flip(3).where(mirrored, images)


# new #
# RandomCrop with padding for a batch
def random_crop(images, padding):
    """Return images (N, 3, S, S), each moved by up to `padding` pixels over black."""
    count, channels, size, _ = images.shape
    padded = nn.functional.pad(images, [padding] * 4)
    moved = torch.randint(2 * padding + 1, (2, count, 1, 1, 1), device=images.device)
    pixels = torch.arange(size, device=images.device)
    rows = (moved[0] + pixels[:, None]).expand(count, channels, size, padded.shape[3])
    columns = (moved[1] + pixels).expand(count, channels, size, size)
    return random_flip(padded.gather(2, rows).gather(3, columns))


# new #
# RandomResizedCrop for a batch
def random_resized_crop(images, size):
    """Return a random part of each image (N, 3, H, W), resized to (N, 3, size, size)."""
    area = torch.empty(len(images), 10, device=images.device).uniform_(0.08, 1)  # ten tries
    ratio = (4 / 3) ** torch.empty_like(area).uniform_(-1, 1)
    edges = torch.stack([area * ratio, area / ratio], 2).sqrt()  # parts of the width and height
    first = (edges <= 1).all(2, keepdim=True).int().argmax(1, keepdim=True)  # that fits
    edges = edges.take_along_dim(first, 1).clamp(max=1)
    centers = (1 - edges) * torch.empty_like(edges).uniform_(-1, 1)  # coordinates from -1 to 1
    boxes = torch.cat([edges.squeeze(1).diag_embed(), centers.mT], 2)
    grid = nn.functional.affine_grid(boxes, [len(images), 3, size, size], align_corners=False)
    crops = nn.functional.grid_sample(
        images.float(), grid, padding_mode="border", align_corners=False
    )
    return random_flip(crops.round().byte())


# new #
# all images are in one tensor, so a batch needs no loading processes after the first epoch
class CachedLoader(DataLoader):
    """Yield uint8 images (N, 3, size, size) and labels (N,), all of which stay in `place`'s memory.
    The first epoch decodes all. `augment` changes each batch on `device`. The folder `keep`, if not
    None, has the decoded images for later runs.
    """

    # new #
    # take the memory, and read what an earlier run has kept
    def __init__(self, dataset, side, augment, steps, place, device, keep, **loading):
        super().__init__(dataset, **loading)
        self.steps, self.augment, self.device = min(len(self), steps or 1e9), augment, device
        self.place, self.keep, self.decoding = place, keep, ()
        try:
            self.images = torch.zeros(len(dataset), 3, side, side, dtype=torch.uint8, device=place)
        except RuntimeError as error:
            fail(f"the images do not fit in memory: {str(error).splitlines()[0]}")
        self.labels = torch.zeros(len(dataset), dtype=torch.int64, device=place)
        if keep:  # other files, transforms or code have another name
            seen = f"{Path(__file__).read_text()}{dataset.transform}{Image.__version__}"
            seen = hashlib.sha256(f"{seen}{os.path.abspath(dataset.root)!a}".encode())
            for name, _ in dataset.samples:
                stat = os.stat(name)
                file = f"{name[len(f'{dataset.root}') :]} {stat.st_size} {stat.st_mtime_ns}"
                seen.update(os.fsencode(file))
            self.keep = keep = keep / f"{seen.hexdigest()}.pt"
        if keep and keep.exists():
            try:
                assert not zipfile.ZipFile(keep).testzip()  # torch.load checks no checksums
                images, labels = torch.load(keep, "cpu", mmap=True)
                self.images.copy_(images)
                self.labels.copy_(labels)
                self.decoding = iter(())
            except Exception:
                fail(f"--cache_dir: {keep} is damaged, remove it")
        elif keep:  # what cannot be written is an error before all is decoded
            os.makedirs(keep.parent, exist_ok=True)
            self.new = Path(f"{keep}.{os.urandom(8).hex()}")  # other processes may write the same
            self.new.touch()
            self.new.unlink()

    # new #
    # as in the baseline, processes decode while the training goes on
    def decode(self, order):
        """Decode the images `order`, then all others. Yields None after each batch of them."""
        order = [*dict.fromkeys([*order, *range(len(self.images))])]
        # this takes no random numbers of the training
        loading = {"num_workers": self.num_workers, "generator": torch.Generator()}
        batches = DataLoader(self.dataset, self.batch_size, sampler=order, **loading)
        for i, (images, labels) in zip(torch.tensor(order).split(self.batch_size), batches):
            self.images[i], self.labels[i] = images.to(self.place), labels.to(self.place)
            yield
        if self.keep:
            try:
                torch.save((self.images, self.labels), self.new)
                self.new.replace(self.keep)
            except RuntimeError as error:
                fail(f"--cache_dir: {self.new} cannot be written: {error!r:.150}")
            finally:
                self.new.unlink(missing_ok=True)

    # new #
    # an epoch is look-ups in the order of the sampler; the first one's last batch waits for all
    def __iter__(self):
        order = [*self.sampler]
        list(self.decoding)  # an epoch that was left early had another order
        self.decoding = self.decoding or self.decode(order)
        parts = torch.tensor(order, device=self.place).split(self.batch_size)
        for step, i in enumerate(parts[: self.steps], 1):
            next(self.decoding, None)
            if step == self.steps:
                list(self.decoding)
            images = self.images[i]
            if self.pin_memory and not images.is_cuda:
                images = images.pin_memory()
            yield self.augment(images.to(self.device, non_blocking=True)), self.labels[i]


class Normalize(nn.Module):
    """Turn uint8 images into floats, by ImageNet's mean and standard deviation, on the device."""

    def __init__(self):
        super().__init__()
        self.register_buffer(
            "mean_std",
            torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[..., None, None],
        )

    def forward(self, images):
        mean, std = self.mean_std
        return (images / 255 - mean) / std


def conv11(width, classes):
    """Return eleven 3x3 convolutions, each with batch norm and ReLU, before a linear layer.

    They turn (N, 3, H, W) floats into (N, classes) scores.
    """
    layers = []
    channels = 3
    for i in range(1, 12):
        wider = width * 2 ** (i // 3)
        layers += ops.Conv2dNormActivation(channels, wider, 3, 1 if i % 3 else 2)
        channels = wider
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


def lr_factor(step, total):
    """Return what multiplies --lr in a step: it rises for a fifth of all steps, then falls to 0."""
    # at most 1: the rise is (step + 1) / (0.2 * total), the fall (total - step) / (0.8 * total)
    return min((step + 1) / 0.2, (total - step) / 0.8, total) / total


def main():
    # --------------------------------------------------------------------------------- options
    started = perf_counter()
    script = Path(__file__).stem
    args = build_parser().parse_args()
    log = functools.partial(print, flush=True)

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")

    # the number of this process, and how many processes there are
    rank = 0
    world_size = 1

    # epoch e takes seed + e: the next --seed begins ten thousand epochs later
    seed = args.seed * 10_000

    # every process starts from the same weights
    torch.manual_seed(seed)
    os.makedirs(args.result_dir, exist_ok=True)
    saved = args.result_dir / f"{script}.pt"

    # ------------------------------------------------------------------------------------ data
    size = args.image_size
    val_size = args.val_size or size
    val_transform = transforms.Compose(
        [transforms.Resize(val_size), transforms.CenterCrop(val_size), transforms.PILToTensor()]
    )

    flip = transforms.RandomHorizontalFlip()
    crop = [transforms.Resize(size), transforms.CenterCrop(size)]
    if args.augment == "resized":
        crop = [transforms.RandomResizedCrop(size), flip]
    elif args.augment == "crop":
        crop += [transforms.RandomCrop(size, size // 8), flip]

    # new #
    # the cache holds squares; resized crops are cut from squares that are a seventh larger
    side, augment = size, nn.Identity()
    if args.augment == "resized":
        side = -(-size * 8 // 7)
        augment = functools.partial(random_resized_crop, size=size)
    elif args.augment == "crop":
        augment = functools.partial(random_crop, padding=size // 8)
    crop = [transforms.Resize(side), transforms.CenterCrop(side)]

    # images stay uint8 until normalize: as floats they would be four times as many bytes
    train_transform = transforms.Compose([*crop, transforms.PILToTensor()])

    # uint8 images (3, height, width) with the number of their class
    train_set = open_folder(args.dataset, "train training", train_transform)
    val_set = open_folder(args.dataset, "val valid validation test testing", val_transform)
    classes = train_set.classes
    # a hidden folder, as .ipynb_checkpoints, is no class
    if classes != val_set.classes or "/." in f"/{'/'.join(classes)}":
        fail(
            f"--dataset {args.dataset}: hidden, or in only one of train and val: "
            f"{sorted(set(classes) ^ set(val_set.classes)) or [n for n in classes if n[0] == '.']}"
        )
    if len(train_set) < args.batch_size:
        fail(f"--batch_size {args.batch_size}: there are only {len(train_set)} training images")

    # new #
    # a set that does not fit is an error before it is decoded
    needed = 3 * (len(train_set) * side**2 + len(val_set) * val_size**2)
    place, free = device, torch.cuda.mem_get_info()[0] if on_gpu else 0
    if args.cache_device == "ram" or (args.cache_device == "auto" and needed > free / 2):
        place = torch.device("cpu")
    if place.type == "cpu":
        memory = dict(line.split(":") for line in open("/proc/meminfo"))
        free = 1024 * int(memory["MemAvailable"].split()[0])
        for line in open("/proc/self/cgroup"):  # the limits of a container or a job
            _, kind, name = line.strip().split(":", 2)
            group = Path(f"/sys/fs/cgroup/{kind}{name}")
            for folder in group, *group.parents:
                for limit in *folder.glob("memory.max"), *folder.glob("memory.limit_in_bytes"):
                    free = min(free, int(limit.read_text().replace("max", str(free))))
        free //= world_size
    if needed > free:
        fail(f"the decoded images take {needed / 1e6:,.1f} MB of {place} memory, more than is free")
    log(f"{script}: the decoded images take {needed / 1e6:,.1f} MB of {place} memory")

    # epoch e (from 0) takes the images in the order of torch.randperm, seeded with seed + e
    sampler = torch.utils.data.RandomSampler(train_set, generator=torch.Generator())

    # each process has its share of the validation images, the batch and the workers
    val_sampler = range(rank, len(val_set), world_size)
    loading = dict(
        batch_size=args.batch_size // world_size,
        num_workers=args.workers // world_size,
        persistent_workers=args.workers >= world_size,
        pin_memory=on_gpu,
    )

    # new #
    # the first epoch decodes all images; later a batch is a look-up in memory
    loading |= dict(place=place, device=device, keep=args.cache_dir)
    train_loader = CachedLoader(
        train_set, side, augment, args.steps, sampler=sampler, drop_last=True, **loading
    )

    # every validation image, in order
    # new #
    # validation images are in memory, too
    val_loader = CachedLoader(
        val_set, val_size, nn.Identity(), None, sampler=val_sampler, **loading
    )

    # ----------------------------------------------------------------------------------- model
    if args.model == "conv11":
        model = conv11(args.width, len(classes))
    else:
        model = models.get_model(args.model, num_classes=len(classes))

    # never wrap model itself, wrap net below: optimizer, checkpoint and validation use model
    model = model.to(device)

    # ------------------------------------------------------------------------------- optimizer
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, 0.9, weight_decay=5e-4, nesterov=True)

    log(
        f"{script}: {sum(map(torch.numel, model.parameters())):,} parameters, "
        f"{len(train_set):,} images, {len(classes)} classes, {device}"
    )

    # a checkpoint holds the states of these
    parts = {"model": model, "optimizer": optimizer}

    # each step calls net on uint8 images; techniques wrap net, so that model stays as it is
    normalize = Normalize().to(device)
    net = nn.Sequential(normalize, model)

    # -------------------------------------------------------------------------------- training
    # continue with the states of the checkpoint and the options of this run
    epochs = []
    if args.resume == "auto":
        args.resume = saved.exists() and saved
    if args.resume:
        try:
            assert not zipfile.ZipFile(args.resume).testzip()  # torch.load checks no checksums
            checkpoint = torch.load(args.resume, "cpu")
            states = checkpoint["parts"]
            states["optimizer"]["param_groups"] = optimizer.state_dict()["param_groups"]
            # a state that is missing or empty, as that of a scaler that was off, stays new
            for name in filter(states.get, parts):
                parts[name].load_state_dict(states[name])
            epochs = checkpoint["epochs"]
        except Exception as error:
            fail(f"--resume {args.resume}: damaged, or of another model: {error!r:.150}")
        if checkpoint.get("classes", classes) != classes:
            # number and name of those that differ
            fail(
                f"--resume {args.resume}: the classes have other names or another order: "
                f"{sorted({*enumerate(classes)} ^ {*enumerate(checkpoint['classes'])})}"
            )
        log(
            f"{script}: {len(epochs)} of {args.epochs} epochs are done; lr is by this run's options"
        )

    steps = min(len(train_loader), args.steps or 1e9)
    done = len(epochs) * steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(done + step, args.epochs * steps)
    )

    # a save holds up the training, so the next one is not before this time
    save_at = 0

    # from the start of training to the end of its first step, which compiles
    first_step_seconds = 0

    # from the start of main to the end of the steps of its first epoch
    warmup_seconds = 0
    for epoch in range(len(epochs), args.epochs):
        # each epoch and process has its own seed
        torch.manual_seed((seed + epoch) * world_size + rank)

        # the order of the images
        sampler.generator.manual_seed(seed + epoch)

        losses = torch.zeros(steps, device=device)
        data_wait = 0
        model.train()
        start = tick = perf_counter()
        # the bar is on process 0's terminal only (None: not if the output is no terminal)
        for step, (images, labels) in tqdm(
            zip(range(steps), train_loader), f"epoch {epoch + 1}", steps, disable=rank or None
        ):
            data_wait += perf_counter() - tick
            labels = labels.to(device, non_blocking=True)
            images = images.to(device, non_blocking=True)

            output = net(images)
            loss = loss_function(output, labels)

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            # the loss stays on the device: reading it here would make each step wait
            losses[step] = loss.detach()
            scheduler.step()
            tick = perf_counter()
            first_step_seconds = first_step_seconds or tick - start

        # reading the loss waits for the GPU, so this is the time of all steps
        loss = losses.mean().item()
        seconds = perf_counter() - start
        warmup_seconds = warmup_seconds or perf_counter() - started

        # validation
        model.eval()
        correct = losses.new_zeros(min(5, len(classes)))
        with torch.inference_mode():
            for images, labels in val_loader:
                labels = labels.to(device, non_blocking=True)

                output = model(normalize(images.to(device, non_blocking=True)))

                correct += (output.topk(len(correct)).indices.T == labels).sum(1)

        # a run that has diverged ends here, before it saves this epoch
        if not abs(loss) < 1e99:
            sys.exit(
                f"{script}: error: the loss is no longer finite in epoch {epoch + 1}, step "
                f"{losses.isfinite().tolist().index(False) + 1}: try a lower --lr"
            )

        # the epoch's line and checkpoint
        top = (correct.cumsum(0) / len(val_set)).tolist()
        tick = perf_counter()
        results = {
            "loss": loss,
            "val_top1": top[0],
            "val_top5": top[-1],
            "seconds": seconds,
            "images_per_second": steps * args.batch_size / seconds,
            "data_wait": data_wait / seconds,
            "val_seconds": tick - start - seconds,
        }
        epochs.append(results)
        log(
            f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  top-1 {top[0]:.2%}  "
            f"top-5 {top[-1]:.2%}  {results['images_per_second']:,.0f} images/s  "
            f"data wait {data_wait / seconds:.0%}"
        )
        if rank == 0 and (tick > save_at or epoch + 1 == args.epochs):
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"parts": states, "epochs": epochs, "classes": classes}, f"{saved}.part")
            os.replace(f"{saved}.part", saved)
            save_at = tick + 30
        results["save_seconds"] = perf_counter() - tick

    # the record
    record = {
        "options": vars(args),
        "classes": classes,
        "epochs": epochs,
        "first_step_seconds": first_step_seconds,
        "warmup_seconds": warmup_seconds,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
    }
    if rank == 0:
        saved.with_suffix(".json").write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    gc.freeze()  # else Python looks through all imports once more at the end: a second
    try:
        main()
    except OSError as error:  # an unreadable image; the last line, since a worker adds its own
        sys.exit(f"{Path(__file__).name}: error: {str(error).splitlines()[-1]}")
