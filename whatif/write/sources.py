"""The user's source files: find a statement or a call, and edit their text exactly.

An edit changes whole lines or the text of one expression. Indents, quotes, line ends, tabs and all
other lines stay as they are. Lines remember the number that they had, so that edits of several
techniques can follow each other. Nothing here needs torch, and nothing writes a file.
"""

import ast
import codecs
import difflib
import io
import os
import re
import tokenize

from . import arguments
from .arguments import Refused, indent_of

LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")  # as Python counts lines
SUBSCRIPT = re.compile(r"\['([^'\"\\]*)'\]")  # as ast.unparse() writes it
MARK = "# new #"
PACKAGES = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
LOOPS = ast.For, ast.AsyncFor, ast.While
LONG = 10_000  # lines


class Text:
    """The text of one file, as it was and as it shall be, and the places in it."""

    def __init__(self, path, shown):
        self.path, self.shown = path, shown
        with open(path, "rb") as file:
            data = file.read()
        self.mode = os.stat(path).st_mode
        self.bom = data.startswith(codecs.BOM_UTF8)
        self.encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0].replace("-sig", "")
        text = data.removeprefix(codecs.BOM_UTF8).decode(self.encoding)
        self.before = self.lines = LINES.findall(text)
        if any(line.endswith("\r") for line in self.lines):
            raise Refused(f"{shown} has lines that end with a carriage return alone")
        self.lines, self.origins = [*self.lines], [*range(1, len(self.lines) + 1)]
        self.end = "\r\n" if self.lines and self.lines[0].endswith("\r\n") else "\n"
        self.parse()

    # ---- states
    def kept(self):
        """Return the text as it is now, to be put back."""
        return [*self.lines], [*self.origins]

    def put_back(self, kept):
        self.lines, self.origins = [*kept[0]], [*kept[1]]
        self.parse()

    def is_changed(self):
        return self.lines != self.before

    def encoded(self):
        """Return the new text as bytes."""
        return codecs.BOM_UTF8 * self.bom + "".join(self.lines).encode(self.encoding)

    def parse(self):
        """Parse the text; SyntaxError says what is wrong with it."""
        self.tree = ast.parse("".join(self.lines))
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }

    # ---- places
    def column(self, line, column):
        """Return a column in characters, of one in bytes; lines count from 1."""
        return len(self.lines[line - 1].encode()[:column].decode())

    def start(self, node):
        """Return (index of the line, column) where a node begins."""
        return node.lineno - 1, self.column(node.lineno, node.col_offset)

    def stop(self, node):
        return node.end_lineno - 1, self.column(node.end_lineno, node.end_col_offset)

    def text(self, node):
        """Return a node's own text."""
        (line, column), (last, end) = self.start(node), self.stop(node)
        if line == last:
            return self.lines[line][column:end]
        return "".join(
            [self.lines[line][column:], *self.lines[line + 1 : last], self.lines[last][:end]]
        )

    def ancestors(self, node):
        """Return the nodes around a node, innermost first."""
        found = []
        while node := self.parents.get(node):
            found.append(node)
        return found

    def statement_of(self, node):
        """Return the innermost statement that a node is in."""
        return next(each for each in [node, *self.ancestors(node)] if isinstance(each, ast.stmt))

    def scope_of(self, node):
        """Return the function that a node is in, or the module."""
        return next(
            each for each in self.ancestors(node) if isinstance(each, (*FUNCTIONS, ast.Module))
        )

    def statements_at(self, line):
        """Return the statements at a line of the file as it was, innermost first."""
        if line not in self.origins:
            raise Refused(f"{self.shown}:{line} is no line of its own")
        now = self.origins.index(line) + 1
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and first_line(node) <= now <= node.end_lineno
        ]
        if not found:
            raise Refused(f"{self.shown}:{line} has no statement")
        return sorted(found, key=lambda node: (-first_line(node), node.end_lineno, node.col_offset))

    def statement_at(self, line):
        """Return the innermost statement at a line of the file as it was."""
        return self.statements_at(line)[0]

    def calls(self, line, name):
        """Return the calls of `name` in a statement at a line of the file as it was."""
        for statement in self.statements_at(line):
            found = [
                node
                for node in heads(statement)
                if isinstance(node, ast.Call) and ast.unparse(node.func) == name
            ]
            if found:
                return found
        raise Refused(f"{self.shown}:{line} does not call {name} by this name")

    def call_of(self, line, given):
        """Return the call at a line that gave these arguments; a line may have two like it.

        Raise Refused if its statement shares the line with another one.
        """
        calls = [
            node
            for each in self.statements_at(line)
            for node in heads(each)
            if isinstance(node, ast.Call) and " ".join(ast.unparse(node).split()) == given["call"]
        ]
        call = (calls or self.calls(line, given["function"]))[0]
        self.need_alone(self.statement_of(call))
        return call

    def where(self, node):
        """Return "file:line" of a node, with the number that its line had."""
        return f"{self.shown}:{self.origins[node.lineno - 1] or node.lineno}"

    def is_alone(self, statement):
        """Return whether a statement shares its lines with no other one."""
        (line, column), (last, end) = self.start(statement), self.stop(statement)
        before, after = self.lines[line][:column], self.lines[last][end:]
        return not before.strip() and (not after.strip() or after.lstrip().startswith("#"))

    def own_lines(self):
        """Return the lines that were there before."""
        return [line for line, number in zip(self.lines, self.origins) if number]

    def written_at(self, statement, is_below):
        """Return our new lines right above a statement, or right below it, without their indents."""
        index = statement.end_lineno if is_below else self.top_of(statement) - 1
        found = []
        while 0 <= index < len(self.lines) and self.origins[index] is None:
            found.append(self.lines[index].strip())
            index += 1 if is_below else -1
        return found

    def header(self, index):
        """Return the index of the mark that stands right above a line, or of the line."""
        top = index
        while (
            top and self.origins[top - 1] is None and self.lines[top - 1].lstrip().startswith("#")
        ):
            top -= 1
            if self.lines[top].strip() == MARK:
                return top
        return index

    def top_of(self, statement):
        """Return the index of a statement's first line, with the mark and comment right above it."""
        index = first_line(statement) - 1
        indent, ends = indent_of(self.lines[index]), {0}
        ends |= {node.end_lineno for node in ast.walk(self.tree) if isinstance(node, ast.stmt)}
        ends = max(each for each in ends if each <= index)  # of the statement before it
        index = self.header(index)
        while index > ends and re.match(rf"{indent}#(?! ?(%%|In\[))", self.lines[index - 1]):
            index -= 1  # but not above the mark of a notebook's cell
        return index

    def need_alone(self, statement):
        if not self.is_alone(statement):
            raise Refused(f"{self.where(statement)} shares its line with another statement")


