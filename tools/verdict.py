"""Is one set of techniques faster than another? The verdict of whatif.py, a file of its own."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
import whatif
from whatif import PAYS, compare, verdict

__all__ = ["PAYS", "compare", "is_settled", "verdict"]


def is_settled(ratio, spread, n):
    """Return whether more runs would hardly change the verdict; one run alone settles nothing."""
    return n > 1 and whatif.is_settled(ratio, spread)
