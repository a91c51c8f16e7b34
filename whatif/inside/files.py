"""Hold back what the script writes: files by name, open files, trackers and uploads.

Held files are copies in the run's folder. The script reads them there, and sees them in its
folders; its own stay as they are. Native libraries that open a file by name are held if they are
in NATIVE; those that write to a file that is open already always are.
"""

import contextlib
import functools
import glob
import os
import pathlib
import shutil
import sys
import tempfile

from whatif.imports import after_import, replace
from whatif.inside import listing
from whatif.inside.held import Held, missing
from whatif.inside.open_files import hold_mappings, hold_open_files
from whatif.inside.trackers import hold_trackers, hold_uploads

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
NATIVE = {  # functions that open a file in C: (name, where the path is, its name, what they do)
    "torch": [("save", 1, "f", "save")],
    "torch.jit": [("save", 1, "f", "save"), ("load", 0, "f", "read")],
    "safetensors": [
        ("serialize_file", 1, "filename", "save"),
        ("safe_open", 0, "filename", "read"),
    ],
    "cv2": [("imwrite", 0, "filename", "save"), ("imread", 0, "filename", "read")],
    "h5py.h5f": [("create", 0, "name", "save"), ("open", 0, "name", "change")],
    "sqlite3": [("connect", 0, "database", "change")],
}
HELD = None  # the Held of this process, once all is held


class Replaced(Held):
    """Functions that take the place of those of os and shutil; each gets the real one first.

    A folder that is made is real and free, and its path is written to `folder`.made, to remove it
    after the run.
    """

    def __init__(self, folder, free):
        super().__init__(folder, free)
        self.hard_link, self.access = os.link, os.access
        self.readers = os.stat, os.lstat, os.access, os.readlink
        self.deleters = os.remove, os.unlink, os.rmdir, shutil.rmtree

    def was_made(self, path):
        self.set_free(path)
        with open(f"{self.folder}.made", "a") as made:
            made.write(f"{os.path.abspath(path)}\n")

    # ---- files that are opened
    def os_open(self, real, path, flags, mode=0o777, *, dir_fd=None):
        name, copy = self.where(path) if dir_fd is None else (None, None)
        if not copy or flags & os.O_TMPFILE == os.O_TMPFILE:  # without a name
            return real(path, flags, mode, dir_fd=dir_fd)
        if not flags & WRITES:
            if not self.is_there(copy) and self.is_gone(name):
                raise missing(path)
            return real(copy if self.is_there(copy) else path, flags, mode)
        is_special = os.path.exists(name) and not os.path.isfile(name)  # a pipe, or a folder
        if is_special or not os.path.isdir(os.path.dirname(name)):
            return real(path, flags, mode)
        self.make_copy(name, copy, flags & (os.O_TRUNC | os.O_EXCL))
        return real(copy, flags, mode)

    def plain_open(self, real, *args, **options):
        if len(args) < 8 and not options.get("opener"):
            options["opener"] = lambda path, flags: os.open(path, flags, 0o666)
        return real(*args, **options)

    def by_name(self, about, real, *args, **options):
        """Call a native function with the path of the copy: to save, read or change a file."""
        _, position, key, does = about
        path = args[position] if len(args) > position else options.get(key)
        name, copy = self.where(path)
        is_special = path == ":memory:" or options.get("uri")  # of sqlite3
        is_read = does == "read" or does == "change" and args[1:2] == (0,)  # of h5py
        if not copy or is_special or is_read and not self.is_there(copy):
            return real(*args, **options)
        self.make_copy(name, copy, does != "change")
        copy = os.fsencode(copy) if isinstance(path, bytes) else copy
        if key in options:
            return real(*args, **options | {key: copy})
        return real(*args[:position], copy, *args[position + 1 :], **options)

    # ---- names that are changed
    def mkdir(self, real, path, *rest, **options):
        name, copy = self.where(path) if options.get("dir_fd") is None else (None, None)
        if not copy:
            real(path, *rest, **options)
        elif self.is_gone(name):
            self.gone.discard(name)
        elif not os.path.exists(path):  # a script may make one that the first run has left
            real(path, *rest, **options)
            self.was_made(name)

    def link(self, real, src, dst, *rest, **options):
        """Copy what this run has written; leave out links to files of the user's."""
        is_hard = real is self.hard_link
        source = src if is_hard else os.path.join(os.path.dirname(dst), src)
        copy, target = self.where(source)[1], self.where(dst)[1]
        if not target and not (copy and is_hard):
            real(src, dst, *rest, **options)
        elif not (copy and target and not self.is_there(copy)) and os.path.isfile(source):
            shutil.copyfile(source, dst)

    def copy_state(self, real, src, dst, **options):
        if os.path.lexists(dst):  # not a link that was left out
            shutil.copymode(src, dst, **options)

    def move(self, real, src, dst, **options):
        (name, source), (new, target) = self.where(src), self.where(dst)
        if target and not source and os.path.isdir(src) and not os.path.lexists(dst):
            real(src, dst)  # a folder that the script has made
            self.was_made(dst)
        elif source and self.is_there(name) and not self.is_there(source):
            self.remove(name)  # a file of the user's
        elif source or target:
            if target:
                self.make_copy(new, target, True)
            shutil.move(source or src, target or dst)  # `folder` may be on another disk
            if source and self.is_there(name):
                self.gone.add(name)
        else:
            real(src, dst, **options)

    def use(self, real, path, *rest, **options):
        """Read, change or delete a held file; leave one of the user's as it is."""
        name, copy = self.where(path) if options.get("dir_fd") is None else (None, None)
        if not copy:
            return real(path, *rest, **options)
        has_copy, is_gone = self.is_there(copy), self.is_gone(name)
        if real in self.deleters and not is_gone and self.is_there(name):
            self.remove(name)
            return real(copy, *rest, **options) if has_copy else None
        if has_copy:
            return real(copy, *rest, **options)
        if is_gone and real is self.access:
            return False
        if is_gone:
            raise missing(path)
        if real not in self.readers and self.is_there(name):
            return None
        return real(path, *rest, **options)


