"""Edits that people make in their copy of train.py, and what is right for each technique.

    python benchmarks/edits.py [--edit NAME] [--technique NAME] [--jobs 2] [--merge]

The command joins each technique into each edited copy, verifies the result on the digits, and
prints how often each outcome came, what compose.sh missed and where it raised a false alarm. With
--merge it only joins. `edited(edit)` returns the text of a copy.
"""

import argparse
import collections
import dataclasses
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent import futures
from pathlib import Path

import torch

from folders import ROOT

ALL = sorted(path.stem.removeprefix("train_") for path in ROOT.glob("src/train_*.py"))

# lines of train.py at which the edits attach
IMPORTS = "from tqdm import tqdm\n"
ARGS = "    args = build_parser().parse_args()\n"
SEED = "    torch.manual_seed(seed)\n"
TRANSFORM = "    train_transform = transforms.Compose([*crop, transforms.PILToTensor()])\n"
SETS = """\
    train_set = open_folder(args.dataset, "train training", train_transform)
    val_set = open_folder(args.dataset, "val valid validation test testing", val_transform)
"""
CLASSES = """\
    classes = train_set.classes
    # a hidden folder, as .ipynb_checkpoints, is no class
    if classes != val_set.classes or "/." in f"/{'/'.join(classes)}":
        fail(
            f"--dataset {args.dataset}: hidden, or in only one of train and val: "
            f"{sorted(set(classes) ^ set(val_set.classes)) or [n for n in classes if n[0] == '.']}"
        )
"""
SAMPLER = "    sampler = torch.utils.data.RandomSampler(train_set, generator=torch.Generator())\n"
LOADING = "        pin_memory=on_gpu,\n"
TRAIN_LOADER = """\
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loading)
"""
VAL_LOADER = """\
    val_loader = DataLoader(val_set, sampler=val_sampler, **loading)
"""
CONV11 = "def conv11(width, classes):\n"
MODEL = "        model = conv11(args.width, len(classes))\n"
TO_DEVICE = "    model = model.to(device)\n"
LOSS = "    loss_function = nn.CrossEntropyLoss()\n"
OPTIMIZER = """\
    optimizer = torch.optim.SGD(model.parameters(), args.lr, 0.9, weight_decay=5e-4, nesterov=True)
"""
PARTS = '    parts = {"model": model, "optimizer": optimizer}\n'
SCHEDULER = """\
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(done + step, args.epochs * steps)
    )
"""
CLOCK = "    warmup_seconds = 0\n"
EPOCH = (
    "        losses = torch.zeros(steps, device=device)\n"
    "        data_wait = 0\n"
    "        model.train()\n"
)
IMAGES = "            images = images.to(device, non_blocking=True)\n"
FORWARD = """\
            output = net(images)
            loss = loss_function(output, labels)
"""
BACKWARD = """\
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""
COUNTED = "            losses[step] = loss.detach()\n"
SCHEDULER_STEP = "            scheduler.step()\n"
VALIDATION = "        correct = losses.new_zeros(min(5, len(classes)))\n"
VAL_FORWARD = """\
                output = model(normalize(images.to(device, non_blocking=True)))

"""
HITS = "                correct += (output.topk(len(correct)).indices.T == labels).sum(1)\n"
TOP1 = "        top = (correct.cumsum(0) / len(val_set)).tolist()\n"
PRINTED = """\
            f"top-5 {top[-1]:.2%}  {results['images_per_second']:,.0f} images/s  "
            f"data wait {data_wait / seconds:.0%}"
        )
"""


@dataclasses.dataclass
class Edit:
    """A change to train.py: [(old text, new text)] or a function of the whole text.

    `refused`, `said`, `differs` and `either` name the techniques for which the join is refused, a
    hazard is said at once, --verify names a difference, or any of these is right (the copy draws
    other random numbers, say). With all others the copy trains as before. `start` are techniques
    that the copy already has.
    """

    name: str
    kind: str
    changes: list
    refused: str = ""
    said: str = ""
    differs: str = ""
    either: str = ""
    start: str = ""
    options: str = ""

    def right(self, technique):
        """Return the set of right outcomes."""
        found = {
            outcome
            for outcome in ("refused", "said", "differs", "either")
            if technique in getattr(self, outcome).replace("all", " ".join(ALL)).split()
        }
        return {"same", "said", "differs"} if "either" in found else found or {"same"}

    def words(self):
        """Return the options of a run of the copy."""
        words = [*OPTIONS_OF_ALL, *self.options.split()]
        if "--batch-size" in words:
            del words[2:4]
        return words


def after(place, text):
    return place, place + text


def before(place, text):
    return place, text + place


def rename(old, new):
    """Return a change that renames a variable in all lines of code."""

    def change(text):
        return re.sub(
            r"^(?! *(#|add\()).*?(?=  # |$)",
            lambda line: re.sub(rf"(?<![\w.\"-]){old}\b(?!=)", new, line[0]),
            text,
            flags=re.M,
        )

    return change


def each_epoch(text):
    """Return a change that adds lines before the epoch's line is printed."""
    return after(TOP1, text)


def edited(edit):
    """Return the text of the edited copy. Raise AssertionError if an old text is not there once."""
    import compose

    text = compose.join(edit.start.split()) if edit.start else compose.script("train")
    for change in edit.changes:
        if callable(change):
            text, before = change(text), text
            assert text != before, edit.name
        else:
            assert text.count(change[0]) == 1, (edit.name, change[0], text.count(change[0]))
            text = text.replace(*change)
    return text


