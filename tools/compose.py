"""Join techniques into one training script. compose.sh starts this file.

    ./compose.sh TECHNIQUE ... > my_train.py       print train.py with these techniques
    ./compose.sh --into my_train.py TECHNIQUE ...  add them to your own edited copy of train.py

Each technique is a three-way merge (git merge-file) of src/train_TECHNIQUE.py over src/train.py, so
their order does not matter. After a conflict your copy is as it was. Exit status: 0 done, 1 a
conflict or an unusable file, 2 wrong usage or techniques that exclude each other.
"""

import collections
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UTF8 = "utf-8", "surrogateescape"  # other bytes survive decoding and encoding
TECHNIQUES = sorted(path.stem.removeprefix("train_") for path in ROOT.glob("src/train_*.py"))
PARTS = {"loading", "model", "net", "optimizer", "sampler", "train_loader", "val_loader",
         "val_sampler"}  # a block that changes one of these relies on the lines that use it


class UsageError(RuntimeError):
    """A technique or file that does not exist, or techniques that exclude each other."""


def git(*words):
    """Return what git prints about this project, or "" if it fails."""
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True)
    return "" if done.returncode else done.stdout.decode(*UTF8)


def script(name, commit=None):
    """Return the text of src/NAME.py, now or at `commit` ("" if it was not there)."""
    if commit:
        return git("show", f"{commit}:./src/{name}.py")
    return (ROOT / "src" / f"{name}.py").read_bytes().decode(*UTF8)


def merge(current, base, variant, name):
    """Return (`current` with the changes from `base` to `variant`, its conflicts as matches)."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, each) for each in ("current", "base", "variant")]
        for path, text in zip(paths, (current, base, variant)):
            path.write_bytes(text.encode(*UTF8))
        done = subprocess.run(
            ["git", "-c", "merge.conflictStyle=merge", "merge-file", "-p", "-L", "yours",
             "-L", "train.py", "-L", f"train_{name}.py", *paths], capture_output=True)
    merged = done.stdout.decode(*UTF8)
    conflict = re.compile(r"^<<<<<<< .*?\n(.*?)^=======\n(.*?)^>>>>>>> .*?\n", re.M | re.S)
    conflicts = list(conflict.finditer(merged)) if done.returncode else []
    if done.returncode >= 128 or done.returncode and not conflicts:
        raise RuntimeError(f"git merge-file failed: {done.stderr.decode(*UTF8).strip()}")
    return merged, conflicts


def reasons(text):
    """Return the second lines of all blocks in `text`: they say why a block is there."""
    return re.findall(r"^ *# new #\n *# (.*)", text, re.M)


def excluded(one, other):
    """Return why two techniques cannot be joined, or "" if they can."""
    texts = [script(f"train_{name}") for name in (one, other)]
    _, conflicts = merge(texts[0], script("train"), texts[1], other)
    if not conflicts:
        return ""
    why = [(re.findall(r"^[# ]*# (?! |new #$)(.*)", side, re.M) + reasons(text))[0]
           for text, side in zip(texts, conflicts[-1].groups())]
    return (f'{one} and {other} exclude each other: both change the same lines of train.py '
            f'({one}: "{why[0]}"; {other}: "{why[1]}")')


def check(techniques):
    """Return the techniques sorted, each once. Raise UsageError if they cannot be joined."""
    for name in techniques:
        if name not in TECHNIQUES:
            raise UsageError(f"no technique {name!r}; there are: {' '.join(TECHNIQUES)}")
    techniques = sorted(set(techniques))
    for one, other in itertools.combinations(techniques, 2):
        if reason := excluded(one, other):
            raise UsageError(reason)
    return techniques


def join(techniques):
    """Return the text of train.py with `techniques`. Raise RuntimeError if they do not join."""
    text = base = script("train")
    for name in check(techniques):
        text, conflicts = merge(text, base, script(f"train_{name}"), name)
        if conflicts:
            raise RuntimeError(f"{name} does not join the techniques before it:\n{conflicts[0][0]}")
    return text


# ------------------------------------------------------------------------- into a user's own copy
def lines(text):
    """Return {line: how often it occurs} without blank lines."""
    return collections.Counter(line for line in text.split("\n") if line.strip())


def find_origin(yours):
    """Return the commit with the train.py that differs least from `yours`, or None for src/.

    It is the last commit that has this train.py, so its techniques have all their corrections.
    """
    def difference(text):
        return ((lines(text) - lines(yours)) + (lines(yours) - lines(text))).total()
    least, origin, newer = difference(script("train")), None, "HEAD"
    for commit in git("log", "--format=%H", "-n", "200", "--", "src/train.py").split():
        old = script("train", commit)
        if old and difference(old) < least:
            least, origin = difference(old), newer if script("train", newer) == old else commit
        newer = f"{commit}^"
    return origin


def explain(conflicts, name, path, yours, base):
    """Return why a technique does not join the user's copy; show the conflicts on stderr."""
    if 3 * (lines(yours) & lines(base)).total() < lines(base).total():
        return (f"{path} has less than a third of train.py's lines: copy the blocks of "
                f"src/train_{name}.py into it by hand")
    sys.stderr.write("".join(conflict[0] for conflict in conflicts))
    first = conflicts[0][1]
    at = ("\n" + yours).find("\n" + first) if first else -1
    place = "the lines" if at < 0 else f"line {yours.count(chr(10), 0, at) + 1}"
    reason = f"{name} does not join {path}: both change {place} shown above; nothing was changed"
    commits = git("log", "--format=%H", "-n", "2", "--", "src/train.py").split()
    if len(commits) < 2 or git("rev-parse", "--is-shallow-repository") != "false\n":
        reason += (f". {ROOT} has no git history in which to find an older train.py; if {path} was "
                   "copied from one, it may join in a full clone")
    return reason


