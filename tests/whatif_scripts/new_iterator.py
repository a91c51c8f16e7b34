"""A new iterator in each step, whose worker takes a known time to start."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def start_slowly(worker):
    time.sleep(0.1)


loader = DataLoader(TensorDataset(torch.rand(64, 4)), batch_size=8, shuffle=True, num_workers=1,
                    worker_init_fn=start_slowly)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
while True:
    (x,) = next(iter(loader))
    loss = net(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.05)
