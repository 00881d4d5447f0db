"""`LedgerService`: a ledger with a clock and a lock, which paces those who wait. What the host of a ledger serves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from dataplane_core.errors import CapacityExceededError, Shortfall
from dataplane_core.ledger.ledger import Due, Ledger, Located, Ref
from dataplane_core.ledger.pacing import LEAST_ROOM_PAUSE_S, Pacer
from dataplane_core.spec import Claim, PartitionInfo, SampleList, TagValue

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

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls one of this class's public methods by name; the one door for remote callers."""
        with self._lock:
            return getattr(self, f"_do_{method}")(*args, **kwargs)

    def _do_register(self, partition_id: str, *args: Any, **kwargs: Any) -> tuple[PartitionInfo, list[Ref]]:
        self._forget_explained(partition_id)
        return self._ledger.register(partition_id, *args, **kwargs)

    def _forget_explained(self, partition_id: str) -> None:
        for question in [each for each in self._explained if each[0] == partition_id]:
            del self._explained[question]

    def _do_describe(self, partition_id: str) -> PartitionInfo:
        return self._ledger.describe(partition_id)

    def _do_begin_put(self, *args: Any, ticket: str | None = None, **kwargs: Any) -> int:
        with self._paced(ticket):
            write_id = self._ledger.begin_put(*args, ticket=ticket, **kwargs, now=self._clock())
        if ticket is not None:
            self._pacer.leave(ticket)
        return write_id

    def _do_check_put(self, *args: Any, capacity_bytes: int | None, ticket: str | None = None) -> None:
        with self._paced(ticket):
            self._ledger.check_put(*args, capacity_bytes=capacity_bytes, ticket=ticket, now=self._clock())

    def _do_wait_for_room(self, ticket: str, size_bytes: int, wait_s: float) -> None:
        self._ledger.wait_for_room(ticket, size_bytes, now=self._clock(), wait_s=wait_s)
        if wait_s <= 0:
            self._pacer.leave(ticket)

    @contextmanager
    def _paced(self, ticket: str | None) -> Iterator[None]:
        """Tells a put that must wait for room when to ask again: soon at the head of the queue, others at the rate."""
        try:
            yield
        except CapacityExceededError as error:
            if ticket is not None and error.retryable:
                place = self._ledger.place_in_queue(ticket)
                pause_s = _FIRST_IN_QUEUE_S * 2**place if place < _NUM_HEAD else self._pacer.pause_s(ticket)
                error.ask_again_s = max(pause_s, LEAST_ROOM_PAUSE_S)
            raise

    def _do_commit_put(self, write_id: int) -> list[Ref]:
        return self._ledger.commit_put(write_id)

    def _do_put_tags(
        self, partition_id: str, sample_ids: Sequence[str], tags: Sequence[Mapping[str, TagValue]], epoch: str | None
    ) -> None:
        no_bytes = [0] * len(sample_ids)
        write_id = self._ledger.begin_put(
            partition_id, sample_ids, {}, no_bytes, tags, epoch, now=self._clock(), ttl_s=1.0
        )
        self._ledger.commit_put(write_id)

    def _do_abort_put(self, write_id: int) -> list[Ref]:
        return self._ledger.abort_put(write_id)

    def _do_locate(self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str]) -> Located:
        return self._ledger.locate(partition_id, sample_ids, fields)

    def _do_claim(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        explain: bool,
        token: str,
        **options: Any,
    ) -> Claim:
        question = (partition_id, task_name, tuple(required_fields), repr(options["tag_filter"]))
        told = self._explained.get(question) if explain else None
        start = time.thread_time()
        self._pacer.leave(token)
        claim = self._ledger.claim(
            partition_id,
            task_name,
            required_fields,
            batch_size,
            explain=explain and (told is None or told.stale_at <= time.monotonic()),
            token=token,
            now=self._clock(),
            **options,
        )
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
        if (
            not options["all_or_nothing"] or explain
        ):  # nobody waits, or not much longer: no slot is kept for the next question
            return claim
        return replace(claim, ask_again_s=self._pacer.pause_s(token))

    def _do_may_claim(self, *args: Any, **kwargs: Any) -> bool:
        return self._ledger.may_claim(*args, **kwargs, now=self._clock())

    def _do_ack(self, *args: Any, **kwargs: Any) -> None:
        self._ledger.ack(*args, **kwargs, now=self._clock())

    def _do_nack(self, *args: Any, **kwargs: Any) -> None:
        self._ledger.nack(*args, **kwargs, now=self._clock())

    def _do_renew(self, *args: Any, **kwargs: Any) -> None:
        self._ledger.renew(*args, **kwargs, now=self._clock())

    def _do_due(self) -> Due:
        return self._ledger.due(self._clock())

    def _do_expire(self, leases: Sequence[Sequence[Any]], writes: Sequence[int]) -> None:
        self._ledger.expire(leases, writes)

    def _do_consumed(self, partition_id: str, task_names: Sequence[str]) -> bool:
        return self._ledger.consumed(partition_id, task_names)

    def _do_clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> tuple[int, list[Ref]]:
        if sample_ids is None:  # while samples come and go, what was so a moment ago may be told
            self._forget_explained(partition_id)
        count, _ = self._ledger.clear(partition_id, sample_ids)
        return count, self._ledger.garbage(self._clock())

    def _do_collected(self, refs: Sequence[Ref]) -> None:
        self._ledger.collected(refs)

    def _do_list_samples(self, partition_id: str, tag_filter: Mapping[str, tuple[str, Any]] | None) -> SampleList:
        return self._ledger.list_samples(partition_id, tag_filter)

    def _do_held_bytes(self) -> int:
        return self._ledger.held_bytes
