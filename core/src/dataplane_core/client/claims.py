"""What a claim does: it is checked, asks the store, waits, and returns a meta; and what settles its leases."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from dataplane_core.arguments import Index, Seconds, check_meta, checked, checked_as
from dataplane_core.client.connection import Connection, check_counts
from dataplane_core.client.explaining import PATIENCE_S, begin_work, explain, look, work_of
from dataplane_core.client.registering import must_prepare, prepare_claim
from dataplane_core.client.waiting import ClaimWait, Waiters, wait_for_claim
from dataplane_core.errors import BackendError, ClaimTimeoutError, ClientClosedError, InvalidRequestError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import (
    Capability,
    Claim,
    ClaimRequest,
    TagFilter,
    check_tag_filter,
)
from dataplane_core.spec.tags import lengths_of

#: Of how many ranks of tasks a client counts the batches. Beyond, it forgets those that it was given longest ago.
_MOST_COUNTED: Final = 4096


def checked_claim(
    connection: Connection, timeout_s: float, batch_index: int | None, tag_filter: TagFilter | None, **claim: Any
) -> ClaimRequest:
    """The request of a claim, from the arguments of `claim_meta`, checked."""
    connection.require(Capability.CLAIMS, "claim_meta")
    checked_as("claim_meta: timeout_s", Seconds, timeout_s)
    request = checked("claim_meta", ClaimRequest, tag_filter=check_tag_filter(tag_filter), **claim)
    request.required_fields = list(dict.fromkeys(request.required_fields))
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


def claim_until(
    connection: Connection,
    request: ClaimRequest,
    timeout_s: float | None,
    waiters: Waiters,
    since: Callable[[], float] | None = None,
) -> tuple[KVBatchMeta, Claim]:
    """Claims, and waits up to ``timeout_s`` unless that is None, or until ``waiters`` are closed."""
    if must_prepare(connection, request):
        prepare_claim(connection, request)
    try:
        if timeout_s is None:
            begin_work(connection, request)
            claim = _claim_noted(connection, request)
        else:
            wait = wait_of(connection, request, timeout_s, since)

            try:
                claim = wait_for_claim(
                    wait, partial(_claim_noted, connection), waiters, partial(look, connection, request, wait)
                )
            except ClaimTimeoutError as error:
                explain(connection, error, request, wait)
                raise
        if connection.closes_after is not None:
            raise ClientClosedError("the client was closed while the store answered a claim.")
        return claimed(connection, request, claim), claim
    except BaseException:  # an interrupt, or the client was closed
        connection.give_back(request.token)
        raise
    finally:
        connection.handed.pop(request.token, None)


def _claim_noted(connection: Connection, request: ClaimRequest) -> Claim:
    claim = ask(connection, request)
    if claim.lease_tokens and request.dp_rank is None:  # a batch of a rank is given to its next claim
        connection.handed[request.token] = threading.get_ident(), request, claim
    return claim


def wait_of(
    connection: Connection, request: ClaimRequest, timeout_s: float, since: Callable[[], float] | None
) -> ClaimWait:
    """How a blocking claim waits."""
    wakes = Capability.WAKES in connection.capabilities
    return ClaimWait(
        request,
        timeout_s,
        wakes=wakes,
        entrance=connection.entrance,
        since=since,
        work=begin_work(connection, request),
        warn_after_s=connection.config.warn_after_s or (PATIENCE_S if timeout_s == math.inf else None),
    )


def claimed(connection: Connection, request: ClaimRequest, claim: Claim) -> KVBatchMeta:
    """The meta of a claim. Counts the batches of a rank."""
    if claim.sample_ids:
        work_of(connection, request).end(len(claim.sample_ids))
    if request.dp_rank is not None and (claim.sample_ids or claim.num_ranks is not None):
        given = request.batch_index if request.batch_epoch in (None, claim.epoch) else 0
        key = (request.partition_id, request.task_name, request.dp_rank)
        with connection.state:
            epoch, count = connection.batches.pop(key, (None, 0))
            count = count if epoch == claim.epoch else 0
            connection.batches[key] = (claim.epoch, count + (given == count))
            if len(connection.batches) > _MOST_COUNTED:
                del connection.batches[next(iter(connection.batches))]
    tags = [dict(row) for row in claim.tags]
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
    """Calls the hook with a copy, since middleware changes the requests that it is given."""
    copied = replace(
        request,
        required_fields=list(request.required_fields),
        tag_filter=None if request.tag_filter is None else dict(request.tag_filter),
    )
    claim = connection.call("claim", copied, Claim)
    where = f"claim_meta('{request.partition_id}', '{request.task_name}')"
    counts = {"tags": len(claim.tags)}
    if request.lease_s is not None or claim.lease_tokens is not None:
        counts["lease tokens"] = len(claim.lease_tokens or ())
    check_counts(where, len(claim.sample_ids), **counts)
    if len(claim.sample_ids) > request.batch_size and request.dp_rank is None:  # a rank's batch has the size it got
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
            deadline=connection.deadline(),
            **extra,
        )

        def copied() -> Any:
            return replace(request, sample_ids=list(tokens), lease_tokens=list(tokens.values()))

        reply = connection.call_once(operation, copied, int, request.deadline)
        check_counts(f"{operation}('{meta.partition_id}')", len(tokens), rows=reply)
