"""A model in DataParallel, spawned workers that start again, no set_epoch.

Its first DataLoader cannot be made.
"""

import contextlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

if __name__ == "__main__":
    data = TensorDataset(torch.rand(2000, 3, 32, 32), torch.randint(0, 10, (2000,)))
    with contextlib.suppress(ValueError):
        DataLoader(data, batch_size=0)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 1, 0), num_workers=1,
                        multiprocessing_context="spawn")
    model = nn.DataParallel(nn.Sequential(nn.Conv2d(3, 10, 3), nn.AvgPool2d(30), nn.Flatten()))
    optimizer = torch.optim.Adadelta(model.parameters())
    while True:
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
