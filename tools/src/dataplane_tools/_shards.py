"""The folder of an export: shards of Parquet, and a manifest. A reader never sees a part of a shard.

A shard is written under another name, synced to the disk, and renamed to ``part-00000.parquet``: the shards are what
the folder has of these names. ``.export.json`` is the `Manifest`, one JSON object. Its name is hidden, so that readers
pass it over.

Later shards may have more columns. Readers take those of the first file by name, fill in nulls and cast. So once shards
differ, there is a ``columns.parquet`` before them, without rows, which has the columns of the newest shard.

A tensor field has the type that `dataplane_core.to_arrow` gives it. What Arrow lacks is stored as what holds it: a
complex number as a list of its two parts; cells without elements, such as those of shape (L, 0), as L zeros. An object
field is a column of strings, or of binary if its items are bytes. Where not all of its items are strings (or bytes),
each is JSON. A null means that the row lacks the field, or that its item is None.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
import torch

from dataplane_core import to_arrow
from dataplane_core.codec import dense_or_jagged, ragged_of_nested
from dataplane_core.durable_files import sync_path, write_file
from dataplane_core.errors import (
    CorruptDataError,
    InvalidRequestError,
    InvalidTypeError,
    SaveError,
    UnsupportedOperationError,
    preview,
)
from dataplane_core.saves import read_head
from dataplane_core.spec import FieldSpec, Ragged

try:
    import pyarrow
    from pyarrow import parquet
except ImportError as _error:
    raise UnsupportedOperationError(
        "the package pyarrow is not installed, which export needs.",
        hint="pip install 'dataplane-tools[export]'",
    ) from _error
pa: Any = pyarrow

KIND: Final = "dataplane-export"
VERSION: Final = 4
MANIFEST: Final = ".export.json"
COLUMNS: Final = "columns.parquet"
#: With this begins the name of a task of an export: `why` never says that it is starved. Alone, it stands for the task
#: that a folder has for itself.
OWN_TASK: Final = "export:"
_SHARD: Final = re.compile(r"part-(\d{5,})\.parquet")
_OPEN_SHARD: Final = re.compile(r"\.part-\d{5,}\.parquet\.new")
#: A row group is written once it has as many rows or bytes, before compression.
_GROUP_ROWS, _GROUP_BYTES = 4096, 16 << 20
#: How the items of an object column are stored.
TEXT, BYTES, JSON = "text", "bytes", "json"


class What(msgspec.Struct, frozen=True, kw_only=True):
    """The options that decide which rows and columns a folder has."""

    fields: list[str] | None
    where: str | None
    messages: bool
    partial: bool = False
    task: str | None = None


class Manifest(msgspec.Struct, kw_only=True):
    """What an export says of itself."""

    format: str = KIND
    version: int = VERSION
    partition_id: str
    epoch: str  # the id of its registration
    what: What
    closed: bool = False  # it has ended in order
    num_acked: int = 0  # of one that follows: the rows of shards with smaller numbers are acked


def _read_manifest(path: Path) -> Manifest:
    found = read_head(path, path.read_bytes(), KIND, VERSION)
    try:
        return msgspec.convert(found, Manifest)
    except msgspec.ValidationError as error:
        raise CorruptDataError(f"'{path}' holds what no manifest of an export has: {error}.") from error


class Shards:
    """Writes shards into a folder, where no other process writes until it is closed.

    If ``what`` of the manifest has a task, it adds to an export that is there. Else one that was closed is refused, and
    what one that was not closed has left is removed.
    """

    def __init__(self, folder: str | os.PathLike[str], manifest: Manifest, shard_bytes: int):
        self.folder = Path(folder)
        self.manifest = manifest
        self.numbers: list[int] = []  # of the complete shards
        self.schema: Any = None  # of the newest one
        self._shard_bytes = shard_bytes  # before compression
        self._writer: Any = None
        self._group: list[Any] = []  # of the row group that is not written yet
        self._left_rows = self._left_bytes = 0
        try:
            os.makedirs(self.folder, exist_ok=True)
            self._lock = _locked(self.folder)
            try:
                self._begin()
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise self._not_written(error) from error

    def _begin(self) -> None:
        what = self.manifest.what
        if not (self.folder / MANIFEST).exists():
            if others := sorted(path.name for path in self.folder.glob("*.parquet")):
                raise InvalidRequestError(
                    f"'{self.folder}' has {preview(others)}, and no {MANIFEST}.",
                    hint="Export into a folder of its own.",
                )
            if what.task == OWN_TASK:
                self.manifest.what = msgspec.structs.replace(what, task=OWN_TASK + uuid4().hex[:8])
        else:
            former = _read_manifest(self.folder / MANIFEST)
            if what.task == OWN_TASK and former.what.task is not None:
                self.manifest.what = msgspec.structs.replace(what, task=former.what.task)
            other = [
                f"it has another {name}: {getattr(former, name)}"
                for name in ("partition_id", "epoch", "what")
                if getattr(former, name) != getattr(self.manifest, name)
            ]
            if former.closed and what.task is None:
                other.append("it is complete")
            if other:
                raise InvalidRequestError(
                    f"'{self.folder}' has an export of '{former.partition_id}' already, and {other[0]}.",
                    hint="Export into another folder, or remove this one.",
                )
            self.manifest.num_acked = former.num_acked
            goes_on = what.task is not None
            for path in self.folder.iterdir():
                shard = _SHARD.fullmatch(path.name)
                if shard and goes_on:
                    self.numbers.append(int(shard[1]))
                elif _OPEN_SHARD.fullmatch(path.name) or (not goes_on and (shard or path.name == COLUMNS)):
                    path.unlink()  # of one that was killed
            self.numbers.sort()
            if self.numbers:
                with _shard(self._path(self.numbers[-1])) as file:
                    self.schema = file.schema_arrow
        self._write_manifest()

    def close(self) -> None:
        """Lets others write the folder. What is in a shard that is not complete is lost."""
        if self._writer is not None:  # of a shard that an error ended
            _abandon(self._writer)
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
        if self.manifest.num_acked != self._next_number:
            self.manifest.num_acked = self._next_number
            self._write_manifest()

    def unacked_ids(self) -> Iterator[str]:
        """The ids of the rows of complete shards that may not be acked."""
        for number in self.numbers:
            if number >= self.manifest.num_acked:
                with _shard(self._path(number)) as file:
                    yield from file.read(["sample_id"])["sample_id"].to_pylist()

    def totals(self) -> tuple[int, int]:
        """How many rows all complete shards have, and their size in bytes."""
        num_rows = size_bytes = 0
        for path in map(self._path, self.numbers):
            with _shard(path) as file:
                num_rows += file.metadata.num_rows
            size_bytes += path.stat().st_size
        return num_rows, size_bytes

    def write(self, table: Any) -> None:
        """Adds rows to the shard. Another schema begins another shard."""
        if self._writer is not None and not self._schema.equals(table.schema, check_metadata=True):
            self.complete()
        try:
            if self._writer is None:
                self._open(table.schema)
            self._group.append(table)
            self._left_rows, self._left_bytes = self._left_rows - len(table), self._left_bytes - table.nbytes
            if min(self._left_rows, self._left_bytes) <= 0:
                self._write_group(self._writer)
        except (OSError, pa.ArrowException) as error:
            raise self._not_written(error) from error
        self._rows += len(table)
        self._bytes += table.nbytes

    def complete(self) -> None:
        """Brings the shard to the disk under its name. If it has no rows, nothing happens."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            self._write_group(writer)
            writer.close()
            sync_path(self._new)
            self._tell_columns()
            os.replace(self._new, self._path(self._next_number))
            sync_path(self.folder)
            self.numbers.append(self._next_number)
            self.schema = self._schema
        except (OSError, pa.ArrowException) as error:
            _abandon(writer)
            raise self._not_written(error) from error

    def end(self) -> None:
        """Completes the last shard, and the export."""
        self.complete()
        self.manifest.closed = True
        self._write_manifest()

    @property
    def _next_number(self) -> int:
        return max(self.manifest.num_acked, self.numbers[-1] + 1 if self.numbers else 0)

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:05}.parquet"

    def _open(self, schema: Any) -> None:
        path = self._path(self._next_number)
        self._new = path.with_name(f".{path.name}.new")  # no pattern of a reader takes it
        self._schema, self._rows, self._bytes = schema, 0, 0
        self._group, self._left_rows, self._left_bytes = [], _GROUP_ROWS, _GROUP_BYTES
        # no dictionaries of numbers: they may hold one NaN for all
        strings = [field.name for field in schema if pa.types.is_large_string(field.type)]
        self._writer = parquet.ParquetWriter(self._new, schema, compression="zstd", use_dictionary=strings)

    def _write_group(self, writer: Any) -> None:
        """Writes what was added since the last row group as one."""
        if self._group:
            group = pa.concat_tables(self._group)
            writer.write_table(group, row_group_size=len(group) or None)
        self._group, self._left_rows, self._left_bytes = [], _GROUP_ROWS, _GROUP_BYTES

    def _tell_columns(self) -> None:
        """Says what columns the shard brings, before readers see it."""
        if self.schema is not None and not self.schema.equals(self._schema):
            sink = pa.BufferOutputStream()
            parquet.ParquetWriter(sink, self._schema.remove_metadata()).close()
            self._replace(COLUMNS, sink.getvalue().to_pybytes())

    def _write_manifest(self) -> None:
        self._replace(MANIFEST, msgspec.json.format(msgspec.json.encode(self.manifest), indent=1))

    def _replace(self, name: str, content: bytes) -> None:
        write_file(self.folder / f".{name}.new", [content])
        os.replace(self.folder / f".{name}.new", self.folder / name)
        sync_path(self.folder)

    def _not_written(self, error: Exception) -> SaveError:
        return SaveError(f"'{self.folder}' cannot be written: {getattr(error, 'strerror', None) or error}.")


