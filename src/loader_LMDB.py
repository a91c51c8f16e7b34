# /// script
# requires-python = ">=3.10"
# dependencies = [
#     # new #
#     # the one file
#     "lmdb",
#
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

# new #
# one memory-mapped file in place of many
import fcntl
import io
import mmap
import numpy as np
try:
    import lmdb
except ImportError as error:
    sys.exit(f"{Path(__file__).name}: error: {error}: pip install lmdb")

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

    # new #
    # where the one file lies
    add("--lmdb", type=Path, help="built on first use; None: DATA_SOURCE_<split>.lmdb")

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


# new #
# in the workers of a build: each sample's files, if they can be decoded
class EncodedFiles(Dataset):
    """Of sample i of `names`, a list of lists of paths: (the files' bytes, None) or ([], error)."""
    def __init__(self, names):
        self.names = names
    def __len__(self):
        return len(self.names)
    def __getitem__(self, i):
        try:
            files = [Path(name).read_bytes() for name in self.names[i]]
            for name, file in zip(self.names[i], files):
                load_image(io.BytesIO(file), name)
            return files, None
        except OSError as error:
            return [], str(error)

# new #
# many files become one; its last record is the index, without which it is not whole
def build_lmdb(pictures, path, workers):
    """Copies the files of `pictures` into an LMDB file; returns how many samples it left out.
    b"<sample>.<0 or 1>" is an encoded file, b"index" JSON: format, count, classes, pair and, of
    each sample, label, names, sizes and places in the file. It is built as PATH.part and moved
    into place; another process that wants it waits. What cannot be decoded is named on stderr.
    Raises OSError.
    """
    names = [[name for name in sample if isinstance(name, str)] for sample in pictures.samples]
    index = dict(format=1, count=0, classes=pictures.classes, pair=pictures.pair, samples=[],
                 root=os.path.basename(pictures.root))
    def is_mine():
        return os.path.exists(part.name) and os.path.samefile(part.name, part.fileno())
    while True:
        part = open(f"{path}.part", "ab")
        fcntl.flock(part, fcntl.LOCK_EX)  # the lock of a killed process is gone with it
        if is_mine() or os.path.exists(path):
            break  # else another has moved or removed it meanwhile
        part.close()
    try:
        if os.path.exists(path):
            return 0
        part.truncate(0)
        store = lmdb.open(part.name, subdir=False, lock=False, sync=False, map_size=2 ** 20)
        mapped = None
        def put(key, value):
            """Appends a record; returns where in the file it lies, 0 if it shares a page."""
            nonlocal mapped
            try:
                with store.begin(write=True) as transaction:
                    transaction.put(key.encode(), value)
            except lmdb.MapFullError:
                store.set_mapsize(2 * store.info()["map_size"])
                mapped = None
                return put(key, value)
            if not mapped:
                maps = open("/proc/self/maps") if os.path.exists("/proc/self/maps") else []
                mapped = next((int(line.split("-")[0], 16) for line in maps
                               if line.split()[4] == str(os.fstat(part.fileno()).st_ino)), 0)
            with store.begin(buffers=True) as transaction:
                found = np.frombuffer(transaction.get(key.encode()), np.uint8).ctypes.data
            return max(found - mapped, 0) if mapped and len(value) > mmap.PAGESIZE else 0
        encoded = DataLoader(EncodedFiles(names), None, num_workers=workers)
        for i, (files, error) in enumerate(tqdm(encoded, f"building {path}", disable=None)):
            if error:
                tqdm.write(f"left out: {error}", sys.stderr)
                continue
            places = [put(f"{index['count']}.{k}", file) for k, file in enumerate(files)]
            label = pictures.samples[i][1] if pictures.classes else None
            index["samples"].append((label, [os.path.relpath(name, pictures.root) for name in
                                             names[i]], [len(file) for file in files], places))
            index["count"] += 1
        if not index["count"]:
            raise OSError(f"{pictures.root} holds no picture that can be read")
        put("index", json.dumps(index).encode())
        store.sync(True)
        store.close()
        os.replace(part.name, path)
    except lmdb.Error as error:
        raise OSError(f"cannot build {path}: {error}; is the disk full?") from None
    finally:
        if is_mine():
            os.unlink(part.name)
        part.close()
    return len(names) - index["count"]

