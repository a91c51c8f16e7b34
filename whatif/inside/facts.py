"""What the advice has to know of the models, optimizers and loaders of a script."""

import ast
import collections
import contextlib
import inspect
import linecache
import multiprocessing
import re
import sys
import traceback

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .calls import arguments_of, called_at, is_called
from .places import Beyond, has_name, package_of, statements

KNOWN = {tuple: "tuple", list: "list", dict: "dict", collections.OrderedDict: "dict"}
MANY = 20  # parts of an output that are told
HALVES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
KERNELS = range(2, 12)  # sizes of a kernel of the user's own, for F.conv2d
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
SETTINGS = dict(  # what a line sets that does a technique's work, or undoes it
    cudnn=r"(^|\bbackends\.)cudnn\.benchmark$",
    tf32=r"\bmatmul\.(allow_tf32|fp32_precision)$|\bset_float32_matmul_precision$",
)
DRIVERS = frozenset(  # libraries that run the loop
    "transformers trl lightning pytorch_lightning ultralytics fastai ignite "
    "mmengine skorch composer catalyst".split()
)


def length_of(data):
    with contextlib.suppress(Exception):  # an IterableDataset may have none, or none as yet
        return len(data)


def start_method(loader):
    """Return how the workers of a loader start: fork, spawn or forkserver."""
    context = loader.multiprocessing_context or multiprocessing
    return context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def repeats_in_workers(dataset):
    """Return whether each worker of a DataLoader may give the same data."""
    if isinstance(dataset, torch.utils.data.ChainDataset):
        return any(map(repeats_in_workers, dataset.datasets))
    classes = type(dataset).__mro__
    if torch.utils.data.IterableDataset not in classes:
        return False
    with contextlib.suppress(Exception):  # there may be no source
        return not any(
            "get_worker_info" in inspect.getsource(each)
            for each in classes[: classes.index(torch.utils.data.IterableDataset)]
        )
    return True


def half_of(context):
    """Return "float16" or "bfloat16" if an autocast computes in it, or ""."""
    return HALVES.get(context.fast_dtype, "") if context._enabled else ""


def autocast_now(device):
    """Return the half type in which autocast computes here, or ""."""
    with contextlib.suppress(Exception):  # older than torch 2.4, or a device without autocast
        if torch.is_autocast_enabled(device):
            return HALVES.get(torch.get_autocast_dtype(device), "")
    return ""


def has_own_to(module):
    """Return whether module.to(memory_format=torch.channels_last) may fail.

    A `to` of the user's may not take it, and torch refuses weights and buffers of five dimensions,
    which a module's own _apply may have as well.
    """

    def is_own(part, name):
        owner = next((each for each in type(part).__mro__ if name in vars(each)), nn.Module)
        return owner.__module__.split(".")[0] not in ("torch", "transformers")

    return (
        is_own(module, "to")
        or any(is_own(part, "_apply") for part in module.modules())
        or any(each.dim() == 5 for each in (*module.parameters(), *module.buffers()))
    )


def name_of_torch(places, things):
    """Return the name that the files of models and optimizers give to torch (th, say)."""
    names = {
        each.asname or "torch"
        for file in {thing["at"].rpartition(":")[0] for thing in things}
        for node in statements(places.whole(file))
        if isinstance(node, ast.Import)
        for each in node.names
        if each.name == "torch"
    }
    return names.pop() if len(names) == 1 else "torch"


def settings_in(places):
    """Return {technique: "file:line"} of the user's first lines that make its setting."""
    found = {}
    for name in places.files():
        file = places.whole(name)
        if not re.search(r"cudnn\.benchmark|matmul", "".join(linecache.getlines(file))):
            continue
        for node in statements(file):
            for text in map(ast.unparse, set_by(node)):
                for technique, pattern in SETTINGS.items():
                    if re.search(pattern, text):
                        found.setdefault(technique, f"{name}:{node.lineno}")
    return found


def set_by(node):
    """Return what a statement assigns to, or the function that it calls."""
    match node:
        case ast.Assign(targets):
            return [part for each in targets for part in getattr(each, "elts", [each])]
        case ast.Expr(ast.Call(function)):
            return [function]
    return []


