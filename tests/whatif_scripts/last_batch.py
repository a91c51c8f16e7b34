"""Something is done at an epoch's last batch, which is found by its number."""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

batches = DataLoader(TensorDataset(torch.rand(80, 4)), batch_size=4)
net = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(net.parameters(), 0.01)
while True:
    since_last = 0
    for number, (x,) in enumerate(batches):
        since_last += 1
        if since_last > len(batches):
            raise RuntimeError("the epoch goes on for ever")
        sgd.zero_grad()
        net(x).mean().backward()
        sgd.step()
        time.sleep(0.001)
        if number == len(batches) - 1:
            since_last = 0
