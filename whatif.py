#!/usr/bin/env python3
"""Measure what each technique would buy in your own PyTorch training script, before you change it.

    python whatif.py [--seconds 20] [--minutes 10] [--runs 4] [--only amp,compile] [--json FILE]
                     [--copy] my_train.py ITS OWN ARGUMENTS

It runs the script as it is for some seconds, and then again with one technique after another. Each
run is a process of its own and ends before the script's own end. It prints how fast each was, what
holds the script back, and the lines to write. This file needs only torch: copy it anywhere.
"""

import argparse
import builtins
import collections
import contextlib
import copy
import functools
import importlib
import inspect
import io
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
import types
import warnings
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

WINDOWS = 5  # that a run measures
LEAST_STEPS = 5  # of the warm-up
WATCHED = 10  # steps in which models are looked for
LOSSES = 100  # at most, of a run, to be compared with those of the plain run
CACHED = 8  # batches that a run without loading repeats
PAYS = 1.02  # a smaller gain counts as no difference
CLEAR = 0.1  # the largest uncertainty with which "no difference" can be said
LIKELY = 1.05  # after one run, a larger gain may well pay
ONE_RUN = 0.2  # the least uncertainty of a single comparison
STEADY = 0.005  # the least standard deviation of a ratio
STUDENT = 12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36  # Student's t of 95 % for 2, 3, ... runs
SELDOM = 0.02  # a script that waits a smaller share of its time needs no faster loading
WAITS = 0.2  # above this share, waiting for data hides what other techniques gain
TRIAL = "WHATIF_TRIAL"  # the variable that tells a process how to run the script

# what to write for each technique, with names and places of the script, and what to watch
TECHNIQUES = {
    "no_loading": """load faster, or keep the decoded data in memory
        the whole: src/train_cache.py, train_DALI.py, train_LMDB.py in pytorch-speedup""",
    "workers": """{loader}
            num_workers={workers}, persistent_workers=True, pin_memory=True
        watch: each worker takes memory and draws random numbers of its own""",
    "amp bfloat16": """{call}
            with torch.autocast("{device}", torch.bfloat16):
                {text}
            and the loss takes the output as .float()
        watch: compare the accuracy of a whole training""",
    "compile": """above {optimizer}
            {model}.compile()
        watch: it compiles in the first step, and again for a new shape""",
    "channels_last": """above {optimizer}
            {model}.to(memory_format=torch.channels_last)
        {call}
            the images before: .to(memory_format=torch.channels_last)
        watch: it gains more with amp; .view() in a layer may have to be .reshape()""",
    "fused": """{optimizers}
            fused=True
        watch: load_state_dict of an old checkpoint turns it off again""",
    "cudnn": """at the top
            torch.backends.cudnn.benchmark = True
        watch: it tries every new input size; runs differ in the last bits""",
    "tf32": """at the top
            torch.set_float32_matmul_precision("high")
        watch: products in float32 keep 10 bits of mantissa: compare the accuracy""",
    "amp float16": """{call}
            with torch.autocast("{device}", torch.float16):
                {text}
            and the loss takes the output as .float()
        above {optimizer}
            scaler = torch.amp.GradScaler("{device}")
        for loss.backward() and optimizer.step()
            scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
        watch: clip gradients after scaler.unscale_(optimizer); save the scaler's state""",
    "compile reduce-overhead": """above {optimizer}
            {model}.compile(mode="reduce-overhead")
        watch: shapes must not change; it takes memory""",
    "batch": """{loader}
            a batch {times} times as large
        watch: this is another training: tune the learning rate again""",
}
INSTEAD = [{"amp bfloat16", "amp float16"}, {"compile", "compile reduce-overhead"}]
OTHER_DATA = {"no_loading", "batch"}  # their losses are of other batches
STOPPED = []  # signals that came, checked where a run can be ended first
torch = None  # imported in the runs: the process that starts them does not need it


# ------------------------------------------------------------------------------ a run: its clock
class Clock:
    """Times training in windows, without warm-up, validation and checkpoints.

    `synchronize` waits for the device; it is called only where a window begins, pauses or ends.
    `closed` is called with each window: its seconds, steps, samples and seconds of wait for data.
    A window in which `compiled`, a count, changes is dropped; at most WINDOWS are.
    """

    def __init__(self, seconds, synchronize, closed, compiled=lambda: 0):
        self.length, self.warmup = seconds / WINDOWS, min(3, seconds / 4)
        self.synchronize, self.closed, self.compiled = synchronize, closed, compiled
        self.lost = 0
        self.steps = self.count = 0
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

    def begin(self):
        self.pause()
        self.window = dict.fromkeys(self.window, 0)
        self.resume()
        self.opened, self.compiles = self.since, self.compiled()

    def close(self):
        self.pause()
        if self.compiled() != self.compiles and self.lost < WINDOWS:
            self.lost += 1
        else:
            self.count += 1
            self.closed(self.window)
        self.begin()

    def fetched(self, samples, wait):
        if self.since is not None:
            self.window["samples"] += samples
            self.window["wait"] += wait

    def step(self, ahead):
        """Count a step. Return whether it was the last.

        The first `ahead` batches are loaded in advance, so they are part of the warm-up.
        """
        self.steps += 1
        self.first = self.first or time.perf_counter()
        if self.since is None:  # the first step after a pause is not timed
            self.resume()
            return False
        self.window["steps"] += 1
        now = time.perf_counter()
        if self.measures:
            timed = self.window["seconds"] + now - self.since
            if max(timed, (now - self.opened) / 4) >= self.length:  # a window may hold pauses
                self.close()
        elif self.steps >= LEAST_STEPS and now - self.first >= self.warmup and (
                self.steps >= LEAST_STEPS + ahead or now - self.first >= 10):
            self.measures = True
            self.begin()
        return self.count == WINDOWS

    def end(self):
        """Close the last window early, when the script has come to its own end."""
        self.pause()
        if self.measures and self.window["steps"] and (
                not self.count or self.window["seconds"] > self.length / 2):
            self.close()


