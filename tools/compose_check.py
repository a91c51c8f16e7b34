"""What a merge into one's own copy cannot see: compose.sh --into asks it, before it writes.

    python compose_check.py TRAIN VARIANT YOURS MERGED

Prints a line for each name with which VARIANT's blocks and YOURS miss each other: what they set and
YOURS no longer reads as TRAIN does, or sets again behind them, has no effect, and what they read
and YOURS does not set ends in a NameError.
"""

import ast
import difflib
import re
import sys
from pathlib import Path

# what steps and loaders are made of; other names may well be left without a reader
PARTS = {"loading", "model", "net", "optimizer", "sampler", "train_loader", "val_loader",
         "val_sampler"}


def names(tree, context, lines=None):
    """{name: numbers of the lines} where `tree` reads or sets a name; of `lines` only, if given.

    `torch.backends.cudnn.benchmark`, too, is a name that is set.
    """
    found = {}
    for node in ast.walk(tree):
        whole = isinstance(node, ast.Name) or context is ast.Store and isinstance(
            node, ast.Attribute)
        if whole and isinstance(node.ctx, context) and (lines is None or node.lineno in lines):
            found.setdefault(ast.unparse(node), []).append(node.lineno)
    return found


def derived(tree, sources):
    """`sources` and all names that `tree` sets from them, directly or by others."""
    while True:
        more = {name for node in ast.walk(tree) if isinstance(node, ast.Assign)
                and names(node.value, ast.Load).keys() & sources
                for target in node.targets for name in names(target, ast.Store)} - sources
        if not more:
            return sources
        sources = sources | more


def misses(base, variant, yours, merged):
    """What to say of four scripts' texts: [str]. Raises SyntaxError where one is no Python."""
    texts = [base, variant, yours, merged]
    trees = [ast.parse(text) for text in texts]
    lines = [["", *(line.strip() for line in text.splitlines())] for text in texts]
    added = {number for kind, *_, start, end in difflib.SequenceMatcher(
        None, lines[0], lines[1], autojunk=False).get_opcodes() if kind in ("insert", "replace")
        for number in range(start, end)}
    reads, mine = names(trees[0], ast.Load), names(trees[2], ast.Load)
    sets, kept = names(trees[1], ast.Store, added), names(trees[2], ast.Store)
    found = []
    for name in sorted(derived(trees[0], set(sets)) & reads.keys() & kept.keys() & PARTS):
        lost = [lines[0][number] for number in reads[name] if lines[0][number] not in lines[2]]
        new = [line for line in (lines[2][number] for number in mine.get(name, ()))
               if line not in lines[0] and not re.fullmatch(rf"{name}\.(train|eval)\(\)", line)]
        if lost and (len(lost) > len(new) if name in sets else name not in mine):
            found.append(f"sets {name}, which is no longer read as in train.py's line: {lost[0]}")
    for name in sorted(name for name in sets if name in PARTS or "." in name):
        there = names(trees[3], ast.Store).get(name, ())
        block = [number for number in there if lines[3][number] in
                 {lines[1][number] for number in sets[name]}]
        for number in there:
            if block and number > max(block) and lines[3][number] not in lines[1]:
                found.append(f"sets {name}, which is set again behind it: {lines[3][number]}")
    needed, had = names(trees[1], ast.Load, added), names(trees[0], ast.Store)
    found += [f"reads {name}, which is not set there" for name in sorted(needed.keys() & had.keys())
              if name not in kept and (name not in sets or min(needed[name]) <= min(sets[name]))]
    return found


if __name__ == "__main__":
    try:
        for miss in misses(*(Path(path).read_text() for path in sys.argv[1:5])):
            print(miss)
    except SyntaxError:
        pass  # Python itself will say so
