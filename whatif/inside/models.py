"""The models that a script calls in its steps: found, named, and changed from set to set."""

import contextlib
import functools
import gc
import inspect
import warnings

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from whatif import techniques
from whatif.inside import facts, places
from whatif.techniques import batch, channels_last

COUNTED = 16  # calls of a model in which the size of its batch is noted


class Forward:
    """The forward of a model that sets change. Copies and pickles of the model get its own."""

    def __init__(self, models, module):
        self.models, self.module, self.plain = models, module, module.forward
        functools.update_wrapper(self, self.plain)

    def __call__(self, *args, **kwargs):
        return self.models.forward(self.module, self.plain, *args, **kwargs)

    def __reduce__(self):
        return functools.partial, (self.plain,)


def inside(module):
    """Return the module within DistributedDataParallel, or within DataParallel on one device.

    DataParallel on several GPUs copies what is inside, with the forward of the first GPU.
    """
    while isinstance(module, facts.WRAPPERS) and not (
        isinstance(module, nn.DataParallel) and len(module.device_ids) > 1
    ):
        module = module.module
    return module


def is_traced():
    """Return whether torch records the calls: what it saw of ours would be in its graph."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_sharded(module):
    """Return the name of a library that shards a model, which turns cannot change, or ""."""
    for part in module.modules():
        name = type(part).__name__
        if "FullyShardedDataParallel" in name or name.startswith("FSDP"):
            return "FSDP"
    if type(module).__module__.startswith("deepspeed"):
        return "DeepSpeed"
    if any(type(each).__name__ == "DTensor" for each in module.parameters()):
        return "DTensor"
    return ""


class Sizes:
    """How many samples each model gets in a step, as it is and with joined batches.

    A GAN's noise has a size of its own: then the generator's batch is no larger.
    """

    def __init__(self):
        self.noted = {}  # {(model, batches that are joined): [(step, samples), ...]}

    def note(self, module, times, step, given):
        """Note one of the first calls of a model."""
        found = self.noted.setdefault((module, times), [])
        if len(found) < COUNTED:
            size = 0
            with contextlib.suppress(Exception):  # a tensor of another kind may have no length
                tensors = (each for each in tree_leaves(given) if isinstance(each, torch.Tensor))
                size = next((len(each) for each in tensors if each.dim()), 0)
            found.append((step, size))

    def unchanged(self, times, size):
        """Return the first model whose batch, of `size` samples, did not grow, or None."""
        for (module, joined), now in self.noted.items():
            before = self.noted.get((module, 1), ())
            if joined == times and size in [each for _, each in before]:
                if self.rate(now) < (1 + times) / 2 * self.rate(before):
                    return module
        return None

    @staticmethod
    def rate(found):
        return sum(size for _, size in found) / len({step for step, _ in found})


class Models:
    """The outermost modules with weights that are called between steps."""

    def __init__(self, run):
        self.run, self.known = run, {}
        self.chosen, self.forwards, self.plain = [], {}, {}
        self.calls, self.sizes = None, Sizes()

    def watch(self):
        """Look at each call of a module, until stop()."""
        original = nn.Module.__call__

        @functools.wraps(original)
        def watched(module, *args, **kwargs):
            return self.call(original, module, *args, **kwargs)

        self.calls = original, watched
        nn.Module.__call__ = watched

    def stop(self):
        """Look no more."""
        if nn.Module.__call__ is self.calls[1]:
            nn.Module.__call__ = self.calls[0]
        self.calls = self.calls[0], self.calls[0]

    def call(self, original, module, *args, **kwargs):
        if torch.jit.is_tracing():
            return self.run.traces.call(self.run.steps, original, module, *args, **kwargs)
        if type(module).__name__ == "ONNXTracedModule":  # of torch.jit; it traces what is inside
            return original(module, *args, **kwargs)
        in_backward = torch._C._current_graph_task_id() != -1  # a checkpointed part runs again
        if in_backward or is_traced() or not self.has_weights(module):
            return original(module, *args, **kwargs)
        nn.Module.__call__ = self.calls[0]  # the modules inside are not watched
        try:
            about = self.known.get(module) or self.note(module)
            role, was = facts.role_of(module), set(about["steps"])
            about["steps"].add(self.run.steps)
            if role != "frozen" and (about["role"] == "frozen" or was == {0} and self.run.steps):
                about |= self.run.about.describe_model(module)  # it was called before training
            elif role == "frozen" and was == {0} and self.run.steps:
                about |= dict(role=role, calls=[], spots=[])  # of the steps only, from now on
            if (about["role"], role) == ("eval", "trains"):  # the step began with an attack, say
                calls, spots = about["calls"], about["spots"]
                about |= self.run.about.describe_model(module) | dict(spots=spots)
                about["calls"] = [about["at"], *calls]
            output = original(module, *args, **kwargs)
            # where gradients are on, weights that rest are those of a GAN, by turns
            if role == about["role"] or role == "frozen" and torch.is_grad_enabled():
                self.run.about.note_call(about, output, args, kwargs)
            return output
        finally:
            nn.Module.__call__ = self.calls[1]

    @staticmethod
    def has_weights(module):
        """Return whether a module has weights; a lazy one has them after its first call.

        A layer of the user's own whose parameters do not train has constants, such as a grid.
        """
        weights = [*module.parameters()]
        if not module._modules and not type(module).__module__.startswith("torch."):
            weights = [each for each in weights if each.requires_grad]
        return bool(weights) and not any(map(is_lazy, (*weights, *module.buffers())))

    def note(self, module):
        """Note what a model is."""
        self.known[module] = self.run.about.describe_model(module) | dict(steps=set())
        inner = inside(module)
        self.run.see(
            "compile", hasattr(inner, "_orig_mod") or getattr(inner, "_compiled_call_impl", None)
        )
        return self.known[module]

    def choose(self, watched):
        """Choose the models that most of the watched steps call; the others stay as they are."""
        self.stop()
        self.find_frozen()
        left = places.outermost({module: about["steps"] for module, about in self.known.items()})
        often = [
            module for module in left if 2 * len(self.known[module]["steps"] - {0}) >= watched - 1
        ]
        self.chosen = often or [module for module in left if self.known[module]["role"] != "frozen"]
        for module in self.chosen:
            for trait in facts.traits(module):
                self.run.see(trait)
            inner = inside(module)
            self.plain[inner] = inner.forward
            inner.forward = Forward(self, inner)

    def find_frozen(self):
        """Note which models no optimizer trains, though their weights have gradients.

        If it trains none, it has copies of the weights (in float32, or flat), and nothing is known.
        """
        weights = {
            id(each)
            for optimizer in self.run.optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        }
        others = [
            about
            for module, about in self.known.items()
            if weights.isdisjoint(map(id, module.parameters()))
        ]
        for about in others if len(others) < len(self.known) else ():
            about["role"] = "frozen"

    def inner(self):
        """Return the chosen models, without their wrappers."""
        return [*dict.fromkeys(map(inside, self.chosen))]

    def sharded(self):
        return next(filter(None, map(is_sharded, self.chosen)), "")

    def was_compiled(self):
        return any(name.startswith("compile") for _, names in self.forwards for name in names)

    def forward(self, module, plain, *args, **kwargs):
        """Call a model's forward as the set says that is on."""
        run = self.run
        if torch.is_grad_enabled() and not is_traced():
            if run.on_forward:
                begin, run.on_forward = run.on_forward, None
                begin()
            self.sizes.note(module, batch.times(run.names), run.steps, (args, kwargs))
        names = techniques.changes_forward(run.names)
        if not names or run.failed:
            return plain(*args, **kwargs)
        key = module, names
        try:
            if key not in self.forwards:
                self.forwards[key] = techniques.forward_of(names, plain, run)
            return self.forwards[key](*args, **kwargs)
        except Exception as error:
            if not run.can_fail():
                raise
            run.fail(error)
        self.free()  # what the error held is gone by now
        if "channels_last" in names:  # .view() fails in the plain one, too, below such weights
            channels_last.off(run, "channels_last")
        return plain(*args, **kwargs)

    def why_small(self, names, size):
        """Return why a batch of `size` samples is not larger under a set that joins them, or ""."""
        module = self.sizes.unchanged(batch.times(names), size)
        if module is None:
            return ""
        about = next(each for key, each in self.known.items() if inside(key) is module)
        return (
            f"{about['local']} ({about['at']}) gets no more samples than before; "
            "their number is set elsewhere"
        )

    def forget(self, names):
        """Free what was compiled for a set."""
        names = techniques.changes_forward(names)
        for key in [key for key in self.forwards if key[1] == names]:
            del self.forwards[key]
        self.free()

    @staticmethod
    def free():
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def switch(self, before, after):
        """Make new wrappers of DistributedDataParallel where the layout or the function changes.

        Below a live one, gradients of another layout arrive permuted.
        """

        def below(names):
            return [name for name in names if techniques.kind(name) in ("channels_last", "compile")]

        if below(before) != below(after):
            for module in self.chosen:
                if isinstance(module, nn.parallel.DistributedDataParallel):
                    wrap_anew(module)

    def facts(self):
        """Return what is known of the chosen models; before choose(), of those that train."""
        self.run.about.name_again(self.known)
        found = [
            about | dict(steps=len(about["steps"]))
            for module, about in self.known.items()
            if (module in self.chosen if self.chosen else about["role"] != "frozen")
        ]
        return [*{(each["name"], each["local"], each["at"]): each for each in found}.values()]


