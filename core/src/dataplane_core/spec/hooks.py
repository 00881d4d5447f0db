"""The operations of `DataPlaneClient` as pluggy hook specs, with their request and reply types.

Every hook takes one mutable request object, and its first result is the answer (``firstresult=True``). A backend
implements the hooks as plain methods. Middleware wraps them with ``@hookimpl(wrapper=True)``: it may change the
request's attributes before ``yield`` and return another reply after it.

Core checks these before it calls a hook: sample ids are unique, non-empty strings; lists are not empty; columns are
encoded in the backend's `WireFormat` and have one row per id; tags are valid. Hooks run in the process of the client
and in the caller's thread, possibly in several threads at once. They must return or raise before ``deadline``.
"""

from __future__ import annotations

import html
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import pluggy

from dataplane_core.errors import LeaseHolder, Shortfall
from dataplane_core.spec.field_spec import FieldSpec
from dataplane_core.spec.tags import TagValue

if TYPE_CHECKING:
    import torch

__all__ = [
    "CONTRACT_VERSION",
    "AckRequest",
    "ChangeUnitsRequest",
    "Claim",
    "ClaimRequest",
    "ClearReply",
    "ClearRequest",
    "ConsumptionReply",
    "ConsumptionRequest",
    "DataPlaneSpec",
    "DescribeRequest",
    "ExportRequest",
    "FieldList",
    "FieldsRequest",
    "GetRequest",
    "IfExists",
    "InspectRequest",
    "ListPartitionsRequest",
    "ListRequest",
    "ListUnitsRequest",
    "NackRequest",
    "PartitionDescription",
    "PartitionInfo",
    "PartitionList",
    "PartitionState",
    "PutReply",
    "PutRequest",
    "RegisterRequest",
    "RenewRequest",
    "SampleList",
    "Sampler",
    "SetCursorRequest",
    "SettleReply",
    "SharedRows",
    "TaskDescription",
    "UnitInfo",
    "UnitList",
    "Wake",
    "WireBatch",
    "WireColumn",
    "hookimpl",
    "hookspec",
    "new_id",
    "this_process",
]

#: The version of the contract that this core speaks.
CONTRACT_VERSION: Final = 1

hookspec = pluggy.HookspecMarker("dataplane")
#: Marks middleware wrappers: ``@hookimpl(wrapper=True)``. Backends need no marker.
hookimpl = pluggy.HookimplMarker("dataplane")

#: One column as a backend sees it: a dense or jagged tensor, or a list of row tensors, of frames or of items.
WireColumn: TypeAlias = "torch.Tensor | list[Any]"

#: Which ready samples a claim gives. ``first_write``: in order of first write. ``freshest``: the last written first.
#: ``balanced``: in order of first write, divided among the ranks so that each gets about as many tokens.
Sampler: TypeAlias = Literal["first_write", "freshest", "balanced"]
#: What a registration does with a partition of the same name: drops it, or keeps it.
IfExists: TypeAlias = Literal["replace", "keep"]


class Wake:
    """Wakes a claim that waits. The client makes it; a backend that declares ``wakes`` keeps it and calls it.

    Args:
        notify: Tells the client to ask again. Does not block.

    Attributes:
        at_end: Called once when the claim no longer waits, unless it is None. The backend sets it; it must not block.
    """

    __slots__ = ("_ended", "_notify", "at_end")

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._ended = False
        self.at_end: Callable[[], None] | None = None

    def __call__(self) -> bool:
        """Tells the client to ask again. Any thread may call it. False: the claim no longer waits."""
        if self._ended:
            return False
        self._notify()
        return True

    def end(self) -> None:
        """The claim no longer waits."""
        self._ended = True
        at_end, self.at_end = self.at_end, None
        if at_end is not None:
            at_end()


@dataclass(frozen=True, slots=True)
class SharedRows:
    """A column whose rows repeat. Only backends with `WireFormat.shared_rows` take and return it.

    Attributes:
        rows: The column without the repeats.
        index: For each row of the column, its row in ``rows``.
    """

    rows: WireColumn
    index: Sequence[int]


