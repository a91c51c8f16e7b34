# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "pillow",
#     "torch>=2.11",
#     "torchvision>=0.26",
#     "tqdm",
# ]
# ///
"""Train an image classifier on DATASET/train/<class>/* and validate it on DATASET/val/<class>/*.

    python train.py --dataset DATASET --epochs 5

Every epoch it prints loss, accuracy and images/s and saves RESULT_DIR/<script name>.pt, which
--resume takes; at the end it writes its record, RESULT_DIR/<script name>.json.
"""

import argparse
import io
import json
import os
import statistics
import sys
import time
import warnings
import zipfile
from itertools import islice
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from torchvision import datasets, models
from torchvision.transforms import v2 as transforms
from tqdm import tqdm

warnings.filterwarnings("ignore", module="PIL")  # they name no file, and the pictures are whole

# of the machine's cores, those that this process may use
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def at_least(least):
    """The type of an option that is a whole number, `least` or more."""
    def whole_number(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
        return int(text)
    return whole_number


def build_parser():
    """The options: the same, with the same defaults, in every script."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    def add(name, **details):  # --batch_size, spelled --batch-size too
        parser.add_argument(name, *{name.replace("_", "-")} - {name}, **details)

    # data
    places = [folder / "data" / "digits" for folder in Path(__file__).resolve().parents]
    digits = next((place for place in places if place.is_dir()), places[1])
    add("--dataset", type=Path, default=digits, help="folder of train/<class>/*, val/<class>/*")
    add("--image_size", type=at_least(1), default=32, help="pixels a side in training")
    add("--val_size", type=at_least(1), help="pixels a side in validation; None: as in training")
    add("--augment", action="store_true", help="random resized crop and flip")
    add("--workers", type=at_least(0), default=min(16, CORES), help="loaders in all")

    # model
    add("--model", default="conv11", help="conv11 or a classifier of torchvision.models")
    add("--width", type=at_least(1), default=16, help="channels of conv11's first layer")

    # optimizer
    add("--batch_size", type=at_least(1), default=120, help="pictures a step, over all processes")
    add("--lr", type=float, default=0.1, help="peak learning rate")

    # length
    add("--epochs", type=at_least(1), default=5, help="passes over the training pictures")
    add("--steps", type=at_least(1), help="end every epoch after so many steps; None: do not")
    add("--seed", type=int, default=0, help="of weights, order and augmentation")

    # files
    add("--result_dir", type=Path, default=Path("runs"), help="where record and checkpoint go")
    add("--resume", help="a checkpoint, or auto: RESULT_DIR's own if there is one")
    return parser


def is_picture(path):
    """Whether the name is a picture's; those that begin with ._ are a file system's notes."""
    name = os.path.basename(path).lower()
    return name.endswith(datasets.folder.IMG_EXTENSIONS) and not name.startswith("._")


def load_image(path, file=None):
    """An RGB picture, upright by its EXIF, of what is at `path` or in `file`. Raises OSError."""
    try:
        with Image.open(file or path) as image:
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):  # 16 bits become 8
                image = image.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
            return image.convert("RGB")
    except Exception as error:
        raise OSError(f"cannot read the picture {path}: {error}") from None


def class_folders(parser, dataset, names, transform):
    """ImageFolder over the first of DATASET/<names> that exists; where it cannot, exit 2."""
    root = next((dataset / name for name in names if (dataset / name).is_dir()), dataset / names[0])
    try:
        return datasets.ImageFolder(root, transform, loader=load_image, is_valid_file=is_picture)
    except OSError as error:
        parser.error(f"--dataset {dataset}: {error} (it has to hold {' or '.join(names)}/<class>/*;"
                     " `python make_dataset.py digits` makes the default)")


class Conv11(nn.Module):
    """Eleven 3x3 convolutions: (N, 3, H, W) floats to (N, classes) scores."""

    def __init__(self, width, classes):
        super().__init__()
        layers, channels = [], 3
        for i in range(11):
            wider = width * 2 ** ((i + 1) // 3)
            layers += [nn.Conv2d(channels, wider, 3, 2 if i % 3 == 2 else 1, 1, bias=False),
                       nn.BatchNorm2d(wider), nn.ReLU(inplace=True)]
            channels = wider
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images):
        return self.layers(images)


def environment(device):
    """The machine and the versions that a record was made with."""
    def ask(command):
        return os.popen(f"{command} 2>/dev/null | head -n 1").read().strip()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return dict(python=sys.version.split()[0], torch=torch.__version__, cuda=torch.version.cuda,
                cudnn=torch.backends.cudnn.version(), gpu=gpu, gpus=torch.cuda.device_count(),
                driver=ask("nvidia-smi --query-gpu=driver_version --format=csv,noheader"),
                cpu=ask("sed -n 's/^model name.*: //p' /proc/cpuinfo"), cores=CORES)


def peak_memory(device):
    """The most bytes held at once: on the GPU, or else by this process, which Linux alone tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    found = status.exists() and status.read_text().partition("VmHWM:")[2].split()
    return 1024 * int(found[0]) if found else None


# new #
# tensor cores want eight channels or more, and a picture has three: in blocks of 2x2 pixels, 16
class BlockConv2d(nn.Conv2d):
    """A convolution of stride 2, done as one of stride 1 over such blocks: the same sums."""
    def forward(self, images):
        (down, right), (height, width) = self.padding, images.shape[2:]
        more = 4 - self.in_channels
        images = nn.functional.pad(
            images, (right, right + width % 2, down, down + height % 2, 0, more))
        weight = nn.functional.pad(self.weight, (0, 1, 0, 1, 0, more))
        is_last = 1 in (images.stride(1), weight.stride(1))
        layout = torch.channels_last if is_last else torch.contiguous_format
        return nn.functional.conv2d(*(nn.functional.pixel_unshuffle(each, 2).contiguous(
            memory_format=layout) for each in (images, weight)), self.bias)

# new #
# compiled, PyTorch's gradient of a pool searches four windows for each pixel; this, of rows, two
class RowMaxima(torch.autograd.Function):
    """Of (N, C, H, W), the maxima of windows of a row; of equal ones the first has the gradient."""
    @staticmethod
    def forward(context, images, size, stride, padding, ceil_mode):
        width = images.shape[3]
        more = stride - 1 if ceil_mode else 0  # but no window begins in the padding on the right
        last = min(width + padding - 1, width + 2 * padding - size + more) // stride * stride
        padded = nn.functional.pad(
            images, (padding, last + size - padding - width), value=-torch.inf)
        maxima, *others = padded.unfold(3, size, stride).unbind(4)
        places = torch.zeros_like(maxima, dtype=torch.int8)  # so windows stay below 128
        for place, values in enumerate(others, 1):
            places = torch.where(values > maxima, place, places)
            maxima = torch.maximum(maxima, values)  # NaN stays
        context.sizes = width, size, stride, padding
        context.save_for_backward(places)
        return maxima
    @staticmethod
    def backward(context, gradient):
        width, size, stride, padding = context.sizes
        pixels = torch.arange(padding, padding + width, device=gradient.device)
        count, total = (padding + width + size) // stride, 0
        for before in range(-(-size // stride)):  # each window that holds the pixel, the last first
            place, value = (nn.functional.pad(
                each, (before, count - before - each.shape[3]))[..., None].expand(
                -1, -1, -1, -1, stride).flatten(3)[..., padding:padding + width]
                for each in (*context.saved_tensors, gradient))
            total = total + torch.where(place == pixels % stride + before * stride, value, 0)
        return total, None, None, None, None

# new #
# along columns PyTorch's own gradient is as fast; eager, two passes would be slower than one
class SplitMaxPool2d(nn.MaxPool2d):
    """Compiled, the maxima of rows, then of their columns; if finite, with the same gradient."""
    def forward(self, images):
        if not torch.compiler.is_compiling() or images.dim() < 4:
            return super().forward(images)
        size, stride, padding = self.kernel_size, self.stride, self.padding
        rows = RowMaxima.apply(images, size, stride, padding, self.ceil_mode)
        return nn.functional.max_pool2d(
            rows, (size, 1), (stride, 1), (padding, 0), ceil_mode=self.ceil_mode)

def replace(path, content):
    """Writes bytes beside `path`, then moves them there: never half a file. Raises OSError."""
    try:
        with open(f"{path}.part", "wb") as file:
            file.write(content)
        os.replace(f"{path}.part", path)
    except OSError as error:
        Path(f"{path}.part").unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error.strerror}") from None


def main():
    # --------------------------------------------------------------------------------- options
    started = time.perf_counter()
    script = Path(__file__).stem
    parser = build_parser()
    args = parser.parse_args()

    # which process this is, of how many, and its device
    rank = 0
    world_size = 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # the weights are the same in every process and every run
    torch.manual_seed(args.seed)
    on_gpu = device.type == "cuda"
    if args.batch_size % world_size:
        parser.error(f"--batch_size {args.batch_size} does not divide by {world_size} processes")

    # ------------------------------------------------------------------------------------ data
    val_size = args.val_size or args.image_size
    val_transform = transforms.Compose([
        transforms.Resize(val_size), transforms.CenterCrop(val_size), transforms.PILToTensor()])
    crop = [transforms.Resize(args.image_size), transforms.CenterCrop(args.image_size)]
    if args.augment:
        crop = [transforms.RandomResizedCrop(args.image_size), transforms.RandomHorizontalFlip()]
    train_transform = transforms.Compose([*crop, transforms.PILToTensor()])

    # uint8 pictures (3, height, width) with the number of their class
    train_set = class_folders(parser, args.dataset, ("train", "training"), train_transform)
    val_set = class_folders(parser, args.dataset, ("val", "test", "testing"), val_transform)
    if odd := set(train_set.classes) ^ set(val_set.classes):
        parser.error(f"--dataset {args.dataset}: not in both train and val: {sorted(odd)}")
    if len(train_set) < args.batch_size:
        parser.error(f"--batch_size {args.batch_size}: only {len(train_set)} training pictures")

    # epoch e's order is the torch.randperm of a generator seeded with seed + e
    sampler = RandomSampler(train_set, generator=torch.Generator())

    # every picture once, whatever the number of processes
    val_sampler = range(rank, len(val_set), world_size)

    # workers draw from the epoch's seed, so that an epoch can be replayed
    worker_seed = torch.Generator()
    workers = -(-args.workers // world_size)
    loading = dict(batch_size=args.batch_size // world_size, num_workers=workers,
                   pin_memory=on_gpu, generator=worker_seed)

    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True,
                              persistent_workers=workers > 0 and not args.augment, **loading)

    # validation draws nothing, so its workers can stay
    val_loader = DataLoader(val_set, sampler=val_sampler, persistent_workers=workers > 0, **loading)

    # bytes turn into floats on the device
    normalize = transforms.Compose([
        transforms.ToDtype(torch.float32, scale=True),
        transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])])
    steps = min(len(train_loader), args.steps or len(train_loader))

    # ----------------------------------------------------------------------------------- model
    classes = len(train_set.classes)
    if args.model == "conv11":
        model = Conv11(args.width, classes)
    elif args.model in models.list_models(module=models):
        no_aux = {"aux_logits": False} if args.model in ("googlenet", "inception_v3") else {}
        model = models.get_model(args.model, num_classes=classes, **no_aux)
    else:
        parser.error(f"--model {args.model}: neither conv11 nor a model of torchvision.models")

    # new #
    # a layer keeps its weights and its name: checkpoints go from script to script
    changed = 0
    for layer in model.modules():
        if type(layer) is nn.Conv2d and layer.in_channels < 5 and all(
                side % 2 and side > 1 for side in layer.kernel_size) and (
                layer.stride, layer.dilation, layer.groups, layer.padding_mode) == (
                (2, 2), (1, 1), 1, "zeros") and not isinstance(layer.padding, str):
            layer.__class__ = BlockConv2d
        elif type(layer) is nn.MaxPool2d and all(isinstance(each, int) for each in (
                layer.kernel_size, layer.stride, layer.padding)) and not layer.return_indices and (
                128 > layer.kernel_size > layer.stride > 1 == layer.dilation):
            layer.__class__ = SplitMaxPool2d
        changed += type(layer) in (BlockConv2d, SplitMaxPool2d)
    print(f"{script}: {changed or 'nothing to do: no'} layers in blocks or, if compiled, rows",
          flush=True)

    # model stays the bare module: optimizer, checkpoint and validation use it
    model = model.to(device)

    # ------------------------------------------------------------------------------- optimizer
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, 0.9, weight_decay=5e-4, nesterov=True)

    # what is trained
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{script}: {parameters:,} parameters, {len(train_set):,} pictures, {device}", flush=True)

    # the learning rate rises for a fifth of all steps, then falls to zero
    total = args.epochs * steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.2 * total), (total - step) / (0.8 * total)))

    # what a checkpoint holds
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    # what a training step calls on bytes; more may wrap it
    net = nn.Sequential(normalize, model)

    # -------------------------------------------------------------------------------- training
    args.result_dir.mkdir(parents=True, exist_ok=True)
    saved = args.result_dir / f"{script}.pt"
    checkpoint, resume = None, args.resume
    if resume == "auto":
        resume = saved if saved.exists() else None
    if resume:
        try:
            if damaged := zipfile.ZipFile(resume).testzip():  # torch.load compares no checksums
                raise ValueError(f"{damaged} is damaged")
            checkpoint = torch.load(resume, map_location="cpu", weights_only=True)
        except Exception as error:
            parser.error(f"--resume {resume}: not a whole checkpoint: {error!r:.150}")

    # go on where it stopped
    epochs = []
    if checkpoint:
        try:
            for name, state in checkpoint["parts"].items():
                if name in parts and state:  # a scaler that was off has none
                    parts[name].load_state_dict(state)
            epochs = checkpoint["epochs"]
            scheduler.last_epoch = len(epochs) * steps  # which an option may have changed
            torch.set_rng_state(checkpoint["rng"][0])
            if on_gpu and checkpoint["rng"][1:]:
                torch.cuda.set_rng_state(checkpoint["rng"][1], device)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            parser.error(f"--resume {resume}: of another model: {error!r:.150}")

    # nothing in a step waits for the device; the clock does, at the edges of what it times
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    warmup_seconds = 0.0
    resumed = len(epochs)
    for epoch in range(resumed, args.epochs):
        # the order of the pictures
        sampler.generator.manual_seed(args.seed + epoch)

        # one pass over them
        worker_seed.manual_seed((args.seed + epoch) * world_size + rank)
        losses = torch.zeros(steps, device=device)
        data_wait = 0.0
        model.train()
        synchronize()
        start = tick = time.perf_counter()
        for step, (images, labels) in enumerate(tqdm(
                islice(train_loader, steps), f"epoch {epoch + 1}", total=steps, leave=False,
                disable=None if rank == 0 else True)):
            data_wait += time.perf_counter() - tick
            labels = labels.to(device, non_blocking=True)
            images = images.to(device, non_blocking=True)

            output = net(images)
            loss = loss_function(output, labels)

            # one step down
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            # what is counted stays on the device
            losses[step] = loss.detach()
            scheduler.step()
            tick = time.perf_counter()
        synchronize()
        seconds = time.perf_counter() - start
        warmup_seconds = warmup_seconds or time.perf_counter() - started

        # the loss, read once an epoch
        loss = losses.mean().item()
        if bad := (~losses.isfinite()).nonzero().flatten().tolist():
            sys.exit(f"{script}: error: the loss stops being finite at epoch {epoch + 1}, step "
                     f"{bad[0] + 1}; a lower --lr may help")

        # validation
        model.eval()
        correct = torch.zeros(2, device=device)
        with torch.inference_mode():
            for images, labels in val_loader:
                labels = labels.to(device, non_blocking=True)
                images = images.to(device, non_blocking=True)

                output = model(normalize(images))

                # top-1 and top-5
                hits = output.topk(min(5, classes)).indices == labels[:, None]
                correct += torch.stack([hits[:, 0].sum(), hits.sum()])

        # the epoch's line and checkpoint
        top1, top5 = (correct / len(val_set)).tolist()
        speed = steps * args.batch_size / seconds
        epochs.append(dict(loss=loss, val_top1=top1, val_top5=top5, seconds=seconds,
                           images_per_second=speed, data_wait=data_wait / seconds))
        print(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  top-1 {top1:.2%}  "
              f"top-5 {top5:.2%}  {speed:,.0f} images/s  data wait {data_wait / seconds:.0%}",
              flush=True)
        if rank == 0:
            state = {"parts": {name: part.state_dict() for name, part in parts.items()},
                     "epochs": epochs, "rng": [torch.get_rng_state()]}
            state["rng"] += [torch.cuda.get_rng_state(device)] if on_gpu else []
            torch.save(state, content := io.BytesIO())
            replace(saved, content.getvalue())

    # the record; the speed is that of the epochs after this run's first, which warms up
    steady = epochs[resumed + 1:] or epochs[1:resumed] or epochs
    record = dict(
        script=script, options=vars(args), environment=environment(device), parameters=parameters,
        epochs=epochs, val_top1=epochs[-1]["val_top1"], warmup_seconds=warmup_seconds,
        images_per_second=statistics.median(each["images_per_second"] for each in steady),
        train_seconds=sum(each["seconds"] for each in steady),
        peak_memory_bytes=peak_memory(device))
    if rank == 0:
        text = json.dumps(record, indent=1, default=str) + "\n"
        replace(args.result_dir / f"{script}.json", text.encode())


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # a picture that cannot be read, a full disk: one line says which
        sys.exit(f"{Path(__file__).name}: error: {str(error).splitlines()[-1]}")
