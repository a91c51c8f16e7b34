"""A loss with a network in it that no optimizer trains, though nobody froze its weights."""

import torch
from torch import nn


class PerceptualLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))

    def forward(self, output, wanted):
        return nn.functional.mse_loss(self.features(output), self.features(wanted))


criterion = PerceptualLoss()
painter = nn.Conv2d(3, 3, 3, padding=1)
adam = torch.optim.Adam(painter.parameters())
while True:
    x = torch.rand(4, 3, 12, 12)
    loss = criterion(painter(x), x)
    adam.zero_grad()
    loss.backward()
    adam.step()
