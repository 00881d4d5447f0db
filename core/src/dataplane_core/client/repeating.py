"""Repeats an operation whose reply was lost, and says at the end whether it was carried out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NoReturn, TypeVar

from dataplane_core.errors import (
    BackendUnavailableError,
    CapacityExceededError,
    LostReplyError,
    OperationTimeoutError,
    Outcome,
)

_R = TypeVar("_R")

#: Seconds until the first repetition. Each later pause is twice as long, up to the most.
_FIRST_PAUSE_S: Final = 0.02
_MOST_PAUSE_S: Final = 0.5
_SAYS: Final[dict[Outcome, str]] = {
    "done": "It was done.",
    "not_done": "It was not done.",
    "unknown": "It may have been done or not.",
}


def carry_out_once(call: Callable[[], _R], deadline: float, repeatable: bool) -> _R:
    """Returns what a call returns. If its reply was lost, calls again until the deadline.

    Args:
        call: Calls the hook, each time with a request of the same id.
        deadline: On `time.monotonic`'s clock, in seconds.
        repeatable: Whether the backend carries out a repeated request once. If not, it is not repeated.

    Raises:
        LostReplyError: A reply was lost, and the store did not answer until the deadline.
        OperationTimeoutError, BackendUnavailableError: ``outcome`` and the message say whether it was carried out.
        Exception: Anything else that the call raises.
    """
    lost: LostReplyError | None = None
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return call()
        except CapacityExceededError:  # an answer: a request that was done before would not wait for room
            raise
        except (BackendUnavailableError, OperationTimeoutError) as error:
            last = error
        if isinstance(last, LostReplyError):
            lost = lost or last
        may_answer = isinstance(last, BackendUnavailableError) and last.retryable
        if lost is None or not repeatable or not may_answer or time.monotonic() + pause_s >= deadline:
            _raise_at_end(last, lost)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def _raise_at_end(last: BackendUnavailableError | OperationTimeoutError, lost: LostReplyError | None) -> NoReturn:
    """Raises the last error, or the first lost reply if the store did not answer after it."""
    if lost is None or lost is last or last.outcome == "done":
        _say(last)
        raise last
    _say(lost)
    lost.message += f" It was repeated: {last.message}"
    if isinstance(last, BackendUnavailableError) and not last.retryable:  # the store is gone for good
        lost.retryable, lost.hint = False, last.hint
    raise lost from last


def _say(error: BackendUnavailableError | OperationTimeoutError) -> None:
    """Adds to the message whether the operation was carried out."""
    words = _SAYS[error.outcome]
    if words not in error.message and (error.retryable or error.outcome != "unknown"):
        error.message = f"{error.message} {words}"
