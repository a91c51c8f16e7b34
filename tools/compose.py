"""Join techniques into one training script; compose.sh starts this file.

Each technique is a three-way merge (git merge-file) of src/train_TECHNIQUE.py over src/train.py, so
their order does not matter.
"""

import collections
import functools
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

import layout
from hazards import hazards
from options import Parser, split

ROOT = Path(__file__).resolve().parent.parent
USAGE = "./compose.sh [--into FILE] TECHNIQUE ... [--verify [--anyway] [-- OPTION ...]]"
ABOUT = """Join techniques into one training script; needs Python and git, no packages.

    ./compose.sh DDP amp > my_train.py         print src/train.py with these techniques
    ./compose.sh --into my_train.py amp        add them to your own edited copy
    ./compose.sh --into my_train.py amp --verify -- --dataset DATA
                                               run the copy with these options before and after, and
                                               change it only if it does the same (needs PyTorch)

After a conflict the copy is as it was. Exit status: 0 done, 1 a conflict, a difference or an
unusable file, 2 wrong usage or techniques that exclude each other."""
UTF8 = "utf-8", "surrogateescape"  # other bytes survive decoding and encoding
TECHNIQUES = sorted(path.stem.removeprefix("train_") for path in ROOT.glob("src/train_*.py"))
PARTS = {
    "loading",
    "model",
    "net",
    "optimizer",
    "sampler",
    "train_loader",
    "val_loader",
    "val_sampler",
}  # a block that changes one of these relies on the lines that use it


class UsageError(RuntimeError):
    """A technique or file that does not exist, or techniques that exclude each other."""


def git(*words):
    """Return what git prints about this project, or "" if it fails."""
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True)
    return "" if done.returncode else done.stdout.decode(*UTF8)


@functools.cache
def script_at(name, commit):
    """Return the text of src/NAME.py at `commit` ("" if it was not there)."""
    return git("show", f"{commit}:./src/{name}.py")


def script(name, commit=None):
    """Return the text of src/NAME.py, now or at `commit` ("" if it was not there)."""
    if commit:
        return script_at(name, commit)
    return (ROOT / "src" / f"{name}.py").read_bytes().decode(*UTF8)


@functools.lru_cache(maxsize=256)  # which techniques exclude each other is asked often
def merge(current, base, variant, name):
    """Return (`current` with the changes from `base` to `variant`, its conflicts as matches)."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, each) for each in ("current", "base", "variant")]
        for path, text in zip(paths, (current, base, variant)):
            path.write_bytes(text.encode(*UTF8))
        done = subprocess.run(
            [
                "git",
                "-c",
                "merge.conflictStyle=merge",
                "merge-file",
                "-p",
                "-L",
                "yours",
                "-L",
                "train.py",
                "-L",
                f"train_{name}.py",
                *paths,
            ],
            capture_output=True,
        )
    merged = done.stdout.decode(*UTF8)
    conflict = re.compile(r"^<<<<<<< .*?\n(.*?)^=======\n(.*?)^>>>>>>> .*?\n", re.M | re.S)
    conflicts = tuple(conflict.finditer(merged)) if done.returncode else ()
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
    why = [
        (re.findall(r"^[# ]*# (?! |new #$)(.*)", side, re.M) + reasons(text))[0]
        for text, side in zip(texts, conflicts[-1].groups())
    ]
    return (
        f"{one} and {other} exclude each other: both change the same lines of train.py "
        f'({one}: "{why[0]}"; {other}: "{why[1]}")'
    )


def choices(names):
    """Return the techniques as lists: of each list at most one can be chosen."""
    found = []
    for name in names:
        same = next((choice for choice in found if excluded(choice[0], name)), None)
        if same:
            same.append(name)
        else:
            found.append([name])
    return found


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

    found, newer = [(difference(script("train")), 0, None)], "HEAD"
    for commit in git("log", "--format=%H", "-n", "200", "--", "src/train.py").split():
        old = script("train", commit)
        if old:
            origin = newer if script("train", newer) == old else commit
            found.append((difference(old), len(found), origin))
        newer = f"{commit}^"
    if min(found)[0]:  # a formatter changes lines
        found = [
            (layout.difference(script("train", origin), yours), number, origin)
            for _, number, origin in sorted(found, key=lambda each: each[:2])[:5]
        ]
    return min(found, key=lambda each: each[:2])[2]


def explain(conflicts, name, path, yours, base):
    """Return why a technique does not join the user's copy; show the conflicts on stderr."""
    if 3 * (lines(yours) & lines(base)).total() < lines(base).total():
        return (
            f"{path} has less than a third of train.py's lines: copy the blocks of "
            f"src/train_{name}.py into it by hand"
        )
    sys.stderr.write("".join(conflict[0] for conflict in conflicts))
    first = conflicts[0][1]
    at = ("\n" + yours).find("\n" + first) if first else -1
    place = "the lines" if at < 0 else f"line {yours.count(chr(10), 0, at) + 1}"
    reason = (
        f"{name} does not join {path}: both change {place} shown above; nothing was changed. "
        "Take back your change there, join, and make it again in the joined lines"
    )
    commits = git("log", "--format=%H", "-n", "2", "--", "src/train.py").split()
    if len(commits) < 2 or git("rev-parse", "--is-shallow-repository") != "false\n":
        reason += (
            f". {ROOT} has no git history in which to find an older train.py; if {path} was "
            "copied from one, it may join in a full clone"
        )
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


