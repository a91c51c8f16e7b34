"""Run a training script in this process and keep the figures that it works with.

verify.py forks a process for each run, which calls `run_script`. The script is not changed:
PyTorch's hooks and the functions that are wrapped here see what it does.
"""

import argparse
import itertools
import linecache
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import types
from pathlib import Path

import numpy as np
import torch
import torch._inductor.config
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

CHECKPOINTS = (".pt", ".pth", ".ckpt")


def wrap(owner, name, make):
    """Replace the function `owner.name` by make(that function)."""
    setattr(owner, name, make(getattr(owner, name)))


# ------------------------------------------------------------------------------------ options
def take_options(options, defaults, taken, sample, folder):
    """Have the script's parser read `options`, and `defaults` where the user gave none.

    Options that the parser does not know are left out. `taken` gets all that it knows. A --dataset
    that is a folder is replaced by a sample of it; `folder` is where the user started compose.sh.
    """

    def make(parse):
        def parse_known_args(parser, words=None, namespace=None):
            if words is not None and words != sys.argv[1:]:
                return parse(parser, words, namespace)
            actions = parser._option_string_actions
            taken[:] = actions
            given = {word.split("=")[0] for word in sys.argv}
            more = {name: each for name, each in defaults.items() if name not in given} | options
            namespace, rest = parse(
                parser,
                sys.argv[1:]
                + [
                    f"{name}={each}"
                    for name, each in more.items()
                    if name in actions and each in (actions[name].choices or [each])
                ],
                namespace,
            )
            dataset = getattr(namespace, "dataset", None)
            if dataset is not None and (folder / str(dataset)).is_dir():
                namespace.dataset = type(dataset)(thin_out(folder / str(dataset), sample))
            return namespace, rest

        return parse_known_args

    wrap(argparse.ArgumentParser, "parse_known_args", make)


def thin_out(dataset, sample):
    """Make `sample` from DATASET/<split>/<class>/*: links to some images of each class.

    Return it, or `dataset` if `sample` is None.
    """
    if not sample or sample.exists():
        return sample or dataset
    part = sample.with_name(f"{sample.name}.{os.getpid()}")
    for split in dataset.iterdir():
        classes = [*split.iterdir()] if split.is_dir() else []
        most = max(4, (640 if split.name.startswith("train") else 200) // max(1, len(classes)))
        for each in classes or [split]:
            files = [each]
            if classes and each.is_dir():
                files = sorted(itertools.islice(each.iterdir(), 10 * most))[:most]
            for file in files:
                link = part / file.relative_to(dataset)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.resolve())
    try:
        part.rename(sample)
    except OSError:  # another process was faster
        shutil.rmtree(part)
    return sample


