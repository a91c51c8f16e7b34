"""The process of a proof: the script with nothing but a clock at the end of each step.

It times the same steps in the original and in the copy, keeps losses, and at the end saves the
states of models, optimizers, schedulers and scalers, and loads those of the other side.
"""

import atexit
import collections.abc
import contextlib
import os
import pickle
import time
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from whatif import records
from whatif.imports import wrap
from whatif.inside.clock import LOSSES, MANY, Lead, compiled, loss_of, numbers, place_of
from whatif.inside.open_files import all_objects

CALM = 3  # steps in which nothing compiles, before the window may begin
AFTER = 3  # steps with the states of the other side
TRIES = 3  # windows, until one has usual steps only


class Proving:
    """Counts the steps of the leading optimizer, and goes on with the plan at each of them.

    `spec` has warm and steps, the step at which the window begins and its length, or None if this
    run shall choose them (from `seconds`); least_steps; save_to and load_from, paths of states.
    """

    def __init__(self, spec):
        self.spec, self.pid, self.plan = spec, os.getpid(), self.whole()
        self.steps, self.losses, self.most, self.lead = 0, [], LOSSES, Lead()
        self.optimizers, self.saved, self.found, self.is_over = [], [], None, False
        self.before = self.ends_round = None  # the last optimizer, and the one that ends a round
        self.round = 0  # the step that began the last round
        self.is_late = False  # whether the plan goes on at the steps of all optimizers
        self.is_timing = False

    def install(self):
        register_optimizer_step_post_hook(self.step)
        wrap(torch.autograd, "backward", self.backward)
        wrap(torch.amp.GradScaler, "scale", self.scale)
        wrap(torch, "save", self.save)
        os.register_at_fork(after_in_child=self.forked)
        atexit.register(self.ended)

    def forked(self):
        self.is_over = True  # a worker; a process that trains is started by its launcher

    # ---- what torch calls
    def scale(self, original, scaler, outputs):
        scaled = original(scaler, outputs)
        if isinstance(scaled, torch.Tensor):
            scaled._unscaled = outputs
        return scaled

    def backward(self, original, tensors, grad_tensors=None, *rest, **options):
        loss = loss_of(tensors, grad_tensors)
        if loss is not None and len(self.losses) < self.most:
            self.losses.append(loss.clone())
        return original(tensors, grad_tensors, *rest, **options)

    def save(self, original, obj, f, *rest, **options):
        original(obj, f, *rest, **options)
        if isinstance(f, (str, os.PathLike)) and not self.is_over:
            self.saved = [os.path.abspath(f)]

    def step(self, optimizer, *_):
        if self.is_over or rank():
            return
        this = weakref.ref(optimizer)
        if not any(each is optimizer for each in self.optimizers):
            before = [*map(weakref.ref, self.optimizers)]
            self.optimizers = []  # a script may make one for each batch: let the others go
            self.optimizers = [*filter(None, (each() for each in before)), optimizer]
        leads = self.lead.is_stepping(optimizer)
        if leads:
            self.steps += 1
            if self.before != this and not self.is_late:
                self.ends_round, self.round = self.before or this, self.steps
        self.before = this
        if not leads and not self.is_late:
            return
        try:
            next(self.plan)
        except StopIteration:
            self.is_over = True
            self.send(done=True)
            os._exit(0)
        except Exception as error:
            self.send(
                error=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}", done=True
            )
            os._exit(1)

    def send(self, **record):
        records.send(self.spec["folder"], **record)

    # ---- the plan
    def whole(self):
        """Warm up, time the window, compare states, and take some steps with the other's."""
        spec, begin = self.spec, time.perf_counter()
        yield
        self.device, self.gpu = place_of(self.lead.optimizer())
        calm, before = 0, compiled()
        while (
            self.steps < spec["warm"]
            if spec["warm"]
            else (calm < CALM or time.perf_counter() - begin < spec["warm_seconds"])
        ):
            yield
            calm, before = (calm + 1 if compiled() == before else 0), compiled()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats(self.gpu)
        yield from self.window()
        memory = torch.cuda.max_memory_allocated(self.gpu) if self.device == "cuda" else None
        while self.steps < spec["least_steps"]:
            yield
        self.is_late = True
        while self.is_in_round():  # two networks in turn: a graph waits for the other
            yield
        self.is_late = False
        losses, loaded = numbers(self.losses), self.exchange()
        self.most += len(losses)  # the losses of the next steps, too
        for _ in range(AFTER if loaded is not None else 0):
            yield
        self.send(
            whole=self.found,
            first=self.found["first"],
            losses=losses,
            memory=memory,
            states=loaded,
            total=self.steps,
            compared=numbers(self.losses)[len(losses) :],
        )

    def window(self):
        """Time the given steps, or those of the given seconds.

        The second kind begins anew after what belongs to no usual step: compiling, or a step that
        takes more than half of the time, as that between two epochs can.
        """
        spec, self.is_timing = self.spec, True
        for _ in range(TRIES):
            before, slowest = compiled(), 0.0
            self.first, self.began = self.steps, self.now()
            self.last = self.began
            while (
                self.steps - self.first < spec["steps"]
                if spec["steps"]
                else (self.last - self.began < spec["seconds"] or self.steps - self.first < 3)
            ):
                yield
                slowest = max(slowest, time.perf_counter() - self.last)
                self.last = time.perf_counter()
            self.found = self.timed(self.now())
            if spec["steps"] or (compiled() == before and slowest < (self.last - self.began) / 2):
                break
        self.is_timing = False

    def timed(self, end):
        return dict(first=self.first, steps=self.steps - self.first, seconds=end - self.began)

    def is_in_round(self):
        """Return whether a step of another optimizer has to follow, if it steps at all."""
        return self.before != self.ends_round and self.steps - self.round <= MANY

    def now(self):
        if self.device == "cuda":
            torch.cuda.synchronize(self.gpu)
        return time.perf_counter()

    def ended(self):
        """Tell what there is if the script comes to its own end in the window."""
        if self.is_over or os.getpid() != self.pid or rank() or not self.steps:
            return
        self.is_over = True
        if self.is_timing and self.steps - self.first > 2:
            self.found = self.timed(self.last)
        if self.found:  # if the last window is too short, one with an unusual step
            self.send(
                whole=self.found,
                first=self.found["first"],
                losses=numbers(self.losses),
                memory=None,
                states=self.exchange(),
                total=self.steps,
                compared=[],
            )
        self.send(steps=self.steps, ended=True, done=True)

    def exchange(self):
        """Save all states, and load those of the other side if there are any; tell what failed.

        None: there was nothing to load.
        """
        things = things_of(self.optimizers)
        states = {name: each.state_dict() for name, each in things.items()}
        content = checkpoint(self.saved)
        with open(self.spec["save_to"], "wb") as file:
            torch.save(dict(states=states, checkpoint=content), file)
        path = self.spec.get("load_from")
        if not path or not os.path.exists(path):
            return None
        other = torch.load(path, map_location="cpu", weights_only=False)
        told = []
        for name, state in other["states"].items():
            kind = name.split()[0]
            if name not in things:
                told += [f"the other side has {name}"] * (kind != "scaler")
                continue
            try:
                with keeps_fused(things[name]):
                    things[name].load_state_dict(renamed(state, things[name]))
            except Exception as error:
                told.append(f"{name} does not load: {str(error).splitlines()[0][:150]}")
        return told + compared(content, other["checkpoint"], things)


