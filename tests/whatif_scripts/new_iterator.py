"""A new iterator in each step or in each short epoch, whose worker is slow to start and to end.

It notes how long each step waited, by its own clock.

    python new_iterator.py steps|epochs
"""

import sys
import time
from multiprocessing import util

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def is_slow(worker):
    time.sleep(0.05)
    util.Finalize(None, time.sleep, [0.15], exitpriority=1)


def of_steps(loader):
    while True:
        yield next(iter(loader))


def of_epochs(loader):
    while True:
        yield from loader


is_one = sys.argv[1] == "epochs"  # batch an epoch
loader = DataLoader(TensorDataset(torch.rand(8 if is_one else 64, 4)), batch_size=8, shuffle=True,
                    num_workers=1, worker_init_fn=is_slow)
batches = (of_epochs if is_one else of_steps)(loader)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
waits = open("waits.txt", "w", buffering=1)
while True:
    begin = time.perf_counter()
    (x,) = next(batches)
    print(time.perf_counter() - begin, file=waits)
    loss = net(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
