"""The folder of an export: shards of Parquet, and a manifest that names them. A reader never sees a part of a shard.

A shard is written under another name, synced to the disk, and renamed to ``part-00000.parquet``; then the manifest that
names it replaces the former one. ``.export.json`` is one JSON object. It says ``closed`` once the export has ended in
order. Its name is hidden, so that readers pass it over.

Later shards may have more columns. Readers take those of the first file by name, fill in nulls and cast. So once shards
differ, there is a ``columns.parquet`` before them, without rows, which has the columns of the newest shard.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypedDict
from uuid import uuid4

import msgspec

from dataplane_core.durable_files import sync_path, write_file
from dataplane_core.errors import CorruptDataError, InvalidRequestError, MissingDataError, SaveError, preview
from dataplane_core.saves import read_head
from dataplane_tools._columns import pa  # before pyarrow.parquet: it says what to install

KIND: Final = "dataplane-export"
VERSION: Final = 3
MANIFEST: Final = ".export.json"
COLUMNS: Final = "columns.parquet"
#: With this begins the name of a task of an export: `why` never says that it is starved. Alone, it stands for the task
#: that a folder has for itself.
OWN_TASK: Final = "export:"
#: Under this key, the schema of a shard says what its columns are.
SCHEMA_KEY: Final = b"dataplane"
_SHARD: Final = re.compile(r"part-\d{5,}\.parquet")
#: A row group is written once it has as many rows or bytes, before compression.
_GROUP_ROWS, _GROUP_BYTES = 4096, 16 << 20


class _Shard(TypedDict):
    """What the manifest says of a shard."""

    name: str
    num_rows: int
    size_bytes: int


class What(TypedDict):
    """The options that decide which rows and columns a folder has."""

    fields: Sequence[str] | None
    where: str | None
    messages: bool
    partial: bool
    task: str | None


class _Manifest(TypedDict):
    """The manifest.

    ``export`` is an id that its shards repeat. The rows of the first ``num_acked`` shards of a follower are acked.
    """

    format: str
    version: int
    export: str
    partition_id: str
    epoch: str
    what: What
    closed: bool
    num_acked: int
    shards: Sequence[_Shard]


class _Columns(TypedDict):
    """What a shard says of its columns: field -> its column, and how its items are stored; tag -> its column."""

    export: str
    fields: Mapping[str, Mapping[str, str | None]]
    tags: Mapping[str, str]


def read_manifest(folder: Path) -> Any:
    """The manifest of a folder.

    Raises:
        MissingDataError: There is none.
        UnsupportedOperationError: Another version of this package wrote it.
        CorruptDataError: It is damaged, or that of something else.
        SaveError: It cannot be read.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingDataError(
            f"no export in '{folder}': there is no {MANIFEST}.", hint="Name the folder that dataplane export wrote."
        ) from error
    except OSError as error:
        raise _not(f"the export in '{folder}' cannot be read", error) from error
    found = read_head(folder / MANIFEST, text, KIND, VERSION)
    try:
        return msgspec.convert(found, _Manifest)
    except msgspec.ValidationError as error:
        raise CorruptDataError(f"'{folder / MANIFEST}' holds what no manifest of an export has: {error}.") from error


