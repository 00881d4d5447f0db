"""Makes the modules of the example, of its tests, and `checkouts` importable."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # what the example uses is marked experimental
sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])
sys.path.append(str(Path(__file__).resolve().parents[3] / "compat/tests"))
