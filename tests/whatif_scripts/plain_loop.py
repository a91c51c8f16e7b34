"""Dict batches, a dict as output, a scheduler, clipping, files, no seed, no `if __name__`.

Under autocast its model returns something else, as a technique that changes the training would.
"""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, required=True)
args = parser.parse_args()
os.makedirs("run")  # fails if it is there
with open("started.txt", "a") as started:
    started.write("once\n")


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"image": torch.randn(3, args.size, args.size, generator=generator), "y": index % 2}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 2)

    def forward(self, image):
        if torch.is_autocast_enabled("cpu"):
            image = 100 * image
        return {"scores": self.head(torch.relu(self.conv(image)).mean((2, 3)))}


class Trainer:
    def __init__(self):
        self.net = Net()
        self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.sgd, 10)
        self.data = torch.utils.data.DataLoader(Data(), batch_size=16, shuffle=True)

    def fit(self):
        while True:
            for batch in self.data:
                y = batch.pop("y")
                loss = nn.functional.cross_entropy(self.net(**batch)["scores"], y)
                self.sgd.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
                self.sgd.step()
            self.schedule.step()
            torch.save(self.net, "run/last.pt.part")
            os.replace("run/last.pt.part", "run/last.pt")


Trainer().fit()
