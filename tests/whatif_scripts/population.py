"""Three processes train side by side, each a network of its own."""

import multiprocessing
import time

import torch


def train(number):
    net = torch.nn.Linear(4, 1)
    sgd = torch.optim.SGD(net.parameters(), 0.01)
    while True:
        sgd.zero_grad()
        net(torch.rand(8, 4)).mean().backward()
        sgd.step()
        time.sleep(0.02)


if __name__ == "__main__":
    several = [multiprocessing.get_context("fork").Process(target=train, args=(number,))
               for number in range(3)]
    for each in several:
        each.start()
    for each in several:
        each.join()
