"""The backend `acme_store`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from dataplane_core import RowStoreBackend
from dataplane_core.backends import RefsGoneError, RowStoreOptions
from dataplane_core.errors import BackendUnavailableError


class AcmeStoreOptions(RowStoreOptions):
    """The options of `acme_store`, besides ``capacity_bytes``, ``on_full`` and ``ledger``."""

    path: Path
    """The folder of the store."""


class AcmeStore(RowStoreBackend):
    """Keeps a file per row and per record in a folder. Replace the files by your engine.

    What is written survives the end of a process. To survive that of the machine, it must be synced, too.
    """

    Config = AcmeStoreOptions

    @classmethod
    def isolated_options(cls, options: dict[str, Any], tag: str) -> dict[str, Any]:
        """Options of a store that shares nothing with that of ``options``. The kit asks for them."""
        return {**options, "path": f"{options['path']}-{tag}"}

    def open_engine(self, *, bootstrap: bool, deadline: float) -> None:
        """Makes the folders, or finds those that are there."""
        folders = [self.config.path / name for name in ("new", "rows", "records", "trims")]
        self._new, self._rows, self._records, self._trims = folders
        if bootstrap:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        elif not self._trims.is_dir():
            raise BackendUnavailableError(f"there is no store in '{self.config.path}'.", hint="Bootstrap it first.")

    # --- rows ---------------------------------------------------------------------------------------------------------

    def put_rows(self, handles: Sequence[int], buffer: memoryview, offsets: Any, deadline: float) -> None:
        """Stores rows. Returns when every client can read them."""
        for i, handle in enumerate(handles):
            self._write(buffer[offsets[i] : offsets[i + 1]]).rename(self._rows / str(handle))

    def get_rows(self, handles: Sequence[int], deadline: float) -> list[bytes]:
        """Reads rows, in order."""
        rows, gone = [], []
        for handle in handles:
            try:
                rows.append((self._rows / str(handle)).read_bytes())
            except FileNotFoundError:
                gone.append(handle)
        if gone:
            raise RefsGoneError(f"{len(gone)} rows are gone.", handles=gone)
        return rows

    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        """Deletes rows. Ignores handles that do not exist."""
        for handle in handles:
            (self._rows / str(handle)).unlink(missing_ok=True)

    # --- the log ------------------------------------------------------------------------------------------------------

    def append(self, number: int, record: bytes, deadline: float) -> bool:
        """Writes the next record, unless another process was faster."""
        if number != max(self._numbers(), default=0) + 1:
            return False
        new, place = self._write(record), self._records / str(number)
        try:
            os.link(new, place)  # whole, and only if there is no such file
        except FileExistsError:
            return False
        finally:
            new.unlink()
        if number < self._first():  # there was such a record, and it was trimmed
            place.unlink(missing_ok=True)
            return False
        return True

    def read_log(self, first: int | None, deadline: float) -> list[tuple[int, bytes]]:
        """The records from a number on, or the newest one."""
        while True:
            kept = self._numbers()
            if kept and kept != [*range(kept[0], kept[-1] + 1)]:
                continue  # another process added some while the names were listed
            asked = kept[-1:] if first is None else [number for number in kept if number >= first]
            try:
                return [(number, (self._records / str(number)).read_bytes()) for number in asked]
            except FileNotFoundError:
                continue  # another process trimmed some meanwhile

    def trim(self, before: int, deadline: float) -> None:
        """Drops the records below a number."""
        (self._trims / str(before)).touch()
        first = self._first()
        for folder in (self._records, self._trims):
            for name in os.listdir(folder):
                if int(name) < first:
                    (folder / name).unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        """The numbers of the records, ascending."""
        first = self._first()
        return sorted(number for number in map(int, os.listdir(self._records)) if number >= first)

    def _first(self) -> int:
        """The number of the first record: the highest that the log was trimmed to."""
        return max(map(int, os.listdir(self._trims)), default=0)

    def _write(self, data: bytes | memoryview) -> Path:
        """Writes a file under a name that nobody reads."""
        path = self._new / uuid4().hex
        path.write_bytes(data)
        return path
