"""Run a training script in this process and keep the figures that it works with.

verify.py forks a process for each run and calls `run_script` in it. The script itself is not
changed: what is kept comes from PyTorch's own hooks and from functions that are wrapped here.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

MOST = 10_000  # numbers that are kept of each weight


def wrap(owner, name, make):
    """Replace the function `owner.name` by make(that function)."""
    setattr(owner, name, make(getattr(owner, name)))


def end_with(parent):
    """End this process and its workers when the process `parent` has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def take_options(options, defaults, taken, sample, folder):
    """Have the script's parser read `options`, and `defaults` where the user gave none.

    Options that the parser does not know are left out. `taken` gets all that it knows. The folder
    --dataset is taken from the user's working `folder`, or a small sample of it in `sample`.
    """
    def make(parse):
        def parse_known_args(parser, words=None, namespace=None):
            if words is not None and words != sys.argv[1:]:
                return parse(parser, words, namespace)
            given = {word.split("=")[0] for word in sys.argv}
            taken[:] = parser._option_string_actions
            more = {**{name: each for name, each in defaults.items() if name not in given},
                    **options}
            namespace, rest = parse(parser, [*sys.argv[1:], *(
                f"{name}={value}" for name, value in more.items() if name in taken)], namespace)
            dataset = folder / str(getattr(namespace, "dataset", None) or "")
            if hasattr(namespace, "dataset") and dataset.is_dir():
                namespace.dataset = type(namespace.dataset)(thin_out(dataset, sample))
            return namespace, rest
        return parse_known_args
    wrap(argparse.ArgumentParser, "parse_known_args", make)