# -------------------------------------------------------------------- a run: files that it writes
def hold_writes(folder, free):
    """Send files that Python code writes to `folder`, unless they are below a path in `free`."""
    real_open, save = builtins.open, torch.save

    def is_held(path):
        if not isinstance(path, (str, os.PathLike)):
            return False  # an open file
        path = os.path.abspath(path)
        return not any(path == one or path.startswith(one + os.sep) for one in free)

    def held(path):
        return os.path.join(folder, os.path.abspath(path).replace(os.sep, "%")[-200:])

    def open_(file, mode="r", *rest, **options):
        if is_held(file) and (set(mode) & set("wax+") or os.path.exists(held(file))):
            if "r" in mode and not os.path.exists(held(file)):
                shutil.copyfile(file, held(file))
            file = held(file)
        return real_open(file, mode, *rest, **options)

    def drop(owner, name, but=lambda path: False):
        """Make a function do nothing if its target is held back, unless `but` says otherwise."""
        def call(*paths, **options):
            target = [*paths[:2], *map(options.get, ("path", "dst"))]
            target = [path for path in target if isinstance(path, (str, os.PathLike))][-1:]
            if not target or not is_held(target[0]) or "dir_fd" in options or but(target[0]):
                return real(*paths, **options)
        real = getattr(owner, name)
        setattr(owner, name, call)

    os.makedirs(folder)
    builtins.open = io.open = open_
    names = ["mkdir", "rename", "replace", "remove", "unlink", "rmdir", "symlink", "link"]
    for name in names:
        drop(os, name)
    for name in ["open", *names] if hasattr(pathlib, "_NormalAccessor") else []:  # Python 3.10
        setattr(pathlib._NormalAccessor, name, staticmethod(
            open_ if name == "open" else getattr(os, name)))
    for name in ("rmtree", "copymode", "copystat"):
        drop(shutil, name)
    drop(os, "chdir", but=os.path.isdir)  # into a folder that was not made
    torch.save = lambda obj, f, *rest, **options: save(
        obj, held(f) if is_held(f) else f, *rest, **options)


