"""`save_replay` and `restore_replay`: keep what a run has generated but not yet trained on, for a later process."""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

from dataplane_core.client import DataPlaneClient, read_to_save
from dataplane_core.codec import decode_item, encode_item
from dataplane_core.errors import InvalidRequestError, preview
from dataplane_core.meta import KVBatchMeta
from dataplane_core.saves import SavedFiles, pack_rows, unpack_rows, write_save
from dataplane_core.spec import Capability, FieldSpec
from dataplane_integrations.replay._buffer import ReplayBuffer
from dataplane_integrations.replay._remote import RemoteReplayBuffer

__all__ = ["RestoredReplay", "restore_replay", "save_replay"]

#: The name of the format of a save.
_KIND: Final = "dataplane-replay"
#: Rows of a block. Only one block is in memory at a time.
_ROWS_PER_BLOCK: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredReplay:
    """What a save contained.

    Attributes:
        meta: The restored rows, in the order of their first write.
        weight_version: The version of the saved buffer; None if no buffer was saved.
        extra: The trainer's own values, as passed to `save_replay`.
    """

    meta: KVBatchMeta
    weight_version: int | None
    extra: dict[str, Any]


def save_replay(
    folder: str | os.PathLike[str],
    client: DataPlaneClient,
    *,
    buffer: ReplayBuffer | RemoteReplayBuffer | None = None,
    partition_id: str | None = None,
    fields: Sequence[str] | None = None,
    registration: Mapping[str, Any] | None = None,
    given: Mapping[str, Sequence[str]] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Saves committed rows, their tags, the buffer, and the cursors of tasks. Blocks until all is on the disk.

    Rollouts and training may continue during the save: it saves the state of one moment, and rows that are consumed
    during it are cleared after it. Groups in training are saved as not yet trained on; groups that are being generated
    are saved as to be generated again. To let a restored run continue exactly like the first one, save between two
    steps, inside ``collector.quiet()``.

    Args:
        folder: Holds one save. The new save replaces the former one atomically, when it is complete.
        client: Reads the rows.
        buffer: The buffer, or a `RemoteReplayBuffer`. Its ready groups and those in training are saved.
        partition_id: Without a buffer: the partition. All its rows are saved.
        fields: The columns to save. Default: those that were committed. Required without a buffer.
        registration: The arguments of ``register_partition`` besides ``partition_id``. With them, a restore registers
            the partition; without, the restoring process must.
        given: Task -> the held rows that it had been given. A restore gives them to the task again, so that its claims
            continue with the other rows. None: what the store says of every task, if its backend declares ``cursors``.
        extra: Other values that the trainer wants back: None, bool, int, float, str, bytes, lists, dicts and tensors.

    Raises:
        InvalidRequestError: Neither a buffer nor a partition, no fields, or ids that are not held.
        MissingDataError: A row lacks one of the columns.
        SaveError: The save cannot be written. Like after any other error, the former save is unchanged.
        OperationTimeoutError, BackendUnavailableError: The store does not answer.
    """
    partition = partition_id if buffer is None else buffer.partition_id
    if partition is None or (buffer is None and not fields):
        raise InvalidRequestError(
            "save_replay refused: neither a buffer, nor a partition_id and fields, were given. Expected one of both."
        )
    with nullcontext(None) if buffer is None else buffer.snapshot() as state:
        listed = client.list_samples(partition)
        columns = {sample_id: tuple(fields or ()) for sample_id in listed.sample_ids}
        if state is not None:
            metas = {sample_id: each["meta"] for each in state["groups"] for sample_id in each["meta"]["sample_ids"]}
            listed = listed.subset([row for row, sample_id in enumerate(listed.sample_ids) if sample_id in metas])
            columns = {sample_id: tuple(fields or metas[sample_id]["fields"]) for sample_id in listed.sample_ids}
        cursors = (
            _consumed(client, partition, columns) if given is None else {task: list(ids) for task, ids in given.items()}
        )
        unknown = [sample_id for ids in cursors.values() for sample_id in ids if sample_id not in columns]
        if unknown:
            raise InvalidRequestError(
                f"save_replay('{partition}') refused: given names rows that are not held: {preview(unknown)}."
            )
        body = {
            "partition_id": partition,
            "registration": None if registration is None else _plain(registration),
            "sample_ids": listed.sample_ids,
            "tags": listed.tags,
            "given": cursors,
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


def _plain(registration: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, (tuple, set, frozenset)) else value
        for name, value in registration.items()
    }


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
        columns = read_to_save(client, ids, meta.partition_id, names, specs)
        yield pack_rows(columns, len(ids), {"sample_ids": ids})
        start = stop


def restore_replay(
    folder: str | os.PathLike[str], client: DataPlaneClient, *, buffer: ReplayBuffer | RemoteReplayBuffer | None = None
) -> RestoredReplay:
    """Writes a save's rows to a store again, with their tags and cursors, and loads its state into a buffer.

    The whole save is checked before anything is written. If the save has a registration, the partition is registered
    again; else it must be registered and contain none of the rows.

    Args:
        folder: As for `save_replay`.
        client: Writes the rows.
        buffer: A new buffer, or a `RemoteReplayBuffer`, with the same partition and group size. It gets the saved
            state. Start collectors after this.

    Raises:
        MissingDataError: The folder has no save.
        CorruptDataError: The save is damaged. Nothing has been written.
        UnsupportedOperationError: Another version wrote the save; or it has cursors, and the backend does not declare
            ``cursors``.
        InvalidRequestError: The save has no buffer, or that of another partition or group size.
    """
    saved = SavedFiles(folder, _KIND)
    body = saved.body
    for _ in saved.blocks():  # checks all blocks, with one in memory at a time
        pass
    partition: str = body["partition_id"]
    state = body["buffer"]
    if buffer is not None:
        if state is None:
            raise InvalidRequestError(f"restore_replay refused: the save of '{partition}' holds no buffer.")
        buffer.load_state(state)
    if body["registration"] is not None:
        client.register_partition(partition, **body["registration"])
    ids: list[str] = body["sample_ids"]
    tags: list[dict[str, Any]] = [dict(row) for row in body["tags"] or [{}] * len(ids)]
    at = {sample_id: row for row, sample_id in enumerate(ids)}
    for block in saved.blocks():
        columns, head = unpack_rows(block)
        some = head["sample_ids"]
        client.put_samples(some, partition, columns, tags=[tags[at[each]] for each in some])
    for task, given in body["given"].items():
        client.reset_consumption(partition, task, given)
    return RestoredReplay(
        meta=KVBatchMeta(partition, None, ids, tags=[dict(row) for row in body["tags"] or [{}] * len(ids)]),
        weight_version=None if state is None else state["weight_version"],
        extra=decode_item(b64decode(body["extra"])),
    )
