"""A backend in one SQLite file: all processes of a host that open the file share the store, which outlives them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from dataplane_core import BlobStore
from dataplane_core.backends import CapacityOptions, Finding
from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, OperationTimeoutError

__all__ = ["SQLiteOptions", "SQLiteStore"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS blobs (key TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS journal (seq INTEGER PRIMARY KEY, record BLOB NOT NULL);
"""

_Row = TypeVar("_Row")
_MOST_ROWS = 10_000  # in one statement, which takes at most 32,766 values


class SQLiteOptions(CapacityOptions):
    """Which file, and how much it may hold."""

    path: Path
    """The database, on a disk of this host: SQLite's locks do not hold on network file systems."""


class SQLiteStore(BlobStore):
    """Blobs and the journal are tables. A commit is synced to the disk before it returns.

    Every write is one statement, which SQLite itself begins and commits: wherever Ctrl-C (a `KeyboardInterrupt`, which
    Python may raise between any two of its instructions) or a kill ends a call, no transaction and no lock is left.
    """

    Config = SQLiteOptions
    opens_in_forks = False  # SQLite in a fork acts as if it held the locks of its parent's connections

    def __init__(self, config: SQLiteOptions) -> None:
        super().__init__(config)
        self._idle: list[sqlite3.Connection] = []  # each is used by one thread at a time
        self._open = False
        self._inode = 0

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
        try:
            if bootstrap and self.exclusive:
                self.config.path.touch(exist_ok=False)  # of several processes, one
            database = self._connect(max(0.0, deadline - time.monotonic()))
            self._idle.append(database)
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(_SCHEMA)
        except FileExistsError as error:
            raise AlreadyRunningError(f"there is a store at '{self.config.path}'.", retryable=True) from error
        except (OSError, sqlite3.Error) as error:
            message = f"'{self.config.path}' cannot be opened: {error}"
            raise BackendUnavailableError(message, retryable=_is_busy(error)) from error
        self._open, self._inode = True, self.config.path.stat().st_ino

    def stop(self) -> None:
        """Closes the file, which stays."""
        self._open = False
        while self._idle:
            self._idle.pop().close()

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
        """Stores blobs, thousands in one statement: one sync for all."""
        for some in _parts(list(blobs.items())):
            self._run(f"INSERT INTO blobs VALUES {','.join(['(?, ?)'] * len(some))}", list(chain(*some)))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Reads blobs, in order."""
        found: dict[str, bytes] = {}
        for some in _parts(keys):
            rows, _ = self._run(f"SELECT key, data FROM blobs WHERE key IN ({','.join('?' * len(some))})", some)
            found.update(rows)
        return [found.get(key) for key in keys]

    def delete_many(self, keys: Sequence[str]) -> None:
        """Deletes blobs, thousands in one statement."""
        for some in _parts(keys):
            self._run(f"DELETE FROM blobs WHERE key IN ({','.join('?' * len(some))})", some)

    # --- the journal --------------------------------------------------------------------------------------------------

    def append(self, seq: int, record: bytes) -> bool:
        """Writes a record with the next number, unless another process was faster."""
        # refuses a number that was trimmed, and one that would leave a gap
        insert = "INSERT INTO journal SELECT ?, ? WHERE ? = (SELECT coalesce(max(seq) + 1, 0) FROM journal)"
        _, changed = self._run(insert, (seq, record, seq))
        return changed == 1

    def read(self, from_seq: int) -> list[bytes]:
        """The records from a place on."""
        rows, _ = self._run("SELECT record FROM journal WHERE seq >= ? ORDER BY seq", (from_seq,))
        return [record for (record,) in rows]

    def trim(self, before_seq: int) -> None:
        """Drops records that a snapshot has made superfluous; the file uses their pages again."""
        self._run("DELETE FROM journal WHERE seq < ?", (before_seq,))

    # --- connections --------------------------------------------------------------------------------------------------

    def _run(self, statement: str, values: Sequence[Any]) -> tuple[list[Any], int]:
        """Runs one statement: its rows, and how many it changed. Waits for other processes until the deadline."""
        if not self._open:
            raise BackendUnavailableError("the store is closed.", retryable=False)
        if self._replaced():
            message = f"the file '{self.config.path}' is not the one that this client opened: it was moved or replaced."
            raise BackendUnavailableError(message, retryable=False, hint="Close this client and connect again.")
        try:
            database = self._idle.pop()
        except IndexError:
            database = self._connect(self.seconds_left())
        try:
            database.execute(f"PRAGMA busy_timeout = {int(1000 * self.seconds_left())}")
            cursor = database.execute(statement, values)
            return cursor.fetchall(), cursor.rowcount
        except sqlite3.OperationalError as error:
            if _is_busy(error):
                busy = f"'{self.config.path}' was busy until the deadline. Nothing was written."
                raise OperationTimeoutError(busy) from error
            if _is_full(error):  # SQLite has rolled the statement back
                full = f"the disk of '{self.config.path}' is full ({error}). It was not done."
                raise BackendUnavailableError(full, outcome="not_done", hint="Make room on the disk.") from error
            raise
        finally:
            self._idle.append(database)

    def _replaced(self) -> bool:
        """Whether the path now names another file than the open one: two clients would then write to different files,
        and never notice."""
        try:
            inode: int = self.config.path.stat().st_ino
        except FileNotFoundError:
            return True
        return inode != self._inode

    def _connect(self, timeout_s: float) -> sqlite3.Connection:
        database = sqlite3.connect(
            self.config.path, timeout_s, isolation_level=None, check_same_thread=False, cached_statements=8
        )
        database.execute("PRAGMA synchronous = FULL")
        return database


def _parts(rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
    return (rows[start : start + _MOST_ROWS] for start in range(0, len(rows), _MOST_ROWS))


def _is_busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _is_full(error: Exception) -> bool:
    """Whether a write failed, as on a full disk or at a limit on the size of files."""
    full = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
    return getattr(error, "sqlite_errorcode", 0) in full