# ------------------------------------------------------------------- a run: watched and changed
def samples_in(batch):
    """Return the number of samples in a batch: the first dimension of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts = batch.values() if isinstance(batch, collections.abc.Mapping) else batch
    if isinstance(parts, (list, tuple, collections.abc.ValuesView)):
        return next((count for part in parts if (count := samples_in(part))), 0)
    return 0


def names_in(frame):
    """Return {name: value} of a frame, with names such as model and self.net."""
    owner = frame.f_locals.get("self")
    of_owner = {**getattr(owner, "__dict__", {}), **getattr(owner, "_modules", {})}
    return {**frame.f_globals, **{f"self.{name}": each for name, each in of_owner.items()},
            **frame.f_locals}


def name_of(value, frame):
    """Return what `value` is called in a frame, or "model"."""
    return next((name for name, each in names_in(frame).items() if each is value), "model")


class Batches:
    """An iterator over a DataLoader, which times the wait; without loading, it repeats batches."""

    def __init__(self, run, loader, start):
        self.run, self.loader, self.number, self.given = run, loader, loader._whatif, 0
        facts, self.kept = run.facts["loaders"][self.number], None
        # a loader with an __iter__ of its own may take all its epochs from this one iterator
        is_plain = type(loader).__iter__ is torch.utils.data.DataLoader.__iter__
        self.length, self.size = facts["length"] if is_plain else None, facts["batch"]
        if "no_loading" in run.names and self.number in run.spec["training"]:
            self.kept = run.kept.setdefault(self.number, [])
        self.batches = start(loader) if not self.is_cached() else None

    def is_cached(self):
        return self.kept and len(self.kept) == min(CACHED, self.length or CACHED)

    def __iter__(self):
        return self

    def __len__(self):
        return self.run.facts["loaders"][self.number]["length"]

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def samples(self, batch):
        """Return the number of samples in a batch; only the last one may be smaller."""
        is_last = self.length and self.given >= self.length
        return self.size if self.size and not is_last else samples_in(batch)

    def __next__(self):
        start = time.perf_counter()
        try:
            if self.kept is not None and self.given == self.length:
                raise StopIteration
            batch = next(self.batches) if not self.is_cached() else copy.copy(
                self.kept[self.given % len(self.kept)])  # a script may pop items from a batch
        except StopIteration:
            self.run.is_exhausted(self.number)
            raise
        if self.kept is not None and not self.is_cached():
            self.kept.append(copy.copy(batch))
            if self.is_cached():  # workers that load on would take the cores
                self.batches = self.loader._iterator = None
        self.given += 1
        self.run.fetched(self.number, self.samples(batch), time.perf_counter() - start)
        return batch


class Child:
    """The target of a process that the script starts, watched as the script is."""

    def __init__(self, target, spec):
        self.target, self.spec = target, spec

    def __call__(self, *args, **kwargs):
        if Run.active is None:  # started by spawn; a fork has it already
            Run(self.spec).install()
        self.target(*args, **kwargs)
        if Run.active.clock.steps:
            Run.active.ended()


class Forward:
    """A changed forward. Copies and pickles of the model get the plain one."""

    def __init__(self, plain, changed):
        self.plain, self.changed = plain, changed

    def __call__(self, *args, **kwargs):
        return self.changed(*args, **kwargs)

    def __reduce__(self):
        return functools.partial, (self.plain,)


class Run:
    """What is watched and changed in the process that runs the script, as `spec` says."""

    active = None

    def __init__(self, spec):
        global torch
        import torch
        import torch.utils.data.distributed
        Run.active = self
        self.spec, self.names = spec, set(spec["techniques"])
        self.clock = Clock(spec["seconds"], self.synchronize, lambda window: self.send(
            window=window), self.compiled)
        self.facts = dict(models=[], optimizers=[], loaders=[], seen=[], lines=[], busy=None)
        self.losses, self.models, self.optimizers = [], [], []
        self.numbers, self.kept = {}, {}  # of the loaders, and the batches that are cached
        self.called = {}  # names of the modules where optimizers are made, by id
        self.lead = None  # the optimizer whose steps are counted
        self.latest = self.training = None  # loaders by number: of the last batch, the last step
        self.fetched_from, self.steps_of = set(), collections.Counter()
        self.device, self.scaler, self.scales, self.look = "cpu", None, False, None

    def send(self, **record):
        file = os.open(self.spec["records"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, (json.dumps({"pid": os.getpid(), **record}) + "\n").encode())
        os.close(file)

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def compiled(self):
        """Return how many functions were compiled; a new shape compiles them again."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        return dynamo.counters["frames"]["total"] if dynamo else 0

    def see(self, what, is_so=True):
        if is_so and what not in self.facts["seen"]:
            self.facts["seen"].append(what)

    def is_users(self, frame):
        file = frame.f_code.co_filename
        return file.startswith(tuple(self.spec["roots"])) and file != __file__ and (
            "site-packages" not in file)

    def frame(self):
        """Return the innermost frame of the user's own code, or else the outermost of all."""
        frame = sys._getframe(1)
        while frame.f_back and not self.is_users(frame):
            frame = frame.f_back
        return frame

    def place(self):
        """Return {at: "file:line", text: its text} of the innermost line of the user's own code."""
        file, line = (frame := self.frame()).f_code.co_filename, frame.f_lineno
        return dict(at=f"{os.path.relpath(file)}:{line}",
                    text=linecache.getline(file, line).strip())

    @staticmethod
    def wrap(owner, name, wrapper):
        """Replace owner.name by a function that calls wrapper(original, *args, **kwargs)."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args, **kwargs):
            return wrapper(original, *args, **kwargs)
        setattr(owner, name, wrapped)
        return original, wrapped

    def note(self, owner, name, what):
        def wrapper(original, *args, **kwargs):
            self.see(what)
            return original(*args, **kwargs)
        self.wrap(owner, name, wrapper)

    def enter_autocast(self, original, context):
        self.see("amp", context._enabled)
        return original(context)

    def install(self):
        """Begin to watch, and change what this run's techniques change."""
        from torch.optim.optimizer import register_optimizer_step_post_hook
        data = torch.utils.data
        self.wrap(data.DataLoader, "__init__", self.make_loader)
        self.wrap(data.DataLoader, "__iter__", self.iterate)
        self.wrap(torch.autograd, "backward", self.backward)
        self.wrap(torch.amp.GradScaler, "scale", self.scale)
        self.wrap(torch.optim.Optimizer, "__init__", self.make_optimizer)
        self.wrap(BaseProcess, "start", self.start_process)
        self.calls = self.wrap(torch.nn.Module, "__call__", self.call_module)
        register_optimizer_step_post_hook(self.step)
        if self.spec["first"]:
            self.note(torch, "compile", "compile")
            self.wrap(torch.autocast, "__enter__", self.enter_autocast)
            self.note(data.distributed.DistributedSampler, "set_epoch", "set_epoch")
        else:
            hold_writes(self.spec["held"] + f".{os.getpid()}", self.spec["free"])
        if "channels_last" in self.names:  # the buckets of DDP take the layout of the weights
            self.wrap(torch.nn.parallel.DistributedDataParallel, "__init__",
                      lambda original, parallel, module, *args, **kwargs: original(
                          parallel, module.to(memory_format=torch.channels_last), *args, **kwargs))
        if "amp float16" in self.names:
            self.scaler = torch.amp.GradScaler("cuda")
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                self.wrap(torch.nn.utils, name, self.clip)
        random.seed(0)  # a script that sets no seed gets the same one in each run
        torch.manual_seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)

    # ---- data
    def number_of(self, dataset):
        """Return the number of a DataLoader; one that is made anew in each epoch keeps its own."""
        frame, lines = sys._getframe(1), []
        while frame := frame.f_back:
            lines += [(frame.f_code.co_filename, frame.f_lineno)] * self.is_users(frame)
        key = tuple(lines), len(dataset) if hasattr(dataset, "__len__") else None
        return self.numbers.setdefault(key, len(self.numbers))

    def make_loader(self, original, loader, *args, **kwargs):
        call = inspect.signature(original).bind(loader, *args, **kwargs)
        given = call.arguments
        number = self.number_of(given["dataset"])
        if number in self.spec["training"] and "workers" in self.names:
            given |= dict(num_workers=self.spec["workers"], persistent_workers=True,
                          pin_memory=torch.cuda.is_available())
        if number in self.spec["training"] and "batch" in self.names:
            if sampler := given.get("batch_sampler"):
                sampler._whatif = getattr(sampler, "_whatif", sampler.batch_size)
                sampler.batch_size = sampler._whatif * self.spec["times"]
            else:
                given["batch_size"] = given.get("batch_size", 1) * self.spec["times"]
        original(*call.args, **call.kwargs)
        self.note_loader(loader, number)

    def note_loader(self, loader, number):
        loader._whatif = number
        try:
            length = len(loader)
        except TypeError:  # of an IterableDataset
            length = None
        kinds = torch.utils.data.IterableDataset, torch.utils.data.distributed.DistributedSampler
        self.facts["loaders"][number:number + 1] = [dict(
            **self.place(), workers=loader.num_workers, pin=loader.pin_memory, length=length,
            persistent=loader.persistent_workers, iterable=isinstance(loader.dataset, kinds[0]),
            batch=getattr(loader.batch_sampler, "batch_size", None),
            method=(loader.multiprocessing_context or multiprocessing).get_start_method(),
            shuffles=isinstance(loader.sampler, kinds[1]) and loader.sampler.shuffle)]

    def iterate(self, original, loader):
        if loader._whatif >= len(self.facts["loaders"]):  # made in the process that spawned this
            self.note_loader(loader, len(self.facts["loaders"]))
        if loader._whatif == self.training:
            self.clock.resume()
        elif self.training is not None:  # validation
            self.clock.pause()
        self.see("no set_epoch", self.facts["loaders"][loader._whatif]["shuffles"]
                 and "set_epoch" not in self.facts["seen"])
        return Batches(self, loader, original)

    def fetched(self, number, samples, wait):
        self.latest = number
        self.fetched_from.add(number)
        if number != self.training and 2 * self.steps_of[number] < self.clock.steps:
            self.clock.pause()  # validation
        self.clock.fetched(samples if number == self.training else 0, wait)

    def is_exhausted(self, number):
        if number == self.training:
            self.clock.pause()

    # ---- the model
    def call_module(self, original, module, *args, **kwargs):
        """Find the outermost modules that train, in the first steps."""
        trains = module.training and torch.is_grad_enabled() and any(
            weight.requires_grad for weight in module.parameters())
        if not trains or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        torch.nn.Module.__call__ = self.calls[0]  # the modules inside are not watched
        try:
            if not any(module is each for each in self.models):
                self.models.append(module)
                self.prepare(module)
            return original(module, *args, **kwargs)
        finally:
            if self.clock.steps < WATCHED:
                torch.nn.Module.__call__ = self.calls[1]

    def prepare(self, module):
        """Note what a model is, and change it before its first step."""
        nn, names, inner, called = torch.nn, self.names, module, name_of(module, self.frame())
        while isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner, called = inner.module, f"{called}.module"
        called = self.called.get(id(inner), called)
        parts, weight = list(module.modules()), next(module.parameters())
        images = [each.weight for each in parts
                  if isinstance(each, (nn.Conv2d, nn.ConvTranspose2d))]
        last, self.device = torch.channels_last, weight.device.type
        self.facts["models"].append(dict(
            name=called, kind=type(inner).__name__, **self.place()))
        self.see("image", bool(images))
        self.see("convolution", any(isinstance(each, nn.modules.conv._ConvNd) for each in parts))
        self.see("channels_last", any(each.is_contiguous(memory_format=last)
                                      and not each.is_contiguous() for each in images))
        self.see("amp", weight.dtype in (torch.float16, torch.bfloat16))
        for each in parts:
            self.see("SyncBatchNorm", isinstance(each, nn.SyncBatchNorm))
            if isinstance(each, nn.DataParallel):
                self.see("DataParallel")
                self.see("several GPUs", len(each.device_ids) > 1)

        if "cudnn" in names:
            torch.backends.cudnn.benchmark = True
        if "tf32" in names:
            torch.set_float32_matmul_precision("high")
        if "channels_last" in names:
            inner.to(memory_format=last)
        for name in names & {"compile", "compile reduce-overhead"}:
            inner.forward = Forward(
                inner.forward, torch.compile(inner.forward, mode=name[8:] or None))
        dtype = next((getattr(torch, name[4:]) for name in names if name.startswith("amp ")), None)
        if dtype or "channels_last" in names:
            module.forward = Forward(module.forward, self.around(module.forward, dtype))

    def around(self, forward, dtype):
        """Return `forward` with channels_last images and under autocast; it returns float32."""
        on_each = functools.partial(torch.utils._pytree.tree_map_only, torch.Tensor)

        def to_last(one):
            return one.contiguous(memory_format=torch.channels_last) if one.dim() == 4 else one

        def changed(*args, **kwargs):
            if "channels_last" in self.names:
                args, kwargs = on_each(to_last, (args, kwargs))
            if dtype is None:
                return forward(*args, **kwargs)
            with torch.autocast(self.device, dtype):
                output = forward(*args, **kwargs)
            return on_each(lambda one: one.float() if one.dtype == dtype else one, output)
        return changed

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
        scaled = original(scaler, outputs)
        if isinstance(scaled, torch.Tensor) and scaler is not self.scaler and scaler.is_enabled():
            self.see("amp")
            scaled._unscaled = outputs
        return scaled

    def clip(self, original, *args, **kwargs):
        for optimizer in self.optimizers:
            with contextlib.suppress(RuntimeError, AssertionError):  # unscaled, or no gradients
                self.scaler.unscale_(optimizer)
        return original(*args, **kwargs)

    def make_optimizer(self, original, optimizer, params, defaults):
        self.optimizers.append(optimizer)
        self.called |= {id(each): name for name, each in names_in(self.frame()).items()
                        if isinstance(each, torch.nn.Module)}
        self.facts["optimizers"].append(dict(
            kind=type(optimizer).__name__, **self.place(), fused=defaults.get("fused"),
            can_fuse="fused" in defaults))
        if "fused" in self.names and "fused" in defaults:
            defaults |= dict(fused=True, foreach=None)
            optimizer._step_supports_amp_scaling = True
        original(optimizer, params, defaults)
        if self.scaler:
            def step(optimizer, *args, **kwargs):  # a function, which schedulers wrap
                return self.scaled_step(optimizer, *args, **kwargs)
            optimizer.step = types.MethodType(step, optimizer)

    def scaled_step(self, optimizer, *args, **kwargs):
        if self.scales:  # called by the scaler
            return type(optimizer).step(optimizer, *args, **kwargs)
        self.scales = True
        self.scaler.step(optimizer, *args, **kwargs)
        self.scales = False
        self.scaler.update()

    def step(self, optimizer, *_):
        """Count a step of the first optimizer that steps; end the run after the last one."""
        self.lead = self.lead or optimizer
        dist = torch.distributed
        if optimizer is not self.lead or dist.is_available() and dist.is_initialized() and (
                dist.get_rank()):
            return
        self.training = self.training if self.latest is None else self.latest
        self.steps_of.update(self.fetched_from)
        self.fetched_from.clear()
        if self.look:
            next(self.look, None)
            return
        ahead = CACHED if "no_loading" in self.names else 0
        if self.training is not None and not ahead:
            ahead = 2 * self.facts["loaders"][self.training]["workers"]
        if self.clock.step(ahead):
            self.report()
            if self.spec["first"] and self.device == "cuda":
                self.look = self.looking()
                next(self.look)
            else:
                self.finish()

    # ---- after the windows
    def looking(self):
        """Look at some more steps: which lines make the host wait, what the GPU does."""
        lines, steps, cuda = collections.Counter(), 3, torch.autograd.DeviceType.CUDA

        def shown(message, *_, **__):
            if "called a synchronizing" in str(message) and self.is_users(self.frame()):
                lines[tuple(self.place().values())] += 1
        warnings.showwarning = shown
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(steps):
            yield
        torch.cuda.set_sync_debug_mode("default")
        self.facts["lines"] = [line for line, count in lines.items() if count >= steps]
        self.report()

        steps, busy, until, kinds = 10, 0, 0, collections.Counter()
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
        self.facts["busy"] = busy / 1e6 / steps  # seconds a step
        self.facts["kernels"] = {kind: took / sum(kinds.values()) for kind, took in kinds.items()}
        self.report()
        self.finish()

    def report(self, **record):
        """Send what is known after the windows."""
        steps, on_gpu, dist = self.clock.steps, self.device == "cuda", torch.distributed
        self.see("cudnn", torch.backends.cudnn.benchmark)
        with contextlib.suppress(RuntimeError):  # of scripts that mix the old setting and the new
            self.see("tf32", torch.get_float32_matmul_precision() != "highest")
        self.facts |= dict(
            device=self.device, torch=torch.__version__, python=sys.version.split()[0],
            training=[number for number, count in self.steps_of.items() if 2 * count >= steps],
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
            else os.cpu_count(), processes=dist.get_world_size()
            if dist.is_available() and dist.is_initialized() else 1)
        if on_gpu:
            about = torch.cuda.get_device_properties(self.device)
            self.facts |= dict(gpu=about.name, memory=about.total_memory, capability=about.major)
        self.send(facts=self.facts, steps=steps, losses=[float(loss) for loss in self.losses],
                  memory=torch.cuda.max_memory_allocated() if on_gpu else None, **record)

    def ended(self):
        """Report what there is when the script has come to its own end."""
        self.clock.end()
        self.report(ended=True, done=True)

    def finish(self):
        self.send(done=True)
        os._exit(0)  # none of the script's own handlers runs, so nothing is saved

    def start_process(self, original, process):
        target = process._target
        if target and not target.__module__.startswith("torch.utils.data"):
            process._target = Child(target, self.spec)
        return original(process)


