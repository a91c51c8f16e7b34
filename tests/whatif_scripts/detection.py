"""Batches that are lists of pictures of several sizes, with boxes; a sampler makes them."""

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.rand(3, 12 + index % 3, 14)


def collate(pictures):
    return pictures


sampler = BatchSampler(SequentialSampler(Pictures()), 5, drop_last=True)
loader = DataLoader(Pictures(), batch_sampler=sampler, collate_fn=collate)
detector = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
optimizer = torch.optim.SGD(detector.parameters(), 0.01)
while True:
    for pictures in loader:
        loss = sum(detector(picture[None]).mean() for picture in pictures)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
