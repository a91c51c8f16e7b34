"""Let the benchmarks import tools/ and src/. No other module of benchmarks/ changes sys.path."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tools"), str(ROOT / "src")]
