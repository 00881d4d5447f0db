"""The queue of puts that wait for room in a full store, in order of arrival. Pure, like the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Final

#: A put that did not say for this many seconds that it still waits is dropped from the queue.
_KEPT_S: Final = 30.0
#: After so many seconds in which no room became free, later puts may pass those that wait.
_QUIET_S: Final = 1.0


@dataclass(slots=True)
class _Waiting:
    """A put that waits.

    Attributes:
        size_bytes: Size of its payload.
        since: When it entered the queue.
        expires_at: When it is dropped, unless it asks again.
        passed_bytes: Size of the later puts that went ahead of it.
    """

    size_bytes: int
    since: float
    expires_at: float
    passed_bytes: int = 0


@dataclass(slots=True)
class RoomQueue:
    """The puts that wait, by ticket, in order of arrival.

    A later put may go ahead if there is room for it and for all that wait before it. If there is only room for itself,
    it waits, since small puts would otherwise starve a large one. Exception: if a second has passed in which no room
    became free, it goes ahead, since the consumers that would free room may need what it writes. Later puts may pass a
    waiting put in this way with at most ``capacity_bytes`` in all.
    """

    waiting: dict[str, _Waiting] = field(default_factory=dict)
    freed_at: float = float("-inf")

    def wait(self, ticket: str, size_bytes: int, now: float, wait_s: float) -> None:
        """Adds a put, or notes that it still waits, for at most ``wait_s`` seconds more. 0: it gave up."""
        self._drop_expired(now)
        if wait_s <= 0:
            self.waiting.pop(ticket, None)
            return
        expires_at = now + min(wait_s, _KEPT_S)
        known = self.waiting.get(ticket)
        if known is None:
            self.waiting[ticket] = _Waiting(size_bytes, now, expires_at)
        else:
            known.expires_at = expires_at

    def first(self, count: int) -> list[str]:
        """The tickets of the first puts that wait."""
        return list(islice(self.waiting, count))

    def place(self, ticket: str) -> int:
        """How many puts wait ahead of this one."""
        return next((place for place, each in enumerate(self.waiting) if each == ticket), len(self.waiting))

    def num_ahead(self, ticket: str | None, size_bytes: int, free_bytes: int, capacity_bytes: int, now: float) -> int:
        """How many waiting puts a put, which fits, must wait for; 0: it may take its room."""
        self._drop_expired(now)
        ahead = self._ahead(ticket)
        if _leaves_room(ahead, size_bytes, free_bytes):
            return 0
        quiet = now - max(self.freed_at, ahead[0].since) >= _QUIET_S
        if quiet and all(each.passed_bytes + size_bytes <= capacity_bytes for each in ahead):
            return 0
        return len(ahead)

    def enter(self, ticket: str | None, size_bytes: int, free_bytes: int) -> None:
        """A put takes its room, of ``free_bytes``."""
        ahead = self._ahead(ticket)
        if not _leaves_room(ahead, size_bytes, free_bytes):
            for waiting in ahead:
                waiting.passed_bytes += size_bytes
        if ticket is not None:
            self.waiting.pop(ticket, None)

    def _ahead(self, ticket: str | None) -> list[_Waiting]:
        """The puts that wait ahead of this one."""
        return [waiting for _, waiting in takewhile(lambda each: each[0] != ticket, self.waiting.items())]

    def _drop_expired(self, now: float) -> None:
        for ticket in [each for each, waiting in self.waiting.items() if waiting.expires_at <= now]:
            del self.waiting[ticket]


def _leaves_room(ahead: Sequence[_Waiting], size_bytes: int, free_bytes: int) -> bool:
    """Whether a put can take its room, and those ahead of it theirs."""
    return not ahead or sum(each.size_bytes for each in ahead) + size_bytes <= free_bytes