# ---- states
def things_of(optimizers):
    """Return {name: thing} of all that has a state."""
    weights = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weights.setdefault(id(weight), (number, len(weights)))
    objects = [
        each
        for each in all_objects()
        if issubclass(
            type(each),
            (  # no proxies
                torch.nn.Module,
                torch.optim.lr_scheduler.LRScheduler,
                torch.amp.GradScaler,
            ),
        )
    ]
    modules = [
        each
        for each in objects
        if isinstance(each, torch.nn.Module)
        and any(id(weight) in weights for weight in each.parameters())
    ]
    inner = {id(part) for each in modules for part in each.modules() if part is not each}
    outer = sorted(
        (each for each in modules if id(each) not in inner),
        key=lambda each: min(weights.get(id(weight), (99, 0)) for weight in each.parameters()),
    )
    # an option of the script's own may wrap the model in torch.compile's OptimizedModule
    found = {
        f"model {type(getattr(each, '_orig_mod', each)).__name__} {number}": each
        for number, each in enumerate(outer)
    }
    found |= {
        f"optimizer {type(each).__name__} {number}": each for number, each in enumerate(optimizers)
    }
    mine = {id(each) for each in optimizers}
    for kind, owner in (
        ("scheduler", torch.optim.lr_scheduler.LRScheduler),
        ("scaler", torch.amp.GradScaler),
    ):
        chosen = [
            each
            for each in objects
            if isinstance(each, owner)
            and (kind == "scaler" or id(getattr(each, "optimizer", None)) in mine)
        ]
        found |= {
            f"{kind} {type(each).__name__} {number}": each for number, each in enumerate(chosen)
        }
    return found


