"""The checker of the first promise: a variant is its baseline plus marked blocks, to the letter."""

import ast
import collections
import itertools
import re
import textwrap

MARKER = "# new #"


def strip_metadata_prefix(lines):
    """Takes the leading "# " from the lines of the PEP 723 block, where TOML has comments too."""
    inside, result = False, []
    for line in lines:
        if line == "# /// script":
            inside = True
            result.append(line)
        elif line == "# ///":
            inside = False
            result.append(line)
        else:
            result.append(re.sub("^# ?", "", line) if inside else line)
    return result


def split(lines):
    """Cuts a variant into what it keeps and its marked blocks.

    Returns a list of ("kept", line number, line) and ("block", line number, lines), in order. A
    block runs from its marker to the first blank line; that blank line belongs to it.
    """
    pieces, at = [], 0
    while at < len(lines):
        if lines[at].strip() == MARKER:
            end = at
            while end < len(lines) and lines[end].strip():
                end += 1
            pieces.append(("block", at + 1, lines[at:end + 1]))
            at = end + 1
        else:
            pieces.append(("kept", at + 1, lines[at]))
            at += 1
    return pieces


def problems(baseline, variant):
    """What keeps the text `variant` from being the text `baseline` plus marked blocks: sentences.

    Every line outside the blocks has to be the baseline's next one. Only where a block stands may
    lines of the baseline be missing: the block takes their place. A block has to say why, has to
    stand at the indent of what it marks, and may not hold a line that the baseline has there.
    """
    old = strip_metadata_prefix(baseline.splitlines())
    new = strip_metadata_prefix(variant.splitlines())
    found = []
    if variant.endswith("\n") != baseline.endswith("\n"):
        found.append("the end of the file differs")
    if MARKER in (line.strip() for line in old):
        found.append("the baseline holds a marker")
    for number, line in enumerate(new, 1):
        if re.sub(r"\W", "", line.lower()) == "new" and line.strip() != MARKER and "#" in line:
            found.append(f"line {number}: {line.strip()!r} is not the marker")
    at = 0  # the next line of the baseline
    pieces = split(new)
    for index, (kind, number, content) in enumerate(pieces):
        if kind == "kept":
            if at < len(old) and old[at] == content:
                at += 1
            else:
                found.append(f"line {number}: unmarked: {content.strip()!r} where the baseline "
                             f"has {old[at].strip() if at < len(old) else 'ended'!r}")
                return found
            continue
        body = [line for line in content if line.strip()]
        indent = body[0][:len(body[0]) - len(MARKER)]
        if len(body) < 3 or not re.match(rf"{indent}# \w.*", body[1]):
            found.append(f"line {number}: the marker needs a line that says why, and a block")
            continue
        if any(not line.startswith(indent) for line in body):
            found.append(f"line {number}: the block leaves the marker's indent")
        if content[-1].strip() and number + len(content) <= len(new):
            found.append(f"line {number}: the block does not end in a blank line")
        # the lines that it takes the place of: up to where the text that is kept next goes on
        kept = [line for _, _, line in itertools.takewhile(lambda piece: piece[0] == "kept",
                                                           pieces[index + 1:])]
        if index + 1 < len(pieces) and not kept:
            continue  # another block right behind it: that one is held to what both replace
        start = best_match(old, at, kept)
        gone = old[at:start]
        found += [f"line {number}: {problem}" for problem in misplaced(gone, body[2:])]
        at = start
    if at < len(old):
        found.append(f"the baseline's line {at + 1}, {old[at].strip()!r}, is missing")
    return found


def best_match(old, at, kept):
    """The line of `old`, from `at` on, behind which most of the run `kept` follows."""
    def length(start):
        pairs = zip(old[start:], kept)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not kept:
        return len(old)
    return max(range(at, len(old) + 1), key=lambda start: (length(start), -start))


def misplaced(gone, body):
    """What is wrong with a block whose lines `body` stand where `gone` stood in the baseline."""
    lines = [line for line in gone if line.strip()]
    if not lines:
        return []
    if gone[-1].strip() or any(not line.strip() for line in gone[:-1]):
        return [f"more than a paragraph, or less than one to its end, gives way: {lines[0]!r}"]
    found = [f"a comment gives way: {line.strip()!r}" for line in lines if line.strip()[0] == "#"]
    found += [f"under the marker stands the baseline's own {line.strip()!r}"
             for line in body if line in lines and re.search(r"\w", line)]
    if [line.strip() for line in lines] == [line.strip() for line in body]:
        found.append("the block changes white space only")
    # what a statement that gives way assigned or called upon has to turn up in the block
    names = collections.Counter()
    try:
        statements = ast.parse(textwrap.dedent("\n".join(lines))).body
    except SyntaxError:
        return [*found, f"a part of a statement gives way: {lines[0]!r}"]
    for statement in statements:
        for target in getattr(statement, "targets", [getattr(statement, "value", statement)]):
            names.update(node.id for node in itertools.islice(
                (node for node in ast.walk(target) if isinstance(node, ast.Name)), 1))
    code = "\n".join(re.sub("#.*", "", line) for line in body)
    for name, count in names.items():
        if len(re.findall(rf"\b{name}\b", code)) < count:
            found.append(f"what became of {name!r}, which gave way?")
    return found


def growth(baseline, variant):
    """By how many lines with text the variant is longer than the baseline."""
    return sum(1 for line in variant.splitlines() if line.strip()) - sum(
        1 for line in baseline.splitlines() if line.strip())