# tables: an edit is read beside its neighbours
# fmt: off
OWN_MODEL = '''\
class Mine(nn.Module):
    """A small network of my own."""

    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(4, 16))
        self.head = nn.Linear(16, classes)

    def forward(self, images):
        return self.head(self.body(self.stem(images)).mean((2, 3)))


'''
MODELS = [
    Edit("own module", "model", [before(CONV11, OWN_MODEL),
         (MODEL, "        model = Mine(len(classes))\n")]),
    Edit("batch norm to group norm", "model", [
         ("1 if i % 3 else 2)",
          "1 if i % 3 else 2, norm_layer=lambda channels: nn.GroupNorm(2, channels))")]),
    Edit("a torchvision model with another head", "model", [
         (MODEL, "        model = models.shufflenet_v2_x0_5()\n"
                 "        model.fc = nn.Linear(1024, len(classes))\n")], options="--lr 0.0001"),
    Edit("dropout before the head", "model", [
         ("nn.Flatten(), nn.Linear", "nn.Flatten(), nn.Dropout(0.5), nn.Linear")]),
    Edit("dropout on feature maps", "model", [
         before("        channels = wider\n", "        layers.append(nn.Dropout2d(0.1))\n")]),
    Edit("first layers frozen", "model", [before(TO_DEVICE, """\
    for parameter in model[:6].parameters():
        parameter.requires_grad = False

""")]),
    Edit("unfrozen in epoch 2", "model", [before(TO_DEVICE, """\
    for parameter in model[:30].parameters():
        parameter.requires_grad = False

"""), before(EPOCH, """\
        if epoch == 1:
            for parameter in model.parameters():
                parameter.requires_grad = True

""")], said="DDP"),
    Edit("unfrozen in epoch 2, mended", "model", [after(PARTS, """\

    def freeze(*_):  # a weight without gradient is not updated
        if epoch < 1:
            for parameter in model[:30].parameters():
                parameter.grad = None

    optimizer.register_step_pre_hook(freeze)
""")], refused="amp"),
    Edit("grey images", "model", [
         ("        [transforms.Resize(val_size), ",
          "        [transforms.Grayscale(), transforms.Resize(val_size), "),
         (TRANSFORM, "    train_transform = transforms.Compose(\n"
                     "        [*crop, transforms.Grayscale(), transforms.PILToTensor()])\n"),
         ("[[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]", "[[0.45], [0.22]]"),
         ("    channels = 3\n", "    channels = 1\n")],
         said="DALI cache"),
    Edit("images of 24 x 40 pixels", "model", [
         ("        [transforms.Resize(val_size), transforms.CenterCrop(val_size), ",
          "        [transforms.Resize((24, 40)), "),
         ("    crop = [transforms.Resize(size), transforms.CenterCrop(size)]\n",
          "    crop = [transforms.Resize((24, 40))]\n")], said="DALI cache"),
    Edit("scores in a dict", "model", [before(CONV11, OWN_MODEL.replace(
         "return self.head(self.body(self.stem(images)).mean((2, 3)))",
         'return {"scores": self.head(self.body(self.stem(images)).mean((2, 3)))}')),
         (MODEL, "        model = Mine(len(classes))\n"),
         ("            output = net(images)\n", '            output = net(images)["scores"]\n'),
         ("output = model(normalize(images.to(device, non_blocking=True)))",
          'output = model(normalize(images.to(device, non_blocking=True)))["scores"]')],
         refused="amp"),
    Edit("two layers share their weights", "model", [
         (TO_DEVICE, "    model[30].weight = model[27].weight\n" + TO_DEVICE),
         ("2 ** (i // 3)", "2 ** min(2, i // 3)")]),
]

