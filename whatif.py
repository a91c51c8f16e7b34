#!/usr/bin/env python3
"""Measure what each technique would buy in your own PyTorch training script, before you change it.

    python whatif.py [--seconds 20] [--minutes 10] [--runs 4] [--only amp,compile] [--json FILE]
                     [--copy] my_train.py ITS OWN ARGUMENTS

It runs the script as it is for some seconds, and then again with one technique after another. Each
run is a process of its own and ends before the script's own end. It prints how fast each was, what
holds the script back, and the lines to write. This file needs only torch: copy it anywhere.

Below are the techniques, then the process that runs the script: its files, its clock, and what is
watched and changed in it. Then comes the process that starts such runs, compares them and chooses
the next; and at the end what it prints.
"""

import argparse
import ast
import collections
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import json
import linecache
import math
import multiprocessing
import os
import pathlib
import random
import re
import runpy
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from pathlib import Path
from types import MethodType

WINDOWS = 5  # measured in each run
LEAST_STEPS = 5  # of the warm-up
WATCHED = 10  # steps in which models are looked for
LOSSES = 100  # the most losses of a run that are compared with the plain run's
CACHED = 8  # batches that a run without loading repeats
PAYS = 1.02  # a smaller gain counts as no difference
CLEAR = 0.1  # the largest uncertainty with which "no difference" can be said
MOVED = 1.1  # if runs of the plain script differ more, the report says so
ONE_RUN = 0.2  # the uncertainty of one comparison while nothing has run twice
STEADY = 0.005  # the least standard deviation of a ratio
STUDENT = 12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36  # Student's t of 95 %, from 1 degree of freedom
SELDOM = 0.02  # a script that waits a smaller share of its time needs no faster loading
WAITS = 0.2  # above this share, waiting for data hides what other techniques gain
TRIAL = "WHATIF_TRIAL"  # the variable that tells a process how to run the script
RANKS = int(os.environ.get("WORLD_SIZE", 1))  # processes that torchrun has started
RANK = int(os.environ.get("RANK", 0)) if RANKS > 1 else 0

# what to write for each technique, and what to watch; explore() orders the runs
TECHNIQUES = {
    "no_loading": """load faster, or keep the decoded data in memory
        examples: src/train_cache.py, train_DALI.py, train_LMDB.py in pytorch-speedup""",
    "workers": """{loader}
            num_workers={workers}, persistent_workers=True{pin}
        watch: each worker takes memory and draws random numbers of its own""",
    "amp bfloat16": """{call}
            {autocast}
        watch: compare the accuracy of a whole training""",
    "amp float16": """{call}
            {autocast}
        before the training loop
            scaler = torch.amp.GradScaler("{device}")
        for loss.backward() and optimizer.step()
            scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
        watch: clip gradients after scaler.unscale_(optimizer); save the scaler's state""",
    "channels_last": """{below}
            {model}.to(memory_format=torch.channels_last)
        {call}
            its images as .to(memory_format=torch.channels_last)
        watch: it gains more with amp; .view() in a layer may have to be .reshape()""",
    "fused": """{optimizers}
            fused=True{instead}
        watch: load_state_dict of an old checkpoint turns it off again; with amp float16, create
        SGD's momentum before the first step, as train_fused.py does""",
    "cudnn": """at the top
            torch.backends.cudnn.benchmark = True
        watch: it tries every new input size; runs differ in the last bits""",
    "tf32": """at the top
            torch.set_float32_matmul_precision("high")
        watch: products in float32 keep 10 bits of mantissa: compare the accuracy""",
    "compile": """{below}
            {model}.compile()
        watch: it compiles in the first step, and again for a new shape""",
    "compile reduce-overhead": """{below}
            {model}.compile(mode="reduce-overhead")
        watch: shapes must not change; it takes memory""",
    "batch": """{loader}
            a batch {times} times as large
        watch: this is another training: tune the learning rate again""",
}
LIBRARIES = {  # that make loaders and optimizers and call the model: what they take
    "accelerate": {
        "workers": "the DataLoader that prepare() is given: num_workers={workers}, "
                   "persistent_workers=True",
        "amp bfloat16": 'Accelerator: mixed_precision="bf16"',
        "amp float16": 'Accelerator: mixed_precision="fp16"'},
    "transformers": {
        "workers": "TrainingArguments: dataloader_num_workers={workers}, "
                   "dataloader_persistent_workers=True",
        "amp bfloat16": "TrainingArguments: bf16=True",
        "amp float16": "TrainingArguments: fp16=True",
        "fused": 'TrainingArguments: optim="adamw_torch_fused"',
        "batch": "TrainingArguments: per_device_train_batch_size"}}
OTHER_DATA = {  # these train on other batches, so losses are not compared; with their verdict
    "no_loading": "the most that a loader can gain", "batch": "another training"}
STOPPED = []  # signals received; run_once ends the run then

if TRIAL in os.environ:  # the process that starts the others does not need it
    import torch
    import torch.utils.data.distributed
    from torch.utils._pytree import tree_leaves, tree_map_only


# ------------------------------------------------------------- the script's process: its files
def hold_writes(folder, free):
    """Keep files that Python code writes in `folder`, unless they are below a path in `free`.

    Elsewhere nothing is moved or deleted. A folder that is made is free, and its path is written
    to `folder`.made, to remove it after the run.
    """
    os.makedirs(folder, exist_ok=True)  # the processes of a run share it
    is_there, hard_link = os.path.lexists, os.link

    def held(path):
        """Return where a file is held, or None."""
        if isinstance(path, (str, bytes, os.PathLike)) and path:  # not an open file
            path = os.path.abspath(os.fsdecode(path))
            if not any(path == one or path.startswith(one + os.sep) for one in free):
                name = os.fsencode(path.replace(os.sep, "%"))[-200:]  # 255 bytes are allowed
                return os.path.join(folder, os.fsdecode(name))

    def set_free(path):
        free.append(os.path.abspath(path))
        with open(f"{folder}.made", "a") as made:
            made.write(f"{free[-1]}\n")

    # each of these takes the place of a function, and gets the real one first
    def os_open(real, path, flags, mode=0o777, *, dir_fd=None):
        copy = held(path) if dir_fd is None else None
        if copy and (flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or is_there(copy)):
            is_new = flags & (os.O_TRUNC | os.O_EXCL) or not os.path.exists(path)
            if not is_new and not is_there(copy):
                part = shutil.copyfile(path, f"{copy}.{os.getpid()}")
                os.rename(part, copy)  # another process may look for it
            path = copy
        return real(path, flags, mode, dir_fd=dir_fd)

    def plain_open(real, *args, **options):
        if len(args) < 8 and not options.get("opener"):
            options["opener"] = lambda path, flags: os.open(path, flags, 0o666)
        return real(*args, **options)

    def save(real, obj, f, *rest, **options):
        return real(obj, held(f) or f, *rest, **options)

    def mkdir(real, path, *rest, **options):
        if not held(path):
            real(path, *rest, **options)
        elif not os.path.exists(path):  # a script may make one that the first run has left
            real(path, *rest, **options)
            set_free(path)

    def link(real, src, dst, *rest, **options):
        """Copy what this run has written; leave out links to files of the user's."""
        source = src if real is hard_link else os.path.join(os.path.dirname(dst), src)
        copy, target = held(source), held(dst)
        if not target and not (copy and real is hard_link):
            real(src, dst, *rest, **options)
        elif not (copy and target and not is_there(copy)) and os.path.isfile(source):
            shutil.copyfile(source, dst)

    def copy_state(real, src, dst, **options):
        if is_there(dst):  # not a link that was left out
            shutil.copymode(src, dst, **options)

    def move(real, src, dst, **options):
        source, target = held(src), held(dst)
        if target and not source and os.path.isdir(src) and not is_there(dst):
            real(src, dst)  # a folder that the script has made
            set_free(dst)
        elif source and is_there(src) and not is_there(source):
            return  # a file of the user's
        elif source or target:
            shutil.move(source or src, target or dst)  # `folder` may be on another disk
        else:
            real(src, dst, **options)

    def use(real, path, *rest, **options):
        """Read, change or delete a held file; leave one of the user's as it is."""
        copy = held(path) if options.get("dir_fd") is None else None
        if copy and is_there(copy):
            path = copy
        elif copy and (real in deleters or real not in readers and is_there(path)):
            return None
        return real(path, *rest, **options)

    readers = os.stat, os.lstat, os.access
    deleters = os.remove, os.unlink, os.rmdir, shutil.rmtree
    places = {os_open: [os.open], plain_open: [open], save: [torch.save], mkdir: [os.mkdir],
              link: [os.link, os.symlink], move: [os.rename, os.replace],
              copy_state: [shutil.copystat],
              use: [*readers, *deleters, os.chmod, os.utime, os.truncate]}
    new = {id(real): functools.update_wrapper(functools.partial(function, real), real)
           for function, those in places.items() for real in those}
    # a module may have kept a real one; in Python 3.10, a class of pathlib has, too
    for owner in *sys.modules.values(), getattr(pathlib, "_NormalAccessor", None):
        for name, value in [*getattr(owner, "__dict__", {}).items()]:
            if id(value) in new and owner is not sys.modules["posix"]:
                setattr(owner, name, new[id(value)])
    importlib.reload(tempfile)  # its functions have the plain unlink as a default


