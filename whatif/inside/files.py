"""Hold back what the script writes: files by name, open files, trackers and uploads.

Held files are copies in the run's folder. The script reads them there, and sees them in its
folders; its own stay as they are. Native libraries that open a file by name are held if they are
in NATIVE; those that write to an open file always are.
"""

import contextlib
import errno
import functools
import hashlib
import os
import pathlib
import shutil
import sys
import tempfile
import threading

from whatif.imports import after_import, replace
from whatif.inside.open_files import hold_mappings, hold_open_files
from whatif.inside.trackers import hold_trackers, hold_uploads

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
TMPFILE = getattr(os, "O_TMPFILE", -1)  # a file without a name
NATIVE = {  # functions that open a file in C: (name, the argument with the path, what they do)
    "torch": [("save", 1, "save")],
    "torch.jit": [("save", 1, "save"), ("load", 0, "read")],
    "safetensors": [("serialize_file", 1, "save"), ("safe_open", 0, "read")],
    "cv2": [("imwrite", 0, "save"), ("imread", 0, "read")],
    "h5py.h5f": [("create", 0, "save"), ("open", 0, "change")],
    "sqlite3": [("connect", 0, "change")]}
HELD = None  # the Held of this process


class Held:
    """Where files are held, and functions that take the place of those of os and shutil.

    Each of those gets the real one first. A folder that is made is real and free, and its path is
    written to `folder`.made, to remove it after the run.
    """

    def __init__(self, folder, free):
        self.folder, self.free, self.inside = folder, [], threading.local()
        self.gone = set()  # paths of the user's files that the script has removed
        self.is_there, self.open_file, self.hard_link = os.path.lexists, os.open, os.link
        self.readers = os.stat, os.lstat, os.access, os.readlink
        self.deleters = os.remove, os.unlink, os.rmdir, shutil.rmtree
        for path in free:
            self.free += [os.path.abspath(path), os.path.realpath(path)]
        os.makedirs(folder, exist_ok=True)  # the processes of a run share it

    # ---- where a file is
    @functools.lru_cache(10_000)  # noqa: B019  there is one object in a process
    def real_folder(self, path):
        """Return (a folder without links, where its files are held, or None if it is free)."""
        self.inside.now = True  # realpath calls functions that are replaced
        try:
            path = os.path.realpath(path)
        finally:
            self.inside.now = False
        name = hashlib.sha1(os.fsencode(path)).hexdigest()[:16]
        return path, os.path.join(self.folder, name)

    def is_free(self, path):
        return any(path == one or path.startswith(one + os.sep) for one in self.free)

    def where(self, path):
        """Return (its absolute path, where it is held), or (None, None) if it is not held."""
        if not isinstance(path, (str, bytes, os.PathLike)) or not path or (
                getattr(self.inside, "now", False)):  # an open file
            return None, None
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        folder, copies = self.real_folder(folder)
        path = os.path.join(folder, name)
        return (None, None) if self.is_free(path) else (path, os.path.join(copies, name))

    def held(self, path):
        return self.where(path)[1]

    def has_copy(self, path):
        copy = self.held(path)
        return bool(copy) and self.is_there(copy)

    def is_gone(self, path):
        return bool(self.gone) and any(
            one in self.gone for one in (path, *map(str, pathlib.PurePath(path).parents)))

    def new_copy(self, path, copy, is_new):
        """Make room for a copy; copy the user's file to it, unless the script writes a new one."""
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        if not is_new and not self.is_there(copy) and not self.is_gone(path) and (
                os.path.isfile(path)):
            part = f"{self.folder}/{os.getpid()}-{threading.get_ident()}"
            os.rename(shutil.copyfile(path, part), copy)  # another process may look for it
        self.gone.discard(path)

    def set_free(self, path):
        self.free.append(os.path.abspath(path))
        with open(f"{self.folder}.made", "a") as made:
            made.write(f"{self.free[-1]}\n")

    def missing(self, path):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    # ---- files that are opened
    def os_open(self, real, path, flags, mode=0o777, *, dir_fd=None):
        name, copy = self.where(path) if dir_fd is None else (None, None)
        if not copy or flags & TMPFILE == TMPFILE:
            return real(path, flags, mode, dir_fd=dir_fd)
        if self.is_there(copy) and not flags & WRITES:
            return real(copy, flags, mode)
        if not flags & WRITES:
            if self.is_gone(name):
                raise self.missing(path)
            return real(path, flags, mode)
        other = os.path.exists(name) and not os.path.isfile(name)  # a pipe, or a folder
        if other or not os.path.isdir(os.path.dirname(name)):
            return real(path, flags, mode)
        self.new_copy(name, copy, flags & (os.O_TRUNC | os.O_EXCL))
        return real(copy, flags, mode)

    def plain_open(self, real, *args, **options):
        if len(args) < 8 and not options.get("opener"):
            options["opener"] = lambda path, flags: os.open(path, flags, 0o666)
        return real(*args, **options)

    def by_name(self, position, does, real, *args, **options):
        """Call a native function with the path of the copy: to save, read or change a file."""
        name, copy = self.where(args[position] if len(args) > position else None)
        is_special = args[:1] == (":memory:",) or options.get("uri")  # of sqlite3
        is_read = does == "read" or args[1:2] == (0,) and does == "change"  # of h5py
        if not copy or is_special or is_read and not self.is_there(copy):
            return real(*args, **options)
        self.new_copy(name, copy, does != "change")
        args = list(args)
        args[position] = os.fsencode(copy) if isinstance(args[position], bytes) else copy
        return real(*args, **options)

    # ---- names that are changed
    def mkdir(self, real, path, *rest, **options):
        name, copy = self.where(path) if options.get("dir_fd") is None else (None, None)
        if copy and self.is_gone(name):
            self.gone.discard(name)
        elif not copy:
            real(path, *rest, **options)
        elif not os.path.exists(path):  # a script may make one that the first run has left
            real(path, *rest, **options)
            self.set_free(name)

    def link(self, real, src, dst, *rest, **options):
        """Copy what this run has written; leave out links to files of the user's."""
        is_hard = real is self.hard_link
        source = src if is_hard else os.path.join(os.path.dirname(dst), src)
        copy, target = self.held(source), self.held(dst)
        if not target and not (copy and is_hard):
            real(src, dst, *rest, **options)
        elif not (copy and target and not self.is_there(copy)) and os.path.isfile(source):
            shutil.copyfile(source, dst)

    def copy_state(self, real, src, dst, **options):
        if os.path.lexists(dst):  # not a link that was left out
            shutil.copymode(src, dst, **options)

    def move(self, real, src, dst, **options):
        (name, source), target = self.where(src), self.held(dst)
        if target and not source and os.path.isdir(src) and not os.path.lexists(dst):
            real(src, dst)  # a folder that the script has made
            self.set_free(dst)
        elif source and self.is_there(name) and not self.is_there(source):
            self.gone.add(name)  # a file of the user's
        elif source or target:
            if target:
                self.new_copy(self.where(dst)[0], target, True)
            shutil.move(source or src, target or dst)  # `folder` may be on another disk
        else:
            real(src, dst, **options)

    def use(self, real, path, *rest, **options):
        """Read, change or delete a held file; leave one of the user's as it is."""
        name, copy = self.where(path) if options.get("dir_fd") is None else (None, None)
        if not copy:
            return real(path, *rest, **options)
        if real in self.deleters and self.is_there(name):
            self.gone.add(name)
            if not self.is_there(copy):
                return None
        if self.is_there(copy):
            return real(copy, *rest, **options)
        if self.is_gone(name):
            if real is os.access.__wrapped__:
                return False
            raise self.missing(path)
        if real not in self.readers and self.is_there(name):
            return None
        return real(path, *rest, **options)

    # ---- folders that are listed
    def held_in(self, path):
        """Return {name: its copy} of files that are held of a folder."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return {}
        _, copies = self.real_folder(os.path.abspath(os.fsdecode(path) or "."))
        names = LISTDIR(copies) if self.is_there(copies) else ()
        return {name: os.path.join(copies, name) for name in names}

    def is_shown(self, path, name):
        return not self.gone or not isinstance(path, (str, os.PathLike)) or (
            not self.is_gone(self.where(os.path.join(path, name))[0] or "/"))

    def listdir(self, real, path="."):
        names, held = real(path), self.held_in(path or ".")
        is_bytes = isinstance(path, bytes)
        names = [name for name in names if is_bytes or self.is_shown(path or ".", name)]
        more = map(os.fsencode, held) if is_bytes else held
        return list(dict.fromkeys([*names, *more]))

    def scandir(self, real, path="."):
        held = {} if isinstance(path, bytes) else self.held_in(path or ".")
        if not held and not self.gone:
            return real(path)
        return Listing(self, real(path), path or ".", held)


LISTDIR = os.listdir


class Entry:
    """What os.DirEntry is, of a held file."""

    def __init__(self, folder, name, copy):
        self.name, self.path, self.copy = name, os.path.join(folder, name), copy

    def __fspath__(self):
        return self.path

    def inode(self):
        return self.stat().st_ino

    def is_dir(self, *, follow_symlinks=True):
        return os.path.isdir(self.copy)

    def is_file(self, *, follow_symlinks=True):
        return os.path.isfile(self.copy)

    def is_symlink(self):
        return False

    def stat(self, *, follow_symlinks=True):
        return os.stat(self.copy)


class Listing:
    """The iterator of os.scandir: the user's files that are left, and those that are held."""

    def __init__(self, held, entries, path, copies):
        self.entries = entries
        real = (each for each in entries
                if each.name not in copies and held.is_shown(path, each.name))
        self.all = iter([*real, *(Entry(path, name, copy) for name, copy in copies.items())])

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.all)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.entries.close()