class Source(Text, arguments.Arguments):
    """A file that can be edited."""

    def apply(self, edits):
        """Replace the text of nodes: [(node or place, text)]; a place is (start, stop)."""
        spans = [
            (*((self.start(each), self.stop(each)) if isinstance(each, ast.AST) else each), text)
            for each, text in edits
        ]
        for (line, column), (last, end), text in sorted(spans, key=lambda each: each[:2])[::-1]:
            new = self.lines[line][:column] + text + self.lines[last][end:]
            parts, count = LINES.findall(new), last - line + 1
            origins = self.origins[line : last + 1]
            kept = [
                origins[min(number, count - 1)] if number < count else None
                for number in range(len(parts))
            ]
            self.lines[line : last + 1], self.origins[line : last + 1] = parts, kept
        self.parse()

    def insert(self, index, *lines):
        """Insert lines, without their ends, at an index."""
        if index and index == len(self.lines) and not self.lines[-1].endswith("\n"):
            self.lines[-1] += self.end
        self.lines[index:index] = [line + self.end if line.strip() else self.end for line in lines]
        self.origins[index:index] = [None] * len(lines)

    def block(self, index, stop, *reasons):
        """Mark the lines from `index` to `stop` as a block: a comment above, an empty line below.

        If a mark stands above already, the reasons join it.
        """
        indent = indent_of(self.lines[index])
        if (
            stop < len(self.lines)
            and self.lines[stop].strip()
            and (len(indent_of(self.lines[stop])) >= len(indent))
        ):
            self.insert(stop, "")
        top = self.header(index)
        told = [f"{indent}# {reason}" for reason in reasons]
        there = [line.strip() for line in self.lines[top:index]]
        told = [line for line in told if line.strip() not in there]
        if not there and self.is_in_block(index, indent):
            self.insert(index, "")
            index += 1
        self.insert(index, *([] if there else [f"{indent}{MARK}"]), *told)
        self.parse()

    def is_in_block(self, index, indent):
        """Return whether the line above is ours and no head of this one: its block ends there."""
        above = self.lines[index - 1] if index and self.origins[index - 1] is None else ""
        return bool(above.strip()) and len(indent_of(above)) >= len(indent)

    def mark(self, statement, *reasons):
        """Mark a statement that was changed."""
        self.block(first_line(statement) - 1, statement.end_lineno, *reasons)

    def put(self, index, indent, lines, *reasons):
        """Insert a block of new lines in front of the line with an index."""
        lines = [SUBSCRIPT.sub(rf"[{self.quote()}\1{self.quote()}]", line) for line in lines]
        self.insert(index, *(indent + self.unit_for(line, indent) for line in lines))
        self.block(index, index + len(lines), *reasons)

    def unit_for(self, line, indent):
        """Return a line whose indents of four spaces are those of the file below an indent."""
        depth = (len(line) - len(line.lstrip(" "))) // 4
        return depth * self.unit(indent) + line.lstrip(" ")

    def unit(self, indent):
        """Return the indent of one more level below an indent: some files mix tabs and spaces."""
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            if (
                isinstance(node, ast.stmt)
                and isinstance(body, list)
                and (body[0].lineno > node.lineno)
            ):
                outer, inner = (indent_of(self.lines[each.lineno - 1]) for each in (node, body[0]))
                more = inner.removeprefix(outer)
                if inner.startswith(outer) and more and {*more} <= {*(indent or more)}:
                    return more
        return "    "

    def put_before(self, statement, lines, *reasons):
        """Insert a block above a statement and its comment."""
        self.need_alone(statement)
        index = self.top_of(statement)
        self.put(index, indent_of(self.lines[index]), lines, *reasons)

    def put_after(self, statement, lines, *reasons):
        """Insert a block below a statement."""
        self.need_alone(statement)
        indent = indent_of(self.lines[first_line(statement) - 1])
        index = statement.end_lineno
        if self.header(first_line(statement) - 1) != first_line(statement) - 1 and not (
            index < len(self.lines) and self.origins[index] is None
        ):
            self.insert(index, "")  # the statement's own block ends here
        if (
            index < len(self.lines)
            and not self.lines[index].strip()
            and (self.origins[index] is None)
        ):  # below another block
            index += 1
        self.put(index, indent, lines, *reasons)

    def wrap(self, statement, head, after, *reasons):
        """Put a statement below `head` (with ...:), and lines below it; mark all as a block."""
        self.need_alone(statement)
        first, stop = first_line(statement) - 1, statement.end_lineno
        inside = {
            line
            for node in ast.walk(statement)
            if isinstance(node, (ast.Constant, ast.JoinedStr))
            for line in range(node.lineno + 1, node.end_lineno + 1)
        }
        indent = indent_of(self.lines[first])
        unit, after = self.unit(indent), [indent + self.unit_for(line, indent) for line in after]
        for number in range(first, stop):
            if number + 1 not in inside and self.lines[number].strip():  # no line of a long text
                line = self.lines[number]
                self.lines[number] = (
                    indent + unit + line.removeprefix(indent)
                    if line.startswith(indent)
                    else unit + line
                )
        self.insert(stop, *after)
        self.insert(first, indent + head)
        self.block(first, stop + 1 + len(after), *reasons)


