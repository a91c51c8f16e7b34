"""Options in dicts that calls unpack, and a network that a method calls as a part of self."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

for_loader = {"batch_size": 8, "num_workers": 0}
for_adam = dict(lr=0.001, fused=False)


class Learner:
    def __init__(self):
        self.critic = nn.Linear(8, 1)

    def learn(self, x):
        return self.critic(x).square().mean()


learner = Learner()
critic = learner.critic
adam = torch.optim.Adam(critic.parameters(), **for_adam)
batches = DataLoader(TensorDataset(torch.rand(64, 8)), shuffle=True, **for_loader)
while True:
    for (x,) in batches:
        loss = learner.learn(x)
        adam.zero_grad()
        loss.backward()
        adam.step()
