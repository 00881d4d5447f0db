"""Converts a ledger's whole state to plain maps and back. A log begins with these maps.

The state is a sequence of sections. Each is a map for msgpack with its kind under ``part``. Their order is:

    ledger      counters
    writes      writes of committed puts that rows refer to; a row refers to a write by its index in this list
    partition   a registration; then, of the same partition,
      batches   what the ranks of a task were given, if claims have ranks
      seen      the ids ever written, if they are counted
      rows      the rows in order of first write, column by column
    pending     a put that is not yet committed
    garbage     refs that are free and not yet collected; and their put, if it was abandoned
    done        ids of requests that were carried out, and what is kept of their replies

Times are seconds left. What can be derived is not saved: views, groups, counts of rows and bytes, the heap of leases.
The queue for room is not saved either, since waiting puts report again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from typing import Any, Final, Literal, TypedDict

import msgspec

from dataplane_core.ledger import commands
from dataplane_core.ledger.checks import check_command
from dataplane_core.ledger.ledger import Ledger, LiveWrite, Pending, slots_of
from dataplane_core.ledger.partition import Partition, Task
from dataplane_core.ledger.rows import (
    NO_CELLS,
    Batch,
    Cells,
    Hold,
    Holder,
    Ranges,
    RankBatches,
    Ref,
    Row,
    group_of,
    packed_positions,
)
from dataplane_core.spec import FieldSpec, PartitionInfo, Seconds, TagValue, fits


class _Hold(TypedDict):
    """What a section says of a hold: of which task, and on which of the section's rows."""

    task_name: str
    token: str
    holder: str
    left_s: Seconds
    done: bool
    rows: Sequence[int]


#: Part -> what its section holds.
_FORMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ledger": {"next_write": int, "next_seq": int},
    "writes": {
        "write_ids": Sequence[bytes],
        "fields": Sequence[Sequence[str]],
        "row_bytes": Sequence[Sequence[int]],
        "lists": Sequence[Mapping[str, Literal["empty", "ints"]]],
    },
    "partition": {
        "partition_id": str,
        "epoch": str,
        "fields": Sequence[str],
        "num_samples": int | None,
        "consumer_tasks": Sequence[str],
        "grpo_group_size": int | None,
        "enums": Mapping[str, Sequence[str]],
        "followers": Sequence[str],
        "registered_by": str,
        "registered_at": float,
        "specs": Mapping[str, str],
        "broken_groups": Sequence[str],
        "version": int,
        "num_cleared": int,
    },
    "batches": {
        "task_name": str,
        "dp_rank": int,
        "indexes": Sequence[int],
        "batches": Sequence[tuple[Sequence[str], str | None, bool]],
        "last_seqs": Sequence[int],
        "num_ranks": Sequence[int | None],
        "gone": Sequence[int],
        "ended": Sequence[int],
    },
    "seen": {"sample_ids": Sequence[str]},
    "rows": {
        "sample_ids": Sequence[str],
        "seqs": Sequence[int],
        "tags": Sequence[Mapping[str, TagValue]],
        "ages_s": Sequence[Seconds],
        "fields": Sequence[Sequence[str]],
        "cells": Sequence[Sequence[int]],
        "holds": Sequence[_Hold],
    },
    "pending": {
        "write_id": bytes,
        "partition_id": str,
        "epoch": str,
        "version": int,
        "sample_ids": Sequence[str],
        "specs": Mapping[str, str],
        "writes": Sequence[tuple[Sequence[str], Sequence[int], Sequence[int] | None]],
        "tags": Sequence[Mapping[str, TagValue]] | None,
        "known_seqs": Sequence[int | None],
        "left_s": Seconds,
        "ttl_s": Seconds,
        "request_id": str | None,
    },
    "garbage": {"refs": Sequence[tuple[bytes, Sequence[int]]], "put": bytes | None},
    "done": {"request_ids": Sequence[str], "left_s": Sequence[Seconds], "replies": Sequence[Any]},
}
_SECTIONS: Final = {part: msgspec.defstruct(part, list(form.items())) for part, form in _FORMS.items()}

#: The most items of a section, which limits the memory for one section.
_SECTION_ITEMS: Final = 2_000
_WRITE_ID_BYTES: Final = 16


