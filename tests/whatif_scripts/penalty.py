"""A critic with a gradient penalty takes two steps for each one of the generator."""

import torch
from torch import nn

generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
for_critic = torch.optim.RMSprop(critic.parameters(), 0.001)
for_generator = torch.optim.Adam(generator.parameters(), 0.001)
while True:
    for _ in range(2):
        real, fake = torch.rand(8, 8), generator(torch.rand(8, 4)).detach()
        between = real.lerp(fake, torch.rand(8, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + (slope.norm(2, 1) - 1).square().mean()
        for_critic.zero_grad()
        loss.backward()
        for_critic.step()
    for_generator.zero_grad()
    (-critic(generator(torch.rand(8, 4))).mean()).backward()
    for_generator.step()