class Shards:
    """Writes shards into a folder, where no other process writes until it is closed.

    Args:
        folder: The folder. Created if needed.
        head: The manifest's ``partition_id``, ``epoch`` and ``what``.
        shard_bytes: Size at which a shard is complete, measured before compression.
        goes_on: Whether to add to an export that is there. If not, one that was closed is refused, and what one that
            was not closed has left is removed.

    Attributes:
        is_new: Whether the folder had no export.
        former: What the newest shard of the folder said of its columns at first, with its ``schema``. Empty: none.

    Raises:
        InvalidRequestError: The folder has another export, or another process writes it.
        SaveError: It cannot be written.
        MissingDataError, CorruptDataError, UnsupportedOperationError: As `read_manifest`; or a shard is gone.
    """

    def __init__(self, folder: str | os.PathLike[str], head: Mapping[str, Any], shard_bytes: int, *, goes_on: bool):
        self.folder = Path(folder)
        self._shard_bytes = shard_bytes
        self._writer: Any = None
        self._group: list[Any] = []  # of the row group that is not written yet
        self._left_rows = self._left_bytes = 0
        try:
            os.makedirs(self.folder, exist_ok=True)
            self._lock = _locked(self.folder)
            try:
                self._begin(head, goes_on)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise _not(f"'{self.folder}' cannot be written", error) from error

    def _begin(self, head: Mapping[str, Any], goes_on: bool) -> None:
        there = sorted(each for each in self.folder.iterdir() if _SHARD.fullmatch(_final(each.name)))
        self.is_new = not (self.folder / MANIFEST).exists()
        if self.is_new:
            if others := sorted(each.name for each in self.folder.glob("*.parquet")):
                raise InvalidRequestError(
                    f"'{self.folder}' has {preview(others)}, and no {MANIFEST}.",
                    hint="Export into a folder of its own.",
                )
            self.manifest = _new(head)
        else:
            self.manifest = read_manifest(self.folder)
            former = self.manifest["what"]["task"]
            if former is not None and head["what"]["task"] == OWN_TASK:
                head = {**head, "what": {**head["what"], "task": former}}
            other = [name for name in ("partition_id", "epoch", "what") if self.manifest[name] != head[name]]
            if other or (self.manifest["closed"] and not goes_on):
                why = f"it has another {other[0]}: {self.manifest[other[0]]}" if other else "it is complete"
                raise InvalidRequestError(
                    f"'{self.folder}' has an export of '{self.manifest['partition_id']}' already, and {why}.",
                    hint="Export into another folder, or remove this one.",
                )
            if not (goes_on or self.manifest["closed"]):
                self.manifest = _new(head)  # of one that was killed nothing is worth keeping
                (self.folder / COLUMNS).unlink(missing_ok=True)
            self.manifest["closed"] = False
            kept = {shard["name"]: shard for shard in self.manifest["shards"]}
            names = {each.name for each in there}
            if lost := sorted(kept.keys() - names):
                raise CorruptDataError(f"the export in '{self.folder}' lacks {preview(lost)}.")
            for path in there:
                if path.name != _final(path.name) or not goes_on:
                    path.unlink()
                elif path.name not in kept:  # a kill came between its rename and the manifest
                    with parquet_file(path) as file:
                        columns_of(file, self.manifest)
                        rows = file.metadata.num_rows
                    kept[path.name] = {"name": path.name, "num_rows": rows, "size_bytes": path.stat().st_size}
            self.manifest["shards"] = [kept[name] for name in sorted(kept)]
        self.former = self._newest()
        self._write_manifest()

    def take_back(self) -> None:
        """Leaves a new folder as it was."""
        (self.folder / MANIFEST).unlink()

    def close(self) -> None:
        """Lets others write the folder. What is in a shard that is not complete is lost."""
        if self._writer is not None:  # of a shard that an error ended
            self._abandon(self._writer)
        os.close(self._lock)

    @property
    def num_open_rows(self) -> int:
        """Rows of the shard that is not complete yet."""
        return 0 if self._writer is None else self._rows

    @property
    def is_full(self) -> bool:
        """Whether the shard has its size: call `complete`."""
        return self._writer is not None and self._bytes >= self._shard_bytes

    def note_acked(self) -> None:
        """Says that the rows of all complete shards are acked."""
        if self.manifest["num_acked"] != len(self.manifest["shards"]):
            self.manifest["num_acked"] = len(self.manifest["shards"])
            self._write_manifest()

    def unacked_ids(self) -> Iterator[str]:
        """The ids of the rows of complete shards that may not be acked."""
        for shard in self.manifest["shards"][max(0, self.manifest["num_acked"]) :]:
            with parquet_file(self.folder / shard["name"]) as file:
                yield from file.read(["sample_id"])["sample_id"].to_pylist()

    def _newest(self) -> Mapping[str, Any]:
        """What the newest shard says of its columns. Empty: there is no shard."""
        for shard in self.manifest["shards"][-1:]:
            with parquet_file(self.folder / shard["name"]) as file:
                return {"schema": file.schema_arrow, **columns_of(file, self.manifest)}
        return {}

    def write(self, table: Any, about: Mapping[str, Any]) -> None:
        """Adds rows to the shard. Another schema begins another shard.

        Args:
            table: The rows.
            about: What the columns are, as JSON values.

        Raises:
            SaveError: They cannot be written.
        """
        about = {"format": KIND, "version": VERSION, "export": self.manifest["export"], **about}
        schema = table.schema.with_metadata({SCHEMA_KEY: json.dumps(about)})
        if self._writer is not None and not self._schema.equals(schema, check_metadata=True):
            self.complete()
        try:
            if self._writer is None:
                self._open(schema)
            self._group.append(table.replace_schema_metadata(schema.metadata))
            self._left_rows, self._left_bytes = self._left_rows - len(table), self._left_bytes - table.nbytes
            if min(self._left_rows, self._left_bytes) <= 0:
                self._write_group(self._writer)
        except (OSError, pa.ArrowException) as error:
            raise _not(f"'{self.folder}' cannot be written", error) from error
        self._rows += len(table)
        self._bytes += table.nbytes

    def _write_group(self, writer: Any) -> None:
        """Writes what was added since the last row group as one."""
        if self._group:
            group = pa.concat_tables(self._group)
            writer.write_table(group, row_group_size=len(group) or None)
        self._group, self._left_rows, self._left_bytes = [], _GROUP_ROWS, _GROUP_BYTES

    def _open(self, schema: Any) -> None:
        from pyarrow import parquet

        number = 1 + max([-1, *(int(shard["name"][5:-8]) for shard in self.manifest["shards"])])
        self._path = self.folder / f"part-{number:05}.parquet"
        self._new = self._path.with_name(f".{self._path.name}.new")  # no pattern of a reader takes it
        self._schema, self._rows, self._bytes = schema, 0, 0
        self._group, self._left_rows, self._left_bytes = [], _GROUP_ROWS, _GROUP_BYTES
        self._file = open(self._new, "wb")  # noqa: SIM115 # `complete` closes it, or `_abandon`
        # no dictionaries of numbers: they may hold one NaN for all
        strings = [field.name for field in schema if pa.types.is_large_string(field.type)]
        try:
            self._writer = parquet.ParquetWriter(
                pa.PythonFile(self._file, mode="w"), schema, compression="zstd", use_dictionary=strings
            )
        except BaseException:
            with suppress(OSError):
                self._file.close()
            raise

    def complete(self) -> None:
        """Brings the shard to the disk under its name. If it has no rows, nothing happens."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            self._write_group(writer)
            writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            shard = {"name": self._path.name, "num_rows": self._rows, "size_bytes": self._new.stat().st_size}
            self._tell_columns()
            os.replace(self._new, self._path)
            sync_path(self.folder)
            self.manifest["shards"].append(shard)
            self._write_manifest()
        except (OSError, pa.ArrowException) as error:
            self._abandon(writer)
            raise _not(f"'{self.folder}' cannot be written", error) from error

    def _tell_columns(self) -> None:
        """Says what columns the shard brings, before readers see it."""
        former = self._newest()
        if former and not former["schema"].equals(self._schema):
            from pyarrow import parquet

            sink = pa.BufferOutputStream()
            parquet.ParquetWriter(sink, self._schema.remove_metadata()).close()
            write_file(self.folder / f".{COLUMNS}.new", [sink.getvalue().to_pybytes()])
            os.replace(self.folder / f".{COLUMNS}.new", self.folder / COLUMNS)

    def _abandon(self, writer: Any) -> None:
        """Closes the file of a shard that is not completed. The next export into the folder removes it."""
        with suppress(Exception):
            writer.close()
        writer.is_open = False  # or pyarrow tries again later, and prints that it fails
        with suppress(OSError):
            self._file.close()

    def end(self) -> None:
        """Completes the last shard, and the export."""
        self.complete()
        self.manifest["closed"] = True
        self._write_manifest()

    def _write_manifest(self) -> None:
        new = self.folder / f"{MANIFEST}.new"
        write_file(new, [json.dumps(self.manifest, indent=1).encode(), b"\n"])
        os.replace(new, self.folder / MANIFEST)
        sync_path(self.folder)


def _new(head: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest without shards."""
    export, what = uuid4().hex, dict(head["what"])
    if what["task"] == OWN_TASK:
        what["task"] = OWN_TASK + export[:8]
    head = {**head, "what": what}
    return {"format": KIND, "version": VERSION, "export": export, **head, "closed": False, "num_acked": 0, "shards": []}