def thin_out(dataset, sample):
    """Return a copy of DATASET/<split>/<class>/* with links to some images of each class."""
    if sample and not sample.exists():
        part = sample.with_name(f"{sample.name}.{os.getpid()}")
        for split in dataset.iterdir():
            classes = [*split.iterdir()] if split.is_dir() else []
            most = max(4, (640 if split.name.startswith("train") else 200) // max(1, len(classes)))
            for each in classes or [split]:
                files = sorted(itertools.islice(each.iterdir(), 10 * most)) if classes and (
                    each.is_dir()) else [each]
                for file in files[:most] if each.is_dir() else files:
                    link = part / file.relative_to(dataset)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(file.resolve())
        try:
            part.rename(sample)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return sample or dataset


class Recorder:
    """Keeps what happens in one process of a run."""

    def __init__(self):
        self.seen = dict(losses=[], rates=[], inputs=[], steps=[], start=[], end=[], options=[],
                         draws=False)
        self.epoch, self.step, self.is_new = 1, 0, True
        self.unscaled, self.optimizers, self.state = {}, [], None

    def install(self):
        def make_backward(backward):
            def keep_loss(tensors, *rest, **others):
                self.keep_losses([tensors] if torch.is_tensor(tensors) else tensors)
                return backward(tensors, *rest, **others)
            return keep_loss

        def make_scale(scale):
            def keep_unscaled(scaler, outputs):
                scaled = scale(scaler, outputs)
                self.unscaled[id(scaled)] = outputs
                return scaled
            return keep_unscaled

        def make_train(train):
            def count_epochs(module, mode=True):
                if mode and self.step:
                    self.epoch, self.step = self.epoch + 1, 0
                return train(module, mode)
            return count_epochs
        wrap(torch.autograd, "backward", make_backward)
        wrap(torch.amp.GradScaler, "scale", make_scale)
        wrap(torch.nn.Module, "train", make_train)
        torch.nn.modules.module.register_module_forward_pre_hook(self.keep_input)
        register_optimizer_step_pre_hook(self.keep_rates)

    def keep_losses(self, tensors):
        self.step += 1
        for tensor in tensors:
            loss = self.unscaled.pop(id(tensor), tensor)
            if torch.is_tensor(loss):
                self.seen["losses"].append(loss.detach().double().sum().item())
                self.seen["steps"].append((self.epoch, self.step))
        self.is_new = True
        if len(self.seen["losses"]) <= 2:  # does a step draw random numbers?
            state = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state(
                ).numpy().tobytes()
            self.seen["draws"] = self.state not in (None, state)
            self.state = state
        self.keep_checkpoint()

    def keep_checkpoint(self):
        """Copy the run's files when the first checkpoint is there: a run that is killed now."""
        there = Path("../stopped")
        if not there.exists() and os.environ.get("RANK", "0") == "0" and any(
                path.suffix in (".pt", ".pth", ".ckpt") for path in Path().rglob("*.*")):
            shutil.copytree(".", there)

    def keep_input(self, module, inputs):
        """Keep some numbers of each image that the outermost module gets in a step."""
        if torch.compiler.is_compiling() or not self.is_new or not torch.is_grad_enabled() \
                or not module.training:
            return
        images = next(filter(torch.is_tensor, inputs), None)
        if images is None or images.ndim < 2 or next(module.parameters(), None) is None:
            return
        self.is_new = False
        images = images.detach().flatten(1)
        images = images[:, ::max(1, images.shape[1] // 200)]
        self.seen["inputs"].append(images.double().cpu())

    def keep_rates(self, optimizer, *_):
        if not any(optimizer is each for each in self.optimizers):
            self.optimizers.append(optimizer)
            self.seen["start"].append(self.weights(optimizer))
        self.seen["rates"].append([float(group["lr"]) for group in optimizer.param_groups])

    @staticmethod
    def weights(optimizer):
        weights = [each.detach().flatten() for group in optimizer.param_groups
                   for each in group["params"]]
        return torch.cat([each[::len(each) // MOST + 1].double().cpu() for each in weights])

    def save(self, path):
        self.seen["end"] = [self.weights(optimizer) for optimizer in self.optimizers]
        torch.save(self.seen, path)


class Compiled(torch.nn.Module):
    """A module as torch.compile returns it, with the same names, but not compiled."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def forward(self, *inputs, **others):
        return self._orig_mod(*inputs, **others)

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "_orig_mod" else getattr(
            super().__getattr__("_orig_mod"), name)


def be_exact():
    """Compute in float64, without half precision and compiled kernels: rounding is then too small
    to matter. GradScaler scales, also where bfloat16 would not need it, so that a missing
    `unscale_` shows.
    """
    where = "cuda" if torch.cuda.device_count() else "cpu"
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.deterministic = True
    # GradScaler's own numbers, which have no dimensions, stay float32
    wrap(torch.Tensor, "float", lambda single: lambda tensor, **others: (
        tensor.double() if tensor.ndim else single(tensor, **others)))
    torch.nn.modules.module.register_module_forward_pre_hook(as_weights)
    wrap(torch.autocast, "__init__", lambda init: lambda self, device_type, *_, **others: init(
        self, device_type, enabled=False))
    wrap(torch.amp.GradScaler, "__init__", lambda init: lambda self, *_, **others: init(
        self, where, **{name: value for name, value in others.items()
                        if name not in ("device", "enabled")}))

    def do_not_compile(model=None, **_):
        if model is None:
            return do_not_compile
        return Compiled(model) if isinstance(model, torch.nn.Module) else model
    torch.compile = do_not_compile


def as_weights(module, inputs):
    """Give the float inputs of a module the type of its weights, else float64."""
    weight = next(module.parameters(recurse=False), None)
    kind = torch.float64 if weight is None else weight.dtype
    return tuple(each.to(kind) if torch.is_tensor(each) and each.dtype in (
        torch.float32, torch.float64) else each for each in inputs)


def be_calm(halves):
    """Make one process compute what two compute: no dropout, random numbers by image, batch norm
    over each half of a batch if `halves`, with the running statistics of the first half.
    """
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        setattr(functional, name, lambda images, *_, **__: images)

    def make_fetch(fetch):
        def seeded(fetcher, indices):
            states = random.getstate(), np.random.get_state(), torch.get_rng_state()
            data = fetcher.dataset
            fetcher.dataset = Seeded(data)
            try:
                return fetch(fetcher, indices)
            finally:
                fetcher.dataset = data
                random.setstate(states[0]), np.random.set_state(states[1])
                torch.set_rng_state(states[2])
        return seeded
    wrap(torch.utils.data._utils.fetch._MapDatasetFetcher, "fetch", make_fetch)

    def make_norm(norm):
        def of_halves(images, mean, var, weight=None, bias=None, training=False, *others, **more):
            if not training or len(images) % 2:
                return norm(images, mean, var, weight, bias, training, *others, **more)
            first = norm(images[::2], mean, var, weight, bias, True, *others, **more)
            second = norm(images[1::2], None, None, weight, bias, True, *others, **more)
            return torch.stack([first, second], 1).flatten(0, 1)
        return of_halves
    if halves:
        wrap(functional, "batch_norm", make_norm)


class Seeded:
    """A dataset whose random numbers depend on the index alone."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, index):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(int(index))
        return self.data[index]


def run_script(path, text, words, folder, threads, rank, variables, options, sample, exact,
               calm, halves):
    """Run the script `text` as if it stood at `path`. Never returns normally if the script exits.

    It works in `folder`/files; `folder` gets what it prints (out<rank>, err<rank>) and what it
    does (seen<rank>).
    """
    parent = os.getppid()
    os.setsid()
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, name in enumerate((os.devnull, folder / f"out{rank}", folder / f"err{rank}")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    cwd = Path.cwd()
    os.chdir(folder / "files")
    os.environ.update(variables, OMP_NUM_THREADS=str(threads), WANDB_MODE="disabled")
    torch.set_num_threads(threads)
    multiprocessing.set_start_method("fork", force=True)  # others would read `path` again
    for name in ("compose", "verify", "watch"):  # the script may have modules of these names
        sys.modules.pop(name, None)
    recorder = Recorder()
    defaults = {"--epochs": 2, "--steps": 4, "--workers": 2}
    if not torch.cuda.device_count():
        defaults["--batch_size"] = 32
    take_options(options, defaults, recorder.seen["options"], sample, cwd)
    if exact:
        be_exact()
    if calm:
        be_calm(halves)
    recorder.install()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = str(path)
    sys.argv, sys.path[0] = [str(path), *words], str(path.parent)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    try:
        exec(compile(text, str(path), "exec"), main.__dict__)
    finally:
        recorder.save(folder / f"seen{rank}")