def has(text, variant):
    """Return whether the blocks of a technique are in `text`."""
    return set(reasons(variant)) <= set(reasons(text))


def read_copy(path):
    """Return the text of the user's copy. Raise UsageError or RuntimeError if nothing can join."""
    if not os.path.isfile(path):
        raise UsageError(f"--into {path}: there is no such file")
    if Path(path).resolve() in (ROOT / "src").glob("train*.py"):
        raise UsageError(f"--into {path}: this is a template; copy it, and name the copy")
    yours = Path(path).read_bytes().decode(*UTF8)
    if "\r\n" in yours:
        raise RuntimeError(
            f"--into {path}: it has Windows line ends; remove them: "
            f"sed -i 's/\\r$//' {shlex.quote(path)}"
        )
    return yours


def versions_of(path, yours, origin, base, variants, techniques, there, told):
    """Return the user's copy `yours` with the first k techniques, for each k from 0.

    `there` are the techniques that it has already; `origin` is the commit of `base` and `variants`.
    """
    plain = functools.reduce(
        lambda text, name: merge(text, base, variants[name], name)[0], there, base
    )  # what the copy would be without the user's edits
    texts = [yours]
    for name in techniques:
        if not variants[name]:
            raise RuntimeError(
                f"{name} is newer than the train.py that {path} was copied from; update {path} "
                f"first: git -C {shlex.quote(str(ROOT))} show {origin}:./src/train.py > old.py && "
                f"git merge-file {shlex.quote(path)} old.py "
                f"{shlex.quote(str(ROOT / 'src' / 'train.py'))}"
            )
        if name in there:
            told(f"{path} already has {name}")
            texts.append(texts[-1])
            continue
        merged, conflicts = merge(texts[-1], base, variants[name], name)
        if conflicts:
            raise RuntimeError(explain(conflicts, name, path, yours, base))
        for each in warnings(plain, variants[name], yours, merged):
            told(f"warning: {name} may not work as it should in {path}: {each}")
        texts.append(merged)
    if texts[-1] != yours and base != script("train", origin):  # the copy has another layout
        if command := layout.formatter_of(path, yours):
            texts = [layout.formatted(command, text) or text for text in texts]
    return texts


def without_later(path, texts, base, variants, techniques, there):
    """Return the texts of versions_of(), each without the techniques that follow it."""
    texts = list(texts)
    for k in range(len(techniques)):
        for other in [each for each in techniques[k:] if each in there]:
            texts[k], conflicts = merge(texts[k], variants[other], base, other)
            if conflicts:
                raise RuntimeError(
                    f"--verify needs {path} without {other}, and cannot take it "
                    "out, since you have changed lines of its blocks"
                )
    return texts


def add_to(path, techniques, approve=None, told=print):
    """Add techniques to the user's copy at `path` and tell about it, a line each.

    `approve(versions)` decides whether the copy is changed: versions[k] is the copy with the first
    k of the sorted techniques. Return False if it is not. Raise RuntimeError, and leave the copy
    as it is, if a technique does not join it.
    """
    yours = read_copy(path)
    origin = find_origin(yours)
    base = layout.relaid(script("train", origin), yours)
    variants = {name: layout.relaid(script(f"train_{name}", origin), base) for name in TECHNIQUES}
    there = [name for name in TECHNIQUES if variants[name] and has(yours, variants[name])]
    check([*techniques, *there])
    techniques = check(techniques)
    texts = versions_of(path, yours, origin, base, variants, techniques, there, told)
    final = texts[-1]
    joined = {*there, *techniques}
    added = [layout.relaid(variants[name], final) for name in joined]  # in the layout of the copy
    for each in hazards(final, [base, *added], joined):
        told(f"warning: {path}, {each}")
    if approve and not approve(without_later(path, texts, base, variants, techniques, there)):
        return False
    if final != yours:
        if Path(path).read_bytes().decode(*UTF8) != yours:
            raise RuntimeError(f"{path} has changed meanwhile; nothing was written")
        replace(path, final)
    for name in techniques:
        pairs = itertools.pairwise(final.split("\n"))
        places = [
            str(k)
            for k, (line, why) in enumerate(pairs, 1)
            if line.strip() == "# new #" and why.strip(" #") in reasons(variants[name])
        ]
        if places and name not in there:
            told(f"{path}: added {name} at lines {', '.join(places)}")
    if final != yours and origin:
        told(
            f"{path} was copied from an older train.py, and the techniques are of that time too: "
            + git("show", "-s", "--format=%h (%cs)", origin).strip()
        )
    return True


