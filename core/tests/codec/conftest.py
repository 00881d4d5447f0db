"""The module beside the tests can be imported by them."""

import sys
from pathlib import Path

folder = str(Path(__file__).parent)
if folder not in sys.path:
    sys.path.insert(0, folder)
