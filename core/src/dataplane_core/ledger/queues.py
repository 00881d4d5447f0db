"""What waits, and for how long: puts for room, claims for samples. And what need not be done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice, takewhile
from typing import Any, Final

from dataplane_core.ledger import commands
from dataplane_core.ledger.rows import ranks_of

#: The longest pause of a waiter between two questions, in seconds.
LONGEST_PAUSE_S: Final = 10.0
#: The shortest pause between two questions of a put that waits for room, in seconds.
LEAST_ROOM_PAUSE_S: Final = 0.01
#: The pause of a waiter that nobody wakes: the shortest, the longest, and its share of the time waited so far.
_FIRST_PAUSE_S: Final = 0.0005
_MOST_PAUSE_S: Final = 2.0
_SHARE: Final = 0.05


def backoff_s(waited_s: float) -> float:
    """The pause of a waiter that nobody wakes. It adds at most about a twentieth to the time waited."""
    return min(max(_FIRST_PAUSE_S, _SHARE * waited_s), _MOST_PAUSE_S)


# --- puts that wait for room ------------------------------------------------------------------------------------------

#: Seconds between two questions of the first put in the queue for room. Each other one asks half as often as the one
#: before it, but at least so often.
_FIRST_IN_QUEUE_S: Final = 0.06
_LAST_IN_QUEUE_S: Final = 2.0
#: A put that did not say for this many seconds that it still waits is dropped from the queue.
_KEPT_S: Final = 30.0
#: After so many seconds in which no room became free, later puts may pass those that wait.
_QUIET_S: Final = 1.0


@dataclass(slots=True)
class _Put:
    size_bytes: int
    since: float  # when it came
    expires_at: float  # when it is dropped, unless it asks again
    passed_bytes: int = 0  # of what went ahead of it
    wake: Callable[[], bool] | None = None  # as `LedgerService.call` was given it


@dataclass(slots=True)
class RoomQueue:
    """The puts that wait, by ticket, in order of arrival, and which may go ahead, as the contract says.

    Small puts would starve a large one if they went ahead whenever there is room. But once no room becomes free, the
    consumers that would free some may need what a later put writes.
    """

    waiting: dict[str, _Put] = field(default_factory=dict)
    freed_at: float = float("-inf")

    def wait(self, ticket: str, size_bytes: int, now: float, wait_s: float) -> None:
        """A put waits, or still waits, for at most ``wait_s`` seconds more. 0: it gave up."""
        self._drop_expired(now)
        if wait_s <= 0:
            self.waiting.pop(ticket, None)
        else:
            put = self.waiting.setdefault(ticket, _Put(size_bytes, now, now))
            put.expires_at = now + min(wait_s, _KEPT_S)

    def is_wanted(self, now: float) -> bool:
        self._drop_expired(now)
        return bool(self.waiting)

    def ask_again_s(self, ticket: str | None) -> float:
        """The pause of a put that waits until it asks again: soon at the queue's head."""
        return min(_FIRST_IN_QUEUE_S * 2.0 ** min(len(self._ahead(ticket)), 64), _LAST_IN_QUEUE_S)

    def num_ahead(self, ticket: str | None, size_bytes: int, free_bytes: int, capacity_bytes: int, now: float) -> int:
        """How many waiting puts a put, which fits, must wait for; 0: it may take its room."""
        self._drop_expired(now)
        ahead = self._ahead(ticket)
        if _leaves_room(ahead, size_bytes, free_bytes):
            return 0
        quiet = now - max(self.freed_at, ahead[0].since) >= _QUIET_S
        if quiet and all(put.passed_bytes + size_bytes <= capacity_bytes for put in ahead):
            return 0
        return len(ahead)

    def enter(self, ticket: str | None, size_bytes: int, free_bytes: int) -> None:
        """A put takes its room."""
        ahead = self._ahead(ticket)
        if not _leaves_room(ahead, size_bytes, free_bytes):
            for put in ahead:
                put.passed_bytes += size_bytes
        if ticket is not None:
            self.waiting.pop(ticket, None)

    def _ahead(self, ticket: str | None) -> list[_Put]:
        """The puts that wait ahead of this one."""
        return [put for _, put in takewhile(lambda entry: entry[0] != ticket, self.waiting.items())]

    def _drop_expired(self, now: float) -> None:
        self.waiting = {ticket: put for ticket, put in self.waiting.items() if put.expires_at > now}


def _leaves_room(ahead: Sequence[_Put], size_bytes: int, free_bytes: int) -> bool:
    """Whether a put can take its room, and those ahead of it theirs."""
    return not ahead or sum(put.size_bytes for put in ahead) + size_bytes <= free_bytes


# --- requests that were carried out -----------------------------------------------------------------------------------

#: Seconds after the deadline of a request for which its id is kept, at least.
KEPT_S: Final = 60.0
#: The most seconds until a deadline that count. A deadline may be infinite.
_MOST_LEFT_S: Final = 1e9


