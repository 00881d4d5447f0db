"""The backend `acme_store`."""

from typing import Any

from dataplane_core import BlobStore


class AcmeStore(BlobStore):
    """Keeps blobs in a dict of this process. Replace the dict by your engine."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._blobs: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        """Stores a blob. Returns when every process can read it."""
        self._blobs[key] = data

    def get(self, key: str) -> bytes | None:
        """Reads a blob. None if it does not exist."""
        return self._blobs.get(key)

    def delete(self, key: str) -> None:
        """Deletes a blob. Ignores a key that does not exist."""
        self._blobs.pop(key, None)