def kernel_kind(name):
    """Return what the time of a kernel depends on: products, memory or communication."""
    if re.search("nccl", name, re.I):
        return "communication"
    moves = r"bn_|norm|elementwise|reduce|softmax|pool|multi_tensor|copy|fill"
    products = r"gemm|conv|cutlass|xmma|[wd]grad|fprop|flash|fmha|attention|nvjet|winograd|mma|rnn"
    return "products" if re.search(products, name, re.I) and not re.search(moves, name, re.I) else (
        "memory")


def run_script():
    """Run the user's script in this process, as the variable TRIAL says."""
    spec = json.loads(os.environ.pop(TRIAL))
    sys.argv, tempfile.tempdir = [spec["script"], *spec["arguments"]], spec["free"][0]
    sys.path[0] = os.path.dirname(spec["script"])
    sys.path.append(os.path.dirname(__file__))  # a process that the script spawns imports this file
    run, status = Run(spec), 0
    run.install()
    try:
        runpy.run_path(spec["script"], run_name="__main__")
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):  # its last words
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        if run.look:  # it was measured; the look at its kernels may disturb a profiler of its own
            run.finish()
        kind, where = type(error), error.__traceback__
        while where and (where.tb_frame.f_code.co_filename == __file__
                         or "runpy" in where.tb_frame.f_code.co_filename):
            where = where.tb_next
        lines = str(error).strip().splitlines() or [""]
        line = lines[-1 if kind.__name__ == "ProcessRaisedException" else 0]
        run.send(error=f"{kind.__name__}: {line}".rstrip(": ")[:150], traceback="".join(
            traceback.format_exception(kind, error, where)), done=True)
        os._exit(1)
    if status:
        run.send(error=f"it ended with status {status}"[:150], done=True)
    else:
        run.ended()


