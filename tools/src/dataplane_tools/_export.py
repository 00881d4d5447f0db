"""`dataplane export`: rows of a partition as a folder of Parquet, at once or as they are finished."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import InvalidRequestError, MissingDataError, printable
from dataplane_tools._follow import follow_partition
from dataplane_tools._portions import Exported, Portions, Tags
from dataplane_tools._rows import opened
from dataplane_tools._shards import What
from dataplane_tools._store import attach, size_text


def export_partition(
    client: DataPlaneClient,
    partition_id: str,
    folder: str | os.PathLike[str],
    *,
    fields: Sequence[str] | None = None,
    where: str | None = None,
    partial: bool = False,
    messages: bool = False,
    tokenizer: str | None = None,
    shard_bytes: int | str = "256MiB",
) -> Exported:
    """Writes the finished rows of a partition as Parquet: those that have all fields that are asked for.

    The rows are in their order of first write. Further fields that are written but not registered come along, with a
    null where a row lacks them. In memory is a portion of about 16 MiB. No task is given anything. Blocks until all is
    on the disk. `follow_partition` goes on with what is finished later.

    Args:
        client: Of the store.
        partition_id: The partition.
        folder: A new folder. It may also have an export of the same call that was killed; it starts over.
        fields: Only these. None: all that are registered or written.
        where: Only rows that meet this condition, such as ``"reward > 0.5 and weight_version >= 7"``.
        partial: Also rows that lack fields.
        messages: One column ``messages`` of ``{"role": ..., "content": ...}``, with tool calls, instead of the fields,
            for fine-tuning; beside it ids, tags, fields of one number and ``tools``.
        tokenizer: With ``messages``: what turns tokens into text where no turns are kept. As for `dataplane read`.
        shard_bytes: Size of a shard before compression, such as ``"256MiB"``.

    Raises:
        InvalidRequestError: An argument is refused, or the folder has something else.
        UnknownPartitionError: Not registered.
        StalePartitionError: It was registered anew meanwhile.
        UnsupportedOperationError: The store has no ``listing``.
        InvalidTypeError: A field holds items that only pickle can keep.
        SaveError: The folder cannot be written.

    Examples:
        >>> export_partition(client, "step-1", folder, where="reward > 0.5").num_rows  # doctest: +SKIP
        2
    """
    what = What(fields=fields, where=where, messages=messages, partial=partial, task=None)
    with Portions(client, partition_id, folder, what, tokenizer, shard_bytes) as portions:
        rows = portions.found if where is not None else portions.rows.find().tags
        ids, lacking = _finished(client, partition_id, rows, [] if partial else portions.required)
        portions.know_tags(rows[sample_id] for sample_id in ids)
        start = 0
        while some := ids[start : start + portions.num_rows]:
            start += len(some)
            portions.write({sample_id: rows[sample_id] for sample_id in some})
            if portions.shards.is_full:
                portions.shards.complete()
        return portions.end(lacking)


def _finished(
    client: DataPlaneClient, partition_id: str, rows: Tags, required: Sequence[str]
) -> tuple[list[str], Counter[str]]:
    """The ids of those rows that have all required fields; and which field how many of the others lack."""
    if not required:
        return list(rows), Counter()
    has = set(client.list_sample_ids(partition_id, fields=required))
    lacking: Counter[str] = Counter()
    with suppress(MissingDataError):  # some were cleared meanwhile
        for names in client.list_fields([each for each in rows if each not in has], partition_id):
            lacking.update(name for name in required if name not in names)
    return [each for each in rows if each in has], lacking


# --- the command ------------------------------------------------------------------------------------------------------


def run(chosen: argparse.Namespace) -> int:
    """Exports rows of a running store, of a save or of a recording.

    Raises:
        DataPlaneError: As `export_partition`, `follow_partition`, `attach` and `opened`. It cannot follow partial rows,
            nor a folder.
    """
    path, partition_id, folder = chosen.config, chosen.partition, chosen.folder
    options = {name: getattr(chosen, name) for name in ("fields", "where", "tokenizer", "shard_bytes")}
    options["messages"] = chosen.form == "messages"
    is_folder = Path(path).is_dir()
    if not chosen.follow:
        with opened(path, partition_id) if is_folder else attach(path, announced=True) as client:
            return _told(chosen, export_partition(client, partition_id, folder, partial=chosen.partial, **options))
    if is_folder:
        raise InvalidRequestError(f"export refused: '{path}' is a folder, and only a running store goes on.")
    if chosen.partial:
        raise InvalidRequestError("export refused: it follows finished rows, so partial rows cannot come along.")
    stop = threading.Event()
    former = {each: signal.signal(each, lambda *_: stop.set()) for each in (signal.SIGINT, signal.SIGTERM)}
    following = {"task": chosen.task, "every_s": chosen.every, "idle_s": chosen.idle, "stop": stop}
    try:
        with attach(path, announced=True) as client:
            done = follow_partition(client, partition_id, folder, **following, **options)
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)
    return _told(chosen, done)


def _told(chosen: argparse.Namespace, done: Exported) -> int:
    shards = "1 shard" if done.num_shards == 1 else f"{done.num_shards} shards"
    size = size_text(done.size_bytes)
    print(printable(f"{chosen.folder}: {done.num_rows} rows of {chosen.partition} in {shards}, {size}"))
    for name, count in done.lacking.items():
        print(printable(f"{count} were left out, which lack '{name}' (--partial takes them)"))
    for what, count in done.no_chat.items():
        print(printable(f"{count} were left out, which are no chats: they have {what}"))
    if done.num_gone:
        print(f"{done.num_gone} were cleared meanwhile, or their payload is lost")
    if done.num_left:
        print(f"{done.num_left} were left, which were not given to it yet")
    return 0