def first_line(node):
    """Return the first line of a statement, with its decorators."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def heads(statement):
    """Return the nodes of a statement without those of the statements in it."""
    found, todo = [], [statement]
    while todo:
        node = todo.pop(0)
        found.append(node)
        todo += [
            each
            for each in ast.iter_child_nodes(node)
            if not isinstance(each, (ast.stmt, ast.ExceptHandler, ast.match_case))
        ]
    return found


class Sources:
    """The user's files that edits may change, by path."""

    def __init__(self, cwd):
        self.cwd, self.files = os.path.realpath(cwd), {}

    def find(self, at):
        """Return (the Source, the line) of "file:line"; Refused says why it cannot be changed."""
        file, _, line = at.rpartition(":")
        path = os.path.realpath(os.path.join(self.cwd, file))
        if any(name in path for name in PACKAGES):
            raise Refused(f"{file} is an installed package's")
        if path not in self.files:
            shown = os.path.relpath(path, self.cwd)
            try:
                self.files[path] = Source(path, path if shown.startswith("..") else shown)
            except (OSError, SyntaxError, ValueError, LookupError) as error:
                raise Refused(f"{file} cannot be read as Python: {error}") from None
        return self.files[path], int(line)

    def kept(self):
        return {path: each.kept() for path, each in self.files.items()}

    def put_back(self, kept):
        for path, each in [*self.files.items()]:
            if path in kept:
                each.put_back(kept[path])
            else:
                del self.files[path]

    def changed(self):
        """Return the Sources that are changed, by their names."""
        return sorted(
            (each for each in self.files.values() if each.is_changed()), key=lambda each: each.shown
        )


