"""A save on disk: a file of blocks, and a manifest that names it. The newest complete save is always readable.

A rename replaces the manifest, after the file that it names is on the disk. So a crash at any point leaves the former
save unchanged. The next save removes the files that a crash left: at its start, if there is a former save, else at its
end. A reader has the file open, so it reads its save to the end, even if the next one replaces it meanwhile. No pickle.

``manifest.json``: the first line ``{"format": ..., "version": 3, "sha256": ...}`` describes the second, which is the
body. ``rows-*.bin``: the blocks end to end. The body has size and XXH3-128 of each block.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self, TypedDict

import xxhash

from dataplane_core.arguments import fits
from dataplane_core.durable_files import sync_path, write_file
from dataplane_core.errors import (
    CorruptDataError,
    DataPlaneError,
    InvalidRequestError,
    MissingDataError,
    SaveError,
    UnsupportedOperationError,
)

MANIFEST: Final = "manifest.json"
VERSION: Final = 3
_ROWS_PREFIX: Final = "rows-"
_ROWS_NAME: Final = re.compile(rf"{_ROWS_PREFIX}[0-9a-f]+\.bin")
_TEMPORARY: Final = "manifest.json.new"


class _Block(TypedDict):
    """What the manifest says of a block."""

    size_bytes: int
    xxh3_128: str


class _Body(TypedDict):
    """What the manifest says of the blocks, beside what its writer adds."""

    rows_file: str
    blocks: Sequence[_Block]


def write_save(
    folder: str | os.PathLike[str],
    kind: str,
    body: Mapping[str, Any],
    blocks: Iterable[bytes | bytearray],
) -> None:
    """Replaces the save in a folder. Creates the folder if needed. Only one process may do this at a time.

    Args:
        folder: The folder.
        kind: The name of the save's format.
        body: JSON values.
        blocks: The content, consumed one by one, so that it need not fit in memory. ``body`` is read after them.

    Raises:
        InvalidRequestError: The folder's manifest is that of something else. Nothing was written.
        SaveError: The save cannot be written. It says whether the former save is unchanged.
        DataPlaneError: What ``blocks`` raised. The former save is unchanged.
    """
    path, kept = Path(folder), "A former save is as it was."
    try:
        os.makedirs(path, exist_ok=True)
        _remove_rows_but(path, _named_rows(path, kind))
        rows_name = f"{_ROWS_PREFIX}{uuid.uuid4().hex}.bin"
        try:
            index = _write_blocks(path / rows_name, blocks)
        except BaseException:
            _remove(path / rows_name)
            raise
        text = json.dumps({**body, "rows_file": rows_name, "blocks": index}, separators=(",", ":")).encode()
        head = {"format": kind, "version": VERSION, "sha256": hashlib.sha256(text).hexdigest()}
        write_file(path / _TEMPORARY, [json.dumps(head).encode(), b"\n", text, b"\n"])
        sync_path(path)
        os.replace(path / _TEMPORARY, path / MANIFEST)
        kept = "It is there, but may be gone after a crash of the machine."
        sync_path(path)
        _remove_rows_but(path, rows_name)
    except DataPlaneError:  # an error of the store, even if it is also an OSError (a timeout)
        raise
    except OSError as error:
        raise SaveError(f"the save in '{path}' could not be written: {error.strerror or error}. {kept}") from error


def _named_rows(path: Path, kind: str) -> str | None:
    """The file of rows that the folder's manifest names. None if it is damaged, not there, or of another version.

    Raises:
        InvalidRequestError: The manifest is not that of a save of this kind.
    """
    try:
        data = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    for text in (data.partition(b"\n")[0], data):  # another program's may have several lines
        try:
            head = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(head, dict) or head.get("format") != kind:
            found = repr(head["format"]) if isinstance(head, dict) and "format" in head else "something else"
            raise InvalidRequestError(
                f"the save in '{path}' is refused: its {MANIFEST} is that of {found}. Expected {kind!r}. Nothing was "
                "written.",
                hint="Save into a folder of its own.",
            )
        break
    try:
        return str(_read_manifest(path, kind)["rows_file"])
    except DataPlaneError:
        return None


def _remove_rows_but(path: Path, kept: str | None) -> None:
    """Removes the files of rows that saves left, but for one. Without one to keep, none: the manifest may be mended."""
    for each in sorted(path.glob(f"{_ROWS_PREFIX}*.bin")) if kept is not None else ():
        if each.name != kept and _ROWS_NAME.fullmatch(each.name):
            _remove(each)


def _remove(path: Path) -> None:
    with suppress(OSError):  # the next save removes it
        os.unlink(path)


def _write_blocks(path: Path, blocks: Iterable[bytes | bytearray]) -> list[dict[str, Any]]:
    index: list[dict[str, Any]] = []

    def noted() -> Iterator[bytes | bytearray]:
        for block in blocks:
            index.append({"size_bytes": len(block), "xxh3_128": xxhash.xxh3_128_hexdigest(block)})
            yield block

    write_file(path, noted())
    return index


class SavedFiles:
    """The newest save in a folder, checked. Holds its file open, so close it, or use it in a ``with`` statement.

    Args:
        folder: The folder.
        kind: The name of the save's format.

    Attributes:
        body: The body that was passed to `write_save`.

    Raises:
        MissingDataError: The folder has no save.
        UnsupportedOperationError: Another version of this package wrote the save.
        CorruptDataError: The manifest is not that of a save, or was changed, or the file of rows is missing.
        SaveError: They cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str], kind: str) -> None:
        self._path = Path(folder)
        missing = ""
        try:
            while True:
                self.body = _read_manifest(self._path, kind)
                try:
                    self._rows = (self._path / self.body["rows_file"]).open("rb")
                    return
                except FileNotFoundError as error:
                    if self.body["rows_file"] == missing:
                        raise CorruptDataError(f"the save in '{self._path}' lacks its file {missing}.") from error
                    missing = self.body["rows_file"]  # the next save may have removed it: read that one
        except OSError as error:
            raise SaveError(f"the save in '{self._path}' cannot be read: {error.strerror or error}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file of rows."""
        self._rows.close()

    def blocks(self) -> Iterator[bytes]:
        """Reads and checks the blocks of rows, one by one. Several such iterators may be read in turn.

        Raises:
            CorruptDataError: The file is truncated or changed.
            SaveError: It cannot be read.
        """
        where = f"'{self._rows.name}' is not as it was written"
        try:
            most = os.fstat(self._rows.fileno()).st_size  # a forged size reserves no memory
            start = 0
            for number, entry in enumerate(self.body["blocks"]):
                self._rows.seek(start)
                block = self._rows.read(min(entry["size_bytes"], most))
                if len(block) != entry["size_bytes"]:
                    raise CorruptDataError(
                        f"{where}: block {number} has {len(block)} bytes. Expected {entry['size_bytes']}; the file was "
                        "truncated."
                    )
                if xxhash.xxh3_128_hexdigest(block) != entry["xxh3_128"]:
                    raise CorruptDataError(f"{where}: the digest of block {number} differs; take another save.")
                start += len(block)
                yield block
            if start != most:
                raise CorruptDataError(f"{where}: it goes on after its {len(self.body['blocks'])} blocks.")
        except OSError as error:
            raise SaveError(f"the save in '{self._path}' cannot be read: {error.strerror or error}.") from error


def _read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """The body of the manifest in a folder, checked.

    Raises:
        MissingDataError, UnsupportedOperationError, CorruptDataError: As `SavedFiles`.
        OSError: It cannot be read.
    """
    manifest = path / MANIFEST
    try:
        head_line, _, rest = manifest.read_bytes().partition(b"\n")
    except FileNotFoundError as error:
        raise MissingDataError(
            f"no save in '{path}': there is no {MANIFEST}.", hint="Name the folder that was saved to."
        ) from error
    head = read_head(manifest, head_line, kind, VERSION)
    text = rest.removesuffix(b"\n")
    if hashlib.sha256(text).hexdigest() != head.get("sha256"):
        raise CorruptDataError(
            f"'{manifest}' is not as it was written: {len(text)} bytes whose SHA-256 differs. It was truncated or "
            "changed; take another save."
        )
    try:
        return _checked(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptDataError(f"'{manifest}' is not the manifest of a save: {error}.") from error


def read_head(manifest: Path, text: bytes, kind: str, version: int) -> dict[str, Any]:
    """The JSON object that says format and version of a manifest.

    Args:
        manifest: The file, for messages.
        text: The object.
        kind: The format that it should have.
        version: The version that it should have.

    Raises:
        CorruptDataError: It is damaged, or that of something else.
        UnsupportedOperationError: Another version of this package wrote it.
    """
    try:
        head: dict[str, Any] = json.loads(text)
        known, found = head["format"] == kind, int(head["version"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptDataError(f"'{manifest}' is no manifest of the format {kind!r}: it is damaged.") from error
    if not known:
        raise CorruptDataError(f"'{manifest}' says format {head['format']!r}. Expected {kind!r}.")
    if found != version:
        raise UnsupportedOperationError(
            f"'{manifest}' is of format version {found}. Expected {version}.", hint="Install the version that wrote it."
        )
    return head


def _checked(body: Any) -> dict[str, Any]:
    """The body, if it is one.

    Raises:
        ValueError, KeyError, TypeError: It is none.
    """
    if not fits(body, _Body):
        raise ValueError("it has a part of a wrong type")
    if not _ROWS_NAME.fullmatch(body["rows_file"]):
        raise ValueError(f"it names the file {body['rows_file'][:100]!r}")
    if min((block["size_bytes"] for block in body["blocks"]), default=0) < 0:
        raise ValueError("a block of it has a negative size")
    return {**body}