def warnings(base, variant, yours, merged):
    """Return a sentence for each name on which the technique and the user's lines disagree.

    A merge compares lines. This finds names that the user renamed, no longer reads or sets again.
    """

    def own(text, others):
        return [line for line in text.split("\n") if line not in others and line.strip()[:1] != "#"]

    def reading(name, lines):
        return [line.strip() for line in lines if re.search(rf"(?<![\w.]){name}\b(?! ?=)", line)]

    gone, new = own(base, yours.split("\n")), own(yours, base.split("\n"))
    # blocks in main(), without comments: those of whole functions have names of their own
    inside = variant[variant.find("\ndef main(") :]
    blocks = "\n".join(re.findall(r"^ +# new #\n(.*?)(?:\n\n|\Z)", inside, re.S | re.M))
    blocks = re.sub(" *#.*", "", blocks)
    sets = {
        name: line
        for line, each in re.findall(r"^( *([a-z][\w., ]*) = .*)", blocks, re.M)
        for name in each.split(", ")
    }
    found, derived = [], {name: {name} for name in sets}  # what train.py computes from them
    assigned = re.findall(r"^ *(\w+(?:, \w+)*) = (.*)", base, re.M)
    for name, value in ((name, value) for each, value in assigned for name in each.split(", ")):
        for names in derived.values():
            if names & set(re.findall(r"\w+", value)):
                names.add(name)
        if re.search(rf"\b{name}\b", blocks) and not re.search(rf"\b{name}\b", yours):
            found.append(f"it uses {name}, which your copy does not have")
    if 'add("--' in blocks and not re.search(r"(?<!def )build_parser\(", yours):
        found.append("it adds options to build_parser, which your copy does not call")
    for name in sorted(set().union(*derived.values()) & PARTS):
        lost = reading(name, gone)
        now = [line for each in derived.get(name, ()) for line in reading(each, new)]
        if lost and (
            len(lost) > len(now) if name in sets else not reading(name, yours.split("\n"))
        ):
            found.append(f"it changes {name}, and your copy does not have this line: {lost[0]}")
    for name in sorted(name for name in sets if name in PARTS or "." in name):
        found += [
            f"it sets {name}, and your copy sets it again later: {line.strip()}"
            for line in new
            if re.match(rf" *{name} = ", line)
            and not reading(name, [line])
            and merged.rfind(line) > merged.rfind(sets[name])
        ]
    return found


def build_parser():
    """Return the parser of the options, without those of the user's script."""
    parser = Parser("compose.sh", USAGE, ABOUT)
    parser.epilog = f"techniques: {' '.join(TECHNIQUES)}"
    add = parser.add_argument
    add("techniques", nargs="*", metavar="TECHNIQUE", help="in any order")
    add("--into", metavar="FILE", help="add them to FILE, your own edited copy of src/train.py")
    add("--verify", action="store_true", help="change FILE only if it still does the same")
    add("--anyway", action="store_true", help="with --verify: change FILE in any case")
    return parser


def parse(words):
    """Return (the options, those for the user's script, which come behind a --)."""
    parser, (own, options) = build_parser(), split(words)
    args, odd = parser.parse_known_intermixed_args(own)
    if odd:
        parser.error(f"{odd[0]}: options for your script stand behind --verify --")
    if not args.techniques:
        parser.error(f"name a technique: {' '.join(TECHNIQUES)}")
    if args.verify and not args.into:
        parser.error("--verify: it needs --into FILE")
    if (args.anyway or options) and not args.verify:
        parser.error("--anyway and options for your script need --verify")
    return args, options


def main(words):
    """Do what the command line says; return the exit status."""
    args, options = parse(words)
    path, techniques = args.into, args.techniques
    if not path:
        sys.stdout.buffer.write(join(techniques).encode(*UTF8))
        return 0
    same = True

    def approve(texts):
        nonlocal same
        try:
            import verify
        except ImportError as error:
            raise RuntimeError(
                "--verify needs the Python that runs your copy: PYTHON=/path/to/"
                f"python ./compose.sh ... ({error})"
            ) from None
        same = verify.verify(path, texts, check(techniques), options)
        return same or args.anyway

    tell = functools.partial(print, "compose.sh:", file=sys.stderr, flush=True)
    if not add_to(path, techniques, approve if args.verify else None, tell):
        tell(f"{path} is as it was")
    elif not args.verify:
        tell(
            "to see that it does the same as before:",
            shlex.join([str(ROOT / "compose.sh"), "--into", path, *techniques, "--verify", "--"]),
            "YOUR OPTIONS",
        )
    return 0 if same else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `./compose.sh amp | head` is no error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is tidied up
    try:
        sys.exit(main(sys.argv[1:]))
    except (RuntimeError, OSError) as error:
        print(f"compose.sh: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
