"""Turns the scripts' refusals into the errors that a user sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

from dataplane_core.errors import (
    BackendError,
    InvalidRequestError,
    LeaseExpiredError,
    LostSamplesError,
    MissingDataError,
    SchemaMismatchError,
    StalePartitionError,
    UnknownPartitionError,
    UnknownTaskError,
    preview,
)
from dataplane_core.ledger import group_of, too_many_samples
from dataplane_core.spec import (
    AckRequest,
    ClaimRequest,
    FieldSpec,
    GetRequest,
    NackRequest,
    PutRequest,
    RenewRequest,
)
from dataplane_redis._sentinel import Service
from dataplane_redis._wire import text_of, tuples_of, unpack_rows

__all__ = [
    "label_of",
    "raise_claim",
    "raise_lost",
    "raise_missing",
    "raise_other_store",
    "raise_partition",
    "raise_put",
    "raise_settle",
    "raise_task",
]


def label_of(url: str) -> str:
    """What messages call the server of a URL: its place, without user, password and query."""
    service = Service.of(url)
    if service is not None:
        return service.label
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"the Redis server at {parts.path}"
    return f"the Redis server at {parts.hostname or 'localhost'}:{parts.port or 6379}"


def raise_other_store(what: str, label: str) -> NoReturn:
    """The namespace now holds another store than the one that the client connected to."""
    raise StalePartitionError(
        f"{what} refused: {label} no longer holds the store that this client connected to: it was emptied, or "
        "replaced. Nothing was changed in what is there now.",
        retryable=False,
        hint="Connect again, register the partitions and produce their samples again.",
    )


def raise_partition(partition_id: str, reply: Sequence[Any]) -> NoReturn:
    """The partition is not registered."""
    if reply[0] != b"unknown_partition":
        raise BackendError(f"the server's script replied {reply[0]!r}, which this client does not know.")
    raise UnknownPartitionError(
        f"partition '{partition_id}' is not registered.",
        hint=f"Registered: {preview(sorted(map(text_of, reply[1])), limit=5) or 'none'}.",
    )


def raise_put(what: str, request: PutRequest, reply: Sequence[Any]) -> NoReturn:
    """The begin or the commit of a put was refused. Nothing was written."""
    kind = reply[0]
    if kind == b"stale":
        which = (
            f"sample '{text_of(reply[1])}' was cleared" if reply[1] else "the partition was registered again or cleared"
        )
        raise StalePartitionError(f"{what} refused: {which} since the put began. Nothing was written.")
    if kind == b"abandoned":
        raise StalePartitionError(
            f"{what} refused at commit: the put took too long and counts as abandoned. Nothing was written."
        )
    if kind == b"incomplete":
        raise BackendError(
            f"{what} refused at commit: the server no longer holds all rows of the put. Nothing was written.",
            retryable=True,
        )
    if kind == b"schema":
        wrong = [(text_of(name), kept.decode()) for name, kept in tuples_of(reply[1:], 2)]
        raise SchemaMismatchError.for_fields(
            what,
            [
                (name, request.specs[name].describe(), FieldSpec.from_text(kept).describe(), kept)
                for name, kept in wrong
            ],
        )
    if kind == b"no_group":
        group_of(text_of(reply[1]))  # raises the error of an id without "_g"
    if kind == b"surplus":
        raise InvalidRequestError(
            f"{what} refused: group '{text_of(reply[1])}' would have {reply[2]} members. Expected at most {reply[3]}, "
            "the partition's group size. Nothing was written."
        )
    if kind == b"too_many":
        raise too_many_samples(what, reply[1], reply[2])
    raise_partition(request.partition_id, reply)


def raise_missing(
    what: str, request: GetRequest, rows: Sequence[bytes | None], layouts: Sequence[Mapping[str, FieldSpec]]
) -> NoReturn:
    """Some samples do not exist, or some cells are not produced."""
    absent = [sample_id for sample_id, row in zip(request.sample_ids, rows, strict=True) if row is None]
    if absent:
        raise MissingDataError.for_samples(what, request.partition_id, absent)
    cells = []
    for sample_id, refs in zip(request.sample_ids, unpack_rows([row for row in rows if row is not None]), strict=True):
        has = {name for _, _, layout, _ in refs for name in layouts[layout]}
        lacking = [name for name in request.fields if name not in has]
        if lacking:
            cells.append((sample_id, lacking))
    raise MissingDataError.for_cells(what, request.partition_id, cells)


def raise_lost(what: str, request: GetRequest, lost: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> NoReturn:
    """The partition lists rows whose payload is gone.

    Args:
        what: The operation.
        request: The read.
        lost: For each such row, its index in the request and the (column, slot) pairs that were asked for.
    """
    columns: dict[int, set[int]] = {}
    for row, pairs in sorted(lost):
        columns.setdefault(row, set()).update(column for column, _ in pairs)
    cells = [
        (request.sample_ids[row], [request.fields[each] for each in sorted(gone)]) for row, gone in columns.items()
    ]
    raise LostSamplesError.for_payload(what, request.partition_id, cells)


def raise_claim(what: str, request: ClaimRequest, reply: Sequence[Any]) -> NoReturn:
    """A claim was refused."""
    if reply[0] == b"batch":
        raise InvalidRequestError(
            f"{what} refused: batch_size {request.batch_size} is not a multiple of the group size {reply[1]}."
        )
    raise_task(request.partition_id, request.task_name, reply)


def raise_settle(what: str, request: AckRequest | NackRequest | RenewRequest, reply: Sequence[Any]) -> NoReturn:
    """An ack, nack or renew was refused. No row was changed."""
    if reply[0] == b"lost":
        lost = [text_of(each) for each in reply[1]]
        raise LeaseExpiredError(
            f"{what} refused: the lease on {preview(lost)} is no longer held. No row was changed.",
            sample_ids=lost,
            hint="The lease ran out, was settled, or the sample was cleared; another consumer may hold it now.",
        )
    if reply[0] == b"part":
        raise InvalidRequestError(
            f"{what} refused: it names {reply[2]} of the {reply[3]} samples held of group '{text_of(reply[1])}'. "
            "Groups are handed out, settled and renewed as a whole. No row was changed."
        )
    raise_task(request.partition_id, request.task_name, reply)


def raise_task(partition_id: str, task_name: str, reply: Sequence[Any]) -> NoReturn:
    """The partition or the task is not registered."""
    if reply[0] == b"unknown_task":
        raise UnknownTaskError(
            f"partition '{partition_id}' has no consumer task '{task_name}'.",
            hint=f"Registered: {preview(sorted(map(text_of, reply[1])), limit=5) or 'none'}.",
        )
    raise_partition(partition_id, reply)
