"""`LedgerService`: a ledger with a clock and a lock, which paces those who wait. What the host of a ledger serves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from dataplane_core.errors import CapacityExceededError, Shortfall
from dataplane_core.ledger import commands
from dataplane_core.ledger.commands import Command, Reply
from dataplane_core.ledger.ledger import Ledger
from dataplane_core.ledger.pacing import LEAST_ROOM_PAUSE_S, Pacer
from dataplane_core.spec import Claim

__all__ = ["LedgerService"]

#: Seconds between two questions of the put that is the first in the queue for room.
_FIRST_IN_QUEUE_S: Final = 0.06
#: How many at the head of the queue ask more often than the others, each half as often as the one before it.
_NUM_HEAD: Final = 4
#: Share of a service's time that explaining timeouts of one question may take.
_EXPLAINING_SHARE: Final = 0.01
#: Seconds after which an explanation is not told again, even where explaining then takes more.
_STALE_AFTER_S: Final = 2.0
_MOST_EXPLAINED: Final = 256


@dataclass(frozen=True, slots=True)
class _Explained:
    """What kept the samples from a claim, told again to others who ask the same, while it is not stale."""

    shortfall: Shortfall
    stale_at: float


class LedgerService:
    """A `Ledger` with a clock and a lock: what a host serves.

    Args:
        capacity_bytes: As for `Ledger`.
        clock: Gives the time in seconds.
        ledger: A ledger to go on with; then ``capacity_bytes`` is its own.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        self._ledger = Ledger(capacity_bytes=capacity_bytes) if ledger is None else ledger
        self._clock = clock
        self._lock = threading.Lock()
        self._pacer = Pacer()  # of all who wait, for samples or for room
        self._explained: dict[tuple[Any, ...], _Explained] = {}

    @property
    def ledger(self) -> Ledger:
        """The ledger, for a host that keeps others out meanwhile."""
        return self._ledger

    def call(self, command: Command[Reply]) -> Reply:
        """Carries a command out, now and alone; the one door for all callers."""
        with self._lock:
            match command:
                case commands.ClaimSamples():
                    return cast("Reply", self._claim(command))
                # while samples come and go, what was so a moment ago may be told
                case commands.Register() | commands.Clear(sample_ids=None):
                    for question in [each for each in self._explained if each[0] == command.partition_id]:
                        del self._explained[question]
                case commands.BeginPut():
                    return cast("Reply", self._put(command, command))
                case commands.CheckPut():
                    return cast("Reply", self._put(command, command.put))
                case commands.WaitForRoom() if command.wait_s <= 0:
                    self._pacer.leave(command.ticket)
            return self._ledger.apply(command, self._clock())

    def _put(self, command: Command[Reply], put: commands.BeginPut) -> Reply:
        """Tells a put that must wait for room when to ask again: soon at the head of the queue, others at the rate."""
        ticket = put.ticket
        try:
            reply = self._ledger.apply(command, self._clock())
        except CapacityExceededError as error:
            if ticket is not None and error.retryable:
                place = self._ledger.place_in_queue(ticket)
                pause_s = _FIRST_IN_QUEUE_S * 2**place if place < _NUM_HEAD else self._pacer.pause_s(ticket)
                error.ask_again_s = max(pause_s, LEAST_ROOM_PAUSE_S)
            raise
        if ticket is not None and command is put:
            self._pacer.leave(ticket)
        return reply

    def _claim(self, command: commands.ClaimSamples) -> Claim:
        question = (command.partition_id, command.task_name, tuple(command.required_fields), repr(command.tag_filter))
        told = self._explained.get(question) if command.explain else None
        start = time.thread_time()
        self._pacer.leave(command.token)
        explain = command.explain and (told is None or told.stale_at <= time.monotonic())
        claim = self._ledger.apply(replace(command, explain=explain), self._clock())
        if claim.sample_ids or claim.exhausted:
            return claim
        if claim.shortfall is not None:
            if len(self._explained) >= _MOST_EXPLAINED:
                self._explained.clear()
            cost_s = time.thread_time() - start
            stale_at = time.monotonic() + min(cost_s / _EXPLAINING_SHARE, _STALE_AFTER_S)
            self._explained[question] = _Explained(claim.shortfall, stale_at)
        elif told is not None:
            claim = replace(claim, shortfall=told.shortfall)
        if not command.all_or_nothing or command.explain:
            return claim  # nobody waits, or not much longer: no slot is kept for the next question
        return replace(claim, ask_again_s=self._pacer.pause_s(command.token))