# ------------------------------------------------------------- the runs, started one after another
def end(process, spec):
    """End a run and all processes that it started, and delete the files that were held back."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for folder in Path(spec["held"]).parent.glob(f"{Path(spec['held']).name}.*"):
        shutil.rmtree(folder, ignore_errors=True)


class Alone:
    """Runs the script in one process."""

    def __init__(self):
        self.number = -1

    def variables(self, spec):
        """Return what a run's environment has to have."""
        return {}

    def failed(self):
        """Return why a process on another rank failed, or None."""

    def run(self, start, spec, limit, show):
        """Run the script until its windows are full. Return what it has sent."""
        self.number += 1
        process, records, log = start(spec, self.number)
        result, begin, text = dict(windows=[]), time.monotonic(), ""
        with open(records) as file:
            try:
                while not result.get("done"):
                    is_over = process.poll() is not None
                    *lines, text = (text + file.read()).split("\n")  # the last one may be cut
                    for line in lines:
                        take(json.loads(line), result)
                    if is_over:
                        break
                    if why := self.failed():
                        result |= dict(error=why, done=True)
                    elif time.monotonic() - begin > limit:
                        result |= dict(error=f"cut off after {limit:.0f} s: too slow, or too "
                                       "little time (--minutes)", done=True)
                    if STOPPED:
                        raise KeyboardInterrupt
                    show(result["windows"])
                    time.sleep(0.1)
                if result.get("ended"):  # let it do what it does at its end
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(30)
            finally:
                end(process, spec)
        output = Path(log).read_text(errors="replace").strip().splitlines()[-1:]
        return explained(result, process.returncode, "".join(f": {line[:150]}" for line in output))


class Team(Alone):
    """Runs the script in the processes that torchrun started. Rank 0 leads the others."""

    def __init__(self):
        super().__init__()
        from torch.distributed import TCPStore
        self.store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                              is_master=False, timeout=timedelta(days=1))

    def variables(self, spec):
        return {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(spec["port"])}

    def failed(self):
        key = f"whatif/{self.number}/failed"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def run(self, start, spec, limit, show):
        with socket.socket() as free:  # each run meets at a port of its own
            free.bind(("", 0))
            spec["port"] = free.getsockname()[1]
        self.store.set(f"whatif/{self.number + 1}", json.dumps(spec))
        try:
            return super().run(start, spec, limit, show)
        finally:
            self.store.set(f"whatif/{self.number}/done", "")

    def dismiss(self):
        self.store.set(f"whatif/{self.number + 1}", "null")

    def follow(self, start):
        """Start the runs that rank 0 asks for, until it dismisses the team."""
        for number in itertools.count():
            if (spec := json.loads(self.store.get(f"whatif/{number}"))) is None:
                return
            process, _, log = start(spec, number)
            try:
                while not self.store.check([f"whatif/{number}/done"]):
                    if process.poll():
                        last = Path(log).read_text(errors="replace").strip().splitlines()[-1:]
                        self.store.set(f"whatif/{number}/failed", " ".join(
                            [f"rank {os.environ['RANK']} failed:", *last]))
                    if STOPPED:
                        return
                    time.sleep(0.2)
            finally:
                end(process, spec)


def take(record, result):
    """Add what a run has sent to its result."""
    if result.setdefault("pid", record["pid"]) != record["pid"] and "error" not in record:
        return  # of several processes that train, one counts
    if "window" in record:
        result["windows"].append(record["window"])
    else:
        result |= record


def explained(result, code, output):
    """Add to a run's result, in one line, why it gave no rate."""
    error, windows = result.get("error", ""), result["windows"]
    if error.startswith("EOFError"):
        error = "it asks for input, and gets none here (stdin is /dev/null)"
    elif not error and not result.get("done"):
        error = f"it was killed by signal {-code}" if code < 0 else f"it ended with status {code}"
        error += ", probably because memory ran out" if code == -signal.SIGKILL else output
    elif error.startswith("it ended with status"):
        error += output
    elif not error and not windows and not result.get("steps"):
        error = "it ended without a step of an optimizer of torch.optim"
    elif not error and not windows:
        error = (f"it ended after {result['steps']} steps, before the warm-up was over: let it "
                 "make more steps, or lower --seconds")
    return result | dict(error=error)