CSV_SET = '''\
class CsvSet(torch.utils.data.Dataset):
    """The images and labels that a table names."""

    def __init__(self, folder, transform):
        self.classes = sorted(path.name for path in folder.iterdir())
        self.rows = [line.split(",") for line in "\\n".join(
            f"{path},{self.classes.index(path.parent.name)}"
            for path in sorted(folder.glob("*/*"))).splitlines()]
        self.transform = transform

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        path, label = self.rows[index]
        return self.transform(Image.open(path).convert("RGB")), int(label)


'''
CSV_SETS = """\
    train_set = CsvSet(args.dataset / "train", train_transform)
    val_set = CsvSet(args.dataset / "val", val_transform)
"""
DATA = [
    Edit("own Dataset from a table", "data", [before(CONV11, CSV_SET), (SETS, CSV_SETS)],
         said="DALI LMDB", either="cache"),
    Edit("own Dataset with samples", "data", [before(CONV11, CSV_SET.replace(
         "        self.transform = transform\n", """\
        self.transform, self.target_transform, self.root = transform, None, folder
        self.samples = [(path, int(label)) for path, label in self.rows]
        self.targets = [label for _, label in self.samples]
""")), (SETS, CSV_SETS)], said="LMDB", either="DALI cache"),
    Edit("own Dataset that dims its images", "data", [before(CONV11, CSV_SET.replace(
         "        self.transform = transform\n", """\
        self.transform, self.target_transform, self.root = transform, None, folder
        self.samples = [(path, int(label)) for path, label in self.rows]
        self.targets = [label for _, label in self.samples]
""").replace('Image.open(path).convert("RGB")',
             'Image.open(path).convert("RGB").point(lambda value: value // 2)')),
         (SETS, CSV_SETS)], said="DALI LMDB", either="cache"),
    Edit("dict samples", "data", [before(CONV11, CSV_SET.replace(
         'return self.transform(Image.open(path).convert("RGB")), int(label)',
         'return {"image": self.transform(Image.open(path).convert("RGB")), "label": int(label)}')),
         (SETS, CSV_SETS),
         ("(images, labels) in tqdm(", "batch in tqdm("),
         ("            labels = labels.to(device, non_blocking=True)\n" + IMAGES,
          '            labels = batch["label"].to(device, non_blocking=True)\n'
          '            images = batch["image"].to(device, non_blocking=True)\n'),
         ("            for images, labels in val_loader:\n",
          "            for batch in val_loader:\n"
          '                images, labels = batch["image"], batch["label"]\n')],
         refused="channels_last progressive", said="cache DALI LMDB"),
    Edit("dict samples, unpacked in the step", "data", [before(CONV11, CSV_SET.replace(
         'return self.transform(Image.open(path).convert("RGB")), int(label)',
         'return {"image": self.transform(Image.open(path).convert("RGB")), "label": int(label)}')),
         (SETS, CSV_SETS),
         ("(images, labels) in tqdm(", "batch in tqdm("),
         ("            data_wait += perf_counter() - tick\n",
          "            data_wait += perf_counter() - tick\n"
          '            images, labels = batch["image"], batch["label"]\n'),
         ("            for images, labels in val_loader:\n",
          "            for batch in val_loader:\n"
          '                images, labels = batch["image"], batch["label"]\n')],
         refused="progressive", said="cache DALI LMDB"),
    Edit("own loader=", "data", [before(CONV11, '''\
def invert(path):
    """Return the negative."""
    return ImageOps.invert(Image.open(path).convert("RGB"))


'''), (SETS, """\
    train_set = datasets.ImageFolder(args.dataset / "train", train_transform, loader=invert)
    val_set = datasets.ImageFolder(args.dataset / "val", val_transform, loader=invert)
""")], said="DALI LMDB"),
    Edit("load_image changed", "data", [
         ('        return ImageOps.exif_transpose(image).convert("RGB")\n',
          '        return ImageOps.invert(ImageOps.exif_transpose(image).convert("RGB"))\n')],
         said="DALI"),
    Edit("plain ImageFolder", "data", [(SETS, """\
    train_set = datasets.ImageFolder(args.dataset / "train", train_transform)
    val_set = datasets.ImageFolder(args.dataset / "val", val_transform)
""")]),
    Edit("__getitem__ on top of ImageFolder's", "data", [before(CONV11, '''\
class Inverted(datasets.ImageFolder):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return 255 - image, label


'''), (SETS, """\
    train_set = Inverted(args.dataset / "train", train_transform)
    val_set = Inverted(args.dataset / "val", val_transform)
""")], said="DALI", either="LMDB cache"),
    Edit("__getitem__ that reads itself", "data", [before(CONV11, '''\
class Folder(datasets.ImageFolder):
    def __getitem__(self, index):
        path, label = self.samples[index]
        return self.transform(ImageOps.invert(load_image(path))), label


'''), (SETS, """\
    train_set = Folder(args.dataset / "train", train_transform)
    val_set = Folder(args.dataset / "val", val_transform)
""")], said="DALI LMDB", either="cache"),
    Edit("target_transform", "data", [(SETS, """\
    train_set = datasets.ImageFolder(args.dataset / "train", train_transform, lambda y: 9 - y)
    val_set = datasets.ImageFolder(args.dataset / "val", val_transform, lambda y: 9 - y)
""")]),
    Edit("labels as vectors", "data", [(SETS, """\
    def vector(label):
        return nn.functional.one_hot(torch.tensor(label), 10).float()

    train_set = datasets.ImageFolder(args.dataset / "train", train_transform, vector)
    val_set = datasets.ImageFolder(args.dataset / "val", val_transform, vector)
"""), ("indices.T == labels)", "indices.T == labels.argmax(1))")], differs="DALI cache"),
    Edit("a number as target", "data", [(SETS, """\
    def number(label):
        return torch.tensor(label / 10)

    train_set = datasets.ImageFolder(args.dataset / "train", train_transform, number)
    val_set = datasets.ImageFolder(args.dataset / "val", val_transform, number)
"""), (MODEL, "        model = nn.Sequential(conv11(args.width, 1), nn.Flatten(0))\n"),
         (LOSS, "    loss_function = nn.SmoothL1Loss()\n"),
         (HITS,
          "                off = (output - labels).abs() / 0.05\n"
          "                correct += (off.int() == torch.arange(5, device=device)[:, None]).sum(1)\n"
          )],
         differs="cache"),
    Edit("half of the images", "data", [
         ("    if len(train_set) < args.batch_size:\n",
          "    train_set = torch.utils.data.Subset(train_set, range(0, len(train_set), 2))\n"
          "    if len(train_set) < args.batch_size:\n")],
         said="DALI LMDB"),
    Edit("validation split from train", "data", [(SETS, """\
    train_set = open_folder(args.dataset, "train training", train_transform)
    names = train_set.classes
    train_set, val_set = torch.utils.data.random_split(
        train_set, [0.8, 0.2], torch.Generator().manual_seed(0))
"""), (CLASSES, "    classes = names\n")],
         said="DALI LMDB"),
    Edit("all images as tensors", "data", [after(SETS, """\
    classes_of = train_set.classes
    train_set, val_set = (torch.utils.data.TensorDataset(
        torch.stack([image for image, _ in each]), torch.tensor(each.targets))
        for each in (train_set, val_set))
    train_set.classes = val_set.classes = classes_of
""")], said="DALI LMDB"),
    Edit("collate_fn that stacks", "data", [before(CONV11, '''\
def stack(samples):
    images, labels = zip(*samples)
    return torch.stack(images), torch.tensor(labels)


'''), after(LOADING, "        collate_fn=stack,\n")],
         either="DALI cache"),
    Edit("collate_fn that inverts", "data", [before(CONV11, '''\
def stack(samples):
    images, labels = zip(*samples)
    return 255 - torch.stack(images), torch.tensor(labels)


'''), after(LOADING, "        collate_fn=stack,\n")],
         said="DALI cache"),
    Edit("worker_init_fn", "data", [before(CONV11, '''\
def seed_worker(number):
    torch.manual_seed(torch.initial_seed() + number)


'''), after(LOADING, "        worker_init_fn=seed_worker,\n")],
         either="DALI cache"),
    Edit("rare classes more often", "data", [(SAMPLER, """\
    weights = [1.0 + (label == 3) for label in train_set.targets]
    sampler = torch.utils.data.WeightedRandomSampler(
        weights, len(weights), generator=torch.Generator())
""")], refused="DDP"),
    Edit("shuffle=True in place of the sampler", "data", [
         ("train_set, sampler=sampler, drop_last=True", "train_set, shuffle=True, drop_last=True")],
         refused="DALI cache", said="DDP"),
    Edit("the last small batch too", "data", [
         ("sampler=sampler, drop_last=True", "sampler=sampler, drop_last=False")],
         refused="DALI cache", either="compile", options="--batch_size 60 --steps 6"),
    Edit("larger batches in validation", "data", [(VAL_LOADER, """\
    val_loader = DataLoader(val_set, 200, sampler=val_sampler, num_workers=args.workers)
""")], refused="DALI cache"),
    Edit("validation in plain order", "data", [(VAL_LOADER, """\
    val_loader = DataLoader(val_set, batch_size=50)
""")], refused="DALI cache", said="DDP"),
    Edit("own random transform", "data", [(TRANSFORM, """\
    train_transform = transforms.Compose([
        *crop, transforms.RandomRotation(15), transforms.PILToTensor()])
""")], said="DALI cache", either="DDP"),
    Edit("own fixed transform", "data", [(TRANSFORM, """\
    train_transform = transforms.Compose([
        *crop, transforms.Lambda(ImageOps.invert), transforms.PILToTensor()])
""")], said="DALI"),
    Edit("fixed transform before the crop", "data", [(TRANSFORM, """\
    train_transform = transforms.Compose([
        transforms.CenterCrop(20), *crop, transforms.PILToTensor()])
""")], said="DALI"),
    Edit("augments by default", "data", [('default="none"', 'default="resized"')],
         either="DDP"),
    Edit("floats from the transform", "data", [
         ("transforms.CenterCrop(val_size), transforms.PILToTensor()]\n",
          "transforms.CenterCrop(val_size),\n         transforms.ToImage(), "
          "transforms.ToDtype(torch.float32, scale=True)]\n"),
         (TRANSFORM, """\
    train_transform = transforms.Compose([
        *crop, transforms.ToImage(), transforms.ToDtype(torch.float32, scale=True)])
""")], said="cache", either="DALI"),
    Edit("noise on the images of a step", "data", [before("            output = net(images)\n", """\
            images = (images + torch.randint_like(images, 10)).clamp(max=255)

""")], refused="amp", either="DDP channels_last"),
    Edit("always augments", "data", [
         ('    if args.augment == "resized":\n', "    if True:\n")],
         differs="DALI cache", either="DDP"),
]

