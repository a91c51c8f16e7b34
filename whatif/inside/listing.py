"""Folders as the script should see them: without what it has removed, with what is held."""

import os


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

    def is_junction(self):
        return False

    def stat(self, *, follow_symlinks=True):
        return os.stat(self.copy)


class Listing:
    """What os.scandir returns: an iterator that can be closed."""

    def __init__(self, held, entries, folder, copies):
        self.entries = entries
        real = [
            each for each in entries if each.name not in copies and held.is_shown(folder, each.name)
        ]
        self.all = iter(real + [Entry(folder, name, copy) for name, copy in copies.items()])

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


def listdir(held, real, path="."):
    """Take the place of os.listdir."""
    path = "." if path is None else path
    kind = os.fsencode if isinstance(path, bytes) else str
    names = [name for name in real(path) if held.is_shown(path, name)]
    return list(dict.fromkeys([*names, *map(kind, held.copies_in(path))]))


def scandir(held, real, path="."):
    """Take the place of os.scandir."""
    path = "." if path is None else path
    copies = {} if isinstance(path, bytes) else held.copies_in(path)
    if not copies and not held.gone or isinstance(path, (bytes, int)):
        return real(path)
    return Listing(held, real(path), path, copies)
