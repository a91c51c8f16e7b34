"""A convolution of weights that it takes as a matrix first, which their new layout cannot be."""

import torch
from torch import nn


class Scaled(nn.Conv2d):
    def forward(self, x):
        size = self.weight.view(self.out_channels, -1).norm()
        return nn.functional.conv2d(x, self.weight / size)


net = nn.Sequential(Scaled(3, 4, 3), nn.ReLU(), Scaled(4, 2, 3), nn.Flatten())
optimizer = torch.optim.SGD(net.parameters(), 0.01)
while True:
    loss = net(torch.rand(4, 3, 8, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
