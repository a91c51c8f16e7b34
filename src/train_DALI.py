# /// script
# requires-python = ">=3.10"
# dependencies = [
#     # new #
#     # decodes images on the GPU or in C++ threads
#     "nvidia-dali-cuda120",
#
#     "pillow", "torch>=2.11", "torchvision>=0.26", "tqdm",
# ]
# ///
"""Train an image classifier on DATASET/train/<class>/* and validate it on DATASET/val/<class>/*.

    python train.py --dataset DATASET --epochs 5

Each epoch prints loss, accuracy and images/s, and saves RESULT_DIR/<script name>.pt for --resume.
After the last epoch it writes a record, RESULT_DIR/<script name>.json.
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
from pathlib import Path

# new #
# decodes images on the GPU or in C++ threads
import numpy as np
try:
    from nvidia.dali import fn, math, pipeline_def, types
except ImportError as error:
    sys.exit(f"{Path(__file__).name}: error: {error}: pip install nvidia-dali-cuda120")

import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from torchvision import datasets, models
from torchvision.transforms import v2 as transforms
from tqdm import tqdm

warnings.filterwarnings("ignore", module="PIL")  # its warnings name no file and are harmless


def fail(message):
    """Print one line on stderr and exit with status 2, which means wrong usage."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


def count(text):
    """Return an option's whole number, which is 1 or more. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def build_parser():
    """Return the parser of the options. They have the same defaults in every script."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    places = [folder / "data" / "digits" for folder in Path(__file__).resolve().parents]
    digits = next(filter(Path.is_dir, places), places[:2][-1])
    add("--dataset", type=Path, default=digits, help="folder with train/<class>/*, val/<class>/*")
    add("--image_size", type=count, default=32, help="height and width in training, pixels")
    add("--val_size", type=count, help="height and width in validation; None: IMAGE_SIZE")
    add("--augment", choices=["none", "resized", "crop"], default="none",
        help="random flips and crops: resized as for ImageNet, or crop: padded by 1/8")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--workers", type=int, default=min(16, cores), help="loading processes for training")
    # new #
    # without a GPU the CPU decodes; --workers is the number of threads
    add("--dali_device", choices=["gpu", "cpu"], default="gpu", help="what decodes; no GPU: cpu")

    add("--width", type=count, default=16, help="channels of conv11's first layer")
    add("--model", default="conv11", help="conv11 or a classifier of torchvision.models")
    add("--batch_size", type=count, default=120, help="images in a step, all processes together")
    add("--lr", type=float, default=0.1, help="highest learning rate")
    add("--epochs", type=count, default=5, help="passes over the training images")
    add("--steps", type=count, help="end each epoch after this many steps; None: all")
    add("--seed", type=int, default=0, help="sets weights, image order and augmentation")
    add("--result_dir", type=Path, default=Path("runs"), help="folder of record and checkpoint")
    add("--resume", help="a checkpoint, or auto: the one in RESULT_DIR if there is one")
    return parser


def load_image(path):
    """Return the image at `path` in RGB, turned by its EXIF. Raises OSError with the path."""
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise OSError(f"cannot read {path}: {error}") from None


def open_folder(dataset, names, transform):
    """Return an ImageFolder over the first of DATASET/<names> that is there."""
    root = next((dataset / name for name in names if (dataset / name).is_dir()), dataset / names[0])
    try:
        return datasets.ImageFolder(root, transform, loader=load_image, is_valid_file=lambda path: (
            datasets.folder.is_image_file(path) and not os.path.basename(path).startswith("._")))
    except OSError as error:
        fail(f"--dataset {dataset}: {error} (it needs {' or '.join(names)}/<class>/*; "
             "`python make_dataset.py digits` makes the default)")