TEACHER = """\
    teacher = conv11(8, len(classes)).to(device).eval()

"""
LOSSES = [
    Edit("label smoothing", "loss", [
         (LOSS, "    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)\n")]),
    Edit("focal loss", "loss", [before(CONV11, '''\
class FocalLoss(nn.Module):
    def forward(self, output, labels):
        entropy = nn.functional.cross_entropy(output, labels, reduction="none")
        return ((1 - (-entropy).exp()) ** 2 * entropy).mean()


'''), (LOSS, "    loss_function = FocalLoss()\n")]),
    Edit("weights of the classes", "loss", [
         (LOSS, "    share = torch.bincount(torch.tensor(train_set.targets)).float().to(device)\n"
                "    loss_function = nn.CrossEntropyLoss(1 / share / len(share))\n")]),
    Edit("classes weighed unequally", "loss", [
         (LOSS, "    share = torch.arange(1.0, len(classes) + 1, device=device)\n"
                "    loss_function = nn.CrossEntropyLoss(share)\n")], differs="DDP"),
    Edit("sum in place of the mean", "loss", [
         (LOSS, '    loss_function = nn.CrossEntropyLoss(reduction="sum")\n')],
         said="DDP", options="--lr 0.0005"),
    Edit("sum in place of the mean, mended", "loss", [(LOSS, """\
    def loss_function(output, labels):
        return nn.functional.cross_entropy(output, labels) * args.batch_size

""")], options="--lr 0.0005"),
    Edit("loss with a penalty beside it", "loss", [
         (FORWARD, FORWARD + "            loss = loss + 1e-4 * output.square().mean()\n")],
         refused="amp"),
    Edit("penalty on the model's weights", "loss", [before(BACKWARD, """\
            loss = loss + 1e-2 * sum(weight.square().sum() for weight in model.parameters())

""")]),
    Edit("second pass through model", "loss", [
         (LOSS, """\
    def loss_function(output, labels):
        flipped = model(normalize(images.flip(3)))
        return nn.functional.cross_entropy(output, labels) + (output - flipped).square().mean()

""")]),
    Edit("a teacher", "loss", [before(TO_DEVICE, TEACHER), (LOSS, """\
    def loss_function(output, labels):
        with torch.no_grad():
            taught = teacher(normalize(images)).softmax(1)
        return nn.functional.cross_entropy(output, labels) + nn.functional.cross_entropy(
            output, taught)

""")]),
    Edit("mixup", "loss", [(FORWARD, """\
            share = float(torch.distributions.Beta(0.4, 0.4).sample())
            images = (share * images + (1 - share) * images.flip(0)).byte()
            output = net(images)
            loss = share * loss_function(output, labels) + (
                1 - share) * loss_function(output, labels.flip(0))
""")], refused="amp", either="DDP"),
    Edit("CutMix of torchvision", "loss", [before("            output = net(images)\n", """\
            images, labels = cutmix(images, labels)

"""), before(CLOCK, "    cutmix = transforms.CutMix(num_classes=len(classes))\n")],
         refused="amp", either="DDP"),
    Edit("loss and forward in a function", "loss", [before(CONV11, '''\
def compute_loss(net, loss_function, images, labels):
    return loss_function(net(images), labels)


'''), (FORWARD, "            loss = compute_loss(net, loss_function, images, labels)\n"),
         ], refused="amp"),
]

