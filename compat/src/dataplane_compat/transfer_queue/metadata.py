"""`KVBatchMeta` and `BatchMeta`: which rows a batch has, with TransferQueue's fields and methods. They hold no data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from dataplane_core.meta import is_same

__all__ = ["BatchMeta", "KVBatchMeta"]


@dataclass
class KVBatchMeta:
    """Rows of one partition, by key.

    Attributes:
        keys: The rows, each once.
        tags: One dict per row.
        partition_id: Their partition.
        fields: The fields that all of the rows have, or those to read.
        extra_info: What belongs to the batch as a whole.
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(f"keys and tags must have same length, but got {len(self.keys)} and {len(self.tags)}")
        if len(set(self.keys)) != len(self.keys):
            raise ValueError("Got duplicated keys.")
        if self.fields is not None and len(set(self.fields)) != len(self.fields):
            raise ValueError("Got duplicated fields.")
        self.tags = _copied(self.tags)
        self.extra_info = copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        """How many rows."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def _rows(self, places: Iterable[int]) -> KVBatchMeta:
        at = list(places)
        keys, tags = [self.keys[place] for place in at], [self.tags[place] for place in at]
        return KVBatchMeta(keys, tags, self.partition_id, self.fields, self.extra_info)

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """These rows, in this order."""
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError("Contain duplicate keys.")
        at = {key: place for place, key in enumerate(self.keys)}
        unknown = [key for key in keys_to_select if key not in at]
        if unknown:
            raise RuntimeError(f"Keys {unknown} not found in current batch.")
        return self._rows(at[key] for key in keys_to_select)

    def reorder(self, indexes: list[int]) -> None:
        """Brings the rows into another order, in place."""
        _check_order(indexes, self.size)
        self.keys = [self.keys[index] for index in indexes]
        self.tags = [self.tags[index] for index in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """The rows in ``chunks`` parts whose sizes differ by at most one. Parts may be empty."""
        return [self._rows(part) for part in _shares(self.size, chunks)]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """Rows of one partition with the same fields, one batch after the other. Empty ones are passed over."""
        parts = [part for part in data or [] if part and part.size]
        if not parts:
            return KVBatchMeta()
        first = parts[0]
        for part in parts:
            if part.fields is not None and set(part.fields) != set(first.fields or ()):
                raise ValueError("Field names do not match for concatenation.")
            if part.partition_id != first.partition_id:
                raise ValueError("Partition do not match for concatenation.")
        return KVBatchMeta(
            keys=[key for part in parts for key in part.keys],
            tags=[tags for part in parts for tags in part.tags],
            partition_id=first.partition_id,
            fields=first.fields,
            extra_info=_merged_info("KVBatchMeta.concat", (part.extra_info for part in parts)) or None,
        )


class _Sample(NamedTuple):
    """A read-only view of one row of a `BatchMeta`. The shapes in ``fields`` are those of this row."""

    global_index: int
    partition_id: str
    production_status: int
    custom_meta: MappingProxyType[str, Any]
    fields: MappingProxyType[str, MappingProxyType[str, Any]]


def _column(fields: TensorDictBase, name: str) -> Any:
    try:
        return fields.get(name)
    except RuntimeError:  # rows of a lazy stack that differ in shape
        return fields.get(name, as_nested_tensor=True)


def _schema_of(name: str, column: Any, size: int) -> dict[str, Any]:
    is_tensor = isinstance(column, torch.Tensor)
    rows = column.unbind() if is_tensor and column.is_nested else column
    if len(rows) != size:
        raise ValueError(
            f"Inconsistent batch dimension for field '{name}': expected batch_size[0]={size}, got {len(rows)}"
        )
    is_nested = bool(is_tensor and column.is_nested)
    shape = None
    if is_tensor:
        shape = torch.Size([1]) if not is_nested and column.dim() == 1 else rows[0].shape
    schema = {
        "dtype": column.dtype if is_tensor else None,
        "shape": shape,
        "is_nested": is_nested,
        "is_non_tensor": not is_tensor,
    }
    if is_nested:
        schema["per_sample_shapes"] = [tuple(row.shape) for row in rows]
    return schema


class BatchMeta:
    """Rows by index, which may be of several partitions, with what is known about their fields.

    Attributes:
        global_indexes: A number per row.
        partition_ids: The partition of each row.
        field_schema: Field -> ``dtype``, ``shape`` of a row, ``is_nested``, ``is_non_tensor``, and for nested ones
            ``per_sample_shapes`` where they are known.
        production_status: Per row 1 if all fields are written, else 0.
        extra_info: What belongs to the batch as a whole.
        custom_meta: The tags of each row.
    """

    __slots__ = (
        "_custom_backend_meta",
        "custom_meta",
        "extra_info",
        "field_schema",
        "global_indexes",
        "partition_ids",
        "production_status",
    )

    def __init__(
        self,
        global_indexes: Sequence[int] = (),
        partition_ids: Sequence[str] = (),
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: Any = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        _custom_backend_meta: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.global_indexes = list(global_indexes)
        self.partition_ids = list(partition_ids)
        size = len(self.global_indexes)
        self.field_schema = {name: dict(schema) for name, schema in (field_schema or {}).items()}
        for name, schema in self.field_schema.items():
            shapes = schema.get("per_sample_shapes")
            if shapes is not None and len(shapes) != size:
                raise ValueError(f"Field '{name}' per_sample_shapes length {len(shapes)} != batch_size {size}")
        if production_status is None:
            production_status = np.zeros(size, dtype=np.int8)
        self.production_status = np.array(production_status, dtype=np.int8, copy=True)
        self.extra_info = dict(extra_info or {})
        self.custom_meta = [dict(row) for row in custom_meta or [{}] * size]
        self._custom_backend_meta = [dict(row) for row in _custom_backend_meta or [{}] * size]
        for slot in ("partition_ids", "production_status", "custom_meta", "_custom_backend_meta"):
            if len(getattr(self, slot)) != size:
                raise ValueError(f"{slot} length {len(getattr(self, slot))} != batch_size {size}")

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, slot) for slot in BatchMeta.__slots__)

    def __setstate__(self, state: Sequence[Any]) -> None:
        for slot, value in zip(BatchMeta.__slots__, state, strict=True):
            setattr(self, slot, value)
        self.production_status = np.array(self.production_status)  # Ray's arrays are read-only

    @property
    def size(self) -> int:
        """How many rows."""
        return len(self.global_indexes)

    def __len__(self) -> int:
        return self.size

    @property
    def field_names(self) -> list[str]:
        """The fields, sorted."""
        return sorted(self.field_schema)

    @property
    def samples(self) -> tuple[_Sample, ...]:
        """Read-only views of the rows."""
        return tuple(map(self._sample, range(self.size)))

    def _sample(self, place: int) -> _Sample:
        fields = {}
        for name, schema in self.field_schema.items():
            own = {key: value for key, value in schema.items() if key != "per_sample_shapes"}
            if schema.get("per_sample_shapes") is not None:
                own["shape"] = schema["per_sample_shapes"][place]
            fields[name] = MappingProxyType(own)
        return _Sample(
            self.global_indexes[place],
            self.partition_ids[place],
            int(self.production_status[place]),
            MappingProxyType(self.custom_meta[place]),
            MappingProxyType(fields),
        )

    @property
    def is_ready(self) -> bool:
        """Whether there are rows and all of them are written."""
        return self.size > 0 and bool((self.production_status == 1).all())

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, "
            f"global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )

    # --- fields -------------------------------------------------------------------------------------------------------

    def _schema(self, field_name: str) -> dict[str, Any]:
        if field_name not in self.field_schema:
            raise KeyError(f"Field '{field_name}' not found in field_schema")
        return self.field_schema[field_name]

    def get_dtypes(self, field_name: str) -> list[Any]:
        """The dtype of the field, once per row."""
        return [self._schema(field_name).get("dtype")] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        """The shape of each row of the field."""
        schema = self._schema(field_name)
        shapes = schema.get("per_sample_shapes")
        return [schema.get("shape")] * self.size if shapes is None else list(shapes)

    def add_fields(self, tensor_dict: TensorDictBase, set_all_ready: bool = True) -> BatchMeta:
        """Adds what the columns say about their fields, in place."""
        size = tensor_dict.batch_size[0]
        if size == 0:
            return self
        if size != self.size:
            raise ValueError(f"add_fields batch size mismatch: self.size={self.size} vs tensor_dict={size}")
        self.field_schema.update(
            {name: _schema_of(name, _column(tensor_dict, name), size) for name in tensor_dict.keys()}
        )
        if set_all_ready:
            self.production_status[:] = 1
        return self

    def select_fields(self, field_names: list[str]) -> BatchMeta:
        """The same rows with these fields, as far as it has them."""
        chosen = self.copy()
        chosen.field_schema = {name: chosen.field_schema[name] for name in field_names if name in self.field_schema}
        chosen._custom_backend_meta = [
            {name: value for name, value in row.items() if name.startswith("_") or name in field_names}
            for row in chosen._custom_backend_meta
        ]
        return chosen

    def union(self, other: BatchMeta) -> BatchMeta:
        """The same rows with the fields of both. Where both have one, the other's is taken."""
        if not other or other.size == 0:
            return self.copy()
        if self.size == 0:
            return other.copy()
        for name in ("global_indexes", "partition_ids"):
            left, right = getattr(self, name), getattr(other, name)
            if left != right:
                raise ValueError(f"BatchMeta.union: {name} do not match: {left} and {right}")
        both = self.copy()
        theirs = other.copy()
        both.field_schema.update(theirs.field_schema)
        both.production_status &= theirs.production_status
        both.extra_info.update(theirs.extra_info)
        for rows, more in (
            (both.custom_meta, theirs.custom_meta),
            (both._custom_backend_meta, theirs._custom_backend_meta),
        ):
            for row, added in zip(rows, more, strict=True):
                row.update(added)
        return both

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _rows(self, places: Sequence[int]) -> BatchMeta:
        schemas = {}
        for name, schema in self.field_schema.items():
            schemas[name] = copy.copy(schema)
            if schema.get("per_sample_shapes") is not None:
                schemas[name]["per_sample_shapes"] = [schema["per_sample_shapes"][place] for place in places]
        return BatchMeta(
            [self.global_indexes[place] for place in places],
            [self.partition_ids[place] for place in places],
            schemas,
            self.production_status[list(places)],
            copy.deepcopy(self.extra_info),
            _copied(self.custom_meta[place] for place in places),
            _copied(self._custom_backend_meta[place] for place in places),
        )

    def copy(self) -> BatchMeta:
        """An independent copy."""
        return self._rows(range(self.size))

    def select_samples(self, sample_indices: list[int]) -> BatchMeta:
        """These rows, in this order."""
        if any(not 0 <= place < self.size for place in sample_indices):
            raise ValueError(f"Sample indices must be in range [0, {self.size})")
        return self._rows(sample_indices)

    def __getitem__(self, item: Any) -> BatchMeta:
        if isinstance(item, slice):
            return self._rows(range(self.size)[item])
        if not isinstance(item, (int, np.integer)):
            raise TypeError(f"Indexing with {type(item)} is not supported.")
        if not -self.size <= item < self.size:
            raise IndexError("BatchMeta index out of range")
        return self._rows([int(item) % self.size])

    def reorder(self, indices: list[int]) -> None:
        """Brings the rows into another order, in place."""
        _check_order(indices, self.size)
        ordered = self._rows(indices)
        for slot in BatchMeta.__slots__:
            setattr(self, slot, getattr(ordered, slot))

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """The rows in ``chunks`` parts whose sizes differ by at most one. Parts may be empty."""
        return [self._rows(part) for part in _shares(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """The rows of each partition apart, in order of first appearance."""
        return [self._rows(part) for part in self._places().values()]

    def _places(self) -> dict[str, list[int]]:
        """Partition -> the places of its rows, in order of first appearance."""
        places: dict[str, list[int]] = {}
        for place, partition_id in enumerate(self.partition_ids):
            places.setdefault(partition_id, []).append(place)
        return places

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
        """No rows."""
        return cls(extra_info=extra_info)

    @classmethod
    def concat(cls, data: list[BatchMeta], validate: bool = True) -> BatchMeta:
        """Rows with the same fields, one batch after the other. Empty ones are passed over."""
        parts = [part for part in data or [] if part and part.size]
        if not parts:
            return cls.empty()
        first = parts[0]
        for place, part in enumerate(parts if validate else ()):
            if part.field_names != first.field_names:
                raise ValueError(
                    f"BatchMeta.concat: field_names mismatch at chunk[{place}]. Expected {first.field_names}, got "
                    f"{part.field_names}."
                )
            for name, schema in first.field_schema.items():
                if part.field_schema[name].get("dtype") != schema.get("dtype"):
                    raise ValueError(
                        f"Field '{name}' dtype mismatch in concat: chunk[0]={schema.get('dtype')}, "
                        f"chunk[{place}]={part.field_schema[name].get('dtype')}"
                    )
        return cls(
            [index for part in parts for index in part.global_indexes],
            [name for part in parts for name in part.partition_ids],
            {name: _joined_schema(name, parts) for name in first.field_schema},
            np.concatenate([part.production_status for part in parts]),
            _merged_info("BatchMeta.concat", (part.extra_info for part in parts)),
            [row for part in parts for row in part.custom_meta],
            [row for part in parts for row in part._custom_backend_meta],
        )

    # --- what belongs to the batch, what to its rows ------------------------------------------------------------------

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """One value of `extra_info`."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Sets one value of `extra_info`."""
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict[str, Any]:
        """A copy of `extra_info`."""
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: dict[str, Any]) -> None:
        """Adds to `extra_info`."""
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Removes one value of `extra_info` and returns it, or None."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        """Empties `extra_info`."""
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        """Whether `extra_info` has this."""
        return key in self.extra_info

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """A copy of the tags, one dict per row."""
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: list[dict[str, Any]] | None) -> None:
        """Adds tags, one dict per row. The next put writes them, or `set_custom_meta` of the client."""
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise ValueError(
                f"The length of custom_meta list {len(custom_meta)} must match the batch size: {self.size}"
            )
        for row, added in zip(self.custom_meta, custom_meta, strict=True):
            row.update(added)

    def clear_custom_meta(self) -> None:
        """Forgets the tags, here only."""
        self.custom_meta = [{} for _ in range(self.size)]


def _joined_schema(name: str, parts: Sequence[BatchMeta]) -> dict[str, Any]:
    schemas = [part.field_schema.get(name, {}) for part in parts]
    first = schemas[0]
    is_nested = any(schema.get("is_nested") for schema in schemas)
    joined = {
        "dtype": first.get("dtype"),
        "shape": None if is_nested else first.get("shape"),
        "is_nested": is_nested,
        "is_non_tensor": first.get("is_non_tensor", False),
    }
    if is_nested or any(schema.get("per_sample_shapes") for schema in schemas):
        joined["per_sample_shapes"] = [
            shape
            for part, schema in zip(parts, schemas, strict=True)
            for shape in schema.get("per_sample_shapes") or [schema.get("shape")] * part.size
        ]
    return joined


# --- both -------------------------------------------------------------------------------------------------------------


def _copied(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Independent copies of dicts whose values are nearly always primitives."""
    plain = (bool, int, float, str, type(None))
    return [{k: v if type(v) in plain else copy.deepcopy(v) for k, v in row.items()} for row in rows]


def _merged_info(what: str, infos: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The union of dicts that agree where they overlap."""
    merged: dict[str, Any] = {}
    for info in infos:
        for name, value in (info or {}).items():
            if not is_same(merged.setdefault(name, value), value):
                raise ValueError(
                    f"{what} refused: extra_info['{name}'] has conflicting values: {merged[name]!r} and {value!r}."
                )
    return merged


def _shares(size: int, chunks: int) -> list[range]:
    """``range(size)`` in ``chunks`` parts, the first ones longer by one where it does not divide."""
    base, longer = divmod(size, chunks)
    ends = [0]
    for place in range(chunks):
        ends.append(ends[-1] + base + (place < longer))
    return [range(start, end) for start, end in pairwise(ends)]


def _check_order(indexes: Sequence[int], size: int) -> None:
    """Checks that the indexes name each row once."""
    if len(indexes) != size:
        raise ValueError(f"Indices length {len(indexes)} does not match the batch size {size}.")
    if len(set(indexes)) != size:
        raise ValueError("Contain duplicate indexes: expected each row once.")
    if any(not 0 <= index < size for index in indexes):
        raise ValueError(f"Indices must be in range [0, {size}).")