def hold_writes(folder, free):
    """Keep files that the script writes in `folder`, unless they are below a path in `free`.

    Elsewhere nothing is moved or deleted; folders that are made are listed in `folder`.made.
    """
    held = Replaced(folder, free)
    lists = functools.partial(listing.listdir, held), functools.partial(listing.scandir, held)
    places = [
        (held.os_open, os.open),
        (held.plain_open, open),
        (held.mkdir, os.mkdir),
        (held.link, os.link),
        (held.link, os.symlink),
        (held.move, os.rename),
        (held.move, os.replace),
        (held.copy_state, shutil.copystat),
        (lists[0], os.listdir),
        (lists[1], os.scandir),
        *(
            (held.use, real)
            for real in {*held.readers, *held.deleters, os.chmod, os.utime, os.truncate}
        ),
    ]
    new = {id(real): wrapped(function, real) for function, real in places}
    replace(new, without=("posix",))  # held has the real ones from there
    for module in (tempfile, glob, pathlib):
        replace_in_classes(module, new)
    for group in (
        os.supports_dir_fd,
        os.supports_fd,
        os.supports_follow_symlinks,
        os.supports_effective_ids,
    ):
        group |= {new[id(real)] for _, real in places if real in group}
    for module in NATIVE:
        after_import(module, functools.partial(hold_native, held, module))
    return held


def wrapped(function, real):
    return functools.update_wrapper(functools.partial(function, real), real)


def replace_in_classes(module, new):
    """Replace functions that the classes of a module keep, also as defaults of their methods."""
    for owner in [each for each in vars(module).values() if isinstance(each, type)]:
        for name, value in [*vars(owner).items()]:
            function = getattr(value, "__func__", value)
            if id(function) in new:
                setattr(owner, name, staticmethod(new[id(function)]))
            elif defaults := getattr(function, "__defaults__", None):
                function.__defaults__ = tuple(new.get(id(each), each) for each in defaults)


def hold_native(held, module):
    """Replace the functions of a module that open files in C."""
    owner, new = sys.modules[module], {}
    for about in NATIVE[module]:
        if real := getattr(owner, about[0], None):
            new[id(real)] = wrapped(functools.partial(held.by_name, about), real)
    replace(new)


def is_holding(spec):
    """Return whether a process of this run holds what it writes: others then should, too."""
    return spec["mode"] in ("fixed", "proof") or os.path.exists(
        os.path.join(spec["folder"], "holding")
    )


def hold_everything(spec):
    """Hold back from now on all that this process writes or sends: nothing reaches the user's.

    It is called at the first repeated batch, or at the start where is_holding(spec). A second
    call does nothing.
    """
    global HELD
    if HELD:
        return
    with contextlib.suppress(OSError):
        open(os.path.join(spec["folder"], "holding"), "x").close()
    HELD = hold_writes(os.path.join(spec["folder"], "held"), spec["free"])
    hold_mappings(HELD, hold_open_files(HELD))
    hold_trackers()
    hold_uploads()
