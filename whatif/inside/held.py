"""Where the files are that a script writes while they are held back."""

import errno
import functools
import hashlib
import os
import pathlib
import shutil
import threading


class Held:
    """Knows which paths are held, and where their copies are: in `folder`, by their folder's hash.

    The processes of a run share the copies. What is below a path in `free` is not held.
    """

    def __init__(self, folder, free):
        self.folder, self.free, self.inside = folder, [], threading.local()
        self.gone = set()  # paths of the user's files that the script has removed
        self.is_there, self.open_file, self.names_in = os.path.lexists, os.open, os.listdir
        self.set_free(*free)
        os.makedirs(folder, exist_ok=True)

    def set_free(self, *paths):
        for path in paths:
            self.free += [os.path.abspath(path), os.path.realpath(path)]

    def is_free(self, path):
        return any(path == one or path.startswith(one + os.sep) for one in self.free)

    @functools.lru_cache(10_000)  # noqa: B019  a process has one of these objects
    def real_folder(self, path):
        """Return (a folder without links in its path, where its files are held)."""
        self.inside.now = True  # realpath calls functions that are replaced
        try:
            path = os.path.realpath(path)
        finally:
            self.inside.now = False
        name = hashlib.sha1(os.fsencode(path)).hexdigest()[:16]
        return path, os.path.join(self.folder, name)

    def where(self, path):
        """Return (its path without links, where it is held), or (None, None) if it is free."""
        if (
            not isinstance(path, (str, bytes, os.PathLike))
            or not path
            or (getattr(self.inside, "now", False))
        ):  # an open file
            return None, None
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        folder, copies = self.real_folder(folder)
        path = os.path.join(folder, name)
        return (None, None) if self.is_free(path) else (path, os.path.join(copies, name))

    def is_gone(self, path):
        return bool(self.gone) and any(
            one in self.gone for one in (path, *map(str, pathlib.PurePath(path).parents))
        )

    def remove(self, path):
        """Let one of the user's files or folders be gone, for this process only."""
        self.gone.add(path)
        _, copies = self.real_folder(path)
        if self.is_there(copies):
            shutil.rmtree(copies, ignore_errors=True)

    def make_copy(self, path, copy, is_new):
        """Make room for a copy; copy the user's file to it, unless the script writes a new one."""
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        if (
            not is_new
            and not self.is_there(copy)
            and not self.is_gone(path)
            and (os.path.isfile(path))
        ):
            part = f"{self.folder}/{os.getpid()}-{threading.get_ident()}"
            os.rename(shutil.copyfile(path, part), copy)  # another process may look for it
        self.gone.discard(path)

    def copies_in(self, path):
        """Return {name: its copy} of files that are held of a folder."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return {}
        _, copies = self.real_folder(os.path.abspath(os.fsdecode(path)))
        names = self.names_in(copies) if self.is_there(copies) else ()
        return {name: os.path.join(copies, name) for name in names}

    def is_shown(self, folder, name):
        """Return whether a name in a folder, by itself or as a part of it, has not been removed."""
        if not self.gone or isinstance(folder, int):
            return True
        path, _ = self.where(os.path.join(os.fsdecode(folder), os.fsdecode(name)))
        return not path or not self.is_gone(path)


def missing(path):
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
