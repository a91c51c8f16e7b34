"""What the peers share with src/train.py and src/loader.py, so that only the loop differs."""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.transforms import v2 as transforms

import folders  # noqa: F401  it finds train.py

import train

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
synchronize = torch.cuda.synchronize if ON_GPU else lambda: None


def data(args):
    """Return DataLoaders of training and validation images, and the number of classes.

    Batches are uint8 images (N, 3, size, size) and labels (N,), with train.py's transforms.
    """
    size, val_size = args.image_size, args.val_size or args.image_size
    center = [transforms.Resize(size), transforms.CenterCrop(size)]
    flip = transforms.RandomHorizontalFlip()
    crop = dict(
        none=center,
        resized=[transforms.RandomResizedCrop(size), flip],
        crop=[*center, transforms.RandomCrop(size, size // 8), flip],
    )[args.augment]
    to_bytes = transforms.PILToTensor()
    val_crop = [transforms.Resize(val_size), transforms.CenterCrop(val_size)]
    train_set, val_set = (
        train.open_folder(args.dataset, names, transforms.Compose([*steps, to_bytes]))
        for names, steps in (("train training", crop), ("val test testing", val_crop))
    )
    loading = dict(
        batch_size=args.batch_size,
        num_workers=args.workers,
        pin_memory=ON_GPU,
        persistent_workers=args.workers > 0,
    )
    return (
        DataLoader(train_set, shuffle=True, drop_last=True, **loading),
        DataLoader(val_set, **loading),
        len(train_set.classes),
    )


def network(args, classes):
    """Return train.py's network with the same first weights: uint8 images to (N, classes)."""
    torch.manual_seed(args.seed)
    model = (
        train.conv11(args.width, classes)
        if args.model == "conv11"
        else models.get_model(args.model, num_classes=classes)
    )
    return nn.Sequential(train.Normalize(), model).to(DEVICE)


def sgd(net, args):
    """Return train.py's optimizer."""
    return torch.optim.SGD(net.parameters(), args.lr, 0.9, weight_decay=5e-4, nesterov=True)


def schedule(optimizer, total):
    """Return train.py's learning rate over `total` steps: it rises for a fifth, then falls."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: train.lr_factor(step, total))


class Clock:
    """The seconds of each epoch; the GPU is synchronised at both edges, as in train.py."""

    def __init__(self):
        self.seconds = []

    def start(self):
        synchronize()
        self.started = time.perf_counter()

    def stop(self):
        synchronize()
        self.seconds.append(time.perf_counter() - self.started)


def write_record(args, clock, images, epochs=None):
    """Write RESULT_DIR/<script name>.json; an epoch has `images`, and `epochs` says more of each.

    The speed is the median of the epochs after the first.
    """
    script = Path(sys.argv[0]).stem
    epochs = [
        dict(seconds=seconds, images_per_second=images / seconds, **more)
        for seconds, more in zip(clock.seconds, epochs or [{}] * len(clock.seconds))
    ]
    steady = epochs[1:] or epochs
    record = dict(
        script=script,
        options=vars(args),
        epochs=epochs,
        environment=dict(
            torch=torch.__version__, device=torch.cuda.get_device_name() if ON_GPU else "cpu"
        ),
        images_per_second=statistics.median(each["images_per_second"] for each in steady),
        train_seconds=sum(each["seconds"] for each in steady),
        val_top1=epochs[-1].get("val_top1"),
    )
    for number, each in enumerate(epochs, 1):
        print(
            f"epoch {number}/{len(epochs)}", *(f"{key} {value:,.4f}" for key, value in each.items())
        )
    args.result_dir.mkdir(parents=True, exist_ok=True)
    (args.result_dir / f"{script}.json").write_text(json.dumps(record, indent=1, default=str))


def time_reading(args, batches_of_epoch, count):
    """Time --epochs passes and write the record; batches_of_epoch() gives the batches of one.

    Each batch goes to the GPU if there is one, as in loader.py. Exits with status 1 unless a pass
    reads `count` pictures: some libraries leave out those that they cannot read.
    """
    clock = Clock()
    for _ in range(args.epochs):
        batches, seen = iter(batches_of_epoch()), 0
        clock.start()
        for pictures, labels in batches:
            pictures = pictures.to(DEVICE, non_blocking=True)
            labels = labels.to(DEVICE, non_blocking=True)
            seen += len(pictures)
        clock.stop()
        if seen != count:
            sys.exit(f"{Path(sys.argv[0]).name}: error: {seen} of {count} pictures were read")
    write_record(args, clock, count)
