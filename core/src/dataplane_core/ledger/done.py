"""The ids of requests that were carried out, until their time is over. Pure, like the ledger."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

#: Seconds after the deadline of a request for which its id is kept, at least.
KEPT_S: Final = 60.0
#: Ids that come within so many seconds are forgotten together.
_TOGETHER_S: Final = 10.0
#: The most seconds until a deadline that count. A deadline may be infinite.
_MOST_LEFT_S: Final = 1e9


@dataclass(slots=True)
class _Class:
    """The ids that are kept about equally long, in the order in which they came.

    Attributes:
        ids: Those that are not forgotten.
        num_forgotten: How many were forgotten. So id ``num_forgotten`` is the first of ``ids``.
        ends: For some of them: how many ids came before it, and when the time of all of these is over.
        opened_at: When the last of those that are forgotten together began to come.
        ends_at: When the time of those is over.
    """

    ids: deque[str] = field(default_factory=deque)
    num_forgotten: int = 0
    ends: deque[tuple[int, float]] = field(default_factory=deque)
    opened_at: float = -math.inf
    ends_at: float = -math.inf

    def open(self, now: float) -> None:
        """What comes from now on is forgotten later than what came before."""
        if self.ids:
            self.ends.append((self.num_forgotten + len(self.ids), self.ends_at))
        self.opened_at, self.ends_at = now, -math.inf

    def due(self, now: float) -> int:
        """The number of the first id whose time is not over."""
        count = self.num_forgotten
        for upto, ends_at in self.ends:
            if ends_at > now:
                return count
            count = upto
        return count if self.ends_at > now else self.num_forgotten + len(self.ids)


class DoneRequests:
    """The ids of requests that were carried out.

    An id belongs to a class by the time that it is kept, in powers of two, so that one with a deadline of a day does
    not keep others. In a class, ids are forgotten in the order in which they came. So what is forgotten is two numbers
    per class, whatever the clock of the process that says so.
    """

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._classes: dict[int, _Class] = {}

    def __contains__(self, request_id: str | None) -> bool:
        return request_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, request_id: str, left_s: float, now: float) -> bool:
        """A request was carried out whose deadline is in ``left_s`` seconds. Returns whether to look what is `due`."""
        if request_id in self._ids:
            return False
        kept_s = KEPT_S + min(max(0.0, left_s), _MOST_LEFT_S)
        # by powers of two: in one queue, an id with a deadline of a day would keep all that came after it
        number = math.frexp(kept_s)[1]
        some = self._classes.get(number)
        if some is None:
            some = self._classes[number] = _Class()
        opens = now - some.opened_at >= _TOGETHER_S
        if opens:
            some.open(now)
        self._ids.add(request_id)
        some.ids.append(request_id)
        if now + kept_s > some.ends_at:
            some.ends_at = now + kept_s
        return opens

    def drop(self, request_id: str) -> None:
        """The request that was added last was not carried out after all."""
        self._ids.discard(request_id)
        for some in self._classes.values():
            if some.ids and some.ids[-1] == request_id:
                some.ids.pop()

    def due(self, now: float, least: int = 1) -> list[tuple[int, int]]:
        """What may be forgotten, for `forget`. Classes of which fewer than ``least`` ids may be are left out."""
        found = [(number, some.due(now), some.num_forgotten) for number, some in self._classes.items()]
        return [(number, count) for number, count, before in found if count - before >= least]

    def forget(self, due: Iterable[Sequence[int]]) -> None:
        """Forgets, of each class, the ids that came first: up to a number, which counts those forgotten before."""
        for number, upto in due:
            some = self._classes.get(number)
            while some is not None and some.ids and some.num_forgotten < upto:
                self._ids.discard(some.ids.popleft())
                some.num_forgotten += 1
            while some is not None and some.ends and some.ends[0][0] <= some.num_forgotten:
                some.ends.popleft()

    def portions(self, size: int, now: float) -> Iterator[tuple[int, int, list[str], float]]:
        """The class of some ids, the number of the first, the ids, and the seconds until their time is over."""
        for number, some in self._classes.items():
            first, left = some.num_forgotten, iter(some.ids)
            left_s = max(ends_at - now for ends_at in (some.ends_at, *(each for _, each in some.ends)))
            yield number, first, [], 0.0
            while ids := list(islice(left, size)):
                yield number, first, ids, max(0.0, left_s)
                first += len(ids)

    def restore(self, number: int, first: int, ids: Sequence[str], left_s: float, now: float) -> None:
        """Takes what `portions` gave.

        Raises:
            ValueError: An id is there twice, or the ids do not follow those before.
        """
        some = self._classes.setdefault(number, _Class(num_forgotten=first))
        if first != some.num_forgotten + len(some.ids) or first < 0 or len({*ids}) < len(ids):
            raise ValueError("ids of requests do not follow one another")
        if not self._ids.isdisjoint(ids):
            raise ValueError("the id of a request is there twice")
        self._ids.update(ids)
        some.ids.extend(ids)
        if ids:
            some.opened_at, some.ends_at = now, max(some.ends_at, now + left_s)