def _shard(path: Path) -> Any:
    try:
        return parquet.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise CorruptDataError(f"'{path}' cannot be read: {error}.") from error


def _abandon(writer: Any) -> None:
    """Closes the file of a shard that is not completed. The next export into the folder removes it."""
    with suppress(Exception):
        writer.close()
    writer.is_open = False  # or pyarrow tries again later, and prints that it fails


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


# --- columns of tensors -----------------------------------------------------------------------------------------------


def arrow_of_tensors(column: torch.Tensor, spec: FieldSpec) -> Any:
    if 0 in spec.trailing:
        column = _mapped(column, lambda values: torch.zeros(len(values), dtype=torch.uint8, device="cpu"))
    elif column.is_complex():
        column = _mapped(column, lambda values: torch.view_as_real(values.resolve_conj()))
    return to_arrow({"column": column})["column"]


def type_of_tensors(spec: FieldSpec) -> Any:
    """The type of the Arrow column of a field."""
    shape = (0, 0, *spec.trailing) if spec.rank else (0,)
    return arrow_of_tensors(torch.empty(shape, dtype=spec.torch_dtype, device="cpu"), spec).type


def _mapped(column: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A column with its values changed, which keep their first dim."""
    if not column.is_nested:
        rows = column.flatten(0, 1) if column.dim() > 1 else column
        values = change(rows)
        return values if column.dim() == 1 else values.reshape(*column.shape[:2], *values.shape[1:])
    ragged: Any = ragged_of_nested(column, "a column")
    return dense_or_jagged(Ragged(change(ragged.values), ragged.offsets))


# --- columns of objects and tags --------------------------------------------------------------------------------------


def form_of_items(items: Sequence[Any], former: str | None) -> str | None:
    """How to store the items of an object column, of which some are stored in a form. None: all are None."""
    kinds = {type(item) for item in items} - {type(None)}
    own = None if not kinds else TEXT if kinds == {str} and all(map(_is_unicode, items)) else JSON
    own = BYTES if kinds == {bytes} else own
    return former if own is None else own if former in (None, own) else JSON


def arrow_of_items(name: str, items: Sequence[Any], form: str | None, binary: bool) -> Any:
    """The Arrow column of items: of strings, or of ``binary`` values."""
    if form == JSON:
        items = [None if item is None else _to_json(name, item) for item in items]
        items = [item.encode() if binary and item is not None else item for item in items]
    return pa.array(items, pa.large_binary() if binary else pa.large_string())


def _is_unicode(text: str | None) -> bool:
    """Whether a string has no lone surrogate, which no file of Arrow can hold."""
    return text is None or text.isascii() or text.encode(errors="ignore").decode() == text


def json_text(value: Any) -> str:
    """A value as JSON that Arrow can hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if _is_unicode(text) else json.dumps(value, separators=(",", ":"))


def _to_json(name: str, item: Any) -> str:
    try:
        return json_text(_escaped(item))
    except TypeError as error:
        raise InvalidTypeError(
            f"export refused: field '{name}' holds an item that only pickle can keep: {error}.",
            hint="Leave the field out with --fields.",
        ) from error


def _escaped(item: Any) -> Any:
    """JSON lacks bytes and tensors: bytes are ``{"~bytes": base64}``, tensors lists of their values."""
    if isinstance(item, dict):
        if other := [key for key in item if not isinstance(key, str)]:
            raise TypeError(f"a key is {type(other[0]).__name__}")
        return {key: _escaped(value) for key, value in item.items()}
    if isinstance(item, list):
        return [_escaped(value) for value in item]
    if isinstance(item, bytes):
        return {"~bytes": base64.b64encode(item).decode()}
    if isinstance(item, torch.Tensor):
        return (torch.view_as_real(item.resolve_conj()) if item.is_complex() else item).tolist()
    return item


#: What types a tag's column may have, with the Python types of its values.
_TAG_TYPES: Final = (
    (pa.bool_(), {bool}),
    (pa.int64(), {int}),
    (pa.float64(), {int, float}),
    (pa.large_string(), {str}),
)


def type_of_values(values: Sequence[Any]) -> Any:
    """The type of a column that holds a tag's values. None: they have no common one."""
    kinds = {type(value) for value in values} - {type(None)}
    return next((arrow for arrow, held in _TAG_TYPES if kinds and kinds <= held), None)


def arrow_of_values(values: Sequence[Any], kind: Any) -> Any:
    """A tag's values as a column of a type, null where a value is of another one."""
    held = dict(_TAG_TYPES)[kind]
    fitting = [value if type(value) in held else None for value in values]
    is_float = held == {int, float}
    return pa.array([float(value) if is_float and value is not None else value for value in fitting], kind)