def _final(name: str) -> str:
    """The name that a shard has in the end."""
    return name.removeprefix(".").removesuffix(".new")


# --- reading ----------------------------------------------------------------------------------------------------------


def parquet_file(path: Path) -> Any:
    """A shard, opened.

    Raises:
        CorruptDataError: It is not one of Parquet.
    """
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise CorruptDataError(f"'{path}' cannot be read: {error}.") from error


def columns_of(file: Any, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What an open shard says of its columns.

    Raises:
        CorruptDataError: It is no shard of this export.
    """
    try:
        about: dict[str, Any] = msgspec.json.decode((file.schema_arrow.metadata or {})[SCHEMA_KEY], type=_Columns)
        if about["export"] != manifest["export"]:
            raise ValueError("it is one of another export")
    except (KeyError, ValueError, RecursionError) as error:
        raise CorruptDataError(f"a shard of '{manifest['partition_id']}' is none of this export: {error}.") from error
    return about


def _locked(folder: Path) -> int:
    """A descriptor that keeps other processes from writing the folder until it is closed, or its process ends."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        pass
    except BlockingIOError as error:
        os.close(descriptor)
        raise InvalidRequestError(f"another process exports into '{folder}'.") from error
    return descriptor


def _not(what: str, error: Exception) -> SaveError:
    return SaveError(f"{what}: {getattr(error, 'strerror', None) or error}.")
