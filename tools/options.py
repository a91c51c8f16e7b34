"""Command lines: what running.sh, loading.sh and compose.sh share to read them."""

import argparse
from pathlib import Path

from paths import ROOT


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the usage, and what is wrong."""

    def __init__(self, name, usage, description):
        super().__init__(
            name,
            usage=usage,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def add_result_dir(self):
        """Add the option of the folder for tables and records."""
        self.add_argument(
            "--result_dir",
            type=Path,
            default=ROOT / "results",
            metavar="DIR",
            help="where the results go (default: results/ in the clone)",
        )

    def error(self, message):
        self.exit(2, f"usage: {self.usage}: {message}\n")


def split(words):
    """Return (the words before the first --, the words behind it)."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]
