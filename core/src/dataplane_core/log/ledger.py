"""`Log`: what a process keeps of what it did, so that another one goes on when it has ended. `LoggedLedger`: the ledger
of such a process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import msgspec

from dataplane_core.errors import BackendUnavailableError, CorruptDataError, DataPlaneError, InvalidRequestError
from dataplane_core.hosting.messages import COMMANDS_FORM, Messages
from dataplane_core.ledger import Command, Ledger, LedgerService, Ref, Reply, commands
from dataplane_core.ledger.state import pack_state, unpack_state

_log = logging.getLogger(__name__)

#: The exit status of a process that may answer nobody any more.
EXIT_STATUS: Final = 70
#: A log is long when what follows the state exceeds both some bytes and this share of the state.
TAIL_BYTES: Final = 1 << 20
TAIL_SHARE: Final = 0.25
_MESSAGES: Final = Messages()
#: Which version the state is of, and which the records.
_VERSIONS: Final = (3, COMMANDS_FORM)
_decode: Final = msgspec.msgpack.Decoder(tuple[tuple[int, int], msgspec.Raw]).decode
#: Commands that make room, which a full disk must not keep from it.
_FREES: Final = (commands.AbortPut, commands.ClearRequest, commands.Collected)


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


class LoggedLedger(LedgerService):
    """A ledger that adds each command which changes something to a log, before it runs it. Thread-safe.

    A record is the command as it comes over a socket. The ledger of the next process runs all records at their times,
    and so is where this one was: every put, claim and ack, and what is left of each lease.

    Args:
        log: The log. Answer only after its ``commit``.
        capacity_bytes: Limit for the payload bytes held and reserved, or None.
        lazy: Commands for which ``commit`` need not wait: the begin of a put, if no other process numbers writes alike;
            and what may be said again, as that payload was deleted.
        ends_holds: Whether leases and puts under way are ended first: the clients of the process before are gone.
        first_write: No write id that the ledger numbers is smaller.

    Attributes:
        lock: While another thread holds it, nothing changes the ledger.

    Raises:
        CorruptDataError: The log holds what is no ledger, or one of another version.
    """

    def __init__(
        self,
        log: Log,
        capacity_bytes: int | None = None,
        *,
        lazy: tuple[type[Command[Any]], ...] = (),
        ends_holds: bool = False,
        first_write: int = 1,
    ) -> None:
        # a call has one time: what it asks before it is recorded holds when it runs
        super().__init__(clock=self._now, ledger=_unpacked(log.state) if log.state else Ledger())
        self._log = log
        self._lazy = lazy
        self.lock = threading.RLock()
        self._at: float | None = None  # the time of the call that runs
        for self._at, record in log.records:
            self._run_again(record)
        self._at = log.now()
        if ends_holds:
            self.ledger.end_holds(self._at)
        self.ledger.limit(capacity_bytes, first_write)
        log.make_state = self._state
        log.begin()
        self._at = None

    def _run_again(self, record: bytes) -> None:
        try:
            command = _MESSAGES.decode_request(record)
        except InvalidRequestError as error:
            raise CorruptDataError(f"a record of the log cannot be read: {error}.") from error
        try:
            super().call(command)
        except DataPlaneError:  # it was refused then as well
            pass
        except Exception as error:
            raise CorruptDataError(f"the ledger failed on a record of its log: {error!r}.") from error

    def _now(self) -> float:
        return self._log.now() if self._at is None else self._at

    def _state(self) -> bytes:
        return msgspec.msgpack.encode((_VERSIONS, msgspec.Raw(pack_state(self.ledger))))

    def call(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """As `LedgerService.call`. Answer only after the log's ``commit``.

        Raises:
            BackendUnavailableError: The log cannot be written. Nothing was done.
        """
        with self.lock:
            self._at = at = self._log.now()
            try:
                if not self.changes(command):
                    return super().call(command, wake)
                record, is_lazy = _MESSAGES.encode_request(command)[4:], isinstance(command, self._lazy)
                self._log.append(record, at, is_lazy=is_lazy, frees=isinstance(command, _FREES))
                reply = super().call(command, wake)
                self._log.shorten_if_long()
                return reply
            finally:
                self._at = None

    def stop_waiting(self, token: str) -> None:
        with self.lock:
            super().stop_waiting(token)

    def garbage(self) -> list[Ref]:
        with self.lock:
            return super().garbage()


def _unpacked(state: bytes) -> Ledger:
    try:
        versions, ledger = _decode(state)
        if versions != _VERSIONS:
            raise CorruptDataError(
                f"the ledger in the log is of versions {versions}. Expected {_VERSIONS}.",
                hint="Another dataplane-core wrote it: use that one, or begin in another folder.",
            )
        return unpack_state(ledger)
    except CorruptDataError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError) as error:
        raise CorruptDataError(f"the state in the log cannot be read: {type(error).__name__}: {error}.") from error
