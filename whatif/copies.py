"""--copy: run in a copy of the folder, which is removed at the end."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__")


@contextlib.contextmanager
def copied(source):
    """Yield a copy of a folder, beside it so that ../data is there, or in TMPDIR.

    OSError says what could not be copied.
    """
    beside = source.parent if os.access(source.parent, os.W_OK) else None
    with tempfile.TemporaryDirectory(
        prefix=f"{source.name}.whatif-", dir=beside, ignore_cleanup_errors=True
    ) as folder:
        try:
            shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True, ignore=LEFT_OUT)
        except shutil.Error as error:
            raise OSError(error.args[0][0][2]) from None
        yield Path(folder)


def moved(words, source, copy):
    """Return a command's words, with paths of the folder `source` led to its copy."""

    def lead(word):
        is_inside = os.path.isabs(word) and Path(os.path.normpath(word)).is_relative_to(source)
        return str(copy / os.path.relpath(word, source)) if is_inside else word

    return [*map(lead, words)]
