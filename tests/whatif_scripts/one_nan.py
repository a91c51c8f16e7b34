"""One loss is not finite; what it would do to the weights is left out."""

import torch

net = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(net.parameters(), 0.01)
number = 0
while True:
    number += 1
    loss = net(torch.rand(8, 4)).square().mean() * (float("nan") if number == 30 else 1)
    sgd.zero_grad()
    loss.backward()
    for weight in net.parameters():
        weight.grad.nan_to_num_(0)
    sgd.step()
