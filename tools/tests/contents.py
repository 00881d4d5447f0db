"""What a partition and a folder of an export hold, as values that are equal where every bit is."""

import json
from pathlib import Path

import torch
from pyarrow import parquet


def rows(folder):
    """The rows of all shards of an export, in order."""
    paths = sorted(Path(folder).glob("*.parquet"))
    return [row for path in paths for row in parquet.read_table(path).to_pylist()]


def plain(cell):
    """A cell as values that are equal where dtype, shape and bytes are."""
    if isinstance(cell, torch.Tensor):
        data = cell.contiguous().reshape(-1).view(torch.uint8) if cell.numel() else torch.empty(0)
        return str(cell.dtype), tuple(cell.shape), data.tolist()
    if isinstance(cell, dict):
        return {name: plain(each) for name, each in cell.items()}
    return [plain(each) for each in cell] if isinstance(cell, list) else (type(cell), repr(cell))


def content(client, partition_id):
    """All that a partition holds, in order: ids, tags and cells."""
    listed = client.list_samples(partition_id)
    held = []
    for sample_id, tags, names in zip(
        listed.sample_ids, listed.tags, client.list_fields(listed.sample_ids, partition_id), strict=True
    ):
        columns = client.get_samples([sample_id], partition_id, names) if names else {}
        cells = {}
        for name in sorted(names):
            column = columns[name]
            cells[name] = plain(column[0] if isinstance(column, torch.Tensor) else column.tolist()[0])
        held.append((sample_id, plain(tags), cells))
    return held


def changed(path, **values):
    """Changes values of a manifest."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
