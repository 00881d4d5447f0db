"""`KVBatchMeta`: rows of one partition by key, with TransferQueue's fields and methods."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dataplane_core.meta import is_same


def copied(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Independent copies of dicts whose values are nearly always primitives."""
    plain = (bool, int, float, str, type(None))
    return [{k: v if type(v) in plain else copy.deepcopy(v) for k, v in row.items()} for row in rows]


def merged_info(what: str, infos: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The union of dicts that agree where they overlap."""
    merged: dict[str, Any] = {}
    for info in infos:
        for name, value in (info or {}).items():
            if not is_same(merged.setdefault(name, value), value):
                raise ValueError(
                    f"{what} refused: extra_info['{name}'] has conflicting values: {merged[name]!r} and {value!r}."
                )
    return merged


def shares(size: int, chunks: int) -> list[range]:
    """``range(size)`` in ``chunks`` parts, the first ones longer by one where it does not divide."""
    base, longer = divmod(size, chunks)
    ends = [0]
    for place in range(chunks):
        ends.append(ends[-1] + base + (place < longer))
    return [range(start, end) for start, end in pairwise(ends)]


def check_order(indexes: Sequence[int], size: int) -> None:
    """Checks that the indexes name each row once."""
    if len(indexes) != size:
        raise ValueError(f"Indices length {len(indexes)} does not match the batch size {size}.")
    if len(set(indexes)) != size:
        raise ValueError("Contain duplicate indexes: expected each row once.")
    if any(not 0 <= index < size for index in indexes):
        raise ValueError(f"Indices must be in range [0, {size}).")


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
        self.tags = copied(self.tags)
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
        check_order(indexes, self.size)
        self.keys = [self.keys[index] for index in indexes]
        self.tags = [self.tags[index] for index in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """The rows in ``chunks`` parts whose sizes differ by at most one. Parts may be empty."""
        return [self._rows(part) for part in shares(self.size, chunks)]

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
            extra_info=merged_info("KVBatchMeta.concat", (part.extra_info for part in parts)) or None,
        )
