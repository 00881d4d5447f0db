"""Whether the rows of a field have one shape, which a store does not say without reading them.

A hidden partition has a row for each shape that a put gave a field of a partition. Of a field without such a row
nothing is known: its rows count as different. So a put adds the first shape of a field after its own rows, and another
shape before them. Wherever it fails, rows that differ never count as equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from dataplane_compat.transfer_queue._indexes import HIDDEN_PARTITION
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import UnknownPartitionError

_SHAPES: Final = f"{HIDDEN_PARTITION}shapes"
#: Stands for the shapes of a nested column, which counts as one whose rows differ, as in TransferQueue.
_DIFFERENT: Final = None

_Shape = tuple[int, ...] | None


def note_shapes(client: DataPlaneClient, partition_id: str, columns: Mapping[str, Any]) -> list[str]:
    """Notes shapes of the rows of a put that differ from those before. Fields of scalars need none.

    Returns:
        For `add_notes` after the put: the first shapes of fields.
    """
    given: dict[str, _Shape] = {
        name: _DIFFERENT if column.is_nested else tuple(column.shape[1:])
        for name, column in columns.items()
        if isinstance(column, torch.Tensor) and column.dim() > 1 and (column.is_nested or len(column))
    }
    known = _noted(client, partition_id) if given else {}
    news = {name: shape for name, shape in given.items() if _is_news(shape, known.get(name, set()))}
    notes = {name: json.dumps([partition_id, name, shape]) for name, shape in news.items()}
    add_notes(client, partition_id, [note for name, note in notes.items() if name in known])
    return [note for name, note in notes.items() if name not in known]


def add_notes(client: DataPlaneClient, partition_id: str, notes: Sequence[str]) -> None:
    """Writes what `note_shapes` left."""
    if notes:
        client.put_samples(notes, _SHAPES, tags=[{"partition": partition_id}] * len(notes))


def equal_shapes(client: DataPlaneClient, partition_id: str) -> dict[str, _Shape]:
    """Field -> the shape of all of its rows, or None if they differ. Fields of which nothing is known are left out."""
    noted = _noted(client, partition_id).items()
    return {name: next(iter(shapes)) if len(shapes) == 1 else _DIFFERENT for name, shapes in noted}


def forget_shapes(client: DataPlaneClient, partition_id: str) -> None:
    """Drops what was noted of a partition."""
    try:
        client.clear_samples(client.list_sample_ids(_SHAPES, {"partition": partition_id}), _SHAPES)
    except UnknownPartitionError:
        return


def _noted(client: DataPlaneClient, partition_id: str) -> dict[str, set[_Shape]]:
    try:
        rows = client.list_sample_ids(_SHAPES, {"partition": partition_id})
    except UnknownPartitionError:
        return {}
    noted: dict[str, set[_Shape]] = {}
    for _, name, shape in map(json.loads, rows):
        noted.setdefault(name, set()).add(_DIFFERENT if shape is None else tuple(shape))
    return noted


def _is_news(shape: _Shape, known: set[_Shape]) -> bool:
    """Whether it says more about a field: that it has rows at all, or that its rows differ."""
    return shape not in known and _DIFFERENT not in known and len(known) < 2
