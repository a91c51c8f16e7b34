"""The script's DataLoaders: waits are timed, samples counted, first batches kept and repeated."""

import collections
import contextlib
import copy
import inspect
import math
import threading
import time
import traceback

import torch
from torch.utils._pytree import tree_leaves, tree_map

from whatif.inside.facts import length_of
from whatif.techniques import batch as larger

KEPT = 8  # batches that are repeated
KEPT_BYTES = 2e9  # of them, at most, but two batches
FLOOD = 64  # batches without a step, after which a repeated loader ends: a script may collect them


def samples_in(batch):
    """Return the number of samples in a batch.

    It is the size that all tensors share in their first dimension, else the length of the list
    (detection has images of several sizes), or of the first list in it.
    """
    batch = dict(batch) if isinstance(batch, collections.abc.Mapping) else batch
    tensors = [each for each in tree_leaves(batch) if isinstance(each, torch.Tensor)]
    sizes = {each.shape[0] for each in tensors if each.dim()}
    is_list = isinstance(batch, (list, tuple)) and batch
    if is_list and larger.is_samples(batch):
        return len(batch)
    if len(sizes) == 1:
        return sizes.pop()
    if is_list and isinstance(batch[0], (list, tuple)):
        return len(batch[0])
    if (
        is_list
        and len({type(each) for each in batch}) == 1
        and len(sizes) > 1
        and (not isinstance(batch[0], torch.Tensor) or batch[0].dim() > 2)
    ):
        return len(batch)
    return next((each.shape[0] for each in tensors if each.dim()), len(tensors[:1]))


def rebuilt(batch):
    """Return a batch in containers and objects of its own, because a script may change those.

    The tensors share their memory with the kept ones, but not what a script sets in them.
    """
    if type(batch) is torch.Tensor:
        return batch.detach()
    if isinstance(batch, (torch.Tensor, torch.nn.Module, type)):
        return batch
    if type(batch) in (list, tuple, dict, collections.OrderedDict, collections.defaultdict) or (
        isinstance(batch, tuple)
    ):  # a namedtuple
        return tree_map(rebuilt_leaf, batch)
    if not hasattr(batch, "__dict__"):
        return batch
    with contextlib.suppress(Exception):  # it may refuse to be copied
        new = copy.copy(batch)
        for name, value in vars(new).items():
            vars(new)[name] = rebuilt(value)
        return new
    return batch


def rebuilt_leaf(leaf):
    """Return what stands in a container, which tree_map does not look into."""
    return rebuilt(leaf) if not isinstance(leaf, (list, tuple, dict)) else leaf


def tensors_of(batch, depth=4):
    """Return the tensors of a batch, those in objects too."""
    found = []
    for each in tree_leaves(batch):
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif depth and not isinstance(each, (torch.nn.Module, type)) and hasattr(each, "__dict__"):
            found += tensors_of([*vars(each).values()], depth - 1)
    return found


class Kept:
    """The batches of one loader that are repeated, as the loader gave them."""

    def __init__(self):
        self.batches, self.clones, self.versions, self.samples = [], [], [], []
        self.turn, self.joins, self.bytes, self.is_changed, self.given = 0, {}, 0, False, 0

    def keep(self, batch, samples=None):
        """Keep a batch of so many samples before the script gets it; return what that gets."""
        tensors = tensors_of(batch)
        size = sum(each.numel() * each.element_size() for each in tensors)
        if len(self.batches) >= KEPT or (len(self.batches) > 1 and self.bytes + size > KEPT_BYTES):
            return batch
        self.bytes += size
        with torch.no_grad():
            self.clones.append([each.detach().clone() for each in tensors])
        self.versions.append([self.version(each) for each in tensors])
        self.batches.append(batch)
        self.samples.append(samples_in(batch) if samples is None else samples)
        return rebuilt(batch)

    @staticmethod
    def version(tensor):
        with contextlib.suppress(RuntimeError):  # an inference tensor has none
            return tensor._version
        return 0

    def settle(self):
        """Find out whether steps change batches in place; free the clones if they do not."""
        self.is_changed = any(
            self.version(tensor) != before
            for batch, versions in zip(self.batches, self.versions)
            for tensor, before in zip(tensors_of(batch), versions)
        )
        full = max(self.samples, default=0)
        whole = [number for number, samples in enumerate(self.samples) if samples == full]
        if 2 <= len(whole) < len(self.batches) and self.is_alike(
            [self.batches[at] for at in whole]
        ):
            self.batches = [self.batches[at] for at in whole]  # without an epoch's last batch
            self.clones = [self.clones[at] for at in whole]
            self.samples = [full] * len(whole)
        if not self.is_changed:
            self.clones = []

    @staticmethod
    def is_alike(batches):
        """Return whether batches have the same shapes."""
        return len({tuple(each.shape for each in tensors_of(batch)) for batch in batches}) <= 1

    def cycle(self, each=1):
        """Return after how many steps the shapes repeat, if a step takes `each` batches."""
        if self.is_alike(self.batches):
            return 1
        count = len(self.batches)
        return count // math.gcd(count, max(1, round(each)))

    def next(self, times):
        """Return the next batch, or as many joined; `given` is the number of samples in it."""
        if times > 1:
            self.given = sum(self.samples[number % len(self.batches)] for number in range(times))
            if times not in self.joins:
                order = [self.batches[number % len(self.batches)] for number in range(times)]
                self.joins = {times: larger.joined(order)}  # of one size, because of memory
            batch = self.joins[times]
            return tree_map(
                lambda each: (
                    each.clone() if self.is_changed and isinstance(each, torch.Tensor) else each
                ),
                batch,
            )
        number, self.turn = self.turn % len(self.batches), self.turn + 1
        batch, self.given = self.batches[number], self.samples[number]
        if self.is_changed:
            with torch.no_grad():
                for tensor, clone in zip(tensors_of(batch), self.clones[number]):
                    tensor.copy_(clone)
        return rebuilt(batch)


