"""What is measured of a training: work and seconds of windows without validation, and losses."""

import collections
import contextlib
import sys
import time
import weakref

import torch

LOSSES = 1000  # the most that are kept
MANY = 10  # steps of an optimizer without one of the leading one, after which it leads


def loss_of(tensors, grad_tensors):
    """Return the loss that backward() got, as it was before a scaler; None if it is not one number.

    Whoever scales a loss keeps it as the attribute _unscaled.
    """
    first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
    is_loss = first.numel() == 1 and grad_tensors is None
    return getattr(first, "_unscaled", first).detach() if is_loss else None


def numbers(losses):
    """Return losses as numbers; what is not finite is a string."""
    found = [float(each) for each in losses]
    return [each if abs(each) < float("inf") else str(each) for each in found]


def place_of(optimizer):
    """Return (type of the device that an optimizer's weights are on, number of the GPU or None)."""
    weights = (each for group in optimizer.param_groups for each in group["params"])
    device = next((each.device for each in weights), torch.device("cpu"))
    return device.type, device.index if device.type == "cuda" else None


def on(gpu):
    """Return a context in which a GPU is the current one; a script may train on cuda:1 from 0."""
    return contextlib.nullcontext() if gpu is None else torch.cuda.device(gpu)


def compiled():
    """Return how many functions were compiled; a new shape compiles them again."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["frames"]["total"] if dynamo else 0


class Lead:
    """The optimizer whose steps count: the first one, or one that makes MANY steps without it."""

    def __init__(self):
        self.optimizer, self.others = None, collections.Counter()

    def is_stepping(self, optimizer):
        """Note a step of an optimizer; return whether it counts."""
        self.others[id(optimizer)] += 1
        if not self.optimizer or not self.optimizer() or self.others[id(optimizer)] > MANY:
            self.optimizer = weakref.ref(optimizer)  # the script goes on with this
        if self.optimizer() is not optimizer:
            return False
        self.others.clear()
        return True


class Clock:
    """Times training from begin() to end(); the device is synchronised where it starts and stops.

    pause() is called where the script begins to do something else (another loader gives a batch, an
    epoch ends), resume() where it fetches a batch to train on. The first step after a pause whose
    beginning is not known is not counted. `mark` returns an event of a GPU, or nothing.
    """

    def __init__(self, synchronize, mark=lambda: None):
        self.synchronize, self.since, self.is_on = synchronize, None, False
        self.mark, self.start = mark, None
        self.reset()

    def reset(self):
        self.counts = dict(seconds=0.0, steps=0, samples=0, wait=0.0)

    def begin(self, in_flow=False):
        """Begin a window; `in_flow`: when the GPU, not the host, comes to this place.

        Then the GPU does not stand still at the beginning, while the host prepares a step, which
        would weigh most in a window of a single step.
        """
        self.reset()
        self.is_on, self.since, self.start = True, None, None
        if in_flow and (start := self.mark()):
            self.start, self.since = start, time.perf_counter()
        self.resume()
        self.began = self.since

    def resume(self):
        if self.is_on and self.since is None:
            self.synchronize()
            self.since = time.perf_counter()

    def pause(self):
        if self.since is not None:
            self.synchronize()
            end = self.start and self.mark()
            self.synchronize()  # the end comes after the work on all streams
            took = self.start.elapsed_time(end) / 1000 if end else time.perf_counter() - self.since
            self.counts["seconds"] += took
            self.since = self.start = None

    def fetched(self, samples, wait):
        """Count samples, and the seconds for which a step waited for them."""
        if self.since is not None:
            self.counts["samples"] += samples
            self.counts["wait"] += wait

    def step(self):
        """Count a step."""
        if self.since is not None:
            self.counts["steps"] += 1
        else:
            self.resume()

    def seconds(self):
        """Return the seconds of the window until now."""
        now = time.perf_counter() - self.since if self.since is not None else 0
        return self.counts["seconds"] + now

    def end(self):
        """End a window; return its seconds, steps, samples, seconds of wait, and all seconds."""
        self.pause()
        self.is_on = False
        return self.counts | dict(whole=time.perf_counter() - self.began)
