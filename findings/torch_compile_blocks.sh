#!/usr/bin/env bash
# Compiling each block of a ResNet instead of the whole saves little, and then stops without an
# error: its blocks differ in size, so ResNet-50's 16 take 8 graphs, which is as many as one
# function may have (recompile_limit). Whatever needs another graph after that, such as evaluation,
# runs uncompiled, with a warning. A ViT's 12 equal blocks take 2. Seen with torch 2.14.1 and
# torchvision 0.29.2, 2026-11-28:
#     resnet50: 16 blocks, graphs of training 8, with evaluation 8 (frames that failed: 1)
#     vit_b_32: 12 blocks, graphs of training 2, with evaluation 3 (frames that failed: 0)
# What to do: compile a convolutional network as a whole, blocks only where they are equal.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
"${PYTHON:-python3}" -m pip install -q --target "$work" torch==2.14.1 torchvision==0.29.2 numpy==2.2.6
PYTHONPATH=$work "${PYTHON:-python3}" - 2> /dev/null << 'END'
import torch
import torchvision
from torch._dynamo.utils import counters

for name, kind, size, wanted in (
    ("resnet50", "Bottleneck", 64, (16, 8, 8, 1)),
    ("vit_b_32", "EncoderBlock", 224, (12, 2, 3, 0)),
):
    torch._dynamo.reset()
    counters.clear()
    net = torchvision.models.get_model(name, num_classes=10)
    blocks = [part for part in net.modules() if type(part).__name__ == kind]
    for block in blocks:
        block.compile(backend="aot_eager")
    images = torch.rand(2, 3, size, size)
    net(images).sum().backward()
    training = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        net.eval()(images)
    graphs, frames = counters["stats"]["unique_graphs"], counters["frames"]
    found = len(blocks), training, graphs, frames["total"] - frames["ok"]
    print(
        f"{name}: {found[0]} blocks, graphs of training {found[1]}, with evaluation {found[2]} "
        f"(frames that failed: {found[3]})"
    )
    assert found == wanted
END
