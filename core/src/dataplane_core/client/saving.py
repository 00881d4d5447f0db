"""`DataPlaneClient.save` and `load`: partitions with their rows, tags, cursors and schema, in a folder on disk.

They use only the operations that every backend has, so a save of one backend can be loaded into any other.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, NamedTuple, TypedDict

from dataplane_core.arguments import check_names, checked, fits
from dataplane_core.client.connection import Connection
from dataplane_core.client.explaining import list_partitions
from dataplane_core.client.registering import register
from dataplane_core.client.rows import clear, describe, export, get, list_fields, list_samples, put, set_cursor
from dataplane_core.errors import (
    CorruptDataError,
    DataPlaneError,
    InvalidRequestError,
    InvalidTypeError,
    MissingDataError,
    StalePartitionError,
    UnknownPartitionError,
    preview,
)
from dataplane_core.ledger import group_of
from dataplane_core.packed import pack_msgpack
from dataplane_core.saves import SavedFiles, pack_rows, tensor_rows, unpack_rows, write_save
from dataplane_core.spec import (
    Capability,
    FieldSpec,
    PartitionDescription,
    RegisterRequest,
    TagValue,
)
from dataplane_core.spec.replies import (
    PartitionState,
    Registration,
)

_KIND: Final = "dataplane-partitions"
#: Size of a block that is aimed at, the rows of the first block of a partition, and the most rows of any.
_BLOCK_BYTES: Final = 16 << 20
_FIRST_ROWS: Final = 64
_MOST_ROWS: Final = 4096
#: How often one row may change while it is read.
_TRIES: Final = 100


class _Entry(TypedDict):
    """What the manifest says of a partition."""

    partition_id: str
    registration: Registration
    num_blocks: int
    num_samples: int
    cleared_ids: Sequence[str]
    broken_groups: Sequence[str]


class _Head(TypedDict):
    """The head of a block."""

    sample_ids: Sequence[str]
    created: Sequence[str]
    tags: Sequence[Mapping[str, TagValue]]
    consumed: Mapping[str, Sequence[str]]


# --- what of the client it uses ---------------------------------------------------------------------------------------


def _described(connection: Connection, partition_id: str) -> PartitionDescription:
    with connection.operation("describe", partition_id, needs=Capability.LISTING):
        return describe(connection, partition_id)


def _put(
    connection: Connection, partition_id: str, sample_ids: Sequence[str], columns: dict[str, Any] | None, tags: Any
) -> None:
    with connection.operation("put_samples", partition_id):
        put(connection, partition_id, sample_ids, columns, tags)


def _clear(connection: Connection, partition_id: str, sample_ids: Sequence[str] | None) -> None:
    with connection.operation("clear_samples", partition_id):
        clear(connection, partition_id, sample_ids)


# --- save -------------------------------------------------------------------------------------------------------------


def save(
    connection: Connection,
    folder: str | os.PathLike[str],
    metadata: Mapping[str, Any] | None,
    partitions: Sequence[str] | None,
) -> None:
    """See `DataPlaneClient.save`."""
    try:
        given = dict(metadata or {})
        json.dumps(given)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(f"save refused: metadata must be a dict of JSON values: {error}.") from error
    if partitions is None:
        with connection.operation("list_partitions", needs=Capability.LISTING):
            names = list_partitions(connection)
    else:
        names = check_names("save: partitions", partitions)
    saved: list[dict[str, Any]] = []
    body = {"metadata": given, "partitions": saved}  # filled while the blocks are written
    write_save(folder, _KIND, body, (block for name in names for block in _blocks_of(connection, name, saved)))


def _blocks_of(connection: Connection, partition_id: str, saved: list[dict[str, Any]]) -> Iterator[bytes]:
    """The blocks of a partition. Adds its entry to ``saved``."""
    info = _described(connection, partition_id).info
    seen = _Seen.of(connection, partition_id, None)
    state = export(connection, "save", partition_id)  # after the list: so it knows what was cleared before
    consumed = _consumed(state)
    reader = _Reader(connection, partition_id)
    num_blocks = num_saved = 0
    listed = list(seen.rows)
    start, num_rows = 0, _FIRST_ROWS
    while start < len(listed):
        some = listed[start : start + num_rows]
        parts = reader.read(some, seen, consumed)
        # the first block of a portion creates all of its rows, so that their order is kept
        created = {sample_id: (tags, tasks) for part in parts for sample_id, tags, tasks in part.rows}
        batches = [batch for part in parts for batch in part.batches] or ([([], {})] if created else [])
        size_bytes = 0
        for number, (ids, columns) in enumerate(batches):
            rows = created if number == 0 else {}
            head = {
                "sample_ids": ids,
                "created": list(rows),
                "tags": [tags for tags, _ in rows.values()],
                "consumed": {task: [each for each, (_, tasks) in rows.items() if task in tasks] for task in consumed},
            }
            block = pack_rows(columns, len(ids), head, allow_pickle=connection.config.allow_pickle)
            size_bytes += len(block)
            num_blocks += 1
            num_saved += len(rows)
            yield block
        start += len(some)
        mean_bytes = max(1, size_bytes // max(1, len(some)))
        num_rows = max(1, min(_MOST_ROWS, 4 * num_rows, _BLOCK_BYTES // mean_bytes))
    if _described(connection, partition_id).info.epoch != info.epoch:
        raise StalePartitionError(
            f"save: partition '{partition_id}' was registered again while it was saved.", retryable=True
        )
    gone = reader.gone
    cleared = dict.fromkeys([*state.cleared_ids, *(gone if info.num_samples is not None else ())])
    broken = set(state.broken_groups)
    if info.grpo_group_size is not None:
        broken.update(map(group_of, gone))
        # a group whose cleared member was written again: any of its members stands for the one that was cleared
        unnamed = broken.difference(map(group_of, cleared))
        for sample_id in listed:
            if (group := group_of(sample_id)) in unnamed:
                unnamed.remove(group)
                cleared[sample_id] = None
    saved.append(
        {
            "partition_id": partition_id,
            "registration": info.registration(),
            "num_blocks": num_blocks,
            "num_samples": num_saved,
            "cleared_ids": list(cleared),
            "broken_groups": sorted(broken),
        }
    )


@dataclass(frozen=True)
class _Seen:
    """Rows as they are listed: the tags and the names of the fields of each that is there."""

    rows: Mapping[str, tuple[Mapping[str, TagValue], Sequence[str]]]

    @classmethod
    def of(cls, connection: Connection, partition_id: str, sample_ids: Sequence[str] | None) -> _Seen:
        while True:
            with connection.operation("list_samples", partition_id, needs=Capability.LISTING):
                listed = list_samples(connection, partition_id, None, sample_ids)
            what = f"save: get_samples('{partition_id}', {listed.size} samples)"
            try:
                fields = list_fields(connection, what, partition_id, listed.sample_ids) if listed.size else []
            except UnknownPartitionError:
                raise
            except MissingDataError:
                continue  # some were cleared since they were listed
            return cls(dict(zip(listed.sample_ids, zip(listed.tags or (), fields, strict=True), strict=True)))

    def packed(self, sample_ids: Sequence[str]) -> bytes:
        """How these rows were seen, to be compared: as values, two NaN of a tag differ."""
        return pack_msgpack([self.rows.get(each) for each in sample_ids])


class _Part(NamedTuple):
    """Rows that were read: the tags of each, and the tasks that had consumed it; and their columns, by the ids that
    have them."""

    rows: list[tuple[str, Mapping[str, TagValue], set[str]]]
    batches: list[tuple[list[str], dict[str, Any]]]


def _consumed(state: PartitionState) -> dict[str, set[str]]:
    return {task: set(ids) for task, ids in state.consumed.items()}


class _Reader:
    """Reads rows of a partition while others write.

    Each row is as it was at one moment: its tags and the names of its fields are listed before its cursors and cells
    are read, and once more afterwards. If they differ, it is read again. Cells of several reads are read twice: a put
    may change cells and no tag. Such a put may be newer than the cursors.

    Attributes:
        gone: The rows that were cleared meanwhile.
    """

    def __init__(self, connection: Connection, partition_id: str) -> None:
        self._connection = connection
        self._partition_id = partition_id
        self._specs: dict[str, FieldSpec] = {}
        self.gone: list[str] = []

    def read(
        self, ids: Sequence[str], before: _Seen, consumed: Mapping[str, set[str]], tries: int = _TRIES
    ) -> list[_Part]:
        """Reads rows, in this order.

        Args:
            ids: The rows.
            before: How they were seen before ``consumed``.
            consumed: Task -> what it had consumed.
            tries: How often one row may change while it is read.

        Raises:
            StalePartitionError: A row changes all the time.
        """
        there = [sample_id for sample_id in ids if sample_id in before.rows]
        self.gone += [sample_id for sample_id in ids if sample_id not in before.rows]
        if not there:
            return []
        try:
            batches = self._columns(there, before)
        except UnknownPartitionError:
            raise
        except MissingDataError:
            batches = None
        is_whole = batches is not None and (len(batches) < 2 or self._are_read_again(batches, there, before))
        after = _Seen.of(self._connection, self._partition_id, there)
        if batches is None and after.rows.keys() == set(there):
            self._columns(there, after)  # raises, unless they were cleared and written again: lost cells are no change
        if batches is not None and is_whole and after.packed(there) == before.packed(there):
            given = [{task for task, ids in consumed.items() if each in ids} for each in there]
            if any(given):  # a row that was cleared and written as before since then is consumed no longer
                consumed = _consumed(export(self._connection, "save", self._partition_id))
            if all(each in consumed.get(task, ()) for each, tasks in zip(there, given, strict=True) for task in tasks):
                tags = [before.rows[each][0] for each in there]
                return [_Part(list(zip(there, tags, given, strict=True)), batches)]
        if not tries:
            raise StalePartitionError(f"save: sample '{there[0]}' is written all the time.", retryable=True)
        consumed = _consumed(export(self._connection, "save", self._partition_id))
        half = (len(there) + 1) // 2  # one of many changes at any time, one alone does not
        parts = (self.read(some, after, consumed, tries - (len(some) == 1)) for some in (there[:half], there[half:]))
        return [part for some in parts for part in some]

    def _columns(self, ids: Sequence[str], seen: _Seen) -> list[tuple[list[str], dict[str, Any]]]:
        """Ids and columns of the rows: fields that the same rows have are read together."""
        rows_with: dict[str, list[str]] = {}
        for sample_id in ids:
            for name in seen.rows[sample_id][1]:
                rows_with.setdefault(name, []).append(sample_id)
        by_rows: dict[tuple[str, ...], list[str]] = {}
        for name, rows in rows_with.items():
            by_rows.setdefault(tuple(rows), []).append(name)
        return [(list(some), self._read(some, names)) for some, names in by_rows.items()]

    def _read(self, ids: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
        """The columns of rows: those that the store shares are read once, and saved once."""
        with self._connection.operation("get_samples", self._partition_id):
            columns = get(self._connection, self._partition_id, ids, names, share_rows=True)
        if any(name not in self._specs for name in names):
            self._specs.update(_described(self._connection, self._partition_id).specs)
        return tensor_rows(dict(columns.items()), self._specs)

    def _are_read_again(self, batches: list[tuple[list[str], dict[str, Any]]], ids: list[str], seen: _Seen) -> bool:
        """Whether the cells are still those that were read."""
        try:
            again = self._columns(ids, seen)
        except UnknownPartitionError:
            raise
        except MissingDataError:
            return False
        pickles = self._connection.config.allow_pickle
        old, new = (
            [pack_rows(columns, len(some), {}, allow_pickle=pickles) for some, columns in each]
            for each in (batches, again)
        )
        return old == new


# --- load -------------------------------------------------------------------------------------------------------------


def load(connection: Connection, folder: str | os.PathLike[str], partitions: Sequence[str] | None) -> dict[str, Any]:
    """See `DataPlaneClient.load`."""
    wanted = None if partitions is None else check_names("load: partitions", partitions)
    with SavedFiles(folder, _KIND) as saved:
        entries = _entries_of(saved.body, folder)
        held = [entry["partition_id"] for entry in entries]
        unknown = [name for name in wanted or () if name not in held]
        if unknown:
            raise InvalidRequestError(
                f"load refused: the save in '{folder}' has no partition {preview(unknown)}. It has: "
                f"{preview(held, limit=5) or 'none'}."
            )
        for _ in saved.blocks():  # checks all blocks, with one in memory at a time
            pass
        begun: list[str] = []
        try:
            passes = [saved.blocks() for _ in range(2 if connection.config.open_partitions else 1)]
            for entry in entries:
                blocks = [islice(each, entry["num_blocks"]) for each in passes]
                if wanted is None or entry["partition_id"] in wanted:
                    begun.append(entry["partition_id"])
                    _load_partition(connection, entry, *blocks)
                deque(chain(*blocks), maxlen=0)  # those that were not read
        except BaseException:
            for partition_id in begun:
                with suppress(DataPlaneError):  # the caller gets the error of the load
                    _clear(connection, partition_id, None)
            raise
        metadata: dict[str, Any] = saved.body["metadata"]
        return metadata


def _entries_of(body: Mapping[str, Any], folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The partitions of a save, checked.

    Raises:
        CorruptDataError: The manifest is not one that `save` wrote.
    """
    entries: Any = body.get("partitions")
    good = fits(entries, Sequence[_Entry]) and fits(body.get("metadata"), Mapping[str, Any])
    counts = [entry["num_blocks"] for entry in entries] if good else []
    if not good or min(counts, default=0) < 0 or sum(counts) != len(body["blocks"]):
        raise CorruptDataError(f"the manifest of the save in '{folder}' holds what no save has; take another save.")
    found: list[dict[str, Any]] = entries
    return found