def is_being_made(loader):
    """Return whether this is called in a loader's __init__, whose iterator is for all epochs."""
    return any(
        frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is loader
        for frame, _ in traceback.walk_stack(None)
    )


class Batches:
    """The iterator of a DataLoader. It times each wait and counts samples.

    `length` is the number of batches that it gives, and `epoch` that after which repeated ones end;
    None: unknown, or never.
    """

    def __init__(self, loaders, batches, number, length, epoch):
        self.loaders, self.batches, self.number, self.length = loaders, batches, number, length
        self.epoch = epoch
        self.about, self.given = loaders.about[number], 0

    def __iter__(self):
        return self

    def __len__(self):
        return self.about["length"]

    def __next__(self):
        loaders, run, number = self.loaders, self.loaders.run, self.number
        if loaders.is_repeated(number):
            self.batches = None  # ends its workers
            if loaders.ends and self.epoch and self.given >= self.epoch:  # the script counts them
                run.clock.pause()
                raise StopIteration
            self.given += 1
            return loaders.repeat(number)
        start = time.perf_counter()
        try:
            if self.batches is None:
                raise StopIteration
            batch = next(self.batches)
        except StopIteration:
            loaders.waited(start)  # for the end of its workers
            run.clock.pause()
            raise
        wait = time.perf_counter() - start
        self.given = loaders.given[number] = self.given + 1
        size = self.about["batch"]
        if not size or self.given == self.length:  # the last one may be smaller
            size = samples_in(batch)
        loaders.fetched(number, size, wait)
        if loaders.keeps and torch.is_grad_enabled():
            return loaders.kept[number].keep(batch, size)
        return batch

    def __getattr__(self, name):  # a script may ask the iterator of a DataLoader for more
        return getattr(self.__dict__["batches"], name)

    def __del__(self):  # a script may make a new one in each step
        start, self.batches = time.perf_counter(), None
        self.loaders.waited(start)


