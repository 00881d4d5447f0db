"""A backend in one SQLite file: every process of a host that opens the file shares the store, and it outlives them."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dataplane_core import BlobStore
from dataplane_core.diagnosis import Finding
from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_core.ledger_backend import CapacityOptions

__all__ = ["SQLiteOptions", "SQLiteStore"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS blobs (key TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS journal (seq INTEGER PRIMARY KEY, record BLOB NOT NULL);
"""


class SQLiteOptions(CapacityOptions):
    """Which file, and how much it may hold."""

    path: Path
    """The database, on a disk of this host: SQLite's locks do not hold on network file systems."""


class SQLiteStore(BlobStore):
    """Blobs and the journal are tables. A commit is synced to the disk before it returns."""

    Config = SQLiteOptions

    def __init__(self, config: SQLiteOptions) -> None:
        super().__init__(config)
        self._lock = threading.Lock()  # one connection, used by one thread at a time
        self._database: sqlite3.Connection | None = None

    @classmethod
    def isolated_options(cls, options: dict[str, Any], tag: str) -> dict[str, Any]:
        """Options of a store that shares nothing with that of ``options``; the kit asks for them."""
        return {**options, "path": f"{options['path']}-{tag}"}

    @classmethod
    def diagnose(cls, config: SQLiteOptions, *, deadline: float) -> Iterable[Finding]:
        """What `dataplane doctor` reports."""
        if not config.path.parent.is_dir():
            yield Finding.error(f"There is no folder '{config.path.parent}'.", f"Run: mkdir -p {config.path.parent}")
        else:
            yield Finding.ok(f"SQLite {sqlite3.sqlite_version}, {'file' if config.path.exists() else 'no file yet'}.")

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Opens the file; bootstrapping makes it where it is not there, and goes on with what it holds where it is."""
        if not bootstrap and not self.config.path.exists():
            raise BackendUnavailableError(f"there is no store at '{self.config.path}'.", hint="Bootstrap it first.")
        left = max(0.0, deadline - time.monotonic())
        try:
            self._database = sqlite3.connect(
                self.config.path, timeout=left, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            message = f"'{self.config.path}' cannot be opened: {error}"
            raise BackendUnavailableError(message, retryable=_is_busy(error)) from error

    def stop(self) -> None:
        """Closes the file, which stays."""
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    # --- blobs --------------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        """Stores a blob."""
        self.put_many({key: data})

    def get(self, key: str) -> bytes | None:
        """Reads a blob."""
        return self.get_many([key])[0]

    def delete(self, key: str) -> None:
        """Deletes a blob."""
        self.delete_many([key])

    def put_many(self, blobs: Mapping[str, bytes]) -> None:
        """Stores blobs in one transaction: one sync for all."""
        self._write("INSERT INTO blobs VALUES (?, ?)", list(blobs.items()))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Reads blobs, in order."""
        with self._connection() as database:
            select = "SELECT data FROM blobs WHERE key = ?"
            rows = [database.execute(select, (key,)).fetchone() for key in keys]
        return [None if row is None else row[0] for row in rows]

    def delete_many(self, keys: Sequence[str]) -> None:
        """Deletes blobs in one transaction."""
        self._write("DELETE FROM blobs WHERE key = ?", [(key,) for key in keys])

    # --- the journal --------------------------------------------------------------------------------------------------

    def append(self, seq: int, record: bytes) -> bool:
        """Takes a place in the journal, unless another process was faster."""
        return self._write("INSERT OR IGNORE INTO journal VALUES (?, ?)", [(seq, record)]) == 1

    def read(self, from_seq: int) -> list[bytes]:
        """The records from a place on."""
        with self._connection() as database:
            select = "SELECT record FROM journal WHERE seq >= ? ORDER BY seq"
            return [record for (record,) in database.execute(select, (from_seq,))]

    def _write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> int:
        with self._connection() as database:
            database.execute("BEGIN IMMEDIATE")
            with database:  # commits, or rolls back
                return database.executemany(statement, rows).rowcount

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread alone; other threads and processes are waited for until the deadline."""
        busy = f"'{self.config.path}' was busy until the deadline. Nothing was written."
        if not self._lock.acquire(timeout=self.seconds_left()):
            raise OperationTimeoutError(busy)
        try:
            if self._database is None:
                raise BackendUnavailableError("the store is closed.", retryable=False)
            self._database.execute(f"PRAGMA busy_timeout = {int(1000 * self.seconds_left())}")
            yield self._database
        except sqlite3.OperationalError as error:
            if _is_busy(error):
                raise OperationTimeoutError(busy) from error
            raise
        finally:
            self._lock.release()


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
