"""`save_replay` and `restore_replay`: keep what a run has generated but not yet trained on, for a later process."""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dataplane_core.client import DataPlaneClient
from dataplane_core.codec import decode_item, encode_item
from dataplane_core.errors import MissingDataError, UnsupportedOperationError, preview
from dataplane_core.meta import KVBatchMeta
from dataplane_core.saves import SavedFile, pack_rows, tensor_rows, unpack_rows, write_save
from dataplane_core.spec import Capability, FieldSpec
from dataplane_integrations.replay._buffer import ReplayBuffer
from dataplane_integrations.replay._remote import RemoteReplayBuffer

#: The name of the format of a save.
_KIND: Final = "dataplane-replay"
#: Rows of a block. Only one block is in memory at a time.
_ROWS_PER_BLOCK: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredReplay:
    """What a save contained.

    Attributes:
        meta: The restored rows, in the order of their first write.
        weight_version: The version of the saved buffer.
        extra: The trainer's own values, as passed to `save_replay`.
    """

    meta: KVBatchMeta
    weight_version: int
    extra: dict[str, Any]


def save_replay(
    folder: str | os.PathLike[str],
    client: DataPlaneClient,
    *,
    buffer: ReplayBuffer | RemoteReplayBuffer,
    registration: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Saves committed rows, their tags, the buffer, and what tasks were given. Blocks until all is on the disk.

    Rollouts and training may continue during the save: it saves the state of one moment, and rows that are consumed
    during it are cleared after it. Groups in training are saved as not yet trained on; groups that are being generated
    are saved as to be generated again. To let a restored run continue exactly like the first one, save between two
    steps, inside ``collector.quiet()``. `DataPlaneClient.save` saves partitions without a buffer.

    Args:
        folder: Holds one save. The new save replaces the former one atomically, when it is complete.
        client: Reads the rows.
        buffer: Its ready groups and those in training are saved, with the columns that were committed. If the backend
            declares ``cursors``, a restored task is not given again what it had been given.
        registration: The arguments of ``register_partition`` besides ``partition_id``. With them, a restore registers
            the partition; without, the restoring process must.
        extra: Other values that the trainer wants back: None, bool, int, float, str, bytes, lists, dicts and tensors.

    Raises:
        MissingDataError: A row lacks one of the columns, or is not in the store any more.
        SaveError: The save cannot be written. Like after any other error, the former save is unchanged.
        OperationTimeoutError, BackendUnavailableError: The store does not answer.
    """
    partition = buffer.partition_id
    with buffer.snapshot() as state:
        columns = {
            sample_id: tuple(group["meta"]["fields"])
            for group in state["groups"]
            for sample_id in group["meta"]["sample_ids"]
        }
        listed = client.list_samples(partition)
        listed = listed.subset([row for row, sample_id in enumerate(listed.sample_ids) if sample_id in columns])
        if listed.size < len(columns):
            gone = sorted(columns.keys() - set(listed.sample_ids))
            raise MissingDataError(
                f"save_replay('{partition}') refused: {preview(gone)} of groups in the buffer are not in the "
                "store. Expected the rows of all ready groups and of those in training.",
                partition_id=partition,
                missing_samples=gone,
                hint="DataPlanePolicy clears the rows of a call that raises: then call discard(meta, requeue=True) on "
                "the buffer first.",
            )
        body = {
            "partition_id": partition,
            "registration": None if registration is None else _plain(registration),
            "sample_ids": listed.sample_ids,
            "tags": listed.tags,
            "given": _consumed(client, partition, columns),
            "buffer": state,
            "extra": b64encode(encode_item(dict(extra or {}), "extra")).decode(),
        }
        write_save(folder, _KIND, body, _blocks_of(client, listed, columns))


def _consumed(client: DataPlaneClient, partition_id: str, saved: Container[str]) -> dict[str, list[str]]:
    """Task -> the saved rows that it was given for good."""
    if not client.capabilities >= {Capability.CURSORS, Capability.LISTING}:
        return {}
    tasks = client.describe(partition_id).info.consumer_tasks
    return {task: [each for each in client.list_consumed(partition_id, task) if each in saved] for task in tasks}


def _plain(value: Any) -> Any:
    """A value of a registration as JSON has it: sets and other collections become lists."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return list(value) if isinstance(value, Collection) and not isinstance(value, str) else value


def _blocks_of(client: DataPlaneClient, meta: KVBatchMeta, fields: Mapping[str, tuple[str, ...]]) -> Iterator[bytes]:
    """Reads rows in order, in blocks of rows with the same fields."""
    specs: dict[str, FieldSpec] = {}
    start = 0
    while start < meta.size:
        names = fields[meta.sample_ids[start]]
        stop = start
        while stop < min(meta.size, start + _ROWS_PER_BLOCK) and fields[meta.sample_ids[stop]] == names:
            stop += 1
        ids = meta.sample_ids[start:stop]
        # rows that the store shares are read once, and saved once
        columns = client.get_samples(ids, meta.partition_id, names, share_rows=True)
        if any(name not in specs for name in names):
            specs.update(client.describe(meta.partition_id).specs)
        yield pack_rows(tensor_rows(dict(columns.items()), specs), len(ids), {"sample_ids": ids})
        start = stop


def restore_replay(
    folder: str | os.PathLike[str], client: DataPlaneClient, *, buffer: ReplayBuffer | RemoteReplayBuffer
) -> RestoredReplay:
    """Writes a save's rows to a store again, with their tags and cursors, and loads its state into a buffer.

    The whole save is checked before anything is written. If the save has a registration, the partition is registered
    again; else it must be registered and contain none of the rows.

    Args:
        folder: As for `save_replay`.
        client: Writes the rows.
        buffer: A new buffer, or a `RemoteReplayBuffer`, with the same partition and group size. It gets the saved
            state. If its rule admits fewer groups than the save has, it keeps the freshest, and has the prompts of the
            others generated again (`ReplayBuffer.load_state`). Start collectors after this.

    Raises:
        MissingDataError: The folder has no save.
        CorruptDataError: The save is damaged. Nothing has been written.
        UnsupportedOperationError: Another version wrote the save; or tasks had been given rows, and the backend does
            not declare ``cursors``. Nothing has been written.
        InvalidRequestError: The save has the buffer of another partition or group size.
    """
    with SavedFile(folder, _KIND) as saved:
        body = saved.body
        for _ in saved.blocks():  # checks all blocks, with one in memory at a time
            pass
        partition: str = body["partition_id"]
        given = {task: ids for task, ids in body["given"].items() if ids}
        if given and Capability.CURSORS not in client.capabilities:
            raise UnsupportedOperationError(
                f"restore_replay refused: in '{partition}', rows had been given to {preview(given)}, and backend "
                f"'{client.backend_name}' does not declare 'cursors'. Expected one that does."
            )
        cut = set(buffer.load_state(body["buffer"]))
        if body["registration"] is not None:
            client.register_partition(partition, **body["registration"])
        ids: list[str] = [each for each in body["sample_ids"] if each not in cut]
        tags = dict(zip(body["sample_ids"], map(dict, body["tags"] or [{}] * len(body["sample_ids"])), strict=True))
        for block in saved.blocks():
            columns, head = unpack_rows(
                block, rows=lambda head: [row for row, each in enumerate(head["sample_ids"]) if each not in cut]
            )
            some = [each for each in head["sample_ids"] if each not in cut]
            client.put_samples(some, partition, columns, tags=[tags[each] for each in some])
    for task, consumed in given.items():
        client.reset_consumption(partition, task, [each for each in consumed if each not in cut])
    return RestoredReplay(
        meta=KVBatchMeta(partition, None, ids, tags=[tags[each] for each in ids]),
        weight_version=body["buffer"]["weight_version"],
        extra=decode_item(b64decode(body["extra"])),
    )
