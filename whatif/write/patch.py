"""--write: the techniques of a set as a unified diff over the user's own files.

Nothing here writes a file of the user's. The Patch holds the new text of each file; proof.py runs
it, and writing.py writes the diff to the file that --write names.
"""

import dataclasses
import os
import shlex

from whatif import advice, scriptoptions

from . import extras, librarycalls
from .sources import Refused, Sources, diff

# edits of one file may follow each other in any order; marks read best in this one
ORDER = ("cudnn", "tf32", "workers", "channels_last", "fused", "compile", "amp")


@dataclasses.dataclass
class Patch:
    """What is written for a set of techniques, and what is not.

    written: techniques that are in the diff; options: {technique: words of the command line};
    reasons: {technique: why it is not written}; extras: lines beside the techniques (extras.py);
    files: {path: new text as bytes}; diff: bytes; root: the folder in which it applies
    """

    written: tuple = ()
    options: dict = dataclasses.field(default_factory=dict)
    reasons: dict = dataclasses.field(default_factory=dict)
    extras: tuple = ()
    files: dict = dataclasses.field(default_factory=dict)
    diff: bytes = b""
    root: str = ""
    changed: list = dataclasses.field(default_factory=list)  # paths below root

    def techniques(self):
        """Return the techniques that the patch and the new command line switch on."""
        return (*self.options, *self.written)

    def words(self):
        """Return all words for the command line."""
        return [word for words in self.options.values() for word in words]

    def is_empty(self):
        return not self.diff and not self.options

    def size(self):
        """Return (lines added, lines removed)."""
        lines = self.diff.splitlines()
        added = sum(line.startswith(b"+") and not line.startswith(b"+++ b/") for line in lines)
        removed = sum(line.startswith(b"-") and not line.startswith(b"--- a/") for line in lines)
        return added, removed


def look_at(facts, sources):
    """Read the user's files that the script has imported, as far as they can be read."""
    for name in facts.get("files", ()):
        try:
            sources.find(f"{name}:1")
        except Refused:
            continue


def make(facts, names, extra, cwd, with_extras=(), with_options=True):
    """Return the Patch for a set of techniques. `cwd` is the folder that facts name files from.

    Without options it writes lines also where the script has an option.
    """
    sources, patch = Sources(cwd), Patch()
    look_at(facts, sources)
    written = []
    for name in sorted(
        names, key=lambda each: ORDER.index(each.split()[0]) if each.split()[0] in ORDER else -1
    ):
        words = advice.options_of(name, facts, extra)
        if words and with_options:
            if advice.are_words(words, facts):
                patch.options[name] = words
            else:
                patch.reasons[name] = f"the script has a setting for it: {' '.join(words)}"
            continue
        if why := attempt(
            sources, advice.module_of(name), name, facts, extra | dict(names=tuple(names))
        ):
            patch.reasons[name] = why
        else:
            written.append(name)
    if "amp float16" in names and "amp float16" in patch.reasons and written:
        return without(patch, "amp float16", facts, names, extra, cwd, with_extras, with_options)
    patch.written = tuple(name for name in names if name in written)
    for name in with_extras:
        if not attempt(sources, extras, name, facts, extra):
            patch.extras += (name,)
    finish(patch, sources)
    return patch


def without(patch, name, facts, names, *rest):
    """Return the Patch of a set without a technique that others have lines for: a scaler."""
    found = make(facts, tuple(each for each in names if each != name), *rest)
    found.reasons = {name: patch.reasons[name], **found.reasons}
    return found


def attempt(sources, module, name, facts, extra):
    """Write one technique, or nothing of it; return why it was not written, or ""."""
    kept = sources.kept()
    try:
        if not hasattr(module, "edit"):
            raise Refused("no lines are known for it")
        if not librarycalls.edit(name, facts, extra, sources):
            module.edit(name, facts, extra, sources)
        for source in sources.changed():
            compile(b"" + source.encoded(), source.path, "exec", dont_inherit=True)
        return ""
    except Refused as refused:
        why = str(refused)
    except Exception as error:  # of ours, or text that is no Python
        why = f"it could not be written here ({type(error).__name__}: {error})"
    sources.put_back(kept)
    return why


def root_of(paths, cwd):
    """Return the folder in which a patch of these files applies: cwd, or one around all files."""
    cwd = os.path.realpath(cwd)
    if all(path.startswith(os.path.join(cwd, "")) for path in paths):
        return cwd
    return os.path.commonpath([os.path.dirname(path) for path in paths])


def finish(patch, sources):
    """Fill in the files and the diff."""
    changed = sources.changed()
    if not changed:
        return
    patch.root = root_of([source.path for source in changed], sources.cwd)
    for source in changed:
        name = os.path.relpath(source.path, patch.root)
        patch.files[source.path] = source.encoded()
        patch.diff += diff(source, name)
        patch.changed.append(name)


def command_to_apply(patch, path, cwd):
    """Return the command that applies a patch, from the folder `cwd`."""
    path = os.path.relpath(path, cwd) if not os.path.isabs(path) else str(path)
    if os.path.realpath(cwd) == patch.root:
        return f"git apply {shlex.quote(path)}    # or: patch -p1 < {shlex.quote(path)}"
    path = os.path.abspath(os.path.join(cwd, path))
    return f"patch -p1 -d {shlex.quote(patch.root)} < {shlex.quote(path)}"


def new_command(command, kind, patch, options):
    """Return the command line with the words of the script's own options."""
    return scriptoptions.new_command(command, kind, patch.words(), options)
