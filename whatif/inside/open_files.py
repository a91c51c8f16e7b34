"""Files that are open already: their descriptors and mappings lead to copies from now on."""

import ctypes
import gc
import io
import mmap
import os
import stat
from contextlib import suppress

LARGE = 2**30  # bytes of a file that is not copied
FIXED = 0x10  # MAP_FIXED of mmap, on Linux


def flags_of(number):
    """Return the flags with which a descriptor was opened."""
    with open(f"/proc/self/fdinfo/{number}") as file:
        for line in file:
            if line.startswith("flags:"):
                return int(line.split()[1], 8)
    return 0


def written(held):
    """Return [(descriptor, flags, path)] of the user's files that are open for writing."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):  # the descriptor of this list is closed
            number, path = int(name), os.readlink(f"/proc/self/fd/{name}")
            state, flags = os.fstat(number), flags_of(number)
            if (
                stat.S_ISREG(state.st_mode)
                and state.st_nlink
                and not held.is_free(path)
                and (flags & os.O_ACCMODE)
            ):
                found.append((number, flags, path))
    return found


def all_objects():
    """Return what gc.get_objects() does, with the objects of before the script's gc.freeze()."""
    has_frozen = gc.get_freeze_count()
    gc.unfreeze()
    found = gc.get_objects()
    if has_frozen:
        gc.freeze()
    return found


def flush(numbers):
    """Write out what Python and C keep in buffers for these descriptors."""
    for each in all_objects():
        if issubclass(type(each), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with suppress(Exception):
                if not each.closed and each.fileno() in numbers:
                    each.flush()
    with suppress(Exception):
        ctypes.CDLL(None).fflush(None)


def copy_for(held, number, flags, path):
    """Make the copy of an open file, and return (its path, the flags to open it with).

    Of a large file the copy is empty where it is only written; else the file is only read.
    """
    _, copy = held.where(path)
    size = os.fstat(number).st_size
    is_large = size > LARGE
    if is_large and flags & os.O_RDWR:
        return path, flags & ~os.O_ACCMODE
    held.make_copy(path, copy, is_large)
    if is_large:
        new = held.open_file(copy, os.O_WRONLY | os.O_CREAT, 0o666)
        os.truncate(new, size)
        os.close(new)
    return copy, flags


def hold_open_files(held):
    """Let each descriptor that is open for writing on a user's file lead to a copy of it.

    It keeps its number, flags and position, so files of Python and of native libraries go on.
    Returned is {path: that of its copy}.
    """
    found, copies = written(held), {}
    if found:  # to look for them among all objects takes a while
        flush({number for number, _, _ in found})
    for number, flags, path in found:
        with suppress(OSError):
            at = os.lseek(number, 0, os.SEEK_CUR)
            copy, flags = copy_for(held, number, flags, path)
            new = held.open_file(copy, flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
            os.lseek(new, at, os.SEEK_SET)
            os.dup(number)  # it keeps a lock of the file
            os.dup2(new, number, inheritable=os.get_inheritable(number))
            os.close(new)
            if copy != path:
                copies[path] = copy
    return copies


def hold_mappings(held, copies):
    """Let mappings of the user's files that are shared and written be private, or of the copies.

    `copies` is {path: that of its copy}, of files that are open, too.
    """
    with open("/proc/self/maps") as file:
        lines = [line.rstrip("\n").split(maxsplit=5) for line in file]
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
    for place, rights, offset, _, _, *path in lines:
        if (
            rights[3] != "s"
            or not path
            or not (rights[1] == "w" or path[0] in copies)
            or (held.is_free(path[0]) or not os.path.isfile(path[0]))
        ):
            continue
        start, end = (int(each, 16) for each in place.split("-"))
        protection = mmap.PROT_READ * (rights[0] == "r") | mmap.PROT_WRITE * (rights[1] == "w")
        copy = copies.get(path[0])
        kind = FIXED | (mmap.MAP_SHARED if copy else mmap.MAP_PRIVATE)
        with suppress(OSError):
            number = held.open_file(copy or path[0], os.O_RDWR if copy else os.O_RDONLY)
            call(start, end - start, protection, kind, number, int(offset, 16))
            os.close(number)
