"""What a merge into one's own copy cannot see: compose.sh --into asks it, before it writes.

    python compose_check.py TRAIN VARIANT YOURS

For names that VARIANT's blocks set and TRAIN reads (net, sampler, rank, ...), prints a line for each
that YOURS sets but no longer reads as TRAIN does: what the technique puts there has then no effect.
"""

import ast
import difflib
import sys
from pathlib import Path


def names(tree, context, lines=None):
    """{name: numbers of the lines} where `tree` reads or sets a name; of `lines` only, if given."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, context) and (
                lines is None or node.lineno in lines):
            found.setdefault(node.id, []).append(node.lineno)
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


def unread(base, variant, yours):
    """[(name, the line of `base` that reads it and is lost)] of three scripts' texts.

    Raises SyntaxError where one is no Python.
    """
    trees = [ast.parse(text) for text in (base, variant, yours)]
    lines = [[line.strip() for line in text.splitlines()] for text in (base, variant, yours)]
    added = [number for kind, *_, start, end in difflib.SequenceMatcher(
        None, lines[0], lines[1], autojunk=False).get_opcodes() if kind in ("insert", "replace")
        for number in range(start + 1, end + 1)]
    reads, mine = names(trees[0], ast.Load), names(trees[2], ast.Load)
    kept = names(trees[2], ast.Store).keys() & reads.keys()
    direct = names(trees[1], ast.Store, set(added)).keys() & kept
    found = []
    for name in sorted(derived(trees[0], direct) & kept):
        lost = [lines[0][number - 1] for number in reads[name]
                if lines[0][number - 1] not in lines[2]]
        new = [number for number in mine.get(name, ()) if lines[2][number - 1] not in lines[0]]
        if lost and (len(lost) > len(new) if name in direct else not mine.get(name)):
            found.append((name, lost[0]))
    return found


if __name__ == "__main__":
    try:
        for name, line in unread(*(Path(path).read_text() for path in sys.argv[1:4])):
            print(f"{name}, which is no longer read as in train.py's line: {line}")
    except SyntaxError:
        pass  # Python itself will say so
