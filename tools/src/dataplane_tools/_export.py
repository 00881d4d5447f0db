"""`dataplane export`: rows of a partition as a folder of Parquet, at once or as they are finished."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from dataplane_core.client import DataPlaneClient
from dataplane_core.config import load_config, size_bytes
from dataplane_core.connecting import connect
from dataplane_core.errors import (
    ClaimTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    LeaseExpiredError,
    LostSamplesError,
    MissingDataError,
    SaveError,
    StalePartitionError,
    UnknownPartitionError,
    UnknownTaskError,
    preview,
    printable,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import FieldSpec
from dataplane_tools import _columns as arrow
from dataplane_tools._columns import pa
from dataplane_tools._inspect import size_text
from dataplane_tools._messages import is_beside_messages, is_for_messages, messages_of
from dataplane_tools._rows import Rows
from dataplane_tools._sample import Decode
from dataplane_tools._shards import OWN_TASK, Shards
from dataplane_tools._tokenizer import Tokenizer
from dataplane_tools._where import Where, parse_where

#: Rows that are read first, and at most; size of a portion that is aimed at.
_FIRST_ROWS, _MOST_ROWS, _PORTION_BYTES = 64, 4096, 16 << 20
#: Of a field of objects, rows that are looked at to learn whether they are bytes.
_LOOKED_AT: Final = 16
#: Seconds of a claim that waits, after which a follower looks whether it should stop.
_WAIT_S: Final = 0.5
#: Seconds that a shard may take to be written, beyond the time in which it is filled.
_LEASE_MARGIN_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote.

    Attributes:
        num_rows: Rows that the folder holds.
        num_shards: Its shards.
        size_bytes: Their size.
        lacking: Field -> samples that were left out since they lack it. Empty for one that follows.
        num_gone: Samples that were cleared, or lost by the store, while they were read.
        num_left: Of one that follows: samples of the partition that it was not given until it ended. They are not
            finished, or lack members of their group.
    """

    num_rows: int
    num_shards: int
    size_bytes: int
    lacking: Mapping[str, int]
    num_gone: int
    num_left: int = 0


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
    follow: bool = False,
    task: str | None = None,
    every_s: float = 60.0,
    idle_s: float | None = None,
    stop: threading.Event | None = None,
) -> Exported:
    """Writes the finished rows of a partition as Parquet: those that have all fields that are asked for.

    The rows are in their order of first write. Further fields that are written but not registered come along, with a
    null where a row lacks them. In memory is a portion of about 16 MiB. No task is given anything, unless it follows.

    Args:
        client: Of the store.
        partition_id: The partition.
        folder: A new folder. It may also have an export of the same command that was killed; it starts over, or, if it
            follows, goes on.
        fields: Only these. None: all that are registered or written.
        where: Only rows that meet this condition, such as ``"reward > 0.5 and weight_version >= 7"``.
        partial: Also rows that lack fields.
        messages: One column ``messages`` of ``{"role": ..., "content": ...}``, with tool calls, instead of the fields,
            for fine-tuning; beside it ids, tags, fields of one number and ``tools``. `import_folder` does not take it.
        tokenizer: With ``messages``: what turns tokens into text where no turns are kept. As for `dataplane read`.
        shard_bytes: Size of a shard before compression, such as ``"256MiB"``.
        follow: Go on with what is finished later, as a task of the partition, which is registered if it is not. A row
            is finished once it also has the fields that ``where`` names, and its group is whole, if the partition has
            groups. Rows are acked once their shard is on the disk. After a kill at any moment the same call goes on,
            and every row is in the folder once. It ends when the partition is finished or cleared.
        task: The task that follows. None: one of this folder's own, ``export-`` and 8 digits, or the one that it had.
            Two folders with one task would each get some of the rows. Samples must not be cleared before it has them.
        every_s: A shard is complete at the latest after this many seconds. Needs ``follow``.
        idle_s: End if no row came for this many seconds. Needs ``follow``.
        stop: End soon after this is set. What was read is in the folder. Needs ``follow``.

    Raises:
        InvalidRequestError: An argument is refused, or the folder has something else.
        UnknownPartitionError: Not registered.
        StalePartitionError: It was registered anew meanwhile. One that follows ends instead.
        UnsupportedOperationError: The store has no ``listing``; or, to follow, no ``leases`` or ``cursors``.
        InvalidTypeError: A field holds items that only pickle can keep.
        SaveError: The folder cannot be written.
    """
    try:
        shard_size = int(size_bytes(shard_bytes))
    except ValueError as error:
        raise InvalidRequestError(f"export refused: the size of a shard is {shard_bytes!r}; {error}.") from error
    if shard_size < 1 or every_s <= 0 or (idle_s is not None and idle_s < 0):
        raise InvalidRequestError("export refused: a shard's size and seconds must be above 0.")
    if follow and partial:
        raise InvalidRequestError("export refused: it follows finished rows, so partial rows cannot come along.")
    found = client.describe(partition_id)
    known = dict.fromkeys((*found.info.fields, *found.specs))
    if unknown := [name for name in fields or () if name not in known]:
        raise InvalidRequestError(
            f"partition '{partition_id}' has no field {preview(unknown)}. It has: {preview(known, limit=20) or 'none'}."
        )
    required = list(found.info.fields if fields is None else fields)
    if follow and not required:
        raise InvalidRequestError(
            f"partition '{partition_id}' is registered without fields, so nothing says when a row is finished.",
            hint="Name the fields that it waits for.",
        )
    registration = found.info.registration()
    registration["consumer_tasks"] = [name for name in registration["consumer_tasks"] if not follow or name != task]
    what = {"fields": fields and list(fields), "where": where, "messages": messages, "partial": partial}
    what |= {"task": (task or OWN_TASK) if follow else None}
    head = {"partition_id": partition_id, "epoch": found.info.epoch, "registration": registration, "what": what}
    decode = None if tokenizer is None else Tokenizer(tokenizer, skip_special=True).decode
    rows, condition = Rows(client, partition_id), None if where is None else parse_where(where)
    waits_for = [*required, *(name for name in (condition.names if condition else ()) if name in known)]
    # a follower looks only whether the names of the condition are known
    found_rows = rows.find(where=condition).tags if condition is not None or not follow else {}
    with Shards(folder, head, shard_size, goes_on=follow) as shards:
        export = _Export(client, partition_id, shards, fields, rows)
        export.where, export.decode, export.messages = condition, decode, messages
        if follow:
            # a row that lacks a field of the condition may meet it later
            export.follow(list(dict.fromkeys(waits_for)), every_s, idle_s, stop or threading.Event())
        else:
            export.once(found_rows, [] if partial else required)
        shards.end()
        listed = shards.manifest["shards"]
        return Exported(
            num_rows=sum(shard["num_rows"] for shard in listed),
            num_shards=len(listed),
            size_bytes=sum(shard["size_bytes"] for shard in listed),
            lacking=export.lacking,
            num_gone=export.num_gone,
            num_left=export.num_left,
        )


