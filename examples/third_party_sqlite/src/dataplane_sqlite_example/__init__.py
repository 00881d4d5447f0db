"""A backend in one SQLite file: all processes of a host that open the file share the store, which outlives them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from dataplane_core import RowStoreBackend
from dataplane_core.backends import Finding, RefsGoneError, RowStoreOptions
from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError

__all__ = ["SQLiteOptions", "SQLiteStore"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rows (handle INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS log (number INTEGER PRIMARY KEY, record BLOB NOT NULL);
"""
_Row = TypeVar("_Row")
_MOST_ROWS = 10_000  # in one statement, which takes at most 32,766 values


class SQLiteOptions(RowStoreOptions):
    """Which file, and how much it may hold."""

    path: Path
    """The database, on a disk of this host: SQLite's locks do not hold on network file systems."""


class SQLiteStore(RowStoreBackend):
    """Rows and the log are tables. A commit is synced to the disk before it returns.

    Every write is one statement, which SQLite itself begins and commits: wherever Ctrl-C or a kill ends a call, no
    transaction and no lock is left.
    """

    Config = SQLiteOptions
    opens_in_forks = False  # SQLite in a fork acts as if it held the locks of its parent's connections

    def __init__(self, config: SQLiteOptions) -> None:
        super().__init__(config)
        self._idle: list[sqlite3.Connection] = []  # each is used by one thread at a time
        self._inode = -1  # of the open file

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

    def open_engine(self, *, bootstrap: bool, deadline: float) -> None:
        """Opens the file; bootstrapping makes it where it is not there, and goes on with what it holds where it is."""
        if not bootstrap and not self.config.path.exists():
            raise BackendUnavailableError(f"there is no store at '{self.config.path}'.", hint="Bootstrap it first.")
        try:
            database = self._connect(deadline)
            self._idle.append(database)
            while not self._is_in_wal_mode(database) and time.monotonic() < deadline:
                time.sleep(0.01)
            database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            message = f"'{self.config.path}' cannot be opened: {error}"
            raise BackendUnavailableError(message, retryable=_code(error) == sqlite3.SQLITE_BUSY) from error
        self._inode = self.config.path.stat().st_ino

    @staticmethod
    def _is_in_wal_mode(database: sqlite3.Connection) -> bool:
        """Sets the mode of the journal. False: another process does so now, and SQLite does not wait for it here."""
        try:
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if _code(error) == sqlite3.SQLITE_BUSY:
                return False
            raise
        return True

    def close_engine(self) -> None:
        """Closes the file, which stays."""
        self._inode = -1
        while self._idle:
            self._idle.pop().close()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def put_rows(self, handles: Sequence[int], buffer: memoryview, offsets: Any, deadline: float) -> None:
        """Stores rows, thousands in one statement: one sync for all."""
        bounds = offsets.tolist()
        rows = [(handle, bytes(buffer[bounds[i] : bounds[i + 1]])) for i, handle in enumerate(handles)]
        for some in _parts(rows):
            values = ",".join(["(?, ?)"] * len(some))
            self._run(f"INSERT OR REPLACE INTO rows VALUES {values}", list(chain(*some)), deadline)

    def get_rows(self, handles: Sequence[int], deadline: float) -> list[bytes]:
        """Reads rows, in order."""
        found: dict[int, bytes] = {}
        for some in _parts(handles):
            marks = ",".join("?" * len(some))
            rows, _ = self._run(f"SELECT handle, data FROM rows WHERE handle IN ({marks})", some, deadline)
            found.update(rows)
        gone = [handle for handle in handles if handle not in found]
        if gone:
            raise RefsGoneError(f"{len(gone)} rows are gone.", handles=gone)
        return [found[handle] for handle in handles]

    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        """Deletes rows, thousands in one statement."""
        for some in _parts(handles):
            self._run(f"DELETE FROM rows WHERE handle IN ({','.join('?' * len(some))})", some, deadline)

    # --- the log ------------------------------------------------------------------------------------------------------

    def append(self, number: int, record: bytes, deadline: float) -> bool:
        """Writes a record, if it is the next one."""
        insert = "INSERT INTO log SELECT ?, ? WHERE ? = (SELECT coalesce(max(number), 0) + 1 FROM log)"
        return self._run(insert, (number, record, number), deadline)[1] == 1

    def read_log(self, first: int | None, deadline: float) -> list[tuple[int, bytes]]:
        """The records from a number on, or the newest one."""
        where = "number = (SELECT max(number) FROM log)" if first is None else "number >= ? ORDER BY number"
        values = () if first is None else (first,)
        return self._run(f"SELECT number, record FROM log WHERE {where}", values, deadline)[0]

    def trim(self, before: int, deadline: float) -> None:
        """Drops records; the file uses their pages again."""
        self._run("DELETE FROM log WHERE number < ?", (before,), deadline)

    # --- connections --------------------------------------------------------------------------------------------------

    def _run(self, statement: str, values: Sequence[Any], deadline: float) -> tuple[list[Any], int]:
        """Runs one statement: its rows, and how many it changed. Waits for other processes until the deadline."""
        try:
            inode = self.config.path.stat().st_ino
        except FileNotFoundError:
            inode = 0
        if inode != self._inode:  # two clients would write to different files, and never notice
            message = f"the file '{self.config.path}' is closed, or is not the one that this client opened."
            raise BackendUnavailableError(message, retryable=False, hint="Close this client and connect again.")
        try:
            database = self._idle.pop()
        except IndexError:
            database = self._connect(deadline)
        try:
            database.execute(f"PRAGMA busy_timeout = {int(1000 * max(0.0, deadline - time.monotonic()))}")
            cursor = database.execute(statement, values)
            return cursor.fetchall(), cursor.rowcount
        except sqlite3.OperationalError as error:
            if _code(error) == sqlite3.SQLITE_BUSY:
                raise OperationTimeoutError(f"'{self.config.path}' was busy until the deadline.") from error
            if _code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):  # SQLite has rolled the statement back
                full = f"the disk of '{self.config.path}' is full ({error}). It was not done."
                raise BackendUnavailableError(full, outcome="not_done", hint="Make room on the disk.") from error
            raise
        finally:
            self._idle.append(database)

    def _connect(self, deadline: float) -> sqlite3.Connection:
        wait_s = min(max(0.0, deadline - time.monotonic()), 1e6)
        database = sqlite3.connect(self.config.path, wait_s, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA synchronous = FULL")
        return database


def _parts(rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
    return (rows[start : start + _MOST_ROWS] for start in range(0, len(rows), _MOST_ROWS))


def _code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
