# /// script
# requires-python = ">=3.10"
# dependencies = [
#     # new #
#     # many files in one
#     "lmdb",
#
#     "pillow",
#     "torch>=2.11",
#     "torchvision>=0.26",
#     "tqdm",
# ]
# ///
"""Read a dataset as training would, without training, and time it.

    python loader.py --dataset DATASET

DATASET holds classes, train/<class>/*, or pairs, train/blurry/** and train/sharp/** (--pair).
Every epoch it prints images/s and MB/s; at the end it writes RESULT_DIR/<script name>.json.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

# new #
# LMDB keeps many files in one
import fcntl
import functools
import io
import lmdb

import torch
from PIL import Image, ImageOps
from torch.utils.data import Dataset, RandomSampler, SequentialSampler
from torchvision import datasets
from torchvision.transforms import v2 as transforms
from tqdm import tqdm

warnings.filterwarnings("ignore", module="PIL")  # these warnings name no file and are harmless


def at_least(least):
    """Return the type of an option that is a whole number, `least` or more."""

    def whole_number(text):
        if not text.isdecimal() or not least <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
        return int(text)

    return whole_number


def build_parser():
    """Return the parser of the options; every loader has these, with the same defaults."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    photos = Path(__file__).resolve().parent.parent / "data" / "photos"
    add = parser.add_argument

    # data
    add("--dataset", type=Path, default=photos, help="folder with train/ and val/ or test/")
    # new #
    # train_LMDB.py makes and reads the same files
    add("--lmdb", type=Path, help="folder of the LMDB files; None: the one that DATASET is in")

    add(
        "--split",
        choices=("train", "test"),
        default="train",
        help="train: new order, random crops and flips; test: fixed order, center crop",
    )
    add("--pair", nargs=2, default=["blurry", "sharp"], help="names of the two folders of pairs")
    add("--samples", type=at_least(1), help="read only this many samples, chosen by the seed")

    # work
    add("--batch_size", type=at_least(1), default=64, help="samples per batch")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--workers", type=at_least(0), default=min(16, cores), help="processes that decode")
    add("--resize", type=at_least(0), default=256, help="smaller edge in pixels; 0: no resize")
    add("--image_size", type=at_least(1), default=224, help="edge of the square crop in pixels")

    # length
    add("--epochs", type=at_least(1), default=3, help="passes; the first one is the warm-up")
    add("--cold", action="store_true", help="drop the files from the page cache before each epoch")
    add("--seed", type=at_least(0), default=0, help="sets order, crops and flips")

    # files
    add("--result_dir", type=Path, default=Path("runs"), help="folder for the record")
    return parser


def is_image(path):
    """Return whether the name is an image's, and not hidden. Raises OSError for a parent's link."""
    if path.count("/") > 40:
        raise OSError(f"{path}: over 40 folders deep: a link to a folder above it repeats images")
    *_, folder, name = path.lower().split("/")
    return name.endswith(datasets.folder.IMG_EXTENSIONS) and "." not in (name[0], folder[:1])


def load_image(file, name):
    """Return the image in RGB, turned by its EXIF. Raises OSError with `name`.

    `file` is a path or a binary file.
    """
    try:
        image = Image.open(file)
        assert image.mode[0] not in "IF", "more than 8 bits: resize_imagenet.py converts up to 16"
        assert max(image.size) < 100 * min(image.size), "over 100 times as long as wide"
        for key in "xmp", "XML:com.adobe.xmp":  # DALI turns images by EXIF only
            image.info.pop(key, None)
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise OSError(f"cannot read the image {name}: {error}") from None


