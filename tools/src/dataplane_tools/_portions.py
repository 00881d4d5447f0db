"""An export that has begun: reads rows of a partition portion by portion, and writes them into its folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

from dataplane_core.client import DataPlaneClient
from dataplane_core.config import size_bytes
from dataplane_core.errors import InvalidRequestError, MissingDataError, StalePartitionError, preview
from dataplane_core.spec import FieldSpec
from dataplane_tools import _columns as arrow
from dataplane_tools._columns import pa
from dataplane_tools._messages import is_beside_messages, is_for_messages, messages_of
from dataplane_tools._rows import Rows, read_there
from dataplane_tools._shards import Shards, What
from dataplane_tools._tokenizer import Tokenizer
from dataplane_tools._where import parse_where

#: Rows that are read first, and at most; size of a portion that is aimed at.
_FIRST_ROWS, _MOST_ROWS, _PORTION_BYTES = 64, 4096, 16 << 20
#: Of a field of objects, rows that are looked at to learn whether they are bytes.
_LOOKED_AT: Final = 16

#: The ids of rows; for each field the places of those that have it, and their column; and its spec.
_Read = tuple[list[str], dict[str, tuple[Sequence[int], Any]], dict[str, FieldSpec]]
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


class Portions:
    """Writes rows of a partition as shards. Use it in a ``with`` statement.

    Args:
        client: Of the store.
        partition_id: The partition.
        folder: The folder.
        what: Which rows and columns. With a task, it goes on with what the folder has.
        tokenizer: As for `Tokenizer`; for messages.
        shard_bytes: Size of a shard before compression.

    Attributes:
        required: The fields that a row is to have.
        where: The condition of ``what``.
        rows: The samples of the partition.
        found: Those that meet the condition. Without one, or with a task, they are not looked for.
        shards: The folder.
        num_gone: Samples that were gone when they were to be read.
        num_rows: How many rows to write next.
        no_chat: What rows lack that are no chats -> how many they are.

    Raises:
        InvalidRequestError: There is no such field, tag or size, or `Shards` refuses the folder.
        DataPlaneError: As `Shards`, `Tokenizer`, `parse_where` and `DataPlaneClient.describe`.
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
        found = client.describe(partition_id)
        known = dict.fromkeys((*found.info.fields, *found.specs))
        if unknown := [name for name in what["fields"] or () if name not in known]:
            has = preview(known, limit=20) or "none"
            raise InvalidRequestError(f"partition '{partition_id}' has no field {preview(unknown)}. It has: {has}.")
        what["fields"] = what["fields"] and list(what["fields"])  # as JSON has it
        self.client, self.partition_id, self._what = client, partition_id, what
        self.required = list(found.info.fields if what["fields"] is None else what["fields"])
        if what["task"] is not None and not self.required:
            raise InvalidRequestError(
                f"partition '{partition_id}' is registered without fields, so nothing says when a row is finished.",
                hint="Name the fields that it waits for.",
            )
        self.where = None if what["where"] is None else parse_where(what["where"])
        self._decode = None if tokenizer is None else Tokenizer(tokenizer, skip_special=True).decode
        self.rows = Rows(client, partition_id)
        looks = self.where is not None and what["task"] is None  # later rows may have what a condition names
        self.found: Tags = self.rows.find(where=self.where).tags if looks else {}
        head = {"partition_id": partition_id, "epoch": found.info.epoch, "what": what}
        self.shards = Shards(folder, head, size, goes_on=what["task"] is not None)
        self.num_gone, self.num_rows = 0, _FIRST_ROWS
        self.no_chat: Counter[str] = Counter()
        former = self.shards.former
        fields, tags = former.get("fields", {}), former.get("tags", {})
        #: The column of a field, and of a tag. Later shards keep it.
        self._titles = {("", name): name for name in ("sample_id", "tags", *(["messages"] * what["messages"]))}
        self._titles |= {("field", name): each["column"] for name, each in fields.items()}
        self._titles |= {("tag", name): title for name, title in tags.items()}
        #: Of a field of objects: how its items are stored; whether its column is one of binary.
        self._forms: dict[str, str | None] = {name: each["form"] for name, each in fields.items()}
        self._binary: dict[str, bool] = {
            name: pa.types.is_large_binary(former["schema"].field(each["column"]).type) for name, each in fields.items()
        }
        #: Tag -> type of its column. None: the tags of the first rows say it.
        self._tag_types: dict[str, Any] | None = None
        if former:
            self._tag_types = {name: former["schema"].field(title).type for name, title in tags.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shards.close()

    def end(self, lacking: Mapping[str, int] | None = None, num_left: int = 0) -> Exported:
        """Completes the export. Raises as `check_chats`."""
        self.check_chats()
        self.shards.end()
        listed = self.shards.manifest["shards"]
        return Exported(
            num_rows=sum(shard["num_rows"] for shard in listed),
            num_shards=len(listed),
            size_bytes=sum(shard["size_bytes"] for shard in listed),
            lacking=lacking or {},
            num_gone=self.num_gone,
            num_left=num_left,
            no_chat=self.no_chat,
        )

    def check_chats(self) -> None:
        """Refuses rows of which none is a chat.

        Raises:
            InvalidRequestError: No row that was read so far is a chat.
        """
        if self.no_chat and not (self.shards.num_open_rows or self.shards.manifest["shards"]):
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
        """Writes rows. Returns the ids of those that are still there.

        Raises:
            StalePartitionError: The partition was registered anew.
            InvalidTypeError: As `arrow_of_items`.
            SaveError: They cannot be written.
        """
        found = read_there(self.client, self.partition_id, list(tags), self._read)
        self._check_registration(self.client.describe(self.partition_id).info.epoch)  # it may have changed meanwhile
        ids, cells, specs = found or ([], {}, {})
        self.num_gone += len(tags) - len(ids)
        if not ids:
            return []
        rows = [tags[sample_id] for sample_id in ids]
        self.know_tags(rows)
        columns: dict[str, Any] = {
            "sample_id": pa.array(ids, pa.large_string()),
            "tags": arrow.arrow_of_items("tags", rows, arrow.JSON, binary=False),
        }
        about: dict[str, Any] = {"fields": {}, "tags": {}}
        if self._what["messages"]:
            columns["messages"], reasons = messages_of(ids, rows, cells, self._decode)
            self.no_chat.update(reasons)
            specs = {name: spec for name, spec in specs.items() if is_beside_messages(name, spec)}
        for name, spec in specs.items():
            title, (places, column) = self._title("field", name), cells[name]
            columns[title] = self._column(name, spec, places, column, len(ids))
            about["fields"][name] = {"column": title, "form": self._forms.get(name)}
        for name, kind in (self._tag_types or {}).items():
            title = about["tags"][name] = self._title("tag", name)
            columns[title] = arrow.arrow_of_values([row.get(name) for row in rows], kind)
        table = pa.table(columns)
        self.num_rows = max(1, min(_MOST_ROWS, 4 * self.num_rows, _PORTION_BYTES * len(ids) // max(1, table.nbytes)))
        if self._what["messages"] and table["messages"].null_count:
            table = table.filter(table["messages"].is_valid())
        if len(table):
            self.shards.write(table, about)
        return ids

    def _title(self, kind: str, name: str) -> str:
        """The column of a field or a tag. A name that is taken gets ``_`` at its end."""
        title = self._titles.get((kind, name), name)
        while (kind, name) not in self._titles and title in self._titles.values():
            title += "_"
        return self._titles.setdefault((kind, name), title)

    def _column(self, name: str, spec: FieldSpec, places: Sequence[int], column: Any, num_rows: int) -> Any:
        """The Arrow column of a field, which the rows at these places have."""
        if spec.kind == "object" or spec.lists == "empty":
            items: list[Any] = [None] * num_rows
            for place, item in zip(places, [] if column is None else column.tolist(), strict=True):
                items[place] = item
            return self._column_of_items(name, items) if spec.kind == "object" else arrow.arrow_of_empty_lists(items)
        if column is None:
            return pa.nulls(num_rows, arrow.type_of_tensors(spec))
        found = arrow.arrow_of_tensors(column, spec)
        if len(places) == num_rows:
            return found
        there = dict(zip(places, range(len(places)), strict=True))
        return found.take(pa.array([there.get(row) for row in range(num_rows)], pa.int64()))

    def _column_of_items(self, name: str, items: Sequence[Any]) -> Any:
        if self._binary.get(name) is None:
            known = items
            if all(item is None for item in items):  # others may say whether they are bytes
                some = self.client.list_sample_ids(self.partition_id, fields=[name])[:_LOOKED_AT]
                with suppress(MissingDataError):
                    known = self.client.get_samples(some, self.partition_id, [name])[name].tolist() if some else ()
            self._binary[name] = arrow.form_of_items(known, None) == arrow.BYTES
        self._forms[name] = arrow.form_of_items(items, self._forms.get(name))
        return arrow.arrow_of_items(name, items, self._forms[name], self._binary[name])

    def _read(self, ids: list[str]) -> _Read:
        """Reads the columns of those that are there."""
        found = self.client.describe(self.partition_id)
        self._check_registration(found.info.epoch)
        names = self._what["fields"] or dict.fromkeys((*found.info.fields, *found.specs))
        specs = {name: found.specs[name] for name in names if name in found.specs}
        if self._what["messages"]:
            specs = {name: spec for name, spec in specs.items() if is_for_messages(name, spec)}
        has = [set(each) for each in self.client.list_fields(ids, self.partition_id)]
        alike: dict[tuple[int, ...], list[str]] = {}
        for name in specs:
            alike.setdefault(tuple(place for place, each in enumerate(has) if name in each), []).append(name)
        cells: dict[str, tuple[Sequence[int], Any]] = {}
        for places, some in alike.items():
            rows = [ids[place] for place in places]
            columns = self.client.get_samples(rows, self.partition_id, some) if rows else {}
            cells |= {name: (places, columns.get(name)) for name in some}
        return ids, cells, specs

    def _check_registration(self, epoch: str) -> None:
        if epoch != self.shards.manifest["epoch"]:
            raise StalePartitionError(f"partition '{self.partition_id}' was registered anew while it was exported.")
