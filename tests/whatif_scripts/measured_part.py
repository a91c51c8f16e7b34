"""A part of the network is called once where it is made, to find out how much it gives."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        with torch.no_grad():
            wide = self.body(torch.rand(1, 1, size, size)).shape[1]
        wide = max(wide, self.body(torch.rand(1, 1, size, size)).shape[1])
        self.top = nn.Linear(wide, 3)

    def forward(self, x):
        return self.top(self.body(x))


net = Classifier(8)
sgd = torch.optim.SGD(net.parameters(), 0.01)
while True:
    loss = nn.functional.cross_entropy(net(torch.rand(8, 1, 8, 8)), torch.randint(3, (8,)))
    sgd.zero_grad()
    loss.backward()
    sgd.step()
