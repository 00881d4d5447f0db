"""Saves on disk: one file each, whole or not there, checked when read, without pickle.

`DataPlaneClient.save` and `load` use it.

A save is ``KIND.save``: a line ``{"format": KIND, "version": 4}``; the blocks end to end; a JSON object, with what its
writer adds and with size and XXH3-128 of each block; the object's size (8 bytes, little-endian) and the XXH3-128 of the
line and the object. It is written as ``KIND.new`` and renamed once it is on the disk. So a crash at any point leaves
the former save, and a reader that has this one open reads it to its end.

A block is one message of msgpack: columns as the frames of their cells. Equal rows of a column are stored once.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Self, cast

import msgspec
import torch

from dataplane_core.codec.rows import Columns, EmptyLists, TensorRows
from dataplane_core.codec.wire import decode_columns, encode_columns
from dataplane_core.digests import lasting_hash
from dataplane_core.durable_files import sync_path, write_file
from dataplane_core.errors import (
    CorruptDataError,
    DataPlaneError,
    MissingDataError,
    SaveError,
    UnsupportedOperationError,
)
from dataplane_core.spec import FieldSpec, SharedRows, WireColumn, WireFormat

__all__ = ["SavedFile", "pack_rows", "read_head", "tensor_rows", "unpack_rows", "write_save"]

VERSION: Final = 4
_END: Final = struct.Struct("<Q16s")
_FRAMES: Final = WireFormat(bytes=True, shared_rows=True)


# --- files ------------------------------------------------------------------------------------------------------------


class _Index(msgspec.Struct):
    """What the body holds beside what the writer adds: size and XXH3-128 of each block."""

    blocks: list[tuple[Annotated[int, msgspec.Meta(ge=0)], str]]


def write_save(
    folder: str | os.PathLike[str], kind: str, body: Mapping[str, Any], blocks: Iterable[bytes | bytearray]
) -> None:
    """Replaces the save in a folder. Creates the folder if needed. Only one process may do this at a time.

    The blocks are consumed one by one, so that they need not fit in memory. ``body``, of JSON values, is read after
    them. Raises `SaveError` if it cannot be written, or what ``blocks`` raised.
    """
    path = Path(folder) / f"{kind}.save"
    new, kept = path.with_suffix(".new"), "A former save is as it was."
    try:
        os.makedirs(folder, exist_ok=True)
        try:
            write_file(new, _parts_of(kind, body, blocks))
            os.replace(new, path)
        except BaseException:
            with suppress(OSError):  # the next save replaces it
                os.unlink(new)
            raise
        kept = "It is there, but may be gone after a crash of the machine."
        sync_path(path.parent)
    except DataPlaneError:  # an error of the store, even if it is also an OSError (a timeout)
        raise
    except OSError as error:
        raise SaveError(f"the save in '{folder}' could not be written: {error.strerror or error}. {kept}") from error


def _parts_of(kind: str, body: Mapping[str, Any], blocks: Iterable[bytes | bytearray]) -> Iterator[bytes | bytearray]:
    head = json.dumps({"format": kind, "version": VERSION}).encode() + b"\n"
    yield head
    index = []
    for block in blocks:
        index.append((len(block), lasting_hash(block).hexdigest()))
        yield block
    text = json.dumps({**body, "blocks": index}, separators=(",", ":")).encode()
    yield text
    yield _END.pack(len(text), lasting_hash(head + text).digest())


class SavedFile:
    """The save in a folder, checked. Holds its file open, so close it, or use it in a ``with`` statement.

    ``body`` and ``num_blocks`` are of what was passed to `write_save`.

    Raises:
        MissingDataError: The folder has no save.
        UnsupportedOperationError: Another version of this package wrote the save.
        CorruptDataError: It is not as it was written.
        SaveError: It cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str], kind: str) -> None:
        self._path = Path(folder) / f"{kind}.save"
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError as error:
            raise MissingDataError(
                f"no save in '{folder}': there is no {self._path.name}.", hint="Name the folder that was saved to."
            ) from error
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self.body = self._read_body(kind)
            self.num_blocks = len(self._index)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def blocks(self) -> Iterator[bytes]:
        """Reads and checks the blocks, one by one. Several such iterators may be read in turn."""
        start = self._begin
        for number, (size, digest) in enumerate(self._index):
            try:
                self._file.seek(start)
                block = self._file.read(size)
            except OSError as error:
                raise self._unreadable(error) from error
            if lasting_hash(block).hexdigest() != digest:
                raise CorruptDataError(
                    f"'{self._path}' is not as it was written: the digest of block {number} differs; take another save."
                )
            start += size
            yield block

    def _read_body(self, kind: str) -> dict[str, Any]:
        try:
            head = self._file.readline(1 << 12)
            read_head(self._path, head, kind, VERSION)
            end = self._file.seek(0, os.SEEK_END) - _END.size
            self._file.seek(max(0, end))
            size, digest = _END.unpack(self._file.read(_END.size))
            self._file.seek(max(0, end - size))
            text = self._file.read(min(size, end))
            if lasting_hash(head + text).digest() != digest:
                raise ValueError("its digest differs; it was truncated or changed")
            body: dict[str, Any] = json.loads(text)
            self._index = msgspec.convert(body, _Index).blocks
            self._begin = len(head)
            if self._begin + sum(size for size, _ in self._index) != end - len(text):
                raise ValueError("its blocks have another size")
        except OSError as error:
            raise self._unreadable(error) from error
        # of text that is no text, too: a key with half of a surrogate pair
        except (ValueError, struct.error, OverflowError, RecursionError) as error:
            raise CorruptDataError(f"'{self._path}' is not as it was written: {error}. Take another save.") from error
        return body

    def _unreadable(self, error: OSError) -> SaveError:
        return SaveError(f"the save '{self._path}' cannot be read: {error.strerror or error}.")


