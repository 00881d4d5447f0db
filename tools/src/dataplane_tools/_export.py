"""`dataplane export`: rows of a partition as a folder of Parquet, at once; or as they are finished, as a task of it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import torch
from rich import filesize

from dataplane_core.client import DataPlaneClient
from dataplane_core.config import size_bytes
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
from dataplane_core.spec import Capability, FieldSpec, PartitionDescription
from dataplane_tools import _shards as arrow
from dataplane_tools._messages import is_beside_messages, is_for_messages, messages_of
from dataplane_tools._rows import Portion, Rows, opened, read_portion
from dataplane_tools._shards import MANIFEST, OWN_TASK, Manifest, Shards, What, pa
from dataplane_tools._store import attach
from dataplane_tools._tokenizer import Tokenizer
from dataplane_tools._where import parse_where

#: Rows that are read first, and at most; size of a portion that is aimed at.
_FIRST_ROWS, _MOST_ROWS, _PORTION_BYTES = 64, 4096, 16 << 20
#: Of a field of objects, rows that are looked at to learn whether they are bytes.
_LOOKED_AT: Final = 16
#: Seconds of a claim that waits, after which a follower looks whether it should stop.
_WAIT_S: Final = 0.5
#: Seconds that a shard may take to be written, beyond the time in which it is filled.
_LEASE_MARGIN_S: Final = 120.0
#: What the metadata of a column of a shard says, as JSON: its kind, its name, and how its items are stored.
_ABOUT: Final = b"dataplane"

#: Id -> tags.
Tags = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote.

    Attributes:
        num_rows: Rows that the folder holds.
        num_shards: Its shards.
        size_bytes: Their size.
        lacking: Field -> samples that were left out since they lack it. Empty for one that follows.
        num_gone: Samples that were cleared, or lost by the store, while they were read.
        num_left: Of one that follows: samples of the partition that it was not given until it ended.
        no_chat: What rows lack that were left out since they are no chats -> how many they are.
    """

    num_rows: int
    num_shards: int
    size_bytes: int
    lacking: Mapping[str, int]
    num_gone: int
    num_left: int = 0
    no_chat: Mapping[str, int] = field(default_factory=dict)


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
    what = What(fields=None if fields is None else list(fields), where=where, messages=messages, partial=partial)
    with _Portions(client, partition_id, folder, what, tokenizer, shard_bytes) as portions:
        rows = portions.found
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
        for names in client.list_fields([sample_id for sample_id in rows if sample_id not in has], partition_id):
            lacking.update(name for name in required if name not in names)
    return [sample_id for sample_id in rows if sample_id in has], lacking


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
    if task is not None and not Path(folder, MANIFEST).exists():
        _check_is_new(client, partition_id, task, folder)
    what = What(fields=None if fields is None else list(fields), where=where, messages=messages, task=task or OWN_TASK)
    with _Portions(client, partition_id, folder, what, tokenizer, shard_bytes) as portions:
        follower = _Follower(portions, every_s)
        follower.run(idle_s, stop or threading.Event())
        return portions.end(num_left=follower.num_left)


def _check_is_new(client: DataPlaneClient, partition_id: str, task: str, folder: str | os.PathLike[str]) -> None:
    """Refuses the task of something else, as far as it was announced: its samples would not be in a new folder."""
    description = client.describe(partition_id).tasks.get(task)
    why = ""
    if description is None:
        return
    if description.num_leased or description.num_consumed:
        why = "was given samples already"
    elif Capability.CLIENTS in client.capabilities:
        own, claim = (socket.gethostname(), os.getpid()), ("claim_meta", partition_id, task)
        others = [
            f"process {other.pid} on {other.host}"
            for other in client.list_clients(ended=True)
            if other.state in ("open", "stopped") and (other.host, other.pid) != own
            if claim in [(work.operation, work.partition_id, work.task_name) for work in other.work]
        ]
        why = f"is that of {preview(others)}" if others else ""
    if why:
        raise InvalidRequestError(
            f"the task '{task}' of '{partition_id}' {why}, so '{folder}' would not get all samples.",
            hint="Name another task, or the folder that has them. Without --task, each folder has its own.",
        )


