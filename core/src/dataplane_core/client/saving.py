"""`DataPlaneClient.save` and `load`: partitions with their rows, tags, cursors and schema, in a folder on disk.

They use only the operations that every backend has, so a save of one backend can be loaded into any other.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from dataplane_core.arguments import check_names, checked
from dataplane_core.client.partitions import HIDDEN, export, register, set_cursor
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
from dataplane_core.saves import SavedFile, pack_rows, tensor_rows, unpack_rows, write_save
from dataplane_core.spec import FieldSpec, RegisterRequest, TagValue
from dataplane_core.spec.replies import Registration, SampleState

_KIND: Final = "dataplane-partitions"
#: Size of a block that is aimed at, the rows of the first block of a partition, and the most rows of any.
_BLOCK_BYTES: Final = 16 << 20
_FIRST_ROWS: Final = 64
_MOST_ROWS: Final = 4096
#: How often one row may change while it is read.
_TRIES: Final = 100

#: A `DataPlaneClient`, which imports this module.
_Client: TypeAlias = Any
#: What the store knows of rows, of each that is there.
_Rows: TypeAlias = Mapping[str, SampleState]
#: Rows, and the columns that all of them have.
_Batch: TypeAlias = tuple[list[str], dict[str, Any]]


class _Entry(msgspec.Struct):
    """What a save says of a partition."""

    partition_id: str
    registration: Registration
    num_blocks: Annotated[int, msgspec.Meta(ge=0)]
    num_samples: int
    cleared_ids: list[str]
    broken_groups: list[str]


class _Head(msgspec.Struct):
    """The head of a block: the rows of its columns; the rows that it creates, with their tags; and task -> those of
    them that it had consumed."""

    sample_ids: list[str]
    created: list[str]
    tags: list[dict[str, TagValue]]
    consumed: dict[str, list[str]]


# --- save -------------------------------------------------------------------------------------------------------------


def save(
    client: _Client,
    folder: str | os.PathLike[str],
    metadata: Mapping[str, Any] | None,
    partitions: Sequence[str] | None,
) -> None:
    """See `DataPlaneClient.save`."""
    try:
        metadata = dict(metadata or {})
        json.dumps(metadata)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(f"save refused: metadata must be a dict of JSON values: {error}.") from error
    names = client.list_partitions() if partitions is None else check_names("save: partitions", partitions)
    entries: list[dict[str, Any]] = []
    body = {"metadata": metadata, "partitions": entries}  # filled while the blocks are written
    write_save(folder, _KIND, body, (block for name in names for block in _blocks_of(client, name, entries)))


def _blocks_of(client: _Client, partition_id: str, entries: list[dict[str, Any]]) -> Iterator[bytes]:
    """The blocks of a partition. Adds its entry to ``entries``."""
    info = client.describe(partition_id).info
    ids = client.list_sample_ids(partition_id)
    state = export(client._connection, "save", partition_id)  # after the list: so it knows what was cleared before
    reader = _Reader(client, partition_id)
    num_blocks = num_saved = 0
    seqs: dict[str, int] = {}  # of rows of rollouts
    start, num_rows = 0, _FIRST_ROWS
    while start < len(ids):
        portion = ids[start : start + num_rows]
        created, batches = reader.read(portion)
        size_bytes = 0
        # the first block of a portion creates all of its rows, so that their order is kept
        for rows_of_batch, columns in batches or ([([], {})] if created else []):
            head = _Head(
                sample_ids=rows_of_batch,
                created=list(created),
                tags=[dict(row.tags) for row in created.values()],
                consumed={
                    task: [sample_id for sample_id, row in created.items() if task in row.consumed_by]
                    for task in state.consumed
                },
            )
            num_saved += len(created)
            seqs.update({sample_id: row.seq for sample_id, row in created.items()} if info.rollouts else {})
            created = {}
            block = pack_rows(
                columns, len(rows_of_batch), msgspec.structs.asdict(head), allow_pickle=client.config.allow_pickle
            )
            size_bytes += len(block)
            num_blocks += 1
            yield block
        start += len(portion)
        mean_bytes = max(1, size_bytes // max(1, len(portion)))
        num_rows = max(1, min(_MOST_ROWS, 4 * num_rows, _BLOCK_BYTES // mean_bytes))
    if client.describe(partition_id).info.epoch != info.epoch:
        raise StalePartitionError(
            f"save: partition '{partition_id}' was registered again while it was saved.", retryable=True
        )
    cleared = list(dict.fromkeys([*state.cleared_ids, *(reader.gone if info.num_samples is not None else ())]))
    broken = {*state.broken_groups, *(map(group_of, reader.gone) if info.is_grouped else ())}
    if seqs:  # rows of one rollout may have been written before it was cleared, and others after it was put again
        now = export(client._connection, "save", partition_id, list(seqs)).samples
        broken.update(group_of(name) for name, seq in seqs.items() if name not in now or now[name].seq != seq)
    registration = msgspec.convert(info.registration(), Registration)
    entry = _Entry(partition_id, registration, num_blocks, num_saved, cleared, sorted(broken))
    entries.append(msgspec.to_builtins(entry))


class _Reader:
    """Reads rows of a partition while others write.

    Each row is as it was at one moment: what the store knows of it is asked before its cells are read, and once more
    afterwards. If that differs, it is read again.
    """

    def __init__(self, client: _Client, partition_id: str) -> None:
        self._client = client
        self._partition_id = partition_id
        self._specs: dict[str, FieldSpec] = {}
        self.gone: list[str] = []  # the rows that were cleared meanwhile

    def read(
        self, ids: Sequence[str], before: _Rows | None = None, tries: int = _TRIES
    ) -> tuple[dict[str, SampleState], list[_Batch]]:
        """Reads rows, in this order, and columns of those that have them.

        ``before`` is what the store knew of them a moment ago, if that was asked.
        """
        before = self._known(ids) if before is None else before
        rows = {sample_id: before[sample_id] for sample_id in ids if sample_id in before}
        self.gone += [sample_id for sample_id in ids if sample_id not in rows]
        there = list(rows)
        if not there:
            return {}, []
        batches: list[_Batch] = []
        lost: MissingDataError | None = None
        try:
            batches = self._columns(rows)
        except UnknownPartitionError:
            raise
        except MissingDataError as error:  # or rows were cleared
            lost = error
        after = self._known(there)
        if repr(after) == repr(rows):  # as values, two NaN of a tag differ
            if lost is not None:
                raise lost
            return rows, batches
        if not tries:
            raise StalePartitionError(f"save: sample '{there[0]}' is written all the time.", retryable=True)
        half = (len(there) + 1) // 2  # one of many changes at any time, one alone does not
        (rows, columns), (more_rows, more_columns) = (
            self.read(part, after, tries - (len(part) == 1)) for part in (there[:half], there[half:])
        )
        return {**rows, **more_rows}, columns + more_columns

    def _known(self, ids: Sequence[str]) -> _Rows:
        return export(self._client._connection, "save", self._partition_id, list(ids)).samples

    def _columns(self, rows: _Rows) -> list[_Batch]:
        """The columns of rows: fields that the same rows have are read together, since rows of one read share equal
        cells."""
        rows_with: dict[str, list[str]] = {}
        for sample_id, row in rows.items():
            for name in row.fields:
                if not name.startswith(HIDDEN):
                    rows_with.setdefault(name, []).append(sample_id)
        by_rows: dict[tuple[str, ...], list[str]] = {}
        for name, ids in rows_with.items():
            by_rows.setdefault(tuple(ids), []).append(name)
        return [(list(ids), self._read(ids, names)) for ids, names in by_rows.items()]

    def _read(self, ids: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
        """The columns of rows: those that the store shares are read once, and saved once."""
        columns = self._client.get_samples(ids, self._partition_id, names, share_rows=True)
        if any(name not in self._specs for name in names):
            self._specs.update(self._client.describe(self._partition_id).specs)
        if not self._specs.keys() >= set(names):  # they were dropped since they were read
            raise MissingDataError(f"save: '{self._partition_id}' was cleared meanwhile.", missing_samples=ids)
        return tensor_rows(dict(columns.items()), self._specs)


# --- load -------------------------------------------------------------------------------------------------------------


def load(client: _Client, folder: str | os.PathLike[str], partitions: Sequence[str] | None) -> dict[str, Any]:
    """See `DataPlaneClient.load`."""
    wanted = None if partitions is None else check_names("load: partitions", partitions)
    with SavedFile(folder, _KIND) as saved:
        entries = _entries_of(saved.body, saved.num_blocks, folder)
        names = [entry.partition_id for entry in entries]
        unknown = [name for name in wanted or () if name not in names]
        if unknown:
            raise InvalidRequestError(
                f"load refused: the save in '{folder}' has no partition {preview(unknown)}. It has: "
                f"{preview(names, limit=5) or 'none'}."
            )
        for _ in saved.blocks():  # checks all blocks, with one in memory at a time
            pass
        begun: list[str] = []
        try:
            passes = [saved.blocks() for _ in range(2 if client.config.open_partitions else 1)]
            for entry in entries:
                blocks = [islice(all_blocks, entry.num_blocks) for all_blocks in passes]
                if wanted is None or entry.partition_id in wanted:
                    begun.append(entry.partition_id)
                    _load_partition(client, entry, *blocks)
                deque(chain(*blocks), maxlen=0)  # those that were not read
        except BaseException:
            for partition_id in begun:
                with suppress(DataPlaneError):  # the caller gets the error of the load
                    client.clear_samples(None, partition_id)
            raise
        metadata: dict[str, Any] = saved.body["metadata"]
        return metadata


def _entries_of(body: Mapping[str, Any], num_blocks: int, folder: str | os.PathLike[str]) -> list[_Entry]:
    """The partitions of a save, if they are what `save` wrote."""
    try:
        entries = msgspec.convert(body.get("partitions"), list[_Entry])
        msgspec.convert(body.get("metadata"), dict[str, Any])
        check_names("the save", [entry.partition_id for entry in entries])
        if sum(entry.num_blocks for entry in entries) == num_blocks:
            return entries
    except (InvalidRequestError, msgspec.ValidationError, UnicodeEncodeError):  # the last: half of a surrogate pair
        pass
    raise CorruptDataError(f"the save in '{folder}' holds what no save has; take another save.")


def _load_partition(
    client: _Client, entry: _Entry, blocks: Iterator[bytes], again: Iterator[bytes] | None = None
) -> None:
    """Registers a partition without tasks, so that none can claim, writes its rows, and adds the tasks at last.

    With ``open_partitions``, a claim may add its task meanwhile. So the rows are written without columns first, and
    what the tasks have consumed is set before ``again``, the same blocks once more, gives the columns.
    """
    partition_id = entry.partition_id
    cleared = {"cleared_ids": entry.cleared_ids, "broken_groups": entry.broken_groups}
    values = {**msgspec.structs.asdict(entry.registration), "consumer_tasks": [], **cleared}
    register(client._connection, checked("load", RegisterRequest, partition_id=partition_id, **values))
    consumed: dict[str, list[str]] = {task: [] for task in entry.registration.consumer_tasks}
    num_loaded = 0
    for columns, head in _unpacked(client, partition_id, blocks):
        num_loaded += len(head.created)
        for task, ids in head.consumed.items():
            consumed.setdefault(task, []).extend(ids)
        whole = bool(columns) and head.sample_ids == head.created and again is None
        if head.created and not whole:
            client.put_samples(head.created, partition_id, None, head.tags)
        if columns and again is None:
            client.put_samples(head.sample_ids, partition_id, columns, head.tags if whole else None)
    if num_loaded != entry.num_samples:
        raise CorruptDataError(
            f"load: the save of partition '{partition_id}' has {num_loaded} samples. Expected {entry.num_samples}."
        )
    for task, ids in consumed.items():
        set_cursor(client._connection, "load", partition_id, task, ids, create=True)
    for columns, head in _unpacked(client, partition_id, again or iter(())):
        if columns:
            client.put_samples(head.sample_ids, partition_id, columns)


def _unpacked(client: _Client, partition_id: str, blocks: Iterator[bytes]) -> Iterator[tuple[dict[str, Any], _Head]]:
    """Columns and head of each block."""
    for block in blocks:
        columns, head = unpack_rows(block, allow_pickle=client.config.allow_pickle)
        try:
            yield columns, msgspec.convert(head, _Head)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise CorruptDataError(f"load: a block of partition '{partition_id}' holds what no save has.") from error
