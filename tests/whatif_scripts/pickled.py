"""A process that is spawned gets the model and the optimizer of the first one."""

import torch
from torch import multiprocessing, nn


def work(rank, model, optimizer):
    while True:
        model(torch.rand(64, 256)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    multiprocessing.spawn(work, nprocs=1, args=(net, torch.optim.SGD(net.parameters(), 1e-4)))
