"""What a client knows about the storage units: where rows are, and which units have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError, preview
from dataplane_core.hosting import Watch
from dataplane_tq_simple._book import SPREAD_BITS, View
from dataplane_tq_simple._errors import UnitsGoneError
from dataplane_tq_simple._exchange import PATIENCE_S, Exchange, Peer

#: The life of a row whose spread is not known any more: all its rows are deleted.
NOWHERE: Final = -1
#: Seconds that the controller may take to answer that question, while replies of units may come.
_QUESTION_S: Final = 0.1
#: Seconds without an answer of the controller after which it is watched.
_CONTROLLER_PATIENCE_S: Final = 1.0

_Ints = npt.NDArray[np.int64]


class Places:
    """The newest `View` that this client has of the book of storage units. Thread-safe.

    Args:
        ask: Asks the controller for a newer view than that of a version, by a deadline.
        exchange: Keeps sockets to the units.
    """

    def __init__(self, ask: Callable[[int, float], View | None], exchange: Exchange) -> None:
        self._ask = ask
        self._exchange = exchange
        self._lock = threading.Lock()
        self._view = View(-1, {}, {})

    def refresh(self, deadline: float) -> None:
        """Gets the newest view. Raises as `QueueEngine.call`."""
        self.take(self._ask(self._view.version, deadline))

    def take(self, view: View | None) -> None:
        """Takes a newer view. None: there is none."""
        if view is None:
            return
        with self._lock:
            if view.version <= self._view.version:
                return
            ended = [
                self._peer(self._view, number)
                for number, life in self._view.lives.items()
                if life.alive and not (number in view.lives and view.lives[number].alive)
            ]
            self._view = view
        self._exchange.forget(ended)

    def lives_of(self, handles: _Ints, deadline: float) -> _Ints:
        """The life that has each row, or `NOWHERE`. Asks the book if it does not know a spread."""
        spreads = handles >> SPREAD_BITS
        numbers = handles & ((1 << SPREAD_BITS) - 1)
        first = spreads[0]
        several = bool((spreads != first).any())
        each = np.unique(spreads).tolist() if several else [int(first)]
        known = self._view.spreads
        if any(spread not in known for spread in each):
            self.refresh(deadline)
            known = self._view.spreads
        lives = np.full(len(handles), NOWHERE, dtype=np.int64)
        for spread in each:
            if spread in known:
                where = spreads == spread if several else slice(None)
                lives[where] = np.asarray(known[spread], dtype=np.int64)[numbers[where] % len(known[spread])]
        return lives

    def alive(self, lives: _Ints) -> npt.NDArray[np.bool_]:
        """Which of some lives have not ended, as far as this client knows."""
        view = self._view
        distinct = np.unique(lives)
        ended = [life for life in distinct.tolist() if life not in view.lives or not view.lives[life].alive]
        return ~np.isin(lives, ended) if ended else np.ones(len(lives), dtype=bool)

    def peer(self, life: int) -> Peer:
        """Whom to send requests to.

        Raises:
            UnitsGoneError: The life has ended, and its rows are deleted.
        """
        return self._peer(self._view, life)

    @staticmethod
    def _peer(view: View, number: int) -> Peer:
        life = view.lives.get(number)
        if life is None:
            raise UnitsGoneError("a storage unit was removed.")
        return Peer(f"storage {life.unit}", life.actor, life.ip, life.port, number, life.token)


class UnitWatch:
    """Asks the book whether storage units have ended, while an exchange waits for them.

    Args:
        places: Gets the answers.
        peers: The units.
        watch_controller: Makes a watch of the controller, which is used if that does not answer.
    """

    def __init__(self, places: Places, peers: Sequence[Peer], watch_controller: Callable[[], Watch]) -> None:
        self._places = places
        self._peers = list(peers)
        self._lives = np.array([peer.life for peer in peers], dtype=np.int64)
        self._watch_controller = watch_controller
        self._watch: Watch | None = None
        self._ask_at = self._answered_at = time.monotonic()

    def check(self) -> None:
        """Raises `UnitsGoneError` if one of them has ended; `BackendUnavailableError` if the controller has."""
        self._refuse_ended()
        now = time.monotonic()
        if now < self._ask_at:
            return
        try:
            self._places.refresh(now + _QUESTION_S)
        except (OperationTimeoutError, BackendUnavailableError) as error:
            if isinstance(error, BackendUnavailableError) and not error.retryable:
                raise
            if now - self._answered_at >= _CONTROLLER_PATIENCE_S:
                self._watch = self._watch or self._watch_controller()
                self._watch.check()
            return
        self._watch = None
        self._answered_at, self._ask_at = now, now + PATIENCE_S
        self._refuse_ended()

    def _refuse_ended(self) -> None:
        alive = self._places.alive(self._lives)
        if not alive.all():
            names = [peer.name for peer, each in zip(self._peers, alive, strict=True) if not each]
            raise UnitsGoneError(f"{preview(names)} ended. What it held is lost.")

    def describe(self) -> str:
        """What is known, as a sentence."""
        if self._watch is not None:
            return self._watch.describe()
        return "It has not ended: it is stopped, overloaded, or not reachable from this process."
