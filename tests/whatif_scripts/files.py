"""Files in each epoch: moved, replaced, linked, asked for their size; an older one put away."""

import os
import shutil
import tarfile
import tempfile
import time

import torch
from torch import nn

is_again = os.path.exists("state.txt")
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
epoch = 0
while True:
    for _ in range(40):
        model(torch.rand(4, 3)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.005)
    epoch += 1
    torch.save(model.state_dict(), f"{epoch}.pt")
    assert os.path.getsize(f"{epoch}.pt") > 100
    os.chmod(f"{epoch}.pt", 0o600)
    with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
        file.write("state")
    os.replace(file.name, "state.txt")
    assert open("state.txt").read() == "state"
    os.remove(f"{epoch}.pt")
    assert not os.path.exists(f"{epoch}.pt")
    os.makedirs("archive", exist_ok=True)
    open("archive/new.txt", "w").close()
    os.replace("archive/new.txt", "new.txt")
    if os.path.islink("latest"):
        os.remove("latest")
    os.symlink("new.txt", "latest")
    assert open("latest").read() == ""
    if os.path.exists("hard.txt"):
        os.remove("hard.txt")
    os.link("new.txt", "hard.txt")
    os.symlink("new.txt", "link")
    os.replace("link", "latest")
    assert open("latest").read() == open("hard.txt").read()
    if os.path.exists("last.pt"):
        os.rename("last.pt", "last.bak")
    torch.save(model.state_dict(), "last.pt")
    if os.path.exists("last.bak"):
        os.remove("last.bak")
    with tarfile.open("all.tar", "w") as archive:
        archive.add("last.pt")
    shutil.copytree(tempfile.mkdtemp(), "archive/copy", dirs_exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=".") as file:
        assert os.access(file.name, os.R_OK)
    os.makedirs("stage")
    open("stage/part.txt", "w").close()
    os.replace("stage", f"stage{epoch}")
    assert os.listdir(f"stage{epoch}") == ["part.txt"]
    shutil.rmtree(f"stage{epoch}")
    if is_again and os.path.exists("older.pt"):
        shutil.move("older.pt", "archive/older.pt")