OPTIMIZERS = [
    Edit("AdamW", "optimizer", [
         (OPTIMIZER, "    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr / 30)\n")]),
    Edit("RMSprop", "optimizer", [(OPTIMIZER, """\
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr / 100, momentum=0.9)
""")]),
    Edit("dampening", "optimizer", [(OPTIMIZER, """\
    optimizer = torch.optim.SGD(model.parameters(), args.lr, 0.9, dampening=0.9)
""")], said="fused"),
    Edit("no decay for biases and norms", "optimizer", [(OPTIMIZER, """\
    decay = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.SGD([{"params": decay, "weight_decay": 5e-4}, {"params": others}],
                                args.lr, 0.9, nesterov=True)
""")]),
    Edit("a lower rate for the first layers", "optimizer", [(OPTIMIZER, """\
    optimizer = torch.optim.SGD([{"params": model[:12].parameters(), "lr": args.lr / 10},
                                 {"params": model[12:].parameters()}], args.lr, 0.9)
""")]),
    Edit("only the head is trained", "optimizer", [(OPTIMIZER, """\
    for parameter in model[:-1].parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.SGD(filter(lambda each: each.requires_grad, model.parameters()),
                                args.lr, 0.9)
""")]),
    Edit("clipping the norm", "optimizer", [
         ("            optimizer.step()\n",
          "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
          "            optimizer.step()\n")], refused="amp"),
    Edit("clipping in a hook of the optimizer", "optimizer", [after(OPTIMIZER, """\
    optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None)
""")]),
    Edit("clipping in hooks of the weights", "optimizer", [after(OPTIMIZER, """\
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
""")], said="amp", differs="DDP"),
    Edit("gradient accumulation", "optimizer", [(BACKWARD, """\
            (loss / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
""")], refused="amp"),
    Edit("zero_grad every second step", "optimizer", [
         ("            optimizer.zero_grad()\n",
          "            if step % 2 == 0:\n                optimizer.zero_grad()\n\n")],
         refused="amp"),
    Edit("a second optimizer", "optimizer", [(OPTIMIZER, """\
    optimizer = torch.optim.SGD(model[:-1].parameters(), args.lr, 0.9)
    head_optimizer = torch.optim.SGD(model[-1].parameters(), args.lr / 10, 0.9)
"""), (PARTS, PARTS.replace("}", ',\n             "head_optimizer": head_optimizer}')),
         after(COUNTED, "            head_optimizer.step()\n"
               "            head_optimizer.zero_grad()\n")], said="amp", either="fused"),
    Edit("norm of the gradients printed", "optimizer", [after(COUNTED, """\
            norms.append(sum(each.grad.square().sum() for each in model.parameters()) ** 0.5)
"""), before(EPOCH, "        norms = []\n"), each_epoch("""\
        print(f"norm of the gradients {sum(norms).item() / len(norms):.4f}")
""")], either="amp"),
    Edit("average of the weights", "optimizer", [before(PARTS, """\
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

"""), (PARTS, PARTS.replace("}", ', "average": average}')),
         after(COUNTED, "            average.update_parameters(model)\n"),
         ("        model.eval()\n        correct", "        average.eval()\n        correct"),
         ("                output = model(normalize(",
          "                output = average(normalize(")], said="DDP"),
    Edit("average of the weights, mended", "optimizer", [before(PARTS, """\
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

"""), (PARTS, PARTS.replace("}", ', "average": average}')),
         after(COUNTED, "            average.update_parameters(model)\n"),
         ("        model.eval()\n        correct", """\
        average.eval()
        for buffer in average.buffers() if world_size > 1 else ():
            torch.distributed.broadcast(buffer, 0)
        correct"""),
         ("                output = model(normalize(",
          "                output = average(normalize(")]),
    Edit("amp first, clipping later", "optimizer", [
         ("            scaler.step(optimizer)\n",
          "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
          "            scaler.step(optimizer)\n")], start="amp", said="all"),
    Edit("amp first, clipping later, mended", "optimizer", [
         ("            scaler.step(optimizer)\n",
          "            scaler.unscale_(optimizer)\n"
          "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
          "            scaler.step(optimizer)\n")], start="amp"),
    Edit("amp first, a second optimizer later", "optimizer", [(OPTIMIZER, """\
    optimizer = torch.optim.SGD(model[:-1].parameters(), args.lr, 0.9)
    head_optimizer = torch.optim.SGD(model[-1].parameters(), args.lr / 10, 0.9)
"""), (PARTS, PARTS.replace("}", ',\n             "head_optimizer": head_optimizer}')),
         ("            scaler.step(optimizer)\n", "            scaler.step(optimizer)\n"
          "            scaler.step(head_optimizer)\n            head_optimizer.zero_grad()\n")],
         start="amp", either="fused"),
    Edit("amp first, a hook of the optimizer later", "optimizer", [after(OPTIMIZER, """\
    optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None)
""")], start="amp", said="fused"),
    Edit("amp first, norm of the gradients later", "optimizer", [after(COUNTED, """\
            norms.append(sum(each.grad.square().sum() for each in model.parameters()) ** 0.5)
"""), before(EPOCH, "        norms = []\n"), each_epoch("""\
        print(f"norm of the gradients {sum(norms).item() / len(norms):.4f}")
""")], start="amp", said="fused",
         either=" ".join(set(ALL) - {"fused"})),
]

VAL_LOSS = [
    after(VALIDATION, "        val_loss = 0.0\n"),
    after(VAL_FORWARD, "                val_loss += loss_function(output, labels).item() * "
          "len(labels)\n"),
    each_epoch("""\
        val_loss /= len(val_set)
        print(f"validation loss {val_loss:.4f}")
""")]
VAL_LOSS_MENDED = [
    after(VALIDATION, "        val_loss = torch.zeros((), device=device)\n"),
    after(VAL_FORWARD, "                val_loss += loss_function(output, labels) * "
          "len(labels)\n"),
    each_epoch("""\
        if world_size > 1:
            torch.distributed.all_reduce(val_loss)
        val_loss = val_loss.item() / len(val_set)
        print(f"validation loss {val_loss:.4f}")
""")]
PLATEAU = [
    (SCHEDULER, "    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(\n"
                "        optimizer, factor=0.1, patience=0, threshold=1.0)\n"),
    (SCHEDULER_STEP, "")]
SCHEDULES = [
    Edit("cosine, each epoch", "schedule", [
         (SCHEDULER, "    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)\n"),
         (SCHEDULER_STEP, ""), each_epoch("        scheduler.step()\n")]),
    Edit("one cycle, each step", "schedule", [(SCHEDULER, """\
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * steps)
""")]),
    Edit("warm restarts", "schedule", [(SCHEDULER, """\
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
""")]),
    Edit("rate set by hand", "schedule", [(SCHEDULER_STEP, """\
            for group in optimizer.param_groups:
                group["lr"] = args.lr * 0.9 ** (epoch * steps + step)
"""), (SCHEDULER, "")]),
    Edit("scheduler under the optimizer", "schedule", [after(OPTIMIZER, """\
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
"""), (SCHEDULER, ""), (PARTS, PARTS.replace("}", ', "scheduler": scheduler}'))]),
    Edit("rate by the training loss", "schedule", [*PLATEAU, each_epoch(
         "        scheduler.step(loss)\n")]),
    Edit("rate by the validation loss", "schedule", [*PLATEAU, *VAL_LOSS[:2], each_epoch("""\
        val_loss /= len(val_set)
        scheduler.step(val_loss)
        print(f"validation loss {val_loss:.4f}")
""")], said="DDP"),
    Edit("rate by the validation loss, mended", "schedule", [*PLATEAU, *VAL_LOSS_MENDED[:2],
         each_epoch(VAL_LOSS_MENDED[2][1].removeprefix(TOP1) + "        scheduler.step(val_loss)\n")
         ]),
    Edit("early stopping by top-1", "schedule", [after(PRINTED, """\
        if top[0] < max(each["val_top1"] for each in epochs) - 0.5:
            break
""")]),
    Edit("early stopping by the validation loss", "schedule", [*VAL_LOSS, after(PRINTED, """\
        if val_loss > 5:
            break
""")], said="DDP"),
    Edit("no schedule", "schedule", [(SCHEDULER_STEP, ""), (SCHEDULER, ""),
         ("    done = len(epochs) * steps\n", "")]),
]