def new_id() -> str:
    """128 random bits in hex: an id that is not given twice, even by a store that lost its state."""
    return secrets.token_hex(16)


def this_process() -> str:
    """This process, for messages: ``process 4711 on host-a``."""
    return f"process {os.getpid()} on {socket.gethostname()}"


# --- requests: mutable, so that middleware can change them -----------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class RegisterRequest:
    """Open a partition.

    Attributes:
        partition_id: The partition.
        fields: Fields that producers are expected to write.
        num_samples: Number of distinct ids that will be written, or None if unknown.
        consumer_tasks: The tasks that get a cursor.
        grpo_group_size: Samples per group, or None.
        enums: Field -> the strings that it may hold.
        if_exists: What becomes of an earlier registration of the same name. ``replace``: it is dropped, with its rows.
            ``keep``: it stays, with rows, tags, cursors, schema, epoch and ``num_samples``. Only the new ``fields``,
            ``consumer_tasks`` and ``enums`` are added to it.
        epoch: The id of the registration, if it is a new one: random bits drawn by the client (`new_id`).
        deadline: On `time.monotonic`'s clock, in seconds.
    """

    partition_id: str
    fields: list[str]
    num_samples: int | None
    consumer_tasks: list[str]
    grpo_group_size: int | None
    enums: dict[str, list[str]]
    if_exists: IfExists = "replace"
    epoch: str = field(default_factory=new_id)
    deadline: float


@dataclass(slots=True, kw_only=True)
class DescribeRequest:
    """Read a partition's registration."""

    partition_id: str
    deadline: float


@dataclass(slots=True, kw_only=True)
class PutRequest:
    """Write cells, tags, or both.

    Attributes:
        partition_id: The partition.
        sample_ids: Unique ids, one per row.
        columns: Field -> encoded column. It may alias the caller's memory. A backend that keeps it after the hook
            returns must copy it.
        specs: Field -> its spec; the same keys as ``columns``.
        tags: One dict per row, merged key by key into the tags that the sample has, or None.
        epoch: The registration that the client checked the put against, or None. If another one is current, the
            backend raises `StalePartitionError` and writes nothing.
        request_id: The id of this put: random bits drawn by the client (`new_id`). The client repeats a put whose reply
            was lost with the same id. Middleware leaves it as it is.
        deadline: On `time.monotonic`'s clock, in seconds.
    """

    partition_id: str
    sample_ids: list[str]
    columns: dict[str, WireColumn | SharedRows]
    specs: dict[str, FieldSpec]
    tags: list[dict[str, TagValue]] | None
    epoch: str | None = None
    request_id: str = field(default_factory=new_id)
    deadline: float


@dataclass(slots=True, kw_only=True)
class GetRequest:
    """Read cells."""

    partition_id: str
    sample_ids: list[str]
    fields: list[str]
    deadline: float


@dataclass(slots=True, kw_only=True)
class ClaimRequest:
    """Hand out ready samples to a task. The hook never waits: the client asks again until its deadline.

    Attributes:
        partition_id: The partition.
        task_name: The consumer task.
        required_fields: Fields that must be produced.
        batch_size: The most samples to hand out.
        all_or_nothing: Hand out ``batch_size`` samples or none; but hand out the rest if the partition can give no more
            than that.
        lease_s: Seconds after which samples that were not acked return to the pool. None: each sample is handed out at
            most once.
        tag_filter: Full-form predicate on tags, or None.
        explain: Fill `Claim.num_ready` and `Claim.shortfall`.
        token: The lease token of the samples that this claim hands out: random bits drawn by the client (`new_id`). A
            claim that waits asks repeatedly with the same token.
        holder: Who claims, for the error messages of other clients (`this_process`).
        sampler: Which ready samples it gives.
        dp_rank: The data-parallel rank that claims, or None. All claims of a task with the same rank and
            ``batch_index`` are given the same samples.
        dp_size: The number of ranks. Required by ``balanced``, whose claims choose ``batch_size`` samples for each.
        batch_index: Which batch of this rank it asks for. 0 if ``batch_epoch`` is not the current registration.
        batch_epoch: The registration that ``batch_index`` counts in, or None for the current one.
        since: `Claim.version` of the last answer to the same waiting claim, or None. If nothing changed since then, a
            backend may give the same answer without looking again.
        wake: Given by a claim that waits, for a backend that declares ``wakes``. If this call hands out nothing, the
            backend calls it when the claim can be answered. `Claim.ask_again_s` then says when the claim asks again
            without being called.
        deadline: On `time.monotonic`'s clock, in seconds.
    """

    partition_id: str
    task_name: str
    required_fields: list[str]
    batch_size: int
    all_or_nothing: bool
    lease_s: float | None = None
    tag_filter: dict[str, tuple[str, Any]] | None = None
    explain: bool = False
    token: str = field(default_factory=new_id)
    holder: str = field(default_factory=this_process)
    sampler: Sampler = "first_write"
    dp_rank: int | None = None
    dp_size: int | None = None
    batch_index: int = 0
    batch_epoch: str | None = None
    since: str | None = None
    wake: Wake | None = None
    deadline: float


