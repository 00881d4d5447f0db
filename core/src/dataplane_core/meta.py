"""`KVBatchMeta`: ids, fields, lengths, tags and lease tokens of some samples, without their tensors."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Final, TypeVar

from dataplane_core.arguments import check_dict, check_list, check_meta
from dataplane_core.errors import InvalidRequestError, preview, printable
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, INPUT_LENGTHS_TAG, PAD_TO_MULTIPLE, PLAN_KEYS

__all__ = ["KVBatchMeta", "PerPart", "is_same", "lengths_of", "rows_of"]

_T = TypeVar("_T")

#: Ids, or names, that a printed meta shows.
_SHOWN: Final = 8
#: The attributes that have one value per row, or are None.
_PER_ROW: Final = ("sequence_lengths", "tags", "lease_tokens", "token_starts")


class PerPart(list[Any]):
    """The values of a key of ``extra_info`` in a meta that was joined: one for each part, None where it has none."""


def lengths_of(tags: Iterable[Mapping[str, Any]]) -> list[int] | None:
    """Tokens per row, from the tag `INPUT_LENGTHS_TAG`. None if any row lacks it, or there are no rows."""
    lengths: list[Any] = [row.get(INPUT_LENGTHS_TAG) for row in tags]
    return lengths if set(map(type, lengths)) == {int} else None


@dataclass(repr=False)
class KVBatchMeta:
    """An ordered list of rows of one partition, with what is known about them without reading their tensors.

    Small and picklable: driver and workers send it to each other in place of the data. ``len`` is the number of rows,
    and iteration gives their ids. It prints as three lines, whatever its size.

    Attributes:
        partition_id: The partition that holds the rows.
        task_name: The consumer task that the rows are for, or None.
        sample_ids: One id per row; ids may repeat.
        fields: Field names that the rows are known to have, or None if unknown.
        sequence_lengths: Tokens per row, aligned with ``sample_ids``, or None.
        extra_info: Batch-wide values for the readers, keyed as in `dataplane_core.schema`.
        tags: One dict per row, aligned with ``sample_ids``, or None. Change them with `stamp_tags`, since a meta
            and its shards share these dicts.
        lease_tokens: Proof of the lease on each row, aligned with ``sample_ids``, or None.
        token_starts: Where the tokens of each row began in the batch of `kv_first_write`, aligned with ``sample_ids``.
            `write_columns` cuts columns of the same batch by it. None: all rows begin at 0, as those that were read do.

    Raises:
        InvalidRequestError: A per-row list does not align 1:1 with ``sample_ids``.

    Examples:
        >>> KVBatchMeta("step-1", "trainer", ["p0_g0", "p0_g1"], ["input_ids"], sequence_lengths=[3, 5])
        KVBatchMeta('step-1', task 'trainer'): 2 rows: 'p0_g0', 'p0_g1'
          fields: 'input_ids'
          8 tokens, 3 to 5 per row
    """

    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None
    lease_tokens: list[str] | None = None
    token_starts: list[int] | None = None

    def __post_init__(self) -> None:
        for name in _PER_ROW:
            column = getattr(self, name)
            if column is not None and len(column) != len(self.sample_ids):
                raise InvalidRequestError(
                    f"KVBatchMeta('{self.partition_id}'): {name} must align 1:1 with sample_ids, got {len(column)} "
                    f"entries for {len(self.sample_ids)} ids."
                )

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.sample_ids)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sample_ids)

    def __repr__(self) -> str:
        task = "" if self.task_name is None else f", task '{self.task_name}'"
        rows = f"{self.size} row{'s' * (self.size != 1)}"
        ids = f": {preview(self.sample_ids, _SHOWN)}" if self.sample_ids else ""
        facts = []
        if self.sequence_lengths:
            lengths = self.sequence_lengths
            facts.append(f"{sum(lengths):,} tokens, {min(lengths):,} to {max(lengths):,} per row")
        if self.tags is not None:
            facts.append(f"tags: {_names(name for row in self.tags for name in row)}")
        if self.lease_tokens is not None:
            facts.append("leased")
        if self.extra_info:
            facts.append(f"extra_info: {_names(self.extra_info)}")
        lines = [
            f"{type(self).__name__}('{printable(self.partition_id)}'{printable(task)}): {rows}{ids}",
            f"fields: {'not known' if self.fields is None else _names(self.fields)}",
            *(["; ".join(facts)] if facts else []),
        ]
        return "\n  ".join(lines)

    def subset(self, indices: Iterable[int]) -> KVBatchMeta:
        """The rows at ``indices``, in that order; repeats are allowed.

        A microbatch plan in ``extra_info`` is left out, unless these are all rows in their order.

        Raises:
            InvalidRequestError: An index is no integer (a mask is not taken), or lies outside ``[-size, size)``.
        """
        rows = self._row_numbers("subset", indices)
        kept = self.extra_info if rows == list(range(self.size)) else _without_plan(self.extra_info)
        picked = rows_of(self, rows, kept)
        picked.tags = None if picked.tags is None else list(map(dict, picked.tags))  # values are primitives
        return picked

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """The rows ``[start, stop)``, by the rules of Python slices."""
        return self.subset(range(*slice(start, stop).indices(self.size)))

    def concat(self, *others: KVBatchMeta) -> KVBatchMeta:
        """The rows of this meta followed by those of ``others``.

        Fields are merged in order. Lengths, tags and tokens become None unless every part has them. ``task_name`` is
        this meta's.

        Of ``extra_info``, ``pad_to_multiple`` becomes the least common multiple and ``global_forward_pad_seqlen`` the
        largest. A microbatch plan is left out. Another key keeps its value if all parts have the same; else it holds a
        `PerPart` with the value of each part, such as the metrics of each group.

        Raises:
            InvalidRequestError: The parts belong to different partitions, or are leased to different tasks.
        """
        if not others:
            return self.subset(range(self.size))
        parts = (self, *others)
        for other in others:
            check_meta("KVBatchMeta.concat: each of others", other)
            if other.partition_id != self.partition_id:
                raise InvalidRequestError(
                    f"KVBatchMeta.concat: partition_ids must match, got '{self.partition_id}' and "
                    f"'{other.partition_id}'."
                )
            if other.task_name != self.task_name and self.lease_tokens is not None and other.lease_tokens is not None:
                raise InvalidRequestError(
                    f"KVBatchMeta.concat: the parts are leased to task '{self.task_name}' and to task "
                    f"'{other.task_name}'. Expected one task: an ack names one."
                )
        field_lists = [part.fields for part in parts if part.fields is not None]
        return KVBatchMeta(
            partition_id=self.partition_id,
            task_name=self.task_name,
            sample_ids=[sample_id for part in parts for sample_id in part.sample_ids],
            fields=list(dict.fromkeys(name for names in field_lists for name in names)) if field_lists else None,
            sequence_lengths=_join([part.sequence_lengths for part in parts]),
            extra_info=_joined_info([part.extra_info for part in parts]),
            tags=copy.deepcopy(_join([part.tags for part in parts])),
            lease_tokens=_join([part.lease_tokens for part in parts]),
            token_starts=_join([part.token_starts or [0] * part.size for part in parts])
            if any(part.token_starts for part in parts)
            else None,
        )

    def drop(self, indices: Iterable[int]) -> KVBatchMeta | None:
        """A copy without the rows at ``indices`` (any order, repeats allowed), or None if no row is left.

        Raises:
            InvalidRequestError: An index is no integer (a mask is not taken), or lies outside ``[-size, size)``.
        """
        size = self.size
        gone = {row % size for row in self._row_numbers("drop", indices)}
        kept = [i for i in range(size) if i not in gone]
        return self.subset(kept) if kept else None

    def _row_numbers(self, what: str, indices: Any) -> list[int]:
        """Checks row numbers, of an array or tensor too."""
        listed = indices.tolist() if hasattr(indices, "tolist") else indices
        numbers, size = check_list(f"KVBatchMeta.{what}: indices", listed), self.size
        if not set(map(type, numbers)) <= {int}:
            for number in numbers:
                if isinstance(number, bool) or not hasattr(number, "__index__"):
                    raise InvalidRequestError(
                        f"KVBatchMeta.{what}: expected row numbers, got {number!r}.",
                        hint="For a mask: mask.nonzero().flatten().",
                    )
        rows = list(map(operator.index, numbers))
        if rows and not (-size <= min(rows) and max(rows) < size):
            wrong = next(row for row in rows if not -size <= row < size)
            raise InvalidRequestError(f"KVBatchMeta.{what}: index {wrong} is out of range for {size} rows.")
        return rows

    def with_fields(self, names: Iterable[str]) -> KVBatchMeta:
        """A copy whose ``fields`` also name ``names``: merged, de-duplicated, order kept."""
        added = check_list("KVBatchMeta.with_fields: names", names)
        merged = self.subset(range(self.size))
        merged.fields = list(dict.fromkeys([*(self.fields or []), *added]))
        return merged

    def stamp_tags(self, columns: Mapping[str, Any]) -> None:
        """Sets tags **in place**, one column of values per tag name; creates ``tags`` if None.

        A column is a sequence, a tensor or an array of ``size`` values. Python values are stored: ``.tolist()`` of
        tensors and arrays, ``.item()`` of their scalars.

        Metas that shared the old dicts of tags, as shards do, do not see the change.

        Raises:
            InvalidRequestError: A column's length is not ``size``. Nothing is set.
        """
        check_dict("KVBatchMeta.stamp_tags: columns", columns)
        for name, values in columns.items():
            if not hasattr(values, "__len__") or len(values) != self.size:
                raise InvalidRequestError(
                    f"KVBatchMeta.stamp_tags: tag '{name}' must align 1:1 with sample_ids, got "
                    f"{len(values) if hasattr(values, '__len__') else 'no list of'} values for {self.size} ids."
                )
        rows = [{} for _ in self.sample_ids] if self.tags is None else [dict(row) for row in self.tags]
        for name, values in columns.items():
            listed = values.tolist() if hasattr(values, "tolist") else values
            for row, value in zip(rows, listed, strict=True):
                row[name] = value.item() if hasattr(value, "item") else value
        self.tags = rows


def _names(names: Iterable[str]) -> str:
    return preview(list(dict.fromkeys(names)), limit=_SHOWN) or "none"


def rows_of(meta: KVBatchMeta, rows: Sequence[int], extra_info: dict[str, Any]) -> KVBatchMeta:
    """The rows of a meta at ``rows``, with a copy of ``extra_info``. Their dicts of tags are shared with it."""
    columns = {name: getattr(meta, name) for name in _PER_ROW}
    picked: dict[str, Any] = {
        name: None if column is None else _values_at(column, rows) for name, column in columns.items()
    }
    return replace(
        meta,
        sample_ids=_values_at(meta.sample_ids, rows),
        fields=None if meta.fields is None else list(meta.fields),
        extra_info=copy.deepcopy(extra_info),
        **picked,
    )


def _without_plan(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in extra_info.items() if name not in PLAN_KEYS}


def _joined_info(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in _without_plan(part)):
        values = [part[name] for part in parts if part.get(name) is not None]
        if name == PAD_TO_MULTIPLE and values:
            joined[name] = math.lcm(*values)
        elif name == GLOBAL_FORWARD_PAD_SEQLEN and values:
            joined[name] = max(values)
        else:
            joined[name] = _of_parts([part.get(name) for part in parts])
    return copy.deepcopy(joined)


def _of_parts(values: Sequence[Any]) -> Any:
    """The value of all parts, or one for each."""
    parts = PerPart(part for value in values for part in (value if isinstance(value, PerPart) else [value]))
    return parts[0] if all(is_same(part, parts[0]) for part in parts) else parts


def is_same(left: Any, right: Any) -> bool:
    """Whether two values are of one type and equal: plain ones, tensors, arrays, or what holds them."""
    if type(left) is not type(right) or getattr(left, "shape", None) != getattr(right, "shape", None):
        return False
    try:
        equal = left == right
        return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
    except (ValueError, RuntimeError):  # a list, or a dict, of tensors of several values
        return False


def _values_at(column: Sequence[_T], rows: Sequence[int]) -> list[_T]:
    # takes half the time of a comprehension; for a single row, itemgetter returns the value and no tuple
    return list(itemgetter(*rows)(column)) if len(rows) > 1 else [column[row] for row in rows]


def _join(columns: list[list[_T] | None]) -> list[_T] | None:
    joined: list[_T] = []
    for column in columns:
        if column is None:
            return None
        joined.extend(column)
    return joined
