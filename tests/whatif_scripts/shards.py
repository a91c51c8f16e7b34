"""Trains on one shard after another, each with a loader of its own, then validates for long.

The network keeps a state of the loader's batch size.
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.RNN(4, 8)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for epoch in range(9999):
    for length in (200, 208, 216, 224):
        shard = TensorDataset(torch.randn(length, 3, 4))
        loader = DataLoader(shard, batch_size=8)
        for (inputs,) in loader:
            state = torch.zeros(1, loader.batch_size, 8)
            output, _ = net(inputs.transpose(0, 1), state[:, :len(inputs)])
            optimizer.zero_grad()
            output.square().mean().backward()
            optimizer.step()
    time.sleep(0.5)
    for (inputs,) in DataLoader(shard, batch_size=50):
        time.sleep(0.1)