@dataclass(slots=True, kw_only=True)
class AckRequest:
    """Settle leased samples as consumed. ``request_id`` is as that of `PutRequest`."""

    partition_id: str
    task_name: str
    sample_ids: list[str]
    lease_tokens: list[str]
    request_id: str = field(default_factory=new_id)
    deadline: float


@dataclass(slots=True, kw_only=True)
class NackRequest:
    """Give leased samples back to the pool. ``request_id`` is as that of `PutRequest`."""

    partition_id: str
    task_name: str
    sample_ids: list[str]
    lease_tokens: list[str]
    request_id: str = field(default_factory=new_id)
    deadline: float


@dataclass(slots=True, kw_only=True)
class RenewRequest:
    """Extend leases to ``lease_s`` seconds from now. ``request_id`` is as that of `PutRequest`."""

    partition_id: str
    task_name: str
    sample_ids: list[str]
    lease_tokens: list[str]
    lease_s: float
    request_id: str = field(default_factory=new_id)
    deadline: float


@dataclass(slots=True, kw_only=True)
class ConsumptionRequest:
    """Ask whether tasks have been given all samples that the partition holds."""

    partition_id: str
    task_names: list[str]
    deadline: float


@dataclass(slots=True, kw_only=True)
class ClearRequest:
    """Drop samples, or the whole partition if ``sample_ids`` is None."""

    partition_id: str
    sample_ids: list[str] | None
    deadline: float


@dataclass(slots=True, kw_only=True)
class ListRequest:
    """List ids and tags.

    Attributes:
        partition_id: The partition.
        tag_filter: Full-form predicate on tags, or None.
        sample_ids: Unique ids: list only these, in this order, as far as they are there. None: all samples.
        deadline: On `time.monotonic`'s clock, in seconds.
    """

    partition_id: str
    tag_filter: dict[str, tuple[str, Any]] | None
    sample_ids: list[str] | None = None
    deadline: float


@dataclass(slots=True, kw_only=True)
class ListPartitionsRequest:
    """List the registered partitions."""

    deadline: float


@dataclass(slots=True, kw_only=True)
class InspectRequest:
    """Count what a partition holds."""

    partition_id: str
    deadline: float


@dataclass(slots=True, kw_only=True)
class FieldsRequest:
    """Ask which fields samples have."""

    partition_id: str
    sample_ids: list[str]
    deadline: float


@dataclass(slots=True, kw_only=True)
class ExportRequest:
    """Read what a partition knows besides its rows, to save it."""

    partition_id: str
    deadline: float


@dataclass(slots=True, kw_only=True)
class SetCursorRequest:
    """Set which samples a task has been given.

    Attributes:
        partition_id: The partition.
        task_name: The consumer task.
        sample_ids: The samples that it has been given for good, in place of those before. Ids that are not there are
            ignored. Leases of the task end.
        create: Whether to add the task if the partition does not have it.
        deadline: On `time.monotonic`'s clock, in seconds.
    """

    partition_id: str
    task_name: str
    sample_ids: list[str]
    create: bool
    deadline: float