# new #
# it reads one file where Pictures reads many
class ImageFolderLMDB(Pictures):
    """torchvision's ImageFolder over an LMDB file: samples, targets, classes, class_to_idx.
    Opened read-only, by each process when it first reads. `samples` holds (key, label) or
    (key, key). Records are bytes and JSON: nothing in them runs. Raises OSError with file and key.
    """
    stores = {}  # path: (process, environment, file); LMDB opens one only once in a process
    def __init__(self, path, transform=None, least=1):
        self.path, self.transform, self.least = str(path), transform, least
        try:
            index = json.loads(self.get("index"))
            if index["format"] != 1:
                raise ValueError(f"format {index['format']}, this script reads 1")
            self.classes, self.pair, self.root = index["classes"], index["pair"], index["root"]
            self.index = index["samples"]
            if index["count"] != len(self.index) or any(len(each) != 4 for each in self.index):
                raise ValueError("count")
        except (LookupError, TypeError, ValueError) as error:
            raise OSError(f"{path} is no whole file of this script ({error!r}): remove it, and "
                          "it is built again") from None
        self.samples = [(f"{i}.0", label if self.classes else f"{i}.1")
                        for i, (label, *_) in enumerate(self.index)]
        self.targets = [label for label, *_ in self.index]
        for key, label in self.samples if self.classes else []:
            if label not in range(len(self.classes)):
                raise OSError(f"{path}: the label of record {key} is {label}, and there are "
                              f"{len(self.classes)} classes: remove it, and it is built again")
        self.class_to_idx = {name: i for i, name in enumerate(self.classes or [])}
    def opened(self):
        """This process's (environment, file). Raises lmdb.Error."""
        process, store, file = self.stores.pop(self.path, (None, None, None))
        if store and process != os.getpid():
            store.close()  # a forked worker's copy of its parent's
        if process != os.getpid():
            if not os.path.getsize(self.path):
                raise lmdb.InvalidError(f"{self.path} is empty")
            store = lmdb.open(self.path, subdir=False, readonly=True, create=False, lock=False,
                              readahead=False)
            if os.path.getsize(self.path) < (
                    store.info()["last_pgno"] + 1) * store.stat()["psize"]:
                store.close()  # reading on would be a SIGBUS
                raise lmdb.InvalidError(f"{self.path} is cut short")
            file = open(self.path, "rb")
        self.stores[self.path] = os.getpid(), store, file
        return store, file
    def get(self, key, place=0, size=0):
        """The bytes of a record. Its place lets the kernel fetch it in one go, and nothing else."""
        try:
            store, file = self.opened()
            if place:
                os.posix_fadvise(file.fileno(), place, size, os.POSIX_FADV_WILLNEED)
            with store.begin() as transaction:
                record = transaction.get(key.encode())
            if record is None:
                raise lmdb.InvalidError(f"{self.path} is incomplete: no record {key}")
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
            raise OSError(f"{error}: remove it, and it is built again") from None
        except lmdb.Error as error:
            raise OSError(f"cannot read {error}") from None
        return record
    def of(self, key):
        """(name, size, place) of a record."""
        sample, k = map(int, key.split("."))
        return [each[k] for each in self.index[sample][1:]]
    def title(self, key):
        return f"{self.of(key)[0]}, record {key} of {self.path},"
    def read(self, key):
        _, size, place = self.of(key)
        return load_image(io.BytesIO(self.get(key, place, size)), self.title(key))
    def size(self, key):
        return self.of(key)[1]
    def files(self):
        process, store, _ = self.stores.pop(self.path, (None, None, None))
        if process == os.getpid():
            store.close()  # --cold cannot drop what is mapped; the next read opens it again
        return [self.path]

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
    # new #
    # the first run builds the file; later ones need no folder
    path = args.lmdb or Path(f"{args.data_source.resolve()}_{args.split}.lmdb")
    if not path.exists():
        left_out = build_lmdb(open_pictures(parser, args, transform), path, args.num_workers)
        if left_out:
            sys.exit(f"{script}: error: built {path} without {left_out} samples that cannot be "
                     "read (named above): run it again to go on without them")
    dataset = ImageFolderLMDB(path, transform, 1 if args.resize else args.crop)
    is_train = dataset.root in ("train", "training")
    if dataset.pair not in (None, args.pair) or is_train != (args.split == "train"):
        parser.error(f"--pair, --split: {path} holds {dataset.pair or dataset.root}: name another "
                     "--lmdb")

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