LOOPS = [
    Edit("validation with net", "loop", [
         ("                output = model(normalize(images.to(device, non_blocking=True)))\n",
          "                output = net(images.to(device, non_blocking=True))\n")],
         refused="amp"),
    Edit("a step with model in place of net", "loop", [
         ("            output = net(images)\n", "            output = model(normalize(images))\n")],
         refused="amp", said="DDP DP compile"),
    Edit("two passes a step", "loop", [(FORWARD, """\
            output = net(images)
            loss = loss_function(output, labels) + loss_function(net(images.flip(3)), labels)
""")], refused="amp"),
    Edit("own autocast", "loop", [(FORWARD, """\
            with torch.autocast(device.type, torch.bfloat16):
                output = net(images)
                loss = loss_function(output, labels)
""")], refused="amp"),
    Edit("flipped images in validation", "loop", [
         ("                output = model(normalize(images.to(device, non_blocking=True)))\n",
          "                output = model(normalize(images.to(device, non_blocking=True)))\n"
          "                output += model(normalize(images.flip(3).to(device)))\n")],
         refused="amp"),
    Edit("a test of the best weights at the end", "loop", [before(
         "    # the record\n", """\
    # all images once more, in each process
    right = 0
    with torch.inference_mode():
        for images, labels in DataLoader(val_set, 50):
            right += (model(normalize(images.to(device))).argmax(1).cpu() == labels).sum().item()
    print(f"test: {right} of {len(val_set)}")

""")], either="DDP"),
    Edit("train_one_epoch()", "loop", [lambda text: split_loop(text)],
         refused="DDP amp channels_last profile progressive"),
    Edit("deterministic algorithms", "loop", [after(SEED, """\
    torch.use_deterministic_algorithms(True)
""")]),
    Edit("cudnn.benchmark off", "loop", [before(LOSS, """\
    torch.backends.cudnn.benchmark = False
""")], said="cudnn"),
    Edit("other seeds too", "loop", [after(SEED, """\
    random.seed(args.seed)
    numpy.random.seed(args.seed)
"""), ("import os\n", "import os\nimport random\n"), ("import torch\nfrom PIL", """\
import numpy
import torch
from PIL""")], refused="DALI LMDB"),
    Edit("no seed", "loop", [(SEED, "    torch.seed()\n")], either="all"),
]


def split_loop(text):
    """Return train.py with the loop over the steps in a function of its own."""
    start = text.index("        for step, (images, labels) in tqdm(")
    end = text.index("        # reading the loss waits")
    body = re.sub("^    ", "", text[start:end], flags=re.M)
    timed = "        first_step_seconds = first_step_seconds or tick - start\n"
    assert timed in body
    body = body.replace(timed, "")
    function = ("def train_one_epoch(net, train_loader, loss_function, optimizer, scheduler, "
                "device, rank,\n                    epoch, steps, losses, tick):\n"
                f"    data_wait = 0\n{body}    return data_wait\n\n\n")
    call = ("        data_wait = train_one_epoch(net, train_loader, loss_function, optimizer, "
            "scheduler,\n                                    device, rank, epoch, steps, losses, "
            "tick)\n")
    text = text[:start] + call + text[end:]
    return text.replace("def main():\n", function + "def main():\n")


METRICS = [
    Edit("validation loss", "metrics", VAL_LOSS, said="DDP"),
    Edit("validation loss, mended", "metrics", VAL_LOSS_MENDED),
    Edit("total += len(labels)", "metrics", [
         after(VALIDATION, "        total = 0\n"),
         after(HITS, "                total += len(labels)\n"),
         (TOP1, "        top = (correct.cumsum(0) / total).tolist()\n")], said="DDP"),
    Edit("F1 from a confusion matrix", "metrics", [
         after(VALIDATION, "        confusion = torch.zeros(len(classes), len(classes), device=device)\n"),
         after(HITS, "                confusion.index_put_((labels, output.argmax(1)), "
               "torch.ones(len(labels), device=device), True)\n"),
         each_epoch("""\
        f1 = 2 * confusion.diag() / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
        print(f"macro F1 {f1.mean().item():.4f}")
""")], differs="DDP"),
    Edit("F1 from a confusion matrix, mended", "metrics", [
         after(VALIDATION, "        confusion = torch.zeros(len(classes), len(classes), device=device)\n"),
         after(HITS, "                confusion.index_put_((labels, output.argmax(1)), "
               "torch.ones(len(labels), device=device), True)\n"),
         each_epoch("""\
        if world_size > 1:
            torch.distributed.all_reduce(confusion)
        f1 = 2 * confusion.diag() / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
        print(f"macro F1 {f1.mean().item():.4f}")
""")]),
    Edit("predictions in a list", "metrics", [
         after(VALIDATION, "        guesses = []\n"),
         after(HITS, "                guesses += output.argmax(1).tolist()\n"),
         each_epoch('        print(f"{len(guesses)} images, {len(set(guesses))} classes")\n')],
         said="DDP"),
    Edit("predictions in a list, mended", "metrics", [
         after(VALIDATION, "        guesses = []\n"),
         after(HITS, "                guesses += output.argmax(1).tolist()\n"),
         each_epoch("""\
        if world_size > 1:
            torch.distributed.all_gather_object(lists := [None] * world_size, guesses)
            guesses = sum(lists, [])
        print(f"{len(guesses)} images, {len(set(guesses))} classes")
""")]),
    Edit("accuracy in training", "metrics", [
         before(EPOCH, "        seen = right = 0\n"),
         after(COUNTED, "            right += (output.argmax(1) == labels).sum().item()\n"
               "            seen += len(labels)\n"),
         each_epoch('        print(f"training accuracy {right / seen:.2%} of {seen}")\n')],
         said="DDP"),
    Edit("accuracy in training by the batch size", "metrics", [
         before(EPOCH, "        right = 0\n"),
         after(COUNTED, "            right += (output.argmax(1) == labels).sum().item()\n"),
         each_epoch('        print(f"training accuracy {right / steps / args.batch_size:.2%}")\n')],
         differs="DDP"),
    Edit("running mean of the loss", "metrics", [
         before(EPOCH, "        running = 0.0\n"),
         after(COUNTED, "            running += loss.item()\n"),
         each_epoch('        print(f"running loss {running / steps:.4f}")\n')], differs="DDP"),
]

