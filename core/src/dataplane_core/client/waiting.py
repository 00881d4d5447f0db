"""The waiting of a blocking claim, and the message of its timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from dataplane_core.errors import ClaimTimeoutError, ClientClosedError, Shortfall, preview
from dataplane_core.ledger import LONGEST_PAUSE_S, Pacer, backoff_s
from dataplane_core.spec import Claim, ClaimRequest

__all__ = ["wait_for_claim"]

#: Seconds that the last question of a waiting claim may take after its timeout.
_LAST_ASK_S: Final = 1.0


def wait_for_claim(
    request: ClaimRequest,
    ask: Callable[[ClaimRequest], Claim],
    timeout_s: float,
    pacer: Pacer,
    closed: threading.Event,
) -> Claim:
    """Calls the hook ``claim`` until it hands out samples, or the partition can give no more.

    Args:
        request: The request. This function changes it between calls, except for its token.
        ask: Calls the hook once, and does not change the request.
        timeout_s: How long to wait, in seconds.
        pacer: Shared by all claims that wait on this client.
        closed: Set when the client is closed.

    Raises:
        ClaimTimeoutError: The timeout passed. The message says why the samples were not ready.
        ClientClosedError: The client was closed.
    """
    start = time.monotonic()
    give_up = start + timeout_s
    pause_s = 0.0
    try:
        while True:
            now = time.monotonic()
            request.deadline = max(give_up, now + _LAST_ASK_S)
            request.explain = give_up - now <= pause_s
            claim = ask(request)
            if claim.sample_ids or claim.exhausted:
                return claim
            request.since = claim.version
            now = time.monotonic()
            if request.explain and now >= give_up:
                where = f"claim_meta('{request.partition_id}', '{request.task_name}')"
                raise ClaimTimeoutError(
                    f"{where} timed out after {timeout_s:g} s: {claim.num_ready} of {request.batch_size} samples were "
                    f"ready with {preview(request.required_fields)}. {_describe(claim.shortfall)}",
                    num_ready=claim.num_ready,
                    shortfall=claim.shortfall,
                )
            pause_s = max(backoff_s(now - start), claim.ask_again_s, pacer.pause_s(request.token))
            pause_s = min(pause_s, LONGEST_PAUSE_S)
            if closed.wait(max(0.0, min(pause_s, give_up - now))):
                raise ClientClosedError("the client was closed while a claim waited.")
    finally:
        pacer.leave(request.token)


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
