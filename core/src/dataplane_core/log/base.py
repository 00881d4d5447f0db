"""`Log`: what a process keeps of what it did, so that another one goes on when it has ended."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from dataplane_core.errors import BackendUnavailableError

_log = logging.getLogger(__name__)

#: The exit status of a process that may answer nobody any more.
EXIT_STATUS: Final = 70
#: A log is long when what follows the state exceeds both some bytes and this share of the state.
TAIL_BYTES: Final = 1 << 20
TAIL_SHARE: Final = 0.25


class TakenError(BackendUnavailableError):
    """Another process has taken the log since. Nothing may be answered any more."""


class Log(ABC):
    """A state, and records of what was done since then. Times are on a clock of the log's own.

    Call `begin` once what it holds is read, and before all else.

    Attributes:
        state: What the log of before began with. Empty if there was none.
        records: The records since then, each with its time. Empty once `begin` was called.
        make_state: Gives the state that the log begins with.
    """

    def __init__(self) -> None:
        self._size = self._long_at = 0  # bytes of the log, and how many make it long
        self._ahead_s = 0.0
        self.make_state: Callable[[], bytes] = bytes
        self.state = b""
        self.records: list[tuple[float, bytes]] = []

    def now(self) -> float:
        """The time in seconds on the log's clock, which stands still while no process has the log."""
        return time.monotonic() + self._ahead_s

    @abstractmethod
    def begin(self) -> None:
        """Begins the log of this process with the state, which stands for all that came before; or begins it again.

        Raises:
            BackendUnavailableError: The log cannot be written.
            TakenError: Another process has the log.
        """

    @abstractmethod
    def append(self, record: bytes, at: float, *, is_lazy: bool = False, frees: bool = False) -> None:
        """Adds a record.

        Args:
            record: The record.
            at: Its time, not before that of the one before.
            is_lazy: Whether `commit` need not wait for it.
            frees: Whether it makes room, as that of a clear. It may take what is set aside for it on a full disk.

        Raises:
            BackendUnavailableError: It cannot be written. It was not done.
        """

    @abstractmethod
    def commit(self) -> None:
        """Returns when everything so far is kept, but for lazy records. Call it before anything is answered.

        Raises:
            TakenError: Another process has the log.
            OSError: The disk failed: what it has is not known.
        """

    def commit_or_end(self) -> None:
        """As `commit`. If what was done cannot be kept, ends the process: nobody gets an answer."""
        try:
            self.commit()
        except Exception as error:  # also one that an engine's author did not foresee
            _log.critical("this process may answer nobody any more, and ends: %s", error)
            os._exit(EXIT_STATUS)

    def _began(self, size: int, state_bytes: int) -> None:
        """The log of this process begins with so many bytes, of a state of so many."""
        self._size, self._long_at = size, size + max(TAIL_BYTES, int(TAIL_SHARE * state_bytes))

    def shorten_if_long(self) -> None:
        """As `begin`, if the log is long. If that fails, it goes on growing until it is twice as long."""
        if self._size <= self._long_at:
            return
        try:
            self.begin()
        except TakenError:
            pass  # as `commit` will say
        except Exception as error:
            self._long_at = 2 * self._size
            _log.warning("the log could not be shortened, and goes on growing until the next try: %s", error)
