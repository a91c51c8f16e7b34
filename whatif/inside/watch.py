"""What is watched and changed in the process that trains: Run, one a process."""

import collections
import contextlib
import functools
import os
import sys
import threading
import time
import traceback
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from whatif import records, techniques
from whatif.inside import facts, parsers, plans
from whatif.inside.batches import Loaders
from whatif.inside.clock import Clock
from whatif.inside.models import Models
from whatif.inside.places import Places
from whatif.techniques import amp

LOSSES = 1000  # the most losses that are kept
SCHEDULERS = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler")  # these
# do not call the __init__ of the first
ALONE = 300, 30.0  # calls of backward() and seconds without a step, after which there is none
MANY = 10  # steps of an optimizer without one of the leading one, after which it leads


def wrap(owner, name, wrapper):
    """Replace owner.name by a function that calls wrapper(original, *args, **kwargs)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return wrapper(original, *args, **kwargs)
    setattr(owner, name, wrapped)
    return original, wrapped


def before(owner, name, action):
    """Let owner.name call action with its own arguments first."""
    def call(original, *args, **kwargs):
        action(*args, **kwargs)
        return original(*args, **kwargs)
    return wrap(owner, name, call)


class Run:
    """The training of this process, as far as it is seen through torch's own functions."""

    active = None

    def __init__(self, spec):
        Run.active = self
        self.spec, self.pid = spec, os.getpid()
        self.places = Places(spec["cwd"], spec.get("roots", ()))
        self.steps, self.names, self.seen = 0, (), []
        self.device, self.thread = "cpu", threading.get_ident()
        self.clock = Clock(self.synchronize)
        self.loaders, self.models = Loaders(self), Models(self)
        self.made = {"optimizers": [], "schedulers": [], "scalers": []}  # weak references
        self.about, self.parsers = facts.Facts(self.places), parsers.Parsers()
        self.optimizer_facts, self.autocasts = [], []
        self.lead, self.others = None, collections.Counter()
        self.losses, self.last_loss, self.is_silent = [], None, False
        self.scaler, self.scalers, self.stepping, self.skipped = None, {}, False, False
        self.late = self.is_scaling = False  # whether steps were made since the last update
        self.backwards = []  # when backward() was called before the first step
        self.plain_steps, self.unfused, self.layouts = {}, {}, WeakIdKeyDictionary()
        self.failed, self.plan, self.is_over, self.cycle = "", None, False, 1
        self.group = None  # of all processes that train
        self.times = []  # (when a step ended, seconds waited until then) while it is watched

    # ---- what it tells, and what it knows of itself
    def send(self, **record):
        """Append a record for the process that started the run."""
        if self.ranks()[0] == 0 or "error" in record:
            records.send(self.spec["folder"], **record)

    def see(self, what, is_so=True):
        """Note something that the report may name."""
        if is_so and what not in self.seen:
            self.seen.append(what)

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def compiled(self):
        """Return how many functions were compiled; a new shape compiles them again."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        return dynamo.counters["frames"]["total"] if dynamo else 0

    def ranks(self):
        """Return (the rank of this process, the number of processes that train)."""
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def agree(self, value):
        """Return what rank 0 has, in each rank; all have to ask at the same step."""
        if self.ranks()[1] == 1:
            return value
        dist = torch.distributed
        self.group = self.group or dist.new_group(backend="gloo")
        box = [value]
        dist.broadcast_object_list(box, 0, group=self.group)
        return box[0]

    def live(self, what):
        """Return the optimizers, schedulers or scalers that are still there."""
        return [each for each in (one() for one in self.made[what]) if each is not None]

    @property
    def optimizers(self):
        return self.live("optimizers")

    def inner_modules(self):
        """Return the models that are changed, without their wrappers."""
        return self.models.inner()

    # ---- the hooks
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
            before(getattr(torch.optim.lr_scheduler, name), "__init__",
                   lambda it, *_, **__: self.note("schedulers", it))
        before(torch.amp.autocast_mode.autocast, "__enter__", self.enter_autocast)
        before(data.distributed.DistributedSampler, "set_epoch",
               lambda *_, **__: self.see("set_epoch"))
        wrap(torch.optim.Optimizer, "add_param_group", self.add_param_group)
        _, hook = wrap(torch.optim.Optimizer, "profile_hook_step", self.hook_step)
        torch.optim.Optimizer.profile_hook_step = staticmethod(hook)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(torch.nn.utils, name, self.clip)
        for each in (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel):
            before(each, "__init__", self.note_wrapper)
        self.parsers.install()
        self.models.watch()
        register_optimizer_step_post_hook(self.step)
        os.register_at_fork(after_in_child=self.forked)

    def forked(self):
        """Begin anew in a process that the script forks; a DataLoader's worker makes no step."""
        self.steps, self.plan, self.lead, self.losses = 0, None, None, []
        self.others.clear()

    def note(self, what, it):
        self.made[what] = [each for each in self.made[what] if each() is not None]
        if it not in self.live(what):
            self.made[what].append(weakref.ref(it))

    def note_wrapper(self, wrapper, module=None, *_, **__):
        if module is not None and not self.models.chosen:
            self.about.note_wrapper(module)

    def make_optimizer(self, original, optimizer, params, defaults):
        original(optimizer, params, defaults)
        self.note("optimizers", optimizer)
        about = self.about.describe_optimizer(optimizer, dict(defaults))
        if about not in self.optimizer_facts:  # a script may make one in each epoch
            self.optimizer_facts.append(about)
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
                if not Run.active.names or not Run.active.can_fail():
                    raise
                Run.active.fail(error)
        return original(can_fail)

    def clip(self, original, parameters, *args, **kwargs):
        """Take the place of torch's functions that clip gradients."""
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
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
        if first.numel() == 1 and grad_tensors is None:
            self.last_loss = getattr(first, "_unscaled", first).detach()
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
            for weight in (each for optimizer in self.optimizers
                           for group in optimizer.param_groups for each in group["params"]):
                weight.grad = torch.zeros_like(weight)
            return None

    def look_for_steps(self):
        """End a script that calls backward() again and again, but no optimizer of torch.optim."""
        self.backwards.append(time.perf_counter())
        if len(self.backwards) > ALONE[0] and self.backwards[-1] - self.backwards[0] > ALONE[1]:
            self.send(done=True, error=f"it called backward() {len(self.backwards)} times, but no "
                                       "optimizer of torch.optim")
            os._exit(1)

    def scale(self, original, scaler, outputs):
        scaled = original(scaler, outputs)
        if isinstance(scaled, torch.Tensor) and scaler not in self.scalers.values() and (
                scaler.is_enabled()):
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

    # ---- steps
    def step(self, optimizer, *_):
        """Count a step of the leading optimizer, and go on with the plan."""
        if self.stepping:  # the scaler is not done; it comes again
            self.late = True
        if self.is_over or self.stepping:
            return
        self.others[id(optimizer)] += 1
        if not self.lead or not self.lead() or self.others[id(optimizer)] > MANY:
            self.lead = weakref.ref(optimizer)  # the script goes on with this
        if self.lead() is not optimizer:
            return
        self.others.clear()
        self.steps += 1
        self.thread = threading.get_ident()
        self.loaders.step()
        self.clock.step()
        if self.plan is None:
            self.begin(optimizer)
        try:
            next(self.plan)
        except StopIteration:
            self.finish()
        except Exception as error:  # of ours
            self.send(error=f"whatif failed: {type(error).__name__}: {error}", done=True,
                      traceback=traceback.format_exc())
            os._exit(1)

    def begin(self, optimizer):
        """Choose the plan at the first step."""
        self.device = next((each.device.type for group in optimizer.param_groups
                            for each in group["params"]), "cpu")
        rank, count = self.ranks()
        is_first = rank > 0 or count > 1
        if not is_first:  # of several processes without a group, the first one takes the turns
            with contextlib.suppress(FileExistsError):
                os.close(os.open(f"{self.spec['folder']}/first", os.O_CREAT | os.O_EXCL))
                is_first = True
        if not is_first:
            self.plan = plans.watch_only(self)
        else:
            self.plan = {"turns": plans.by_turns, "fixed": plans.whole}[self.spec["mode"]](self)

    def switch(self, names, again=False):
        """Switch from the set that is on to another, between two steps."""
        if names == self.names and not again:
            return
        for name in self.names:
            techniques.call("off", name, self, name)
        was, self.names = self.names, names
        for name in names:
            techniques.call("on", name, self, name)
        self.models.switch(was, names)

    def facts(self):
        """Return what is known of the script."""
        on_gpu = self.device == "cuda"
        self.see("compile", self.compiled() and not self.models.was_compiled())
        self.see("cudnn", torch.backends.cudnn.benchmark and not self.names)
        with contextlib.suppress(RuntimeError):  # of scripts that mix the old setting and the new
            self.see("tf32", torch.get_float32_matmul_precision() != "highest" and not self.names)
        found = dict(
            seen=self.seen, device=self.device, torch=torch.__version__,
            python=sys.version.split()[0], models=self.models.facts(),
            optimizers=self.optimizer_facts, loaders=[*self.loaders.about.values()],
            training=self.loaders.training(), processes=self.ranks()[1],
            cores=self.spec["cores"], autocasts=self.autocasts, cycle=self.cycle,
            options=parsers.options_of(self.parsers, sys._getframe(1)))
        if on_gpu:
            about = torch.cuda.get_device_properties(self.device)
            found |= dict(gpu=about.name, memory=about.total_memory, capability=about.major,
                          peak=torch.cuda.max_memory_allocated())
        return found

    def losses_now(self):
        """Return the losses until now, as numbers; what is not finite is a string."""
        numbers = [float(each) for each in self.losses]
        return [each if abs(each) < float("inf") else str(each) for each in numbers]

    def ended(self):
        """Tell what there is when the script has come to its own end."""
        if self.steps and os.getpid() == self.pid and not self.is_over and self.ranks()[0] == 0:
            self.is_over = True
            self.send(steps=self.steps, facts=self.facts(), losses=self.losses_now(), ended=True,
                      done=True)

    def finish(self):
        """End the process; none of the script's own handlers runs, so nothing is saved."""
        self.is_over = True
        if self.ranks()[0] == 0:
            self.send(steps=self.steps, done=True)
        os._exit(0)
