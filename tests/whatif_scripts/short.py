"""Ends by itself after 100 steps, and says so in a file; later calls go on."""

import os
import time

import torch

steps = 10**6 if os.path.exists("begun.txt") else 100
open("begun.txt", "w").close()
net = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(net.parameters(), 0.01)
for _ in range(steps):
    sgd.zero_grad()
    net(torch.rand(8, 4)).mean().backward()
    sgd.step()
    time.sleep(0.005)
with open("end.txt", "w") as file:
    file.write("its own end")
