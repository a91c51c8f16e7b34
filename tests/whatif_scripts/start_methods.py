"""Workers of a start method, given as the loader's context or set for all.

    python start_methods.py METHOD context|all
"""

import multiprocessing
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((8,), index / 400), index % 2


if __name__ == "__main__":
    method, how = sys.argv[1:]
    if how == "all":
        multiprocessing.set_start_method(method)
    loader = DataLoader(Data(), batch_size=4, num_workers=1, persistent_workers=True,
                        multiprocessing_context=method if how == "context" else None)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    while True:
        for numbers, labels in loader:
            loss = nn.functional.cross_entropy(model(numbers), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