def hunks(before, after):
    """Return an iterator of a unified diff's lines, as difflib.unified_diff gives them.

    That takes lines which are frequent in a long file, such as `)`, for changed ones. So does this
    in a file that is so long that it would take a minute.
    """
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=len(before) > LONG)
    for group in matcher.get_grouped_opcodes(3):
        (_, top, _, new_top, _), (_, _, stop, _, new_stop) = group[0], group[-1]
        yield f"@@ -{span(top, stop)} +{span(new_top, new_stop)} @@\n"
        for kind, first, last, new_first, new_last in group:
            if kind == "equal":
                yield from (f" {line}" for line in before[first:last])
                continue
            yield from (f"-{line}" for line in before[first:last])
            yield from (f"+{line}" for line in after[new_first:new_last])


def span(start, stop):
    """Return lines from index `start` to `stop` as a unified diff names them."""
    return f"{start + (stop > start)},{stop - start}".removesuffix(",1")


def diff(source, name):
    """Return the unified diff of a file, as bytes; `name` is its path in the patch."""
    lines = [b"--- a/%s\n+++ b/%s\n" % (os.fsencode(name), os.fsencode(name))]
    found = [*hunks(source.before, source.lines)]
    for line in found:
        encoded = line.encode(source.encoding)
        lines.append(
            encoded if encoded.endswith(b"\n") else encoded + b"\n\\ No newline at end of file\n"
        )
    if source.bom and found and any(line[1:] == source.before[0] for line in found):
        at = next(
            number
            for number, line in enumerate(lines)
            if number
            and line[:1] in b" -+"
            and line[1:] == source.before[0].encode(source.encoding)
        )
        lines[at] = lines[at][:1] + codecs.BOM_UTF8 + lines[at][1:]
    return b"".join(lines)
