# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "pillow",
#     "torch>=2.11",
#     "torchvision>=0.26",
#     "tqdm",
# ]
# ///
"""Read a data set as training would, without training, and time it.

    python loader.py --data_source DATASET

DATASET holds classes, train/<class>/*, or pairs, train/blurry/** and train/sharp/** (--pair).
Every epoch it prints images/s and MB/s; at the end it writes RESULT_DIR/<script name>.json.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from torchvision import datasets
from torchvision.transforms import v2 as transforms
from tqdm import tqdm

BACKGROUND = "white"  # what shows through a transparent picture
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
    """The options: the same, with the same defaults, in every loader."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    def add(name, **details):  # --batch_size, spelled --batch-size too
        parser.add_argument(name, *{name.replace("_", "-")} - {name}, **details)

    # data
    places = [folder / "data" / "photos" for folder in Path(__file__).resolve().parents]
    photos = next((place for place in places if place.is_dir()), places[1])
    add("--data_source", type=Path, default=photos, help="folder of classes or pairs, by split")
    add("--split", choices=("train", "test"), default="train",
        help="train: new order, random crops and flips; test: in order, the centre")
    add("--pair", nargs=2, default=["blurry", "sharp"], help="the two folders of pairs")
    add("--samples", type=at_least(1), help="read only so many, drawn by the seed; None: all")

    # work
    add("--batch_size", type=at_least(1), default=64, help="samples a step")
    add("--num_workers", type=at_least(0), default=min(16, CORES), help="that decode")
    add("--resize", type=at_least(0), default=256, help="pixels of the smaller edge; 0: as it is")
    add("--crop", type=at_least(1), default=224, help="pixels a side of what is cut out then")

    # length
    add("--epochs", type=at_least(1), default=3, help="passes; the first one warms up")
    add("--cold", action="store_true", help="before each epoch drop the files from the page cache")
    add("--seed", type=int, default=0, help="of order, crops and flips")

    # files
    add("--result_dir", type=Path, default=Path("runs"), help="where the record goes")
    return parser


def is_picture(path):
    """Whether the name is a picture's; those that begin with ._ are a file system's notes."""
    name = os.path.basename(path).lower()
    return name.endswith(datasets.folder.IMG_EXTENSIONS) and not name.startswith("._")


def load_image(file, name):
    """An RGB picture, upright by its EXIF orientation, 16 bits scaled to 8, transparency filled.

    `file` is a path or a binary file. Raises OSError with `name`.
    """
    try:
        with Image.open(file) as image:
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):
                image = image.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, BACKGROUND), image)
            return image.convert("RGB")
    except Exception as error:
        raise OSError(f"cannot read the picture {name}: {error}") from None


class Pictures(Dataset):
    """Samples of a folder: (picture, label) of train/<class>/*, or the two pictures of a pair.

    Of a class, `transform` gets the picture; of a pair both at once, so that the same is done to
    both. `samples` holds (path, label) or (path, path), as torchvision's ImageFolder does;
    `classes` is None for pairs. Raises OSError where there are no pictures or partners.
    """

    def __init__(self, root, transform=None, pair=("blurry", "sharp"), least=1):
        self.root, self.transform, self.least = root, transform, least
        self.classes, self.pair = None, list(pair)
        folders = [os.path.join(root, name) for name in pair]
        if all(os.path.isdir(folder) for folder in folders):
            names = [{os.path.relpath(os.path.join(where, name), folder)
                      for where, _, files in os.walk(folder, followlinks=True) for name in files
                      if is_picture(name)} for folder in folders]
            for name in sorted(names[0] ^ names[1]):
                there, missing = folders if name in names[0] else folders[::-1]
                raise OSError(f"{os.path.join(missing, name)} is missing, the partner of "
                              f"{os.path.join(there, name)}")
            self.samples = [tuple(os.path.join(folder, name) for folder in folders)
                            for name in sorted(names[0])]
        else:
            found = datasets.ImageFolder(root, is_valid_file=is_picture)
            self.samples, self.classes, self.pair = found.samples, found.classes, None
        if not self.samples:
            raise OSError(f"no pictures in {' or '.join(folders)}")

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        *names, label = self.samples[i] if self.classes else (*self.samples[i], None)
        pictures = [self.read(name) for name in names]
        self.check_sizes(names, [picture.size for picture in pictures])
        if not self.classes:
            return tuple(self.transform(*pictures)) if self.transform else tuple(pictures)
        return (self.transform(*pictures) if self.transform else pictures[0]), label

    def check_sizes(self, names, sizes):
        """Raises OSError if (width, height) differ in a sample, or if an edge is below `least`."""
        if sizes[0] != sizes[-1]:
            raise OSError(f"the sizes of a pair differ: {self.title(names[0])} has {sizes[0]}, "
                          f"{self.title(names[1])} {sizes[1]}")
        if min(sizes[0]) < self.least:
            raise OSError(f"{self.title(names[0])} has {sizes[0]} pixels, less than --crop: "
                          "--resize makes the smaller edge as long as you say")

    def title(self, name):
        """What a reader calls this picture."""
        return name

    def read(self, name):
        """The picture of this name, decoded."""
        return load_image(name, name)

    def size(self, name):
        """How many bytes the encoded picture has."""
        return os.path.getsize(name)

    def files(self):
        """The files that an epoch reads."""
        return [name for sample in self.samples for name in sample if isinstance(name, str)]