class Loaders:
    """All DataLoaders of the script, by number; one that is made anew each epoch keeps its own."""

    def __init__(self, run):
        self.run, self.about, self.live = run, {}, {}
        self.numbers, self.made = {}, collections.Counter()
        self.kept, self.keeps, self.repeats = collections.defaultdict(Kept), True, False
        self.ends = False  # whether epochs of repeated batches end
        self.fetched_from, self.recent = {}, []  # since the last step, and for it
        self.steps_of = collections.Counter()  # to how many steps each loader gave a batch
        self.given = {}  # batches of each loader's last iterator
        self.threaded = set()  # those that a thread of the script's own reads
        self.flood = self.fed = self.batches = 0  # batches since the last step; steps that had one

    def make(self, original, loader, *args, **kwargs):
        """Take the place of DataLoader.__init__."""
        run = self.run
        call = inspect.signature(original).bind(loader, *args, **kwargs)
        given = call.arguments
        key = (
            length_of(given["dataset"]),
            *((frame.f_code.co_filename, line) for frame, line in run.places.frames()),
        )
        self.made[key] += 1  # a comprehension makes several in one line
        key = self.made[key], key
        number = self.numbers.get(key, len(self.about))
        if "workers" in run.spec["techniques"] and number in run.spec.get("training", ()):
            stay = number not in run.spec.get("changing", ())
            given |= dict(num_workers=run.spec["workers"], persistent_workers=stay)
            if torch.cuda.is_available():
                given["pin_memory"] = True
        original(*call.args, **call.kwargs)
        self.numbers[key] = number
        self.note(loader, number, args, kwargs)

    def note(self, loader, number, args=(), kwargs={}):
        """Note what is known of a loader."""
        run = self.run
        loader._whatif = number
        self.live[number] = loader
        self.about[number] = run.about.describe_loader(loader, args, kwargs) | dict(threaded=False)
        if not self.about[number]["batch"]:
            self.about[number]["batch"] = getattr(loader.batch_sampler, "batch_size", None)

    def training(self):
        """Return the numbers of the loaders that give a batch to most steps, or to the last."""
        return [
            number for number, count in self.steps_of.items() if 2 * count >= self.run.steps
        ] or (self.recent if 2 * self.fed >= self.run.steps else [])

    def is_training(self, number):
        return torch.is_grad_enabled() and number in (*self.training(), *self.recent)

    def iterate(self, original, loader):
        """Take the place of DataLoader.__iter__."""
        start = time.perf_counter()
        if getattr(loader, "_whatif", None) not in self.about:  # made in another process
            self.note(loader, len(self.about))
        number = loader._whatif
        self.live[number] = loader
        about = self.about[number]
        self.run.see("no set_epoch", about["shuffles"] and "set_epoch" not in self.run.seen)
        if self.is_training(number):
            self.run.clock.resume()
        else:
            self.run.clock.pause()  # validation
        # a loader with an __iter__ of its own may take all its epochs from this one iterator
        is_plain = type(loader).__iter__ is torch.utils.data.DataLoader.__iter__
        batches = None if self.is_repeated(number) else original(loader)
        if batches is not None:
            self.waited(start)
        length = about["length"] if is_plain else None
        epoch = None if is_being_made(loader) else about["length"]
        return Batches(self, batches, number, length, epoch)

    def waited(self, start):
        """Count the time since `start`, in which workers started or ended, as data time."""
        if threading.get_ident() == self.run.thread:
            self.run.clock.fetched(0, time.perf_counter() - start)

    def fetched(self, number, samples, wait):
        """Note a batch: how many samples, and for how many seconds it was waited for."""
        run = self.run
        if threading.get_ident() != run.thread and run.steps:  # a thread waits, but no step
            self.threaded.add(number)
            self.about[number]["threaded"], wait = True, 0
        trains = torch.is_grad_enabled()
        if trains:
            self.fetched_from[number] = True
        if not trains or not self.is_training(number):
            run.clock.pause()  # validation, or other data from now on
        training = self.training()
        counted = training[:1] if number in training else self.recent[:1]
        self.batches += number in counted
        run.clock.fetched(samples if number in counted else 0, wait)

    def step(self):
        """Note a step of the leading optimizer."""
        self.made.clear()
        self.steps_of.update([*self.fetched_from])
        self.fed += bool(self.fetched_from)
        self.recent, self.fetched_from = [*self.fetched_from] or self.recent, {}
        self.flood = 0

    def at_an_end(self):
        """Return whether the last batch ended an epoch: the next may be another loader's."""
        return any(
            self.about[number]["length"] == given > 1
            for number, given in self.given.items()
            if number in self.recent
        )

    def is_repeated(self, number):
        return self.repeats and torch.is_grad_enabled() and number in self.chosen

    def begin_repeats(self):
        """From now on the training loaders give their kept batches, and their workers end."""
        self.keeps = False
        numbers = self.training()
        if not {*numbers} & {*self.recent}:  # a loader for each shard: the script is in another
            numbers = [*sorted(self.recent, key=self.steps_of.get, reverse=True), *numbers]
        self.chosen = [number for number in numbers if self.kept[number].batches]
        for number in [*self.kept]:
            if number not in self.chosen:
                del self.kept[number]
        for number in self.chosen:
            self.kept[number].settle()
            if (loader := self.live.get(number)) is not None:  # it may have no len()
                with contextlib.suppress(Exception):
                    if (workers := getattr(loader, "_iterator", None)) is not None:
                        loader._iterator = None
                        workers._shutdown_workers()
        self.repeats = bool(self.chosen)

    def repeat(self, number):
        """Return the next kept batch."""
        self.flood += 1
        if self.flood > FLOOD * max(1, self.run.cycle):
            self.flood, self.ends = 0, True  # it may skip what comes after so many batches
            raise StopIteration
        run, kept = self.run, self.kept[number]
        self.fetched_from[number] = True
        run.clock.resume()
        if kept.is_changed:  # its clone is copied outside the clock
            run.clock.pause()
        try:
            batch = kept.next(1 if run.failed else larger.times(run.names))
        except Exception as error:  # they cannot be joined
            run.fail(error)
            batch = kept.next(1)
        run.clock.resume()
        run.clock.fetched(kept.given if number == self.chosen[0] else 0, 0)
        return batch

    def size(self):
        """Return the number of samples in the kept batches, the largest."""
        return max(self.kept[self.chosen[0]].samples, default=0) if self.repeats else 0

    def rewind(self):
        """Begin with the first kept batch, so that each window has the same ones."""
        for kept in self.kept.values():
            kept.turn = 0