class Images(Dataset):
    """A folder's samples: (image, label) of <class>/*, or the two images of a pair.

    `transform` gets both parts of a sample at once, so a pair gets one crop and one flip; a label
    passes through. `samples` holds (path, label) or (path, path), `parts` the number of images
    in each; `classes` is None for pairs. Raises OSError if there are no images or a partner is
    missing.
    """

    def __init__(self, root, transform=None, pair=("blurry", "sharp"), least=1):
        self.root, self.transform, self.least = root, transform, least
        folders = [os.path.join(root, name) for name in pair]
        if any(map(os.path.isdir, folders)):
            names = [
                {
                    os.path.relpath(path, folder)
                    for where, _, files in os.walk(folder, followlinks=True)
                    for path in (os.path.join(where, name) for name in files)
                    if is_image(path)
                }
                for folder in folders
            ]
            for name in sorted(names[0] ^ names[1]):
                missing = os.path.join(folders[name in names[0]], name)
                raise OSError(f"{missing} is missing, the other image of its pair is there")
            self.samples = [
                tuple(os.path.join(folder, name) for folder in folders) for name in sorted(names[0])
            ]
            self.classes, self.parts = None, 2
        else:
            found = datasets.ImageFolder(root, is_valid_file=is_image)
            self.samples, self.classes, self.parts = found.samples, found.classes, 1
        if not self.samples:
            raise OSError(f"no images in {' or '.join(folders)}")

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        names, label = self.samples[i][: self.parts], self.samples[i][self.parts :]
        images = [self.read(name) for name in names]
        self.check_sizes(names, [image.size for image in images])
        return self.transform(*images, *label) if self.transform else (*images, *label)

    def check_sizes(self, names, sizes):
        """Raise OSError if the (width, height) of a pair differ or an edge is below `least`."""
        if sizes[0] != sizes[-1]:
            raise OSError(
                f"the sizes of a pair differ: {names[0]} has {sizes[0]} pixels, "
                f"{names[1]} has {sizes[1]}"
            )
        if min(sizes[0]) < self.least:
            raise OSError(
                f"{names[0]} has {sizes[0]} pixels, less than --image_size: "
                "use --resize or a smaller --image_size"
            )

    def read(self, name):
        """Return the decoded image."""
        return load_image(name, name)

    def size(self, name):
        """Return the bytes of the encoded image."""
        return os.path.getsize(name)

    def files(self):
        """Return the paths of the files that an epoch reads."""
        return [name for sample in self.samples for name in sample[: self.parts]]


def open_images(parser, args, transform):
    """Return the Images of --dataset and --split; exit with status 2 if there are none."""
    names = ["train", "training"]
    if args.split == "test":
        names = ["val", "valid", "validation", "test", "testing"]
    root = next(
        (args.dataset / name for name in names if (args.dataset / name).is_dir()),
        args.dataset / names[0],
    )
    try:
        return Images(root, transform, args.pair, 1 if args.resize else args.image_size)
    except OSError as error:
        parser.error(
            f"--dataset {args.dataset}: {error}; it needs {names[0]}/<class>/* or "
            f"{names[0]}/{args.pair[0]}/** and {names[0]}/{args.pair[1]}/**; "
            f"names end in {' '.join(datasets.folder.IMG_EXTENSIONS)}; "
            "`python make_dataset.py photos` makes the default"
        )


# new #
# the index is written last, so a file without it is incomplete
def build_lmdb(path, names, index):
    """Copy the files `names` into a new LMDB file `path`. Raises OSError."""
    with open(f"{path}.part", "ab") as part:
        fcntl.flock(part, fcntl.LOCK_EX)  # waits for another process that builds it
        if os.path.exists(path):
            return
        part.truncate(0)  # remove what a killed process left
        # a limit that is enough, the file takes what it needs; sync=False: once, at the end
        most = 3 * sum(map(os.path.getsize, names)) + 2**28
        with lmdb.open(part.name, most, subdir=False, lock=False, sync=False) as store:
            for i, name in enumerate(tqdm(names, f"building {path}", disable=None)):
                with store.begin(write=True) as transaction:
                    transaction.put(b"%d" % i, Path(name).read_bytes())
            with store.begin(write=True) as transaction:
                transaction.put(b"index 2", index)
            store.sync(True)
        os.replace(part.name, path)