# ------------------------------------------------------------------------------------ recording
class Recorder:
    """Keeps what one process of a run computes, in the dict `seen`."""

    def __init__(self):
        self.seen = dict(
            images=[], losses=[], steps=[], rates=[], start=[], end=[], options=[], draws=False
        )
        self.epoch, self.step, self.kept = 1, 0, set()  # the kinds of batches kept in this step
        self.unscaled, self.optimizers, self.state = {}, [], None

    def install(self):
        """Have PyTorch call this recorder."""

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
        torch.nn.modules.module.register_module_forward_pre_hook(self.keep_images)
        register_optimizer_step_pre_hook(self.keep_rates)

    def keep_losses(self, tensors):
        self.step, self.kept = self.step + 1, set()
        for tensor in tensors:
            loss = self.unscaled.pop(id(tensor), tensor)
            self.seen["losses"].append(loss.detach().double().sum().item())
            self.seen["steps"].append((self.epoch, self.step))
        if len(self.seen["losses"]) < 3:  # do steps draw random numbers?
            state = [
                random.getstate(),
                np.random.get_state()[1].tolist(),
                torch.get_rng_state().tolist(),
            ]
            self.seen["draws"] = self.state not in (None, state)
            self.state = state
        if (
            os.environ.get("RANK", "0") == "0"
            and not Path("../stopped").exists()
            and any(path.suffix in CHECKPOINTS for path in Path().rglob("*.*"))
        ):
            shutil.copytree(".", "../stopped")  # what a run that is killed now leaves

    def keep_images(self, module, inputs):
        """Keep some numbers of the batch that the outermost module gets.

        That is the first in each step and in each validation.
        """
        trains = torch.is_grad_enabled()
        if (
            torch.compiler.is_compiling()
            or trains in self.kept
            or not (module.training if trains else self.step)
        ):
            return
        images = next(filter(torch.is_tensor, inputs), None)
        if images is None or images.ndim < 2 or next(module.parameters(), None) is None:
            return
        self.kept.add(trains)
        images = images.detach().flatten(1)
        self.seen["images"].append(images[:, :: images.shape[1] // 200 + 1].double().cpu())

    def keep_rates(self, optimizer, *_):
        if not any(optimizer is each for each in self.optimizers):
            self.optimizers.append(optimizer)
            self.seen["start"].append(self.weights(optimizer))
        self.seen["rates"].append([float(group["lr"]) for group in optimizer.param_groups])

    @staticmethod
    def weights(optimizer, most=10_000):
        """Return at most so many numbers of each weight, in one tensor."""
        weights = [
            each.detach().flatten() for group in optimizer.param_groups for each in group["params"]
        ]
        return torch.cat([each[:: len(each) // most + 1].double().cpu() for each in weights])

    def save(self, path):
        self.seen["end"] = [self.weights(optimizer) for optimizer in self.optimizers]
        torch.save(self.seen, path)


# ------------------------------------------------------------------------------------ arithmetic
def without(options, *names):
    """Return a dict without some keys."""
    return {name: value for name, value in options.items() if name not in names}


def as_weights(module, inputs):
    """Return a module's inputs in the precision of its weights."""
    weight = next(module.parameters(recurse=False), None)
    dtype = torch.float64 if weight is None else weight.dtype
    return tuple(
        each.to(dtype)
        if torch.is_tensor(each) and each.dtype in (torch.float32, torch.float64)
        else each
        for each in inputs
    )


def as_single(draw):
    """Return a `draw` that draws as for float32: float64 would draw other numbers."""

    def draw_single(tensor, *rest, **others):
        if tensor.dtype != torch.float64:
            return draw(tensor, *rest, **others)
        with torch.no_grad():
            single = torch.empty_like(tensor, dtype=torch.float32)
            return tensor.copy_(draw(single, *rest, **others))

    return draw_single


def be_exact():
    """Compute in float64, without half precision and compiled kernels, so that rounding is small.

    GradScaler scales always: then a missing `unscale_` shows, also where bfloat16 needs no scaler.
    """
    for name in ("uniform_", "normal_"):
        wrap(torch.Tensor, name, as_single)
    for name in ("rand", "randn"):
        wrap(
            torch,
            name,
            lambda make: (
                lambda *size, dtype=None, **others: make(
                    *size, dtype=dtype or torch.float32, **others
                ).to(dtype or torch.float64)
            ),
        )
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.deterministic = True
    torch.compiler.set_stance("force_eager")  # torch.compile only changes names
    torch.nn.modules.module.register_module_forward_pre_hook(as_weights)
    # GradScaler's own numbers, which have no dimension, stay float32
    wrap(
        torch.Tensor,
        "float",
        lambda single: (
            lambda tensor, **others: tensor.double() if tensor.ndim else single(tensor, **others)
        ),
    )
    wrap(
        torch.autocast,
        "__init__",
        lambda init: lambda self, device_type, *_, **__: init(self, device_type, enabled=False),
    )
    where = "cuda" if torch.cuda.device_count() else "cpu"
    wrap(
        torch.amp.GradScaler,
        "__init__",
        lambda init: (
            lambda self, *_, **others: init(self, where, **without(others, "device", "enabled"))
        ),
    )


def be_calm(halves):
    """Let one process compute what two compute: no dropout, and random numbers by image.

    With `halves` batch norm sees the halves of a batch for themselves, as two processes do, and
    keeps the statistics of the first.
    """

    class Seeded:
        def __init__(self, data):
            self.data = data

        def __getitem__(self, index):
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(int(index))
            return self.data[index]

    def make_fetch(fetch):
        def fetch_seeded(fetcher, indices):
            states = random.getstate(), np.random.get_state(), torch.get_rng_state()
            data, fetcher.dataset = fetcher.dataset, Seeded(fetcher.dataset)
            try:
                return fetch(fetcher, indices)
            finally:
                fetcher.dataset = data
                random.setstate(states[0])
                np.random.set_state(states[1])
                torch.set_rng_state(states[2])

        return fetch_seeded

    def make_norm(norm):
        def norm_halves(images, mean, var, weight=None, bias=None, training=False, *rest, **others):
            if not training or len(images) % 2:
                return norm(images, mean, var, weight, bias, training, *rest, **others)
            first = norm(images[::2], mean, var, weight, bias, True, *rest, **others)
            second = norm(images[1::2], None, None, weight, bias, True, *rest, **others)
            return torch.stack([first, second], 1).flatten(0, 1)

        return norm_halves

    wrap(torch.utils.data._utils.fetch._MapDatasetFetcher, "fetch", make_fetch)
    if halves:
        wrap(functional, "batch_norm", make_norm)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        setattr(functional, name, lambda images, *_, **__: images)


# ------------------------------------------------------------------------------------ the run
def run_script(
    path, text, words, folder, rank, threads, variables, options, sample, exact, calm, halves
):
    """Run the script `text` with the options `words` as if it stood at `path`.

    It works in `folder`/files. What it prints goes to `folder`/out<rank> and err<rank>, what
    Recorder has kept to seen<rank>.
    """
    parent = multiprocessing.parent_process()  # this process and its workers end with it
    threading.Thread(
        target=lambda: (parent.join(), os.killpg(0, signal.SIGKILL)), daemon=True
    ).start()
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, name in enumerate((os.devnull, folder / f"out{rank}", folder / f"err{rank}")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    sys.stdout, sys.stderr = (open(each, "w", buffering=1, closefd=False) for each in (1, 2))
    started_in = Path.cwd()
    os.chdir(folder / "files")
    os.environ.update(variables, OMP_NUM_THREADS=str(threads), WANDB_MODE="disabled")
    torch.set_num_threads(threads)
    multiprocessing.set_start_method("fork", force=True)  # others would read `path` again
    for name, module in [*sys.modules.items()]:  # the script may have modules of these names
        if Path(getattr(module, "__file__", None) or "/").parent == Path(__file__).parent:
            del sys.modules[name]
    recorder = Recorder()
    defaults = {"--epochs": 2, "--steps": 4, "--workers": 2}
    if not torch.cuda.device_count():
        defaults["--batch_size"] = 32
    take_options(options, defaults, recorder.seen["options"], sample, started_in)
    if exact:
        be_exact()
    else:
        torch._inductor.config.fallback_random = True  # compiled dropout draws as uncompiled does
    if calm:
        be_calm(halves)
    recorder.install()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = str(path)
    sys.argv, sys.path[0] = [str(path), *words], str(path.parent)
    source = text.decode(errors="replace")  # for tracebacks: the file at `path` is the copy before
    linecache.cache[str(path)] = len(text), None, source.splitlines(True), str(path)
    try:
        exec(compile(text, str(path), "exec"), main.__dict__)
    finally:
        recorder.save(folder / f"seen{rank}")
