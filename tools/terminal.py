"""What the tools print: lines, and what is under way."""

import shutil
import sys


def show(text):
    """Show what is under way, in place, on a terminal; "" clears it."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]}\033[K", end="", flush=True)


def say(text):
    show("")
    print(text, flush=True)
