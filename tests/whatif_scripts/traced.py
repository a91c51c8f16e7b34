"""A model that torch.jit traces before the training and in it, as TensorBoard's graph does."""

import torch
from torch import nn

net = nn.Sequential(
    nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(4, 2),
)
sgd = torch.optim.SGD(net.parameters(), 0.1)
torch.jit.trace(net, torch.ones(2, 3, 8, 8))
steps = 0
while True:
    x = torch.randn(4, 3, 8, 8)
    loss = net(x).square().mean()
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    steps += 1
    if steps % 10 == 0:
        torch.jit.trace(net, x)
