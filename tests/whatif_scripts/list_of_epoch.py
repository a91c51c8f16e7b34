"""Has a value ready for each batch of an epoch, and no more of them."""

import torch
from torch.utils.data import DataLoader, TensorDataset

batches = DataLoader(TensorDataset(torch.rand(120, 4)), batch_size=4)
weights = [1 / (1 + number) for number in range(len(batches))]
net = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(net.parameters(), 0.01)
while True:
    number = 0
    for (x,) in batches:
        loss = weights[number] * net(x).mean()
        number += 1
        sgd.zero_grad()
        loss.backward()
        sgd.step()