def _load_partition(
    connection: Connection, entry: Mapping[str, Any], blocks: Iterator[bytes], again: Iterator[bytes] | None = None
) -> None:
    """Registers a partition without tasks, so that none can claim, writes its rows, and adds the tasks at last.

    With ``open_partitions``, a claim may add its task meanwhile. So the rows are written without columns first, and
    what the tasks have consumed is set before ``again``, the same blocks once more, gives the columns.
    """
    partition_id = entry["partition_id"]
    registration = {**entry["registration"], "partition_id": partition_id, "consumer_tasks": []}
    register(connection, checked("load", RegisterRequest, **registration))
    _clear_again(connection, partition_id, entry)
    consumed: dict[str, list[str]] = {task: [] for task in entry["registration"]["consumer_tasks"]}
    num_loaded = 0
    for columns, head in _unpacked(connection, partition_id, blocks):
        ids, created, tags = head["sample_ids"], head["created"], head["tags"]
        num_loaded += len(created)
        for task, given in head["consumed"].items():
            consumed.setdefault(task, []).extend(given)
        whole = bool(columns) and ids == created and again is None
        if created and not whole:
            _put(connection, partition_id, created, None, tags)
        if columns and again is None:
            _put(connection, partition_id, ids, columns, tags if whole else None)
    if num_loaded != entry["num_samples"]:
        raise CorruptDataError(
            f"load: the save of partition '{partition_id}' has {num_loaded} samples. Expected {entry['num_samples']}."
        )
    for task, given in consumed.items():
        set_cursor(connection, "load", partition_id, task, given, create=True)
    for columns, head in _unpacked(connection, partition_id, again or iter(())):
        if columns:
            _put(connection, partition_id, head["sample_ids"], columns, None)