def checkpoint(paths):
    """Return what the script's own last checkpoint has in it, or None."""
    for path in paths:
        try:
            return torch.load(path, map_location="cpu", weights_only=False)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError):
            return None  # it was moved, or is no file of torch
    return None


def renamed(state, thing):
    """Return a state with the names of a thing, where only torch.compile has changed them.

    An option of the script's own may compile a part of a model.
    """
    if not isinstance(thing, torch.nn.Module):
        return state
    names = {name.replace("_orig_mod.", ""): name for name in thing.state_dict()}
    return {names.get(name.replace("_orig_mod.", ""), name): value for name, value in state.items()}


@contextlib.contextmanager
def keeps_fused(thing):
    """Keep the kernels of an optimizer that loads a state, unless the script does that itself."""
    kept = [
        {key: group[key] for key in ("fused", "foreach") if key in group}
        for group in getattr(thing, "param_groups", ())
    ]
    try:
        yield
    finally:
        for group, values in zip(getattr(thing, "param_groups", ()), kept):
            group.update(values)
        for weight, state in getattr(thing, "state", {}).items() if kept else ():
            for name, value in state.items() if isinstance(state, dict) else ():
                if getattr(value, "shape", None) == weight.shape:
                    state[name] = torch.empty_like(weight).copy_(value)


def shape_of(value, path=""):
    """Return {path: kind} of everything in a checkpoint, by its keys; no long lists."""
    if isinstance(value, collections.abc.Mapping):
        return {
            name: kind
            for key, each in value.items()
            for name, kind in shape_of(each, f"{path}/{key}").items()
        }
    if isinstance(value, torch.Tensor):
        return {path: f"{value.dtype} {tuple(value.shape)}"}
    return {path: "object"}


def compared(own, other, things):
    """Return what is wrong between the script's own checkpoints of both sides."""
    if own is None or other is None:
        return []
    mine, others = shape_of(own), shape_of(other)
    both = [name for name in mine if name in others and mine[name] != others[name]]
    told = [
        f"the checkpoint's {name[1:]} is {mine[name]}, and {others[name]} in the other"
        for name in both[:1]
    ]
    lost = [name for name in mine if name not in others and "/state/" not in name] + [
        name for name in others if name not in mine and "/state/" not in name
    ]
    return (
        told
        + [
            f"only one side's checkpoint has {name[1:]}"
            for name in lost
            if "scaler" not in name.lower() and "scale" not in name
        ][:1]
    )


def rank():
    """Return the rank of this process."""
    dist = torch.distributed
    is_known = dist.is_available() and dist.is_initialized()
    return dist.get_rank() if is_known else int(os.environ.get("RANK", 0))


def install(spec):
    """Prepare this process: hold what it writes, shift its seeds, and start the clock."""
    from whatif.inside import files, seeds

    files.hold_everything(spec)
    Proving(spec).install()
    seeds.shift_seeds(spec["seed"])
