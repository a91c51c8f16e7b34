"""Is one set of techniques faster than another? The verdict of whatif.py, a file of its own."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
from whatif import PAYS, WAITS, compare, doubt_of, is_kept, is_settled, verdict

__all__ = ["PAYS", "WAITS", "compare", "doubt_of", "is_kept", "is_settled", "verdict"]
