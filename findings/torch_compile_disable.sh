#!/usr/bin/env bash
# Two variables that both are said to switch torch.compile off differ under fullgraph=True:
# TORCHDYNAMO_DISABLE=1 runs the function as it is, TORCH_COMPILE_DISABLE=1 raises. Seen with torch
# 2.14.1, 2026-11-27:
#     TORCHDYNAMO_DISABLE=1: 2.0
#     TORCH_COMPILE_DISABLE=1: RuntimeError: torch.compile with fullgraph=True found no compiled
#     frames
# What to do: set TORCHDYNAMO_DISABLE=1.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" torch==2.14.1 numpy==2.2.6
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
import os
import subprocess
import sys

CODE = """
import torch
try:
    print(torch.compile(lambda x: x + 1, fullgraph=True)(torch.ones(1)).item())
except Exception as error:
    print(f"{type(error).__name__}: {error}".split(".Skipped")[0].split(". ")[0])
"""
for name, wanted in (("TORCHDYNAMO_DISABLE", "2.0"), ("TORCH_COMPILE_DISABLE", "RuntimeError")):
    with open("a.py", "w") as file:
        file.write(CODE)
    said = subprocess.run([sys.executable, "a.py"], env={**os.environ, name: "1"}, text=True,
                          capture_output=True, check=True).stdout.splitlines()[0]
    print(f"{name}=1: {said}")
    assert said.startswith(wanted)
END
