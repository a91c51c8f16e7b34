"""Each step changes its batch in place; four batches make a step; a schedule that is short."""

import time

import torch
from torch.utils.data import DataLoader

ACCUMULATED, STEPS = 4, 40
data = [{"x": torch.rand(4), "y": torch.rand(1)} for _ in range(96)]
net = torch.nn.Linear(4, 1)
adam = torch.optim.AdamW(net.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 0.01, total_steps=STEPS)
number = 0
while True:
    for batch in DataLoader(data, batch_size=3, shuffle=True):
        y = batch.pop("y")
        x = batch["x"].sub_(2)  # between -2 and -1
        if not (-2 <= x.min() and x.max() <= -1):
            raise RuntimeError("this batch was given before, and changed")
        loss = (net(x) - y).square().mean() / ACCUMULATED
        loss.backward()
        number += 1
        if number % ACCUMULATED == 0:
            adam.step()
            schedule.step()
            adam.zero_grad()
            time.sleep(0.02)
