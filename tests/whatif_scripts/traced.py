"""A model that torch.jit traces before the training and in it, as TensorBoard's graph does."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

    def forward(self, x):
        x = self.features(x)
        return self.head(x)


def draw(model, x):
    return torch.jit._get_trace_graph(model, x)  # as fvcore and the older ONNX export do


net = Net()
sgd = torch.optim.SGD(net.parameters(), 0.1)
torch.jit.trace(net, torch.ones(2, 3, 8, 8))
draw(net, torch.ones(2, 3, 8, 8))
steps = 0
while True:
    x = torch.randn(4, 3, 8, 8)
    if steps % 10 == 0:
        torch.jit.trace(net, x)
    loss = net(x).square().mean()
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    steps += 1