# ------------------------------------------------------------- the script's process: its clock
class Clock:
    """Times training in windows, without warm-up, validation and checkpoints.

    `synchronize` waits for the device; it is called only where a window begins, pauses or ends.
    `closed` is called with all windows after each: their seconds, steps, samples and seconds of
    wait for data. A window in which `compiled`, a count, changes is dropped; at most WINDOWS are.
    """

    def __init__(self, seconds, synchronize, closed, compiled):
        self.length, self.warmup = seconds / WINDOWS, min(3, seconds / 4)
        self.synchronize, self.closed, self.compiled = synchronize, closed, compiled
        self.windows, self.steps, self.lost = [], 0, 0
        self.measures = False  # the warm-up is over
        self.first = self.since = None  # times of the first step and of the last (re)start
        self.window = dict(seconds=0, steps=0, samples=0, wait=0)

    def resume(self):
        if self.since is None:
            self.synchronize()
            self.since = time.perf_counter()

    def pause(self):
        if self.since is not None:
            self.synchronize()
            self.window["seconds"] += time.perf_counter() - self.since
            self.since = None

    def close(self):
        """End a window or the warm-up, and begin a window."""
        self.pause()
        if self.measures and self.compiled() != self.compiles and self.lost < WINDOWS:
            self.lost += 1
        elif self.measures:
            self.windows.append(self.window)
            self.closed(self.windows)
        self.measures, self.compiles = True, self.compiled()
        self.window = dict.fromkeys(self.window, 0)
        self.resume()
        self.opened = self.since

    def fetched(self, samples, wait):
        if self.since is not None:
            self.window["samples"] += samples
            self.window["wait"] += wait

    def step(self, ahead):
        """Count a step. Return whether it was the last; `ahead` batches were loaded in advance."""
        now = time.perf_counter()
        self.steps += 1
        self.first = self.first or now
        if self.since is None:  # the first step after a pause is not timed
            self.resume()
            return False
        self.window["steps"] += 1
        if self.measures:  # a window that is mostly pauses ends after four times its length
            timed = self.window["seconds"] + now - self.since
            is_due = max(timed, (now - self.opened) / 4) >= self.length
        else:
            took = now - self.first
            is_due = took >= self.warmup and (
                self.steps >= LEAST_STEPS + (ahead if took < 10 else 0))
        if is_due:
            self.close()
        return len(self.windows) == WINDOWS

    def end(self):
        """Close the last window early, when the script has come to its own end."""
        self.pause()
        if self.measures and self.window["steps"] and (
                not self.windows or self.window["seconds"] > self.length / 2):
            self.close()


# ----------------------------------------------------- the script's process: watched and changed
def samples_in(batch):
    """Return the number of samples in a batch: the first dimension of its first tensor."""
    batch = dict(batch) if isinstance(batch, collections.abc.Mapping) else batch
    tensors = [each for each in tree_leaves(batch) if isinstance(each, torch.Tensor)]
    return tensors[0].shape[0] if tensors and tensors[0].dim() else len(tensors[:1])


def cached(loader, start, kept, length):
    """Yield an epoch of the same few batches: `kept`, which are loaded in the first one."""
    if not kept:
        kept.extend(itertools.islice(start(loader), CACHED))
        loader._iterator = None  # workers that load on would take the cores
    for number in range(length) if length else itertools.count():
        yield copy.copy(kept[number % len(kept)])  # a script may pop items from a batch


class Batches:
    """The iterator of a DataLoader. It times each wait and counts samples."""

    def __init__(self, run, batches, number, length):
        self.run, self.batches, self.number, self.length = run, batches, number, length
        self.about, self.given = run.loaders[number], 0

    def __iter__(self):
        return self

    def __len__(self):
        return self.about["length"]

    def __next__(self):
        start = time.perf_counter()
        try:
            batch = next(self.batches)
        except StopIteration:
            self.run.clock.pause()
            raise
        wait = time.perf_counter() - start
        self.given += 1
        size = self.about["batch"]
        if not size or self.given == self.length:  # the last one may be smaller
            size = samples_in(batch)
        self.run.fetched(self.number, size, wait)
        return batch


class Forward(functools.partial):
    """A function of a plain forward. Copies and pickles of the model get the plain one."""

    def __reduce__(self):
        return functools.partial, self.args


@functools.lru_cache
def statements(file):
    """Return the statements of a file, as nodes of ast; the inner ones come later."""
    with contextlib.suppress(SyntaxError):
        tree = ast.parse("".join(linecache.getlines(file)))
        return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return []


def statement_at(file, line):
    """Return the innermost statement at a line, or None."""
    found = [node for node in statements(file) if node.lineno <= line <= node.end_lineno]
    return found[-1] if found else None


def repeats_in_workers(dataset):
    """Return whether each worker of a DataLoader may give the same data."""
    if isinstance(dataset, torch.utils.data.ChainDataset):
        return any(map(repeats_in_workers, dataset.datasets))
    classes = type(dataset).__mro__
    if torch.utils.data.IterableDataset not in classes:
        return False
    with contextlib.suppress(Exception):  # there may be no source
        return not any("get_worker_info" in inspect.getsource(each) for each in
                       classes[:classes.index(torch.utils.data.IterableDataset)])
    return True


def modules_of(values):
    """Return those of {name: value} that are modules."""
    return {name: value for name, value in values.items() if isinstance(value, torch.nn.Module)}


def parts_of(name, value):
    """Return {name.attribute or name[key]: its value}, of objects that are not large."""
    parts = {}
    with contextlib.suppress(Exception):  # a proxy may fail
        if isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            parts = {f"{name}[{key!r}]": part for key, part in items} if len(value) < 100 else {}
        elif name == "self" or not isinstance(value, (type, type(sys), torch.nn.Module)):
            parts = {f"{name}.{key}": part for key, part in
                     {**value.__dict__, **getattr(value, "_modules", {})}.items()}
    return parts


def length_of(data):
    with contextlib.suppress(Exception):  # an IterableDataset may have none, or none as yet
        return len(data)


def watched(target, *args, **kwargs):
    """Call the target of a process that the script starts, and watch it as the script is."""
    if Run.active is None:  # started by spawn; a fork has it already
        Run().install()
    before = Run.active.clock.steps  # of the process that forked this one
    target(*args, **kwargs)
    if Run.active.clock.steps > before:
        Run.active.ended()


def worker(target, *args, **kwargs):
    """Call the target of a process of a DataLoader; its files are held, too."""
    spec = json.loads(os.environ[TRIAL])
    if Run.active is None and not spec["first"]:
        hold_writes(f"{spec['folder']}/held", spec["free"])
    target(*args, **kwargs)


