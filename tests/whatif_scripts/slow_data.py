"""Steps that wait for data without a length, and a validation that takes as long.

The loader is made in each epoch, and would keep its worker.
"""

import multiprocessing
import time

import torch
from torch import nn
from torch.utils.data import DataLoader


class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        for index in range(20):
            time.sleep(0.02)
            yield torch.full((4,), float(index)), torch.zeros(1)


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
validation = DataLoader([torch.rand(4)], batch_size=1)
while True:
    training = DataLoader(Data(), batch_size=4, num_workers=1, persistent_workers=True)
    for step, (x, y) in enumerate(training):
        if step % 20 == 3:
            print(len(multiprocessing.active_children()), "workers", flush=True)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for x in validation:
            model(x)
            time.sleep(0.4)  # as long as the epoch's steps wait
