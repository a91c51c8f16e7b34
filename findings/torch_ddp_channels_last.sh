#!/usr/bin/env bash
# A model that becomes channels_last after DistributedDataParallel has wrapped it gets permuted
# gradients: in the first step, and in every step with find_unused_parameters=True. The buckets
# keep the layout of before. The warning says "This is not an error". Before DDP, or with
# gradient_as_bucket_view=True, all is right. Seen with torch 2.14.1, gloo and one process on a
# CPU, 2026-11-27, the relative error of the gradient in three steps:
#     before DDP: 0.0 0.0 0.0
#     after DDP: 1.5 0.0 0.0
#     after DDP, find_unused_parameters: 1.5 1.4 1.4
#     after DDP, gradient_as_bucket_view: 0.0 0.0 0.0
# What to do: call .to(memory_format=torch.channels_last) before DistributedDataParallel.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" torch==2.14.1 numpy==2.2.6
cd -- "$work"
PYTHONPATH=$work "${PYTHON:-python3}" - << 'END'
import os
import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore")
torch.distributed.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0,
                                     world_size=1)


def gradients(place, **options):
    """Return the gradients of three steps; `place` says where the layout is set, if at all."""
    torch.manual_seed(0)
    model = nn.Conv2d(4, 6, 3)
    if place == "before":
        model.to(memory_format=torch.channels_last)
    net = nn.parallel.DistributedDataParallel(model, **options)
    if place == "after":
        net.to(memory_format=torch.channels_last)
    found = []
    for step in range(3):
        images = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(step))
        net.zero_grad()
        net(images).square().sum().backward()
        found.append(model.weight.grad.contiguous().clone())
    return found


right = gradients("nowhere")
for place, name, wrong in (("before", None, 0), ("after", None, 1),
                           ("after", "find_unused_parameters", 3),
                           ("after", "gradient_as_bucket_view", 0)):
    off = [((one - other).norm() / other.norm()).item() for one, other in
           zip(gradients(place, **({name: True} if name else {})), right)]
    print(f"{place} DDP{f', {name}' if name else ''}:", *(f"{each:.1f}" for each in off))
    assert [each > 0.1 for each in off] == [True] * wrong + [False] * (3 - wrong)
torch.distributed.destroy_process_group()
END