class Run:
    """What is watched and changed in a process of the script, as the variable TRIAL says."""

    active = None

    def __init__(self):
        Run.active = self
        self.spec = json.loads(os.environ[TRIAL])
        self.techniques = {*self.spec["techniques"]}
        self.half = next((getattr(torch, name.removeprefix("amp ")) for name in self.techniques
                          if kind(name) == "amp"), None)  # the data type of autocast
        self.clock = Clock(self.spec["seconds"], self.synchronize,
                           lambda windows: self.send(windows=windows), self.compiled)
        self.facts = dict(optimizers=[], seen=[], lines=[], busy=None)
        self.models, self.loaders = {}, {}  # what is known of each; loaders by number
        self.losses, self.optimizers, self.fused = [], [], []
        self.called = {}  # of models, by id: (their name, where an optimizer of theirs is made)
        self.lead = None  # the optimizer whose steps are counted
        self.others = collections.Counter()  # steps of the others since its last one, by id
        self.device, self.scaler, self.scales, self.look = "cpu", None, False, None
        self.numbers, self.kept = {}, collections.defaultdict(list)  # of loaders; cached batches
        self.made = collections.Counter()  # loaders since the last step, by where they are made
        self.fetched_from = {}  # loaders, by number, that gave a batch since the last step
        self.recent = []  # loaders that gave a batch for the last step
        self.steps_of = collections.Counter()  # to how many steps each loader gave a batch

    def send(self, **record):
        file = os.open(f"{self.spec['folder']}/records", os.O_WRONLY | os.O_APPEND)
        os.write(file, (json.dumps({"pid": os.getpid(), **record}) + "\n").encode())
        os.close(file)

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def compiled(self):
        """Return how many functions were compiled; a new shape compiles them again."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        return dynamo.counters["frames"]["total"] if dynamo else 0

    def rank_of(self):
        """Return (the rank of this process, the number of processes that train)."""
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def see(self, what, is_so=True):
        if is_so and what not in self.facts["seen"]:
            self.facts["seen"].append(what)

    def is_users(self, frame):
        file = frame.f_code.co_filename
        return file.startswith(tuple(self.spec["roots"])) and file != __file__ and (
            "site-packages" not in file)

    def frames(self):
        """Return (frame, line) of the user's own code, innermost first; at least the outermost."""
        stack = list(traceback.walk_stack(sys._getframe(1)))
        return [each for each in stack if self.is_users(each[0])] or stack[-1:]

    def place(self, depth=0, above=False):
        """Return {at: "file:line", text: its text} of a line of the user's own code.

        `above` gives the first line of its statement.
        """
        frame, line = self.frames()[depth]
        file = frame.f_code.co_filename
        if above:
            line = getattr(statement_at(file, line), "lineno", line)
        return dict(at=f"{os.path.relpath(file, self.spec['cwd'])}:{line}",
                    text=linecache.getline(file, line).strip())

    def library(self, made=None):
        """Return the package that the user's innermost line calls, if it is not torch, or "".

        The package of a class does not count if the user makes an object of it: `made`.
        """
        found = ""
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            if self.is_users(frame):
                return found
            _, is_there, path = frame.f_code.co_filename.rpartition("-packages" + os.sep)
            if is_there and not path.startswith("torch" + os.sep) and (
                    made is None or frame.f_locals.get("self") is not made):
                found = path.split(os.sep)[0]
        return ""

    def assigned(self, name):
        """Return {statement, target}: the user's statement if it is `target = name(...)`."""
        frame, line = self.frames()[0]
        match statement_at(frame.f_code.co_filename, line):
            case ast.Assign([ast.Name() | ast.Attribute() as target], ast.Call(called)) as node:
                if ast.unparse(called) == name:
                    return dict(statement=ast.unparse(node), target=ast.unparse(target))
        return dict(statement="", target="")

    def names(self, depth=0):
        """Return {name: model} of models that a user's line can name, variables first."""
        frame, line = self.frames()[depth]
        values = {**frame.f_globals, **frame.f_locals}
        statement = statement_at(frame.f_code.co_filename, line)
        for node in ast.walk(statement) if statement else ():
            for one in ast.walk(node.target) if isinstance(node, ast.comprehension) else ():
                values.pop(getattr(one, "id", ""), None)  # it is there only within the statement
        models, values = modules_of(values), dict(reversed(values.items()))  # self before globals
        for _ in range(2):  # self.net, then self.nets["net"]
            values = {inner: part for name, value in values.items()
                      for inner, part in parts_of(name, value).items()}
            models |= modules_of(values)
        return models

    @staticmethod
    def wrap(owner, name, wrapper):
        """Replace owner.name by a function that calls wrapper(original, *args, **kwargs)."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args, **kwargs):
            return wrapper(original, *args, **kwargs)
        setattr(owner, name, wrapped)
        return original, wrapped

    def before(self, owner, name, action):
        """Let owner.name call action with its own arguments first."""
        def call(original, *args, **kwargs):
            action(*args, **kwargs)
            return original(*args, **kwargs)
        self.wrap(owner, name, call)

    def install(self):
        """Begin to watch, and change what this run's techniques change."""
        from torch.optim.optimizer import register_optimizer_step_post_hook
        data = torch.utils.data
        self.wrap(data.DataLoader, "__init__", self.make_loader)
        self.wrap(data.DataLoader, "__iter__", self.iterate)
        self.wrap(torch.autograd, "backward", self.backward)
        self.wrap(torch.amp.GradScaler, "scale", self.scale)
        self.wrap(torch.optim.Optimizer, "__init__", self.make_optimizer)
        self.wrap(multiprocessing.process.BaseProcess, "start", self.start_process)
        self.calls = self.wrap(torch.nn.Module, "__call__", self.call_module)
        register_optimizer_step_post_hook(self.step)
        if self.spec["first"]:  # in the others, a compiled model may enter autocast
            self.before(torch.autocast, "__enter__", lambda it: self.see("amp", it._enabled))
            self.before(data.distributed.DistributedSampler, "set_epoch",
                        lambda *_, **__: self.see("set_epoch"))
        else:
            hold_writes(f"{self.spec['folder']}/held", self.spec["free"])
        if "channels_last" in self.techniques:
            self.before(  # DDP's buckets take the layout of the weights
                torch.nn.parallel.DistributedDataParallel, "__init__",
                lambda _, module, *__, **___: module.to(memory_format=torch.channels_last))
        if "amp float16" in self.techniques:
            self.scaler = torch.amp.GradScaler("cuda")
            self.before(torch.nn.utils, "clip_grad_norm_", self.unscale)
            self.before(torch.nn.utils, "clip_grad_value_", self.unscale)
        tempfile.tempdir = self.spec["free"][0]
        random.seed(0)  # a script that sets no seed gets the same one in each run
        torch.manual_seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)

    # ---- data
    def make_loader(self, original, loader, *args, **kwargs):
        call = inspect.signature(original).bind(loader, *args, **kwargs)
        given = call.arguments
        # a loader that is made anew in each epoch keeps its number
        key = length_of(given["dataset"]), *(
            (frame.f_code.co_filename, line) for frame, line in self.frames())
        self.made[key] += 1  # a comprehension makes several in one line
        key = self.made[key], key
        number = self.numbers.get(key, len(self.loaders))
        changes = self.techniques if number in self.spec["training"] else ()
        if "workers" in changes:
            given |= dict(num_workers=self.spec["workers"], persistent_workers=True,
                          pin_memory=torch.cuda.is_available())
        if "batch" in changes:
            if sampler := given.get("batch_sampler"):  # another loader may have had it before
                sampler._whatif = getattr(sampler, "_whatif", sampler.batch_size)
                sampler.batch_size = sampler._whatif * self.spec["times"]
            else:
                given["batch_size"] = given.get("batch_size", 1) * self.spec["times"]
        original(*call.args, **call.kwargs)
        self.numbers[key] = number
        self.note_loader(loader, number)

    def note_loader(self, loader, number):
        loader._whatif = number
        data = torch.utils.data
        self.loaders[number] = dict(
            **self.place(), library=self.library(loader),
            workers=loader.num_workers, pin=loader.pin_memory,
            length=length_of(loader), persistent=loader.persistent_workers,
            repeats=repeats_in_workers(loader.dataset),
            batch=loader.batch_size,  # without one, samples are counted in each batch
            can_grow=hasattr(loader.batch_sampler, "batch_size"),
            method=(loader.multiprocessing_context or multiprocessing).get_start_method(
                allow_none=True) or multiprocessing.get_all_start_methods()[0],  # the default
            shuffles=isinstance(loader.sampler, data.distributed.DistributedSampler)
            and loader.sampler.shuffle)

    def training(self):
        """Return the numbers of the loaders that give a batch to most steps, or to the last."""
        return [number for number, count in self.steps_of.items()
                if 2 * count >= self.clock.steps] or self.recent

    def iterate(self, original, loader):
        if loader._whatif not in self.loaders:  # made in the process that spawned this
            self.note_loader(loader, len(self.loaders))
        number, about = loader._whatif, self.loaders[loader._whatif]
        if torch.is_grad_enabled() and number in (*self.training(), *self.recent):
            self.clock.resume()
        else:
            self.clock.pause()  # validation
        self.see("no set_epoch", about["shuffles"] and "set_epoch" not in self.facts["seen"])
        # a loader with an __iter__ of its own may take all its epochs from this one iterator
        is_plain = type(loader).__iter__ is torch.utils.data.DataLoader.__iter__
        length = about["length"] if is_plain else None
        if "no_loading" in self.techniques and number in self.spec["training"]:
            batches = cached(loader, original, self.kept[number], length)
        else:
            batches = original(loader)
        return Batches(self, batches, number, length)

    def fetched(self, number, samples, wait):
        training, trains = self.training(), torch.is_grad_enabled()
        if trains:
            self.fetched_from[number] = True
        if not trains or number not in (*training, *self.recent):
            self.clock.pause()  # validation, or other data from now on
        counted = training[:1] if number in training else self.recent[:1]
        self.clock.fetched(samples if number in counted else 0, wait)

    # ---- the model
    def call_module(self, original, module, *args, **kwargs):
        """Find the outermost modules that train, in the first steps."""
        trains = module.training and torch.is_grad_enabled() and any(
            weight.requires_grad for weight in module.parameters())
        in_backward = torch._C._current_graph_task_id() != -1  # a checkpointed part runs again
        if not trains or in_backward or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        torch.nn.Module.__call__ = self.calls[0]  # the modules inside are not watched
        try:
            if module not in self.models:
                self.prepare(module)
            output = original(module, *args, **kwargs)
            about = self.models[module]
            about["is_tensor"] = isinstance(output, torch.Tensor)
            about["calls"] = [*dict.fromkeys([*about["calls"], self.place()["at"]])]
            return output
        finally:
            if self.clock.steps < WATCHED:
                torch.nn.Module.__call__ = self.calls[1]

    def prepare(self, module):
        """Note what a model is, and change it before its first step."""
        nn, last = torch.nn, torch.channels_last
        inner, local = module, next((  # a part of one is net.head, or net[0]
            re.sub(r"\.(\d+)", r"[\1]", f"{name}.{path}".rstrip(".")) for name, model
            in self.names().items() for path, part in model.named_modules() if part is module),
            "model")
        called, above = self.called.get(id(module), (local, None))
        while isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = inner.module
            called, above = self.called.get(id(inner), (f"{called}.module", above))
        self.models[module] = dict(
            name=called, local=local, kind=type(inner).__name__, **self.place(),
            library=self.library(), **self.assigned(local), above=above, calls=[], is_tensor=False,
            is_wrapped=inner is not module)
        weight = next(module.parameters())
        self.device = weight.device.type
        self.see("amp", weight.dtype in (torch.float16, torch.bfloat16))
        for part in module.modules():
            if isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)):
                self.see("image")
                self.see("channels_last", part.weight.is_contiguous(memory_format=last)
                         and not part.weight.is_contiguous())
            self.see("convolution", isinstance(part, nn.modules.conv._ConvNd))
            self.see("SyncBatchNorm", isinstance(part, nn.SyncBatchNorm))
            if isinstance(part, nn.DataParallel):
                self.see("DataParallel")
                self.see("several GPUs", len(part.device_ids) > 1)
        self.change(module, inner)

    def change(self, module, inner):
        """Change a model, which may be a parallel one of `inner`, and torch's settings."""
        if "cudnn" in self.techniques:
            torch.backends.cudnn.benchmark = True
        if "tf32" in self.techniques:
            torch.set_float32_matmul_precision("high")
        if "channels_last" in self.techniques:
            inner.to(memory_format=torch.channels_last)
        for name in self.techniques & {"compile", "compile reduce-overhead"}:
            mode = name.removeprefix("compile").strip() or None
            compiled = torch.compile(inner.forward, mode=mode)
            inner.forward = Forward(lambda _, *args, **kwargs: compiled(*args, **kwargs),
                                    inner.forward)
        if self.half or "channels_last" in self.techniques:
            module.forward = Forward(self.forward, module.forward)

    def forward(self, plain, *args, **kwargs):
        """Call a forward with channels_last images and under autocast; return float32."""
        if "channels_last" in self.techniques:
            args, kwargs = tree_map_only(torch.Tensor, lambda one: one.contiguous(
                memory_format=torch.channels_last) if one.dim() == 4 else one, (args, kwargs))
        if not self.half:
            return plain(*args, **kwargs)
        with torch.autocast(self.device, self.half):
            output = plain(*args, **kwargs)
        return tree_map_only(
            torch.Tensor, lambda one: one.float() if one.dtype == self.half else one, output)

    # ---- the loss and the optimizer
    def backward(self, original, tensors, grad_tensors=None, *rest, **options):
        loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
        if loss.numel() == 1 and grad_tensors is None:
            if len(self.losses) < LOSSES:
                self.losses.append(getattr(loss, "_unscaled", loss).detach().clone())
            if self.scaler:
                tensors = self.scaler.scale(tensors)
        return original(tensors, grad_tensors, *rest, **options)

    def scale(self, original, scaler, outputs):
        for optimizer in self.fused:
            # PyTorch leaves momentum uninitialised if the scaler skips the first step
            for group in () if optimizer.state else optimizer.param_groups:
                for weights in group["params"] if group.get("momentum") else ():
                    optimizer.state[weights]["momentum_buffer"] = torch.zeros_like(weights)
        scaled = original(scaler, outputs)
        if isinstance(scaled, torch.Tensor) and scaler is not self.scaler and scaler.is_enabled():
            self.see("amp")
            scaled._unscaled = outputs
        return scaled

    def unscale(self, *_, **__):
        for optimizer in self.optimizers:
            with contextlib.suppress(RuntimeError, AssertionError):  # unscaled, or no gradients
                self.scaler.unscale_(optimizer)

    def make_optimizer(self, original, optimizer, params, defaults):
        facts = dict(kind=type(optimizer).__name__, **self.place(), library=self.library(optimizer),
                     fused=defaults.get("fused"), foreach=defaults.get("foreach"),
                     can_fuse="fused" in defaults)
        if "fused" in self.techniques and "fused" in defaults:
            defaults |= dict(fused=True, foreach=None)
            optimizer._step_supports_amp_scaling = True
            self.fused.append(optimizer)
        original(optimizer, params, defaults)
        weights = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for depth, _ in enumerate(self.frames()):  # a function that makes it may not know the model
            names = {id(model): name for name, model in reversed(self.names(depth).items())
                     if not weights.isdisjoint(map(id, model.parameters()))}
            if names:
                above = self.place(depth, above=True)
                self.called |= {key: (name, above) for key, name in names.items()}
                break
        for module, about in self.models.items():  # some were called before
            if not about["above"] and id(module) in self.called:
                about["name"], about["above"] = self.called[id(module)]
                about["name"] += ".module" * (about["kind"] != type(module).__name__)
        if facts not in self.facts["optimizers"]:  # a script may make one in each epoch
            self.facts["optimizers"].append(facts)
        if self.scaler:
            self.optimizers.append(optimizer)
            optimizer.step = MethodType(Run.scaled_step, optimizer)

    def scaled_step(optimizer, closure=None, **kwargs):
        """Replace an optimizer's step, by a bound method because schedulers wrap that."""
        run = Run.active
        if run.scales:  # called by the scaler
            return type(optimizer).step(optimizer, **kwargs)
        loss = closure() if closure else None  # the scaler takes none; Lightning always gives one
        run.scales = True
        run.scaler.step(optimizer, **kwargs)
        run.scales = False
        run.scaler.update()
        return loss

    def step(self, optimizer, *_):
        """Count a step of the leading optimizer; end the run after the last one."""
        self.others[id(optimizer)] += 1
        if not self.lead or self.others[id(optimizer)] > WATCHED:  # the script goes on with this
            self.lead = optimizer
        if optimizer is not self.lead or self.rank_of()[0] > 0:
            return
        self.others.clear()
        self.made.clear()
        self.steps_of.update([*self.fetched_from])
        self.recent, self.fetched_from = [*self.fetched_from] or self.recent, {}
        workers = max((self.loaders[number]["workers"] for number in self.training()), default=0)
        if not self.look and self.clock.step(ahead=2 * workers):
            self.report()
            self.look = self.looking()
        if self.look:
            next(self.look)

    # ---- after the windows
    def looking(self):
        """In the first run on a GPU, examine a step for each next(); then end the run."""
        if self.spec["first"] and self.device == "cuda":
            yield from self.find_waits(3)
            self.report()
            yield from self.time_kernels(10)
            self.report()
        self.finish()

    def find_waits(self, steps):
        """Find the user's own lines that make the host wait for the GPU in each step."""
        texts, waits = {}, collections.defaultdict(set)  # of each line: its text, and its steps

        def shown(message, category, file, number, *_):
            frame, _ = self.frames()[0]
            if "called a synchronizing" in str(message) and self.is_users(frame):
                at, text = self.place().values()
                if file != frame.f_code.co_filename:  # the line calls what waits
                    text += f"  ({file.split('-packages/')[-1]}:{number})"
                texts[at] = text
                waits[at].add(step)
        warnings.showwarning = shown
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for step in range(steps):
            yield
        torch.cuda.set_sync_debug_mode("default")
        self.facts["lines"] = [(at, texts[at]) for at in texts if len(waits[at]) == steps]

    def time_kernels(self, steps):
        """Find for how many seconds of a step the GPU works, and on what."""
        busy, until, kinds, cuda = 0, 0, collections.Counter(), torch.autograd.DeviceType.CUDA
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                yield
            torch.cuda.synchronize()
        kernels = [each for each in profiler.events() if each.device_type == cuda
                   and each.device_index == torch.cuda.current_device()
                   and not each.is_user_annotation and "HtoD" not in each.name]
        for each in sorted(kernels, key=lambda each: each.time_range.start):
            begin, end = each.time_range.start, each.time_range.end
            busy, until = busy + max(0, end - max(begin, until)), max(until, end)
            kinds[kernel_kind(each.name)] += end - begin
        self.facts["busy"] = busy / 1e6 / steps
        self.facts["kernels"] = {kind: took / sum(kinds.values()) for kind, took in kinds.items()}

    def report(self):
        """Send what is known after the windows."""
        on_gpu = self.device == "cuda"
        self.see("compile", self.compiled())
        self.see("cudnn", torch.backends.cudnn.benchmark)
        with contextlib.suppress(RuntimeError):  # of scripts that mix the old setting and the new
            self.see("tf32", torch.get_float32_matmul_precision() != "highest")
        self.facts |= dict(
            device=self.device, torch=torch.__version__, python=sys.version.split()[0],
            models=[*{(each["name"], each["at"]): each for each in self.models.values()}.values()],
            loaders=[*self.loaders.values()],
            training=self.training(), processes=self.rank_of()[1],
            cores=len(os.sched_getaffinity(0)))
        if on_gpu:
            about = torch.cuda.get_device_properties(self.device)
            self.facts |= dict(gpu=about.name, memory=about.total_memory, capability=about.major)
        self.send(facts=self.facts, steps=self.clock.steps, losses=[*map(float, self.losses)],
                  memory=torch.cuda.max_memory_allocated() if on_gpu else None)

    def ended(self):
        """Report what there is when the script has come to its own end."""
        self.clock.end()
        self.report()
        self.send(ended=True, done=True)

    def finish(self):
        self.send(done=True)
        os._exit(0)  # none of the script's own handlers runs, so nothing is saved

    def start_process(self, original, process):
        if target := process._target:
            is_worker = target.__module__.startswith("torch.utils.data")
            process._target = functools.partial(worker if is_worker else watched, target)
        return original(process)