class _Export:
    """Reads rows of a partition, and writes them as shards."""

    def __init__(
        self,
        client: DataPlaneClient,
        partition_id: str,
        shards: Shards,
        fields: Sequence[str] | None,
        rows: Rows,
    ) -> None:
        self._client, self._partition_id, self._shards, self._fields = client, partition_id, shards, fields
        self._rows = rows
        self.where: Where | None = None
        self.decode: Decode | None = None
        self.messages = False
        self.lacking: Counter[str] = Counter()
        self.num_gone = self.num_left = 0
        self._num_rows = _FIRST_ROWS
        former = shards.columns()
        #: Of a field of objects: how its items are stored; whether its column is one of binary.
        self._forms: dict[str, str | None] = {name: each["form"] for name, each in former.get("fields", {}).items()}
        self._binary: dict[str, bool] = {}
        #: Tag -> type of its column. None: the tags of the first rows say it.
        self._tag_types: dict[str, Any] | None = None
        if former:
            self._binary = {
                name: pa.types.is_large_binary(former["schema"].field(each["column"]).type)
                for name, each in former["fields"].items()
            }
            self._tag_types = {tag: former["schema"].field(name).type for tag, name in former["tags"].items()}

    def once(self, rows: Mapping[str, Mapping[str, Any]], required: Sequence[str]) -> None:
        """Writes those rows, id -> tags, that have all required fields."""
        has = set(self._client.list_sample_ids(self._partition_id, fields=required)) if required else rows
        lacking = [sample_id for sample_id in rows if sample_id not in has]
        with suppress(MissingDataError):  # some were cleared meanwhile
            for names in self._client.list_fields(lacking, self._partition_id):
                self.lacking.update(name for name in required if name not in names)
        ids = [sample_id for sample_id in rows if sample_id in has]
        self._tag_types = _tag_types(rows[sample_id] for sample_id in ids)
        start = 0
        while start < len(ids):
            some = ids[start : start + self._num_rows]
            start += len(some)
            self._write({sample_id: rows[sample_id] for sample_id in some})
            if self._shards.is_full:
                self._shards.complete()

    def follow(self, required: Sequence[str], every_s: float, idle_s: float | None, stop: threading.Event) -> None:
        """Claims finished rows, writes them, and acks them once their shard is complete."""
        client, partition_id, task = self._client, self._partition_id, self._shards.manifest["what"]["task"]
        group_size = client.describe(partition_id).info.grpo_group_size
        self._register(task, group_size)
        unit, lease_s = group_size or 1, 2 * every_s + _LEASE_MARGIN_S
        pending: list[KVBatchMeta] = []  # looked at, and not acked
        written: set[str] = set()  # in a shard, and not acked: also if their lease ended, and they are given again
        first = last = time.monotonic()

        def flush() -> None:
            self._shards.complete()
            for meta in pending:
                try:
                    client.ack(meta)
                    written.difference_update(meta.sample_ids)
                except LeaseExpiredError:  # it was stopped for long
                    pass
            if pending and not written:
                self._shards.note_acked()
            pending.clear()

        try:
            while not stop.is_set():
                count = max(1, self._num_rows // unit) * unit
                meta = client.claim_meta(partition_id, task, required, count, blocking=False, lease_s=lease_s)
                if not meta.size:
                    try:
                        meta = client.claim_meta(partition_id, task, required, unit, timeout_s=_WAIT_S, lease_s=lease_s)
                        if not meta.size:  # all are written, and given
                            flush()
                            if client.is_finished(partition_id, [task]):
                                break
                            stop.wait(_WAIT_S)
                    except ClaimTimeoutError:
                        pass
                now = time.monotonic()
                if meta.size:
                    last = now
                    first = first if pending else now
                    tags = dict(zip(meta.sample_ids, meta.tags or ({},) * meta.size, strict=True))
                    rows: Mapping[str, Mapping[str, Any]] = {
                        sample_id: row for sample_id, row in tags.items() if sample_id not in written
                    }
                    rows = rows if self.where is None else self._rows.matching(self.where, rows)
                    try:
                        written.update(self._write(rows))
                    except StalePartitionError:
                        with suppress(DataPlaneError):  # they may be of the former registration
                            client.nack(meta)
                        raise
                    pending.append(meta)
                    if self._shards.is_full or not self._shards.num_open_rows:
                        flush()
                elif idle_s is not None and now - last >= idle_s:
                    break
                if pending and now - first >= every_s:
                    flush()
            flush()
            self.num_left = len(
                set(client.list_sample_ids(partition_id)).difference(client.list_consumed(partition_id, task))
            )
        except (UnknownPartitionError, UnknownTaskError, StalePartitionError):  # cleared, or registered anew
            self._shards.complete()
        except SaveError:
            raise
        except DataPlaneError:  # the store ended, for one: what was read is kept, and is not read again
            self._shards.complete()
            raise

    def _register(self, task: str, group_size: int | None) -> None:
        """Adds the task. If it was killed before, it has consumed what is on the disk, and nothing else is its own."""
        client, partition_id = self._client, self._partition_id
        found = client.describe(partition_id)
        if task not in found.tasks:
            client.register_partition(partition_id, [], None, [task], group_size, if_exists="keep")
        elif self._shards.is_new and (found.tasks[task].num_leased or found.tasks[task].num_consumed):
            raise InvalidRequestError(
                f"the task '{task}' of '{partition_id}' was given samples that are not in '{self._shards.folder}'.",
                hint="Name the folder that has them, or another task: --task NAME.",
            )
        consumed = client.list_consumed(partition_id, task)
        # not the rows that were acked: since then, one may have been cleared, and put again as another row
        client.reset_consumption(partition_id, task, list(dict.fromkeys([*consumed, *self._shards.unacked_ids()])))
        self._shards.note_acked()

    # --- a portion --------------------------------------------------------------------------------------------------

    def _write(self, tags: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Writes rows. Returns the ids of those that are still there."""
        ids, cells, specs = self._read(list(tags))
        self.num_gone += len(tags) - len(ids)
        if not ids:
            return []
        rows = [tags[sample_id] for sample_id in ids]
        if self._tag_types is None:
            self._tag_types = _tag_types(rows)
        columns: dict[str, Any] = {
            "sample_id": pa.array(ids, pa.large_string()),
            "tags": arrow.arrow_of_items("tags", rows, arrow.JSON, binary=False),
        }
        about: dict[str, Any] = {"fields": {}, "tags": {}, "absent": {}}
        if self.messages:
            columns["messages"] = messages_of(ids, rows, cells, self.decode)
            specs = {name: spec for name, spec in specs.items() if is_beside_messages(name, spec)}
        for name, spec in specs.items():
            places, column = cells[name]
            title = _free(name, columns)
            if _holds_items(spec):
                items = [None] * len(ids)
                for place, item in zip(places, [] if column is None else column.tolist(), strict=True):
                    items[place] = item
                columns[title] = self._column_of_items(name, items)
                about["absent"][name] = sorted(set(range(len(ids))).difference(places))
            elif column is None:
                columns[title] = pa.nulls(len(ids), arrow.type_of_tensors(spec))
            else:
                columns[title] = arrow.arrow_of_tensors(column, spec)
                if len(places) < len(ids):
                    there = dict(zip(places, range(len(places)), strict=True))
                    columns[title] = columns[title].take(
                        pa.array([there.get(row) for row in range(len(ids))], pa.int64())
                    )
            about["fields"][name] = {"column": title, "spec": spec.to_text(), "form": self._forms.get(name)}
        for name, kind in self._tag_types.items():
            title = about["tags"][name] = _free(name, columns)
            columns[title] = arrow.arrow_of_values([row.get(name) for row in rows], kind)
        table = pa.table(columns)
        self._num_rows = max(1, min(_MOST_ROWS, 4 * self._num_rows, _PORTION_BYTES * len(ids) // max(1, table.nbytes)))
        self._shards.write(table, about)
        return ids

    def _read(self, ids: list[str]) -> tuple[list[str], dict[str, tuple[Sequence[int], Any]], dict[str, FieldSpec]]:
        """The rows that are there; for each field the places of those that have it, and their column; and its spec."""
        client, partition_id = self._client, self._partition_id
        while ids:
            try:
                found = client.describe(partition_id)
                self._check_registration(found.info.epoch)
                names = self._fields or dict.fromkeys((*found.info.fields, *found.specs))
                specs = {name: found.specs[name] for name in names if name in found.specs}
                if self.messages:
                    specs = {name: spec for name, spec in specs.items() if is_for_messages(name, spec)}
                has = [set(each) for each in client.list_fields(ids, partition_id)]
                alike: dict[tuple[int, ...], list[str]] = {}
                for name in specs:
                    places = tuple(place for place, each in enumerate(has) if name in each)
                    alike.setdefault(places, []).append(name)
                cells: dict[str, tuple[Sequence[int], Any]] = {}
                for places, some in alike.items():
                    rows = [ids[place] for place in places]
                    columns = client.get_samples(rows, partition_id, some) if rows else {}
                    cells |= {name: (places, columns.get(name)) for name in some}
                break
            except LostSamplesError as error:
                left = [each for each in ids if each not in error.missing_samples]
                if left == ids:
                    raise
                ids = left
            except MissingDataError:  # samples were cleared meanwhile
                left = client.list_samples(partition_id, sample_ids=ids).sample_ids
                if left == ids:
                    raise
                ids = left
        else:
            cells, specs = {}, {}
        self._check_registration(client.describe(partition_id).info.epoch)  # it may have changed while they were read
        return ids, cells, specs

    def _check_registration(self, epoch: str) -> None:
        if epoch != self._shards.manifest["epoch"]:
            raise StalePartitionError(f"partition '{self._partition_id}' was registered anew while it was exported.")

    def _column_of_items(self, name: str, items: Sequence[Any]) -> Any:
        if self._binary.get(name) is None:
            known = items
            if all(item is None for item in items):  # others may say whether they are bytes
                some = self._client.list_sample_ids(self._partition_id, fields=[name])[:_LOOKED_AT]
                with suppress(MissingDataError):
                    known = self._client.get_samples(some, self._partition_id, [name])[name].tolist() if some else ()
            form = arrow.form_of_items(known, None)
            self._binary[name] = form == arrow.BYTES
        self._forms[name] = arrow.form_of_items(items, self._forms.get(name))
        return arrow.arrow_of_items(name, items, self._forms[name], self._binary[name])


def _holds_items(spec: FieldSpec) -> bool:
    """Whether the cells of a field are read as objects: also those of which only empty lists are known."""
    return spec.kind == "object" or (spec.is_open and spec.dtype != "int64")


def _free(name: str, columns: Mapping[str, Any]) -> str:
    """The name of a column. One that is taken gets ``_`` at its end."""
    while name in columns:
        name += "_"
    return name


def _tag_types(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Tag -> the type of its column, for the tags whose values have a common one."""
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    types = {name: arrow.type_of_values(some) for name, some in values.items()}
    return {name: kind for name, kind in types.items() if kind is not None}


# --- the command ------------------------------------------------------------------------------------------------------


def run(config_path: str, partition_id: str, folder: str, **options: Any) -> int:
    """Exports rows of a running store. The options are those of `export_partition`.

    Raises:
        DataPlaneError: As `export_partition`, and `connect`.
    """
    stop = threading.Event()
    former = {}
    if options["follow"]:
        former = {each: signal.signal(each, lambda *_: stop.set()) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with connected(config_path) as client:
            done = export_partition(client, partition_id, folder, **options, stop=stop)
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)
    shards = "1 shard" if done.num_shards == 1 else f"{done.num_shards} shards"
    print(printable(f"{folder}: {done.num_rows} rows of {partition_id} in {shards}, {size_text(done.size_bytes)}"))
    for name, count in done.lacking.items():
        print(printable(f"{count} were left out, which lack '{name}' (--partial takes them)"))
    if done.num_gone:
        print(f"{done.num_gone} were cleared meanwhile, or their payload is lost")
    if done.num_left:
        print(f"{done.num_left} were left, which are not finished, or lack members of their group")
    return 0


def connected(config_path: str) -> DataPlaneClient:
    """A client of the running store of a config."""
    config = load_config(config_path).model_copy(update={"attach_wait_s": 0.0})
    return connect(config, bootstrap=False)
