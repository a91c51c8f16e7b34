"""What can go wrong, by the name of the fault."""

import os
import signal
import sys
import time

import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
fault = sys.argv[1]
if fault == "raises":
    raise ValueError("my own fault")
elif fault == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif fault == "ends":
    end = time.monotonic() + 2
    while time.monotonic() < end:
        optimizer.zero_grad()
        model(torch.rand(8, 4)).mean().backward()
        optimizer.step()
    with open("end.txt", "w") as file:
        file.write("its own end")
