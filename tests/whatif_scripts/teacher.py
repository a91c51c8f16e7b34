"""A large teacher that does not train, and refuses autocast, beside a small pupil in eval mode."""

import torch
from torch import nn


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise ValueError("the teacher has been changed")
        return self.layers(x)


teacher = Teacher().requires_grad_(False)
pupil = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 8))
pupil.eval()  # for its normalisation
optimizer = torch.optim.SGD(pupil.parameters(), 0.01)
while True:
    x = torch.rand(4, 3, 8, 8)
    with torch.no_grad():
        wanted = teacher(x)
    loss = nn.functional.mse_loss(pupil(x), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
