"""`dataplane export`: rows of a partition as a folder of Parquet, at once; or as they are finished, as a task of it."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    ClaimTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    LeaseExpiredError,
    MissingDataError,
    SaveError,
    StalePartitionError,
    UnknownPartitionError,
    UnknownTaskError,
    preview,
    printable,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability, TaskDescription
from dataplane_tools._portions import Exported, Portions, Tags
from dataplane_tools._rows import opened
from dataplane_tools._shards import OWN_TASK, What
from dataplane_tools._store import attach, size_text

#: Seconds of a claim that waits, after which a follower looks whether it should stop.
_WAIT_S: Final = 0.5
#: Seconds that a shard may take to be written, beyond the time in which it is filled.
_LEASE_MARGIN_S: Final = 120.0


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


def follow_partition(
    client: DataPlaneClient,
    partition_id: str,
    folder: str | os.PathLike[str],
    *,
    fields: Sequence[str] | None = None,
    where: str | None = None,
    messages: bool = False,
    tokenizer: str | None = None,
    shard_bytes: int | str = "256MiB",
    task: str | None = None,
    every_s: float = 60.0,
    idle_s: float | None = None,
    stop: threading.Event | None = None,
) -> Exported:
    """Writes rows of a partition as Parquet as they are finished, as a task of it, until it is finished or cleared.

    The task is registered if it is not. A row is finished once it has all fields that are asked for, and those that
    ``where`` names, and its group is whole, if the partition has groups. Rows are acked once their shard is on the
    disk. After a kill at any moment the same call goes on, and every row is in the folder once. Blocks until the end.
    The other arguments are those of `export_partition`.

    Args:
        client: Of the store.
        partition_id: The partition.
        folder: A new folder, or one that the same call left.
        task: The task that follows, for this folder alone, such as ``export:mine``. None: one of the folder's own,
            ``export:`` and 8 digits, or the one that it had. Samples must not be cleared before it has them.
        every_s: A shard is complete at the latest after this many seconds.
        idle_s: End if no row came for this many seconds.
        stop: End soon after this is set. What was read is in the folder.

    Raises:
        InvalidRequestError: An argument is refused, the folder has something else, or the task is that of another one.
        UnknownPartitionError: Not registered.
        UnsupportedOperationError: The store lacks ``listing``, ``leases`` or ``cursors``.
        InvalidTypeError: A field holds items that only pickle can keep.
        SaveError: The folder cannot be written.

    Examples:
        >>> follow_partition(client, "step-1", folder, fields=["reward"], idle_s=0.0).num_rows  # doctest: +SKIP
        4
    """
    if every_s <= 0 or (idle_s is not None and idle_s < 0):
        raise InvalidRequestError("export refused: its seconds must be above 0.")
    if task is not None and (not task.startswith(OWN_TASK) or task == OWN_TASK):
        raise InvalidRequestError(
            f"export refused: the task '{task}'. Expected one whose name begins with '{OWN_TASK}': no trainer has it, "
            "and `why` never says that it is starved."
        )
    what = What(fields=fields, where=where, messages=messages, partial=False, task=task or OWN_TASK)
    with Portions(client, partition_id, folder, what, tokenizer, shard_bytes) as portions:
        follower = _Follower(portions, every_s)
        follower.run(idle_s, stop or threading.Event())
        return portions.end(num_left=follower.num_left)


class _Follower:
    """Claims finished rows, writes them, and acks them once their shard is complete."""

    def __init__(self, portions: Portions, every_s: float) -> None:
        self._portions, self._every_s = portions, every_s
        self._lease_s = 2 * every_s + _LEASE_MARGIN_S
        self._client, self._partition_id = portions.client, portions.partition_id
        self._task: str = portions.shards.manifest["what"]["task"]
        found = self._client.describe(self._partition_id)
        where = portions.where
        # a row that lacks a field of the condition may meet it later
        also = [name for name in (where.names if where else ()) if name in (*found.info.fields, *found.specs)]
        self._required = list(dict.fromkeys([*portions.required, *also]))
        self._group_size = found.info.grpo_group_size
        self._pending: list[tuple[float, KVBatchMeta]] = []  # looked at, and not acked; when their leases end
        self._written: set[str] = set()  # those of them that are in the open shard
        self._late: set[str] = set()  # in a complete shard, but their lease ran out: they are given again
        self._first = 0.0  # when the first of the pending ones was given
        self.num_left = 0

    def run(self, idle_s: float | None, stop: threading.Event) -> None:
        """Follows until the partition is finished or cleared, or it is to stop."""
        self._register()
        shards, last = self._portions.shards, time.monotonic()
        try:
            while not stop.is_set():
                asked, meta = time.monotonic(), self._claimed()
                now = time.monotonic()
                if meta is not None and meta.size:
                    last = now
                    self._write(meta, asked + self._lease_s, now)
                else:
                    if meta is not None:  # all are written, and given
                        self._flush()
                        if self._client.is_finished(self._partition_id, [self._task]):
                            break
                        stop.wait(_WAIT_S)
                    if idle_s is not None and now - last >= idle_s:
                        break
                if self._pending and now - self._first >= self._every_s:
                    self._flush()
            self._flush()
            ids = self._client.list_sample_ids(self._partition_id)
            self.num_left = len(set(ids).difference(self._client.list_consumed(self._partition_id, self._task)))
        except (UnknownPartitionError, UnknownTaskError, StalePartitionError):  # cleared, or registered anew
            shards.complete()
        except SaveError:
            raise
        except DataPlaneError:  # the store ended, for one: what was read is kept, and is not read again
            shards.complete()
            raise

    def _register(self) -> None:
        """Adds the task. If it was killed before, it has consumed what is on the disk, and nothing
        else is its own.

        Raises:
            InvalidRequestError: It is the task of something else.
        """
        client, partition_id, task, shards = self._client, self._partition_id, self._task, self._portions.shards
        found = client.describe(partition_id)
        if task in found.tasks and shards.is_new and (why := self._why_not(found.tasks[task])):
            shards.take_back()
            raise InvalidRequestError(
                f"the task '{task}' of '{partition_id}' {why}, so '{shards.folder}' would not get all samples.",
                hint="Name another task, or the folder that has them. Without --task, each folder has its own.",
            )
        if task not in found.tasks:
            client.register_partition(partition_id, [], None, [task], self._group_size, if_exists="keep")
        consumed = client.list_consumed(partition_id, task)
        # not the rows that were acked: since then, one may have been cleared, and put again as another row
        client.reset_consumption(partition_id, task, list(dict.fromkeys([*consumed, *shards.unacked_ids()])))
        shards.note_acked()

    def _why_not(self, found: TaskDescription) -> str:
        """What says that the task is that of something else, as far as it was announced. Empty: nothing."""
        if found.num_leased or found.num_consumed:
            return "was given samples already"
        if Capability.CLIENTS not in self._client.capabilities:
            return ""
        own, task = (socket.gethostname(), os.getpid()), ("claim_meta", self._partition_id, self._task)
        others = [
            f"process {each.pid} on {each.host}"
            for each in self._client.list_clients(ended=True)
            if each.state in ("open", "stopped") and (each.host, each.pid) != own
            if task in [(work.operation, work.partition_id, work.task_name) for work in each.work]
        ]
        return f"is that of {preview(others)}" if others else ""

    def _claimed(self) -> KVBatchMeta | None:
        """Samples that are finished. Empty: there will be none. None: there was none for a while."""
        unit = self._group_size or 1
        claim = partial(self._client.claim_meta, self._partition_id, self._task, self._required)
        meta = claim(max(1, self._portions.num_rows // unit) * unit, blocking=False, lease_s=self._lease_s)
        with suppress(ClaimTimeoutError):
            return meta if meta.size else claim(unit, timeout_s=_WAIT_S, lease_s=self._lease_s)
        return None

    def _write(self, meta: KVBatchMeta, ends_at: float, now: float) -> None:
        if not self._written.isdisjoint(meta.sample_ids):  # given again, or put again: an ack tells
            self._flush()
        self._first = self._first if self._pending else now
        tags = zip(meta.sample_ids, meta.tags or ({},) * meta.size, strict=True)
        rows: Tags = {sample_id: row for sample_id, row in tags if sample_id not in self._late}
        if self._portions.where is not None:
            rows = self._portions.rows.matching(self._portions.where, rows)
        try:
            self._written.update(self._portions.write(rows))
        except StalePartitionError:
            with suppress(DataPlaneError):  # they may be of the former registration
                self._client.nack(meta)
            raise
        self._pending.append((ends_at, meta))
        if self._portions.shards.is_full or not (self._portions.shards.num_open_rows or self._portions.no_chat):
            self._flush()

    def _flush(self) -> None:
        """Brings what was written to the disk, and acks it."""
        if not self._pending:
            return
        self._portions.check_chats()
        self._portions.shards.complete()
        for ends_at, meta in self._pending:
            lost = self._ack(meta)
            again = {each for each in lost if each in self._written or each in self._late}
            self._late.difference_update(meta.sample_ids)
            if time.monotonic() >= ends_at:  # it was stopped for long; else they were cleared
                self._late |= again
        self._pending.clear()
        self._written.clear()
        if self._late:
            self._late.intersection_update(self._client.list_sample_ids(self._partition_id))
        if not self._late:
            self._portions.shards.note_acked()

    def _ack(self, meta: KVBatchMeta) -> set[str]:
        """Acks what is still leased. Returns the ids of the others."""
        lost: set[str] = set()
        while left := [place for place, sample_id in enumerate(meta.sample_ids) if sample_id not in lost]:
            try:
                self._client.ack(meta.subset(left))
                break
            except LeaseExpiredError as error:
                lost.update(error.sample_ids or meta.sample_ids)
        return lost


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