def unwrapped(module):
    """Return the module within DataParallel and DistributedDataParallel."""
    while isinstance(module, WRAPPERS):
        module = module.module
    return module


def is_kernel(weight):
    """Return whether a weight has the shape of a 2-D convolution's kernels."""
    if nn.parameter.is_lazy(weight) or weight.dim() != 4:
        return False
    return weight.shape[2] == weight.shape[3] and weight.shape[2] in KERNELS


def traits(module):
    """Return what is known of a model's layers, as words of facts["seen"]."""
    last, seen = torch.channels_last, set()
    weight = next(iter(module.parameters()), None)  # a method of the user's may return a list
    if weight is not None and weight.dtype in HALVES:
        seen.add("amp")
    if weight is not None and weight.dtype == torch.float64:
        seen.add("float64")
    if any(map(is_kernel, module.parameters())):  # a layer of the user's may call F.conv2d
        seen |= {"convolution", "image"}
    for part in module.modules():
        kind = getattr(nn, getattr(part, "original_name", ""), type(part))  # in TorchScript
        if issubclass(kind, nn.modules.conv._ConvNd):
            seen.add("convolution")
        if issubclass(kind, (nn.Conv2d, nn.ConvTranspose2d)):
            seen.add("image")
            if part.weight.is_contiguous(memory_format=last) and not part.weight.is_contiguous():
                seen.add("channels_last")
        if isinstance(part, nn.SyncBatchNorm):
            seen.add("SyncBatchNorm")
        if isinstance(part, nn.DataParallel) and len(part.device_ids) > 1:
            seen.add("DataParallel")  # on one GPU it only calls the model
    return sorted(seen)


def role_of(module):
    """Return "trains", "eval" if it trains in eval mode, or "frozen" if it only takes time.

    It is "" for a module without weights, as most losses are: that is no model. To be called where
    the module is called.
    """
    if next(iter(module.parameters()), None) is None:
        return ""
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in module.parameters()):
        return "frozen"
    return "trains" if module.training else "eval"


def has_loss(output):
    """Return whether an output, as those of transformers, has a loss of one number in it."""
    loss = None
    with contextlib.suppress(Exception):  # an object of the user's may fail
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return isinstance(loss, torch.Tensor) and loss.numel() == 1


def is_image(value):
    """Return whether a value has a layout: of one value for each channel, all are the same."""
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.shape[2:].numel() > 1


def is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def is_rest(value):
    """Return whether a value holds no floating tensor for certain, as an object may."""
    is_plain = isinstance(value, (type(None), bool, int, float, complex, str, bytes))
    return is_plain or isinstance(value, torch.Tensor) and not is_float(value)


def form_of(output):
    """Return (how an output holds tensors, the keys and attributes of its floating tensors).

    How is "tensor"; "tuple", "list", "namedtuple" or "dict" if all in it are floating tensors;
    "mixed" for a dict with more, or of another class; for a tuple (or list) with more, the form of
    each part, as "tensor tuple rest", where the rest has no floating tensor; and "" for all else.
    """
    if isinstance(output, torch.Tensor):
        return "tensor", []
    is_named, is_dict = hasattr(type(output), "_asdict"), isinstance(output, dict)
    parts = dict(output if is_dict else getattr(output, "__dict__", {}))
    if isinstance(output, (tuple, list)):
        parts = dict(enumerate(output)) | (output._asdict() if is_named else {})
    floats = [key for key, value in parts.items() if is_float(value) and type(key) in (str, int)]
    if parts and len(floats) == len(parts) and (is_named or type(output) in KNOWN):
        return "namedtuple" if is_named else KNOWN[type(output)], floats[:MANY]
    if type(output) in (tuple, list):
        return forms_of(output), floats[:MANY]
    inner = [value for value in parts.values() if not isinstance(value, torch.Tensor)]
    is_flat = not any(isinstance(each, torch.Tensor) for each in tree_leaves(inner))
    return "mixed" if is_dict and (is_flat or has_loss(output)) else "", floats[:MANY]