LOGGING = [
    Edit("a log file", "logging", [each_epoch("""\
        with open(args.result_dir / "log.csv", "a") as file:
            file.write(f"{epoch},{loss},{top[0]}\\n")
""")], said="DDP"),
    Edit("a log file of one process", "logging", [each_epoch("""\
        if rank == 0:
            with open(args.result_dir / "log.csv", "a") as file:
                file.write(f"{epoch},{loss},{top[0]}\\n")
""")]),
    Edit("a writer", "logging", [before(CONV11, '''\
class Writer:
    """Appends numbers to a file, as TensorBoard's SummaryWriter does."""

    def __init__(self, path):
        self.file = open(path, "a")

    def add_scalar(self, name, value, step):
        print(json.dumps([name, value, step]), file=self.file, flush=True)


'''), before(CLOCK, '    writer = Writer(args.result_dir / "events.json")\n'),
         each_epoch('        writer.add_scalar("loss", loss, epoch)\n')], said="DDP"),
    Edit("a log line every second step", "logging", [after(COUNTED, """\
            if step % 2 == 0:
                tqdm.write(f"step {step} loss {loss.item():.4f}")
""")], differs="DDP"),
    Edit("the best weights", "logging", [after(PRINTED, """\
        if top[0] >= max(each["val_top1"] for each in epochs):
            torch.save(model.state_dict(), args.result_dir / "best.pt")
""")], said="DDP"),
    Edit("the best weights by one process", "logging", [after(PRINTED, """\
        if rank == 0 and top[0] >= max(each["val_top1"] for each in epochs):
            torch.save(model.state_dict(), args.result_dir / "best.pt")
""")]),
    Edit("the net's weights", "logging", [after(PRINTED, """\
        if rank == 0:
            torch.save(net.state_dict(), args.result_dir / "net.pt")
""")], said="DDP DP compile"),
    Edit("seconds printed", "logging", [each_epoch("""\
        print(f"epoch {epoch + 1} took {seconds:.3f} s, until now "
              f"{perf_counter() - started:.3f} s")
""")]),
    Edit("no progress bar", "logging", [
         ("        # the bar is on process 0's terminal only (None: not if the output is no terminal)\n"
          "        for step, (images, labels) in tqdm(\n"
          '            zip(range(steps), train_loader), f"epoch {epoch + 1}", steps, '
          "disable=rank or None\n        ):\n",
          "        for step, (images, labels) in zip(range(steps), train_loader):\n")]),
]

RENAMINGS = [
    Edit("images renamed", "renaming", [rename("images", "x")], refused="amp channels_last",
         differs="progressive"),
    Edit("labels renamed", "renaming", [rename("labels", "y")],
         refused="amp channels_last progressive"),
    Edit("output renamed", "renaming", [rename("output", "logits")], refused="amp"),
    Edit("net renamed", "renaming", [rename("net", "ddp_model")], refused="amp compile",
         said="DDP DP"),
    Edit("model renamed", "renaming", [rename("model", "network")],
         refused="compile fused", said="channels_last", differs="DDP"),
    Edit("optimizer renamed", "renaming", [rename("optimizer", "opt")],
         refused="amp", said="fused"),
    Edit("scheduler renamed", "renaming", [rename("scheduler", "lr_schedule")]),
    Edit("train_set renamed", "renaming", [rename("train_set", "dataset")],
         refused="DDP DALI cache", said="LMDB"),
    Edit("losses renamed", "renaming", [rename("losses", "history")], said="DDP"),
    Edit("loss_function renamed", "renaming", [rename("loss_function", "criterion")],
         refused="amp"),
]

DIGITS = 'Path(os.environ["DIGITS"])'
OPTIONS = [
    Edit("constants in place of options", "options", [(ARGS, f"""\
    args = argparse.Namespace(
        dataset={DIGITS}, image_size=32, val_size=None, augment="none", workers=0, width=4,
        model="conv11", batch_size=40, lr=0.05, epochs=2, steps=4, seed=0, result_dir=Path("runs"),
        resume=None)
""")], differs="DDP LMDB cache compile progressive",
         either="amp DALI"),
    Edit("other defaults", "options", [
         ('default=0.1, help="highest', 'default=0.02, help="highest'),
         ('default=16, help="channels', 'default=8, help="channels')],
         refused="DALI LMDB cache"),
    Edit("option augment removed", "options", [
         lambda text: re.sub(r'    add\(\n        "--augment"(.|\n)*?\n    \)\n', "", text),
         lambda text: re.sub(r"    flip = .*\n", "", text),
         lambda text: re.sub(r"    if args.augment (.|\n)*? // 8\), flip\]\n", "", text)],
         refused="compile", differs="DALI cache"),
    Edit("option steps removed", "options", [
         lambda text: re.sub(r'    add\("--steps".*\n', "", text),
         ("min(len(train_loader), args.steps or 1e9)", "len(train_loader)")],
         refused="DDP amp", options="--batch_size 60"),
    Edit("batch-size with a dash", "options", [('add("--batch_size"', 'add("--batch-size"')],
         options="--batch-size 40"),
    Edit("an option more", "options", [after(
         '    add("--resume", help="a checkpoint, or auto: the one in RESULT_DIR if there is '
         'one")\n',
         '    add("--note", default="", help="what this run is about")\n')],
         options="--note mine"),
]

