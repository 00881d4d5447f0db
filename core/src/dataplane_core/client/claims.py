"""What a claim does: it is checked, asks the store, waits, and returns a meta; and what settles its leases."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

from dataplane_core.arguments import Index, Seconds, check_meta, checked, checked_as
from dataplane_core.client.connection import Connection, Waiters, check_counts
from dataplane_core.client.explaining import PATIENCE_S, explain, warn
from dataplane_core.client.partitions import advise, opening
from dataplane_core.errors import (
    BackendError,
    ClaimTimeoutError,
    ClientClosedError,
    InvalidRequestError,
    Shortfall,
    Verdict,
    lack_of_rollout,
    preview,
)
from dataplane_core.ledger import backoff_s
from dataplane_core.meta import KVBatchMeta, lengths_of
from dataplane_core.spec import Capability, Claim, ClaimRequest, TagFilter, check_tag_filter
from dataplane_core.spec.costs import Balance
from dataplane_core.spec.waking import Bell

#: Of how many ranks of tasks a client counts the batches. Beyond, it forgets those that it was given longest ago.
_MOST_COUNTED: Final = 4096
#: Claims that began together tell why they wait within so much more of the time, not all at once.
_SPREAD: Final = 0.25
#: A claim without a timeout looks at least once in so many ``warn_after_s`` why it waits.
_RAREST: Final = 5
#: Seconds that the last question of a waiting claim may take after its timeout: a busy store still says why.
_LAST_ASK_S: Final = 5.0

#: What a claim wants next: its request answered (`ask`), a wait for a bell of at most so many seconds, or the result of
#: a function.
Step: TypeAlias = ClaimRequest | tuple[Any, float] | Callable[[], Any]


def checked_claim(
    connection: Connection,
    *,
    timeout_s: float = 0.0,
    batch_index: int | None = None,
    tag_filter: TagFilter | None = None,
    balance: Mapping[str, Any] | None = None,
    **claim: Any,
) -> ClaimRequest:
    """The request of a claim, from the arguments of `claim_meta`, checked."""
    connection.require(Capability.CLAIMS, "claim_meta")
    checked_as("claim_meta: timeout_s", Seconds, timeout_s)
    condition = None if tag_filter is None else check_tag_filter(tag_filter)
    cost = None if balance is None else Balance.read("claim_meta: balance", balance)
    request = checked("claim_meta", ClaimRequest, tag_filter=condition, balance=cost, **claim)
    request.required_fields = list(dict.fromkeys(request.required_fields))
    request.strict = connection.config.strict_fields
    if connection.config.open_partitions:
        request.opens = opening(connection, request.partition_id, request.required_fields, [request.task_name])
    if request.sampler != "first_write" or request.dp_rank is not None:
        connection.require(Capability.SAMPLERS, "claim_meta(sampler=..., dp_rank=...)")
    if request.lease_s is not None:
        connection.require(Capability.LEASES, "claim_meta(lease_s=...)")
    if request.tag_filter is not None:
        connection.require(Capability.TAG_FILTERS, "claim_meta(tag_filter=...)")
    if batch_index is None:
        with connection.state:
            key = (request.partition_id, request.task_name, request.dp_rank)
            request.batch_epoch, request.batch_index = connection.batches.get(key, (None, 0))
    elif request.dp_rank is None:
        raise InvalidRequestError("claim_meta refused: batch_index needs a dp_rank: it counts the batches of a rank.")
    else:
        request.batch_index = checked_as("claim_meta: batch_index", Index, batch_index)
    return request


def claim_now(
    connection: Connection,
    request: ClaimRequest,
    timeout_s: float | None,
    waiters: Waiters,
    since: Callable[[], float] | None = None,
) -> tuple[KVBatchMeta, Claim]:
    """Claims, and waits up to ``timeout_s`` unless that is None, or until ``waiters`` are closed."""
    steps = claiming(connection, request, timeout_s, waiters, Bell, since)
    result: Any = None
    try:
        try:
            while True:
                step = steps.send(result)
                if isinstance(step, ClaimRequest):
                    result = claim = ask(connection, step)
                    if claim.lease_tokens and request.dp_rank is None:  # a batch of a rank is given to its next claim
                        connection.handed[request.token] = threading.get_ident(), request, claim
                elif callable(step):
                    result = step()
                else:
                    bell, pause_s = step
                    bell.wait(pause_s)
        except StopIteration as end:
            batch: tuple[KVBatchMeta, Claim] = end.value
        if connection.closes_after is not None:
            raise ClientClosedError("the client was closed while the store answered a claim.")
        return batch
    except BaseException:  # an interrupt, or the client was closed
        connection.give_back(request.token)
        raise
    finally:
        steps.close()
        connection.handed.pop(request.token, None)


def claiming(
    connection: Connection,
    request: ClaimRequest,
    timeout_s: float | None,
    waiters: Waiters,
    new_bell: Callable[[], Any],
    since: Callable[[], float] | None = None,
) -> Generator[Step, Any, tuple[KVBatchMeta, Claim]]:
    """The steps of a claim, which neither asks nor sleeps itself: each client takes them in its own way. They return
    its meta, and the reply. The request is changed before each question, except for its token.

    Args:
        timeout_s: None: it does not wait. Infinity: until those that it waits for have ended.
        new_bell: Makes what ends a pause: a `Bell`, or what rings and waits as one does.
        since: The moment from which ``timeout_s`` counts; it may change. Infinity: it does not count yet. Default: now.
    """
    start = time.monotonic()
    work = connection.work.begin_claim(request)
    claim = Claim()
    try:
        if timeout_s is None:
            claim = yield request
        else:
            gives_up = (since() if since else start) + timeout_s
            request.deadline = max(gives_up, start + _LAST_ASK_S)
            request.explain = start >= gives_up  # it is the last question
            bell = new_bell()
            if Capability.WAKES in connection.capabilities and not request.explain:
                request.wake = bell.ring
            claim = yield request
            if not claim.answered:
                since = since or (lambda: start)
                claim = yield from _waiting(connection, request, claim, timeout_s, waiters, bell, start, since)
        if claim.sample_ids:
            work.served_at = time.monotonic()
    finally:
        connection.work.end_claim(work, request)
        if request.wake is not None and not claim.answered:  # else nobody keeps it
            connection.entering("claim_meta", connection.backend.stop_waiting)(request.token)
    return claimed(connection, request, claim), claim


def _waiting(
    connection: Connection,
    request: ClaimRequest,
    claim: Claim,
    timeout_s: float,
    waiters: Waiters,
    bell: Any,
    start: float,
    since: Callable[[], float],
) -> Generator[Step, Any, Claim]:
    """The steps of a claim that was not answered at once, until it is."""
    warn_after_s = connection.config.warn_after_s or (PATIENCE_S if timeout_s == math.inf else math.inf)
    rarest_s = _RAREST * warn_after_s if timeout_s == math.inf else math.inf
    warn_at = start + spread(warn_after_s)
    over: Verdict | None = None  # why no samples come any longer
    with waiters.waiting(bell.ring):
        while not claim.answered:
            if request.explain:
                error = _timed_out(request, timeout_s, claim)
                yield partial(explain, connection, error, request, time.monotonic() - start, over)
                raise error
            now, gives_up = time.monotonic(), since() + timeout_s
            pause_s = claim.ask_again_s  # if it is woken
            if request.wake is None or not pause_s:
                pause_s = max(backoff_s(now - start), pause_s)
            waiters.check()
            yield bell, max(0.0, min(pause_s, gives_up - now, warn_at - now))
            waiters.check()
            waited_s = time.monotonic() - start
            if start + waited_s >= warn_at:
                warn_at = start + spread(min(2 * waited_s, waited_s + rarest_s))
                verdict = yield partial(warn, connection, request, waited_s, since() + timeout_s)
                if verdict is not None and verdict.is_over and timeout_s == math.inf and since() < math.inf:
                    over, timeout_s = verdict, time.monotonic() - since()
            now, gives_up = time.monotonic(), since() + timeout_s
            request.deadline = max(gives_up, now + _LAST_ASK_S)
            request.explain = now >= gives_up
            claim = yield request
    return claim


def spread(seconds: float) -> float:
    """Somewhat longer, by chance."""
    return seconds * random.uniform(1.0, 1.0 + _SPREAD)


def _timed_out(request: ClaimRequest, timeout_s: float, claim: Claim) -> ClaimTimeoutError:
    what = "groups" if claim.counts_groups else "samples"
    return ClaimTimeoutError(
        f"claim_meta('{request.partition_id}', '{request.task_name}') timed out after {timeout_s:g} s: "
        f"{claim.num_ready} of {request.batch_size} {what} "
        f"were ready with {preview(request.required_fields)}. {_describe(claim.shortfall)}",
        num_ready=claim.num_ready,
        shortfall=claim.shortfall,
    )


def _describe(shortfall: Shortfall | None) -> str:
    """A shortfall as a sentence."""
    causes: list[str] = []
    if shortfall is not None:
        if shortfall.num_leased:
            who = [
                f"'{lease.sample_id}' by {lease.holder or 'an unnamed client'} for another {lease.left_s:.1f} s"
                for lease in shortfall.leased
            ]
            causes.append(_kind(shortfall.num_leased, "leased", who))
        if shortfall.num_not_matching:
            causes.append(_kind(shortfall.num_not_matching, "passed over by the tag filter", ()))
        if shortfall.num_incomplete:
            groups = [f"'{name}' holds {count}" for name, count in shortfall.incomplete_groups.items()]
            groups += [lack_of_rollout(*rollout) for rollout in list(shortfall.unsealed.items())[:1]]
            causes.append(_kind(shortfall.num_incomplete, "in groups that are not whole", groups))
        num_lacking = max(shortfall.num_lacking, len(shortfall.missing_cells))  # a backend may name cells uncounted
        if num_lacking:
            cells = [f"'{sample_id}' lacks {preview(names)}" for sample_id, names in shortfall.missing_cells.items()]
            causes.append(_kind(num_lacking, "held back by fields not yet produced", cells))
    return f"Of the others, {'; '.join(causes)}." if causes else "The partition holds no others for this task."


def _kind(count: int, what: str, named: tuple[str, ...] | list[str]) -> str:
    text = f"{count} {'is' if count == 1 else 'are'} {what}"
    return f"{text} ({', '.join(named)}{', ...' if count > len(named) else ''})" if named else text


def claimed(connection: Connection, request: ClaimRequest, claim: Claim) -> KVBatchMeta:
    """The meta of a claim. Counts the batches of a rank."""
    if request.dp_rank is not None and (claim.sample_ids or claim.num_ranks is not None):
        number = request.batch_index if request.batch_epoch in (None, claim.epoch) else 0
        key = (request.partition_id, request.task_name, request.dp_rank)
        with connection.state:
            epoch, count = connection.batches.pop(key, (None, 0))
            count = count if epoch == claim.epoch else 0
            connection.batches[key] = (claim.epoch, count + (number == count))
            if len(connection.batches) > _MOST_COUNTED:
                del connection.batches[next(iter(connection.batches))]
    tags = list(map(dict, claim.tags))
    return KVBatchMeta(
        request.partition_id,
        request.task_name,
        list(claim.sample_ids),
        fields=list(request.required_fields),
        sequence_lengths=lengths_of(tags),
        tags=tags,
        lease_tokens=None if claim.lease_tokens is None else list(claim.lease_tokens),
    )


def ask(connection: Connection, request: ClaimRequest) -> Claim:
    """Asks once."""
    claim: Claim = connection.call(request)
    where = f"claim_meta('{request.partition_id}', '{request.task_name}')"
    request.opens = None  # if the partition is cleared while the claim waits, it ends
    if claim.advice:
        advise(connection, where, claim.advice)
    counts = {"tags": len(claim.tags)}
    if request.lease_s is not None or claim.lease_tokens is not None:
        counts["lease tokens"] = len(claim.lease_tokens or ())
    check_counts(where, len(claim.sample_ids), **counts)
    is_counted = request.dp_rank is None and not claim.counts_groups  # a rank's batch has the size it got
    if len(claim.sample_ids) > request.batch_size and is_counted:
        raise BackendError(
            f"{where}: the backend's reply holds {len(claim.sample_ids)} samples. Expected at most "
            f"{request.batch_size}."
        )
    return claim


def settle(
    connection: Connection, operation: str, request_type: Callable[..., Any], meta: KVBatchMeta, **extra: Any
) -> None:
    """Acks, nacks or renews the leases of a meta: all of them, or none."""
    check_meta(f"{operation}: meta", meta)
    partition = filter(None, [meta.partition_id])  # an empty meta may have none
    with connection.operation(operation, *partition, needs=Capability.LEASES):
        if not meta.sample_ids:
            return
        if meta.task_name is None or meta.lease_tokens is None:
            raise InvalidRequestError(
                f"{operation}('{meta.partition_id}', {meta.size} samples) refused: the meta carries no "
                f"{'task name' if meta.task_name is None else 'lease tokens'}. Expected a meta from "
                "claim_meta(lease_s=...), or a part of one."
            )
        tokens = dict(zip(meta.sample_ids, meta.lease_tokens, strict=True))
        request = request_type(
            partition_id=meta.partition_id,
            task_name=meta.task_name,
            sample_ids=list(tokens),
            lease_tokens=list(tokens.values()),
            **extra,
        )
        num_samples: int = connection.call(request)
        check_counts(f"{operation}('{meta.partition_id}')", len(tokens), rows=num_samples)