def replace(path, text):
    """Write a file beside its place and move it there. Keep its mode; follow links."""
    target = os.path.realpath(path)
    part = Path(f"{target}.part")
    try:
        shutil.copy2(target, part)
        part.write_bytes(text.encode(*UTF8))
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def add_to(path, techniques):
    """Add techniques to the user's copy at `path`; return what to tell the user: [str].

    Raise RuntimeError, and leave the copy as it is, if one of them does not join it.
    """
    if not os.path.isfile(path):
        raise UsageError(f"--into {path}: there is no such file")
    text = yours = Path(path).read_bytes().decode(*UTF8)
    quoted = shlex.quote(path)
    if "\r\n" in yours:
        raise RuntimeError(f"--into {path}: it has Windows line ends; remove them: "
                           f"sed -i 's/\\r$//' {quoted}")
    techniques, origin, said = check(techniques), find_origin(yours), []
    base = script("train", origin)
    for name in techniques:
        variant = script(f"train_{name}", origin)
        if not variant:
            raise RuntimeError(
                f"{name} is newer than the train.py that {path} was copied from; update {path} "
                f"first: git -C {shlex.quote(str(ROOT))} show {origin}:./src/train.py > old.py && "
                f"git merge-file {quoted} old.py {shlex.quote(str(ROOT / 'src' / 'train.py'))}")
        if set(reasons(variant)) <= set(reasons(text)):
            said.append(f"{path} already has {name}")
            continue
        merged, conflicts = merge(text, base, variant, name)
        if conflicts:
            raise RuntimeError(explain(conflicts, name, path, yours, base))
        said += [f"warning: {name} may not work as it should in {path}: {disagreement}"
                 for disagreement in warnings(base, variant, yours, merged)]
        text = merged
    if text != yours and origin:
        said.append(f"{path} was copied from an older train.py, and the techniques are of that "
                    f"time too: {git('show', '-s', '--format=%h (%cs)', origin).strip()}")
    if text != yours:
        replace(path, text)
    return said


def warnings(base, variant, yours, merged):
    """Return a sentence for each name on which the technique and the user's lines disagree.

    A merge compares lines. This finds names that the user renamed, no longer reads or sets again.
    """
    def own(text, others):
        return [line for line in text.split("\n") if line not in others and line.strip()[:1] != "#"]
    def reading(name, lines):
        return [line.strip() for line in lines if re.search(rf"(?<![\w.]){name}\b(?! ?=)", line)]
    gone, new = own(base, yours.split("\n")), own(yours, base.split("\n"))
    blocks = "\n".join(re.findall(r"# new #\n(.*?)(?:\n\n|\Z)", variant, re.S))
    sets = {name: line for line, each in re.findall(r"^( *([a-z][\w., ]*) = .*)", blocks, re.M)
            for name in each.split(", ")}
    found, changed = [], set(sets)  # and what train.py computes from those
    for name, value in re.findall(r"^ *(\w+) = (.*)", base, re.M):
        changed |= {name} if changed & set(re.findall(r"\w+", value)) else set()
        if re.search(rf"\b{name}\b", blocks) and not re.search(rf"\b{name}\b", yours):
            found.append(f"it uses {name}, which your copy does not have")
    for name in sorted(changed & PARTS):
        lost = reading(name, gone)
        if lost and (len(lost) > len(reading(name, new)) if name in sets
                     else not reading(name, yours.split("\n"))):
            found.append(f"it changes {name}, and your copy does not have this line: {lost[0]}")
    for name in sorted(name for name in sets if name in PARTS or "." in name):
        found += [f"it sets {name}, and your copy sets it again later: {line.strip()}"
                  for line in new if re.match(rf" *{name} = ", line) and not reading(name, [line])
                  and merged.rfind(line) > merged.rfind(sets[name])]
    return found


def main(words):
    into = words[1:2] if words[:1] == ["--into"] else None
    techniques = words if into is None else words[2:]
    if into == [] or not techniques or techniques[0].startswith("-"):
        raise UsageError("usage: ./compose.sh [--into FILE] TECHNIQUE ...    techniques: "
                         + " ".join(TECHNIQUES))
    if into:
        for message in add_to(into[0], techniques):
            print(f"compose.sh: {message}", file=sys.stderr)
    else:
        sys.stdout.buffer.write(join(techniques).encode(*UTF8))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `./compose.sh amp | head` is no error
    try:
        main(sys.argv[1:])
    except (RuntimeError, OSError) as error:
        print(f"compose.sh: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
