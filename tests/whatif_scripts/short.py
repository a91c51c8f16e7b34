"""Ends by itself after some steps, and says so in a file."""

import sys
import time

import torch

net = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(net.parameters(), 0.01)
for _ in range(int(sys.argv[1])):
    sgd.zero_grad()
    net(torch.rand(8, 4)).mean().backward()
    sgd.step()
    time.sleep(0.004)
with open("end.txt", "w") as file:
    file.write("its own end")
