"""The hooks: what torch's own functions call in a process that is watched."""

import contextlib
import functools
import os
import time
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from whatif.imports import before, wrap
from whatif.inside import facts
from whatif.inside.calls import called_at
from whatif.inside.clock import LOSSES, loss_of
from whatif.techniques import amp

SCHEDULERS = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler")  # these
# do not call the __init__ of the first
ALONE = 300, 30.0  # calls of backward() and seconds without a step, after which there is none


class Hooks:
    """The part of a Run that torch calls: for loaders, optimizers, losses and gradients."""

    def install(self):
        """Begin to watch."""
        data = torch.utils.data
        wrap(data.DataLoader, "__init__", self.loaders.make)
        wrap(data.DataLoader, "__iter__", self.loaders.iterate)
        wrap(torch.autograd, "backward", self.backward)
        wrap(torch.amp.GradScaler, "scale", self.scale)
        wrap(torch.optim.Optimizer, "__init__", self.make_optimizer)
        before(torch.amp.GradScaler, "__init__", lambda it, *_, **__: self.note("scalers", it))
        for name in SCHEDULERS:
            before(
                getattr(torch.optim.lr_scheduler, name),
                "__init__",
                lambda it, *_, **__: self.note("schedulers", it),
            )
        before(torch.amp.autocast_mode.autocast, "__enter__", self.enter_autocast)
        before(
            data.distributed.DistributedSampler, "set_epoch", lambda *_, **__: self.see("set_epoch")
        )
        wrap(torch.optim.Optimizer, "add_param_group", self.add_param_group)
        hook = wrap(torch.optim.Optimizer, "profile_hook_step", self.hook_step)
        torch.optim.Optimizer.profile_hook_step = staticmethod(hook)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(torch.nn.utils, name, self.clip)
        before(torch.cuda.CUDAGraph, "replay", lambda *_: self.see("graphs", not self.names))
        for each in (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel):
            before(each, "__init__", self.note_wrapper)
        self.parsers.install()
        self.models.watch()
        register_optimizer_step_post_hook(self.step)
        os.register_at_fork(after_in_child=self.forked)

    def note(self, what, it):
        self.made[what] = [each for each in self.made[what] if each() is not None]
        if it not in self.live(what):
            self.made[what].append(weakref.ref(it))

    def note_wrapper(self, wrapper, module=None, *_, **__):
        if module is not None and not self.models.chosen:
            self.about.note_wrapper(wrapper, module)

    def make_optimizer(self, original, optimizer, params, defaults):
        original(optimizer, params, defaults)
        self.note("optimizers", optimizer)
        about = self.about.describe_optimizer(optimizer, dict(defaults))
        if about not in self.optimizer_facts:  # a script may make one in each epoch
            self.optimizer_facts.append(about)
        self.numbers[optimizer] = self.optimizer_facts.index(about)
        if self.names:
            self.switch(self.names, again=True)

    def add_param_group(self, original, optimizer, group):
        original(optimizer, group)
        if self.names and optimizer in self.optimizers:  # it was made before
            self.switch(self.names, again=True)

    def hook_step(self, original, step):
        """Take the place of the function by which torch adds hooks to the step of a class."""

        @functools.wraps(step)
        def can_fail(optimizer, *args, **kwargs):
            try:
                return step(optimizer, *args, **kwargs)
            except Exception as error:
                if not self.names or not self.can_fail():
                    raise
                self.fail(error)

        return original(can_fail)

    def note_site(self, what, optimizer=None):
        """Note the user's line that calls backward(), step() or clips, while it is watched."""
        if self.names or self.models.chosen or self.is_over:
            return
        names = dict(
            backwards=["backward"], steps=["step"], clips=["clip_grad_norm_", "clip_grad_value_"]
        )[what]
        with contextlib.suppress(Exception):
            number = None if optimizer is None else self.numbers.get(optimizer)
            site = called_at(self.places, names) | dict(optimizer=number)
            if site not in self.sites[what] and len(self.sites[what]) < 20:
                self.sites[what].append(site)

    def clip(self, original, parameters, *args, **kwargs):
        """Take the place of torch's functions that clip gradients."""
        if not self.models.chosen:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
            mine = {*map(id, parameters)}
            clipped = [
                each
                for each in self.optimizers
                if not mine.isdisjoint(map(id, amp.weights_of(each)))
            ]
            self.note_site("clips", clipped[0] if len(clipped) == 1 else None)
        if self.scaler:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
            amp.unscale(self, parameters)
        return original(parameters, *args, **kwargs)

    def enter_autocast(self, context):
        """Note the script's own mixed precision; autocast of float32 is none."""
        if not self.names and not self.models.chosen and torch.is_grad_enabled():
            self.see("amp", facts.half_of(context))
            about = self.about.describe_autocast(context)
            if about not in self.autocasts and len(self.autocasts) < 20:
                self.autocasts.append(about)

    def backward(self, original, tensors, grad_tensors=None, *rest, **options):
        """Note a loss, and scale it if the set says so; a set that fails here is given up."""
        if not self.steps and not self.is_over:
            self.look_for_steps()
        self.note_site("backwards")
        loss = loss_of(tensors, grad_tensors)
        if loss is not None:
            self.last_loss = loss
            if len(self.losses) < LOSSES:
                self.losses.append(self.last_loss.clone())
            if self.scaler:
                tensors = amp.scaled(self, tensors)
        else:
            self.see("hidden losses")
        try:
            return original(tensors, grad_tensors, *rest, **options)
        except Exception as error:
            if not self.names or not self.can_fail():
                raise
            self.fail(error)
            for weight in (
                each
                for optimizer in self.optimizers
                for group in optimizer.param_groups
                for each in group["params"]
            ):
                weight.grad = torch.zeros_like(weight)
            return None

    def look_for_steps(self):
        """End a script that calls backward() again and again, but no optimizer of torch.optim."""
        self.backwards.append(time.perf_counter())
        if len(self.backwards) > ALONE[0] and self.backwards[-1] - self.backwards[0] > ALONE[1]:
            self.send(
                done=True,
                error=f"it called backward() {len(self.backwards)} times, but no "
                "optimizer of torch.optim",
            )
            os._exit(1)

    def scale(self, original, scaler, outputs):
        scaled = original(scaler, outputs)
        if (
            isinstance(scaled, torch.Tensor)
            and scaler not in self.scalers.values()
            and (scaler.is_enabled())
        ):
            self.see("amp")
            scaled._unscaled = outputs
        return scaled

    def can_fail(self):
        """Return whether a set that fails can be given up within a step."""
        return bool(self.plan) and self.spec["mode"] == "turns"

    def fail(self, error):
        """Note why the set that is on failed; the rest of the step goes on without it."""
        lines = str(error).strip().splitlines() or [""]
        self.failed = f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")
        if self.scaler and not self.stepping:
            self.scaler.update(self.scaler.get_scale())
