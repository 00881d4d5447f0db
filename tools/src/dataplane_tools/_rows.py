"""Which samples of a partition to show, and what they hold. It claims nothing and changes nothing.

`opened` gives a client of a running store, of a save or of a recording; `Rows` finds samples in it by their tags and
values, and reads those that are to be shown as a `_sample.Sample` each. Ids and tags are read first, then the fields of
a condition or an order, and the other cells of the samples that are shown only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dataplane_core.client import DataPlaneClient
from dataplane_core.connecting import connect
from dataplane_core.errors import InvalidRequestError, LostSamplesError, MissingDataError, preview
from dataplane_core.ledger import rollout_of
from dataplane_core.spec import FieldSpec
from dataplane_observe import is_recording
from dataplane_tools._recorded import opened_recording
from dataplane_tools._sample import Decode, Sample, group_of_id, is_value, sample_of, value_of
from dataplane_tools._store import attach
from dataplane_tools._where import Where

#: Samples of one read: the cells that are shown, and the values of a condition.
_SHOWN_ROWS: Final = 64
_VALUE_ROWS: Final = 4096


def opened(path: str, partition_id: str | None) -> AbstractContextManager[DataPlaneClient]:
    """A client of the running store of a config file; or, for a folder, of a copy of its save, or of its recording."""
    if not Path(path).is_dir():
        return attach(path)
    return opened_recording(path, partition_id) if is_recording(path) else _opened_save(path)


@contextmanager
def _opened_save(folder: str) -> Iterator[DataPlaneClient]:
    with connect({"backend": "noop"}) as client:
        client.load(folder)
        yield client


@dataclass(frozen=True, slots=True)
class Found:
    """Samples that were looked for."""

    tags: dict[str, Mapping[str, Any]]  # id -> tags of those to show, in their order
    num_matching: int  # without a limit
    num_samples: int  # that the partition holds


class Rows:
    """The samples of a partition, by the capability ``listing`` only. ``partition_id`` None: of the only partition of
    the store.
    """

    def __init__(self, client: DataPlaneClient, partition_id: str | None = None) -> None:
        if partition_id is None:
            names = client.list_partitions()
            if len(names) != 1:
                raise InvalidRequestError(
                    f"which partition? There are {len(names)}: {preview(names, limit=10) or 'none'}. Name one."
                )
            partition_id = names[0]
        self.partition_id = partition_id
        self._client = client
        self._specs: Mapping[str, FieldSpec] = {}
        self._expected: Sequence[str] = ()

    @property
    def values(self) -> list[str]:
        """The fields of one number for each sample, as the last `find` saw them."""
        return [name for name, spec in self._specs.items() if spec.kind == "tensor" and spec.rank == 0]

    def find(
        self,
        *,
        where: Where | None = None,
        sort: str | None = None,
        descending: bool = False,
        group: str | None = None,
        limit: int | None = None,
    ) -> Found:
        """Finds samples, in the order of their first write, or by a tag or a field of one value: those that lack it
        come last. ``descending``: the greatest first; without ``sort`` the newest. In a group, the rows of a rollout
        come one after another. ``limit``: no more than these.

        Raises:
            InvalidRequestError: A name is neither a tag nor a field, or a field has no single value. A group has no
                samples.
        """
        found = self._client.describe(self.partition_id)
        self._specs, self._expected = found.specs, found.info.fields
        names = [*(where.names if where is not None else ()), *([sort] if sort else [])]
        known = {*self._specs, *self._expected}
        listed = self._client.list_samples(self.partition_id)
        rows: dict[str, Mapping[str, Any]] = dict(zip(listed.sample_ids, listed.tags or (), strict=True))
        num_samples = len(rows)
        tags = {name for row in rows.values() for name in row}
        for name in names:
            if name not in known and name not in tags and rows:
                raise self._lacks(f"tag or field '{name}'", {*known, *tags})
        if group is not None:
            members = {sample_id: tags for sample_id, tags in rows.items() if group_of_id(sample_id) == group}
            if rows and not members:
                raise self._lacks(f"group '{group}'", filter(None, map(group_of_id, rows)))
            places = {name: place for place, name in enumerate(dict.fromkeys(map(rollout_of, members)))}
            rows = dict(sorted(members.items(), key=lambda row: places[rollout_of(row[0])]))
        values = self._values(rows, dict.fromkeys(names))
        ids = [sample_id for sample_id, row in values.items() if where is None or where.matches(row)]
        if sort is not None:
            by = {sample_id: values[sample_id].get(sort) for sample_id in ids}
            ordered = [sample_id for sample_id in ids if _has_order(by[sample_id])]
            ordered.sort(key=lambda sample_id: (isinstance(by[sample_id], str), by[sample_id]), reverse=descending)
            ids = ordered + [sample_id for sample_id in ids if not _has_order(by[sample_id])]
        elif descending:
            ids.reverse()
        return Found({sample_id: rows[sample_id] for sample_id in ids[:limit]}, len(ids), num_samples)

    def matching(self, where: Where, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Those of some samples, id -> tags, that meet a condition. A name that none has is no error."""
        self._specs = self._client.describe(self.partition_id).specs
        values = self._values(rows, where.names)
        return {sample_id: rows[sample_id] for sample_id, row in values.items() if where.matches(row)}

    def read(self, found: Found, *, fields: Sequence[str] | None = None, decode: Decode | None = None) -> list[Sample]:
        """Reads samples, in their order. Those that were cleared meanwhile, or whose payload is lost, are left out.

        Without ``fields``, all are read but tensors of two dims or more that are no images: these are described.
        """
        known = {*self._specs, *self._expected}
        for name in fields or ():
            if name not in known:
                raise self._lacks(f"field '{name}'", known)
        names = [name for name, spec in self._specs.items() if _is_shown(spec)] if fields is None else list(fields)
        samples = []
        ids = list(found.tags)
        for start in range(0, len(ids), _SHOWN_ROWS):
            some = ids[start : start + _SHOWN_ROWS]
            portion = read_portion(self._client, self.partition_id, some, names, share_rows=True)
            for sample_id, has, cells in zip(portion.ids, portion.has, portion.cells(), strict=True):
                lacks = [name for name in (self._expected if fields is None else names) if name not in has]
                sample = sample_of(sample_id, found.tags[sample_id], cells, lacks=lacks, decode=decode)
                if fields is None:
                    unread = (name for name in has if name not in cells and name in self._specs)
                    sample.shapes.update((name, self._specs[name].describe()) for name in unread)
                samples.append(sample)
        return samples

    def _lacks(self, what: str, others: Iterable[str]) -> InvalidRequestError:
        has = preview(dict.fromkeys(sorted(others)), limit=20)
        return InvalidRequestError(f"partition '{self.partition_id}' has no {what}. It has: {has or 'none'}.")

    def _values(self, rows: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        """For each sample its tags, and the values of those fields of these names that have no tag of their name."""
        fields = [name for name in names if name in self._specs]
        ids = [sample_id for sample_id, tags in rows.items() if any(name not in tags for name in fields)]
        values = dict(rows)
        start, count = 0, 1  # one first, to see that it is one value
        while start < len(ids):
            portion = read_portion(self._client, self.partition_id, ids[start : start + count], fields)
            for sample_id, cells in zip(portion.ids, portion.cells(), strict=True):
                for name, cell in cells.items():
                    if not is_value(cell):
                        raise InvalidRequestError(
                            f"'{name}' of sample '{sample_id}' is no single value. Expected a tag or a field of one "
                            "number or string for each sample."
                        )
                values[sample_id] = {**{name: value_of(cell) for name, cell in cells.items()}, **rows[sample_id]}
            start, count = start + count, _VALUE_ROWS
        return values


@dataclass(frozen=True, slots=True)
class Portion:
    """Some samples that were read."""

    ids: Sequence[str]
    has: Sequence[Sequence[str]]  # for each of them, the names of all its fields
    #: Field -> the samples that have it, in one or several pieces: their places in ``ids``, and their column.
    pieces: Mapping[str, Sequence[tuple[Sequence[int], Any]]]

    def items(self, field: str) -> list[Any]:
        """A cell for each sample. None: it lacks the field, or its item is None."""
        items: list[Any] = [None] * len(self.ids)
        for places, column in self.pieces[field]:
            for place, cell in zip(places, _cells_of(column), strict=True):
                items[place] = cell
        return items

    def cells(self) -> list[dict[str, Any]]:
        """For each sample the cells that it has."""
        columns = {name: self.items(name) for name in self.pieces}
        return [
            {name: items[place] for name, items in columns.items() if name in has} for place, has in enumerate(self.has)
        ]


def read_portion(
    client: DataPlaneClient, partition_id: str, ids: Sequence[str], fields: Sequence[str], *, share_rows: bool = False
) -> Portion:
    """Reads what samples have of some fields. Those that are cleared or lost meanwhile are left out."""
    while ids:
        try:
            has = client.list_fields(ids, partition_id)
            alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
            for place, written in enumerate(has):
                alike[tuple(name for name in fields if name in written)].append(place)
            pieces: dict[str, list[tuple[Sequence[int], Any]]] = {name: [] for name in fields}
            for names, places in alike.items():
                if names:
                    some = [ids[place] for place in places]
                    columns = client.get_samples(some, partition_id, names, share_rows=share_rows)
                    for name in names:
                        pieces[name].append((places, columns[name]))
            return Portion(ids, has, pieces)
        except MissingDataError as error:
            if isinstance(error, LostSamplesError):
                left = [sample_id for sample_id in ids if sample_id not in error.missing_samples]
            else:  # samples were cleared
                left = client.list_samples(partition_id, sample_ids=ids).sample_ids
            if left == ids:
                raise
            ids = left
    return Portion([], [], {})


def _is_shown(spec: FieldSpec) -> bool:
    """Whether a field is read unasked: objects, one value, a row of values, and what may be an image."""
    return spec.kind == "object" or spec.rank <= 1 or (spec.dtype == "uint8" and spec.rank == 3)


def _cells_of(column: Any) -> Sequence[Any]:
    rows: Sequence[Any] = column.unbind() if hasattr(column, "is_nested") else column.tolist()
    return rows


def _has_order(value: Any) -> bool:
    return value is not None and value == value
