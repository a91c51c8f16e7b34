"""No DataLoader, a recurrent network with a tuple as output, which fails under autocast."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("this model takes no autocast\nand says so in two lines")
        states, last = self.lstm(x)
        return self.head(states[:, -1]), last


torch.manual_seed(3)
net = Net()
adam = torch.optim.AdamW(net.parameters())
while True:
    x = torch.randn(4, 5, 8)
    loss = (net(x)[0] - x.mean((1, 2))[:, None]).square().mean()
    adam.zero_grad()
    loss.backward()
    adam.step()
