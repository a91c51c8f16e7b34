# /// script
# requires-python = ">=3.10"
# dependencies = [
#     # new #
#     # decoding on the GPU or in threads
#     "nvidia-dali-cuda120",
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
# decoding, resizing and cropping in C++ threads or on the GPU
import collections
import ctypes
import numpy as np
try:
    from nvidia.dali import fn, math, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
except ImportError as error:
    sys.exit(f"{Path(__file__).name}: error: {error}: pip install nvidia-dali-cuda120")

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
    # where pictures are decoded
    add("--dali_device", choices=("gpu", "cpu"), default="gpu", help="cpu where there is no GPU")

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
# the encoded files of pairs, sample by sample: change __call__ for a layout of your own
class ExternalInputIterator:
    """What DALI calls for each sample: the bytes of its files, and its number.
    `order(epoch)` lists an epoch's samples, of which this is one of `shards` equal parts. Each
    comes once; what the last batch lacks are the first ones again, for DALILoader to cut off.
    """
    def __init__(self, samples, batch_size, order, shard=0, shards=1):
        self.samples, self.batch_size, self.order = samples, batch_size, order
        self.shard, self.shards, self.epoch, self.indices = shard, shards, None, []
        self.steps = -(-len(samples) // (batch_size * shards))  # the same in every shard
        self.read = collections.deque(maxlen=8 * batch_size)
    def __call__(self, info):
        if info.epoch_idx != self.epoch:
            self.epoch = info.epoch_idx
            count, k, shards = len(self.samples), self.shard, self.shards
            self.indices = self.order(self.epoch)[count * k // shards:count * (k + 1) // shards]
        if info.iteration >= self.steps:
            raise StopIteration
        i = self.indices[info.idx_in_epoch % len(self.indices)]
        self.read.extend(self.samples[i])
        return *(np.fromfile(name, np.uint8) for name in self.samples[i]), np.array([i])

# new #
# the work of the transform, as a graph of DALI's operators
@pipeline_def
def pictures_pipeline(args, on_gpu, samples, numbers, in_memory, source, shard, shards):
    """Batches of pictures (crop, crop, 3), of their files' ends and sizes, of sample numbers."""
    if source:
        *encoded, number = fn.external_source(source, num_outputs=3, batch=False)
    else:  # what comes as a label is the sample's number; DALI shuffles their order once more
        encoded, number = fn.readers.file(
            files=[samples[i][0] for i in numbers], labels=numbers, name="reader",
            pad_last_batch=True, shuffle_after_epoch=args.split == "train",
            stick_to_shard=args.split == "test", shard_id=shard, num_shards=shards,
            dont_use_mmap=in_memory)
        encoded = [encoded]
    sizes = [fn.peek_image_shape(each, dtype=types.INT64)[:2] for each in encoded]
    # of one that claims more pixels than Pillow allows, or fewer than none, no more than one
    shapes = [fn.cast(math.max(1, size * (size[0] > 0) * (size[1] > 0) * (
        size[0] * size[1] <= 2 * Image.MAX_IMAGE_PIXELS)), dtype=types.INT32) for size in sizes]
    # torchvision's sizes: the larger edge rounded down, the centre rounded to even
    size = shapes[0]
    if args.resize:
        size = args.resize * size // math.min(size[0], size[1])
    room = size - args.crop
    corner, across = (room + (room // 2 & 1)) // 2, 0
    if args.split == "train":  # drawn once a sample: the pictures of a pair get the same
        corner = math.floor(fn.random.uniform(range=(0, 1), shape=[2]) * (room + 1))
        across = args.crop * fn.stack(np.int32(0), fn.random.coin_flip())
    # one step resizes, crops and mirrors: it reads the part of the full picture that is left
    scale = shapes[0] / fn.cast(size, dtype=types.FLOAT)
    start, end = (corner + across) * scale, (corner + args.crop - across) * scale
    if on_gpu:  # 3 of 4 on its JPEG engine, beside CUDA; all with libjpeg's smooth colours
        # the same bytes, but not decoded where the size is not to be had: that can crash
        known = [fn.reinterpret(each, shape=fn.cast(0 * size[:1] - 1, dtype=types.INT32))
                 for each, size in zip(encoded, sizes)]
        decoded = [fn.decoders.image(each, device="mixed", hw_decoder_load=0.75,
                                     jpeg_fancy_upsampling=True) for each in known]
    else:  # decodes that part alone, and what the resize needs around it
        low = fn.cast(math.max(math.floor(math.min(start, end) - scale - 1), 0), dtype=types.INT32)
        high = math.ceil(math.max(start, end) + scale + 1)
        high = math.min(fn.cast(high, dtype=types.INT32), shapes[0])
        decoded = [fn.decoders.image_slice(each, start=low, end=high, axes=[0, 1])
                   for each in encoded]
        start, end = start - low, end - low
    cut = [fn.resize(each, size=[args.crop, args.crop], roi_start=start, roi_end=end,
                     interp_type=types.INTERP_LINEAR, antialias=True) for each in decoded]
    ends = [fn.cat(each[:2], each[-2:]) for each in encoded]
    return *cut, *ends, *sizes, number

# new #
# what finds the file that DALI has not named, as it does not where it cannot even tell the size
@pipeline_def
def one_by_one(files, has_to_decode):
    """The pictures or sizes of files, in order."""
    encoded, _ = fn.readers.file(files=files)
    return fn.decoders.image(encoded) if has_to_decode else fn.peek_image_shape(encoded)

# new #
# a JPEG that was cut short lacks the last two of these, and the GPU's decoder does not mind
JPEG = torch.tensor([0xFF, 0xD8, 0xFF, 0xD9])

# new #
# it stands where DataLoader stood, and names the file that DALI cannot read
class DALILoader:
    """Yields what DataLoader yields: uint8 (N, 3, crop, crop) with (N,) labels, or two of them."""
    def __init__(self, dataset, args, sampler, generator):
        self.dataset, self.args, self.sampler, self.generator = dataset, args, sampler, generator
        self.on_gpu = args.dali_device == "gpu" and torch.cuda.is_available()
        # beside the GPU's decoder more threads hinder each other: on 16 cores 10 read more than 14
        self.threads = max(1, args.num_workers * (5 if self.on_gpu else 8) // 8)
        # two pipelines, of a thread and a batch at least: while one waits for the last pictures of
        # its batch, the other has work
        two = self.on_gpu and self.threads > 1 and len(dataset) > args.batch_size
        self.shards = 2 if two else 1
        self.parts = 1 if dataset.classes else 2
        self.labels = torch.tensor([k for _, k in dataset.samples] if dataset.classes else [])
        self.epoch, self.sources, self.iterators = 0, [], []
        if odd := [name for name in dataset.files()
                   if name.encode(errors="ignore") != os.fsencode(name)]:
            raise OSError(f"DALI reads no file whose name is not UTF-8: {odd[0]}")
    def order(self, epoch):
        """An epoch's samples, shard by shard: joined() brings back the sampler's order."""
        self.generator.manual_seed(self.args.seed + epoch)
        order, size = list(self.sampler), self.args.batch_size
        ends = [len(order) * k // self.shards for k in range(self.shards + 1)]
        # the places of the shards' batches in what is returned, by turns as in joined()
        turns = [range(start, end)[i:i + size] for i in range(0, len(order), size)
                 for start, end in zip(ends, ends[1:])]
        turns.sort(key=lambda turn: len(turn) < size)  # less than a batch comes last
        return [i for _, i in sorted(zip([place for turn in turns for place in turn], order))]
    def in_memory(self):
        """Whether the page cache holds the middle of up to 64 files, by mincore(2)."""
        files, found = self.dataset.files(), ctypes.c_ubyte()
        try:
            for name in files[::-(-len(files) // 64)]:
                status = os.stat(name)
                if status.st_uid != os.geteuid() and not os.access(name, os.W_OK):
                    return False  # of such files it says yes to all
                middle = status.st_size // 2
                middle -= middle % os.sysconf("SC_PAGE_SIZE")
                if status.st_size:
                    page = np.memmap(name, np.uint8, "c", middle, 1)
                    failed = ctypes.CDLL(None).mincore(
                        ctypes.c_void_p(page.ctypes.data), ctypes.c_size_t(1), ctypes.byref(found))
                    if failed or not found.value & 1:
                        return False
        except (OSError, ValueError):  # a file that is gone or cannot be mapped
            return False
        return True
    def build(self, first):
        """A pipeline and the iterator over it for each shard; their first epoch is `first`."""
        # read() takes less of the cores, but one file at a time; of files that are mapped into
        # memory all threads wait for the disk at once
        in_memory = bool(self.dataset.classes) and self.in_memory()
        def order(epoch):
            return self.order(first + epoch)
        names = [f"{what} {k}" for what in ("picture", "ends", "shape") for k in range(self.parts)]
        self.sources, self.iterators, source = [], [], None
        for k in range(self.shards):
            if not self.dataset.classes:
                source = ExternalInputIterator(
                    self.dataset.samples, self.args.batch_size, order, k, self.shards)
                self.sources.append(source)
            pipeline = pictures_pipeline(
                self.args, self.on_gpu, self.dataset.samples, order(0), in_memory, source, k,
                self.shards, seed=(self.args.seed + first) * self.shards + k,
                batch_size=self.args.batch_size, prefetch_queue_depth=3,
                num_threads=self.threads // self.shards, device_id=0 if self.on_gpu else None)
            self.iterators.append(DALIGenericIterator(
                [pipeline], [*names, "number"], reader_name=None if self.sources else "reader",
                auto_reset=True, last_batch_policy=LastBatchPolicy.PARTIAL,
                prepare_first_batch=False))
    def __len__(self):
        return -(-len(self.dataset) // self.args.batch_size)
    def __iter__(self):
        # a pipeline reads three batches into the next epoch, which --cold is to find on the disk;
        # on the GPU they stay, since a new one would have to warm up
        if not self.iterators or self.args.cold and not self.on_gpu:
            self.build(self.epoch)
        self.epoch += 1
        return self.read()
    def joined(self):
        """The shards' batches by turns; what is less than a batch comes last, put together."""
        size, rest = self.args.batch_size, []
        for step, batches in enumerate(zip(*self.iterators, strict=True)):
            for k, (batch,) in enumerate(batches):
                if self.sources:  # the file reader cuts its own
                    left = len(self.sources[k].indices) - step * size
                    batch = {name: batch[name][:left] for name in batch}
                if len(batch["number"]) == size:
                    yield batch
                else:
                    rest.append(batch)
        if rest:
            rest = {name: torch.cat([batch[name] for batch in rest]) for name in rest[0]}
            for i in range(0, len(rest["number"]), size):
                yield {name: rest[name][i:i + size] for name in rest}
    def read(self):
        try:
            for batch in self.joined():
                number = batch["number"].flatten().long()
                pictures, ends, sizes = (
                    [batch[f"{what} {k}"] for k in range(self.parts)]
                    for what in ("picture", "ends", "shape"))
                self.check(number, torch.stack(ends), torch.stack(sizes))
                pictures = [each.permute(0, 3, 1, 2) for each in pictures]
                yield pictures[0], self.labels[number] if self.dataset.classes else pictures[1]
        except (RuntimeError, UnicodeDecodeError) as error:  # the latter of a name
            self.blame(str(error))
    def check(self, number, ends, sizes):
        """What DALI takes no offence at; the GPU's decoder, not even at half a JPEG."""
        odd = (sizes[0] != sizes[-1]) | (sizes < self.dataset.least).any(0)
        for i in odd.any(1).nonzero().flatten().tolist():
            shapes = [(width, height) for height, width in sizes[:, i].tolist()]
            self.dataset.check_sizes(self.dataset.samples[number[i]], shapes)
        for k, i in (sizes.prod(2) > 2 * Image.MAX_IMAGE_PIXELS).nonzero().tolist():
            name = self.dataset.samples[number[i]][k]
            load_image(name, name)
        jpeg, whole = ends[..., :2] == JPEG[:2], ends[..., 2:] == JPEG[2:]
        for k, i in (jpeg.all(2) & ~whole.all(2)).nonzero().tolist():  # or more behind it
            name = self.dataset.samples[number[i]][k]
            load_image(name, name)
    def blame(self, text):
        """Raises OSError naming the file; DALI names what it cannot decode, not what it cannot
        make out at all."""
        files = [name for source in self.sources for name in source.read] or self.dataset.files()
        named = [name for name in files if name in text]
        for name in named or files:
            try:
                with Image.open(name) as image:  # of very many, no more than the header
                    if named or self.sources or image.format != "JPEG":
                        load_image(name, name)
            except Exception:
                load_image(name, name)
        if not named:  # Pillow can read it; so which is it?
            alone = one_by_one(files, bool(self.sources), batch_size=1, num_threads=1,
                               device_id=None, prefetch_queue_depth=1)
            for name in files:
                try:
                    alone.run()
                except RuntimeError as error:
                    load_image(name, name)
                    named, text = [name], str(error)
                    break
        said = [line for line in text.splitlines() if line and "no longer valid" not in line]
        raise OSError(f"DALI cannot read {named or 'one of the pictures'}: {said[-1]}")

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
    # new #
    # DALI in place of DataLoader: --num_workers counts its threads, on the GPU five for eight
    loader = DALILoader(dataset, args, sampler, order)

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