# new #
# does what train_transform and val_transform do: if you change those, change this too
@pipeline_def
def image_pipeline(paths, size, augment, on_gpu):
    """Return a DALI pipeline: uint8 images (size, size, 3) of the files that `paths` names."""
    engine = dict(device="mixed", hw_decoder_load=1.0, jpeg_fancy_upsampling=True) if on_gpu else {}
    resize = dict(size=[size, size], antialias=True, interp_type=types.INTERP_LINEAR)
    encoded = fn.io.file.read(fn.external_source(paths, dtype=types.UINT8, ndim=1))
    # a decoder can crash on a file that is no image: peek_image_shape has to fail before that
    shape = fn.peek_image_shape(encoded, dtype=types.INT32)[:2]
    encoded = fn.reinterpret(encoded, shape=0 * shape[:1] - 1)  # -1: nothing changes
    images = fn.decoders.image(encoded, **engine)
    if augment == "resized":
        images = fn.random_resized_crop(images, **resize)
        return fn.flip(images, horizontal=fn.random.coin_flip())
    # as in torchvision: Resize rounds down, CenterCrop rounds a half to the even pixel
    resized = size * shape // math.min(shape[0], shape[1])
    margin = resized - size
    corner = (margin + (margin // 2 & 1)) // 2
    scale = shape / fn.cast(resized, dtype=types.FLOAT)
    images = fn.resize(images, roi_start=corner * scale, roi_end=(corner + size) * scale, **resize)
    if augment == "crop":  # the whole image, moved by up to an eighth over black
        pad = [*range(-(size // 8), size // 8 + 1)]
        corner = fn.random.uniform(values=pad, shape=2, dtype=types.INT32)
        images = fn.slice(images, start=corner, shape=[size, size], axes=[0, 1],
                          out_of_bounds_policy="pad")
        images = fn.flip(images, horizontal=fn.random.coin_flip())
    return images

# new #
# DALI returns whole batches, so this class replaces DataLoader
class DALILoader:
    """Yield uint8 images (N, 3, size, size) and labels (N,) in the order of `sampler`."""
    def __init__(self, dataset, sampler, size, augment, on_gpu, batch_size, num_workers,
                 drop_last=False, **others):
        self.dataset, self.on_gpu, self.pipeline = dataset, on_gpu, None
        self.labels = torch.tensor([*map(dataset.target_transform or int, dataset.targets)])
        self.order = torch.utils.data.BatchSampler(sampler, batch_size, drop_last)
        self.to_read, self.reading = iter(()), []
        self.options = dict(
            size=size, augment=augment, on_gpu=on_gpu, batch_size=batch_size,
            num_threads=max(1, num_workers), prefetch_queue_depth=3,
            device_id=torch.cuda.current_device() if on_gpu else None)
    def __len__(self):
        return len(self.order)
    def paths(self):
        """Return the paths of the next batch. DALI calls this, some batches ahead of training."""
        self.reading.append(next(self.to_read))
        return [np.frombuffer(os.fsencode(self.dataset.samples[i][0]), np.uint8)
                for i in self.reading[-1]]
    def __iter__(self):
        if not self.pipeline:  # its seed is that of this process's first epoch
            self.pipeline = image_pipeline(
                self.paths, seed=torch.initial_seed() % 2 ** 31, **self.options)
        self.to_read = iter(())
        while self.reading:  # --steps ended the last epoch early: drop what was read ahead
            self.read()
        self.pipeline.reset()
        self.to_read = iter(self.order)
        for _ in range(len(self)):
            yield self.read()
    def read(self):
        """Return the next batch. Raise OSError if a file cannot be read."""
        try:
            stream = torch.cuda.current_stream() if self.on_gpu else None
            images = self.pipeline.run(stream)[0].as_tensor()
        except RuntimeError as error:
            for i in sum(self.reading, []):  # Pillow names the file, DALI does not always
                load_image(self.dataset.samples[i][0])
            said = str(error).split("\nCurrent pipeline")[0].splitlines()[-1]
            raise OSError(f"DALI cannot read the images: {said}") from None
        # a copy, because DALI reuses its memory
        images = torch.from_dlpack(images).permute(0, 3, 1, 2).contiguous()
        return images, self.labels[self.reading.pop(0)]

def write(path, save):
    """Call save(file) on a file beside `path`, then move it there: `path` is never half a file."""
    try:
        with open(f"{path}.part", "wb") as file:
            save(file)
    except RuntimeError as error:  # torch.save hides the OSError of a full disk
        raise error.__context__ or error
    os.replace(f"{path}.part", path)


def conv11(width, classes):
    """Return eleven 3x3 convolutions: (N, 3, H, W) floats to (N, classes) scores."""
    layers, channels = [], 3
    for i in range(11):
        wider = width * 2 ** ((i + 1) // 3)
        layers += [nn.Conv2d(channels, wider, 3, 2 if i % 3 == 2 else 1, 1, bias=False),
                   nn.BatchNorm2d(wider), nn.ReLU(inplace=True)]
        channels = wider
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


def main():
    # --------------------------------------------------------------------------------- options
    started, script = time.perf_counter(), Path(__file__).stem
    args = build_parser().parse_args()

    # the number of this process, the number of processes, and the device of this process
    rank = 0
    world_size = 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    on_gpu = device.type == "cuda"
    if args.batch_size % world_size:
        fail(f"--batch_size {args.batch_size} is not a multiple of {world_size} processes")
    if not 0 < args.lr < 3e38 or not 0 <= args.seed < 2 ** 31 or args.workers < 0:
        fail("--lr has to be above 0 and below 3e38, --seed 0 to 2147483647, --workers 0 or more")
    # every process starts from the same weights
    torch.manual_seed(args.seed)
    saved = args.result_dir / f"{script}.pt"
    try:
        args.result_dir.mkdir(parents=True, exist_ok=True)
        open(f"{saved}.part", "ab").close()  # an error now, not after the first epoch
    except OSError as error:
        fail(f"--result_dir: {error}")

    # ------------------------------------------------------------------------------------ data
    val_size = args.val_size or args.image_size
    val_transform = transforms.Compose([
        transforms.Resize(val_size), transforms.CenterCrop(val_size), transforms.PILToTensor()])
    center = [transforms.Resize(args.image_size), transforms.CenterCrop(args.image_size)]
    flip = transforms.RandomHorizontalFlip()
    crop = dict(none=center, resized=[transforms.RandomResizedCrop(args.image_size), flip], crop=[
        *center, transforms.RandomCrop(args.image_size, args.image_size // 8), flip])[args.augment]
    train_transform = transforms.Compose([*crop, transforms.PILToTensor()])

    # uint8 images (3, height, width) with the number of their class
    train_set = open_folder(args.dataset, ("train", "training"), train_transform)
    val_set = open_folder(args.dataset, ("val", "test", "testing"), val_transform)
    if odd := set(train_set.classes) ^ set(val_set.classes):
        fail(f"--dataset {args.dataset}: classes in only one of train and val: {sorted(odd)}")
    if len(train_set) < args.batch_size:
        fail(f"--batch_size {args.batch_size}: there are only {len(train_set)} training images")

    # epoch e (from 0) takes the images in the order of torch.randperm, seeded with --seed + e
    sampler = RandomSampler(train_set, generator=torch.Generator())

    # each process has its share of the validation images, the batch and the workers
    val_sampler = range(rank, len(val_set), world_size)
    workers = -(-args.workers // world_size)
    loading = dict(batch_size=args.batch_size // world_size, num_workers=workers, pin_memory=on_gpu,
                   persistent_workers=workers > 0, generator=torch.Generator())

    # new #
    # DALI reads the same images in the same order
    dali_gpu = on_gpu and args.dali_device == "gpu"
    train_loader = DALILoader(train_set, sampler, args.image_size, args.augment, dali_gpu,
                              drop_last=True, **loading)

    # every validation image, in order
    # new #
    # DALI reads the images of validation, too
    val_loader = DALILoader(val_set, val_sampler, val_size, "none", dali_gpu, **loading)

    # ----------------------------------------------------------------------------------- model
    # the device turns bytes into floats; mean and std are there, so that no step waits for a copy
    mean, std = torch.tensor([[.485, .456, .406], [.229, .224, .225]]).to(device)[..., None, None]
    normalize = transforms.Compose([
        transforms.ToDtype(torch.float32, scale=True),
        transforms.Lambda(lambda x: (x - mean.to(x.device)) / std.to(x.device))])  # DP: on each GPU
    classes = len(train_set.classes)
    try:
        if args.model == "conv11":
            model = conv11(args.width, classes)
        else:
            no_aux = {"aux_logits": False} if args.model in ("googlenet", "inception_v3") else {}
            model = models.get_model(args.model, num_classes=classes, **no_aux)
        [model.eval()(torch.zeros(1, 3, side, side)) for side in {args.image_size, val_size}]
    except Exception as error:  # some models take one size only
        fail(f"--model {args.model}, image sizes {args.image_size} and {val_size}: {error}")

    # never wrap model itself, wrap net below: optimizer, checkpoint and validation use model
    model = model.to(device)

    # ------------------------------------------------------------------------------- optimizer
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, 0.9, weight_decay=5e-4, nesterov=True)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{script}: {parameters:,} parameters, {len(train_set):,} images, {device}", flush=True)

    # a checkpoint holds the states of these
    parts = {"model": model, "optimizer": optimizer}

    # each step calls net on uint8 images; techniques wrap net, so that model stays as it is
    net = nn.Sequential(normalize, model)

    # -------------------------------------------------------------------------------- training
    resume = (saved if saved.exists() else None) if args.resume == "auto" else args.resume
    content = Path(resume).read_bytes() if resume and rank == 0 else None

    # continue with the states of the checkpoint and the options of this run
    epochs = []
    if content is not None:
        try:
            if damaged := zipfile.ZipFile(io.BytesIO(content)).testzip():
                raise ValueError(f"{damaged} is damaged")  # torch.load would not notice
            checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            states = checkpoint["parts"]
            states["optimizer"]["param_groups"] = optimizer.state_dict()["param_groups"]
            for name in filter(states.get, parts):
                parts[name].load_state_dict(states[name])
            epochs = checkpoint["epochs"]
        except Exception as error:
            fail(f"--resume {resume}: damaged, or of another model: {error!r:.150}")
        changed = [f"--{name} {vars(args)[name]}, which was {old}" for name, old in
                   checkpoint["options"].items() if str(vars(args).get(name, old)) != old]
        print(f"{script}: {len(epochs)} of {args.epochs} epochs are done", *changed, sep="; ")
    if saved.exists() and Path(resume or "").resolve() != saved.resolve():
        print(f"{script}: replaces {saved}; --resume auto would continue it", flush=True)

    steps = min(len(train_loader), args.steps or len(train_loader))
    # the learning rate rises for a fifth of all steps, then falls to zero
    done, total = len(epochs) * steps, args.epochs * steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(
        1, (done + step + 1) / (0.2 * total), (total - done - step) / (0.8 * total)))

    # the host waits for the GPU only before and after the steps of an epoch, to time them
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    warmup_seconds, resumed = 0.0, len(epochs)
    for epoch in range(resumed, args.epochs):
        # each epoch and process has its own seed, and the same one after a resume
        torch.manual_seed((args.seed + epoch) * world_size + rank)
        loading["generator"].manual_seed(torch.initial_seed())

        # the order of the images
        sampler.generator.manual_seed(args.seed + epoch)

        losses, data_wait = torch.zeros(steps, device=device), 0.0
        model.train()
        synchronize()
        start = tick = time.perf_counter()
        for step, (images, labels) in tqdm(zip(range(steps), train_loader), f"epoch {epoch + 1}",
                                           steps, leave=False, disable=None if rank == 0 else True):
            data_wait += time.perf_counter() - tick
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
            tick = time.perf_counter()
        synchronize()
        seconds = time.perf_counter() - start
        warmup_seconds = warmup_seconds or time.perf_counter() - started

        # validation
        model.eval()
        correct = torch.zeros(2, device=device)
        with torch.inference_mode():
            for images, labels in val_loader:
                output = model(normalize(images.to(device, non_blocking=True)))
                labels = labels.to(device, non_blocking=True)
                hits = output.topk(min(5, classes)).indices == labels[:, None]
                correct += torch.stack([hits[:, 0].sum(), hits.sum()])

        loss = losses.mean().item()  # read once an epoch
        bad = (~losses.isfinite()).nonzero().flatten().tolist()
        if bad or not output.isfinite().all():
            sys.exit(f"{script}: error: the loss is no longer finite in epoch {epoch + 1}, step "
                     f"{(bad or [steps - 1])[0] + 1}: try a lower --lr")

        # the epoch's line and checkpoint
        top1, top5 = (correct / len(val_set)).tolist()
        speed, wait = steps * args.batch_size / seconds, data_wait / seconds
        epochs.append(dict(loss=loss, val_top1=top1, val_top5=top5, seconds=seconds,
                           images_per_second=speed, data_wait=wait))
        print(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  top-1 {top1:.2%}  "
              f"top-5 {top5:.2%}  {speed:,.0f} images/s  data wait {wait:.0%}", flush=True)
        if rank == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            options = {name: str(value) for name, value in vars(args).items() if name != "resume"}
            checkpoint = dict(parts=states, epochs=epochs, options=options)
            write(saved, lambda file: torch.save(checkpoint, file))

    # the record; its speed leaves out the first epoch of this run, which is the warm-up
    steady = epochs[resumed + 1:] or epochs[resumed:] or epochs[1:] or epochs
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    record = dict(
        script=script, options=vars(args), environment=dict(torch=torch.__version__, device=name),
        parameters=parameters, epochs=epochs, val_top1=epochs[-1]["val_top1"],
        images_per_second=statistics.median(each["images_per_second"] for each in steady),
        train_seconds=sum(each["seconds"] for each in steady), warmup_seconds=warmup_seconds,
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None)
    if rank == 0:
        write(saved.with_suffix(".json"), lambda file: file.write(
            json.dumps(record, indent=1, default=str).encode()))


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # an unreadable image, a full disk
        sys.exit(f"{Path(__file__).name}: error: {str(error).splitlines()[-1]}")