def read_head(path: Path, text: bytes, kind: str, version: int) -> dict[str, Any]:
    """The JSON object that says format and version of a file, which must be these."""
    try:
        head: dict[str, Any] = json.loads(text)
        is_kind, number = head["format"] == kind, int(head["version"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptDataError(f"'{path}' is not of the format {kind!r}: it is damaged.") from error
    if not is_kind:
        raise CorruptDataError(f"'{path}' says format {head['format']!r}. Expected {kind!r}.")
    if number != version:
        raise UnsupportedOperationError(
            f"'{path}' is of format version {number}. Expected {version}.", hint="Install the version that wrote it."
        )
    return head


# --- blocks -----------------------------------------------------------------------------------------------------------


class _Column(msgspec.Struct):
    name: str
    spec: str
    #: The cells' frames; without repeats, if there is an index.
    cells: list[memoryview]
    #: Row -> its cell.
    index: list[int] | None


class _Block(msgspec.Struct):
    num_rows: int
    columns: list[_Column]
    head: dict[str, Any]


_decode: Final = msgspec.msgpack.Decoder(_Block).decode


def pack_rows(
    columns: Mapping[str, Any], num_rows: int, head: Mapping[str, Any], *, allow_pickle: bool = False
) -> bytes:
    """Packs columns of ``num_rows`` rows, as for the codec, and further values for msgpack."""
    packed = []
    encoded, specs = encode_columns(columns, num_rows, _FRAMES, allow_pickle=allow_pickle) if columns else ({}, {})
    for name, column in encoded.items():
        rows, index = (column.rows, list(column.index)) if isinstance(column, SharedRows) else (column, None)
        packed.append(_Column(name, specs[name].to_text(), cast("list[memoryview]", rows), index))
    return msgspec.msgpack.encode(_Block(num_rows, packed, dict(head)))


def unpack_rows(block: bytes, *, allow_pickle: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads what `pack_rows` packed: the columns, whose equal large rows share memory, and the head."""
    try:
        held = _decode(block)
        columns: dict[str, WireColumn | SharedRows] = {}
        specs: dict[str, FieldSpec] = {}
        for column in held.columns:
            index, cells = column.index, cast("list[Any]", column.cells)
            if not cells or held.num_rows != len(cells if index is None else index):
                raise ValueError("a column has another number of rows")
            columns[column.name] = cells if index is None else SharedRows(cells, index)
            specs[column.name] = FieldSpec.from_text(column.spec)
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptDataError(f"a block of a save cannot be read: {type(error).__name__}: {error}.") from error
    if not columns:
        return {}, held.head
    decoded = decode_columns(columns, specs, held.num_rows, _FRAMES, allow_pickle=allow_pickle, share_rows=True)
    return tensor_rows(decoded, specs), held.head


def tensor_rows(columns: Mapping[str, Any], specs: Mapping[str, FieldSpec]) -> Columns:
    """The columns of a read with ``share_rows``, in a form in which a put takes shared rows of tensors as tensors, and
    leaves open fields open."""
    ints = [name for name in columns if specs[name].lists == "ints"]
    return Columns({name: _tensor_rows(column, specs[name]) for name, column in columns.items()}, ints=ints)


def _tensor_rows(column: Any, spec: FieldSpec) -> Any:
    if spec.kind != "tensor" or isinstance(column, torch.Tensor | list):
        return column
    items = column.tolist()
    if spec.lists != "empty":
        return TensorRows(items)
    # with anything in it, the field was closed meanwhile
    return column if any(isinstance(item, torch.Tensor) or item for item in items) else EmptyLists(items)
