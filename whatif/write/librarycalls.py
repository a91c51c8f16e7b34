"""Arguments of a library's own call that switch a technique on: {library: {technique: ...}}.

These are calls in the user's files, such as Trainer(precision="bf16-mixed"). Each is (the name of
the call, its arguments as text; texts in them stand in double quotes).
"""

import ast

from whatif import advice

LIGHTNING = {
    "amp bfloat16": ("Trainer", {"precision": '"bf16-mixed"'}),
    "amp float16": ("Trainer", {"precision": '"16-mixed"'}),
    "cudnn": ("Trainer", {"benchmark": "True"})}
TRANSFORMERS = {
    "workers": ("TrainingArguments", {"dataloader_num_workers": "{workers}",
                                      "dataloader_persistent_workers": "True"}),
    "amp bfloat16": ("TrainingArguments", {"bf16": "True"}),
    "amp float16": ("TrainingArguments", {"fp16": "True"}),
    "compile": ("TrainingArguments", {"torch_compile": "True"}),
    "fused": ("TrainingArguments", {"optim": '"adamw_torch_fused"'}),
    "tf32": ("TrainingArguments", {"tf32": "True"})}
CALLS = {
    "accelerate": {
        "amp bfloat16": ("Accelerator", {"mixed_precision": '"bf16"'}),
        "amp float16": ("Accelerator", {"mixed_precision": '"fp16"'}),
        "compile": ("Accelerator", {"dynamo_backend": '"inductor"'})},
    "composer": {
        "amp bfloat16": ("Trainer", {"precision": '"amp_bf16"'}),
        "amp float16": ("Trainer", {"precision": '"amp_fp16"'})},
    "fabric": {
        "amp bfloat16": ("Fabric", {"precision": '"bf16-mixed"'}),
        "amp float16": ("Fabric", {"precision": '"16-mixed"'})},
    "lightning": LIGHTNING,
    "pytorch_lightning": LIGHTNING,
    "transformers": TRANSFORMERS}


def edit(name, facts, extra, sources):
    """Write a technique in the only call that switches it on; return whether there is one."""
    for library in advice.drivers_of(facts):
        callee, new = CALLS.get(library, {}).get(name, ("", {}))
        found = [(source, node) for source in sources.files.values()
                 for node in ast.walk(source.tree) if callee and isinstance(node, ast.Call)
                 and ast.unparse(node.func).rpartition(".")[2] == callee]
        if len(found) == 1:
            source, call = found[0]
            quote = source.quote()
            new = {key: value.format(workers=extra.get("workers")).replace('"', quote)
                   for key, value in new.items()}
            line = source.origins[source.statement_of(call).lineno - 1]
            source.apply(source.give(call, new))
            if line:
                source.mark(source.statement_at(line), f"{library} has this built in")
            return True
    return False
