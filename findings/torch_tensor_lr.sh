#!/usr/bin/env bash
# A Tensor learning rate that several parameter groups share makes each scheduler give the last
# group's rate to all of them: the rate is changed in place. No warning. torch recommends a Tensor
# lr where a compiled optimizer should not be compiled again. Seen with torch 2.14.1, 2026-11-27,
# for groups that should have 1.0 and 0.1 times the rate:
#     LambdaLR, float lr: [1.0, 0.1]
#     LambdaLR, Tensor lr: [0.1, 0.1]
#     OneCycleLR, float lr: [0.04, 0.004]
#     OneCycleLR, Tensor lr: [0.004, 0.004]
# What to do: give each group a tensor of its own.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" torch==2.14.1
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

for name, lr in (("float", 1.0), ("Tensor", torch.tensor(1.0))):
    for scheduler, options in ((LambdaLR, {"lr_lambda": [lambda step: 1.0, lambda step: 0.1]}),
                               (OneCycleLR, {"max_lr": [1.0, 0.1], "total_steps": 10})):
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
        optimizer = torch.optim.SGD(groups, lr if name == "float" else lr.clone())
        scheduler(optimizer, **options)
        rates = [round(float(group["lr"]), 6) for group in optimizer.param_groups]
        print(f"{scheduler.__name__}, {name} lr: {rates}")
        first = 1.0 if scheduler is LambdaLR else 0.04
        assert rates == ([first, first / 10] if name == "float" else [first / 10] * 2)
END
