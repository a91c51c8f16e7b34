"""Steps that wait for a slow loader, a sum of losses, a scheduler, a checkpoint in each epoch."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.01)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=generator), index % 2


def save(model, optimizer, scheduler):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict()}, "last.pt")


def main():
    torch.manual_seed(0)
    options = {"batch_size": 4}
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    if os.path.exists("last.pt"):
        checkpoint = torch.load("last.pt")
        optimizer.load_state_dict(checkpoint["optimizer"])
    loader = DataLoader(Data(), shuffle=True, **options)
    while True:
        total = 0.0
        for images, labels in loader:
            output = model(images)
            loss = nn.functional.cross_entropy(output, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        save(model, optimizer, scheduler)
        print(total / len(loader), flush=True)


if __name__ == "__main__":
    main()
