"""Makes the modules of the example and of its tests importable."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # what the example uses is marked experimental
sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])