def kernel_kind(name):
    """Return what the time of a kernel depends on: products, memory or communication."""
    if re.search("nccl", name, re.I):
        return "communication"
    moves = r"bn_|norm|elementwise|reduce|softmax|pool|multi_tensor|copy|fill"
    products = r"gemm|conv|cutlass|xmma|[wd]grad|fprop|flash|fmha|attention|nvjet|winograd|mma|rnn"
    if re.search(products, name, re.I) and not re.search(moves, name, re.I):
        return "products"
    return "memory"


def run_script():
    """Run the user's script in this process."""
    run = Run()
    script = run.spec["script"]
    sys.argv = [script, *run.spec["arguments"]]
    sys.path[0] = os.path.dirname(script)
    sys.path.append(os.path.dirname(__file__))  # a process that the script spawns imports this file
    run.install()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:  # the process that started this one tells it, and the last words
            raise
    except BaseException as error:
        if run.look:  # already measured; profiling may disturb a profiler of the script
            run.finish()
        name, where = type(error).__name__, error.__traceback__
        while where and not run.is_users(where.tb_frame):
            where = where.tb_next
        lines = str(error).strip().splitlines() or [""]
        told = f"{name}: {lines[-1 if name == 'ProcessRaisedException' else 0]}".rstrip(": ")
        told = told[:250] + " ..." * (len(told) > 250)
        for frame, line in traceback.walk_tb(where):
            if run.is_users(frame):  # the innermost one stays
                at = f" ({os.path.relpath(frame.f_code.co_filename, run.spec['cwd'])}:{line})"
        told += (at if where else "") + (f" (rank {RANK})" if RANKS > 1 else "")
        run.send(error=told, done=True, traceback="".join(
            traceback.format_exception(error.with_traceback(where))))
        os._exit(1)
    if RANK == 0:
        run.ended()


