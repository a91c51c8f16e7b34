"""Find where a thread that loads data spends its time: by kind of work, and by the user's lines.

A second thread looks at the stack of the loading thread every few milliseconds. Each look counts
for the time since the last one: code in C that holds the GIL delays the look and gets its share.
"""

import ast
import collections
import contextlib
import functools
import itertools
import linecache
import re
import sys
import threading
import time

INTERVAL = 0.003  # seconds between two looks
LEAST, MOST = 0.005, 8  # the least share of the time that is told, and the most lines
SWITCH = 0.0005  # how long Python code may keep the second thread waiting
READING = re.compile(  # modules
    r"(h5py|lmdb|zarr|numpy\.lib\.(_?npyio|_npyio_impl|_?format)|numpy\.lib\._format_impl|"
    r"pandas\.io|pyarrow|tarfile|zipfile|gzip|bz2|lzma|pathlib|torch\.serialization|"
    r"fsspec|s3fs|urllib|http|socket|ssl|requests|botocore)\b"
)
DECODING = re.compile(
    r"(PIL\.ImageFile|PIL\.\w+ImagePlugin|torchvision\.io|imageio|skimage\.io|tifffile|torchcodec|"
    r"decord|av|simplejpeg|turbojpeg|soundfile|torchaudio\.(_backend|backend|_torchcodec))\b"
)
TRANSFORMS = re.compile(
    r"(torchvision\.transforms|albumentations|kornia\.augmentation|monai\.transforms|"
    r"torchaudio\.transforms|timm\.data|volumentations|audiomentations|torchio)\b"
)
CONTAINERS = {
    "Compose",
    "Sequential",
    "RandomApply",
    "RandomChoice",
    "RandomOrder",
    "OneOf",
    "SomeOf",
    "ReplayCompose",
    "AugmentationSequential",
    "SequentialTransform",
}
READERS = {
    "open",
    "read",
    "readinto",
    "readline",
    "readlines",
    "pread",
    "recv",
    "mmap",
    "read_bytes",
    "read_text",
    "fromfile",
    "memmap",
    "read_file",
}
DECODERS = {"imread", "imdecode", "imreadmulti", "decode_jpeg", "decode_image", "decode_png"}
PIL_DECODES = {"open", "load", "convert", "draft", "verify", "_open_core"}


@functools.lru_cache(None)
def call_at(code, instruction):
    """Return what the code calls at this instruction, as in "cv2.resize" or "read", or ""."""
    try:
        first, last, start, end = next(
            itertools.islice(code.co_positions(), instruction // 2, None)
        )
        lines = [
            linecache.getline(code.co_filename, number).encode()
            for number in range(first, last + 1)
        ]
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][start:]
        node = ast.parse(b"".join(lines).decode().strip(), mode="eval").body
        node, names = node.func, []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            names.append(node.id)
        return ".".join(reversed(names))
    except (AttributeError, TypeError, ValueError, StopIteration, SyntaxError, IndexError):
        return ""  # no call, no source, or Python 3.10, which knows the line only


def module_of(frame):
    return str(frame.f_globals.get("__name__", ""))


def owner(frame):
    """Return the object whose method a frame runs, or None."""
    if frame.f_code.co_varnames[:1] == ("self",):
        return frame.f_locals.get("self")


def is_container(frame):
    return (
        frame.f_code.co_name in ("__call__", "forward")
        and type(owner(frame)).__name__ in CONTAINERS
    )


def name_of(function):
    """Return the name of a function or object that is called."""
    name = getattr(function, "__name__", None) or type(function).__name__
    return name if name != "<lambda>" else (f"lambda in line {function.__code__.co_firstlineno}")


def transform_name(frame, caller):
    """Return the name of the transform that a frame belongs to, or ""."""
    thing = owner(frame)
    # an option of a transform, such as InterpolationMode, has methods, but cannot be called
    if callable(thing) and TRANSFORMS.match(type(thing).__module__ or ""):
        return "" if type(thing).__name__ in CONTAINERS else type(thing).__name__
    if caller is not None and is_container(caller) and type(thing).__name__ not in CONTAINERS:
        code = frame.f_code
        if thing is not None and code.co_name in ("__call__", "forward"):
            return type(thing).__name__
        return (
            code.co_name
            if code.co_name != "<lambda>"
            else (f"lambda in line {code.co_firstlineno}")
        )
    return ""


def outermost(chain, prefix):
    """Return the function of a library that code outside the library has called, or ""."""
    name = ""
    for frame in chain:
        if module_of(frame).startswith(prefix):
            name = frame.f_code.co_name
        elif name:
            return name
    return name


