"""The stores of `blob_stores` can be imported by the tests beside it."""

import sys
from pathlib import Path

folder = str(Path(__file__).parent)
if folder not in sys.path:
    sys.path.insert(0, folder)