def forms_of(parts):
    """Return the forms of a tuple's parts, as "tensor tuple rest"; "" if one is none of these."""
    forms = [
        "tensor"
        if is_float(part)
        else "rest"
        if all(map(is_rest, tree_leaves(part)))
        else form_of(part)[0]
        for part in parts
    ]
    is_known = len(forms) > 1 and {"rest"} < {*forms, "rest"} <= {"tensor", "tuple", "list", "rest"}
    return " ".join(forms) if is_known else ""


class Facts:
    """Describes the things of a script where they are made or called, on the user's line."""

    def __init__(self, places):
        self.places = places
        self.named = {}  # models in an optimizer, by id: (their name, the statement that makes it)
        self.wrapped = {}  # models in DDP or DataParallel, by id: (their name, that statement)
        self.loaders = {}  # what is known of loaders that the user's own lines made, by dataset

    def driver(self):
        """Return (the library that runs the loop or "", the user's line that calls it).

        Accelerate does not run the loop; it is told if the script uses it.
        """
        name, entry, called = "", {}, set()
        for frame, line in traceback.walk_stack(sys._getframe(1)):
            if not self.places.is_users(frame):
                package = package_of(frame)
                called.add("fabric" if "fabric" in frame.f_code.co_filename else package)
                continue
            if drivers := sorted(called & DRIVERS):  # the outermost line that calls one
                name, entry = drivers[0], self.places.line_of(frame.f_code.co_filename, line)
            elif "fabric" in called and not name:
                name, entry = "fabric", {}
            called = set()
        if not name:
            state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
            name = "accelerate" if getattr(state, "_shared_state", None) else ""
        return name, entry

    def describe_model(self, module):
        """Return what is known of a model, where it is called. `calls` has its first line only."""
        inner, places = unwrapped(module), self.places
        local = places.name_of(module) or "model"
        outside, depth = places.name_outside(module)
        name, above = self.named.get(id(module), (outside or local, None))
        if inner is not module:
            known = self.named.get(id(inner), self.wrapped.get(id(inner), (None, None)))
            name, above = (f"{name}.module" if known[0] is None else known[0]), known[1]
        driver, entry = self.driver()
        device = next((each.device.type for each in module.parameters()), "cpu")
        before = self.wrapped.get(id(inner), self.wrapped_part(module))
        place = places.place()
        return dict(
            name=name,
            local=local,
            kind=type(inner).__name__,
            **place,
            library=places.library(),
            **places.assigned(local),
            above=above,
            calls=[place["at"]],
            spots=[],
            is_tensor=False,
            has_images=False,
            is_wrapped=inner is not module or before != (None, None),
            role=role_of(module),
            bare=before[0] or "",
            before=before[1],
            own_to=has_own_to(inner),
            device=device,
            traits=traits(module),
            autocast=autocast_now(device),
            driver=driver,
            entry=entry,
            made=places.made(local),
            outside=places.place(depth)["at"],
        )

    def wrapped_part(self, module):
        """Return (the name of a part of a model that is in DDP, the line), or (None, None)."""
        for path, part in module.named_modules():
            if isinstance(part, WRAPPERS):
                return self.wrapped.get(id(unwrapped(part)), (path, None))
        return None, None

    def describe_autocast(self, context):
        """Return what is known of an autocast that the script enters."""
        return dict(**self.places.place(), half=half_of(context), device=context.device)

    def note_call(self, about, output, args=(), kwargs=()):
        """Add a call of a model, after it: its line, what it got, and what it gave."""
        about["is_tensor"] = isinstance(output, torch.Tensor)
        about["are_tensors"] = isinstance(output, (tuple, list)) and all(map(is_float, output))
        if not about["has_images"]:
            about["has_images"] = any(map(is_image, tree_leaves((args, dict(kwargs)))))
        about["calls"] = [*dict.fromkeys([*about["calls"], self.places.place()["at"]])]
        spot = called_at(self.places, [about["name"], about["local"]])
        if spot:
            given = [*enumerate(args), *dict(kwargs).items()] if spot.pop("is_direct") else []
            spot["images"] = [
                key for key, value in given if is_image(value) and value.is_floating_point()
            ]
            spot["has_loss"] = has_loss(output)
            spot |= dict(holds="", floats=[])
            with contextlib.suppress(Exception):  # an object of the user's may fail
                spot["holds"], spot["floats"] = form_of(output)
        if spot not in about["spots"]:
            about["spots"].append(spot)

    def note_wrapper(self, wrapper, module):
        """Note where DistributedDataParallel or DataParallel gets a module, before it does.

        One that is made there, DataParallel(Net()), has its name below that line.
        """
        name, place = self.places.name_of(module), self.places.place(above=True)
        target = self.places.target() if isinstance(wrapper, nn.DataParallel) else ""
        if target and not name:
            name, place = f"{target}.module", place | dict(below=True)
        self.wrapped[id(module)] = name, place

    def describe_optimizer(self, optimizer, defaults):
        """Return what is known of an optimizer, where it is made; note how its models are named.

        To be called at the end of torch.optim.Optimizer.__init__. `defaults` are those that it was
        given, before a technique has changed them.
        """
        places, cls = self.places, type(optimizer)
        beyond = Beyond(places)
        about = dict(
            **beyond.place(),
            name=beyond.target(),
            arguments=arguments_of(beyond, cls, kwargs=defaults),
            kind=cls.__name__,
            library=places.library(optimizer),
            fused=defaults.get("fused"),
            foreach=defaults.get("foreach"),
            can_fuse="fused" in defaults,
            momentum=bool(defaults.get("momentum")),
            dampening=bool(defaults.get("dampening")),
        )
        about["driver"], about["entry"] = self.driver()
        self.name_models({id(each) for group in optimizer.param_groups for each in group["params"]})
        return about

    def name_models(self, weights):
        """Note how the user's lines name the models of an optimizer, and where it is made.

        A base class may make the optimizers of classes with other models. Where its file does not
        set such an attribute, it is the outer line that has it.
        """
        first = {}
        for depth, frame in enumerate(self.places.frames()):  # a function may not know the model
            names = {}
            for name, model in self.places.names(depth).items():
                if not weights.isdisjoint(map(id, model.parameters())):
                    names.setdefault(id(model), name)
            above = self.places.place(depth, above=True)
            found = {key: (name, above) for key, name in names.items()}
            if names and all(has_name(*frame, each, bool(first)) for each in names.values()):
                first = found
                break
            first = first or found
        self.named |= first

    def name_again(self, models):
        """Name models that were called before their optimizer was made: {module: what is known}."""
        for module, about in models.items():
            inner = unwrapped(module)
            if not about["above"] and id(inner) in self.named:
                about["name"], about["above"] = self.named[id(inner)]

    def describe_loader(self, loader, args=(), kwargs=()):
        """Return what is known of a DataLoader, where it is made, after that.

        A library makes the user's loader anew (a sampler for several processes); then the user's
        own line counts.
        """
        places, data = self.places, torch.utils.data
        cls = type(loader)  # a library may stand round its __init__
        library = "" if is_called(places, cls) else places.library(loader)
        sampler = loader.sampler
        beyond = Beyond(places)
        about = dict(
            **beyond.place(),
            name=beyond.target(),
            arguments=arguments_of(beyond, cls, args, kwargs),
            library=library,
            workers=loader.num_workers,
            pin=loader.pin_memory,
            length=length_of(loader),
            persistent=loader.persistent_workers,
            repeats=repeats_in_workers(loader.dataset),
            batch=loader.batch_size,
            can_grow=hasattr(loader.batch_sampler, "batch_size"),
            method=start_method(loader),
            shuffles=isinstance(sampler, data.distributed.DistributedSampler) and sampler.shuffle,
        )
        about["driver"], about["entry"] = self.driver()
        own = self.loaders.get(id(loader.dataset))
        if library and own:
            about |= {key: own[key] for key in ("at", "text", "name", "arguments", "library")}
        elif not library:
            self.loaders[id(loader.dataset)] = about | dict(dataset=loader.dataset)  # keeps its id
        return about
