"""An evaluation after the first step, which has gradients, as MAML's, and no loader of its own."""

import sys
import time

import torch

model = torch.nn.Linear(8, 2)
sgd = torch.optim.SGD(model.parameters(), 0.01)
data = torch.utils.data.TensorDataset(torch.rand(320, 8))
loader = torch.utils.data.DataLoader(data, batch_size=16)
steps, every, last = 0, *map(int, sys.argv[1:])
while True:
    for (images,) in loader:
        loss = model(images).square().mean()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        time.sleep(0.004)
        steps += 1
        if steps <= last and steps % every == 0:
            torch.autograd.grad(model(images).square().mean(), model.weight)
            time.sleep(0.5)
