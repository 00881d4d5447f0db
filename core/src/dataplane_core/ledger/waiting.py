"""The claims that wait for a ledger's rows, and which of them to wake. Pure, like the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeAlias

from dataplane_core.ledger import commands
from dataplane_core.ledger.samplers import SAMPLERS

__all__ = ["WaitingClaims"]

#: How many questions of a partition are looked at after each change of it. The others are asked again by their clients.
_MOST_QUESTIONS: Final = 16

_Question: TypeAlias = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class _Waiter:
    """A claim that waits.

    Attributes:
        wake: Tells its client to ask again. False if the client is gone.
        woken: Whether it was called since the claim last asked.
    """

    wake: Callable[[], bool]
    woken: bool = False


@dataclass(slots=True, eq=False)
class _Asked:
    """Claims that ask the same: the first of them, and all by their tokens in the order in which they came."""

    claim: commands.ClaimSamples
    waiters: dict[str, _Waiter] = field(default_factory=dict)


class WaitingClaims:
    """Claims that were handed nothing, and how to wake them, in the order in which they came.

    Only those are woken for which there are samples, so a put costs the same however many wait. They ask again then:
    nothing is handed to a client that may be gone. A claim that does not ask again keeps its place until it is dropped.
    """

    def __init__(self) -> None:
        self._partitions: dict[str, dict[_Question, _Asked]] = {}
        self._asked: dict[str, tuple[str, _Question]] = {}  # token -> partition and question

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, claim: commands.ClaimSamples, wake: Callable[[], bool]) -> None:
        """A claim waits, or still waits. It keeps its place."""
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
        place = (claim.partition_id, question)
        if self._asked.get(claim.token) != place:
            self.drop(claim.token)
            self._asked[claim.token] = place
        questions = self._partitions.setdefault(claim.partition_id, {})
        asked = questions.get(question)
        if asked is None:
            asked = questions[question] = _Asked(claim)
        waiter = asked.waiters.get(claim.token)
        if waiter is None:
            asked.waiters[claim.token] = _Waiter(wake)
        else:
            waiter.wake, waiter.woken = wake, False

    def drop(self, token: str) -> str | None:
        """A claim no longer waits. Returns its partition, or None if it did not wait."""
        place = self._asked.pop(token, None)
        if place is None:
            return None
        partition_id, question = place
        questions = self._partitions[partition_id]
        del questions[question].waiters[token]
        if not questions[question].waiters:
            del questions[question]
            if not questions:
                del self._partitions[partition_id]
        return partition_id

    def wake(self, partition_id: str, num_ready: Callable[[commands.ClaimSamples], float]) -> None:
        """Wakes the claims of a partition that can be answered now.

        Args:
            partition_id: The partition, which changed.
            num_ready: How many samples are ready for a claim. Infinite if it can be answered however many are ready.
        """
        questions = self._partitions.get(partition_id)
        if questions is None:
            return
        looked_at = list(islice(questions.items(), _MOST_QUESTIONS))
        for question, asked in looked_at:
            if len(questions) > len(looked_at):  # the next change looks at others
                del questions[question]
                questions[question] = asked
            left = num_ready(asked.claim)
            needed = asked.claim.batch_size
            if SAMPLERS[asked.claim.sampler].for_all_ranks:
                needed *= asked.claim.dp_size or 1
            for token, waiter in list(asked.waiters.items()) if left >= needed else ():
                if left < needed:
                    break
                if waiter.woken or waiter.wake():
                    waiter.woken = True
                    left -= needed
                else:
                    self.drop(token)
