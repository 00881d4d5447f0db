"""Makes the modules of the example and of its tests importable, where TRL is installed: ``make test-trl``."""

import importlib.util
import os
import sys
from pathlib import Path

if importlib.util.find_spec("trl") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # what the example uses is marked experimental
    sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])