# new #
# each process opens the file when it first reads
@functools.cache
def open_lmdb(path):
    """Return a transaction that reads the LMDB file `path`. Raises OSError."""
    try:
        store = lmdb.open(path, subdir=False, readonly=True, create=False, lock=False)
        if os.path.getsize(path) < (store.info()["last_pgno"] + 1) * store.stat()["psize"]:
            raise lmdb.Error("it is cut short")  # reading on would be a crash
        return store.begin()
    except lmdb.Error as error:
        raise OSError(f"{path}: {error}; if damaged, remove it to build it again") from None


# new #
# a forked worker has to open it again
os.register_at_fork(after_in_child=open_lmdb.cache_clear)


# new #
# names, sizes and times show whether the file was made from these images
def match_lmdb(path, images):
    """Build the LMDB file `path` if there is none. Raises OSError if it is not of `images`."""
    names = images.files()
    files = [
        [os.path.relpath(name, images.root), os.path.getsize(name), os.stat(name).st_mtime_ns]
        for name in names
    ]
    index = json.dumps({"classes": images.classes, "files": files}).encode()
    if not os.path.exists(path):
        try:
            build_lmdb(path, names, index)
        except (OSError, lmdb.Error) as error:
            raise OSError(f"cannot build {path}: {error}; --lmdb names another folder") from None
    if open_lmdb(path).get(b"index 2") != index:
        raise OSError(f"{path} holds other files than {images.root}: remove it to build it again")


# new #
# needs only the LMDB file; it holds encoded images and JSON, and no pickles, which can run code
class ImageFolderLMDB(Images):
    """Images from an LMDB file, with ImageFolder's samples and classes. Raises OSError."""

    # new #
    # the index tells what ImageFolder finds in the folders
    def __init__(self, path, transform=None, least=1):
        self.path, self.transform, self.least = str(path), transform, least
        try:
            index = json.loads(open_lmdb(self.path).get(b"index 2") or "{}")
            self.classes, self.parts = index["classes"], 1 if index["classes"] else 2
            self.class_to_idx = {name: i for i, name in enumerate(self.classes or ())}
            self.records = {name: (i, size) for i, (name, size, _) in enumerate(index["files"])}
            names = [*self.records]
            self.samples = [*zip(names[::2], names[1::2])]
            if self.parts == 1:
                self.samples = [(name, self.class_to_idx[Path(name).parts[0]]) for name in names]
        except (LookupError, TypeError, ValueError) as error:
            raise OSError(f"{path} has no good index ({error!r}): remove it to build it again")

    # new #
    # an image is a record, named by the number of its file in the index
    def read(self, name):
        record = open_lmdb(self.path).get(b"%d" % self.records[name][0])
        return load_image(io.BytesIO(record), f"{name} in {self.path}")

    # new #
    # sizes are those of the files at the time of the build
    def size(self, name):
        return self.records[name][1]

    # new #
    # closes the file, too: mapped pages cannot be dropped from the page cache
    def files(self):
        open_lmdb.cache_clear()
        return [self.path]


