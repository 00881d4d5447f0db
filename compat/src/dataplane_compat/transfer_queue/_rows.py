"""What a store knows about rows: their tags, fields and shapes, without their data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from dataplane_compat.transfer_queue._columns import shape_to_show, tags_to_show
from dataplane_compat.transfer_queue._indexes import HIDDEN_PARTITION, index_of
from dataplane_compat.transfer_queue.metadata import BatchMeta
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import MissingDataError, SchemaMismatchError, UnknownPartitionError
from dataplane_core.spec import FieldSpec

#: Where a `BatchMeta` keeps the sample ids, and the tags that the store had when it was made.
KEY, TAGS = "_key", "_tags"

#: A hidden partition with a row for each shape that a put gave a field of a partition: only a read of all rows would
#: say whether they have one shape. Of a field without such a row nothing is known: its rows count as different. So a
#: put adds the first shape of a field after its own rows, and another shape before them. Wherever it fails, rows that
#: differ never count as equal.
_SHAPES: Final = f"{HIDDEN_PARTITION}shapes"
#: Stands for the shapes of a nested column, which counts as one whose rows differ, as in TransferQueue.
_DIFFERENT: Final = None

_Shape = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Row:
    """A row as the store knows it.

    Attributes:
        sample_id: Its id.
        tags: Its tags as they were put.
        fields: The fields that are written.
    """

    sample_id: str
    tags: dict[str, Any]
    fields: list[str]


def find_rows(client: DataPlaneClient, partition_id: str, sample_ids: Sequence[str] | None = None) -> list[Row]:
    """The rows with these ids, in this order, or all rows in order of first write. Those not there are left out."""
    while True:
        try:
            listed = client.list_samples(partition_id, sample_ids=sample_ids)
            fields = client.list_fields(listed.sample_ids, partition_id) if listed.size else []
        except UnknownPartitionError:
            return []
        except MissingDataError:
            continue  # cleared between the two calls
        return [
            Row(sample_id, tags_to_show(tags), names)
            for sample_id, tags, names in zip(listed.sample_ids, listed.tags or (), fields, strict=True)
        ]


def put_rows(
    client: DataPlaneClient,
    partition_id: str,
    sample_ids: Sequence[str],
    columns: Mapping[str, Any] | None,
    tags: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Writes columns, tags, or both. A column of another dtype than its field has is converted if no value changes.

    Raises:
        SchemaMismatchError: A column is of another kind than its field, or a value would change.
    """
    first = _note_shapes(client, partition_id, columns or {})
    try:
        client.put_samples(sample_ids, partition_id, columns, tags)
    except SchemaMismatchError as refusal:
        try:
            specs = client.describe(partition_id).specs
        except UnknownPartitionError:  # the rows of its first put do not fit each other
            raise refusal from None
        converted = {name: _converted(column, specs.get(name)) for name, column in (columns or {}).items()}
        client.put_samples(sample_ids, partition_id, converted, tags)
    _add_notes(client, partition_id, first)


def _converted(column: Any, spec: FieldSpec | None) -> Any:
    if not isinstance(column, torch.Tensor) or spec is None or spec.kind != "tensor":
        return column
    values = column.values() if column.is_nested else column
    same = values.to(spec.torch_dtype).to(values.dtype)
    is_same = bool(((same == values) | ((same != same) & (values != values))).all())  # NaN is not equal to itself
    return column.to(spec.torch_dtype) if is_same else column


def schema_of(spec: FieldSpec | None, shape: tuple[int, ...] | None) -> dict[str, Any]:
    """What a `BatchMeta` says about a field.

    Args:
        spec: Its spec. None: it was not written.
        shape: The shape of all of its rows, or None if they differ. Their lengths are not known without reading them.
    """
    if spec is None or spec.kind == "object":
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": spec is not None}
    equal = (1,) if spec.rank == 0 else shape
    found = None if equal is None else torch.Size(equal)
    return {"dtype": spec.torch_dtype, "shape": found, "is_nested": found is None, "is_non_tensor": False}


def meta_of(
    client: DataPlaneClient, partition_id: str, rows: Sequence[Row], fields: Sequence[str], *, lenient: bool = False
) -> BatchMeta:
    """A `BatchMeta` of rows.

    Args:
        client: The client.
        partition_id: Their partition.
        rows: The rows.
        fields: The fields that it names.
        lenient: Whether a row counts as ready if it has those of the fields that the partition has.
    """
    specs = client.describe(partition_id).specs if fields else {}
    shapes = _equal_shapes(client, partition_id) if any(spec.rank for spec in specs.values()) else {}
    needed = {name for name in fields if name in specs or not lenient}
    ready = {id(row.fields): bool(needed) and needed <= set(row.fields) for row in rows}
    return BatchMeta(
        [index_of(partition_id, row.sample_id) for row in rows],
        [partition_id] * len(rows),
        {name: schema_of(specs.get(name), shape_to_show(name, shapes.get(name))) for name in fields},
        np.array([ready[id(row.fields)] for row in rows], dtype=np.int8),
        None,
        [row.tags for row in rows],
        [{KEY: row.sample_id, TAGS: row.tags} for row in rows],
    )


# --- whether the rows of a field have one shape -----------------------------------------------------------------------


def _note_shapes(client: DataPlaneClient, partition_id: str, columns: Mapping[str, Any]) -> list[str]:
    """Notes shapes of the rows of a put that differ from those before. Fields of scalars need none.

    Returns:
        For `_add_notes` after the put: the first shapes of fields.
    """
    given: dict[str, _Shape] = {
        name: _DIFFERENT if column.is_nested else tuple(column.shape[1:])
        for name, column in columns.items()
        if isinstance(column, torch.Tensor) and column.dim() > 1 and (column.is_nested or len(column))
    }
    known = _noted(client, partition_id) if given else {}
    news = {name: shape for name, shape in given.items() if _is_news(shape, known.get(name, set()))}
    notes = {name: json.dumps([partition_id, name, shape]) for name, shape in news.items()}
    _add_notes(client, partition_id, [note for name, note in notes.items() if name in known])
    return [note for name, note in notes.items() if name not in known]


def _add_notes(client: DataPlaneClient, partition_id: str, notes: Sequence[str]) -> None:
    """Writes what `_note_shapes` left."""
    if notes:
        client.put_samples(notes, _SHAPES, tags=[{"partition": partition_id}] * len(notes))


def _equal_shapes(client: DataPlaneClient, partition_id: str) -> dict[str, _Shape]:
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
