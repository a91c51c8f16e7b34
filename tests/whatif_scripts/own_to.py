"""A model whose to() takes a device only, under an autocast that computes in float32."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.top = nn.Linear(4, 2)

    def to(self, device):
        self.place = device
        return super().to(device)

    def forward(self, x):
        return self.top(self.conv(x).mean((2, 3)))


net = Net().to("cpu")
context = torch.autocast("cpu", torch.bfloat16)
context.fast_dtype = torch.float32  # as on a GPU; on a CPU torch turns such a context off
optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
while True:
    with context:
        loss = net(torch.rand(4, 3, 8, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
