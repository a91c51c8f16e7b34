"""The state of a training: copied to the host, and put back before each round of windows."""

import contextlib
import copy
import functools
import random
import sys

import torch

TECHNIQUES = ("fused", "foreach")  # keys of param_groups that techniques switch
RATES = ("lr", "momentum", "betas")  # those that schedulers change


def copied(value):
    """Return a copy of a value: of tensors on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


class State:
    """A copy of modules, optimizers, schedulers, scalers and random states."""

    def __init__(self, modules, optimizers, schedulers=(), scalers=()):
        weights = {id(each): each for module in modules for each in module.parameters()}
        weights |= {
            id(each): each
            for optimizer in optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        }
        self.weights = [(each, copied(each)) for each in weights.values()]
        parts = {id(part): part for module in modules for part in module.modules()}
        self.buffers = [
            (part, name, copied(each), each.device)
            for part in parts.values()
            for name, each in part._buffers.items()
            if each is not None
        ]
        self.optimizers = [(each, self.state_of(each), self.groups_of(each)) for each in optimizers]
        self.schedulers = [(each, self.values_of(each)) for each in schedulers]
        self.scalers = [(each, copy.deepcopy(each.state_dict())) for each in scalers]
        self.random = self.random_state()

    @staticmethod
    def state_of(optimizer):
        """Return {weight: {name: (a copy of the value, the device of a tensor)}}."""
        return {
            weight: {
                name: (copied(value), getattr(value, "device", None))
                for name, value in values.items()
            }
            for weight, values in optimizer.state.items()
        }

    @staticmethod
    def groups_of(optimizer):
        return [
            {
                name: copied(value)
                for name, value in group.items()
                if name not in ("params", *TECHNIQUES)
            }
            for group in optimizer.param_groups
        ]

    @staticmethod
    def values_of(scheduler):
        """Return what a scheduler counts: its plain values."""
        return {
            name: copy.copy(value)
            for name, value in vars(scheduler).items()
            if isinstance(value, (int, float, list, bool, str, type(None)))
        }

    @staticmethod
    def random_state():
        state = dict(torch=torch.get_rng_state(), random=random.getstate())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        if "numpy" in sys.modules:
            state["numpy"] = sys.modules["numpy"].random.get_state()
        return state

    def put_back(self):
        """Put everything back, into the tensors that are there."""
        with torch.no_grad():
            for weight, value in self.weights:
                weight.data.copy_(value)
            for part, name, value, device in self.buffers:  # a step may have put others there
                there = part._buffers.get(name)
                if there is not None and there.shape == value.shape:
                    there.data.copy_(value)
                else:
                    part._buffers[name] = value.to(device, copy=True)
            for optimizer, state, groups in self.optimizers:
                self.put_back_optimizer(optimizer, state, groups)
        for scheduler, values in self.schedulers:
            vars(scheduler).update({name: copy.copy(value) for name, value in values.items()})
        for scaler, values in self.scalers:
            with contextlib.suppress(RuntimeError):  # a disabled one has no state
                scaler.load_state_dict(copy.deepcopy(values))
        torch.set_rng_state(self.random["torch"])
        random.setstate(self.random["random"])
        if "cuda" in self.random:
            torch.cuda.set_rng_state_all(self.random["cuda"])
        if "numpy" in self.random:
            sys.modules["numpy"].random.set_state(self.random["numpy"])

    @staticmethod
    def put_back_optimizer(optimizer, state, groups):
        for weight in [*optimizer.state]:
            if weight not in state:
                del optimizer.state[weight]
        for weight, values in state.items():
            now = optimizer.state[weight]
            for name in [name for name in now if name not in values]:
                del now[name]
            for name, (value, device) in values.items():
                there = now.get(name)
                if (
                    isinstance(value, torch.Tensor)
                    and isinstance(there, torch.Tensor)
                    and (there.shape == value.shape)
                ):
                    there.copy_(value)
                elif isinstance(value, torch.Tensor):
                    now[name] = value.to(device, copy=True)
                else:
                    now[name] = copy.deepcopy(value)
        for group, values in zip(optimizer.param_groups, groups):
            put_values(group, values)


def stand_still(schedulers):
    """Let the step of each scheduler do its work, but leave rates and counts as they were.

    Only classes are changed: a script may save all attributes of a scheduler.
    """
    for cls in {type(each) for each in schedulers}:
        if not hasattr(cls.step, "stands_still"):
            cls.step = still(cls.step)


def still(plain):
    """Return a scheduler's method `step` that changes nothing in the end."""

    @functools.wraps(plain)
    def step(scheduler, *args, **kwargs):
        if not getattr(scheduler, "_step_count", 1):  # it is being made, and sets the first rate
            return plain(scheduler, *args, **kwargs)
        counts, optimizer = State.values_of(scheduler), getattr(scheduler, "optimizer", None)
        groups = optimizer.param_groups if optimizer else []
        rates = [{name: copied(group[name]) for name in RATES if name in group} for group in groups]
        with contextlib.suppress(Exception):  # one may refuse to go beyond its last step
            plain(scheduler, *args, **kwargs)
        vars(scheduler).update(counts)
        for group, values in zip(groups, rates):
            put_values(group, values)

    step.stands_still = True
    return step


def put_values(group, values):
    """Put values of a group of weights back, into the tensors that are there."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
            group[name].copy_(value)
        else:
            group[name] = copy.deepcopy(value)
