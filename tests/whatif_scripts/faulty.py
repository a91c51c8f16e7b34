"""What can go wrong, by the name of the fault."""

import os
import pickle
import signal
import sys
import time

import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)


def step():
    optimizer.zero_grad()
    model(torch.rand(8, 4)).mean().backward()
    optimizer.step()


fault = sys.argv[1]
if fault == "raises":
    raise ValueError("my own fault")
elif fault == "asks":
    input("Go on? ")
elif fault == "cut":
    pickle.loads(b"")
elif fault == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif fault == "early":
    step()
elif fault == "ends":
    end = time.monotonic() + 2
    while time.monotonic() < end:
        step()
    with open("end.txt", "w") as file:
        file.write("its own end")
