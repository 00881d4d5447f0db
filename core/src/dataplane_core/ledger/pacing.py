"""Limits how often waiting clients ask, so that polling costs a store the same however many wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from dataplane_core.ledger.queues import LONGEST_PAUSE_S

#: How many times per second all waiters of one store ask together, unless this needs pauses above the longest one.
ASKS_PER_S: Final = 50.0
#: How many questions may come at once before the rate applies, so that a few new waiters are not slowed down.
_BURST: Final = 50
#: Seconds after its pause until a waiter that did not ask again is no longer counted. Its own backoff may be longer.
_SLACK_S: Final = 3.0
#: The most waiters that are counted: with this many, every pause is the longest one.
_MOST_COUNTED: Final = int(ASKS_PER_S * LONGEST_PAUSE_S) + 1


class Pacer:
    """Gives each waiter the time of its next question, so that all waiters together ask at a fixed rate.

    A waiter gets the next free time slot. At most one slot per current waiter is reserved ahead, so a waiter that asks
    before its slot does not delay the others. Nobody is delayed while questions come more slowly than the rate. Safe
    for threads.

    Args:
        asks_per_s: The rate.
        clock: Gives the time in seconds.
    """

    def __init__(self, asks_per_s: float = ASKS_PER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._slot_s = 1.0 / asks_per_s
        self._clock = clock
        self._next_at = float("-inf")
        self._waiting: dict[str, float] = {}  # waiter -> the time until which it is counted, unless it asks again
        self._lock = threading.RLock()  # a signal handler may claim while its thread has the lock

    def pause_s(self, waiter: str) -> float:
        """The least number of seconds until this waiter asks again. It is counted until then and a little longer.

        Args:
            waiter: The id of the waiter, the same for all of its questions.
        """
        with self._lock:
            now = self._clock()
            for each in [each for each, until in list(self._waiting.items()) if until <= now]:
                self._waiting.pop(each, None)
            num_others = len(self._waiting) - (waiter in self._waiting)
            # slots that nobody used add up to a burst at most: a store that was idle is not flooded
            free_at = max(self._next_at, now - _BURST * self._slot_s)
            # without the minimum, one waiter that asks early and often would push the slots of all others away
            self._next_at = min(free_at, now + num_others * self._slot_s) + self._slot_s
            pause_s = min(max(0.0, self._next_at - now), LONGEST_PAUSE_S)
            if num_others < _MOST_COUNTED:
                self._waiting[waiter] = now + pause_s + _SLACK_S
            return pause_s

    def leave(self, waiter: str) -> None:
        """Stops counting a waiter that no longer waits."""
        with self._lock:
            self._waiting.pop(waiter, None)
