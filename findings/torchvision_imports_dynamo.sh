#!/usr/bin/env bash
# `import torchvision` also imports torch.compile's front end (torch._dynamo), SymPy and FSDP, though
# nothing is compiled: torchvision.ops.roi_align takes is_compile_supported from it.
# Seen with torch 2.14.1, torchvision 0.29.2 and Python 3.11, 2026-11-27:
#     import torch: torch._dynamo False, sympy False, torch.distributed.fsdp False
#     import torchvision: torch._dynamo True, sympy True, torch.distributed.fsdp True
# What to do: where every second of the start counts, do without torchvision, also for its transforms.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" torch==2.14.1 torchvision==0.29.2
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
import subprocess
import sys

NAMES = "torch._dynamo", "sympy", "torch.distributed.fsdp"
for package, wanted in (("torch", False), ("torchvision", True)):
    code = f"import sys, {package}; print(*(name in sys.modules for name in {NAMES}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    print(f"import {package}:", ", ".join(map(" ".join, zip(NAMES, found))))
    assert found == [str(wanted)] * 3
END