class Session:
    """The rows of the table, and the time left for more."""

    def __init__(self, args, cwd, script, folder, team):
        self.args, self.cwd, self.script, self.folder, self.team = args, cwd, script, folder, team
        self.deadline = time.monotonic() + 60 * args.minutes
        self.seconds, self.facts, self.extra = args.seconds, None, dict(training=[])
        self.rows, self.left_out = [Row()], {}  # {a set of techniques: why it was not tried}
        self.took = [0.0]  # seconds of each run beyond the measured ones

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

    def start(self, spec, number):
        """Start a run. Return (its process, the file of its records, the file of its output)."""
        base = os.path.join(self.folder, str(number))
        cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
        homes = [os.environ[name] for name in (
            "TORCH_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
            if name in os.environ]
        spec |= dict(
            script=str(self.script), arguments=self.args.arguments, records=f"{base}.records",
            held=f"{base}.held", roots=sorted({str(self.cwd), str(self.script.parent)}),
            free=[self.folder, cache, os.path.expanduser("~/.triton"), "/dev", "/proc", *homes])
        environment = {**os.environ, **self.team.variables(spec), TRIAL: json.dumps(spec),
                       "PYTHONDONTWRITEBYTECODE": "1",
                       "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        if not spec["first"]:
            environment |= {"WANDB_MODE": "disabled", "COMET_MODE": "disabled"}
        open(f"{base}.records", "w").close()
        with open(f"{base}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__)], cwd=self.cwd, env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        return process, f"{base}.records", f"{base}.log"

    def measure(self, row):
        """Run the script once, and add that to the row. Return whether it gave a rate."""
        first, start, name = self.facts is None, time.monotonic(), row.name()
        if not first and not self.has_time():
            return False
        limit = self.left() / 2 if first else min(self.left(), 60 + 3 * (
            self.took[0] + self.seconds) + 240 * ("compile" in name))
        spec = dict(techniques=row.techniques, first=first, seconds=self.seconds, **self.extra)
        result = self.team.run(self.start, spec, limit, lambda windows: progress(
            f"{name}: {time.monotonic() - start:.0f} s, {len(windows)} of {WINDOWS} windows"))
        windows, facts = result["windows"], result.get("facts", self.facts)
        is_enough = len(windows) > 1 and not first and result["error"].startswith("cut off")
        if not windows or result["error"] and not is_enough:
            row.error, row.traceback = result["error"], result.get("traceback", "")
            return False
        seconds = sum(window["seconds"] for window in windows)
        self.took = [] if first else self.took
        self.took.append(time.monotonic() - start - seconds)
        if first:
            self.facts = facts | dict(peak=result["memory"])
            counts = facts["training"] and all(window["samples"] for window in windows)
            self.unit = "samples" if counts else "steps"
        times = facts["processes"]
        row.runs.append(dict(
            number=self.team.number, memory=result.get("memory"), losses=result.get("losses", []),
            rates=[window[self.unit] * times / window["seconds"] for window in windows],
            wait=sum(window["wait"] for window in windows) / seconds,
            step_seconds=seconds / sum(window["steps"] for window in windows)))
        return True

    def attempt(self, base, *names, then=0):
        """Measure techniques on top of a row's if there is time for this run and `then` others.

        Return the new row.
        """
        row = Row((*base.techniques, *names), base)
        if not self.has_time(1 + then):
            self.left_out[row.name()] = "no time left (--minutes)"
            return row
        self.rows.append(row)
        self.measure(row)
        say(line_of(row, self.rows[0]))
        return row

    def settle(self, row, then=0, least=1):
        """Run a row and its base by turns until the difference is beyond the spread.

        The row runs at least `least` times. It stops earlier if there is no time for two runs and
        `then` more.
        """
        while row.runs and (len(row.runs) < least or not row.is_settled()) and (
                len(row.runs) < self.args.runs and self.has_time(2 + then)):
            if not (self.measure(row.base) and self.measure(row)):
                break


# ------------------------------------------------------------------------------------ the verdicts
def scatter(rates):
    """Return the standard error of the median of `rates`, divided by it; 0 for one rate."""
    error = 1.25 * statistics.stdev(rates) / len(rates) ** 0.5 if len(rates) > 1 else 0
    return error / statistics.median(rates)


def compare(runs, others):
    """Return (how many times as fast `runs` are as `others`, the uncertainty of 95 %).

    A run is {"number": its place in time, "rates": its speeds}. Each is compared with the last one
    of `others` before it, since a machine's speed drifts. The uncertainty is that of the ratios, by
    Student's t, or of the rates in the runs, whichever is larger; of few ratios, at most their
    range and what a single one may be off.
    """
    ratios, scatters = [], []
    for run in runs:
        other = max((each for each in others if each["number"] < run["number"]),
                    key=lambda each: each["number"], default=others[0])
        ratios.append(statistics.median(run["rates"]) / statistics.median(other["rates"]))
        scatters.append(math.hypot(scatter(run["rates"]), scatter(other["rates"])))
    ratio, n = statistics.median(ratios), len(ratios)
    least = max(STEADY, statistics.fmean(scatters))
    if n == 1:
        return ratio, ratio * max(2 * least, ONE_RUN)
    error = max(2 * ratio * least, STUDENT[min(n, 8) - 2] * statistics.stdev(ratios))
    most = max(max(ratios) - ratio, ratio - min(ratios)) + ratio * ONE_RUN / n ** 0.5
    return ratio, min(error / n ** 0.5, most)


def is_settled(ratio, spread):
    """Return whether more runs would hardly change the verdict."""
    return abs(ratio - 1) > spread or abs(ratio - 1) + spread < PAYS - 1


def verdict(ratio, spread):
    """Return "faster", "slower", "no difference" or, with too large a spread, "not clear"."""
    if abs(ratio - 1) < max(spread, PAYS - 1):
        return "no difference" if spread <= CLEAR else "not clear"
    return "faster" if ratio > 1 else "slower"


class Row:
    """A set of techniques, what its runs gave, and the row that it is compared with."""

    def __init__(self, techniques=(), base=None):
        self.techniques, self.base, self.runs, self.error = techniques, base, [], ""

    def name(self):
        return " + ".join(self.techniques) or "as it is"

    def rate(self):
        """Return the median samples/s (steps/s without a DataLoader) of all windows."""
        return statistics.median(rate for run in self.runs for rate in run["rates"])

    def mean(self, key):
        values = [run[key] for run in self.runs if run[key] is not None]
        return statistics.fmean(values) if values else None

    def ratio(self, base=None):
        """Return (how many times as fast as `base` it is, the uncertainty)."""
        return compare(self.runs, (base or self.base).runs)

    def gains(self, least=PAYS):
        ratio, spread = self.ratio()
        return ratio >= least and ratio - 1 > spread

    def pays(self):
        return bool(self.runs) and self.gains() and self.agrees() is not False

    def is_settled(self):
        return is_settled(*self.ratio()) or self.agrees() is False

    def agrees(self):
        """Return whether its losses agree with its base's on average; None if there is none.

        They may differ by 5 %, and by three standard errors: compiled dropout draws other numbers.
        """
        pairs = list(zip(self.base.runs[0]["losses"], self.runs[0]["losses"]))
        if OTHER_DATA & {*self.techniques} - {*self.base.techniques} or not pairs or not all(
                math.isfinite(one) for one, _ in pairs):
            return None
        gaps = [other - one for one, other in pairs]
        if not all(map(math.isfinite, gaps)):
            return False
        size = statistics.fmean(abs(one) for one, _ in pairs)
        return abs(statistics.fmean(gaps)) <= 0.05 * size + 3 * (
            statistics.pstdev(gaps) / len(gaps) ** 0.5)

    def verdict(self):
        if not self.runs or not self.base:
            return "" if self.runs else self.error
        ratio, spread = self.ratio()
        on = f" ({ratio:.2f}x of {self.base.name()})" if self.base.techniques else ""
        if self.agrees() is False:
            return "other losses: this changes the training" + on
        if OTHER_DATA & {self.techniques[-1]}:
            return {"batch": "another training", "no_loading": "the most that a loader can gain"}[
                self.techniques[-1]] + on
        if len(self.runs) == 1 and not self.is_settled():
            return "ran once" + on
        return verdict(ratio, spread).replace("faster", "pays") + on


def explore(session, wanted):
    """Measure each technique alone, then together with those that pay, the best first.

    Return the row of the best set, with the script's own loading or with the workers that pay.
    """
    plain = best = session.rows[0]
    loads = [name for name in wanted if name in ("no_loading", "workers")]
    if plain.mean("wait") < SELDOM:  # loading cannot gain much: it is tried last
        wanted, loads = [name for name in wanted if name not in loads] + loads, []
    found = {name: session.attempt(plain, name) for name in loads}
    if "workers" in found:
        session.settle(found["workers"], then=len(wanted))
        best = found["workers"] if found["workers"].pays() else plain
    base = best
    if best.mean("wait") > WAITS and "no_loading" in found and found["no_loading"].runs:
        base = found["no_loading"]  # while steps wait for data, nothing else can show what it gains

    alone = []
    for name in wanted:
        if name not in found:  # keep time for a sum of all that seem to pay
            likely = {row.techniques[-1].split()[0] for row in alone
                      if row.runs and row.ratio()[0] > LIKELY}
            alone.append(session.attempt(base, name, then=1 + max(1, len(likely))))
    alone = sorted((row for row in alone if row.runs), key=lambda row: -row.ratio()[0])
    top = base
    for number, row in enumerate(alone, 1):
        name = row.techniques[-1]
        if name in OTHER_DATA or row.verdict().startswith("slower") or (
                row.agrees() is False) or any(
                {name, kept} <= group for group in INSTEAD for kept in top.techniques):
            continue
        if top is not base:
            row = session.attempt(top, name)
        session.settle(row, then=len(alone) - number + 2, least=2)  # it decides what is kept
        top = row if row.pays() else top
    if base is not best:  # measure the sum with real loading
        if top is not base:
            row = session.attempt(best, *top.techniques[1:])
            session.settle(row)
            best = row if row.pays() else best
        top = best
    if top is not plain and session.args.runs > 1 and session.measure(plain):
        session.measure(top)  # the sum once more, beside the plain script
    for row in [*found.values(), *alone]:
        session.settle(row)
    return top


# -------------------------------------------------------------------------------- what can be tried
def main_loader(facts):
    """Return the first loader that trains, or None."""
    return facts["loaders"][facts["training"][0]] if facts["training"] else None


def workers_wanted(facts):
    return max(1, min(16, facts["cores"] // facts["processes"]))


def batch_times(facts):
    """Return how many times as large a batch fits into memory and leaves four steps an epoch."""
    room = 0.8 * facts["memory"] / facts["peak"] if facts["peak"] else 2
    steps = (main_loader(facts) or {}).get("length") or math.inf
    return max((times for times in (2, 4) if times <= room and steps >= 4 * times), default=1)


def reasons(facts):
    """Return {technique: why it cannot be tried, or ""}."""
    seen, gpu, loader = facts["seen"], facts["device"] == "cuda", main_loader(facts) or {}
    no_loader = (not loader, "the script trains without a torch DataLoader")
    no_model = (not facts["models"], "no torch.nn.Module is called in a step")
    no_gpu = (not gpu, "it needs an NVIDIA GPU")
    unfused = [each["kind"] for each in facts["optimizers"] if not each["can_fuse"]]

    def there(what):
        return what in seen, "already there"
    compiles = [no_model, there("compile"),
                ("several GPUs" in seen, "DataParallel on several GPUs cannot be compiled")]
    cases = {
        "no_loading": [no_loader],
        "workers": [no_loader, (loader.get("iterable"), "each worker of an IterableDataset would "
                                "give the same data"),
                    (loader.get("workers", 0) >= workers_wanted(facts) and loader["persistent"]
                     and (loader["pin"] or not gpu), "already there")],
        "amp bfloat16": [no_model, there("amp")],
        "amp float16": [no_gpu, no_model, there("amp")],
        "compile": compiles,
        "compile reduce-overhead": [no_gpu, *compiles],
        "channels_last": [no_model, ("image" not in seen, "the model has no 2-D convolution"),
                          there("channels_last")],
        "fused": [(unfused, f"torch has no fused {', '.join(unfused)}"),
                  (all(each["fused"] for each in facts["optimizers"]), "already there")],
        "cudnn": [no_gpu, there("cudnn"),
                  ("convolution" not in seen, "the model has no convolution")],
        "tf32": [no_gpu, there("tf32"), (facts.get("capability", 0) < 8, "this GPU has no TF32")],
        "batch": [no_loader, (not loader.get("batch"), "the dataset makes the batches itself"),
                  (batch_times(facts) == 1, "no memory is left, or an epoch has too few steps")],
    }
    return {name: next((why for is_so, why in case if is_so), "") for name, case in cases.items()}


# -------------------------------------------------------------------------------------- the report
def progress(text):
    """Show what is under way, in place, on a terminal."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


def say(text):
    progress("")
    print(text, flush=True)


def line_of(row, plain):
    """Return a row's line of the table."""
    if not row.runs:
        return f"{row.name():<40} {'-':>10}  {row.verdict()}"
    ratio, rate, memory, losses = "1", row.rate(), row.mean("memory"), "-"
    if row.base:
        ratio = "{:.2f}x +- {:.2f}".format(*row.ratio(plain))
    if not OTHER_DATA & {*row.techniques} and row.runs[0]["losses"]:
        pairs = list(zip(row.runs[0]["losses"], plain.runs[0]["losses"]))[-10:]
        losses = " / ".join(f"{statistics.fmean(each):.4g}" for each in zip(*pairs))
    return (f"{row.name():<40} {rate:>10,.{0 if rate > 99 else 1}f}  {ratio:<14} "
            f"{row.mean('wait'):>5.0%} {f'{memory / 1e9:.2f}' if memory else '-':>7}  {losses:<17} "
            f"{len(row.runs)}  {row.verdict()}").rstrip()


def heading(unit):
    return (f"{'':<40} {unit + '/s':>10}  {'as fast':<14} {'waits':>5} {'GPU GB':>7}  "
            f"{'loss / plain':<17} n  verdict")


def held_back_by(facts, rows):
    """Return a sentence: what holds the script back, with its evidence."""
    wait, step = rows[0].mean("wait"), rows[0].mean("step_seconds")
    told = f"a step takes {1000 * step:.3g} ms and waits for data {wait:.0%} of it"
    loads = next((row for row in rows if row.runs and row.techniques == ("no_loading",)), None)
    if loads:
        told += f"; with cached batches it is {loads.ratio()[0]:.2f}x as fast"
    if wait > WAITS and (not loads or loads.ratio()[0] > 1.1) or (
            wait > 0.05 and loads and loads.gains(1.1)):
        return f"Data: {told}."
    if facts["device"] != "cuda":
        return f"The CPU, which computes the steps: {told}."
    if not facts["busy"]:
        return f"The host or the GPU; its kernels could not be timed: {told}."
    busy, kinds = min(1, facts["busy"] / step), facts["kernels"]
    told = f"the GPU works in {busy:.0%} of a step; {told}"
    if busy < 0.8:
        return f"The host, which runs Python and starts kernels: {told}."
    kind = max(kinds, key=kinds.get)
    what, where = {"products": ("The device", "convolutions and products"),
                   "memory": ("The device's memory", "kernels that read and write more than they "
                              "compute (norms, activations, copies, the optimizer)"),
                   "communication": ("Communication between GPUs", "NCCL")}[kind]
    return f"{what}: {told}; {kinds[kind]:.0%} of the GPU's time goes into {where}."


def also_seen(facts):
    """Return a line for each known slowdown that is in the script."""
    seen, lines = facts["seen"], []
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
    for what, line in (
            ("no set_epoch", "DistributedSampler without set_epoch(epoch): each epoch has the same "
             "order"), ("DataParallel", "DataParallel copies the model in each step; use "
                        "DistributedDataParallel (src/train_DDP.py)"),
            ("SyncBatchNorm", "SyncBatchNorm makes all processes wait in each of its layers")):
        lines += [line] if what in seen else []
    return lines


def advice(name, facts, extra):
    """Return what to write for a technique, with names and places of the script."""
    def line(of):
        return f"{of['at']}  {of['text']}" if of else ""
    model, template = next(iter(facts["models"]), {}), name.split()[0]
    whole = "" if template in ("no_loading", "workers", "tf32", "batch") else (
        f"\n        the whole: diff src/train.py src/train_{template}.py in pytorch-speedup")
    others = ", ".join(f"{each['name']} ({each['at']})" for each in facts["models"][1:])
    if others and re.search("{(call|model)}", TECHNIQUES[name]):
        whole = f"\n        likewise: {others}{whole}"
    return (TECHNIQUES[name] + whole).format(
        **extra, device=facts["device"], model=model.get("name"), text=model.get("text"),
        call=line(model), loader=line(main_loader(facts)), optimizer=line(facts["optimizers"][0]),
        optimizers="\n        ".join(map(line, facts["optimizers"])))


def gains_alone(name, rows, best):
    """Return whether a technique pays alone and was never tried on top of another."""
    if any({name, kept} <= group for group in INSTEAD for kept in best.techniques):
        return False
    rows = [row for row in rows if row.runs and row.techniques[-1:] == (name,) and (
        row.techniques[0] == name or row.techniques[0] != "no_loading")]
    return len(rows) == 1 and (rows[0].gains(1.1) if name in OTHER_DATA else rows[0].pays())


def paragraph(text):
    """Return `text` in lines of 100 columns, two of them empty at the left."""
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  ",
                         break_on_hyphens=False)


def report(session, best):
    """Print the table, what holds the script back, and what to write."""
    facts, plain = session.facts, session.rows[0]
    say("\n".join(["", heading(session.unit), *(line_of(row, plain) for row in session.rows)]))
    say(f"\nWhat holds it back\n{paragraph(held_back_by(facts, session.rows))}")
    if facts["lines"]:
        say("  In each step these lines make the host wait for the GPU:")
    for place, text in facts["lines"]:
        say(f"    {place}  {text}")
    for line in also_seen(facts):
        say(f"  {line}")
    paying = [name for name in TECHNIQUES if name in best.techniques or gains_alone(
        name, session.rows, best)]
    if paying:
        say("\nWhat to write")
    for name in paying:
        say(f"  {name}\n        {advice(name, facts, session.extra)}")
    if best.base:
        say("\nTogether, {}: {:.2f}x +- {:.2f}".format(best.name(), *best.ratio(plain)))
    if session.left_out:
        say("\nNot tried")
    for why in dict.fromkeys(session.left_out.values()):
        names = ", ".join(name for name, one in session.left_out.items() if one == why)
        say(paragraph(f"{names}: {why}"))


# --------------------------------------------------------------------------------------- the start
def parse(words):
    """Return the options, the script and its own arguments."""
    known = list(dict.fromkeys(name.split()[0] for name in TECHNIQUES))
    parser = argparse.ArgumentParser(
        "whatif.py", allow_abbrev=False, description=__doc__.splitlines()[0],
        usage="python whatif.py [--seconds 20] [--minutes 10] [--runs 4] [--only amp,compile] "
        "[--json FILE] [--copy] my_train.py ITS OWN ARGUMENTS")
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
    for is_wrong, why in ((odd, f"--only {odd}: choose from {', '.join(known)}, plain"),
                          (not min(args.seconds, args.minutes, args.runs) > 0,
                           "--seconds, --minutes and --runs have to be above 0"),
                          (args.json and not args.json.resolve().parent.is_dir(),
                           f"{args.json}: there is no such folder"),
                          (not args.script.is_file(), f"{args.script}: there is no such script")):
        if is_wrong:
            parser.exit(2, f"whatif.py: error: {why}\n")
    return args


def copied(folder, made):
    """Return a copy of a folder: beside it, so that ../data is there, or in TMPDIR.

    It is added to `made` first. Raises OSError if there is no room, KeyboardInterrupt on Ctrl-C.
    """
    def copy_file(source, target):
        if STOPPED:
            raise KeyboardInterrupt
        return shutil.copy2(source, target)
    beside = folder.parent if os.access(folder.parent, os.W_OK) else None
    target = Path(tempfile.mkdtemp(prefix=f"{folder.name}.whatif-", dir=beside))
    made.append(target)
    say(f"Copying {folder} to {target}.")
    return shutil.copytree(
        folder, target, symlinks=True, dirs_exist_ok=True, copy_function=copy_file,
        ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))


def measure_all(session, args):
    """Run everything and print the report. Return the exit status."""
    where = "" if args.copy else "\n--copy runs all in a copy of the folder."
    say(f"""{args.script} runs several times, each for about {args.seconds:g} s after its warm-up, \
in at most {args.minutes:g} minutes.
The first run writes, deletes and sends what the script does, up to there; a file that it is
writing then stays unfinished. In the others, files that Python and torch.save write go to a
temporary folder, and W&B and Comet are off; not so files of other libraries and programs, and the
network.{where}""")
    plain, status = session.rows[0], 0
    best = plain
    try:
        if not session.measure(plain):
            progress("")
            print(f"{plain.traceback}whatif.py: {args.script}, as it is: {plain.error}",
                  file=sys.stderr)
            return 1
        facts, why = session.facts, reasons(session.facts)
        wanted = [name for name in TECHNIQUES if name.split()[0] in args.only]
        session.left_out = {name: why[name] for name in wanted if why[name]}
        session.plan(wanted := [name for name in wanted if not why[name]])
        kinds = ", ".join(each["kind"] for each in facts["models"] + facts["optimizers"])
        say(f"{kinds}; {facts.get('gpu', 'CPU')}, {facts['cores']} cores, {facts['processes']} "
            f"process(es), torch {facts['torch']}")
        say(heading(session.unit) + "\n" + line_of(plain, plain))
        best = explore(session, wanted)
    except KeyboardInterrupt:
        say("\nStopped: this table is not finished.")
        status = 130
    if plain.runs:
        report(session, best)
    if plain.runs and args.json:
        args.json.write_text(json.dumps(dict(
            date=time.strftime("%Y-%m-%d"), command=shlex.join(["python", *sys.argv]),
            script=str(args.script), arguments=args.arguments, unit=session.unit, best=best.name(),
            left_out=session.left_out, facts=session.facts, rows=[dict(
                name=row.name(), verdict=row.verdict(), runs=row.runs, **(dict(zip(
                    ("ratio", "spread"), row.ratio(plain)), rate=row.rate()) if row.runs else {}))
                for row in session.rows]), indent=1) + "\n")
    return status


def main():
    args, place = parse(sys.argv[1:]), Path.cwd()
    is_team = int(os.environ.get("WORLD_SIZE", 1)) > 1

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: STOPPED.append(number))
    script, made = args.script.resolve(), [tempfile.mkdtemp(prefix="whatif-")]
    try:
        if args.copy:
            source = place if place in script.parents else script.parent
            try:
                place = copied(source, made)
            except OSError as error:
                print(f"whatif.py: error: --copy: {str(error)[:200]}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                return 130
            script = place / script.relative_to(source)
        session = Session(args, place, script, made[0], Team() if is_team else Alone())
        if is_team and os.environ["RANK"] != "0":
            return session.team.follow(session.start)
        try:
            return measure_all(session, args)
        finally:
            if is_team:
                session.team.dismiss()
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if TRIAL in os.environ:  # as a module, whose classes the script's processes can unpickle
        importlib.import_module(Path(__file__).stem).run_script()
    else:
        sys.exit(main())
