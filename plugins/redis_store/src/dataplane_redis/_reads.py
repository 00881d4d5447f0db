"""Reads and listings. To read, a script locates the rows, and commands then fetch them.

Rows are never changed after they are written, and their keys are never used again. So a read gets whole rows, or finds
that they are gone and locates them again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias

from dataplane_core.backends import Backend
from dataplane_core.codec import split_rows
from dataplane_core.errors import (
    FrameError,
    LostSamplesError,
    MissingDataError,
    OpenCellsError,
    OperationTimeoutError,
)
from dataplane_core.spec import (
    FieldList,
    FieldSpec,
    FieldsRequest,
    GetRequest,
    ListRequest,
    SampleList,
    SharedRows,
    TagValue,
    WireBatch,
    WireColumn,
)
from dataplane_redis._payload import Payload
from dataplane_redis._protocol import row_overhead
from dataplane_redis._scripts import (
    INLINE_BYTES,
    INLINE_ROWS,
    Refs,
    pack_filter,
    text_of,
    unpack_layout,
    unpack_rows,
    unpack_tags,
)
from dataplane_redis._session import Session

#: Rows that one script locates, and rows that it lists.
_LOCATE_ROWS: Final = 4000
_LIST_ROWS: Final = 4000

#: Where a row is: the write, and the position in it.
_Place: TypeAlias = tuple[bytes, int]


class Reads(Backend):
    """The reads of `RedisBackend`."""

    _session: Session
    _payload: Payload

    def get_samples(self, request: GetRequest) -> WireBatch:
        """Locates the rows and fetches them. Starts again if rows were overwritten in between.

        An overwritten row gets a new place. So if the same place is empty twice, its payload is lost.
        """
        what = f"get_samples('{request.partition_id}', {len(request.sample_ids)} samples)"
        moved: set[_Place] = set()
        most = INLINE_BYTES if len(request.sample_ids) <= INLINE_ROWS else -1
        while True:
            rows, layouts, sent = self._locate(
                what, request.partition_id, request.sample_ids, request.fields, most, request.deadline
            )
            refs = unpack_rows([row for row in rows if row is not None])
            plan_of = functools.cache(functools.partial(_plan, layouts=layouts, fields=request.fields))
            picks = [plan_of(_layouts_of(each)) for each in refs]
            if None in rows or None in picks:
                _raise_missing(what, request, rows, layouts)
            specs = _specs_of(what, request, layouts, refs, picks)
            columns, empty = self._fetch(what, request, refs, picks, [len(each) for each in layouts], sent)
            if not empty:
                return WireBatch(columns=columns, specs=specs)
            lost = [each for each in empty if sent is not None or each[:2] in moved]
            if lost:
                _raise_lost(what, request, [(row, pairs) for _, _, row, pairs in lost])
            moved.update(each[:2] for each in empty)
            if self._payload.nodes is not None:  # a node that was replaced may not know it yet
                self._payload.nodes.refresh(request.deadline)
            if time.monotonic() >= request.deadline:
                raise OperationTimeoutError(
                    f"{what} timed out: the rows were overwritten faster than they could be read."
                )

    def list_fields(self, request: FieldsRequest) -> FieldList:
        """Lists the produced fields of samples."""
        what = f"get_samples('{request.partition_id}', {len(request.sample_ids)} samples)"
        rows, layouts, _ = self._locate(what, request.partition_id, request.sample_ids, [], -1, request.deadline)
        absent = [sample_id for sample_id, row in zip(request.sample_ids, rows, strict=True) if row is None]
        if absent:
            raise MissingDataError.for_samples(what, request.partition_id, absent)
        patterns: dict[tuple[str, ...], int] = {}
        numbers: dict[tuple[int, ...], int] = {}  # layouts of a row -> pattern
        index = []
        for refs in unpack_rows([row for row in rows if row is not None]):
            key = _layouts_of(refs)
            if key not in numbers:
                names = tuple(dict.fromkeys(name for layout in key for name in layouts[layout]))
                numbers[key] = patterns.setdefault(names, len(patterns))
            index.append(numbers[key])
        return FieldList(patterns=list(patterns), index=index)

    def _locate(
        self, what: str, partition_id: str, ids: Sequence[str], fields: Sequence[str], most: int, deadline: float
    ) -> tuple[list[bytes | None], Sequence[Mapping[str, FieldSpec]], list[Any] | None]:
        """The rows, None for a sample that does not exist; the layouts of the partition; and the payload of all refs of
        the rows, if it has at most so many bytes. Then the rows have only the refs that the fields may need."""
        rows: list[bytes | None] = []
        first, epoch = 0, b""
        while True:
            some = ids[first : first + _LOCATE_ROWS]
            reply = self._session.run(what, deadline, "locate", name=partition_id, ids=some, fields=fields, most=most)
            _, found, layouts, now, *sent = reply
            if first and now != epoch:  # the partition was registered again
                rows, first = [], 0
                continue
            rows += found
            first, epoch = first + _LOCATE_ROWS, now
            if first >= len(ids):  # layouts are only added, so this reply has all of them
                return rows, list(map(unpack_layout, layouts)), sent[0] if sent else None

    def _fetch(
        self,
        what: str,
        request: GetRequest,
        refs: Sequence[Refs],
        picks: Sequence[Any],
        num_cells: Sequence[int],
        sent: Sequence[Any] | None,
    ) -> tuple[dict[str, WireColumn | SharedRows], list[tuple[bytes, int, int, Any]]]:
        """Fetches what `_plan` picked of each row's refs, unless the script sent the payload of all refs.

        Returns:
            The columns; and for each place that was empty: write, position, row of the request, (column, slot) pairs.
            If any was, there are no columns.
        """
        uses: dict[_Place, list[tuple[int, Any]]] = {}  # place -> rows of the request, each with (column, slot) pairs
        wanted: list[tuple[bytes, int, int]] = []
        payload: list[Any] = []
        start = 0
        for row, (each, plan) in enumerate(zip(refs, picks, strict=True)):
            for index, pairs in plan:
                write, position, layout, size = each[index]
                use = uses.get((write, position))
                if use is not None:
                    use.append((row, pairs))
                    continue
                uses[write, position] = [(row, pairs)]
                if sent is not None:
                    payload.append(sent[start + index])
                else:
                    wanted.append((write, position, size + row_overhead(num_cells[layout])))
            start += len(each)
        places: list[_Place] = list(uses)
        if sent is None:
            places, payload = self._payload.fetch(what, request.deadline, wanted)
        if None in payload:
            empty = [place for place, data in zip(places, payload, strict=True) if data is None]
            return {}, [(*place, row, pairs) for place in empty for row, pairs in uses[place]]
        columns: list[list[Any]] = [[None] * len(refs) for _ in request.fields]
        shared: set[int] = set()
        try:
            rows = split_rows(payload)
        except FrameError as error:
            row, pairs = uses[places[error.row or 0]][0]
            error.add_place([request.fields[column] for column, _ in pairs], row)
            raise
        for place, frames in zip(places, rows, strict=True):
            for row, pairs in uses[place]:
                for column, slot in pairs:
                    if slot >= len(frames):
                        short = FrameError(f"its row holds {len(frames)} cells. Expected more than {slot}.")
                        short.add_place([request.fields[column]], row)
                        raise short
                    columns[column][row] = frames[slot]
            if len(uses[place]) > 1:
                shared.update(column for column, _ in uses[place][0][1])
        return {
            name: _shared_rows(column) if number in shared else column
            for number, (name, column) in enumerate(zip(request.fields, columns, strict=True))
        }, []

    def list_samples(self, request: ListRequest) -> SampleList:
        """Lists ids and tags."""
        what = f"list_samples('{request.partition_id}')"
        ids: list[str] = []
        tags: list[dict[str, TagValue]] = []
        conditions, epoch, seq = pack_filter(request.tag_filter), b"", b"0"
        chosen, first = request.sample_ids or [], 0
        while seq or first < len(chosen):
            reply = self._session.run(
                what,
                request.deadline,
                "list",
                name=request.partition_id,
                epoch=epoch,
                conditions=conditions,
                seq=seq,
                most=_LIST_ROWS,
                chosen=chosen[first : first + _LIST_ROWS],
            )
            if reply[0] == b"changed":  # the partition was registered again
                ids, tags, epoch, seq, first = [], [], b"", b"0", 0
                continue
            first += _LIST_ROWS
            _, some_ids, some_tags, epoch, seq = reply
            ids += map(text_of, some_ids)
            tags += map(unpack_tags, some_tags)
        return SampleList(sample_ids=ids, tags=tags)


def _plan(
    key: tuple[int, ...], layouts: Sequence[Mapping[str, FieldSpec]], fields: Sequence[str]
) -> list[tuple[int, list[tuple[int, int]]]] | None:
    """Which refs of a row a read needs, and which of their cells: (index of the ref, [(column, slot), ...]) each. None
    if a cell is not produced."""
    slots = [{name: slot for slot, name in enumerate(layouts[number])} for number in key]
    found: dict[int, list[tuple[int, int]]] = {}
    for column, name in enumerate(fields):
        index = max((index for index, mine in enumerate(slots) if name in mine), default=-1)  # the latest write has it
        if index < 0:
            return None
        found.setdefault(index, []).append((column, slots[index][name]))
    return list(found.items())


def _specs_of(
    what: str,
    request: GetRequest,
    layouts: Sequence[Mapping[str, FieldSpec]],
    refs: Sequence[Refs],
    picks: Sequence[Any],
) -> dict[str, FieldSpec]:
    """The spec of each field's cells. Raises `OpenCellsError` if cells of one field have different forms."""
    specs: dict[str, FieldSpec] = {}
    for layout in layouts:  # in the order of their first writes
        for name in filter(layout.__contains__, request.fields):
            kept = specs.setdefault(name, layout[name])
            if kept.is_open:
                specs[name] = kept.after(layout[name]) or kept
    others = [  # of each layout, the cells that are not stored as their spec says
        {
            name: spec.reading(layout[name].lists)
            for name, spec in specs.items()
            if name in layout and layout[name].lists
        }
        for layout in layouts
    ]
    if all(spec is specs[name] for each in others for name, spec in each.items()):
        return specs
    groups: dict[tuple[FieldSpec, ...], list[str]] = {}
    for sample_id, each, plan in zip(request.sample_ids, refs, picks, strict=True):
        found = dict(specs)
        for index, pairs in plan:
            of_layout = others[each[index][2]]
            found.update(
                {name: of_layout[name] for column, _ in pairs if (name := request.fields[column]) in of_layout}
            )
        groups.setdefault(tuple(found.values()), []).append(sample_id)
    if len(groups) > 1:
        raise OpenCellsError.of_groups(what, groups.values())
    return dict(zip(specs, *groups, strict=True))


