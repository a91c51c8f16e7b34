"""A thread of the script's own reads the loader; it is faster than the steps."""

import queue
import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.rand(4)


class Prefetcher:
    def __init__(self, loader):
        self.ready = queue.Queue(8)
        threading.Thread(target=self.fill, args=(loader,), daemon=True).start()

    def fill(self, loader):
        while True:
            for batch in loader:
                self.ready.put(batch)


batches = Prefetcher(DataLoader(Slow(), batch_size=4)).ready
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
while True:
    loss = net(batches.get()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.03)