# --------------------------------------------------------------------------- one run of a script
def start(spec):
    """Start the processes of a run: one, or as many as torchrun has started of this file."""
    environment = {"PYTHONHASHSEED": "0", **os.environ, "PYTHONDONTWRITEBYTECODE": "1",
                   TRIAL: json.dumps(spec)}
    if not spec["first"]:
        environment |= {"WANDB_MODE": "disabled", "COMET_MODE": "disabled"}
    ranks = [{}]
    if RANKS > 1:
        with socket.create_server(("", 0)) as free:  # each run meets at a port of its own
            port = free.getsockname()[1]
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
        names = "RANK", "LOCAL_RANK", "ROLE_RANK"
        ranks = [dict.fromkeys(names, str(rank)) for rank in range(RANKS)]
    with open(f"{spec['folder']}/log", "wb") as log:
        return [subprocess.Popen([sys.executable, os.path.abspath(__file__)], cwd=spec["cwd"],
                                 env=environment | rank, stdin=subprocess.DEVNULL, stdout=log,
                                 stderr=log, start_new_session=True) for rank in ranks]


def why_failed(result, code, log):
    """Return, in one line, why a run gave no rate; or "" if it gave one."""
    if error := result.get("error"):
        asks = "it asks for input, but whatif.py gives it none (stdin is /dev/null)"
        return asks if "EOF when reading a line" in error else error
    if not result.get("done"):
        if code == -signal.SIGKILL:
            return "it was killed by signal 9, probably because memory ran out"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"it {how}" + "".join(f": {line[:150]}" for line in log.strip().splitlines()[-1:])
    if result["windows"]:
        return ""
    if not result.get("steps"):
        return "it ended without a step of an optimizer of torch.optim"
    return (f"it ended after {result['steps']} steps, before the warm-up was over: let it make "
            "more steps, or lower --seconds")


def run_once(spec, limit, show):
    """Run the script until its windows are full. Return what it has sent."""
    folder = Path(spec["folder"])
    folder.mkdir()
    (folder / "records").touch()
    processes = start(spec)
    result, begin, text = dict(windows=[]), time.monotonic(), ""
    try:
        with open(folder / "records") as file:
            while not result.get("done"):
                codes = [process.poll() for process in processes]
                *lines, text = (text + file.read()).split("\n")  # the last one may be cut
                for record in map(json.loads, lines):  # if several train, the first to report
                    counts = result.setdefault("pid", record["pid"]) == record["pid"]
                    if (counts or "error" in record) and not result.get("done"):
                        result |= record
                if codes[0] is not None or any(codes):
                    break
                if time.monotonic() - begin > limit:
                    or_none = " (or no optimizer of torch.optim)" * (
                        spec["first"] and not result["windows"])
                    result |= dict(error=f"cut off after {limit:.0f} s: too slow, or too little "
                                   f"time (--minutes){or_none}", done=True)
                if STOPPED:
                    raise KeyboardInterrupt
                show(result["windows"])
                time.sleep(0.1)
        if result.get("ended"):  # let the script finish by itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                processes[0].wait(30)
    finally:
        for process in processes:  # and all that it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for made in folder.glob("*.made"):
            for path in made.read_text().splitlines():
                shutil.rmtree(path, ignore_errors=True)
    log = (folder / "log").read_text(errors="replace")
    shutil.rmtree(folder, ignore_errors=True)
    return result | dict(error=why_failed(result, next(filter(None, codes), 0), log))


# ------------------------------------------------------------------------------------ the verdicts
def scatter(rates):
    """Return the standard error of the median of `rates`, divided by it; 0 for one rate.

    It uses the median deviation, so that one odd rate, as at an epoch's start, does not count.
    """
    middle = statistics.median(rates)
    deviation = 2 * statistics.median(abs(rate - middle) for rate in rates)  # 1.48 for many
    return 1.25 * deviation / len(rates) ** 0.5 / middle


def doubt_of(sets):
    """Return the uncertainty of 95 % of the ratio of two single runs, as a share of it.

    `sets` are lists of runs of the same script. It is estimated from the changes between
    successive runs of a set: by their median, so that a stall does not count, and Student's t. Of
    few changes it is at most ONE_RUN, or twice what was seen; without any it is None.
    """
    changes = [abs(math.log(statistics.median(run["rates"]) / statistics.median(before["rates"])))
               for runs in sets for before, run in itertools.pairwise(runs)]
    if not changes:
        return None
    seen = 1.48 * statistics.median(changes)  # the standard deviation of normal numbers
    return min(STUDENT[min(len(changes), 7) - 1] * seen, max(ONE_RUN, 2 * seen))


def compare(runs, others, doubt=None):
    """Return (how many times as fast `runs` are as `others`, the uncertainty of 95 %).

    A run is {"number": its place in time, "rates": its speeds}. A machine's speed drifts, so each
    is compared with `others` at its time: in proportion between their last run before it and the
    next one after it. The uncertainty of one comparison is `doubt` (doubt_of; ONE_RUN if unknown),
    or twice what the rates or the ratios scatter if that is larger.
    """
    ratios, scatters, used = [], [], set()
    for run in runs:
        at = run["number"]
        first = ([each for each in others if each["number"] <= at] or others[:1])[-1]
        last = ([each for each in others if each["number"] >= at] or others[-1:])[0]
        begin, end = first["number"], last["number"]
        share = (at - begin) / (end - begin) if end > begin else 0
        rate, before, after = (statistics.median(one["rates"]) for one in (run, first, last))
        ratios.append(rate / ((1 - share) * before + share * after))
        nearest = last if share > 0.5 else first
        scatters.append(math.hypot(scatter(run["rates"]), scatter(nearest["rates"])))
        used |= {begin, end}
    ratio, n = statistics.median(ratios), len(ratios)
    apart = statistics.stdev(ratios) / ratio if n > 1 else 0
    most = max(2 * max(STEADY, statistics.fmean(scatters)), 2 * apart,
               ONE_RUN if doubt is None else doubt)
    return ratio, ratio * most * ((1 / n + 1 / min(n, len(used))) / 2) ** 0.5


def is_settled(ratio, spread):
    """Return whether more runs would hardly change the verdict."""
    return abs(ratio - 1) > spread or abs(ratio - 1) + spread < PAYS - 1


def verdict(ratio, spread):
    """Return "faster", "slower", "no difference" or, with too large a spread, "not clear"."""
    if abs(ratio - 1) < max(spread, PAYS - 1):
        return "no difference" if spread <= CLEAR else "not clear"
    return "faster" if ratio > 1 else "slower"


def is_kept(ratio, spread, n):
    """Return whether a set of `n` runs is kept: its only run gains, or all of them do for certain.

    One run is enough at first, so that a few minutes find a fast set.
    """
    return ratio >= PAYS if n == 1 else verdict(ratio, spread) == "faster"


class Row:
    """A set of techniques, what its runs gave, and the row that it is compared with."""

    doubt = None  # the uncertainty of the ratio of two runs, as soon as something has run twice

    def __init__(self, techniques=(), base=None):
        self.techniques, self.base, self.runs, self.error = techniques, base, [], ""

    def name(self):
        return " + ".join(self.techniques) or "as it is"

    def label(self):
        """Return what the row adds to the set before it: "+ compile"."""
        return self.name().removeprefix(f"{self.base.name()} " if self.base else "")

    def rate(self):
        """Return the median samples/s (steps/s without a DataLoader) of all windows."""
        return statistics.median(rate for run in self.runs for rate in run["rates"])

    def mean(self, key):
        found = [run[key] for run in self.runs if run[key] is not None]
        return statistics.fmean(found) if found else None

    def ratio(self, base=None):
        """Return (how many times as fast as `base` it is, the uncertainty)."""
        return compare(self.runs, (base or self.base).runs, self.doubt)

    def gains(self, least=PAYS, base=None):
        ratio, spread = self.ratio(base)
        return Row.doubt is not None and ratio >= least and ratio - 1 > spread and not (
            self.has_other_losses())

    def is_kept(self):
        return bool(self.runs) and self.techniques[-1] not in OTHER_DATA and (
            not self.has_other_losses() and is_kept(*self.ratio(), len(self.runs)))

    def is_settled(self):
        return Row.doubt is not None and is_settled(*self.ratio()) or self.has_other_losses()

    def has_other_losses(self):
        """Return whether its losses differ on average from its base's, of the same data.

        They may differ by 5 %, and by three standard errors: compiled dropout draws other numbers.
        """
        pairs = list(zip(self.base.runs[0]["losses"], self.runs[0]["losses"]))
        new = {*self.techniques} - {*self.base.techniques}
        if new & {*OTHER_DATA} or not pairs or not all(math.isfinite(one) for one, _ in pairs):
            return False
        gaps = [other - one for one, other in pairs]
        if not all(map(math.isfinite, gaps)):
            return True
        size = statistics.fmean(abs(one) for one, _ in pairs)
        return abs(statistics.fmean(gaps)) > 0.05 * size + 3 * (
            statistics.pstdev(gaps) / len(gaps) ** 0.5)

    def verdict(self):
        if not self.runs:
            return self.error
        if not self.base:
            return ""
        ratio, spread = self.ratio()
        if self.has_other_losses():
            told = "other losses: this changes the training"
        elif self.techniques[-1] in OTHER_DATA:
            told = OTHER_DATA[self.techniques[-1]]
        elif len(self.runs) == 1 and not self.is_settled():
            told = "ran once"
        else:
            told = verdict(ratio, spread).replace("faster", "pays")
        return told + (f" ({ratio:.2f}x of {self.base.name()})" if self.base.techniques else "")


