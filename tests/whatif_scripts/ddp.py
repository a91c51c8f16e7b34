"""DistributedDataParallel, started by torchrun."""

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

distributed.init_process_group("gloo")
data = TensorDataset(torch.rand(320, 3, 8, 8), torch.rand(320, 1))
loader = DataLoader(data, batch_size=16, sampler=(sampler := DistributedSampler(data)))
layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.ReLU(), nn.Linear(288, 1))
model = nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(10 ** 6):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
