#!/usr/bin/env bash
# `import torchvision` also imports torch.compile's front end (torch._dynamo), SymPy and FSDP, though
# nothing is compiled: torchvision.ops.roi_align takes is_compile_supported from it. The first
# optimizer that a script makes imports them as well, which takes two seconds.
# Seen with torch 2.14.1, torchvision 0.29.2 and Python 3.11, 2026-11-28:
#     import torch: torch._dynamo False, sympy False, torch.distributed.fsdp False
#     import torchvision: torch._dynamo True, sympy True, torch.distributed.fsdp True
#     import torch, torch.optim.SGD(...): torch._dynamo True, sympy True, torch.distributed.fsdp True
# What to do: where seconds of the start count, do without torchvision in what makes no optimizer,
# such as inference. A training script pays for them anyway.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" torch==2.14.1 torchvision==0.29.2
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
import subprocess
import sys

NAMES = "torch._dynamo", "sympy", "torch.distributed.fsdp"
OPTIMIZER = "torch, torch.optim.SGD(...)"
for package, wanted in (("torch", False), ("torchvision", True), (OPTIMIZER, True)):
    code = f"import sys, {package}; print(*(name in sys.modules for name in {NAMES}))"
    code = code.replace(", torch.optim.SGD(...)", "; torch.optim.SGD([torch.ones(1)], 1)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    print(f"import {package}:", ", ".join(map(" ".join, zip(NAMES, found))))
    assert found == [str(wanted)] * 3
END
