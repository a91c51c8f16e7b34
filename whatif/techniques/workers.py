"""Workers of the DataLoader, kept over epochs, with pinned memory on a GPU."""

NAMES = ("workers",)
