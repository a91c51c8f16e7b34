"""Check that a variant is its baseline plus marked blocks, to the letter."""

import ast
import collections
import itertools
import re
import textwrap

from report import tokens

MARKER = "# new #"


def strip_metadata_prefix(lines):
    """Remove the leading "# " from the lines of the PEP 723 block: TOML has comments too."""
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
    """Split a variant into the lines that it keeps and its marked blocks.

    Returns a list of ("kept", line number, line) and ("block", line number, lines), in order. A
    block starts at its marker and ends with the first blank line. Functions stand two blank lines
    apart, so the last of some blocks in a row ends in as many as stand before the first.
    """
    pieces, at, gap = [], 0, 0  # gap: the blank lines before the blocks in a row
    while at < len(lines):
        if lines[at].strip() == MARKER:
            end = at
            while end < len(lines) and lines[end].strip():
                end += 1
            blank = end
            while blank < len(lines) and not lines[blank].strip():
                blank += 1
            after = lines[blank] if blank < len(lines) else ""
            most = max(1, gap) if after.strip() != MARKER else 2 if after == MARKER else 1
            owned = min(blank - end, most)
            pieces.append(("block", at + 1, lines[at : end + owned]))
            at = end + owned
        else:
            gap = 0 if lines[at].strip() else gap + 1
            pieces.append(("kept", at + 1, lines[at]))
            at += 1
    return pieces


def problems(baseline, variant):
    """Return what is wrong, as sentences; none if `variant` is `baseline` plus marked blocks.

    Every line outside the blocks must be the baseline's next one. Lines of the baseline may be
    missing only where a block replaces them. A block must say why it is there, must have the indent
    of what it marks, and must not contain a line that the baseline has there.
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
                found.append(
                    f"line {number}: unmarked: {content.strip()!r} where the baseline "
                    f"has {old[at].strip() if at < len(old) else 'ended'!r}"
                )
                return found
            continue
        body = [line for line in content if line.strip()]
        indent = body[0][: len(body[0]) - len(MARKER)]
        if len(body) < 3 or not re.match(rf"{indent}# \w.*", body[1]):
            found.append(f"line {number}: the marker needs a line that says why, and a block")
            continue
        if any(not line.startswith(indent) for line in body):
            found.append(f"line {number}: the block leaves the marker's indent")
        if content[-1].strip() and number + len(content) <= len(new):
            found.append(f"line {number}: the block does not end in a blank line")
        # it replaces the baseline's lines up to those that the variant keeps next
        kept = [
            line
            for _, _, line in itertools.takewhile(
                lambda piece: piece[0] == "kept", pieces[index + 1 :]
            )
        ]
        if index + 1 < len(pieces) and not kept:
            continue  # another block follows directly: that one is checked for both
        start = best_match(old, at, kept)
        gone = old[at:start]
        found += [f"line {number}: {problem}" for problem in misplaced(gone, body[2:])]
        at = start
    if at < len(old):
        found.append(f"the baseline's line {at + 1}, {old[at].strip()!r}, is missing")
    return found


def best_match(old, at, kept):
    """Return the index from `at` on where `old` and `kept` have the longest common run."""

    def length(start):
        pairs = zip(old[start:], kept)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    if not kept:
        return len(old)
    starts = [start for start in range(at, len(old)) if old[start] == kept[0]] or [at]
    return max(starts, key=lambda start: (length(start), -start))


def misplaced(gone, body):
    """Return what is wrong with a block whose lines `body` replace the baseline's `gone`."""
    lines = [line for line in gone if line.strip()]
    if not lines:
        return []
    if gone[-1].strip() or any(not line.strip() for line in gone[:-1]):
        return [f"it replaces something else than the end of one paragraph: {lines[0]!r}"]
    found = [f"it replaces a comment: {line.strip()!r}" for line in lines if line.strip()[0] == "#"]
    found += [
        f"it contains the baseline's own line {line.strip()!r}"
        for line in body
        if line in lines and re.search(r"\w", line)
    ]
    if [line.strip() for line in lines] == [line.strip() for line in body]:
        found.append("it changes white space only")
    # a name that a replaced statement assigned or called must be in the block
    names = collections.Counter()
    try:
        statements = ast.parse(textwrap.dedent("\n".join(lines))).body
    except SyntaxError:
        return [*found, f"it replaces a part of a statement: {lines[0]!r}"]
    for statement in statements:
        for target in getattr(statement, "targets", [getattr(statement, "value", statement)]):
            target = getattr(target, "func", target)  # of a call: what is called
            names.update(
                node.id
                for node in itertools.islice(
                    (node for node in ast.walk(target) if isinstance(node, ast.Name)), 1
                )
            )
    code = "\n".join(re.sub("#.*", "", line) for line in body)
    for name, count in names.items():
        if len(re.findall(rf"\b{name}\b", code)) < count:
            found.append(f"the baseline's {name!r} is lost")
    return found


def added(baseline, variant):
    """Return how many tokens `variant` has more than `baseline`."""
    return tokens(variant) - tokens(baseline)
