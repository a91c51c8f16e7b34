"""Edits of the arguments of a call, or of the items of a dict, in the user's own style."""

import ast
import io
import tokenize

WIDTH = 100  # a file whose lines are shorter gets no longer ones


class Refused(Exception):
    """Why something cannot be written safely, as a clause for the report."""


def indent_of(line):
    return line[: len(line) - len(line.lstrip(" \t\f"))]


class Arguments:
    """The part of a Source that knows calls and displays."""

    def tail(self, node):
        """Return (place, is_first, has_comma, breaks) where a call or a display can grow."""
        text = self.text(node)
        tokens = [
            each
            for each in tokenize.generate_tokens(io.StringIO(f"({text}\n)").readline)
            if each.type
            not in (
                tokenize.NL,
                tokenize.COMMENT,
                tokenize.NEWLINE,
                tokenize.ENDMARKER,
                tokenize.INDENT,
                tokenize.DEDENT,
            )
        ]
        last, closing = tokens[-3], tokens[-2]
        line, column = self.start(node)
        row, end = last.end
        place = line + row - 1, end + (column - 1 if row == 1 else 0)
        breaks = closing.start[0] > row
        return place, last.string in ("(", "{"), last.string == ",", breaks

    def grow(self, node, items, first):
        """Return the edit that adds items to a call or display whose first item is `first`."""
        place, is_first, has_comma, breaks = self.tail(node)
        row, column = place
        text, hangs = ", ".join(items), breaks and has_comma and first is not None
        line = self.lines[row].rstrip("\r\n")
        fits = len(line) + len(text) + 3 <= self.limit()
        note = line[column:] if line[column:].lstrip().startswith("#") else ""  # on the last item
        if first is None or is_first or (fits and not hangs and not note):
            return (place, place), ("" if is_first else " " if has_comma else ", ") + text
        top, left = self.start(first)
        space = indent_of(self.lines[top])
        if self.lines[top][:left].strip():  # the first item stands behind the bracket
            is_far = left + len(text) + 2 > WIDTH
            space += 2 * self.unit(space) if is_far else " " * (left - len(space))
        span, start = (place, (row, column + len(note))), ("" if has_comma else ",") + note
        if hangs:
            return span, start + "".join(f"{self.end}{space}{each}," for each in items)
        return span, f"{start}{self.end}{space}{text}"

    def quote(self):
        """Return the quote that most texts of the file have."""
        text = "".join(self.before)
        return "'" if text.count("'") > text.count('"') else '"'

    def limit(self):
        return max(WIDTH, *map(len, self.before))

    def renew(self, call, node, text):
        """Return the edit that gives an unpacked argument a new text, on a line of its own if long.

        The two stars stand in front of the node.
        """
        (row, column), stop = self.start(node), self.stop(node)
        line = self.lines[row].rstrip("\r\n")
        head = line[:column]
        if (
            head.endswith("**")
            and len(line) + len(text) - (stop[1] - column) > self.limit()
            and (stop[0] == row and head[:-2].strip())
        ):
            place = row, len(head[:-2].rstrip())
            (top, end), space = self.stop(call.func), indent_of(self.lines[row])
            if top == row or self.lines[top][end:].strip() != "(":  # aligned to the bracket
                space = indent_of(self.lines[top])
                space += " " * (end + 1 - len(space))
            return (place, stop), f"{self.end}{space}**{text}"
        return node, text

    def give(self, call, new, positional=()):
        """Return the edits that give a call keyword arguments, {name: text}.

        One that is there is replaced where it is: as a keyword, by its position (`positional` are
        the names), in a dict that is written there, or in a dict that is unpacked.
        """
        edits, new = [], dict(new)
        given = {each.arg: each.value for each in call.keywords if each.arg}
        for name in [*new]:
            place = [*positional].index(name) if name in positional else None
            if name in given:
                edits.append((given[name], new.pop(name)))
            elif place is not None:
                if any(isinstance(each, ast.Starred) for each in call.args):
                    raise Refused(f"{self.where(call)} unpacks a list of arguments")
                edits.append((call.args[place], new.pop(name)))
        spreads = [each.value for each in call.keywords if each.arg is None]
        if new and spreads:
            quote = self.quote()
            items = ", ".join(f"{quote}{name}{quote}: {value}" for name, value in new.items())
            edits.append(self.renew(call, spreads[-1], f"{{**{self.text(spreads[-1])}, {items}}}"))
        elif new:
            first = min(
                [*call.args, *(each.value for each in call.keywords)], key=self.start, default=None
            )
            first = next((each for each in call.keywords if each.value is first), first)
            sign = self.sign(call)
            edits.append(self.grow(call, [f"{key}{sign}{new[key]}" for key in new], first))
        return edits

    def sign(self, call):
        """Return the equals sign of a call's keywords, with spaces if they all have them."""
        named = [each for each in call.keywords if each.arg]
        texts = [self.text(each)[len(each.arg) :] for each in named]
        return " = " if texts and all(text.startswith(" = ") for text in texts) else "="
