"""The waiting of a blocking claim, for the synchronous and the asyncio client, and the message of its timeout."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from dataplane_core.client.announcing import Work
from dataplane_core.client.entrance import Entrance
from dataplane_core.errors import ClaimTimeoutError, ClientClosedError, Shortfall, Verdict, preview
from dataplane_core.ledger import backoff_s
from dataplane_core.spec import (
    Claim,
    ClaimRequest,
)
from dataplane_core.spec.waking import (
    Bell,
    Wake,
)

#: Claims that began together tell why they wait within so much more of the time, not all at once.
_SPREAD: Final = 0.25
#: A claim without a timeout looks at least once in so many ``warn_after_s`` why it waits.
_RAREST: Final = 5
#: Seconds that the last question of a waiting claim may take after its timeout: a busy store still says why.
_LAST_ASK_S: Final = 5.0


class ClaimWait:
    """A blocking claim that waits: what to ask next, when, and until when. It neither asks nor sleeps itself.

    The synchronous and the asyncio client use it. It waits while the ``with`` of `woken_by` lasts.

    Args:
        request: The request. This object changes it before each question, except for its token.
        timeout_s: How long to wait, in seconds. Infinity: until `give_up`.
        wakes: Whether the backend wakes claims.
        entrance: The way into the backend.
        since: The moment from which ``timeout_s`` counts; it may change. Infinity: it does not count yet. Default: now.
        work: Where it is noted that the claim waits.
        warn_after_s: Seconds after which its user is told why it waits, and again each time that it has waited twice as
            long, or somewhat later; sooner if there is no timeout. None: never.

    Attributes:
        verdict: Why it has given up before its timeout.
    """

    def __init__(
        self,
        request: ClaimRequest,
        timeout_s: float,
        *,
        wakes: bool,
        entrance: Entrance,
        since: Callable[[], float] | None = None,
        work: Work,
        warn_after_s: float | None = None,
    ) -> None:
        self.request = request
        self._work = work
        self._wakes = wakes
        self._entrance = entrance
        self._timeout_s = timeout_s
        self.verdict: Verdict | None = None
        self._start = time.monotonic()
        self._since = since or (lambda: self._start)
        self._warn_at = math.inf if warn_after_s is None else self._start + _spread(warn_after_s)
        self._rarest_s = math.inf if warn_after_s is None or timeout_s < math.inf else _RAREST * warn_after_s

    @property
    def waited_s(self) -> float:
        """Seconds for which it has waited."""
        return time.monotonic() - self._start

    @property
    def gives_up_at(self) -> float:
        """When its timeout will have passed, on `time.monotonic`'s clock."""
        return self._since() + self._timeout_s

    def must_warn(self) -> bool:
        """Whether its user is to be told now why it waits."""
        is_due = time.monotonic() >= self._warn_at
        if is_due:
            self._warn_at = self._start + _spread(min(2 * self.waited_s, self.waited_s + self._rarest_s))
        return is_due

    def give_up(self, verdict: Verdict) -> None:
        """Ends a wait without a timeout at the next question, unless its time does not count yet."""
        since = self._since()
        if self._timeout_s == math.inf and since < math.inf:
            self.verdict, self._timeout_s = verdict, time.monotonic() - since

    @contextmanager
    def woken_by(self, notify: Callable[[], None]) -> Iterator[None]:
        """While the ``with`` lasts, ``notify`` is called when the claim should ask again before its pause is over."""
        try:
            if self._wakes:
                self.request.wake = Wake(notify)
            self._work.waits[self.request.token] = self._start
            yield
        finally:
            self._work.waits.pop(self.request.token, None)
            if self.request.wake is not None:
                self._entrance.enter("claim_meta", self.request.wake.end)

    def prepare(self) -> ClaimRequest:
        """The request of the next question."""
        now = time.monotonic()
        give_up = self.gives_up_at
        self.request.deadline = max(give_up, now + _LAST_ASK_S)
        self.request.explain = now >= give_up  # it is the last question
        return self.request

    def pause_s(self, claim: Claim) -> float | None:
        """Seconds until the next question after this answer. None: the claim is complete.

        Raises:
            ClaimTimeoutError: The timeout passed. The message says why the samples were not ready.
        """
        if claim.answered:
            return None
        request = self.request
        request.since = claim.version
        if request.explain:
            where = f"claim_meta('{request.partition_id}', '{request.task_name}')"
            raise ClaimTimeoutError(
                f"{where} timed out after {self._timeout_s:g} s: {claim.num_ready} of {request.batch_size} samples "
                f"were ready with {preview(request.required_fields)}. {_describe(claim.shortfall)}",
                num_ready=claim.num_ready,
                shortfall=claim.shortfall,
            )
        now = time.monotonic()
        give_up = self.gives_up_at
        pause_s = claim.ask_again_s  # if it is woken
        if request.wake is None or not pause_s:
            pause_s = max(backoff_s(now - self._start), pause_s)
        return max(0.0, min(pause_s, give_up - now, self._warn_at - now))


