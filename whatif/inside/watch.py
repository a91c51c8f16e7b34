"""What is watched and changed in the process that trains: Run, one a process."""

import contextlib
import os
import sys
import threading
import traceback
import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from whatif import records, techniques
from whatif.inside import changes, facts, gpu, parsers, plans, traces
from whatif.inside.batches import Loaders
from whatif.inside.clock import Clock, Lead, compiled, numbers, on, place_of
from whatif.inside.hooks import Hooks
from whatif.inside.models import Models
from whatif.inside.places import Places
from whatif.techniques import amp


class Run(Hooks):
    """The training of this process, as far as it is seen through torch's own functions."""

    active = None

    def __init__(self, spec):
        Run.active = self
        self.spec, self.pid = spec, os.getpid()
        self.places = Places(spec["cwd"], spec.get("roots", ()))
        self.steps, self.names, self.seen = 0, (), []
        self.device, self.gpu, self.thread = "cpu", None, threading.get_ident()
        self.clock = Clock(self.synchronize, lambda: self.gpu is not None and gpu.mark(self.gpu))
        self.loaders, self.models = Loaders(self), Models(self)
        self.made = {"optimizers": [], "schedulers": [], "scalers": []}  # weak references
        self.about, self.parsers = facts.Facts(self.places), parsers.Parsers()
        self.optimizer_facts, self.autocasts = [], []
        self.traces = traces.Traces(self.places, self.optimizer_facts)
        self.numbers = weakref.WeakKeyDictionary()  # {optimizer: its number in optimizer_facts}
        self.sites = dict(backwards=[], steps=[], clips=[])  # the user's lines of them
        self.lead = Lead()
        self.losses, self.last_loss = [], None
        self.scaler, self.scalers, self.stepping, self.skipped = None, {}, False, False
        self.late = self.is_scaling = False  # whether steps were made since the last update
        self.backwards = []  # when backward() was called before the first step
        self.plain_steps, self.unfused, self.layouts = {}, {}, WeakIdKeyDictionary()
        self.failed, self.plan, self.is_over, self.cycle = "", None, False, 1
        self.group = None  # of all processes that train
        self.on_forward = None  # what the next call of a model that trains calls first
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
            torch.cuda.synchronize(self.gpu)

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

    def forked(self):
        """Begin anew in a process that the script forks; a DataLoader's worker makes no step."""
        self.steps, self.plan, self.lead, self.losses = 0, None, Lead(), []

    # ---- steps
    def step(self, optimizer, *_):
        """Count a step of the leading optimizer, and go on with the plan."""
        if self.stepping:  # the scaler is not done; it comes again
            self.late = True
        if self.is_over or self.stepping:
            return
        self.note_site("steps", optimizer)
        self.note_idle(optimizer)
        if not self.lead.is_stepping(optimizer):
            return
        self.steps += 1
        self.thread = threading.get_ident()
        self.loaders.step()
        self.clock.step()
        if self.plan is None:
            self.begin(optimizer)
        try:
            with on(self.gpu):
                next(self.plan)
        except StopIteration:
            self.finish()
        except Exception as error:  # of ours
            self.send(
                error=f"whatif failed: {type(error).__name__}: {error}",
                done=True,
                traceback=traceback.format_exc(),
            )
            os._exit(1)

    def note_idle(self, optimizer):
        """After an optimizer's first step, note whether it has weights that got no gradient."""
        number = self.numbers.get(optimizer)
        if number is not None and "has_idle" not in self.optimizer_facts[number]:
            self.optimizer_facts[number]["has_idle"] = any(
                each not in optimizer.state for each in amp.weights_of(optimizer)
            )

    def begin(self, optimizer):
        """Choose the plan at the first step."""
        self.traces.begin()
        self.device, self.gpu = place_of(optimizer)
        rank, count = self.ranks()
        is_first = rank > 0 or count > 1
        if not is_first:  # of several processes without a group, the first one takes the turns
            with contextlib.suppress(FileExistsError):
                os.close(os.open(f"{self.spec['folder']}/first", os.O_CREAT | os.O_EXCL))
                is_first = True
        modes = {"turns": plans.by_turns, "fixed": plans.whole}
        self.plan = (modes[self.spec["mode"]] if is_first else plans.watch_only)(self)

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
        self.see("compile", compiled() and not self.models.was_compiled())
        self.see("cudnn", torch.backends.cudnn.benchmark and not self.names)
        with contextlib.suppress(RuntimeError):  # of scripts that mix the old setting and the new
            self.see("tf32", torch.get_float32_matmul_precision() != "highest" and not self.names)
        found = dict(
            seen=self.seen,
            device=self.device,
            torch=torch.__version__,
            python=sys.version.split()[0],
            models=[each | dict(traced=self.traces.of(each)) for each in self.models.facts()],
            optimizers=self.optimizer_facts,
            loaders=changes.changes_in(self.places, self.loaders.about.values()),
            training=self.loaders.training(),
            processes=self.ranks()[1],
            cores=self.spec["cores"],
            emulates=not on_gpu and self.spec.get("emulates", False),
            autocasts=self.autocasts,
            cycle=self.cycle,
            sites=self.sites | dict(traces=self.traces.sites()),
            files=self.places.files(),
            settings=facts.settings_in(self.places),
            has_scaler=self.has_scaler(),
            options=parsers.options_of(self.parsers, sys._getframe(1)),
        )
        things = [*found["models"], *found["optimizers"]]
        found["name_of_torch"] = facts.name_of_torch(self.places, things)
        if on_gpu:
            about = torch.cuda.get_device_properties(self.gpu)
            found |= dict(
                gpu=about.name,
                memory=about.total_memory,
                capability=about.major,
                peak=torch.cuda.max_memory_allocated(self.gpu),
            )
        return found

    def has_scaler(self):
        """Return whether a scaler of the script's own is on, which may skip its first steps."""
        mine = {*map(id, self.scalers.values())}
        return any(each.is_enabled() for each in self.live("scalers") if id(each) not in mine)

    def ended(self):
        """Tell what there is when the script has come to its own end."""
        if self.steps and os.getpid() == self.pid and not self.is_over and self.ranks()[0] == 0:
            self.is_over = True
            self.send(
                steps=self.steps,
                facts=self.facts(),
                losses=numbers(self.losses),
                ended=True,
                done=True,
            )

    def finish(self):
        """End the process; none of the script's own handlers runs, so nothing is saved."""
        self.is_over = True
        if self.ranks()[0] == 0:
            self.send(steps=self.steps, done=True)
        os._exit(0)
