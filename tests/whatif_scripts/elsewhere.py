"""The loop is in a package of the user's that lies elsewhere (PYTHONPATH); this file is both."""

import torch
from torch.utils.data import DataLoader, TensorDataset


def train(net):
    batches = DataLoader(TensorDataset(torch.rand(64, 8)), batch_size=8)
    optimizer = torch.optim.AdamW(net.parameters())
    while True:
        for (x,) in batches:
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()


if __name__ == "__main__":
    import our_package
    our_package.train(torch.nn.Linear(8, 1))
