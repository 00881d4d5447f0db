"""The ids of requests that were carried out, with what they were answered, until their time is over. Pure, like the
ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any, Final

#: Seconds after the deadline of a request for which its id is kept, at least.
KEPT_S: Final = 60.0
#: The most seconds until a deadline that count. A deadline may be infinite.
_MOST_LEFT_S: Final = 1e9


class DoneRequests:
    """The ids of requests that were carried out, with what msgpack can keep of their replies."""

    def __init__(self) -> None:
        self._replies: dict[str, Any] = {}  # of those whose reply is more than None
        self._ends: dict[str, float] = {}  # id -> when its time is over
        self._heap: list[tuple[float, str]] = []  # the same, the first end first

    def __contains__(self, request_id: str | None) -> bool:
        return request_id in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def reply(self, request_id: str | None) -> Any:
        """What is kept of the reply to a request. None: nothing, or it is not known."""
        return None if request_id is None else self._replies.get(request_id)

    def add(self, request_id: str, left_s: float, now: float, reply: Any = None) -> None:
        """A request was carried out whose deadline is in ``left_s`` seconds."""
        if request_id not in self._ends:
            self.restore(request_id, now + KEPT_S + min(max(0.0, left_s), _MOST_LEFT_S), reply)

    def forget(self, now: float) -> None:
        """Forgets the ids whose time is over."""
        while self._heap and self._heap[0][0] <= now:
            _, request_id = heappop(self._heap)
            del self._ends[request_id]
            self._replies.pop(request_id, None)

    def left(self, now: float) -> Iterator[tuple[str, float, Any]]:
        """Each id, the seconds until its time is over, and what is kept of its reply."""
        return ((each, max(0.0, ends_at - now), self._replies.get(each)) for each, ends_at in self._ends.items())

    def restore(self, request_id: str, ends_at: float, reply: Any = None) -> None:
        """Keeps an id until then.

        Raises:
            ValueError: It is there already.
        """
        if request_id in self._ends:
            raise ValueError("the id of a request is there twice")
        heappush(self._heap, (ends_at, request_id))
        self._ends[request_id] = ends_at
        if reply is not None:
            self._replies[request_id] = reply
