"""How often those who wait may ask: polling that costs a store the same, however many wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["ASKS_PER_S", "LEAST_ROOM_PAUSE_S", "LONGEST_PAUSE_S", "Pacer", "backoff_s"]

#: How often all who wait at one store may ask in vain, together, while no pause is longer than the longest.
ASKS_PER_S: Final = 50.0
#: The longest pause between two questions of one who waits, in seconds, however many wait.
LONGEST_PAUSE_S: Final = 10.0
#: The shortest pause between two questions of a put that waits for room, in seconds.
LEAST_ROOM_PAUSE_S: Final = 0.01
#: How many may ask at once before the rate holds: a few who have just begun to wait are not slowed down.
_BURST: Final = 50
#: The pause of one who waits alone, at first and at most, and its share of the time waited so far.
_ALONE_FIRST_S: Final = 0.0005
_ALONE_MOST_S: Final = 2.0
_SHARE: Final = 0.05
#: Seconds beyond its pause after which one who did not ask again no longer counts; its own pause may be the longer one.
_SLACK_S: Final = _ALONE_MOST_S + 1.0
#: So many are counted at most: with more of them every pause is the longest one.
_MOST_COUNTED: Final = int(ASKS_PER_S * LONGEST_PAUSE_S) + 1


def backoff_s(waited_s: float) -> float:
    """The pause of one who waits alone: it adds at most about a twentieth to the time waited."""
    return min(max(_ALONE_FIRST_S, _SHARE * waited_s), _ALONE_MOST_S)


class Pacer:
    """Gives each who waits the time of its next question, so that all together ask at a fixed rate.

    The times lie on one line of slots, which is never longer than one slot for each that waits now: questions of those
    who do not wait for their slot slow nobody down. Whoever asks rarely leaves slots unused, and nobody is slowed down
    before the questions come faster than the rate. Safe for threads.

    Args:
        asks_per_s: The rate.
        clock: Gives the time in seconds.
    """

    def __init__(self, asks_per_s: float = ASKS_PER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._slot_s = 1.0 / asks_per_s
        self._clock = clock
        self._next_at = float("-inf")
        self._waiting: dict[str, float] = {}  # until when each counts, unless it asks again
        self._lock = threading.Lock()

    def pause_s(self, waiter: str) -> float:
        """The least time in seconds until one that waits asks again; it counts until then, and a little longer.

        Args:
            waiter: The same for all questions of one that waits, and nobody else's.
        """
        with self._lock:
            now = self._clock()
            for each in [each for each, until in self._waiting.items() if until <= now]:
                del self._waiting[each]
            num_others = len(self._waiting) - (waiter in self._waiting)
            free_at = max(self._next_at, now - _BURST * self._slot_s)
            self._next_at = min(free_at, now + num_others * self._slot_s) + self._slot_s
            pause_s = min(max(0.0, self._next_at - now), LONGEST_PAUSE_S)
            if num_others < _MOST_COUNTED:
                self._waiting[waiter] = now + pause_s + _SLACK_S
            return pause_s

    def leave(self, waiter: str) -> None:
        """It no longer waits, or is about to give up."""
        with self._lock:
            self._waiting.pop(waiter, None)