def to_state(ledger: Ledger, now: float) -> Iterator[dict[str, Any]]:
    """The sections of a ledger. The ledger must not change before the last one is taken.

    Args:
        ledger: The ledger.
        now: The time in seconds, on the clock of its commands.
    """
    yield {"part": "ledger", "next_write": ledger._next_write, "next_seq": ledger._next_seq}
    places: dict[int, int] = {}
    for some in _portions(ledger._writes.items()):
        for write_id, _ in some:
            places[write_id] = len(places)
        yield {
            "part": "writes",
            "write_ids": [pack_write_id(write_id) for write_id, _ in some],
            "fields": [list(write.slots) for _, write in some],
            "row_bytes": [write.row_bytes for _, write in some],
            "lists": [dict(write.lists) for _, write in some],
        }
    for partition in ledger._partitions.values():
        yield from _partition_state(partition, places, now)
    for write_id, pending in ledger._pending.items():
        put = pending.put
        yield {
            "part": "pending",
            "write_id": pack_write_id(write_id),
            "partition_id": put.partition_id,
            "epoch": put.epoch,
            "version": pending.version,
            "sample_ids": put.sample_ids,
            "specs": {name: spec.to_text() for name, spec in put.specs.items()},
            "writes": pack_writes(put.writes),
            "tags": put.tags,
            "known_seqs": [None if row is None else row.seq for row in pending.known],
            "left_s": max(0.0, pending.expires_at - now),
            "ttl_s": put.ttl_s,
            "request_id": put.request_id,
        }
    garbage: dict[int | None, list[Ref]] = {}
    for ref, abandoned in ledger._garbage.items():
        garbage.setdefault(abandoned, []).append(ref)
    for abandoned, all_refs in garbage.items():
        for refs in _portions(all_refs):
            of_put = None if abandoned is None else pack_write_id(abandoned)
            yield {"part": "garbage", "refs": pack_refs(refs), "put": of_put}
    for done in _portions(ledger._done.left(now)):
        request_ids, left_s, replies = zip(*done, strict=True)
        yield {"part": "done", "request_ids": request_ids, "left_s": left_s, "replies": replies}