# ------------------------------------------------------------------------------- what can be tried
def main_loader(facts):
    """Return the first loader that trains, or {}."""
    return facts["loaders"][facts["training"][0]] if facts["training"] else {}


def workers_wanted(facts):
    return max(1, min(16, facts["cores"] // facts["processes"]))


def batch_times(facts):
    """Return how many times as large a batch fits into memory and leaves four steps an epoch."""
    room = 0.8 * facts["memory"] / facts["peak"] if facts["peak"] else 2
    steps = main_loader(facts).get("length") or math.inf
    return max((times for times in (2, 4) if times <= room and steps >= 4 * times), default=1)


def kind(name):
    """Return "amp" for "amp bfloat16". Only one technique of a kind can be used."""
    return name.split()[0]


def reasons(facts):
    """Return {technique: why it cannot be tried}."""
    seen, loader, on_gpu = {*facts["seen"]}, main_loader(facts), facts["device"] == "cuda"
    unfused = [each["kind"] for each in facts["optimizers"] if not each["can_fuse"]]
    if all(each["fused"] for each in facts["optimizers"]):
        seen.add("fused")
    if loader and loader["workers"] >= workers_wanted(facts) and loader["persistent"] and (
            loader["pin"] or not on_gpu):
        seen.add("workers")
    rules = [  # (whether it is so, what it means, for which techniques); the first one is told
        (not on_gpu, "it needs an NVIDIA GPU",
         {"amp float16", "compile reduce-overhead", "cudnn", "tf32"}),
        (not loader, "the script trains without a torch DataLoader",
         {"no_loading", "workers", "batch"}),
        (not facts["models"], "no torch.nn.Module is called in a step",
         {"amp", "compile", "channels_last"}),
        ("image" not in seen, "the model has no 2-D convolution", {"channels_last"}),
        (loader.get("repeats"), "an IterableDataset without get_worker_info may give each worker "
         "the same data", {"workers"}),
        (not facts["optimizers"], "the optimizer is made in another process", {"fused"}),
        (unfused, f"torch has no fused {', '.join(unfused)}", {"fused"}),
        (seen, "already there", seen),  # other names than those of techniques do not matter
        ("several GPUs" in seen, "DataParallel on several GPUs cannot be compiled", {"compile"}),
        ("convolution" not in seen, "the model has no convolution", {"cudnn"}),
        (facts.get("capability", 0) < 8, "this GPU has no TF32", {"tf32"}),
        (not loader.get("can_grow"), "the dataset makes the batches itself", {"batch"}),
        (batch_times(facts) == 1, "no memory is left, or an epoch has too few steps", {"batch"})]
    return {name: why for is_so, why, names in reversed(rules) if is_so
            for name in TECHNIQUES if {name, kind(name)} & names}


# -------------------------------------------------------------------------------- what to try next
class Session:
    """The rows of the table, and the time left for more."""

    def __init__(self, args, cwd, script, folder):
        self.args, self.cwd, self.script, self.folder = args, cwd, script, folder
        self.deadline = time.monotonic() + 60 * args.minutes
        self.seconds, self.facts, self.extra = args.seconds, None, dict(training=[])
        self.rows, self.left_out = [Row()], {}  # {a technique or a sum: why it was not tried}
        self.number = 0  # of runs until now
        self.took = []  # seconds of each run beyond the measured ones
        self.told = []  # lines of the table that were printed

    def left(self):
        return self.deadline - time.monotonic()

    def has_time(self, runs=1):
        return self.left() > runs * (self.seconds + statistics.fmean(self.took))

    def plan(self, wanted):
        """Set what later runs take from the first, and how long each measures."""
        self.extra = dict(training=self.facts["training"], workers=workers_wanted(self.facts),
                          times=batch_times(self.facts))
        share = self.left() / (2 * len(wanted) + 2)
        self.seconds = max(min(3, self.seconds), min(self.seconds, share - self.took[0]))

    def spec(self, techniques):
        """Return what the processes of the next run have to know."""
        names = ("XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR",
                 "TRITON_CACHE_DIR")
        caches = ["~/.cache", "~/.triton", *filter(None, map(os.environ.get, names))]
        return dict(
            techniques=techniques, first=self.facts is None, seconds=self.seconds, **self.extra,
            script=str(self.script), arguments=self.args.arguments, cwd=str(self.cwd),
            folder=os.path.join(self.folder, str(self.number)),
            roots=sorted({str(self.cwd), str(self.script.parent)}),
            free=[self.folder, "/dev", "/proc", *map(os.path.expanduser, caches)])

    def measure(self, row):
        """Run the script once, and add that to the row. Return whether it gave a rate."""
        is_first, begin, name = self.facts is None, time.monotonic(), row.name()
        if not is_first and not self.has_time():
            return False
        limit = self.left() / 2 if is_first else min(
            self.left(), (300 if "compile" in name else 60) + 3 * (self.took[0] + self.seconds))
        result = run_once(self.spec(row.techniques), limit, lambda windows: progress(
            f"{name}: {time.monotonic() - begin:.0f} s, {len(windows)} of {WINDOWS} windows"))
        windows, facts = result["windows"], result.get("facts", self.facts)
        self.number += 1
        is_enough = len(windows) > 1 and not is_first and result["error"].startswith("cut off")
        if result["error"] and not is_enough:
            row.error, row.traceback = result["error"], result.get("traceback", "")
            return False
        total = {key: sum(window[key] for window in windows) for key in windows[0]}
        self.took.append(time.monotonic() - begin - total["seconds"])
        if is_first:
            self.facts = facts | dict(peak=result["memory"])
            counted = statistics.median(window["samples"] for window in windows)
            self.unit = "samples" if counted else "steps"  # a window may hold a loader's start only
        row.runs.append(dict(
            number=self.number - 1, memory=result.get("memory"), losses=result.get("losses", []),
            rates=[window[self.unit] * facts["processes"] / window["seconds"]
                   for window in windows],
            wait=total["wait"] / total["seconds"], step_seconds=total["seconds"] / total["steps"],
            step_samples=total["samples"] / total["steps"]))
        Row.doubt = doubt_of(each.runs for each in self.rows)
        return True

    def attempt(self, base, *names, then=0):
        """Return a row of `base` and more techniques; measure it if `then` runs fit after it.

        The first row needs no time after it: there may be nothing to add up.
        """
        row = Row((*base.techniques, *names), base)
        if not self.has_time(1 + then * (len(self.rows) > 1)):
            self.left_out[" + ".join(names)] = "no time left (--minutes)"
            return row
        self.rows.append(row)
        self.measure(row)
        self.tell(row)
        return row

    def tell(self, row):
        """Print a row's line of the table."""
        self.told.append(line_of(row, self.rows[0]))
        say(self.told[-1])

    def climb(self, top, choices, then=0):
        """Try each choice, names of one kind, on top of what gained; return the last set."""
        for names in choices:
            rows = [self.attempt(top, name, then=then) for name in names]
            top = max(filter(Row.is_kept, rows), key=lambda row: row.ratio()[0], default=top)
        return top

    def settle(self, row):
        """Run a row and its base by turns until it is settled."""
        while row.runs and not row.is_settled() and len(row.runs) < self.args.runs:
            if not (self.has_time(2) and self.measure(row.base) and self.measure(row)):
                break


def chain(row):
    """Return the rows that lead to a set, the last one first, without the script as it is."""
    return [row, *chain(row.base)] if row.base else []


def can_join(row, top):
    """Return whether the last technique of a row may gain on top of the set `top`, too."""
    name = row.techniques[-1]
    return name not in OTHER_DATA and kind(name) not in map(kind, top.techniques) and not (
        row.has_other_losses() or row.verdict().startswith("slower"))


def explore(session, wanted):
    """Add one technique after another to the script, and keep what gains.

    compile comes late, because it starts slowly. Loading comes before it, or first if the script
    waits for data. Then runs are repeated, and what was left out is tried on top of what was kept.
    Return the row of the best set, with real loading.
    """
    plain, again = session.rows[0], 2 * (session.args.runs > 1)  # the sum and the plain script
    if wanted and again and session.has_time(2 + len(wanted)):
        session.measure(plain)  # again: how much do runs differ, and what if files are in memory?
    choices = [[*names] for _, names in itertools.groupby(wanted, kind)]
    loads = [names for names in choices if names[0] in ("no_loading", "workers")]
    after = [names for names in choices if names not in loads]
    before = []
    if plain.runs[-1]["wait"] < SELDOM:
        before = [names for names in after if kind(names[0]) not in ("compile", "batch")]
    base = session.climb(plain, before, then=again)
    base = real = session.climb(base, loads, then=again)
    if (cached_row := without_loading(session.rows)) and (
            real.runs[-1]["wait"] > WAITS or cached_row.gains(1 + WAITS, real)):
        base = cached_row  # with loading, nothing else can show what it gains
    top = session.climb(base, [names for names in after if names not in before],
                        then=again + (base is not real))
    if base is not real:  # measure the sum with real loading
        added, top = top.techniques[len(base.techniques):], real
        if added:
            row = session.attempt(real, *added)
            session.settle(row)
            top = row if row.is_kept() else real
    if top is not plain and again and session.measure(plain):
        session.measure(top)  # the sum once more, beside the plain script
    for row in chain(top):
        session.settle(row)
    rest = [row for row in session.rows if row.runs and row.base and row not in chain(top)
            and (can_join(row, top) or row.techniques[-1] == "batch")]
    for row in sorted(rest, key=lambda row: -sum(row.ratio())):  # the most promising first
        if base is real and row.base is not top and can_join(row, top) and session.has_time(1):
            row = session.attempt(top, row.techniques[-1])
        session.settle(row)
        if row.base is top and row.is_kept() and can_join(row, top):
            top = row
    while top.base and min(top.ratio()[0], top.ratio(plain)[0]) < PAYS:  # only first runs gained
        top = top.base
    return top


# --------------------------------------------------------------------------------------- the table
def progress(text):
    """Show what is under way, in place, on a terminal."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]}\033[K", end="", flush=True)


def say(text):
    progress("")
    print(text, flush=True)


def heading(unit):
    return (f"{'':<25} {unit + '/s':>10}  {'as fast':<14} {'waits':>5} {'GPU GB':>7}  "
            f"{'loss / plain':<17} n  verdict")


def speed(rate):
    """Return a speed as a short text, without its unit."""
    return f"{rate:,.{0 if rate > 99 else 1}f}"


def line_of(row, plain):
    """Return a row's line of the table."""
    if not row.runs:
        return f"{row.name():<25} {'-':>10}  {row.verdict()}"
    ratio, rate, memory, losses = "1", row.rate(), row.mean("memory"), "-"
    if row.base:
        ratio = "{:.2f}x +- {:.2f}".format(*row.ratio(plain))
    if not {*OTHER_DATA} & {*row.techniques} and row.runs[0]["losses"]:
        pairs = list(zip(row.runs[0]["losses"], plain.runs[0]["losses"]))[-10:]
        means = map(statistics.fmean, zip(*pairs))
        losses = " / ".join(f"{one:#.4g}" if abs(one) < 999 else f"{one:,.0f}" if abs(one) < 1e6
                            else f"{one:.1e}" for one in means)
    return (f"{row.label():<25} {speed(rate):>10}  {ratio:<14} "
            f"{row.mean('wait'):>5.0%} {f'{memory / 1e9:.2f}' if memory else '-':>7}  {losses:<17} "
            f"{len(row.runs)}  {row.verdict()}").rstrip()


# -------------------------------------------------------------------------------------- the advice
KERNELS = {  # what holds a busy GPU back, by what most of its time goes into
    "products": ("The device", "convolutions and products"),
    "memory": ("The device's memory", "kernels that read and write more than they compute (norms, "
               "activations, copies, the optimizer)"),
    "communication": ("Communication between GPUs", "NCCL")}
BRAKES = {  # what slows a script down wherever it is
    "no set_epoch": "DistributedSampler without set_epoch(epoch): each epoch has the same order",
    "DataParallel": "DataParallel copies the model in each step; use DistributedDataParallel "
                    "(src/train_DDP.py)",
    "SyncBatchNorm": "SyncBatchNorm makes all processes wait in each of its layers"}


def without_loading(rows):
    """Return the row that repeats batches on top of one with real ones, or None."""
    return next((row for row in rows if row.runs and row.techniques[-1:] == ("no_loading",)), None)


def waits_for_data(rows):
    """Return whether loading is what holds the script back as it is."""
    wait, loads = rows[0].mean("wait"), without_loading(rows)
    if not loads or loads.base is not rows[0]:
        return rows[0].runs[-1]["wait"] > WAITS  # the first run may have read files from the disk
    return wait > WAITS and loads.ratio()[0] > 1.1 or wait > 0.05 and loads.gains(1.1)


def loading_is_next(rows, best):
    """Return a sentence if loading holds the set `best` back, or that and one technique, or ""."""
    loads, waits = without_loading(rows), max(
        (row for row in rows if row.runs and best in (row, row.base)
         and row.techniques[-1:] != ("batch",)), key=lambda row: row.mean("wait"))
    if waits_for_data(rows):
        return ""  # already told
    if waits.mean("wait") > WAITS:
        return (f"With {waits.name()}, steps wait for data {waits.mean('wait'):.0%} of the time: "
                "faster loading is next.")
    real = loads and max(loads.base, best, key=Row.rate)
    if loads and loads.gains(1.1, real):  # workers may take the cores from steps
        name = real.name() if real.base else "the script as it is"
        return (f"Cached batches are {loads.ratio(real)[0]:.2f}x as fast as {name}: "
                "faster loading is next.")
    return ""


def held_back_by(facts, rows):
    """Return a sentence: what holds the script back, with its evidence."""
    wait, step = rows[0].mean("wait"), rows[0].mean("step_seconds")
    took = f"{1000 * step:.3g} ms" if step < 0.9995 else f"{step:.3g} s"
    told = f"a step takes {took} and waits for data {wait:.0%} of it"
    if (loads := without_loading(rows)) and not loads.base.base:
        told += f"; with cached batches it is {loads.ratio()[0]:.2f}x as fast"
    if waits_for_data(rows):
        return f"Data: {told}."
    if facts["device"] != "cuda":  # loading may take the cores from steps, though none waits
        loads = loads and loads.gains(1.1)
        return f"The CPU, which {'loads data and ' * bool(loads)}computes the steps: {told}."
    if not facts["busy"]:
        return f"The host or the GPU; its kernels could not be timed: {told}."
    busy, kinds = min(1, facts["busy"] / step), facts["kernels"]
    told = f"the GPU works in {busy:.0%} of a step; {told}"
    if busy < 0.8:
        return f"The host, which runs Python and starts kernels: {told}."
    most = max(kinds, key=kinds.get)
    what, where = KERNELS[most]
    return f"{what}: {told}; {kinds[most]:.0%} of the GPU's time goes into {where}."


def also_seen(facts):
    """Return a line for each known slowdown that is in the script."""
    lines = []
    for loader in (facts["loaders"][number] for number in facts["training"]):
        if not loader["workers"]:
            lines.append(f"{loader['at']}: a DataLoader without workers (num_workers) loads while "
                         "no step runs")
        elif loader["method"] != "fork" and not loader["persistent"]:
            lines.append(f"{loader['at']}: without persistent_workers=True, {loader['method']} "
                         "starts all workers again in each epoch")
        if facts["device"] == "cuda" and not loader["pin"]:
            lines.append(f"{loader['at']}: pin_memory=True lets .to(device, non_blocking=True) "
                         "copy while the GPU works")
    return lines + [line for what, line in BRAKES.items() if what in facts["seen"]]


def advice(name, facts, extra):
    """Return what to write for a technique, with names and places of the script."""
    def line(of):
        return f"{of['at']}  {of['text']}" if of else ""
    text, models, optimizers = TECHNIQUES[name], facts["models"], facts["optimizers"]
    model, loader = models[0] if models else {}, main_loader(facts)
    places = [place for each in models for place in [
        *([f"{each['name']} ({(each['above'] or each)['at']})"] if "{model}" in text else []),
        *([f"{each['local']} ({at})" for at in each["calls"]] if "{call}" in text else [])]]
    first = ("{model}" in text) + ("{call}" in text)  # of these places are in the text itself
    if places[first:] and first:
        text += "\n        likewise: {places}"
    if kind(name) in ("amp", "compile", "channels_last", "fused", "cudnn"):
        text += (f"\n        example: diff src/train.py src/train_{kind(name)}.py "
                 "in pytorch-speedup")
    optimizer = optimizers[0] if optimizers else {}
    users = {"{loader}": loader, "{call}": model, "{optimizers}": optimizer}
    users = [of for its, of in users.items() if its in text]
    if kind(name) == "amp":  # a Trainer may let the user call the model, and scale the loss itself
        users += [optimizer, loader]
    option, inside = next(((LIBRARIES[of["library"]][name], of) for of in users
                           if name in LIBRARIES.get(of.get("library"), {})), ("", {}))
    if option:
        text = f"{{inside}}\n            {option}"
    elif library := users and users[0].get("library"):
        text = f"inside {library}, which has to be told to do this:\n        {text}"
    below = f"above {line(model['above'])}" if model.get("above") else (
        f"below the line that makes {model.get('name', '').removesuffix('.module')}")
    called = model.get("name", "")
    if name == "channels_last" and model.get("is_wrapped"):
        called = "model" if called.endswith(".module") else called
        below = "before DistributedDataParallel or DataParallel gets the model"
    if not optimizers:  # a pickled model loses what compile() did
        below = "in the process that trains, before its first step"
    return text.format(
        **extra, autocast=autocast_of(model, facts["device"], f"torch.{name.split()[-1]}"),
        device=facts["device"], model=called, below=below,
        instead=" in place of foreach=True" * any(each.get("foreach") for each in optimizers),
        call=line(model), loader=line(loader), inside=line(inside),
        pin=", pin_memory=True" * (facts["device"] == "cuda"), places=", ".join(places[first:]),
        optimizers="\n        ".join(map(line, optimizers)))


def autocast_of(model, device, dtype):
    """Return the lines that call a model under autocast, and its loss outside of it."""
    autocast, is_tensor = f'torch.autocast("{device}", {dtype})', bool(model.get("is_tensor"))
    name = model.get("local")  # where it is called
    lines = [f"instead of {name}(...): {autocast}({name})(...)" + ".float()" * is_tensor]
    if model.get("statement"):
        lines = [f"with {autocast}:", f"    {model['statement']}"]
        if is_tensor:
            lines.append(f"{model['target']} = {model['target']}.float()")
    if not is_tensor:
        lines.append("and a loss outside of the model takes the output's tensors as .float()")
    return f"\n{12 * ' '}".join(lines)


def paragraph(text):
    """Return `text` in lines of 100 columns, two of them empty at the left."""
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  ",
                         break_on_hyphens=False)


def report(session, best):
    """Print the table, what holds the script back, and what to write."""
    facts, plain = session.facts, session.rows[0]
    lines = [line_of(row, plain) for row in session.rows]
    if lines != session.told:  # some rows ran again
        say("\n".join(["", heading(session.unit), *lines]))
    speeds = [statistics.median(run["rates"]) for run in plain.runs]
    if max(speeds) > MOVED * min(speeds):
        say(f"The script as it is ran at {speed(min(speeds))} to {speed(max(speeds))} "
            f"{session.unit}/s: something else used the machine, or loading varied.")
    for row in session.rows:
        if row.runs and row.error:
            say(f"A later run of {row.name()} failed: {row.error}")
    say(f"\nWhat holds it back\n{paragraph(held_back_by(facts, session.rows))}")
    if facts["lines"]:
        say("  In each step these lines make the host wait for the GPU:")
    for place, text in facts["lines"]:
        say(f"    {place}  {text}")
    for line in also_seen(facts):
        say(f"  {line}")
    batches = [row for row in session.rows if row.runs and row.techniques[-1:] == ("batch",)
               and "no_loading" not in row.techniques]
    is_next = loading_is_next(session.rows, best)
    paying = [name for name in TECHNIQUES if name in best.techniques
              or name == "no_loading" and (is_next or waits_for_data(session.rows))
              or name == "batch" and any(row.gains(1.1) for row in batches)]
    if paying:
        say("\nWhat to write")
    notes = {name: "  (may gain: see its verdict)" if row.ratio()[0] >= PAYS else
             "  (it gained in its first run only: try without it)"
             for row in chain(best) if not row.gains()
             for name in row.techniques[len(row.base.techniques):]}
    for name in paying:
        say(f"  {name}{notes.get(name, '')}\n        {advice(name, facts, session.extra)}")
    if len(best.techniques) > 1:
        ratio, spread = best.ratio(plain)
        is_clear = Row.doubt is not None and ratio - 1 > spread
        say(f"\nTogether, {best.name()}: {ratio:.2f}x +- {spread:.2f}"
            + f"; not clear yet: give it more --{'runs' if session.args.runs == 1 else 'minutes'}"
            * (not is_clear))
    if is_next:
        say(f"\n{is_next}")
    if session.left_out:
        say("\nNot tried")
    for why in dict.fromkeys(session.left_out.values()):
        names = ", ".join(name for name, one in session.left_out.items() if one == why)
        say(paragraph(f"{names}: {why}"))


def write_record(session, best):
    """Write what was measured to the file of --json."""
    args, plain = session.args, session.rows[0]
    rows = [dict(name=row.name(), verdict=row.verdict(), runs=row.runs) | (
        dict(zip(("ratio", "spread"), row.ratio(plain)), rate=row.rate()) if row.runs else {})
        for row in session.rows]
    for run in (run for row in rows for run in row["runs"]):  # JSON has no NaN
        run["losses"] = [loss if math.isfinite(loss) else None for loss in run["losses"]]
    args.json.write_text(json.dumps(dict(
        date=time.strftime("%Y-%m-%d"), command=shlex.join(["python", *sys.argv]),
        script=str(args.script), arguments=args.arguments, unit=session.unit, best=best.name(),
        left_out=session.left_out, facts=session.facts, rows=rows), indent=1) + "\n")


# --------------------------------------------------------------------------------------- the start
def parse(words):
    """Return the options, the script and its own arguments."""
    known = list(dict.fromkeys(map(kind, TECHNIQUES)))
    parser = argparse.ArgumentParser(
        "whatif.py", allow_abbrev=False, description=__doc__.splitlines()[0],
        usage=__doc__.split("\n\n")[1].strip())
    add = parser.add_argument
    add("--seconds", type=float, default=20, help="to measure in each run, after its warm-up")
    add("--minutes", type=float, default=10, help="for all runs together")
    add("--runs", type=int, default=4, help="at most this many runs of a row")
    add("--only", default=",".join(known), help=f"of {', '.join(known)}; plain: none of them")
    add("--json", type=Path, help="write the results to this file, too")
    add("--copy", action="store_true", help="run in a copy of the folder, and remove it at the end")
    add("script", type=Path, help="a training script")
    add("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    args = parser.parse_args(words)
    args.only = args.only.split(",")
    odd = ", ".join({*args.only} - {*known, "plain"})
    for is_wrong, why in (
            (odd, f"--only {odd}: choose from {', '.join(known)}, plain"),
            (min(args.seconds, args.minutes, args.runs) <= 0,
             "--seconds, --minutes and --runs have to be above 0"),
            (args.json and (args.json.is_dir() or not args.json.resolve().parent.is_dir()),
             f"--json {args.json}: name a file, in a folder that is there"),
            (not args.script.is_file(), f"{args.script}: there is no such script"),
            (args.copy and Path.cwd() not in args.script.resolve().parents,
             f"--copy: {args.script.resolve()} is not below {Path.cwd()}, which is copied"),
            (RANKS != int(os.environ.get("LOCAL_WORLD_SIZE", RANKS)),
             "it measures on one machine, but torchrun runs on several")):
        if is_wrong:
            parser.exit(2, f"whatif.py: error: {why}\n")
    return args


def measure_all(session):
    """Run everything and print the report. Return the exit status."""
    args, plain, status = session.args, session.rows[0], 0
    hint = "" if args.copy else " --copy runs all in a copy of the folder."
    say(f"""{args.script} runs several times, each for up to {args.seconds:g} s after its warm-up, \
in at most {args.minutes:g} minutes.
The first run writes, deletes and sends what the script does until it is ended. Later runs write
files of Python and torch.save to a temporary folder; what other libraries write, and the network,
are not held back.{hint}""")
    best = plain
    try:
        if not session.measure(plain):
            progress("")
            sys.exit(f"{plain.traceback}whatif.py: {args.script}, as it is: {plain.error}")
        facts, why = session.facts, reasons(session.facts)
        wanted = [name for name in TECHNIQUES if kind(name) in args.only]
        session.left_out = {name: why[name] for name in wanted if name in why}
        wanted = [name for name in wanted if name not in why]
        session.plan(wanted)
        kinds = ", ".join(each["kind"] for each in facts["models"] + facts["optimizers"])
        say(f"{kinds}; {facts.get('gpu', 'CPU')}, {facts['cores']} cores, {facts['processes']} "
            f"process(es), torch {facts['torch']}")
        say(heading(session.unit))
        session.tell(plain)
        best = explore(session, wanted)
    except KeyboardInterrupt:
        say("\nStopped: this table is not finished.")
        kept = [row for row in session.rows if row.base and row.is_kept()
                and "no_loading" not in row.techniques]
        best = max(kept, key=lambda row: row.ratio(plain)[0], default=plain)
        status = 130
    if plain.runs:
        report(session, best)
        if args.json:
            write_record(session, best)
    return status


def main():
    if RANK > 0:
        return 0  # rank 0 starts all processes of the script
    args, cwd = parse(sys.argv[1:]), Path.cwd()
    script = args.script.resolve()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    new_folder = functools.partial(tempfile.TemporaryDirectory, ignore_cleanup_errors=True)
    with contextlib.ExitStack() as made:
        if args.copy:  # beside the folder, so that ../data is there, or in TMPDIR
            source, beside = cwd, cwd.parent if os.access(cwd.parent, os.W_OK) else None
            try:
                cwd = Path(made.enter_context(new_folder(prefix=f"{source.name}.whatif-",
                                                         dir=beside)))
                say(f"Copying {source} to {cwd}.")
                shutil.copytree(source, cwd, symlinks=True, dirs_exist_ok=True,
                                ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
            except OSError as error:
                sys.exit(f"whatif.py: error: --copy: {str(error)[:200]}")
            except KeyboardInterrupt:
                return 130
            script = cwd / script.relative_to(source)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: STOPPED.append(number))
        folder = made.enter_context(new_folder(prefix="whatif-"))
        return measure_all(Session(args, cwd, script, folder))


if __name__ == "__main__":
    if TRIAL in os.environ:  # as a module, whose classes the script's processes can unpickle
        importlib.import_module(Path(__file__).stem).run_script()
    else:
        sys.exit(main())