class Waiters:
    """What waits on a client or a stream, to be woken when that closes. Safe for threads.

    Args:
        told: What the error says that a waiter gets then.

    Attributes:
        closed: Whether it was closed.
    """

    def __init__(self, told: str = "the client was closed while a claim waited.") -> None:
        self._told = told
        self._wakes: set[Callable[[], None]] = set()
        self.closed = False

    @contextmanager
    def waiting(self, wake: Callable[[], None]) -> Iterator[None]:
        """While the ``with`` lasts, ``wake`` is called when this closes, or at once if it is closed."""
        try:
            self._wakes.add(wake)
            if self.closed:
                wake()
            yield
        finally:
            self._wakes.discard(wake)

    def check(self) -> None:
        """Raises `ClientClosedError` if it was closed."""
        if self.closed:
            raise ClientClosedError(self._told)

    def wake(self) -> None:
        """Wakes all, so that they ask again now."""
        for wake in list(self._wakes):
            wake()

    def close(self) -> None:
        """Wakes all, for the last time."""
        self.closed = True
        self.wake()


def wait_for_claim(
    wait: ClaimWait, ask: Callable[[ClaimRequest], Claim], waiters: Waiters, warn: Callable[[], None]
) -> Claim:
    """Asks until the hook ``claim`` hands out samples, or the partition can give no more.

    Args:
        wait: The claim.
        ask: Calls the hook once, and does not change the request.
        waiters: Those of the client.
        warn: Tells the user why it waits.

    Raises:
        ClaimTimeoutError: The timeout passed.
        ClientClosedError: The client was closed.
    """
    bell = Bell()
    with wait.woken_by(bell.ring), waiters.waiting(bell.ring):
        while True:
            claim = ask(wait.prepare())
            pause_s = wait.pause_s(claim)
            if pause_s is None:
                return claim
            waiters.check()
            bell.wait(pause_s)
            waiters.check()
            if wait.must_warn():
                warn()


def _spread(seconds: float) -> float:
    return seconds * random.uniform(1.0, 1.0 + _SPREAD)


def _describe(shortfall: Shortfall | None) -> str:
    """A shortfall as a sentence."""
    told: list[str] = []
    if shortfall is not None:
        if shortfall.num_leased:
            who = [
                f"'{each.sample_id}' by {each.holder or 'an unnamed client'} for another {each.left_s:.1f} s"
                for each in shortfall.leased
            ]
            told.append(_kind(shortfall.num_leased, "leased", who))
        if shortfall.num_not_matching:
            told.append(_kind(shortfall.num_not_matching, "passed over by the tag filter", ()))
        if shortfall.num_incomplete:
            groups = [f"'{name}' holds {count}" for name, count in shortfall.incomplete_groups.items()]
            told.append(_kind(shortfall.num_incomplete, "in groups that are not whole", groups))
        num_lacking = max(shortfall.num_lacking, len(shortfall.missing_cells))  # a backend may name cells uncounted
        if num_lacking:
            cells = [f"'{each}' lacks {preview(names)}" for each, names in shortfall.missing_cells.items()]
            told.append(_kind(num_lacking, "held back by fields not yet produced", cells))
    return f"Of the others, {'; '.join(told)}." if told else "The partition holds no others for this task."


def _kind(count: int, what: str, named: tuple[str, ...] | list[str]) -> str:
    text = f"{count} {'is' if count == 1 else 'are'} {what}"
    return f"{text} ({', '.join(named)}{', ...' if count > len(named) else ''})" if named else text
