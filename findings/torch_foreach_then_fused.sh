#!/usr/bin/env bash
# An SGD made with foreach=True ignores `fused` where it is set later in its param_groups, and
# raises in its first step under a GradScaler. An SGD(fused=True) that loads the state of an
# unfused one raises in the same way: load_state_dict turns fused off, and the scaler still leaves
# the unscaling to the optimizer. Seen with torch 2.14.1 on a CPU, 2026-11-27:
#     foreach=True, fused set later: 0 calls of the fused kernel
#     foreach unset, fused set later: 1 calls of the fused kernel
#     SGD(fused=True) after an unfused state: fused is None, then
#     AssertionError('Expected grad_scale and found_inf to be None')
# What to do: make the optimizer with fused=True, and after load_state_dict set group["fused"] =
# True and group["foreach"] = False in each group.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" torch==2.14.1 numpy==2.2.6
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
from unittest import mock

import torch

for foreach, calls in ((True, 0), (None, 1)):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1, foreach=foreach)
    optimizer.param_groups[0]["fused"] = True
    weight.grad = torch.ones(4)
    with mock.patch("torch._fused_sgd_", side_effect=torch._fused_sgd_) as kernel:
        optimizer.step()
    print(f"foreach{'=True' if foreach else ' unset'}, fused set later: {kernel.call_count} calls "
          "of the fused kernel")
    assert kernel.call_count == calls

weight = torch.nn.Parameter(torch.ones(4))
state = torch.optim.SGD([weight], 0.1, 0.9).state_dict()
optimizer = torch.optim.SGD([weight], 0.1, 0.9, fused=True)
optimizer.load_state_dict(state)
scaler, said = torch.amp.GradScaler("cpu"), None
scaler.scale(weight.sum()).backward()
try:
    scaler.step(optimizer)
except AssertionError as error:
    said = repr(error)
print("SGD(fused=True) after an unfused state: fused is",
      f"{optimizer.param_groups[0]['fused']}, then {said}")
assert said == "AssertionError('Expected grad_scale and found_inf to be None')"
END