TEXTS = [
    Edit("text as black writes it", "text", [
         (TRAIN_LOADER, """\
    train_loader = DataLoader(
        train_set,
        sampler=sampler,
        drop_last=True,
        **loading,
    )
"""), (OPTIMIZER, """\
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, 0.9, weight_decay=5e-4, nesterov=True
    )
"""), (SCHEDULER, """\
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: lr_factor(done + step, args.epochs * steps),
    )
""")]),
    Edit("tabs", "text", [lambda text: re.sub(
        "^( {4})+", lambda found: "\t" * (len(found[0]) // 4), text, flags=re.M)], refused="all"),
    Edit("no comments", "text", [lambda text: re.sub("^ +# .*\n", "", text, flags=re.M)],
         refused=" ".join(set(ALL) - {"compile"})),
    Edit("a comment over each paragraph", "text", [lambda text: re.sub(
        r"\n\n( {4,8})(?=[a-z])", r"\n\n\1# mine\n\1", text)], refused="DALI DDP cache fused"),
    Edit("another docstring", "text", [
         ('"""Train an image classifier on DATASET/train/<class>/* and validate it on '
          'DATASET/val/<class>/*.\n', '"""My training.\n')]),
    Edit("type hints", "text", [
         ("def load_image(path):", "def load_image(path: str) -> Image.Image:"),
         ("def conv11(width, classes):", "def conv11(width: int, classes: int) -> nn.Module:"),
         ("def main():", "def main() -> None:")], refused="profile"),
    Edit("loss made before the model", "text", [(LOSS, ""), before(
         "    classes = train_set.classes\n", LOSS + "\n")]),
    Edit("validation's loader first", "text", [
         (TRAIN_LOADER + "\n    # every validation image, in order\n" + VAL_LOADER,
          "    # every validation image, in order\n" + VAL_LOADER + "\n" + TRAIN_LOADER)],
         refused="DALI cache"),
    Edit("Windows line ends", "text", [lambda text: text.replace("\n", "\r\n")], refused="all"),
    Edit("an import of my own", "text", [after(IMPORTS, "\nimport wave as my_code\n")]),
    Edit("a class above main", "text", [before("def main():\n", "class Mine:\n    pass\n\n\n")]),
]

EDITS = {edit.name: edit for edit in [*MODELS, *DATA, *LOSSES, *OPTIMIZERS, *SCHEDULES, *LOOPS,
                                      *METRICS, *LOGGING, *RENAMINGS, *OPTIONS, *TEXTS]}

# fmt: on
# ------------------------------------------------------------------------------- the command
OPTIONS_OF_ALL = ["--dataset", "", "--batch_size", "40", "--width", "4", "--workers", "0"]
OUTCOMES = {
    "same": "joined and the same",
    "differs": "joined, --verify names what differs",
    "said": "joined, the same, with a hazard said",
    "refused": "refused with its place",
}


def join(path, technique, approve=None):
    """Add a technique to the copy at `path` as compose.sh does; return (outcome, hazards)."""
    import compose

    said = []
    try:
        joined = compose.add_to(str(path), [technique], approve, said.append)
    except RuntimeError:
        return "refused", []
    return "same" if joined else "differs", [line for line in said if line.startswith("warning")]


def judge(name, techniques, merge_only):
    """Return {technique: (outcome, hazards, what differs)} for an edit."""
    import verify

    edit, found = EDITS[name], {}
    text, words = edited(edit), edit.words()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my_train.py"
        benches = [verify.Bench(path, words, Path(folder) / name) for name in ("runs", "augment")]
        for bench in benches:
            bench.cores = 1  # so each run takes one thread; the edits are judged side by side
        for technique in sorted({*techniques} - {*edit.start.split()}):
            wrong, bench = [], benches[technique in ("DALI", "cache")]  # these set --augment

            def approve(versions):
                wrong.append(verify.Verifier(bench, versions, [technique]).run()[0])
                return not wrong[0]

            path.write_bytes(text.encode())
            found[technique] = *join(path, technique, None if merge_only else approve), wrong
            assert found[technique][0] == "same" or path.read_bytes() == text.encode()
    return found


def mistakes(edit, technique, outcome, hazards, merge_only=False):
    """Return "miss", "no hazard said", "false alarm" or "" for what compose.sh did."""
    right = edit.right(technique)
    if ("refused" in right) != (outcome == "refused"):
        return "miss" if "refused" in right else "false alarm"
    if right == {"same"}:
        return "false alarm" if hazards or outcome == "differs" else ""
    if (
        outcome == "same"
        and not hazards
        and "same" not in right
        and (right != {"differs"} or not merge_only)
    ):
        return "miss"
    return "no hazard said" if right == {"said"} and not hazards else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--edit",
        nargs="*",
        choices=EDITS,
        default=[*EDITS],
        metavar="NAME",
        help="only these edits (default: all)",
    )
    parser.add_argument(
        "--technique",
        nargs="*",
        choices=ALL,
        default=ALL,
        metavar="NAME",
        help="only these techniques (default: all)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="runs at once (default: one per core)",
    )
    parser.add_argument("--merge", action="store_true", help="join only, do not train")
    args = parser.parse_args()
    torch.set_num_threads(1)  # or OpenMP hangs in forked processes
    # once, not in each of thousands of runs: verify imports what scripts import
    for module in ("verify", "nvidia.dali.plugin.pytorch"):
        importlib.import_module(module)
    counts, wrong = collections.Counter(), collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        digits = Path(folder) / "digits"
        words = ["digits", "--dst", digits, "--train", "24", "--val", "7"]
        command = [sys.executable, ROOT / "make_dataset.py", *words]
        subprocess.run(command, check=True, capture_output=True)
        os.environ["DIGITS"] = OPTIONS_OF_ALL[1] = str(digits)
        with futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
            started = {
                pool.submit(judge, name, args.technique, args.merge): name for name in args.edit
            }
            for done in futures.as_completed(started):
                name = started[done]
                print(name, flush=True)
                for technique, (outcome, hazards, why) in done.result().items():
                    counts["said" if hazards and outcome == "same" else outcome] += 1
                    if mistake := mistakes(EDITS[name], technique, outcome, hazards, args.merge):
                        wrong[mistake].append(
                            f"{name} + {technique}: {' '.join([outcome, *hazards, *why])}"
                        )
                        print(f"    {mistake}: {wrong[mistake][-1]}", flush=True)
    print(f"\n{len(args.edit)} edits, {sum(counts.values())} joins")
    for outcome, text in OUTCOMES.items():
        print(f"| {text} | {counts[outcome]} |")
    print(f"| WRONG WITHOUT A WORD | {len(wrong['miss'])} |")
    for mistake, lines in wrong.items():
        print(f"\n{mistake}: {len(lines)}", *lines, sep="\n")
    return any(wrong.values())


if __name__ == "__main__":
    sys.exit(main())
