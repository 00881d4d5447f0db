"""`save_replay` and `restore_replay`: what a run has generated and not yet trained on, kept over its end."""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np
from tensordict import TensorDict

from dataplane_core.client import DataPlaneClient
from dataplane_core.codec import decode_columns, decode_item, encode_columns, encode_item, join_rows, split_rows
from dataplane_core.errors import CorruptDataError, InvalidRequestError, preview
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import FieldSpec, WireFormat
from dataplane_integrations.replay._buffer import ReplayBuffer
from dataplane_integrations.replay._files import SavedFiles, write_save
from dataplane_integrations.replay._remote import RemoteReplayBuffer

__all__ = ["RestoredReplay", "restore_replay", "save_replay"]

#: Rows of a block; a block is what is in memory at a time.
_ROWS_PER_BLOCK: Final = 256
_FRAMES: Final = WireFormat(bytes=True)
#: Tag that names, in a restored partition, the tasks that a row had been given to.
_GIVEN_TAG: Final = "given_before_restore:"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredReplay:
    """What a save held.

    Attributes:
        meta: The rows that are in the store again, in the order of their first write.
        weight_version: Of the buffer; None where none was saved.
        extra: What the trainer gave to `save_replay`.
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
    """Saves committed rows, their tags, the buffer, and what tasks have been given. Blocks until it is on the disk.

    Rollouts and training may go on meanwhile: the state is of one moment, and rows that are consumed during the save
    are cleared after it. What is in training is saved as not yet trained on, what is being generated as to be generated
    again. For a run that goes on exactly as if it had not been cut, save between two steps, inside
    ``collector.quiet()``.

    Args:
        folder: Holds one save; the former one is replaced in one step, once the new one is whole.
        client: Reads the rows.
        buffer: The buffer, or a `RemoteReplayBuffer`; its ready groups and those in training are saved.
        partition_id: Without a buffer: the partition, all of whose rows are saved.
        fields: The columns to save. Default: those that were committed; without a buffer they must be given.
        registration: The arguments of ``register_partition`` besides ``partition_id``; a restore then registers the
            partition. Without it, the restoring process does.
        given: Task -> the rows that it had been given and that are still held; a restore gives them to it again at
            once, so that its claims go on with the others. Whole groups where the partition has groups.
        extra: What else the trainer wants back: None, bool, int, float, str, bytes, lists, dicts and tensors.

    Raises:
        InvalidRequestError: Neither a buffer nor a partition, no fields, or ids that are not held.
        MissingDataError: A row lacks one of the columns.
        ReplaySaveError: The disk refuses. The former save is then as it was, as after any other error.
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
        cursors = {task: list(ids) for task, ids in (given or {}).items()}
        unknown = [sample_id for ids in cursors.values() for sample_id in ids if sample_id not in columns]
        if unknown:
            raise InvalidRequestError(
                f"save_replay('{partition}') refused: given names rows that are not held: {preview(unknown)}."
            )
        blocks: list[dict[str, Any]] = []
        body = {
            "partition_id": partition,
            "registration": None if registration is None else _plain(registration),
            "sample_ids": listed.sample_ids,
            "tags": listed.tags,
            "given": cursors,
            "buffer": state,
            "extra": b64encode(encode_item(dict(extra or {}), "extra")).decode(),
            "row_blocks": blocks,  # filled while the blocks are written, which is before the body is
        }
        write_save(folder, body, _blocks_of(client, listed, columns, blocks))


def _plain(registration: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, (tuple, set, frozenset)) else value
        for name, value in registration.items()
    }


