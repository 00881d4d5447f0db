"""A ledger's whole state as bytes, with which a log begins. Times are on the ledger's clock.

What rows share is written once, and they name it by its index: their holds, and their cells, whose fields are shared
too. What follows from the rows is not written: views, groups, counts of rows and bytes, the heap of leases. Nor is the
queue for room, since puts that wait say so again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from dataplane_core.ledger.ledger import Ledger, LiveWrite, Pending
from dataplane_core.ledger.partition import Partition
from dataplane_core.ledger.rows import Cells, Hold, RankBatches, Row, group_of
from dataplane_core.spec import FieldSpec, PartitionInfo, TagValue

_T = TypeVar("_T")
#: An index, a position, or the number of something.
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
#: Fields, each with the number of its write among those of a row, or with its slot in a write.
_Fields: TypeAlias = dict[str, _Number]


class _Partition(msgspec.Struct, array_like=True):
    """A partition. A row: its id, seq, time, cells, positions, tags and holds."""

    partition_id: str
    info: PartitionInfo
    specs: dict[str, FieldSpec]
    num_cleared: int
    seen: list[str]
    broken_groups: list[str]
    batches: list[tuple[str, int, RankBatches]]
    cells: list[tuple[_Number, tuple[int, ...]]]
    holds: list[dict[str, Hold]]
    rows: list[tuple[str, _Number, float, _Number, _Number | tuple[_Number, ...], dict[str, TagValue], _Number]]


class _State(msgspec.Struct, array_like=True):
    """All of it. A write: its id, fields, bytes of its rows, `LiveWrite.lists` and digests; garbage: see `Ledger`."""

    next_write: int
    next_seq: int
    fields: list[_Fields]
    writes: list[tuple[int, _Number, list[_Number], dict[str, Literal["empty", "ints"]], list[bytes]]]
    partitions: list[_Partition]
    pending: dict[int, Pending]
    garbage: list[tuple[int, int, int | None]]
    done: dict[str, tuple[float, Any]]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_State).decode


def pack_state(ledger: Ledger) -> bytes:
    shared = [row.cells.fields for partition in ledger._partitions.values() for row in partition.rows.values()]
    fields, places = _distinct([*(write.slots for write in ledger._writes.values()), *shared])
    state = _State(
        ledger._next_write,
        ledger._next_seq,
        fields,
        [
            (write_id, places[id(write.slots)], write.row_bytes, dict(write.lists), write.digests)
            for write_id, write in ledger._writes.items()
        ],
        [_pack_partition(partition, places) for partition in ledger._partitions.values()],
        ledger._pending,
        [(*ref, put) for ref, put in ledger._garbage.items()],
        ledger._done.kept,
    )
    return _encode(state)


def unpack_state(data: bytes) -> Ledger:
    """The ledger of a state. Raises ValueError, KeyError or IndexError for one that is none, or lacks parts."""
    state, ledger = _decode(data), Ledger()
    ledger._next_write, ledger._next_seq = state.next_write, state.next_seq
    for write_id, place, row_bytes, lists, digests in state.writes:
        ledger._writes[write_id] = LiveWrite(state.fields[place], row_bytes, lists, digests=digests)
    for packed in state.partitions:
        ledger._partitions[packed.partition_id] = _unpack_partition(packed, state.fields)
    for pending in state.pending.values():
        pending.put.check()
    ledger._pending = state.pending
    ledger._garbage = {(write_id, pos): put for write_id, pos, put in state.garbage}
    for request_id, (ends_at, reply) in state.done.items():
        ledger._done.keep(request_id, ends_at, reply)
    ledger.recount()
    return ledger


def _pack_partition(partition: Partition, places: Mapping[int, int]) -> _Partition:
    rows = partition.rows.values()
    cells, places_of_cells = _distinct([row.cells for row in rows])
    holds, places_of_holds = _distinct([row.holds for row in rows])
    return _Partition(
        partition.partition_id,
        partition.info,
        partition.specs,
        partition.num_cleared,
        sorted(partition.seen),
        sorted(partition.broken_groups),
        [(task_name, dp_rank, batches) for (task_name, dp_rank), batches in partition.batches.items()],
        [(places[id(one.fields)], one.write_ids) for one in cells],
        [dict(one) for one in holds],
        [
            (
                *(row.sample_id, row.seq, row.written_at, places_of_cells[id(row.cells)]),
                *(row.positions, dict(row.tags), places_of_holds[id(row.holds)]),
            )
            for row in rows
        ],
    )


def _unpack_partition(packed: _Partition, fields: Sequence[_Fields]) -> Partition:
    grouped = packed.info.is_grouped
    cells = [Cells(fields[place], write_ids) for place, write_ids in packed.cells]
    rows = {
        sample_id: Row(
            *(sample_id, seq, group_of(sample_id) if grouped else None, written_at),
            *(cells[cells_place], positions, tags, packed.holds[holds_place]),
        )
        for sample_id, seq, written_at, cells_place, positions, tags, holds_place in packed.rows
    }
    if len(rows) < len(packed.rows) or any(row.seq >= later.seq for row, later in pairwise(rows.values())):
        raise ValueError("its rows are not in order, or one is there twice")
    return Partition(
        *(packed.partition_id, packed.info, rows, packed.specs, set(packed.seen), set(packed.broken_groups)),
        packed.num_cleared,
        {(task_name, dp_rank): batches for task_name, dp_rank, batches in packed.batches},
    )


def _distinct(objects: Iterable[_T]) -> tuple[list[_T], dict[int, int]]:
    """The objects, each once, and the index of each by its identity."""
    by_id = {id(one): one for one in objects}
    return list(by_id.values()), {key: place for place, key in enumerate(by_id)}
