"""Lazy layers, which get their shapes in a first call, before there is an optimizer."""

import torch
from torch import nn

net = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))
net(torch.rand(2, 3, 8, 8))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
while True:
    loss = nn.functional.cross_entropy(net(torch.rand(4, 3, 8, 8)), torch.randint(2, (4,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
