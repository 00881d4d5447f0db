"""Who waits for room in a store that is full: first come, first served, within a bound. Pure, like the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

__all__ = ["RoomQueue"]

#: Seconds after it last said so, at most, after which a put counts as no longer waiting.
_KEPT_S: Final = 30.0
#: Seconds without any room becoming free, after which later puts may pass those that wait.
_QUIET_S: Final = 1.0


@dataclass(slots=True)
class _Waiting:
    """A put that waits.

    Attributes:
        size_bytes: Its payload.
        since: When it came.
        expires_at: When it is forgotten, unless it asks again.
        passed_bytes: What later puts have taken before it.
    """

    size_bytes: int
    since: float
    expires_at: float
    passed_bytes: int = 0


@dataclass(slots=True)
class RoomQueue:
    """The puts that wait, by ticket, in the order in which they came.

    A later put goes through where there is room for it beside all that wait before it. Where there is only room for
    itself it waits, since small puts would otherwise starve a large one; but while no room becomes free for a second
    it passes, since those who would free some may need just what it writes. Each put is passed in this way by no more
    than the store's capacity in all.
    """

    waiting: dict[str, _Waiting] = field(default_factory=dict)
    freed_at: float = float("-inf")
    freed: bool = False  # since `freed_at` was last set

    def wait(self, ticket: str, size_bytes: int, now: float, wait_s: float) -> None:
        """A put waits, or still waits, for at most ``wait_s`` seconds more; 0: it has given up."""
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

    def place(self, ticket: str) -> int:
        """How many wait before a put that waits."""
        return next((place for place, each in enumerate(self.waiting) if each == ticket), len(self.waiting))

    def num_ahead(self, ticket: str | None, size_bytes: int, free_bytes: int, capacity_bytes: int, now: float) -> int:
        """How many waiting puts keep a put, which fits, from its room; 0: it may take it."""
        if self.freed:
            self.freed, self.freed_at = False, now
        self._drop_expired(now)
        ahead: list[_Waiting] = []
        for each, waiting in self.waiting.items():
            if each == ticket:
                break
            ahead.append(waiting)
        if not ahead or sum(each.size_bytes for each in ahead) + size_bytes <= free_bytes:
            return 0
        quiet = now - max(self.freed_at, ahead[0].since) >= _QUIET_S
        if quiet and all(each.passed_bytes + size_bytes <= capacity_bytes for each in ahead):
            return 0
        return len(ahead)

    def enter(self, ticket: str | None, size_bytes: int) -> None:
        """A put takes its room."""
        for each, waiting in self.waiting.items():
            if each == ticket:
                break
            waiting.passed_bytes += size_bytes
        if ticket is not None:
            self.waiting.pop(ticket, None)

    def _drop_expired(self, now: float) -> None:
        for ticket in [each for each, waiting in self.waiting.items() if waiting.expires_at <= now]:
            del self.waiting[ticket]
