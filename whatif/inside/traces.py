"""The user's lines that have torch.jit trace a model, such as TensorBoard's add_graph."""

from whatif.write.sources import FUNCTIONS, LOOPS

from .places import statement_of, statements

MANY = 20  # lines that are noted


def around(file, line, kinds):
    """Return the statements of some kinds that a line is in, the innermost last."""
    found = [node for node in statements(file) if isinstance(node, kinds)]
    return sorted(
        (node for node in found if node.lineno <= line <= node.end_lineno),
        key=lambda node: node.lineno,
    )


def function_around(file, line):
    """Return the first line of the innermost function that a line is in, or 0."""
    return max((node.lineno for node in around(file, line, FUNCTIONS)), default=0)


class Traces:
    """The lines of traces, each with those that called its functions, from it outwards."""

    def __init__(self, places, optimizers):
        self.places, self.optimizers = places, optimizers  # of the script, as they are made
        self.found, self.seen = [], set()
        self.is_in_model = False

    def stack(self):
        """Return (file, line) of the statements of the user's that run now, innermost first."""
        return [
            (frame.f_code.co_filename, getattr(statement_of(frame, line), "lineno", line))
            for frame, line in self.places.frames()
        ]

    def call(self, steps, original, module, *args, **kwargs):
        """Call a module in a trace; note the line if it is the outermost one."""
        if self.is_in_model:
            return original(module, *args, **kwargs)
        self.note(not steps)
        self.is_in_model = True
        try:
            return original(module, *args, **kwargs)
        finally:
            self.is_in_model = False

    def note(self, is_early):
        """Note a line that traces a model, once before the training and once in it."""
        at = dict(early=is_early, first=not self.optimizers)
        lines = self.stack()
        if (is_early, *lines) not in self.seen and len(self.found) < MANY:
            self.seen.add((is_early, *lines))
            self.found.append(at | dict(at=self.places.line_of(*lines[0]), lines=lines))

    def begin(self):
        """In the first step, leave out the lines that have called the training as well."""
        now = self.stack()
        for each in self.found:
            each["lines"] = [line for line in each["lines"] if line not in now]

    def sites(self):
        """Return {at, text, is_early} of each line that traces."""
        sites = [each["at"] | dict(is_early=each["early"]) for each in self.found]
        return [each for number, each in enumerate(sites) if each not in sites[:number]]

    def of(self, model):
        """Return {below, late}: the line below which a model may be compiled, and other places.

        That is {} if no line of the function in which it is changed traces a model later. Below a
        line in a loop, or in a function of which it is not known when it runs, none may be.
        """
        place = model.get("before") or model.get("above") or model.get("made")
        file, _, number = (place or {"at": ":0"})["at"].rpartition(":")
        file, number, below, late = self.places.whole(file), int(number), 0, []
        for trace in self.found:
            if trace["first"] and model.get("above") and not model.get("is_wrapped"):
                continue  # it is changed where its optimizer is made
            line = self.beside(trace, file, number) if trace["early"] else None
            if line is None or line >= number and (model.get("before") or model.get("is_wrapped")):
                late.append(trace["at"]["at"])
            elif line >= number:
                below = max(below, line)
        return dict(
            below=self.places.line_of(file, below) if below else {}, late=[*dict.fromkeys(late)]
        )

    def beside(self, trace, file, number):
        """Return the line of a trace in the function of another line, and in no loop, or None."""
        function = function_around(file, number)
        for its, line in trace["lines"]:
            if self.places.whole(its) == file and function_around(file, line) == function:
                loops = [each for each in around(file, line, LOOPS) if each.lineno > function]
                is_once = all(each in around(file, number, LOOPS) for each in loops)
                return line if is_once else None
        return None
