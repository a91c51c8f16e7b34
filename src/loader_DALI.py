# /// script
# requires-python = ">=3.10"
# dependencies = [
#     # new #
#     # DALI reads and decodes
#     "nvidia-dali-cuda120",
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

import torch
from PIL import Image, ImageOps
from torch.utils.data import Dataset, RandomSampler, SequentialSampler
from torchvision import datasets
from torchvision.transforms import v2 as transforms
from tqdm import tqdm

# new #
# DALI decodes, resizes and crops on the GPU or in C++ threads
import itertools
import numpy as np
from nvidia.dali import fn, math, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

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
    add(
        "--split",
        choices=("train", "test"),
        default="train",
        help="train: new order, random crops and flips; test: fixed order, center crop",
    )
    add("--pair", nargs=2, default=["blurry", "sharp"], help="names of the two folders of pairs")
    add("--samples", type=at_least(1), help="read only this many samples, chosen by the seed")

    # new #
    # where DALI decodes
    add("--dali_device", choices=("gpu", "cpu"), default="gpu", help="what decodes; no GPU: cpu")

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


def drop_from_cache(paths):
    """Drop the pages of these files, and of no others, from the page cache; needs no root."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)  # the kernel keeps pages that are not on the disk yet
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


# new #
# DALI gets the files of pairs from here; change __iter__ for a layout of your own
class ExternalInputIterator:
    """Yield batches for pipeline `shard` of `shards`: files, second files of pairs, numbers.
    A file is an array of its bytes. `order` lists the samples of an epoch. The last batches repeat
    samples, so that all pipelines have equally many full batches; DALIGenericIterator drops these.
    Raises OSError with a file that cannot be opened.
    """

    # new #
    # each pipeline has an iterator of its own
    def __init__(self, samples, order, batch_size, shard=0, shards=1):
        self.samples, self.order, self.batch_size = samples, order, batch_size
        self.shard, self.shards = shard, shards

    # new #
    # an epoch: every pipeline takes one batch of each step
    def __iter__(self):
        steps = -(-len(self.order) // (self.batch_size * self.shards))
        numbers = np.resize(self.order, (steps, self.shards, self.batch_size))
        for batch in numbers[:, self.shard]:
            files = zip(*(self.samples[i] for i in batch))
            yield (
                *([np.fromfile(name, np.uint8) for name in names] for names in files),
                batch[:, np.newaxis],
            )


# new #
# does what the transform in main() does: if you change that, change this too
@pipeline_def
def image_pipeline(args, on_gpu, source, by_reader):
    """Return images (size, size, 3), the (parts, 2) heights and widths, and sample numbers."""
    if by_reader:  # the label is the sample's number, so that errors can name the file
        encoded, number = fn.readers.file(
            files=[source.samples[i][0] for i in source.order],
            labels=source.order,
            name="reader",
            shard_id=source.shard,
            num_shards=source.shards,
            pad_last_batch=True,
            stick_to_shard=args.split == "test",
            shuffle_after_epoch=args.split == "train",
            dont_use_mmap=not args.cold,  # read() is faster than mmap for files in memory
        )
        encoded = [encoded]
    else:
        parts = len(source.samples[0])
        *encoded, number = fn.external_source(source, num_outputs=parts + 1, cycle="raise")
    shapes = [fn.peek_image_shape(each)[:2] for each in encoded]
    # as in torchvision: Resize rounds down, CenterCrop rounds a half to the even pixel
    size = shapes[0]
    if args.resize:
        size = args.resize * size // math.min(size[0], size[1])
    room = size - args.image_size
    corner, flip = (room + (room // 2 & 1)) // 2, 0
    if args.split == "train":  # one draw a sample, so a pair gets one crop and one flip
        corner = math.floor(fn.random.uniform(range=(0, 1), shape=[2]) * (room + 1))
        flip = args.image_size * fn.stack(np.int32(0), fn.random.coin_flip())
    # fn.resize crops and flips too: a region whose end is left of its start is flipped
    scale = shapes[0] / fn.cast(size, dtype=types.FLOAT)
    start, end = (corner + flip) * scale, (corner + args.image_size - flip) * scale
    # a decoder can crash on a file that is no image: peek_image_shape has to fail before that
    # DALI shows some PGM, PPM and TIFF wrong: a file that begins with P, I or M gets an error;
    # on a GPU it shows PNGs (137) of less than 8 bits wrong, too
    is_other = [
        (each[:1] > 72) & (each[:1] < 82) | (each[:1] == 137) & (each[24:25] < 8 * on_gpu)
        for each in encoded
    ]
    keep = [0 * shape[:1] - 1 + other for shape, other in zip(shapes, is_other)]  # -1: no change
    encoded = [
        fn.reinterpret(each, shape=fn.cast(shape, dtype=types.INT32))
        for each, shape in zip(encoded, keep)
    ]
    # the GPU decodes 3 of 4 images on its JPEG engine and the others with CUDA
    options = dict(device="mixed", hw_decoder_load=0.75) if on_gpu else {}
    decoded = [fn.decoders.image(each, jpeg_fancy_upsampling=True, **options) for each in encoded]
    region = {"size": [args.image_size] * 2, "roi_start": start, "roi_end": end}
    linear = {"interp_type": types.INTERP_LINEAR, "antialias": True}
    images = [fn.resize(each, **region, **linear) for each in decoded]
    return *images, fn.stack(*shapes), number


# new #
# DALI returns whole batches, so this class replaces DataLoader
class DALILoader:
    """Yield uint8 (N, 3, size, size) with (N,) labels, or two of (N, 3, size, size) for pairs.
    Every sample comes once an epoch. Raises OSError with the file that cannot be read.
    """

    # new #
    # the pipelines are built when the first epoch has seeded torch
    def __init__(self, dataset, args, sampler):
        self.dataset, self.args, self.sampler = dataset, args, sampler
        self.on_gpu = args.dali_device == "gpu" and torch.cuda.is_available()
        # with two pipelines, one works while the other waits for the last images of its batch
        self.shards = 2 if self.on_gpu and len(sampler) > args.batch_size else 1
        # threads on more than 5 of 8 cores slow down the GPU's decoder
        self.threads = args.workers * 5 // 8 if self.on_gpu else args.workers
        self.order, self.iterator = [], None
        self.labels = torch.tensor([k for _, k in dataset.samples] if dataset.classes else [])

    # new #
    # class folders go through DALI's own reader, pairs through ExternalInputIterator
    def pipeline(self, source, by_reader, depth):
        """Return a pipeline of the samples of `source`, with `depth` batches in work."""
        return image_pipeline(
            self.args,
            self.on_gpu,
            source,
            by_reader,
            batch_size=source.batch_size,
            num_threads=max(1, self.threads // self.shards),
            device_id=0 if self.on_gpu else None,
            seed=int(torch.randint(2**31, ())),
            prefetch_queue_depth=depth,
        )

    # new #
    # the iterator makes torch tensors
    def build(self):
        """Return the iterator over the pipelines."""
        # pairs have no reader of DALI's
        warnings.filterwarnings("ignore", "Please set `reader_name`")
        shared = self.dataset.samples, self.order, self.args.batch_size
        sources = [ExternalInputIterator(*shared, i, self.shards) for i in range(self.shards)]
        names = ["first", "second"][: self.dataset.parts]
        return DALIGenericIterator(
            [self.pipeline(source, self.dataset.classes, 3) for source in sources],
            [*names, "shapes", "number"],
            reader_name="reader" if self.dataset.classes else None,
            size=-1 if self.dataset.classes else len(self.dataset),
            last_batch_policy=LastBatchPolicy.PARTIAL,
            prepare_first_batch=False,
        )

    # new #
    # the number of batches, for the progress bar
    def __len__(self):
        return -(-len(self.dataset) // self.args.batch_size)

    # new #
    # an epoch has a new order
    def __iter__(self):
        self.order[:] = self.sampler  # in place: each ExternalInputIterator holds this list
        self.iterator = self.iterator or self.build()
        return self.read(iter(self.iterator))

    # new #
    # sizes are checked as the baseline checks them
    def read(self, steps):
        seen = set()
        try:
            for batch in itertools.chain.from_iterable(steps):  # a step: one batch a pipeline
                numbers = batch["number"].flatten().tolist()
                seen.update(numbers)
                for i, sizes in zip(numbers, batch["shapes"].flip(-1).tolist()):
                    self.dataset.check_sizes(self.dataset.samples[i], list(map(tuple, sizes)))
                first = batch["first"].permute(0, 3, 1, 2)
                if self.dataset.classes:
                    second = self.labels[numbers]
                else:
                    second = batch["second"].permute(0, 3, 1, 2)
                if numbers:  # the last step can have no samples for the second pipeline
                    yield first, second
        except RuntimeError:
            tqdm.write("DALI failed and names no file: reading each file alone")
            files = [
                (name,)
                for i in sorted(self.order, key=seen.__contains__)
                for name in self.dataset.samples[i][: self.dataset.parts]
            ]
            single = self.pipeline(ExternalInputIterator(files, range(len(files)), 1), False, 1)
            single.build()  # fails if memory is full, before a file is blamed
            for (name,) in files:
                try:
                    single.run()
                except RuntimeError:
                    self.dataset.read(name)  # an error of Pillow's says more
                    raise OSError(
                        f"DALI cannot read {name}: `resize_imagenet.py --format png` converts it"
                    ) from None
            raise


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
    dataset = open_images(parser, args, transform)

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
    # new #
    # DALILoader replaces DataLoader; --workers is the number of its threads
    loader = DALILoader(dataset, args, sampler)

    # --------------------------------------------------------------------------------- reading
    args.result_dir.mkdir(parents=True, exist_ok=True)
    print(f"{script}: {len(dataset):,} samples, {size / 1e6:,.1f} MB, to {device}", flush=True)
    epochs = []
    for epoch in range(args.epochs):
        torch.manual_seed(args.seed * 10_000 + epoch)  # no other epoch and no other --seed has it
        order.manual_seed(args.seed * 10_000 + epoch)
        # new #
        # DALI reads ahead into the next epoch, which would not be cold
        if args.cold:
            loader.iterator = None

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
