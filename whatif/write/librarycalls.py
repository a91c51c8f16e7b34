"""Write a technique as arguments of a library's own call, as Trainer(precision="bf16-mixed")."""

import ast

from whatif import advice
from whatif.libraries import LIBRARIES


def edit(name, facts, extra, sources):
    """Write a technique in the call that switches it on; return whether there is one.

    A statement may have two: Accelerator(log_with="all") if tracks else Accelerator().
    """
    for library in advice.drivers_of(facts):
        texts = LIBRARIES.get(library, {})
        match texts.get(f"{name} on {facts['device']}") or texts.get(name):
            case callee, arguments:
                found = [
                    (source, node)
                    for source in sources.files.values()
                    for node in ast.walk(source.tree)
                    if isinstance(node, ast.Call) and is_of(node, callee)
                ]
            case _:
                continue
        if len({source.statement_of(call) for source, call in found}) == 1:
            source, call = found[0]
            text = arguments.format(workers=extra.get("workers")).replace('"', source.quote())
            line = source.origins[source.statement_of(call).lineno - 1]
            new = dict(each.split("=") for each in text.split(", "))
            source.apply([edit for _, call in found for edit in source.give(call, new)])
            if line:
                source.mark(source.statement_at(line), f"{library} has this built in")
            return True
    return False


def is_of(call, callee):
    """Return whether a call is of this name, or of a class on top of TrainingArguments."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if callee != "TrainingArguments":
        return name == callee
    is_trl = name.endswith("Config") and "output_dir" in [each.arg for each in call.keywords]
    return name.endswith(callee) or is_trl