def hold_writes(folder, free):
    """Keep files that the script writes in `folder`, unless they are below a path in `free`.

    Elsewhere nothing is moved or deleted; folders that are made are listed in `folder`.made.
    """
    held = Held(folder, free)
    places = {held.os_open: [os.open], held.plain_open: [open], held.mkdir: [os.mkdir],
              held.link: [os.link, os.symlink], held.move: [os.rename, os.replace],
              held.copy_state: [shutil.copystat], held.listdir: [os.listdir],
              held.scandir: [os.scandir],
              held.use: [*held.readers, *held.deleters, os.chmod, os.utime, os.truncate]}
    new = {id(real): wrapped(function, real) for function, those in places.items()
           for real in those}
    posix = sys.modules.pop("posix")  # keeps the real ones
    replace(new)
    sys.modules["posix"] = posix
    for owner in vars(tempfile).values():  # their unlink is a default
        for function in vars(owner).values() if isinstance(owner, type) else ():
            if defaults := getattr(function, "__defaults__", None):
                function.__defaults__ = tuple(new.get(id(each), each) for each in defaults)
    if accessor := getattr(pathlib, "_NormalAccessor", None):  # of Python 3.10
        for name, value in [*vars(accessor).items()]:
            value = getattr(value, "__func__", value)
            if id(value) in new:
                setattr(accessor, name, staticmethod(new[id(value)]))
    for module in NATIVE:
        after_import(module, functools.partial(hold_native, held, module))
    return held


def wrapped(function, real):
    return functools.update_wrapper(functools.partial(function, real), real)


def hold_native(held, module):
    """Replace the functions of a module that open files in C."""
    owner, new = sys.modules[module], {}
    for name, position, does in NATIVE[module]:
        if real := getattr(owner, name, None):
            new[id(real)] = wrapped(functools.partial(held.by_name, position, does), real)
    replace(new)


def is_holding(spec):
    """Return whether a process of this run holds what it writes: others then should, too."""
    return spec["mode"] == "fixed" or os.path.exists(os.path.join(spec["folder"], "holding"))


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
    hold_open_files(HELD)
    hold_mappings(HELD)
    hold_trackers()
    hold_uploads()


