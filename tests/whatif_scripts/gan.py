"""Two optimizers, a GradScaler and autocast of its own, a compiled function, tuple batches."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@torch.compile(backend="eager")
def squashed(x):
    return torch.tanh(x)


def main():
    data = DataLoader(TensorDataset(torch.rand(320, 1, 8, 8)), batch_size=16, shuffle=True)
    generator = nn.Linear(4, 64)
    critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    critic_adam = torch.optim.Adam(critic.parameters(), 1e-3)
    generator_adam = torch.optim.Adam(generator.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")
    loss = nn.BCEWithLogitsLoss()
    while True:
        for (real,) in data:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            with torch.autocast("cpu", torch.bfloat16):
                fake = squashed(generator(torch.randn(len(real), 4)))
                of_critic = loss(critic(real), ones) + loss(critic(fake.detach()), zeros)
            critic_adam.zero_grad()
            scaler.scale(of_critic).backward()
            scaler.step(critic_adam)
            with torch.autocast("cpu", torch.bfloat16):
                of_generator = loss(critic(fake), ones)
            generator_adam.zero_grad()
            scaler.scale(of_generator).backward()
            scaler.step(generator_adam)
            scaler.update()


if __name__ == "__main__":
    main()
