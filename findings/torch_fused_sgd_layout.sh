#!/usr/bin/env bash
# SGD(fused=True) adds a momentum that is stored contiguously to a weight that is stored in
# channels_last as if both had the same layout: a wrong step, without a word. That meets whoever
# resumes from a checkpoint of before channels_last: load_state_dict keeps the checkpoint's layout.
# The unfused optimizer is right. Seen with torch 2.14.1 on a CPU, 2026-11-27, the distance of a
# weight after one step to that of the same step in the contiguous layout:
#     unfused, contiguous 0.0
#     unfused, channels_last 0.0
#     fused, contiguous 0.0
#     fused, channels_last 12.8
# What to do: after load_state_dict, copy each momentum_buffer into torch.empty_like(parameter),
# whose layout is the parameter's.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" torch==2.14.1 numpy==2.2.6
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
import torch
from torch import nn


def trained(fused, layout):
    """Return a weight after a step that continues an unfused, contiguous checkpoint."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(conv.parameters(), 0.1, 0.9)
    conv(torch.arange(192.).view(1, 3, 8, 8) / 64).square().sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    conv.to(memory_format=layout)
    optimizer = torch.optim.SGD(conv.parameters(), 0.1, 0.9, fused=fused)
    optimizer.load_state_dict({"state": state,
                               "param_groups": optimizer.state_dict()["param_groups"]})
    optimizer.zero_grad()
    conv(torch.ones(1, 3, 8, 8).to(memory_format=layout)).mean().backward()
    optimizer.step()
    return conv.weight.detach()


right = trained(False, torch.contiguous_format)
for fused in (False, True):
    for layout in (torch.contiguous_format, torch.channels_last):
        off = (trained(fused, layout) - right).abs().max().item()
        print(f"{'fused' if fused else 'unfused'}, {str(layout)[6:].split('_format')[0]} {off:.1f}")
        assert off > 1 if fused and layout == torch.channels_last else off < 1e-3
END
