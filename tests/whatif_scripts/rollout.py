"""Updates, then a rollout that takes far longer than all of them."""

import time

import torch

policy = torch.nn.Linear(8, 2)
adam = torch.optim.Adam(policy.parameters())
while True:
    time.sleep(0.1)  # the rollout
    for _ in range(5):
        loss = policy(torch.rand(16, 8)).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        time.sleep(0.002)