def _unpacked(
    connection: Connection, partition_id: str, blocks: Iterator[bytes]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Columns and head of each block."""
    for block in blocks:
        columns, head = unpack_rows(block, allow_pickle=connection.config.allow_pickle)
        if not fits(head, _Head):
            raise CorruptDataError(f"load: a block of partition '{partition_id}' holds what no save has.")
        yield columns, head


def _clear_again(connection: Connection, partition_id: str, entry: Mapping[str, Any]) -> None:
    """Writes and clears what had been cleared: so it counts for ``num_samples``, and its groups count as broken.

    A group that has neither rows nor known ids needs this only if ids of it may still be written.
    """
    grouped = entry["registration"]["grpo_group_size"] is not None
    open_ended = entry["registration"]["num_samples"] is None
    members: dict[str, list[str]] = {f"{group}_g": [] for group in entry["broken_groups"]}
    for sample_id in entry["cleared_ids"]:
        members.setdefault(f"{group_of(sample_id)}_g" if grouped else sample_id, []).append(sample_id)
    of_each = [ids or ([f"{group}0"] if open_ended else []) for group, ids in members.items()]
    # one member of a group at a time: of a member that was written again, more may be cleared than a group may have
    for place in range(max(map(len, of_each), default=0)):
        ids = [ids[place] for ids in of_each if place < len(ids)]
        for start in range(0, len(ids), _MOST_ROWS):
            some = ids[start : start + _MOST_ROWS]
            _put(connection, partition_id, some, None, [{}] * len(some))
            _clear(connection, partition_id, some)