class DoneRequests:
    """The ids of requests that were carried out, until their time is over, with what msgpack can keep of replies."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[float, Any]] = {}  # id -> when its time is over, what is kept of its reply
        self._heap: list[tuple[float, str]] = []  # the first end first

    def __contains__(self, request_id: str | None) -> bool:
        return request_id in self.kept

    def reply(self, request_id: str | None) -> Any:
        """What is kept of the reply to a request. None: nothing, or it is not known."""
        return None if request_id is None else self.kept.get(request_id, (0.0, None))[1]

    def add(self, request_id: str | None, left_s: float, now: float, reply: Any = None) -> None:
        """A request was carried out whose deadline is in ``left_s`` seconds; None: it is not repeated. Forgets those
        whose time is over."""
        if request_id is not None and request_id not in self.kept:
            self.keep(request_id, now + KEPT_S + min(max(0.0, left_s), _MOST_LEFT_S), reply)
        while self._heap and self._heap[0][0] <= now:
            del self.kept[heappop(self._heap)[1]]

    def keep(self, request_id: str, ends_at: float, reply: Any) -> None:
        """Keeps an id until then."""
        heappush(self._heap, (ends_at, request_id))
        self.kept[request_id] = ends_at, reply


# --- claims that wait for samples -------------------------------------------------------------------------------------

#: How many questions of a partition are looked at after each change of it. The others are asked again by their clients.
_MOST_QUESTIONS: Final = 16
#: A claim that has not asked again so many seconds after it was woken is dropped: others get the samples meanwhile.
_ASKS_WITHIN_S: Final = 1.0
#: So is one that has not asked for so many seconds, though it should ask by itself.
_ASKS_AT_LEAST_S: Final = 2 * LONGEST_PAUSE_S


@dataclass(slots=True, eq=False)
class _Waiter:
    claim: commands.ClaimRequest
    question: tuple[Any, ...]  # equal for claims that ask the same
    wake: Callable[[], bool]  # tells its client to ask again. False: the client is gone
    lease_ends_at: float  # its client knows that a lease may end then, and asks again. Infinite: it knows of none
    asked_at: float
    woken_at: float | None = None  # if it was woken since it asked


class WaitingClaims:
    """Claims that were handed nothing, and how to wake them, in the order in which they came.

    Only those are woken for which there are samples, so a put costs the same however many wait. They ask again then:
    nothing is handed to a client that may be gone.
    """

    def __init__(self) -> None:
        self.by_token: dict[str, _Waiter] = {}  # in the order in which they asked last
        # partition -> question -> those that ask it, by their tokens, in the order in which they came
        self._lines: dict[str, dict[tuple[Any, ...], dict[str, _Waiter]]] = {}

    def add(self, claim: commands.ClaimRequest, wake: Callable[[], bool], lease_ends_at: float, now: float) -> None:
        """A claim waits, or still waits. It keeps its place. It is told when a lease may end."""
        # two for each one that comes, so that clients which were killed do not pile up, and no call takes long
        for token, waiter in list(islice(self.by_token.items(), 2)):
            if now - waiter.asked_at > _ASKS_AT_LEAST_S:
                self.drop(token)
        # claims that ask the same are looked at once for all: 500 idle ranks cost a put what one does
        question = (
            *(claim.task_name, tuple(claim.required_fields), repr(claim.tag_filter), claim.batch_size, claim.sampler),
            *(claim.balance, claim.dp_rank, claim.dp_size, claim.batch_index, claim.batch_epoch),
            *(claim.max_rows, claim.max_tokens),
        )
        before = self.by_token.get(claim.token)
        if before is not None and (before.claim.partition_id, before.question) != (claim.partition_id, question):
            self.drop(claim.token)
        self.by_token.pop(claim.token, None)
        waiter = self.by_token[claim.token] = _Waiter(claim, question, wake, lease_ends_at, now)
        self._lines.setdefault(claim.partition_id, {}).setdefault(question, {})[claim.token] = waiter

    def drop(self, token: str) -> str | None:
        """A claim no longer waits. Returns its partition, or None if it did not wait."""
        waiter = self.by_token.pop(token, None)
        if waiter is None:
            return None
        partition_id = waiter.claim.partition_id
        lines = self._lines[partition_id]
        del lines[waiter.question][token]
        if not lines[waiter.question]:
            del lines[waiter.question]
            if not lines:
                del self._lines[partition_id]
        return partition_id

    def wake(self, partition_id: str, num_ready: Callable[[commands.ClaimRequest], float], now: float) -> None:
        """Wakes claims that can be answered now. ``num_ready``: how many samples are ready for a claim; infinite if it
        can be answered however many are."""
        for line in self._some_lines(partition_id):
            claim = next(iter(line.values())).claim
            left, needed = num_ready(claim), claim.batch_size * ranks_of(claim)
            for waiter in list(line.values()):
                if left < needed:
                    break
                if self._is_woken(waiter, now):
                    left -= needed

    def tell(self, partition_id: str, lease_ends_at: float, now: float) -> None:
        """Wakes claims that do not know that a lease may end so soon: of those that ask the same, only the first, since
        others are woken when it has asked."""
        for line in self._some_lines(partition_id):
            for waiter in list(line.values()):
                if waiter.lease_ends_at <= lease_ends_at or self._is_woken(waiter, now):
                    break

    def _is_woken(self, waiter: _Waiter, now: float) -> bool:
        """Wakes a claim, unless it was woken since it last asked. False if its client is gone, or takes too long to ask
        again: then it is dropped."""
        if waiter.woken_at is None and waiter.wake():
            # woken once only: a second wake before it asks would count samples for it twice
            waiter.woken_at = now
        if waiter.woken_at is not None and now - waiter.woken_at <= _ASKS_WITHIN_S:
            return True
        self.drop(waiter.claim.token)
        return False

    def _some_lines(self, partition_id: str) -> list[dict[str, _Waiter]]:
        """A few of the questions of a partition: others at the next call, if there are more."""
        lines = self._lines.get(partition_id, {})
        questions = list(islice(lines, _MOST_QUESTIONS))
        for question in questions if len(lines) > len(questions) else ():
            lines[question] = lines.pop(question)
        return [lines[question] for question in questions]
