"""What a store knows about rows: their tags and fields, without their data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dataplane_compat.transfer_queue._columns import shape_to_show, tags_to_show
from dataplane_compat.transfer_queue._indexes import index_of
from dataplane_compat.transfer_queue._shapes import add_notes, equal_shapes, note_shapes
from dataplane_compat.transfer_queue.metadata import BatchMeta
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import MissingDataError, SchemaMismatchError, UnknownPartitionError
from dataplane_core.spec import FieldSpec

#: Where a `BatchMeta` keeps the sample ids, and the tags that the store had when it was made.
KEY, TAGS = "_key", "_tags"


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
    first = note_shapes(client, partition_id, columns or {})
    try:
        client.put_samples(sample_ids, partition_id, columns, tags)
    except SchemaMismatchError as refusal:
        try:
            specs = client.describe(partition_id).specs
        except UnknownPartitionError:  # the rows of its first put do not fit each other
            raise refusal from None
        converted = {name: _converted(column, specs.get(name)) for name, column in (columns or {}).items()}
        client.put_samples(sample_ids, partition_id, converted, tags)
    add_notes(client, partition_id, first)


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
    shapes = equal_shapes(client, partition_id) if any(spec.rank for spec in specs.values()) else {}
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
