"""What a folder of an export holds."""

import json
from pathlib import Path

from pyarrow import parquet


def rows(folder):
    """The rows of all shards of an export, in order."""
    paths = sorted(Path(folder).glob("*.parquet"))
    return [row for path in paths for row in parquet.read_table(path).to_pylist()]


def changed(path, **values):
    """Changes values of a manifest."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
