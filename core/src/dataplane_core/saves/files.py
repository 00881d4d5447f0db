"""A save on disk: a file of blocks, and a manifest that names it. The newest complete save is always readable.

A rename replaces the manifest, after the file that it names is on the disk. So a crash at any point leaves the former
save unchanged; the next save removes files that a crash left. No pickle.

``manifest.json``: the first line ``{"format": ..., "version": 2, "sha256": ...}`` describes the second, which is the
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
from typing import Any, Final

import xxhash

from dataplane_core.errors import (
    CorruptDataError,
    DataPlaneError,
    InvalidRequestError,
    MissingDataError,
    SaveError,
    UnsupportedOperationError,
)
from dataplane_core.saves.durable import sync_folder, write_file
from dataplane_core.spec import fits

__all__ = ["SavedFiles", "write_save"]

MANIFEST: Final = "manifest.json"
VERSION: Final = 2
_ROWS_PREFIX: Final = "rows-"
_ROWS_NAME: Final = re.compile(rf"{_ROWS_PREFIX}[0-9a-f]+\.bin")
_TEMPORARY: Final = "manifest.json.new"


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
        _refuse_others(path, kind)
        rows_name = f"{_ROWS_PREFIX}{uuid.uuid4().hex}.bin"
        try:
            index = _write_blocks(path / rows_name, blocks)
        except BaseException:
            with suppress(OSError):  # the next save removes it
                os.unlink(path / rows_name)
            raise
        text = json.dumps({**body, "rows_file": rows_name, "blocks": index}, separators=(",", ":")).encode()
        head = {"format": kind, "version": VERSION, "sha256": hashlib.sha256(text).hexdigest()}
        write_file(path / _TEMPORARY, [json.dumps(head).encode(), b"\n", text, b"\n"])
        sync_folder(path)
        os.replace(path / _TEMPORARY, path / MANIFEST)
        kept = "It is there, but may be gone after a crash of the machine."
        sync_folder(path)
        for each in sorted(path.glob(f"{_ROWS_PREFIX}*.bin")):
            if each.name != rows_name and _ROWS_NAME.fullmatch(each.name):
                with suppress(OSError):  # the next save removes it
                    os.unlink(each)
    except DataPlaneError:  # an error of the store, even if it is also an OSError (a timeout)
        raise
    except OSError as error:
        raise SaveError(f"the save in '{path}' could not be written: {error.strerror or error}. {kept}") from error


def _refuse_others(path: Path, kind: str) -> None:
    """Refuses a folder whose manifest is not that of a save of this kind. One that is damaged is replaced.

    Raises:
        InvalidRequestError: The manifest belongs to something else.
    """
    try:
        data = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        return
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
        return


def _write_blocks(path: Path, blocks: Iterable[bytes | bytearray]) -> list[dict[str, Any]]:
    index: list[dict[str, Any]] = []

    def noted() -> Iterator[bytes | bytearray]:
        for block in blocks:
            index.append({"size_bytes": len(block), "xxh3_128": xxhash.xxh3_128_hexdigest(block)})
            yield block

    write_file(path, noted())
    return index


class SavedFiles:
    """The newest save in a folder, checked.

    Args:
        folder: The folder.
        kind: The name of the save's format.

    Attributes:
        body: The body that was passed to `write_save`.

    Raises:
        MissingDataError: The folder has no save.
        UnsupportedOperationError: Another version of this package wrote the save.
        CorruptDataError: The manifest is not that of a save, or was changed.
    """

    def __init__(self, folder: str | os.PathLike[str], kind: str) -> None:
        self._path = Path(folder)
        manifest = self._path / MANIFEST
        try:
            head_line, _, rest = manifest.read_bytes().partition(b"\n")
        except FileNotFoundError as error:
            raise MissingDataError(
                f"no save in '{self._path}': there is no {MANIFEST}.", hint="Name the folder that was saved to."
            ) from error
        except OSError as error:
            raise SaveError(f"the save in '{self._path}' cannot be read: {error.strerror or error}.") from error
        try:
            head = json.loads(head_line)
            known = head["format"] == kind
            version = int(head["version"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CorruptDataError(f"'{manifest}' is not the manifest of a save: its first line is damaged.") from error
        if not known:
            raise CorruptDataError(f"'{manifest}' says format {head['format']!r}. Expected {kind!r}.")
        if version != VERSION:
            raise UnsupportedOperationError(
                f"the save in '{self._path}' is of format version {version}. Expected {VERSION}.",
                hint="Install the version that wrote it.",
            )
        text = rest.removesuffix(b"\n")
        if hashlib.sha256(text).hexdigest() != head.get("sha256"):
            raise CorruptDataError(
                f"'{manifest}' is not as it was written: {len(text)} bytes whose SHA-256 differs. It was truncated or "
                "changed; take another save."
            )
        try:
            self.body = _checked(json.loads(text))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptDataError(f"'{manifest}' is not the manifest of a save: {error}.") from error

    def blocks(self) -> Iterator[bytes]:
        """Reads and checks the blocks of rows, one by one.

        Raises:
            CorruptDataError: The file is missing, truncated or changed.
            SaveError: It cannot be read.
        """
        path = self._path / self.body["rows_file"]
        where = f"'{path}' is not as it was written"
        try:
            with path.open("rb") as file:
                most = os.fstat(file.fileno()).st_size  # a forged size reserves no memory
                for number, entry in enumerate(self.body["blocks"]):
                    block = file.read(min(entry["size_bytes"], most))
                    if len(block) != entry["size_bytes"]:
                        raise CorruptDataError(
                            f"{where}: block {number} has {len(block)} bytes. Expected {entry['size_bytes']}; the file "
                            "was truncated."
                        )
                    if xxhash.xxh3_128_hexdigest(block) != entry["xxh3_128"]:
                        raise CorruptDataError(f"{where}: the digest of block {number} differs; take another save.")
                    yield block
                if file.read(1):
                    raise CorruptDataError(f"{where}: it goes on after its {len(self.body['blocks'])} blocks.")
        except FileNotFoundError as error:
            raise CorruptDataError(f"the save in '{self._path}' lacks its file {path.name}.") from error
        except OSError as error:
            raise SaveError(f"the save in '{self._path}' cannot be read: {error.strerror or error}.") from error


def _checked(body: Any) -> dict[str, Any]:
    """The body, if it is one.

    Raises:
        ValueError, KeyError, TypeError: It is none.
    """
    if not (fits(body["rows_file"], str) and fits(body["blocks"], Sequence[Mapping[str, Any]])):
        raise ValueError("it holds what it cannot hold")
    if not _ROWS_NAME.fullmatch(body["rows_file"]):
        raise ValueError(f"it names the file {body['rows_file'][:100]!r}")
    for block in body["blocks"]:
        if not (fits(block["size_bytes"], int) and fits(block["xxh3_128"], str)) or block["size_bytes"] < 0:
            raise ValueError("a block of it holds what it cannot hold")
    return {**body}