def _blocks_of(
    client: DataPlaneClient, meta: KVBatchMeta, columns: Mapping[str, tuple[str, ...]], index: list[dict[str, Any]]
) -> Iterator[bytearray]:
    """Reads rows in their order, those of one block having the same columns, and notes each block in ``index``."""
    start = 0
    while start < meta.size:
        names = columns[meta.sample_ids[start]]
        stop = start
        while stop < min(meta.size, start + _ROWS_PER_BLOCK) and columns[meta.sample_ids[stop]] == names:
            stop += 1
        ids = meta.sample_ids[start:stop]
        frames, specs = encode_columns(client.get_samples(ids, meta.partition_id, list(names)), len(ids), _FRAMES)
        data, offsets = join_rows([cast("Sequence[bytes]", frames[name]) for name in names])
        index.append(
            {
                "num_rows": len(ids),
                "specs": {name: specs[name].to_text() for name in names},
                "row_sizes": np.diff(offsets).tolist(),
            }
        )
        yield data
        start = stop


def restore_replay(
    folder: str | os.PathLike[str], client: DataPlaneClient, *, buffer: ReplayBuffer | RemoteReplayBuffer | None = None
) -> RestoredReplay:
    """Puts a save's rows back into a store, with their tags and cursors, and its state into a buffer.

    The whole save is checked before anything is written to the store. Where the save holds a registration, the
    partition is opened afresh; else it must be open and hold none of the rows.

    Args:
        folder: As for `save_replay`.
        client: Writes the rows.
        buffer: A new buffer, or a `RemoteReplayBuffer`, of the same partition and group size; takes the saved state.
            Start collectors after this.

    Raises:
        MissingDataError: No save there.
        CorruptDataError: The save is damaged; nothing has been written.
        UnsupportedOperationError: It was written by a newer version, or the backend lacks the claims and tag filters
            that restoring what tasks were given takes.
        InvalidRequestError: The save holds no buffer, or that of another partition or group size.
    """
    saved = SavedFiles(folder)
    body = saved.body
    for _ in saved.blocks():  # checks all of them, holding one at a time
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
    for task, given in body["given"].items():
        for sample_id in given:
            tags[at[sample_id]][f"{_GIVEN_TAG}{task}"] = True
    start = 0
    first_field: dict[str, str] = {}
    for block, entry in zip(saved.blocks(), body["row_blocks"], strict=True):
        stop = start + entry["num_rows"]
        columns = _columns_of(block, entry)
        client.put_samples(ids[start:stop], partition, columns, tags=tags[start:stop])
        first_field.update(dict.fromkeys(ids[start:stop], next(iter(entry["specs"]))))
        start = stop
    for task, given in body["given"].items():
        _give_again(client, partition, task, given, first_field)
    return RestoredReplay(
        meta=KVBatchMeta(partition, None, ids, tags=[dict(row) for row in body["tags"] or [{}] * len(ids)]),
        weight_version=None if state is None else state["weight_version"],
        extra=decode_item(b64decode(body["extra"])),
    )


def _columns_of(block: bytes, entry: Mapping[str, Any]) -> TensorDict:
    cuts = np.concatenate(([0], np.cumsum(entry["row_sizes"], dtype=np.int64))).tolist()
    view = memoryview(block)
    rows = split_rows([view[start:stop] for start, stop in pairwise(cuts)])
    specs = {name: FieldSpec.from_text(text) for name, text in entry["specs"].items()}
    frames = {name: [row[position] for row in rows] for position, name in enumerate(specs)}
    num_rows = entry["num_rows"]
    return TensorDict(decode_columns(frames, specs, num_rows, _FRAMES), batch_size=[num_rows])


def _give_again(
    client: DataPlaneClient, partition_id: str, task: str, given: Sequence[str], first_field: Mapping[str, str]
) -> None:
    """Has a task claim exactly the rows that it had been given."""
    if not given:
        return
    required = sorted({first_field[sample_id] for sample_id in given})
    claimed = client.claim_meta(
        partition_id, task, required, len(given), blocking=False, tag_filter={f"{_GIVEN_TAG}{task}": True}
    )
    if set(claimed.sample_ids) != set(given):
        raise CorruptDataError(
            f"restore_replay('{partition_id}'): task '{task}' had been given {len(given)} rows, and was given "
            f"{claimed.size} of them again. Expected whole groups, of rows that nobody claims meanwhile."
        )