def wrap_anew(module):
    """Give a DistributedDataParallel object the inside of a new one round the same module."""
    ddp = nn.parallel.DistributedDataParallel
    options = dict(
        device_ids=module.device_ids,
        output_device=module.output_device,
        dim=module.dim,
        broadcast_buffers=module.broadcast_buffers,
        process_group=module.process_group,
        bucket_cap_mb=module.bucket_bytes_cap / 2**20,
        find_unused_parameters=module.find_unused_parameters,
        gradient_as_bucket_view=module.gradient_as_bucket_view,
        static_graph=module.static_graph,
    )
    more = {"skip_all_reduce_unused_params", "bucket_cap_mb_list", "batched_grad_copy"}
    options |= {
        name: getattr(module, name)
        for name in more.intersection(inspect.signature(ddp.__init__).parameters)
        if hasattr(module, name)
    }
    if "init_sync" in inspect.signature(ddp.__init__).parameters:
        options["init_sync"] = False  # a process may have buffers of its own
    kept = {name for name in vars(module) if name == "forward" or name.endswith("_hooks")}
    for weight in module.module.parameters() if options["gradient_as_bucket_view"] else ():
        weight.grad = None if weight.grad is None else weight.grad.clone()  # not a part of a bucket
    for hook in getattr(module, "_accum_grad_hooks", ()):
        hook.remove()
    for name in ("reducer", "logger"):  # the old hooks of the gradients go with the reducer
        with contextlib.suppress(AttributeError):
            delattr(module, name)
    gc.collect()
    with warnings.catch_warnings():  # an option may be deprecated
        warnings.simplefilter("ignore")
        new = ddp(module.module, **options)
    vars(module).update(
        {
            name: value
            for name, value in vars(new).items()
            if name not in kept or name == "_accum_grad_hooks"
        }
    )
    for hook, state in getattr(module, "_comm_hooks", ()):
        torch.distributed._register_comm_hook(module.reducer, state, hook)
