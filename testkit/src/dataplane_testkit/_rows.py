"""Helpers for the tests of a `RowStoreBackend`'s own methods: new handles, the rows of a put, its log."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeGuard

import numpy as np

from dataplane_core.backends import Backend, RefsGoneError, RowStoreBackend

#: Seconds that one call of an engine may take.
_CALL_S: Final = 60.0


def stores_rows(backend: Backend) -> TypeGuard[RowStoreBackend]:
    """Whether it is a `RowStoreBackend` as an author writes it, whose rows and log are all that it has."""
    return isinstance(backend, RowStoreBackend) and type(backend).start is RowStoreBackend.start


def keeps_log(backend: Backend) -> TypeGuard[RowStoreBackend]:
    return stores_rows(backend) and type(backend).append is not RowStoreBackend.append


def soon() -> float:
    return time.monotonic() + _CALL_S


def new_handles(count: int) -> range:
    """Handles that nobody has used. Those of the ledger are smaller."""
    first = (1 << 62) + (secrets.randbits(40) << 20)
    return range(first, first + count)


def put(backend: RowStoreBackend, rows: Mapping[int, bytes]) -> None:
    """Puts rows, those of consecutive handles in one call, as core does."""
    for _, some in itertools.groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        handles = [handle for _, handle in some]
        offsets = np.cumsum([0, *(len(rows[handle]) for handle in handles)], dtype=np.int64)
        data = memoryview(b"".join(rows[handle] for handle in handles))
        backend.put_rows(range(handles[0], handles[-1] + 1), data, offsets, soon())


def rows_at(backend: RowStoreBackend, handles: Iterable[int]) -> dict[int, bytes | None]:
    """What each handle's row holds, read one by one. None: there is no row."""
    rows: dict[int, bytes | None] = {}
    for handle in handles:
        try:
            (row,) = backend.get_rows([handle], soon())
            rows[handle] = bytes(row)
        except RefsGoneError:
            rows[handle] = None
    return rows


def log_of(backend: RowStoreBackend, first: int | None = 0) -> list[tuple[int, bytes]]:
    """The records of the log, from a number on; None: the newest one."""
    return [(number, bytes(record)) for number, record in backend.read_log(first, soon())]


@contextmanager
def opened(cls: type[Any], options: Mapping[str, Any], bootstrap: bool) -> Iterator[RowStoreBackend]:
    """A backend whose engine alone is open: it has no ledger."""
    backend = cls(cls.Config.model_validate(options))
    try:
        backend.open_engine(bootstrap=bootstrap, deadline=soon())
        yield backend
    finally:
        backend.close_engine()


def kill_owner(backend: RowStoreBackend) -> None:
    """Kills the process of the ledger, if it runs on this host. The next call of a client starts another one.

    Args:
        backend: A started backend that keeps a log.
    """
    os.kill(backend.owner_pid(soon()), signal.SIGKILL)