@dataclass(slots=True, kw_only=True)
class AnnounceRequest:
    """Say that a client uses the store, and what it does.

    Attributes:
        client: The client. Its ``heard_s`` is 0.
        ttl_s: Seconds for which the store lists it, unless it is announced again. 0: the client closes.
        deadline: On `time.monotonic`'s clock, in seconds.
    """

    client: ClientInfo
    ttl_s: float
    deadline: float


@dataclass(slots=True, kw_only=True)
class ListClientsRequest:
    """List the clients that use the store."""

    deadline: float


@dataclass(slots=True, kw_only=True)
class ListUnitsRequest:
    """List the storage units."""

    deadline: float


@dataclass(slots=True, kw_only=True)
class ChangeUnitsRequest:
    """Start storage units, or end one.

    Attributes:
        add: How many to start. 0: none.
        remove: The one to end, or None.
        now: Whether it ends at once, and its rows are lost. If not, it gets no more rows, and ends when it has none.
        deadline: On `time.monotonic`'s clock, in seconds.
    """

    add: int = 0
    remove: str | None = None
    now: bool = False
    deadline: float


# --- replies: frozen --------------------------------------------------------------------------------------------------


#: What `PartitionInfo` has besides its epoch.
_REGISTRATION: Final = ("fields", "num_samples", "consumer_tasks", "grpo_group_size", "enums")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInfo:
    """A partition's registration.

    Attributes:
        epoch: The id of the registration, from `RegisterRequest.epoch`. No other registration has it.
        fields: As registered.
        num_samples: As registered.
        consumer_tasks: As registered.
        grpo_group_size: As registered.
        enums: As registered.
    """

    epoch: str
    fields: tuple[str, ...]
    num_samples: int | None
    consumer_tasks: tuple[str, ...]
    grpo_group_size: int | None
    enums: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, epoch: str, registration: Mapping[str, Any]) -> PartitionInfo:
        """A registration from what `registration` returned. Further keys are ignored."""
        return cls(
            epoch=epoch,
            fields=tuple(registration["fields"]),
            num_samples=registration["num_samples"],
            consumer_tasks=tuple(registration["consumer_tasks"]),
            grpo_group_size=registration["grpo_group_size"],
            enums={name: tuple(words) for name, words in registration["enums"].items()},
        )

    @classmethod
    def requested(cls, request: Any) -> PartitionInfo:
        """The registration that a `RegisterRequest`, or an object with the same attributes, asks for."""
        return cls.of(request.epoch, {name: getattr(request, name) for name in _REGISTRATION})

    def registration(self) -> dict[str, Any]:
        """The arguments of ``register_partition`` besides the id, as values that JSON and msgpack can keep."""
        return {
            "fields": list(self.fields),
            "num_samples": self.num_samples,
            "consumer_tasks": list(self.consumer_tasks),
            "grpo_group_size": self.grpo_group_size,
            "enums": {name: list(words) for name, words in self.enums.items()},
        }

    def extended(
        self, fields: Sequence[str], consumer_tasks: Sequence[str], enums: Mapping[str, Sequence[str]]
    ) -> PartitionInfo:
        """This registration with further fields, tasks and strings of enums, as ``if_exists="keep"`` adds them."""
        return replace(
            self,
            fields=tuple(dict.fromkeys((*self.fields, *fields))),
            consumer_tasks=tuple(dict.fromkeys((*self.consumer_tasks, *consumer_tasks))),
            enums={
                name: tuple(dict.fromkeys((*self.enums.get(name, ()), *enums.get(name, ()))))
                for name in dict.fromkeys((*self.enums, *enums))
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PutReply:
    """The put is committed and visible to every client.

    Attributes:
        num_samples: Rows written.
    """

    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBatch:
    """Columns read back, one row per requested id, in the order asked for.

    Attributes:
        columns: Field -> encoded column. Core takes ownership.
        specs: Field -> the spec fixed by the field's first write.
    """

    columns: Mapping[str, WireColumn | SharedRows]
    specs: Mapping[str, FieldSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Samples handed out.

    Attributes:
        sample_ids: In order of first write. May be empty.
        tags: One dict per id.
        lease_tokens: One per id if a lease was asked for, else None.
        exhausted: The partition can give this task no more than this.
        num_ready: How many samples were ready (if ``explain`` was set).
        shortfall: Why the other samples are not handed out (if ``explain`` was set and this claim hands out none).
        epoch: The registration, if the claim has a ``dp_rank``.
        version: A claim that waits sends it back as `ClaimRequest.since`. Opaque to the client.
        ask_again_s: The least number of seconds until a waiting client asks again. A store with many waiting clients
            limits its load in this way.
    """

    sample_ids: Sequence[str] = ()
    tags: Sequence[Mapping[str, TagValue]] = ()
    lease_tokens: Sequence[str] | None = None
    exhausted: bool = False
    num_ready: int = 0
    shortfall: Shortfall | None = None
    epoch: str | None = None
    version: str | None = None
    ask_again_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleReply:
    """The leases are settled or renewed."""

    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionReply:
    """Whether every task has been given every sample that the partition holds, and has acked the leased ones."""

    consumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearReply:
    """The samples are gone.

    Attributes:
        num_samples: How many were there.
    """

    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleList:
    """Ids in order of first write, with their tags."""

    sample_ids: Sequence[str]
    tags: Sequence[Mapping[str, TagValue]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionList:
    """The names of all registered partitions, in any order."""

    partition_ids: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInfo:
    """An operation that a client has under way.

    Attributes:
        operation: The name of the client's method.
        partition_id: The partition, or empty.
        running_s: Seconds since it began, as of the announcement.
    """

    operation: str
    partition_id: str
    running_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientInfo:
    """A client of a store, as it announced itself.

    Attributes:
        client_id: Random bits. No other client has them.
        host: The name of its host.
        pid: Its process.
        role: The config's ``role``, or the name of its program.
        open_s: Seconds since it was opened, as of the announcement.
        num_calls: How many operations it has under way.
        calls: Those that began first, the first one first.
        heard_s: Seconds since it was announced.
        metrics_address: ``host:port`` where its process serves metrics, or empty.
    """

    client_id: str
    host: str
    pid: int
    role: str
    open_s: float
    num_calls: int = 0
    calls: Sequence[CallInfo] = ()
    heard_s: float = 0.0
    metrics_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceReply:
    """The client is listed, or no longer.

    Attributes:
        num_clients: How many clients are listed. The more there are, the less often each announces itself.
    """

    num_clients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientList:
    """The clients that were announced and whose time is not over, in any order."""

    clients: Sequence[ClientInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitInfo:
    """A storage unit: a process that holds payload.

    Attributes:
        name: Its name.
        state: ``serving``; ``starting``, for the first time or again; ``draining``: it gets no more rows, and ends when
            it has none; ``removed``: it ended, and samples that it held are not cleared yet.
        node: The node that it runs on, or empty.
        address: ``host:port`` where it is reached, or empty.
        num_rows: Rows that it holds. One put writes one row of a sample, or a few.
        size_bytes: Their payload.
        num_lost: Rows that ended with it, or with an earlier life of it, and are not cleared yet.
        num_starts: How often it was started.
    """

    name: str
    state: Literal["serving", "starting", "draining", "removed"]
    node: str = ""
    address: str = ""
    num_rows: int = 0
    size_bytes: int = 0
    num_lost: int = 0
    num_starts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitList:
    """All storage units, in order of their first start."""

    units: Sequence[UnitInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldList:
    """Which fields samples have.

    Attributes:
        patterns: Sets of fields, each in any order.
        index: For each sample, the place of its set in ``patterns``.
    """

    patterns: Sequence[Sequence[str]]
    index: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDescription:
    """What a consumer task was given of a partition.

    Attributes:
        num_ready: Samples that a claim of all registered fields could give it now.
        num_leased: Samples that it holds under a lease.
        num_consumed: Samples that it was given for good: without a lease, or acked.
        oldest_lease: Who has held a sample longest under its present lease. None if the task holds none.
    """

    num_ready: int
    num_leased: int
    num_consumed: int
    oldest_lease: LeaseHolder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDescription:
    """What a partition holds.

    Attributes:
        info: Its registration.
        specs: Field -> kind, dtype, rank and trailing shape of its cells, for each field that was written.
        num_samples: How many samples it holds.
        num_cleared: How many samples of this registration were cleared.
        held_bytes: Payload bytes of the samples that it holds, as counted for ``capacity_bytes``.
        oldest_s: Seconds since the first write of the oldest sample that it holds, or None if it holds none.
        tasks: Task -> what it was given.
    """

    info: PartitionInfo
    specs: Mapping[str, FieldSpec]
    num_samples: int
    num_cleared: int
    held_bytes: int
    oldest_s: float | None
    tasks: Mapping[str, TaskDescription]

    def _repr_html_(self) -> str:
        """What a notebook shows: the tasks and the fields as tables."""
        tasks = [(name, task.num_ready, task.num_leased, task.num_consumed) for name, task in self.tasks.items()]
        fields = [(name, spec.describe()) for name, spec in self.specs.items()]
        return (
            f"{self.num_samples} samples, {self.num_cleared} cleared, {self.held_bytes:,} bytes"
            + _html_table(("task", "ready", "leased", "consumed"), tasks)
            + _html_table(("field", "cells"), fields)
        )


def _html_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["".join(f"<th>{name}</th>" for name in head)]
    lines += ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>" if rows else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionState:
    """What a partition knows besides its registration and its rows.

    Attributes:
        consumed: Task -> the samples that it was given for good, in order of first write.
        cleared_ids: Samples that were cleared and count for ``num_samples``. Empty if ``num_samples`` is None.
        broken_groups: Groups that lost a member.
    """

    consumed: Mapping[str, Sequence[str]]
    cleared_ids: Sequence[str]
    broken_groups: Sequence[str]


# --- the specs --------------------------------------------------------------------------------------------------------


class DataPlaneSpec:
    """The hook specs.

    A hook may raise any other `DataPlaneError` too. Core wraps every other exception in `BackendError`.
    """

    @hookspec(firstresult=True)
    def register_partition(self, request: RegisterRequest) -> PartitionInfo:  # type: ignore[empty-body]
        """Opens the partition. On return, an earlier registration is dropped or extended, as ``if_exists`` says.

        Raises:
            InvalidRequestError: ``if_exists`` is ``keep``, and the partition has another group size. Nothing changed.
        """

    @hookspec(firstresult=True)
    def describe_partition(self, request: DescribeRequest) -> PartitionInfo:  # type: ignore[empty-body]
        """Reads the registration.

        Raises:
            UnknownPartitionError: Not registered.
        """

    @hookspec(firstresult=True)
    def put_samples(self, request: PutRequest) -> PutReply:  # type: ignore[empty-body]
        """Commits cells and tags, then marks the cells as produced. Returns once every client sees the commit.

        Raises:
            UnknownPartitionError: Not registered.
            SchemaMismatchError: A spec differs from the field's first write. Nothing is written.
            InvalidRequestError: An id has no ``_g``, or a group would have too many members. Nothing is written.
            StalePartitionError: ``epoch`` is not the current registration. Nothing is written.
            CapacityExceededError: The store is full and configured to raise.
            LostReplyError: The put was sent and its reply is lost. The client calls the hook again with the same
                ``request_id``, if the backend declares ``repeatable``.
            OperationTimeoutError: Its ``outcome`` says whether the put is written.
        """

    @hookspec(firstresult=True)
    def get_samples(self, request: GetRequest) -> WireBatch:  # type: ignore[empty-body]
        """Reads exactly one row per id in every column asked for.

        Raises:
            UnknownPartitionError: Not registered.
            MissingDataError: Names the first missing samples or cells, and counts the rest.
            LostSamplesError: The payload of produced cells is gone from the store.
        """

    @hookspec(firstresult=True)
    def claim(self, request: ClaimRequest) -> Claim:  # type: ignore[empty-body]
        """Hands out ready samples, each at most once per task; with leases, to one holder at a time. Never waits.

        Raises:
            UnknownPartitionError, UnknownTaskError: Not registered.
            InvalidRequestError: ``batch_size`` is not a multiple of the group size. Or the batch of the rank was given
                before, and its samples are cleared.
        """

    @hookspec(firstresult=True)
    def ack(self, request: AckRequest) -> SettleReply:  # type: ignore[empty-body]
        """Settles all of the rows or none.

        Raises:
            LeaseExpiredError: Names the ids whose token is no longer valid.
        """

    @hookspec(firstresult=True)
    def nack(self, request: NackRequest) -> SettleReply:  # type: ignore[empty-body]
        """Gives all of the rows back or none.

        Raises:
            LeaseExpiredError: Names the ids whose token is no longer valid.
        """

    @hookspec(firstresult=True)
    def renew(self, request: RenewRequest) -> SettleReply:  # type: ignore[empty-body]
        """Renews all of the leases or none.

        Raises:
            LeaseExpiredError: Names the ids whose token is no longer valid.
        """

    @hookspec(firstresult=True)
    def check_consumption(self, request: ConsumptionRequest) -> ConsumptionReply:  # type: ignore[empty-body]
        """Answers from the store's own state. False for an unknown partition or task, and while no sample is held."""

    @hookspec(firstresult=True)
    def clear_samples(self, request: ClearRequest) -> ClearReply:  # type: ignore[empty-body]
        """Drops rows with their tags and cursors, or the whole partition. Ignores samples that are not there."""

    @hookspec(firstresult=True)
    def list_samples(self, request: ListRequest) -> SampleList:  # type: ignore[empty-body]
        """Lists ids and tags.

        Raises:
            UnknownPartitionError: Not registered.
        """

    @hookspec(firstresult=True)
    def list_partitions(self, request: ListPartitionsRequest) -> PartitionList:  # type: ignore[empty-body]
        """Lists the registered partitions."""

    @hookspec(firstresult=True)
    def inspect_partition(self, request: InspectRequest) -> PartitionDescription:  # type: ignore[empty-body]
        """Counts what the partition holds, and what its tasks were given.

        Raises:
            UnknownPartitionError: Not registered.
        """

    @hookspec(firstresult=True)
    def list_fields(self, request: FieldsRequest) -> FieldList:  # type: ignore[empty-body]
        """Lists the produced fields of samples.

        Raises:
            UnknownPartitionError: Not registered.
            MissingDataError: Names the first missing samples, and counts the rest.
        """

    @hookspec(firstresult=True)
    def announce(self, request: AnnounceRequest) -> AnnounceReply:  # type: ignore[empty-body]
        """Lists the client for ``ttl_s`` seconds in place of what it announced before. 0: no longer."""

    @hookspec(firstresult=True)
    def list_clients(self, request: ListClientsRequest) -> ClientList:  # type: ignore[empty-body]
        """Lists the clients that were announced and whose time is not over."""

    @hookspec(firstresult=True)
    def list_units(self, request: ListUnitsRequest) -> UnitList:  # type: ignore[empty-body]
        """Lists the storage units."""

    @hookspec(firstresult=True)
    def change_units(self, request: ChangeUnitsRequest) -> UnitList:  # type: ignore[empty-body]
        """Starts storage units and waits until they serve, or has one end. Replies the new or changed ones.

        Raises:
            InvalidRequestError: There is no such unit, or no other one that takes rows.
            BackendUnavailableError: One could not be started.
        """

    @hookspec(firstresult=True)
    def export_partition(self, request: ExportRequest) -> PartitionState:  # type: ignore[empty-body]
        """Reads cursors and history.

        Raises:
            UnknownPartitionError: Not registered.
        """

    @hookspec(firstresult=True)
    def set_cursor(self, request: SetCursorRequest) -> SettleReply:  # type: ignore[empty-body]
        """Sets which samples a task has been given, all at once. Replies how many of the samples are there.

        Raises:
            UnknownPartitionError, UnknownTaskError: Not registered.
        """
