"""A loader without end, lists of images, a process of its own, a new folder, keyword arguments."""

import multiprocessing
import os

import torch
from torch import nn


class Repeat:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        while True:
            yield from self.batches

    def __len__(self):
        return len(self.batches)


class Endless(torch.utils.data.DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.endless = super().__iter__()
        self.factor = 1

    def __len__(self):
        return self.factor * super().__len__()

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.endless)


def lists(batch):
    return tuple(zip(*batch))


helper = multiprocessing.get_context("fork").Process(target=os.getpid)
helper.start()
helper.join()
os.makedirs("out/deep", exist_ok=True)
os.chdir("out/deep")
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = Endless([(torch.randn(3), i % 2) for i in range(40)], batch_size=4, collate_fn=lists)
while True:
    batches = iter(loader)
    for _ in range(len(loader)):
        images, labels = next(batches)
        with torch.autocast("cpu", enabled=False):
            loss = nn.functional.cross_entropy(model(torch.stack(images)), torch.tensor(labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(obj=model.state_dict(), f="last.pt")
    os.rename(src="last.pt", dst="best.pt")