def drop_from_cache(paths):
    """Drop the pages of these files, and of no others, from the page cache; needs no root."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)  # the kernel keeps pages that are not on the disk yet
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def main():
    # --------------------------------------------------------------------------------- options
    script = Path(__file__).stem
    parser = build_parser()
    args = parser.parse_args()
    if 0 < args.resize < args.image_size:
        parser.error(f"--image_size {args.image_size} is larger than --resize {args.resize}")

    # batches are copied to the GPU, as in training
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None

    # ------------------------------------------------------------------------------------ data
    steps = [transforms.Resize(args.resize)] if args.resize else []
    if args.split == "train":
        steps += [transforms.RandomCrop(args.image_size), transforms.RandomHorizontalFlip()]
    else:
        steps += [transforms.CenterCrop(args.image_size)]
    transform = transforms.Compose([*steps, transforms.PILToTensor()])

    # where samples come from
    # new #
    # a slow disk reads one file faster than many; later runs need no folder
    home = args.lmdb or args.dataset.resolve().parent
    path = home / f"{args.dataset.resolve().name}_{args.split}.lmdb"
    if args.dataset.exists() or not path.exists():
        match_lmdb(str(path), open_images(parser, args, transform))
    dataset = ImageFolderLMDB(path, transform, 1 if args.resize else args.image_size)

    # the samples that are read
    if args.samples and args.samples < len(dataset):
        some = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(args.seed))
        dataset.samples = [dataset.samples[i] for i in some[: args.samples].sort().values.tolist()]
    images = [name for sample in dataset.samples for name in sample[: dataset.parts]]
    size = sum(dataset.size(name) for name in images)

    # the order of epoch e is torch.randperm with a generator seeded with seed * 10,000 + e
    order = torch.Generator()
    sampler = SequentialSampler(dataset)
    if args.split == "train":
        sampler = RandomSampler(dataset, generator=order)

    # uint8 batches: (N, 3, size, size) with (N,) labels, or two of (N, 3, size, size) for pairs
    loader = torch.utils.data.DataLoader(
        dataset,
        args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        persistent_workers=args.workers > 0 and not args.cold,
        pin_memory=on_gpu,
    )

    # --------------------------------------------------------------------------------- reading
    args.result_dir.mkdir(parents=True, exist_ok=True)
    print(f"{script}: {len(dataset):,} samples, {size / 1e6:,.1f} MB, to {device}", flush=True)
    epochs = []
    for epoch in range(args.epochs):
        torch.manual_seed(args.seed * 10_000 + epoch)  # no other epoch and no other --seed has it
        order.manual_seed(args.seed * 10_000 + epoch)
        if args.cold:
            drop_from_cache(dataset.files())
        synchronize()
        start, part = time.perf_counter(), 1.0
        for step, (first, second) in enumerate(
            tqdm(loader, f"epoch {epoch + 1}", leave=False, disable=None)
        ):
            # workers take seconds to start: the clock does when each of them has sent a batch
            if step == args.workers and step < len(loader) // 4:
                start, part = time.perf_counter(), 1 - step / len(loader)

            # a training step would begin here
            first = first.to(device, non_blocking=True)
            second = second.to(device, non_blocking=True)
            if step >= len(loader) - 1:  # the end of the workers is not timed
                synchronize()
                seconds = (time.perf_counter() - start) / part

        # the epoch's line
        epochs.append(
            dict(
                seconds=seconds,
                images_per_second=len(images) / seconds,
                megabytes_per_second=size / 1e6 / seconds,
            )
        )
        print(
            f"epoch {epoch + 1}/{args.epochs}  {len(images) / seconds:,.0f} images/s  "
            f"{size / 1e6 / seconds:,.1f} MB/s  {seconds:.2f} s",
            flush=True,
        )

    # the record: medians of the epochs after the warm-up
    environment = dict(
        torch=torch.__version__, device=torch.cuda.get_device_name() if on_gpu else "cpu"
    )
    record = dict(
        script=script,
        options=vars(args),
        environment=environment,
        samples=len(dataset),
        bytes=size,
        epochs=epochs,
    )
    for name in epochs[0]:
        record[name] = statistics.median(each[name] for each in epochs[1:] or epochs)
    path = args.result_dir / f"{script}.json"
    path.with_suffix(".part").write_text(json.dumps(record, indent=1, default=str) + "\n")
    os.replace(path.with_suffix(".part"), path)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # a worker's error ends with the line that names the image
        sys.exit(f"{Path(__file__).name}: error: {str(error).splitlines()[-1]}")
    except KeyboardInterrupt:
        sys.exit(f"{Path(__file__).name}: stopped")
