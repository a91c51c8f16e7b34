#!/usr/bin/env bash
# After the new switch torch.backends.fp32_precision is set, *reading* an old one raises
# RuntimeError: a library that asks torch.backends.cuda.matmul.allow_tf32 or
# torch.get_float32_matmul_precision() stops the program. Seen with torch 2.14.1 on a CPU,
# 2026-11-27:
#     torch.backends.cuda.matmul.allow_tf32: RuntimeError
#     torch.get_float32_matmul_precision(): RuntimeError
#     torch.backends.cudnn.allow_tf32: True
# What to do: use one of the two kinds of switches in a program, and the old ones where a library
# reads them.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" torch==2.14.1 numpy==2.2.6
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
import torch

torch.backends.fp32_precision = "tf32"
for code, wanted in (("torch.backends.cuda.matmul.allow_tf32", "RuntimeError"),
                     ("torch.get_float32_matmul_precision()", "RuntimeError"),
                     ("torch.backends.cudnn.allow_tf32", "True")):
    try:
        said = str(eval(code))
    except Exception as error:
        said = type(error).__name__
    print(f"{code}: {said}")
    assert said == wanted
END
