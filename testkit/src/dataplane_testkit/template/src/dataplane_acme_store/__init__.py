"""The backend `acme_store`."""

from collections.abc import Sequence
from typing import Any

from dataplane_core import RowStoreBackend
from dataplane_core.backends import RefsGoneError


class AcmeStore(RowStoreBackend):
    """Keeps rows in a dict of this process. Replace the dict by your engine."""

    def open_engine(self, *, bootstrap: bool, deadline: float) -> None:
        """Connects to the engine."""
        self._rows: dict[int, bytes] = {}

    def put_rows(self, handles: Sequence[int], buffer: memoryview, offsets: Any, deadline: float) -> None:
        """Stores rows. Returns when every client can read them."""
        for i, handle in enumerate(handles):
            self._rows[handle] = bytes(buffer[offsets[i] : offsets[i + 1]])

    def get_rows(self, handles: Sequence[int], deadline: float) -> list[bytes]:
        """Reads rows, in order."""
        found = [self._rows.get(handle, b"") for handle in handles]
        if not all(found):  # no row is empty
            gone = [handle for handle, row in zip(handles, found, strict=True) if not row]
            raise RefsGoneError(f"{len(gone)} rows are gone.", handles=gone)
        return found

    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        """Deletes rows. Ignores handles that do not exist."""
        for handle in handles:
            self._rows.pop(handle, None)