class StateReader:
    """Restores a ledger from the sections of `to_state`, one after another.

    Attributes:
        ledger: The ledger, with the state of the sections taken so far.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._write_ids: list[int] = []
        self._partition: Partition | None = None

    def take(self, section: Mapping[str, Any], now: float) -> None:
        """Takes the next section. The seconds left of leases and unfinished puts count from ``now``.

        Raises:
            ValueError, KeyError, IndexError: It is no section, or refers to what the sections before it lack.
        """
        ledger, partition, part = self.ledger, self._partition, section["part"]
        if not (fits(part, str) and part in _SECTIONS and fits(section, _SECTIONS[part])):
            raise ValueError(f"section {part!r} has a part of a wrong type, or does not belong here")
        if part == "ledger":
            ledger._next_write = section["next_write"]
            ledger._next_seq = section["next_seq"]
        elif part == "writes":
            for each, fields, row_bytes, lists in _columns(section, "write_ids", "fields", "row_bytes", "lists"):
                write_id = unpack_write_id(each)
                self._write_ids.append(write_id)
                ledger._writes[write_id] = LiveWrite(slots_of(tuple(fields)), row_bytes, lists=lists)
        elif part == "partition":
            self._partition = _restore_partition(section)
            ledger._partitions[self._partition.partition_id] = self._partition
        elif part == "seen" and partition is not None:
            partition.seen.update(section["sample_ids"])
        elif part == "batches" and partition is not None:
            key = (section["task_name"], section["dp_rank"])
            partition.batches[key] = _restore_batches(section)
        elif part == "rows" and partition is not None:
            _restore_rows(partition, section, self._write_ids, now)
        elif part == "pending":
            ledger._pending[unpack_write_id(section["write_id"])] = _restore_pending(ledger, section, now)
        elif part == "garbage":
            put = section["put"]
            ledger._garbage.update(
                dict.fromkeys(unpack_refs(section["refs"]), None if put is None else unpack_write_id(put))
            )
        elif part == "done":
            for request_id, left_s, reply in _columns(section, "request_ids", "left_s", "replies"):
                ledger._done.restore(request_id, now + left_s, reply)
        else:
            raise ValueError(f"section {part!r} does not belong here")

    def end(self) -> None:
        """After the last section: counts what follows from the rows.

        Raises:
            KeyError, IndexError: They refer to what no section holds.
        """
        self.ledger.recount()


# --- one partition ----------------------------------------------------------------------------------------------------


def _partition_state(partition: Partition, places: Mapping[int, int], now: float) -> Iterator[dict[str, Any]]:
    info = partition.info
    yield {
        "part": "partition",
        "partition_id": partition.partition_id,
        "epoch": info.epoch,
        **info.registration(),
        "registered_by": info.registered_by,
        "registered_at": info.registered_at,
        "specs": {name: spec.to_text() for name, spec in partition.specs.items()},
        "broken_groups": sorted(partition.broken_groups),
        "version": partition.version,
        "num_cleared": partition.num_cleared,
    }
    for (task_name, dp_rank), batches in partition.batches.items():
        yield {
            "part": "batches",
            "task_name": task_name,
            "dp_rank": dp_rank,
            "indexes": list(batches.kept),
            "batches": [[list(each.sample_ids), each.token, each.exhausted] for each in batches.kept.values()],
            "last_seqs": [each.last_seq for each in batches.kept.values()],
            "num_ranks": [each.num_ranks for each in batches.kept.values()],
            "gone": list(batches.gone),
            "ended": list(batches.ended),
        }
    for some in _portions(sorted(partition.seen)):
        yield {"part": "seen", "sample_ids": some}
    for rows in _portions(partition.rows.values()):
        yield _rows_state(rows, places, now)


def _rows_state(rows: list[Row], places: Mapping[int, int], now: float) -> dict[str, Any]:
    """The section of some rows: cells as ``[fields, write, position, ...]``, holds grouped by task and lease."""
    patterns: dict[tuple[str, ...], int] = {}
    cells: list[list[int]] = []
    found: dict[Cells, list[int]] = {}
    holds: dict[tuple[str, str, str, float, bool], list[int]] = {}
    for index, row in enumerate(rows):
        shared = found.get(row.cells)
        if shared is None:
            names: list[list[str]] = [[] for _ in row.cells.write_ids]
            for name, number in row.cells.fields.items():
                names[number].append(name)
            shared = found[row.cells] = [patterns.setdefault(tuple(each), len(patterns)) for each in names]
        flat: list[int] = []
        for pattern, (write_id, pos) in zip(shared, row.refs, strict=True):
            flat += (pattern, places[write_id], pos)
        cells.append(flat)
        for task_name, hold in row.holds.items():
            left_s = 0.0 if hold.done else max(0.0, hold.expires_at - now)
            holds.setdefault((task_name, hold.token, hold.holder, left_s, hold.done), []).append(index)
    lease = ("task_name", "token", "holder", "left_s", "done")
    return {
        "part": "rows",
        "sample_ids": [row.sample_id for row in rows],
        "seqs": [row.seq for row in rows],
        "tags": [row.tags for row in rows],
        "ages_s": [max(0.0, now - row.written_at) for row in rows],
        "fields": [list(pattern) for pattern in patterns],
        "cells": cells,
        "holds": [{**dict(zip(lease, key, strict=True)), "rows": held} for key, held in holds.items()],
    }


def _restore_partition(section: Mapping[str, Any]) -> Partition:
    info = PartitionInfo.of(section["epoch"], section)
    return Partition(
        section["partition_id"],
        info,
        {name: Task() for name in info.consumer_tasks},
        specs=_unpack_specs(section["specs"]),
        broken_groups=set(section["broken_groups"]),
        version=section["version"],
        num_cleared=section["num_cleared"],
    )


def _restore_batches(section: Mapping[str, Any]) -> RankBatches:
    """Reads what a rank was given."""
    restored = RankBatches(gone=Ranges(section["gone"]), ended=Ranges(section["ended"]))
    columns = _columns(section, "indexes", "batches", "last_seqs", "num_ranks")
    for index, (sample_ids, token, exhausted), last, num in columns:
        restored.kept[index] = Batch(sample_ids, token, exhausted, last, num)
    return restored


def _restore_rows(partition: Partition, section: Mapping[str, Any], write_ids: list[int], now: float) -> None:
    grouped = partition.info.grpo_group_size is not None
    patterns = [tuple(names) for names in section["fields"]]
    if not all(partition.specs.keys() >= set(names) for names in patterns):
        raise ValueError("a field has no spec")
    num_rows = len(partition.rows) + len(section["sample_ids"])
    rows: list[Row] = []
    last = next((row.seq for row in reversed(partition.rows.values())), 0)
    if any(seq <= before for before, seq in pairwise([last, *section["seqs"]])):
        raise ValueError("its rows are not in order")
    if any(len(flat) % 3 for flat in section["cells"]) or min(chain.from_iterable(section["cells"]), default=0) < 0:
        raise ValueError("its cells refer to no write")
    found: dict[tuple[int, ...], tuple[Cells, list[int]]] = {}  # and where a row's positions are in its numbers
    columns = _columns(section, "sample_ids", "seqs", "tags", "cells", "ages_s")
    for sample_id, seq, tags, flat, age_s in columns:
        shared = (*flat[0::3], *flat[1::3])
        known = found.get(shared)
        if known is None:
            writes = [(write_ids[place], patterns[each]) for each, place in zip(flat[0::3], flat[1::3], strict=True)]
            joined, joint = NO_CELLS.joined(writes)
            known = found[shared] = joined, [3 * number + 2 for number in joint.sources]
        cells, places = known
        positions = packed_positions([flat[place] for place in places])
        group = group_of(sample_id) if grouped else None
        row = partition.rows[sample_id] = Row(sample_id, seq, group, now - age_s, cells, positions, tags)
        rows.append(row)
    if len(partition.rows) != num_rows:
        raise ValueError("a sample is there twice")
    for held in section["holds"]:
        if min(held["rows"], default=0) < 0:
            raise ValueError("a lease is on no row")
        task_name, done = held["task_name"], held["done"]
        expires_at = 0.0 if done else now + held["left_s"]
        hold = Hold(held["token"], held["holder"], expires_at, done)
        holder = Holder(task_name, lambda _, hold=hold: hold)  # type: ignore[misc]
        for index in held["rows"]:
            if task_name in rows[index].holds:
                raise ValueError("a task holds a sample twice")
            holder.give(rows[index])


def _restore_pending(ledger: Ledger, section: Mapping[str, Any], now: float) -> Pending:
    partition = ledger._partitions.get(section["partition_id"])
    rows = {} if partition is None else partition.rows
    known: list[Row | None] = []
    for sample_id, seq in _columns(section, "sample_ids", "known_seqs"):
        row = rows.get(sample_id)
        # if the row was cleared since the put began, a new Row stands for it: the commit is then refused
        known.append(
            None if seq is None else row if row is not None and row.seq == seq else Row(sample_id, seq, None, 0.0)
        )
    put = commands.BeginPut(
        *(section["partition_id"], section["sample_ids"], _unpack_specs(section["specs"])),
        *(unpack_writes(section["writes"]), section["tags"], section["epoch"]),
        write_id=unpack_write_id(section["write_id"]),
        ttl_s=section["ttl_s"],
        request_id=section["request_id"],
    )
    check_command(put)
    return Pending(put, section["version"], known, expires_at=now + section["left_s"])


def _unpack_specs(packed: Mapping[str, str]) -> dict[str, FieldSpec]:
    return {name: FieldSpec.from_text(text) for name, text in packed.items()}


def _columns(section: Mapping[str, Any], *names: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(section[name] for name in names), strict=True)


def _portions(items: Iterable[Any]) -> Iterator[list[Any]]:
    left = iter(items)
    while some := list(islice(left, _SECTION_ITEMS)):
        yield some


def pack_write_id(write_id: int) -> bytes:
    """A write id as bytes: it does not fit in an integer of msgpack."""
    return write_id.to_bytes(_WRITE_ID_BYTES, "big")


def unpack_write_id(data: bytes) -> int:
    """Reads `pack_write_id`'s bytes.

    Raises:
        ValueError: They are too many or too few.
    """
    if len(data) != _WRITE_ID_BYTES:
        raise ValueError(f"a write id has {len(data)} bytes")
    return int.from_bytes(data, "big")


def pack_writes(writes: Sequence[commands.Write]) -> list[list[Any]]:
    """Writes of a put as ``[fields, row bytes, positions or None]``."""
    return [
        [list(each.fields), list(each.row_bytes), None if each.positions is None else list(each.positions)]
        for each in writes
    ]


def unpack_writes(packed: Sequence[Sequence[Any]]) -> list[commands.Write]:
    """Reads `pack_writes`' lists."""
    return [commands.Write(*each) for each in packed]


def pack_refs(refs: Sequence[Ref]) -> list[list[Any]]:
    """Refs as ``[write id, positions]``, so that each write id is stored once."""
    positions: dict[int, list[int]] = {}
    for write_id, pos in refs:
        positions.setdefault(write_id, []).append(pos)
    return [[pack_write_id(write_id), each] for write_id, each in positions.items()]


def unpack_refs(packed: Sequence[Sequence[Any]]) -> list[Ref]:
    """Reads `pack_refs`' lists."""
    return [(unpack_write_id(write_id), pos) for write_id, positions in packed for pos in positions]
