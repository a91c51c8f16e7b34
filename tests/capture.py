"""Runs a loader as a user does and keeps its batches: capture.py BATCHES.pt SCRIPT OPTION ..."""

import runpy
import sys

import torch
import tqdm

epochs = []


def capture(loader, description, **kwargs):
    """In place of tqdm: copies what goes by."""
    if not description.startswith("epoch"):
        yield from loader
        return
    epochs.append([])
    for batch in loader:
        epochs[-1].append([part.cpu().clone() for part in batch])
        yield batch


target, sys.argv = sys.argv[1], sys.argv[2:]
tqdm.tqdm = capture
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    torch.save(epochs, target)
