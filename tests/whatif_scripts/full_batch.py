"""A loader gives all data once, before the first of many steps on them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

(x,) = next(iter(DataLoader(TensorDataset(torch.rand(256, 8)), batch_size=128)))
net = nn.Linear(8, 1)
optimizer = torch.optim.Adagrad(net.parameters())
while True:
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
