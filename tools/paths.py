"""Let the tools import whatif/ and benchmarks/. No other module of tools/ changes sys.path."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "benchmarks")]