def called_in_c(frame):
    """Return (kind of work or "", name) of what the innermost frame calls without a frame."""
    name = call_at(frame.f_code, frame.f_lasti)
    first, _, last = name.rpartition(".")
    library = frame.f_globals.get(first.partition(".")[0] or last)
    library = getattr(library, "__name__", "").partition(".")[0]
    if last in DECODERS:
        return "decoding", name
    if last in READERS:
        return "reading", name
    return "", f"cv2.{last}" if library == "cv2" else ""


def kind_of(chain, collate=None):
    """Return the kind of work that a stack, the innermost frame first, does.

    That is reading, decoding, collating, sampler, other, or the name of a transform.
    """
    kind, name = called_in_c(chain[0])
    if kind:
        return kind
    for frame in chain:
        module = module_of(frame)
        if READING.match(module):
            return "reading"
        if DECODING.match(module):
            return "decoding"
    for place, frame in enumerate(chain):
        # a Compose calls modules through frames of torch.nn
        caller = next(
            (each for each in chain[place + 1 :] if module_of(each) != "torch.nn.modules.module"),
            None,
        )
        if found := transform_name(frame, caller):
            return found
        if module_of(frame) == "torch.utils.data._utils.collate" or frame.f_code is collate:
            return "collating"
    if is_container(chain[0]):  # the transform itself is written in C
        item = chain[0].f_locals.get("t") or chain[0].f_locals.get("transform")
        return "other" if item is None or type(item).__name__ in CONTAINERS else name_of(item)
    if found := outermost(chain, "PIL."):
        return "decoding" if found in PIL_DECODES else f"PIL {found}"
    if name:
        return name
    if found := outermost(chain, "torchvision.transforms"):
        return found
    return (
        "sampler"
        if any(module_of(frame) == "torch.utils.data.sampler" for frame in chain)
        else "other"
    )


class Stacks:
    """Look at the stack of the thread that enters this context, until it leaves."""

    def __init__(self, is_users, collate=None):
        self.is_users, self.collate = (
            is_users,
            getattr(collate, "__code__", None)
            or getattr(getattr(type(collate), "__call__", None), "__code__", None),
        )
        self.kinds, self.lines = collections.Counter(), collections.Counter()
        self.looks, self.last, self.is_on = 0, (), False

    def __enter__(self):
        self.loading, self.outside = threading.get_ident(), sys._getframe(1)
        self.switch = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        self.is_on = True
        self.thread = threading.Thread(target=self.look, name="whatif stacks", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_on = False
        self.thread.join(1)
        sys.setswitchinterval(self.switch)
        self.outside = None

    def look(self):
        last = time.perf_counter()
        while self.is_on:
            time.sleep(INTERVAL)
            now = time.perf_counter()
            with contextlib.suppress(Exception):  # a frame may hold anything
                self.add(sys._current_frames().get(self.loading), now - last)
            last = time.perf_counter()

    def add(self, frame, seconds):
        chain = []
        while frame is not None and frame is not self.outside:
            chain.append(frame)
            frame = frame.f_back
        if frame is None or not chain:  # outside of the context, or between two batches
            return
        self.looks += 1
        line = next(
            ((each.f_code.co_filename, each.f_lineno) for each in chain if self.is_users(each)),
            None,
        )
        found = kind_of(chain, self.collate), line
        # C code that holds the GIL is seen at its end. It began between two looks: half of the
        # time between them belongs to what was seen before.
        before = INTERVAL / 2 if self.last and seconds > 2 * INTERVAL else 0
        for (kind, line), part in ((self.last or found, before), (found, seconds - before)):
            if part:
                self.kinds[kind] += part
                self.lines[line] += part
        self.last = found

    def shares(self):
        """Return [{"what": kind of work, "share": of the time}], the largest first."""
        total = sum(self.kinds.values()) or 1
        return [
            dict(what=kind, share=round(seconds / total, 3))
            for kind, seconds in self.kinds.most_common()
            if seconds / total >= LEAST
        ]

    def users_lines(self):
        """Return [{"at": "file:line", "text": the line, "share": of the time}] of the user's."""
        total = sum(self.kinds.values()) or 1
        return [
            dict(
                at=f"{file}:{line}",
                text=linecache.getline(file, line).strip(),
                share=round(seconds / total, 3),
            )
            for (file, line), seconds in (
                (place, seconds)
                for place, seconds in self.lines.most_common(MOST + 1)
                if place and seconds / total >= 2 * LEAST
            )
        ][:MOST]
