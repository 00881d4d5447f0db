"""The backend `acme_store`."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from dataplane_core import BlobStore
from dataplane_core.backends import CapacityOptions
from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError


class AcmeStoreOptions(CapacityOptions):
    """The options of `acme_store`, besides ``capacity_bytes`` and ``on_full``."""

    path: Path
    """The folder of the store."""


class AcmeStore(BlobStore):
    """Keeps a file per blob and per record in a folder. Replace the files by your engine.

    What is written survives the end of a process. To survive that of the machine, it must be synced, too.
    """

    Config = AcmeStoreOptions

    @classmethod
    def isolated_options(cls, options: dict[str, Any], tag: str) -> dict[str, Any]:
        """Options of a store that shares nothing with that of ``options``. The kit asks for them."""
        return {**options, "path": f"{options['path']}-{tag}"}

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Makes the folder, or goes on with the one that is there."""
        path = self.config.path
        self._new, self._blobs, self._trims, self._records = (
            path / name for name in ("new", "blobs", "trims", "records")
        )
        if bootstrap:
            try:
                path.mkdir(parents=True, exist_ok=not self.exclusive)  # of several processes, one
            except FileExistsError as error:
                raise AlreadyRunningError(f"there is a store in '{path}'.", retryable=True) from error
            for folder in (self._new, self._blobs, self._trims, self._records):
                folder.mkdir(exist_ok=True)
        elif not self._records.is_dir():
            raise BackendUnavailableError(f"there is no store in '{path}'.", hint="Bootstrap it first.")

    # --- blobs --------------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        """Stores a blob. Returns when every process can read it."""
        self._write(data).rename(self._blobs / key)

    def get(self, key: str) -> bytes | None:
        """Reads a blob. None if it does not exist."""
        try:
            return (self._blobs / key).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        """Deletes a blob. Ignores a key that does not exist."""
        (self._blobs / key).unlink(missing_ok=True)

    # --- the journal --------------------------------------------------------------------------------------------------

    def append(self, seq: int, record: bytes) -> bool:
        """Writes a record with the next number, unless another process was faster."""
        new, place = self._write(record), self._records / str(seq)
        try:
            os.link(new, place)  # whole, and only if there is no such file
        except FileExistsError:
            return False
        finally:
            new.unlink()
        if seq < self._first():  # there was such a record, and it was trimmed
            place.unlink(missing_ok=True)
            return False
        return True

    def read(self, from_seq: int) -> list[bytes]:
        """The records from a place on."""
        while True:
            first = max(from_seq, self._first())
            records: list[bytes] = []
            with suppress(FileNotFoundError):
                while True:
                    records.append((self._records / str(first + len(records))).read_bytes())
            if self._first() <= first:  # else another process trimmed records meanwhile: perhaps the one not found
                return records

    def trim(self, before_seq: int) -> None:
        """Drops the records below a number."""
        first = self._first()
        if before_seq <= first:
            return
        (self._trims / str(before_seq)).touch()
        for name in os.listdir(self._records):
            if int(name) < before_seq:
                (self._records / name).unlink(missing_ok=True)
        (self._trims / str(first)).unlink(missing_ok=True)

    def _first(self) -> int:
        """The number of the first record: the highest that the journal was trimmed to."""
        return max(map(int, os.listdir(self._trims)), default=0)

    def _write(self, data: bytes) -> Path:
        """Writes a file under a name that nobody reads."""
        path = self._new / uuid4().hex
        path.write_bytes(data)
        return path
