"""Makes the SQLite example importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "third_party_sqlite" / "src"))
