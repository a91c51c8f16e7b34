"""Bring train.py and its variants into the layout of a user's copy, which a formatter may have set.

Two texts are compared unit by unit: a statement (of a compound one its first line), a comment on a
line of its own, or blank lines. A unit is the same however its line is broken, quoted or bracketed.
"""

import ast
import difflib
import functools
import io
import shutil
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

SKIPPED = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
# what the first line of a compound statement needs to be one that Python can parse
FRAMES = {
    **dict.fromkeys(["elif", "else"], "if 0: pass\n{}\n pass"),
    **dict.fromkeys(["except", "finally"], "try: pass\n{}\n pass"),
    "try": "{}\n pass\nfinally: pass",
    "@": "{}\ndef f(): pass",
    "case": "match 0:\n {}\n  pass",
}


@functools.cache  # most statements are in all scripts
def meaning(source):
    """Return a statement, or the first line of a compound one, without its layout."""
    word = "@" if source[0] == "@" else source.split(":")[0].split()[0]
    frames = [FRAMES[word]] if word in FRAMES else ["{}", "{}\n pass"]
    for frame in frames:
        try:
            return ast.dump(ast.parse(frame.format(source)))
        except SyntaxError:
            continue
    return " ".join(source.split())


@functools.lru_cache(maxsize=256)
def units(text):
    """Return the units of a script: [(its meaning, its lines)]. Raise SyntaxError if it has none."""
    lines, found = text.splitlines(keepends=True), []
    done = depth = 0  # lines that are in `found`; indents

    def add(key, end):
        nonlocal done
        while done < end and not lines[done].strip():  # blank lines above are a unit
            blank = done
            while done < end and not lines[done].strip():
                done += 1
            found.append((done - blank, "".join(lines[blank:done])))
        if done < end:
            found.append((key, "".join(lines[done:end])))
            done = end

    comments, start = [], None
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                if start is None:  # on a line of its own
                    add((token.start[1], token.string.strip()), token.start[0])
                else:
                    comments.append(token.string.strip())
            elif token.type == tokenize.NEWLINE:
                source = "".join(lines[start[0] - 1 : token.end[0]])[start[1] :]
                depth = start[1]
                key = depth, meaning(source.strip()), *comments
                add(key, token.start[0])
                comments, start = [], None
            elif token.type not in SKIPPED and start is None:
                start = token.start
    except (tokenize.TokenError, IndentationError) as error:
        raise SyntaxError(str(error)) from None
    add("", len(lines))
    return found


def relaid(text, like):
    """Return `text` with the lines of `like` for each unit that both have."""
    try:
        mine, theirs = units(text), units(like)
    except SyntaxError:
        return text
    result = []
    matcher = difflib.SequenceMatcher(
        None, [key for key, _ in mine], [key for key, _ in theirs], autojunk=False
    )
    for tag, i, j, k, m in matcher.get_opcodes():
        result += [lines for _, lines in (theirs[k:m] if tag == "equal" else mine[i:j])]
    return "".join(result)


def difference(text, other):
    """Return how many units only one of two scripts has."""
    try:
        one, two = ({}, {})
        for count, each in ((one, text), (two, other)):
            for key, _ in units(each):
                count[key] = count.get(key, 0) + 1
    except SyntaxError:
        return sys.maxsize
    return sum(abs(one.get(key, 0) - two.get(key, 0)) for key in {*one, *two})


# ------------------------------------------------------------------------------ formatters
def formatters(path):
    """Yield commands that format standard input: with the settings of `path`, then widths."""
    ruff = shutil.which("ruff") or shutil.which("ruff", path=Path(sys.executable).parent)
    black = shutil.which("black") or shutil.which("black", path=Path(sys.executable).parent)
    if ruff:
        yield [ruff, "format", f"--stdin-filename={path}", "-"]
    if black:
        yield [black, "-q", f"--stdin-filename={path}", "-"]
    for width in (f"--line-length={width}" for width in (88, 100, 79, 120)):
        if ruff:
            yield [ruff, "format", "--isolated", width, "-"]
            single = ["--config", "format.quote-style='single'"]
            yield [ruff, "format", "--isolated", width, *single, "-"]
        if black:
            yield [black, "-q", width, "-"]
            yield [black, "-q", "-S", width, "-"]


def formatted(command, text):
    """Return `text` as a formatter writes it, or None if it fails."""
    with tempfile.TemporaryFile() as file:  # a pipe breaks if the formatter does not read it
        file.write(text.encode("utf-8", "surrogateescape"))
        file.seek(0)
        done = subprocess.run(command, stdin=file, capture_output=True)
    return None if done.returncode else done.stdout.decode("utf-8", "surrogateescape")


def formatter_of(path, text):
    """Return the command of the formatter that has written `text`, or None."""
    return next((each for each in formatters(path) if formatted(each, text) == text), None)