class _Follower:
    """Claims finished rows, writes them, and acks them once their shard is complete."""

    def __init__(self, portions: _Portions, every_s: float) -> None:
        self._portions, self._every_s = portions, every_s
        self._lease_s = 2 * every_s + _LEASE_MARGIN_S
        self._client, self._partition_id = portions.client, portions.partition_id
        self._task = str(portions.shards.manifest.what.task)
        description = self._client.describe(self._partition_id)
        # a row that lacks a field of the condition may meet it later
        names = portions.where.names if portions.where else ()
        also = [name for name in names if name in (*description.info.fields, *description.specs)]
        self._required = list(dict.fromkeys([*portions.required, *also]))
        self._info = description.info
        self._pending: list[tuple[float, KVBatchMeta]] = []  # looked at, and not acked; when their leases end
        self._written: set[str] = set()  # those of them that are in the open shard
        self._first = 0.0  # when the first of the pending ones was given
        self.num_left = 0

    def run(self, idle_s: float | None, stop: threading.Event) -> None:
        """Follows until the partition is finished or cleared, or it is to stop."""
        client, partition_id, task = self._client, self._partition_id, self._task
        if task not in client.describe(partition_id).tasks:
            size, rollouts = self._info.grpo_group_size, self._info.rollouts
            client.register_partition(partition_id, [], None, [task], size, if_exists="keep", rollouts=rollouts)
        self._take_stock()
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
                        if client.is_finished(partition_id, [task]):
                            break
                        stop.wait(_WAIT_S)
                    if idle_s is not None and now - last >= idle_s:
                        break
                if self._pending and now - self._first >= self._every_s:
                    self._flush()
            self._flush()
            ids = client.list_sample_ids(partition_id)
            self.num_left = len(set(ids).difference(client.list_consumed(partition_id, task)))
        except (UnknownPartitionError, UnknownTaskError, StalePartitionError):  # cleared, or registered anew
            shards.complete()
        except SaveError:
            raise
        except DataPlaneError:  # the store ended, for one: what was read is kept, and is not read again
            shards.complete()
            raise

    def _take_stock(self) -> None:
        """Sets what the task has consumed: what is on the disk, and nothing else. So after a kill, or if it was stopped
        for so long that its leases ended, it has every row once.
        """
        client, partition_id, task, shards = self._client, self._partition_id, self._task, self._portions.shards
        consumed = client.list_consumed(partition_id, task)
        # not the rows that were acked: since then, one may have been cleared, and put again as another row
        client.reset_consumption(partition_id, task, list(dict.fromkeys([*consumed, *shards.unacked_ids()])))
        shards.note_acked()

    def _claimed(self) -> KVBatchMeta | None:
        """Samples that are finished. Empty: there will be none. None: there was none for a while."""
        unit = 1 if self._info.rollouts else self._info.grpo_group_size or 1
        max_rows = self._portions.num_rows if self._info.rollouts else None  # else the batch size says it
        claim = partial(self._client.claim_meta, self._partition_id, self._task, self._required)
        count = max(1, self._portions.num_rows // unit) * unit
        meta = claim(count, blocking=False, lease_s=self._lease_s, max_rows=max_rows)
        with suppress(ClaimTimeoutError):
            return meta if meta.size else claim(unit, timeout_s=_WAIT_S, lease_s=self._lease_s)
        return None

    def _write(self, meta: KVBatchMeta, ends_at: float, now: float) -> None:
        # given again, or put again: an ack tells
        if not self._written.isdisjoint(meta.sample_ids) and not self._flush():
            return  # the claim ended with the others: what is not on the disk is given anew
        self._first = self._first if self._pending else now
        rows: Tags = dict(zip(meta.sample_ids, meta.tags or ({},) * meta.size, strict=True))
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

    def _flush(self) -> bool:
        """Brings what was written to the disk, and acks it. Returns whether what is claimed now still is."""
        if not self._pending:
            return True
        self._portions.check_chats()
        self._portions.shards.complete()
        is_late = False
        for ends_at, meta in self._pending:
            is_acked = self._ack(meta)
            is_late |= not is_acked and time.monotonic() >= ends_at  # else samples were cleared
        self._pending.clear()
        self._written.clear()
        if is_late:
            self._take_stock()
        else:
            self._portions.shards.note_acked()
        return not is_late

    def _ack(self, meta: KVBatchMeta) -> bool:
        """Acks what is still leased. Returns whether that is all."""
        lost: set[str] = set()
        while left := [place for place, sample_id in enumerate(meta.sample_ids) if sample_id not in lost]:
            try:
                self._client.ack(meta.subset(left))
                break
            except LeaseExpiredError as error:
                lost.update(error.sample_ids or meta.sample_ids)
        return not lost


# --- rows -------------------------------------------------------------------------------------------------------------


class _Portions:
    """Writes rows of a partition as shards. Use it in a ``with`` statement. With a task, it goes on with what the
    folder has.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        partition_id: str,
        folder: str | os.PathLike[str],
        what: What,
        tokenizer: str | None,
        shard_bytes: int | str,
    ) -> None:
        try:
            size = int(size_bytes(shard_bytes))
        except ValueError as error:
            raise InvalidRequestError(f"export refused: the size of a shard is {shard_bytes!r}; {error}.") from error
        if size < 1:
            raise InvalidRequestError("export refused: a shard's size must be above 0.")
        description = client.describe(partition_id)
        names = dict.fromkeys((*description.info.fields, *description.specs))
        if unknown := [name for name in what.fields or () if name not in names]:
            has = preview(names, limit=20) or "none"
            raise InvalidRequestError(f"partition '{partition_id}' has no field {preview(unknown)}. It has: {has}.")
        self.client, self.partition_id, self._what = client, partition_id, what
        #: The fields that a row is to have.
        self.required = list(description.info.fields if what.fields is None else what.fields)
        if what.task is not None and not self.required:
            raise InvalidRequestError(
                f"partition '{partition_id}' is registered without fields, so nothing says when a row is finished.",
                hint="Name the fields that it waits for.",
            )
        self.where = None if what.where is None else parse_where(what.where)
        self._decode = None if tokenizer is None else Tokenizer(tokenizer, skip_special=True).decode
        self.rows = Rows(client, partition_id)
        #: The samples that meet the condition. An export that follows does not look for them: later rows may have the
        #: tags of the condition.
        self.found: Tags = self.rows.find(where=self.where).tags if what.task is None else {}
        manifest = Manifest(partition_id=partition_id, epoch=description.info.epoch, what=what)
        self.shards = Shards(folder, manifest, size)
        self.num_gone = 0  # samples that were gone when they were to be read
        self.num_rows = _FIRST_ROWS  # rows of the next portion
        self.no_chat: Counter[str] = Counter()  # what rows lack that are no chats -> how many they are
        #: The column of a field, and of a tag. Later shards keep it.
        self._titles = {("", name): name for name in ("sample_id", "tags", *(["messages"] * what.messages))}
        #: Of a field of objects: how its items are stored; whether its column is one of binary.
        self._forms: dict[str, str | None] = {}
        self._binary: dict[str, bool] = {}
        #: Tag -> type of its column. None: the tags of the first rows say it.
        self._tag_types: dict[str, Any] | None = None if self.shards.schema is None else {}
        for column in self.shards.schema or ():
            kind, name, form = json.loads((column.metadata or {}).get(_ABOUT, b'["", "", null]'))
            if kind == "tag" and self._tag_types is not None:
                self._tag_types[name] = column.type
            if kind == "field":
                self._forms[name], self._binary[name] = form, pa.types.is_large_binary(column.type)
            self._titles.setdefault((kind, name), column.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shards.close()

    def end(self, lacking: Mapping[str, int] | None = None, num_left: int = 0) -> Exported:
        """Completes the export."""
        self.check_chats()
        self.shards.end()
        num_rows, size_bytes = self.shards.totals()
        return Exported(
            num_rows=num_rows,
            num_shards=len(self.shards.numbers),
            size_bytes=size_bytes,
            lacking=lacking or {},
            num_gone=self.num_gone,
            num_left=num_left,
            no_chat=self.no_chat,
        )

    def check_chats(self) -> None:
        """Refuses rows of which none is a chat so far."""
        if self.no_chat and not (self.shards.num_open_rows or self.shards.numbers):
            count, what = self.no_chat.total(), next(iter(self.no_chat))
            raise InvalidRequestError(
                f"export refused: none of {count} rows is a chat. The first one has {what}.",
                hint="docs/recording.md says what a chat is taken from.",
            )

    def know_tags(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Sets which tags have columns, if no shard has said it: those whose values have a common type."""
        if self._tag_types is None:
            values: dict[str, list[Any]] = {}
            for row in rows:
                for name, value in row.items():
                    values.setdefault(name, []).append(value)
            types = {name: arrow.type_of_values(some) for name, some in values.items()}
            self._tag_types = {name: kind for name, kind in types.items() if kind is not None}

    def write(self, tags: Tags) -> list[str]:
        """Writes rows. Returns the ids of those that are still there."""
        specs = self._specs(self._described())
        portion = read_portion(self.client, self.partition_id, list(tags), list(specs))
        self._described()  # the registration may have changed meanwhile
        self.num_gone += len(tags) - len(portion.ids)
        if not portion.ids:
            return []
        table = self._table(portion, [tags[sample_id] for sample_id in portion.ids], specs)
        num_rows = _PORTION_BYTES * len(table) // max(1, table.nbytes)
        self.num_rows = max(1, min(_MOST_ROWS, 4 * self.num_rows, num_rows))
        if self._what.messages and table["messages"].null_count:
            table = table.filter(table["messages"].is_valid())
        if len(table):
            self.shards.write(table)
        return list(portion.ids)

    def _described(self) -> PartitionDescription:
        description = self.client.describe(self.partition_id)
        if description.info.epoch != self.shards.manifest.epoch:
            raise StalePartitionError(f"partition '{self.partition_id}' was registered anew while it was exported.")
        return description

    def _specs(self, description: PartitionDescription) -> dict[str, FieldSpec]:
        """The fields that are to be read."""
        names = self._what.fields or dict.fromkeys((*description.info.fields, *description.specs))
        specs = {name: description.specs[name] for name in names if name in description.specs}
        if self._what.messages:
            return {name: spec for name, spec in specs.items() if is_for_messages(name, spec)}
        return specs

    def _table(self, portion: Portion, tags: Sequence[Mapping[str, Any]], specs: Mapping[str, FieldSpec]) -> Any:
        """The rows as Arrow has them."""
        columns: list[Any] = []
        heads: list[Any] = []

        def add(kind: str, name: str, column: Any, form: str | None = None) -> None:
            about = {_ABOUT: json.dumps([kind, name, form])}
            columns.append(column)
            heads.append(pa.field(self._title(kind, name), column.type, metadata=about))

        add("", "sample_id", pa.array(portion.ids, pa.large_string()))
        add("", "tags", arrow.arrow_of_items("tags", tags, arrow.JSON, binary=False))
        if self._what.messages:
            column, reasons = messages_of(portion.ids, tags, portion.cells(), self._decode)
            add("", "messages", column)
            self.no_chat.update(reasons)
            specs = {name: spec for name, spec in specs.items() if is_beside_messages(name, spec)}
        for name, spec in specs.items():
            column = self._column(name, spec, portion)
            add("field", name, column, self._forms.get(name))
        self.know_tags(tags)
        for name, kind in (self._tag_types or {}).items():
            add("tag", name, arrow.arrow_of_values([row.get(name) for row in tags], kind))
        return pa.table(columns, schema=pa.schema(heads))

    def _title(self, kind: str, name: str) -> str:
        """The column of a field or a tag. A name that is taken gets ``_`` at its end."""
        title = self._titles.get((kind, name), name)
        while (kind, name) not in self._titles and title in self._titles.values():
            title += "_"
        return self._titles.setdefault((kind, name), title)

    def _column(self, name: str, spec: FieldSpec, portion: Portion) -> Any:
        """The Arrow column of a field."""
        if spec.kind == "object":
            return self._column_of_items(name, portion.items(name))
        if spec.lists == "empty":  # they may become lists of any numbers, also before they are read
            items = [cell.tolist() if isinstance(cell, torch.Tensor) else cell for cell in portion.items(name)]
            return pa.array(items, arrow.type_of_tensors(FieldSpec("tensor", "int64", 1)))
        pieces = portion.pieces[name]
        if not pieces:
            return pa.nulls(len(portion.ids), arrow.type_of_tensors(spec))
        arrays = [arrow.arrow_of_tensors(piece, spec) for _, piece in pieces]
        column = pa.chunked_array([chunk for array in arrays for chunk in array.chunks])
        places = [place for some, _ in pieces for place in some]
        if places == list(range(len(portion.ids))):
            return column
        there = {place: row for row, place in enumerate(places)}
        return column.take(pa.array([there.get(row) for row in range(len(portion.ids))], pa.int64()))

    def _column_of_items(self, name: str, items: Sequence[Any]) -> Any:
        if name not in self._binary:
            some = items
            if all(item is None for item in items):  # others may say whether they are bytes
                ids = self.client.list_sample_ids(self.partition_id, fields=[name])[:_LOOKED_AT]
                with suppress(MissingDataError):
                    some = self.client.get_samples(ids, self.partition_id, [name])[name].tolist() if ids else ()
            self._binary[name] = arrow.form_of_items(some, None) == arrow.BYTES
        self._forms[name] = arrow.form_of_items(items, self._forms.get(name))
        return arrow.arrow_of_items(name, items, self._forms[name], self._binary[name])


# --- the command ------------------------------------------------------------------------------------------------------


def run(chosen: argparse.Namespace) -> int:
    """Exports rows of a running store, of a save or of a recording."""
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
    former = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    following = {"task": chosen.task, "every_s": chosen.every, "idle_s": chosen.idle, "stop": stop}
    try:
        with attach(path, announced=True) as client:
            done = follow_partition(client, partition_id, folder, **following, **options)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    return _told(chosen, done)


def _told(chosen: argparse.Namespace, done: Exported) -> int:
    shards = "1 shard" if done.num_shards == 1 else f"{done.num_shards} shards"
    size = filesize.decimal(done.size_bytes)
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
