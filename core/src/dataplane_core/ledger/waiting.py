"""The claims that wait for a ledger's rows, and which of them to wake. Pure, like the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeAlias

from dataplane_core.ledger import commands
from dataplane_core.ledger.pacing import LONGEST_PAUSE_S
from dataplane_core.ledger.samplers import ranks_of

#: How many questions of a partition are looked at after each change of it. The others are asked again by their clients.
_MOST_QUESTIONS: Final = 16
#: A claim that has not asked again so many seconds after it was woken is dropped: others get the samples meanwhile.
_ASKS_WITHIN_S: Final = 1.0
#: So is one that has not asked for so many seconds, though it should ask by itself.
_ASKS_AT_LEAST_S: Final = 2 * LONGEST_PAUSE_S

_Question: TypeAlias = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class _Waiter:
    """A claim that waits.

    Attributes:
        wake: Tells its client to ask again. False if the client is gone.
        lease_ends_at: Its client knows that a lease may end then, and asks again. Infinite: it knows of none.
        woken_at: When it was called, if it was since the claim last asked.
    """

    wake: Callable[[], bool]
    lease_ends_at: float
    woken_at: float | None = None


@dataclass(slots=True, eq=False)
class _Asked:
    """Claims that ask the same: the first of them, and all by their tokens in the order in which they came."""

    claim: commands.ClaimRequest
    waiters: dict[str, _Waiter] = field(default_factory=dict)


class WaitingClaims:
    """Claims that were handed nothing, and how to wake them, in the order in which they came.

    Only those are woken for which there are samples, so a put costs the same however many wait. They ask again then:
    nothing is handed to a client that may be gone. A claim that was dropped, and asks again, is the last in line.
    """

    def __init__(self) -> None:
        self._partitions: dict[str, dict[_Question, _Asked]] = {}
        # token -> partition, question, and when it was last asked; in the order of that
        self._asked: dict[str, tuple[str, _Question, float]] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, claim: commands.ClaimRequest, wake: Callable[[], bool], lease_ends_at: float, now: float) -> None:
        """A claim waits, or still waits. It keeps its place. It is told when a lease may end."""
        # two for each one that comes, so that clients which were killed do not pile up, and no call takes long
        for token, (_, _, asked_at) in list(islice(self._asked.items(), 2)):
            if now - asked_at > _ASKS_AT_LEAST_S:
                self.drop(token)
        # claims that ask the same are looked at once for all: 500 idle ranks cost a put what one does
        question = (
            claim.task_name,
            tuple(claim.required_fields),
            repr(claim.tag_filter),
            claim.batch_size,
            claim.sampler,
            claim.dp_rank,
            claim.dp_size,
            claim.batch_index,
            claim.batch_epoch,
        )
        known = self._asked.get(claim.token)
        if known is not None and known[:2] != (claim.partition_id, question):
            self.drop(claim.token)
        self._asked.pop(claim.token, None)
        self._asked[claim.token] = (claim.partition_id, question, now)
        questions = self._partitions.setdefault(claim.partition_id, {})
        asked = questions.get(question)
        if asked is None:
            asked = questions[question] = _Asked(claim)
        asked.waiters[claim.token] = _Waiter(wake, lease_ends_at)

    def drop(self, token: str) -> str | None:
        """A claim no longer waits. Returns its partition, or None if it did not wait."""
        place = self._asked.pop(token, None)
        if place is None:
            return None
        partition_id, question, _ = place
        questions = self._partitions[partition_id]
        del questions[question].waiters[token]
        if not questions[question].waiters:
            del questions[question]
            if not questions:
                del self._partitions[partition_id]
        return partition_id

    def wake(self, partition_id: str, num_ready: Callable[[commands.ClaimRequest], float], now: float) -> None:
        """Wakes the claims of a partition that can be answered now.

        Args:
            partition_id: The partition, which changed.
            num_ready: How many samples are ready for a claim. Infinite if it can be answered however many are ready.
            now: The time in seconds.
        """
        for asked in self._some(partition_id):
            left = num_ready(asked.claim)
            needed = asked.claim.batch_size * ranks_of(asked.claim)
            for token, waiter in list(asked.waiters.items()) if left >= needed else ():
                if left < needed:
                    break
                if self._is_woken(token, waiter, now):
                    left -= needed

    def tell(self, partition_id: str, lease_ends_at: float, now: float) -> None:
        """Wakes claims that do not know that a lease may end so soon: of those that ask the same, the first.

        It asks when the lease has ended, and others are woken then if they can be answered.
        """
        for asked in self._some(partition_id):
            while asked.waiters:
                token, waiter = next(iter(asked.waiters.items()))
                if waiter.lease_ends_at <= lease_ends_at or self._is_woken(token, waiter, now):
                    break

    def _is_woken(self, token: str, waiter: _Waiter, now: float) -> bool:
        """Wakes a claim, unless it was woken since it last asked. False if its client is gone, or takes too long to ask
        again: then it is dropped."""
        if waiter.woken_at is None and waiter.wake():
            # woken once only: a second wake before it asks would count samples for it twice
            waiter.woken_at = now
        if waiter.woken_at is not None and now - waiter.woken_at <= _ASKS_WITHIN_S:
            return True
        self.drop(token)
        return False

    def _some(self, partition_id: str) -> list[_Asked]:
        """A few of the questions of a partition: others at the next call, if there are more."""
        questions = self._partitions.get(partition_id, {})
        some = list(islice(questions.items(), _MOST_QUESTIONS))
        if len(questions) > len(some):
            for question, asked in some:
                del questions[question]
                questions[question] = asked
        return [asked for _, asked in some]