def open_pictures(parser, args, transform):
    """The samples of --data_source's --split; where there are none, exit 2."""
    names = {"train": ("train", "training"), "test": ("test", "testing", "val")}[args.split]
    root = next((args.data_source / name for name in names if (args.data_source / name).is_dir()),
                args.data_source / names[0])
    try:
        return Pictures(root, transform, args.pair, 1 if args.resize else args.crop)
    except OSError as error:
        parser.error(f"--data_source {args.data_source}: {error} (it has to hold "
                     f"{' or '.join(names)}/<class>/*, or there /{args.pair[0]}/** and "
                     f"/{args.pair[1]}/**; `python make_dataset.py photos` makes the default)")


def drop_from_cache(paths):
    """Has the kernel forget the pages of these files, and of no others; needs no rights."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)  # what is not on the disk yet cannot be forgotten
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def environment(device):
    """The machine and the versions that a record was made with."""
    def ask(command):
        return os.popen(f"{command} 2>/dev/null | head -n 1").read().strip()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return dict(python=sys.version.split()[0], torch=torch.__version__, cuda=torch.version.cuda,
                gpu=gpu, gpus=torch.cuda.device_count(),
                driver=ask("nvidia-smi --query-gpu=driver_version --format=csv,noheader"),
                cpu=ask("sed -n 's/^model name.*: //p' /proc/cpuinfo"), cores=CORES)


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
    script = Path(__file__).stem
    parser = build_parser()
    args = parser.parse_args()
    if 0 < args.resize < args.crop:
        parser.error(f"--crop {args.crop} is larger than --resize {args.resize}")

    # where a batch has to arrive
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"

    # ------------------------------------------------------------------------------------ data
    steps = [transforms.Resize(args.resize)] if args.resize else []
    if args.split == "train":
        steps += [transforms.RandomCrop(args.crop), transforms.RandomHorizontalFlip()]
    else:
        steps += [transforms.CenterCrop(args.crop)]
    transform = transforms.Compose([*steps, transforms.PILToTensor()])

    # what it reads from
    dataset = open_pictures(parser, args, transform)

    # the samples that are read
    if args.samples and args.samples < len(dataset):
        some = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(args.seed))
        dataset.samples = [dataset.samples[i] for i in some[:args.samples].sort().values.tolist()]
    pictures = [name for sample in dataset.samples for name in sample if isinstance(name, str)]
    size = sum(dataset.size(name) for name in pictures)

    # epoch e's order is the torch.randperm of a generator seeded with seed + e
    sampler = SequentialSampler(dataset)
    order = torch.Generator()
    if args.split == "train":
        sampler = RandomSampler(dataset, generator=order)

    # uint8 batches: two of (N, 3, crop, crop) for pairs, one and its (N,) labels for classes
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=args.num_workers,
                        persistent_workers=args.num_workers > 0 and not args.cold,
                        pin_memory=on_gpu)

    # --------------------------------------------------------------------------------- reading
    args.result_dir.mkdir(parents=True, exist_ok=True)
    print(f"{script}: {len(dataset):,} samples, {size / 1e6:,.1f} MB, to {device}", flush=True)
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    epochs = []
    for epoch in range(args.epochs):
        torch.manual_seed(args.seed + epoch)
        order.manual_seed(args.seed + epoch)
        if args.cold:
            drop_from_cache(dataset.files())
        batches = iter(loader)  # starts the workers, which are no part of reading
        synchronize()
        start = time.perf_counter()
        for first, second in tqdm(batches, f"epoch {epoch + 1}", total=len(loader), leave=False,
                                  disable=None):
            # where a training step would begin
            first = first.to(device, non_blocking=True)
            second = second.to(device, non_blocking=True)
        synchronize()

        # the epoch's line
        seconds = time.perf_counter() - start
        epochs.append(dict(seconds=seconds, images_per_second=len(pictures) / seconds,
                           megabytes_per_second=size / 1e6 / seconds))
        print(f"epoch {epoch + 1}/{args.epochs}  {len(pictures) / seconds:,.0f} images/s  "
              f"{size / 1e6 / seconds:,.1f} MB/s  {seconds:.2f} s", flush=True)

    # the record: the medians of the epochs after the first, which warms up
    steady = epochs[1:] or epochs
    record = dict(script=script, options=vars(args), environment=environment(device),
                  samples=len(dataset), bytes=size, epochs=epochs)
    for name in epochs[0]:
        record[name] = statistics.median(each[name] for each in steady)
    text = json.dumps(record, indent=1, default=str)
    replace(args.result_dir / f"{script}.json", f"{text}\n".encode())


if __name__ == "__main__":
    try:
        main()
        sys.exit()
    except OSError as error:  # a picture that cannot be read, a full disk: one line says which
        failure = f"{Path(__file__).name}: error: {str(error).splitlines()[-1]}"
    except KeyboardInterrupt:
        failure = f"{Path(__file__).name}: stopped"

    # workers and threads in the midst of their work have nothing to add
    print(failure, file=sys.stderr, flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(1)