def _layouts_of(refs: Refs) -> tuple[int, ...]:
    return tuple([layout for _, _, layout, _ in refs])


def _shared_rows(frames: Sequence[Any]) -> SharedRows:
    """A column whose rows repeat: equal ones are the same object."""
    rows = {id(frame): frame for frame in frames}
    places = {key: place for place, key in enumerate(rows)}
    return SharedRows(list(rows.values()), [places[id(frame)] for frame in frames])


def _raise_missing(
    what: str, request: GetRequest, rows: Sequence[bytes | None], layouts: Sequence[Mapping[str, FieldSpec]]
) -> NoReturn:
    """Some samples do not exist, or some cells are not produced."""
    absent = [sample_id for sample_id, row in zip(request.sample_ids, rows, strict=True) if row is None]
    if absent:
        raise MissingDataError.for_samples(what, request.partition_id, absent)
    cells = []
    for sample_id, refs in zip(request.sample_ids, unpack_rows([row for row in rows if row is not None]), strict=True):
        has = {name for _, _, layout, _ in refs for name in layouts[layout]}
        lacking = [name for name in request.fields if name not in has]
        if lacking:
            cells.append((sample_id, lacking))
    raise MissingDataError.for_cells(what, request.partition_id, cells)


def _raise_lost(what: str, request: GetRequest, lost: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> NoReturn:
    """The partition lists rows whose payload is gone: each by its index in the request, with the (column, slot) pairs
    that were asked for."""
    columns: dict[int, set[int]] = {}
    for row, pairs in sorted(lost):
        columns.setdefault(row, set()).update(column for column, _ in pairs)
    cells = [
        (request.sample_ids[row], [request.fields[each] for each in sorted(gone)]) for row, gone in columns.items()
    ]
    raise LostSamplesError.for_payload(what, request.partition_id, cells)
