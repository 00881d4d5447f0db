"""What the hooks are asked. Requests are mutable, so that middleware can change them.

A request that is also a `Command` is sent to the ledger as it is. `dataplane_core.ledger.commands` has the others.
"""

from __future__ import annotations

import functools
import math
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Final, Generic, Literal, TypeAlias, TypeVar

from dataplane_core.spec.columns import SharedRows, WireColumn
from dataplane_core.spec.field_spec import FieldSpec
from dataplane_core.spec.replies import (
    AnnounceReply,
    Claim,
    ClientInfo,
    ClientList,
    FieldList,
    PartitionDescription,
    PartitionInfo,
    PartitionList,
    PartitionState,
    SampleList,
)
from dataplane_core.spec.tags import TagValue

Reply = TypeVar("Reply", covariant=True)
#: Which ready samples a claim gives. ``first_write``: in order of first write. ``freshest``: the last written first.
#: ``balanced``: in order of first write, divided among the ranks so that each gets about as many tokens.
Sampler: TypeAlias = Literal["first_write", "freshest", "balanced"]
#: What a registration does with a partition of the same name: drops it, or keeps it.
IfExists: TypeAlias = Literal["replace", "keep"]


class Bell:
    """Lets a thread wait until it is woken.

    Any thread, and any signal handler or ``__del__`` in the middle of another call, may ring it: it takes no lock that
    these could find taken, as `threading.Event` does.
    """

    __slots__ = ("_rung",)

    def __init__(self) -> None:
        self._rung: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Ends the wait, or the next one."""
        self._rung.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s``. Returns whether it was rung. What rang so far does not end a further wait."""
        with suppress(Empty):
            self._rung.get(timeout=max(0.0, timeout_s))
            while not self._rung.empty():
                self._rung.get_nowait()
            return True
        return False


class Cancellation:
    """Ends the wait of a put for room when nobody wants the put any longer. `CANCELLATION` has that of this call.

    Attributes:
        is_set: Whether it is cancelled.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._listening: list[Callable[[], object]] = []

    def listen(self, ring: Callable[[], object]) -> None:
        """``ring`` is called from another thread when it is cancelled."""
        self._listening.append(ring)
        if self.is_set:
            ring()

    def cancel(self) -> None:
        """Nobody wants it any longer."""
        self.is_set = True
        for ring in self._listening:
            ring()


#: That of the call that this thread makes for an `AsyncDataPlaneClient`.
CANCELLATION: Final[ContextVar[Cancellation | None]] = ContextVar("CANCELLATION", default=None)


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


def new_id() -> str:
    """128 random bits in hex: an id that is not given twice, even by a store that lost its state."""
    return secrets.token_hex(16)


def this_process() -> str:
    """This process, for messages: ``process 4711 on host-a``."""
    return f"process {os.getpid()} on {_host_name()}"


@functools.cache  # every claim asks, and the system's call lets other threads run first
def _host_name() -> str:
    return socket.gethostname()


class Command(Generic[Reply]):
    """One operation of a ledger, which answers it with a ``Reply``.

    Attributes:
        op: Its name in messages.
        reads: Whether it changes nothing. A log has no record of such a command.
    """

    __slots__ = ()

    op: ClassVar[str]
    reads: ClassVar[bool] = False


@dataclass(slots=True)
class Request:
    """The base of all requests.

    Attributes:
        deadline: On `time.monotonic`'s clock of the client, in seconds.
    """

    _: KW_ONLY
    deadline: float = math.inf


@dataclass(slots=True)
class PartitionRequest(Request):
    """A request about a partition.

    Attributes:
        partition_id: Its name.
    """

    partition_id: str


@dataclass(slots=True)
class OnceRequest(PartitionRequest):
    """A request that a ledger carries out once, and answers alike if it comes again since its reply was lost.

    Attributes:
        left_s: For a ledger, which has another clock: seconds until the deadline. `LedgerBackend` sets it. The ledger
            knows the request for a minute longer.
    """

    _: KW_ONLY
    left_s: float = 0.0


@dataclass(slots=True)
class RegisterRequest(OnceRequest, Command[tuple[PartitionInfo, list[tuple[int, int]]]]):
    """Open a partition.

    A ledger replies the registration, and the refs of one that was dropped, which are now free.

    Attributes:
        fields: Fields that producers are expected to write.
        num_samples: Number of distinct ids that will be written, or None if unknown. With ``keep`` it may be 0.
        consumer_tasks: The tasks that get a cursor.
        grpo_group_size: Samples per group, or None.
        enums: Field -> the strings that it may hold.
        if_exists: What becomes of an earlier registration of the same name. ``replace``: it is dropped, with its rows.
            ``keep``: it stays, with rows, tags, cursors, schema, epoch and ``num_samples``. Only the new ``fields``,
            ``consumer_tasks``, ``enums`` and ``followers`` are added to it. If it has no ``num_samples``, it gets
            those of the request, but at least as many as it holds samples.
        epoch: The id of the registration, if it is a new one: random bits drawn by the client (`new_id`).
        followers: Those of the tasks that follow the others: nobody who trains waits for them.
        registered_by: The process that asks, with its role, for messages.
        registered_at: When, in seconds since 1970 by that process' clock.
    """

    op = "register"
    fields: list[str] = field(default_factory=list)
    num_samples: int | None = None
    consumer_tasks: list[str] = field(default_factory=list)
    grpo_group_size: int | None = None
    enums: dict[str, list[str]] = field(default_factory=dict)
    epoch: str = field(default_factory=new_id)
    if_exists: IfExists = "replace"
    followers: list[str] = field(default_factory=list)
    registered_by: str = ""
    registered_at: float = 0.0


@dataclass(slots=True)
class DescribeRequest(PartitionRequest, Command[PartitionInfo]):
    """Read a partition's registration."""

    op = "describe"
    reads = True


@dataclass(slots=True, kw_only=True)
class PutRequest(PartitionRequest):
    """Write cells, tags, or both.

    Attributes:
        sample_ids: Unique ids, one per row.
        columns: Field -> encoded column. It may alias the caller's memory. A backend that keeps it after the hook
            returns must copy it.
        specs: Field -> its spec; the same keys as ``columns``.
        tags: One dict per row, merged key by key into the tags that the sample has, or None.
        epoch: The registration that the client checked the put against, or None. If another one is current, the
            backend raises `StalePartitionError` and writes nothing.
        request_id: The id of this put: random bits drawn by the client (`new_id`). The client repeats a put whose reply
            was lost with the same id. Middleware leaves it as it is.
    """

    sample_ids: list[str]
    columns: dict[str, WireColumn | SharedRows]
    specs: dict[str, FieldSpec]
    tags: list[dict[str, TagValue]] | None
    epoch: str | None = None
    request_id: str = field(default_factory=new_id)


@dataclass(slots=True, kw_only=True)
class GetRequest(PartitionRequest):
    """Read cells."""

    sample_ids: list[str]
    fields: list[str]


@dataclass(slots=True)
class ClaimRequest(OnceRequest, Command[Claim]):
    """Hand out ready samples to a task. The hook never waits: the client asks again until its deadline.

    Attributes:
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
    """

    op = "claim"
    task_name: str
    required_fields: list[str]
    batch_size: int
    _: KW_ONLY
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


@dataclass(slots=True)
class SettleRequest(OnceRequest, Command[None]):
    """A request about samples that a task has leased.

    Attributes:
        task_name: The consumer task.
        sample_ids: Unique ids.
        lease_tokens: One per id.
        request_id: As `PutRequest.request_id`. None, for a ledger: it is not repeated.
    """

    task_name: str
    sample_ids: list[str]
    lease_tokens: list[str]
    _: KW_ONLY
    request_id: str | None = field(default_factory=new_id)


@dataclass(slots=True)
class AckRequest(SettleRequest):
    """Settle leased samples as consumed. Acking again with the same token is allowed, since a reply may be lost."""

    op = "ack"


@dataclass(slots=True)
class NackRequest(SettleRequest):
    """Give leased samples back to the pool."""

    op = "nack"


@dataclass(slots=True)
class RenewRequest(SettleRequest):
    """Extend leases to ``lease_s`` seconds from now."""

    op = "renew"
    lease_s: float


@dataclass(slots=True)
class ConsumptionRequest(PartitionRequest, Command[bool]):
    """Ask whether tasks have been given all samples that the partition holds."""

    op = "consumed"
    reads = True
    task_names: list[str]


@dataclass(slots=True)
class ClearRequest(OnceRequest, Command[tuple[int, list[tuple[int, int]]]]):
    """Drop samples, or the whole partition if ``sample_ids`` is None.

    A ledger replies how many samples were there, and all refs that are free and not yet `Collected`: theirs, and those
    that abandoned puts and crashed hosts left.

    Attributes:
        request_id: As `SettleRequest.request_id`.
    """

    op = "clear"
    sample_ids: list[str] | None
    _: KW_ONLY
    request_id: str | None = field(default_factory=new_id)


@dataclass(slots=True)
class ListRequest(PartitionRequest, Command[SampleList]):
    """List ids and tags.

    Attributes:
        tag_filter: Full-form predicate on tags, or None.
        sample_ids: Unique ids: list only these, in this order, as far as they are there. None: all samples.
    """

    op = "list_samples"
    reads = True
    tag_filter: dict[str, tuple[str, Any]] | None = None
    sample_ids: list[str] | None = None


@dataclass(slots=True)
class ListPartitionsRequest(Request, Command[PartitionList]):
    """List the registered partitions."""

    op = "list_partitions"
    reads = True


@dataclass(slots=True, kw_only=True)
class Question:
    """What a claim would find. It is given nothing.

    Attributes:
        task_name: As of `ClaimRequest`, like the next two.
        required_fields: Fields that must be produced.
        tag_filter: Full-form predicate on tags, or None.
        explain: Whether to find the shortfall too, for which all samples are looked at.
    """

    task_name: str
    required_fields: list[str]
    tag_filter: dict[str, tuple[str, Any]] | None = None
    explain: bool = False


@dataclass(slots=True)
class InspectRequest(PartitionRequest, Command[PartitionDescription]):
    """Count what a partition holds.

    Attributes:
        questions: What else to answer.
        count_rows: Whether ``num_rows`` is needed. If not, it may be left out, if it costs a look at all samples.
    """

    op = "inspect"
    reads = True
    questions: list[Question] = field(default_factory=list)
    count_rows: bool = True


@dataclass(slots=True)
class FieldsRequest(PartitionRequest, Command[FieldList]):
    """Ask which fields samples have."""

    op = "list_fields"
    reads = True
    sample_ids: list[str]


@dataclass(slots=True)
class ExportRequest(PartitionRequest, Command[PartitionState]):
    """Read what a partition knows besides its rows, to save it."""

    op = "export"
    reads = True


@dataclass(slots=True)
class SetCursorRequest(PartitionRequest, Command[int]):
    """Set which samples a task has been given.

    Attributes:
        task_name: The consumer task.
        sample_ids: The samples that it has been given for good, in place of those before. Ids that are not there are
            ignored. Leases of the task end.
        create: Whether to add the task if the partition does not have it.
    """

    op = "set_cursor"
    task_name: str
    sample_ids: list[str]
    create: bool = False


@dataclass(slots=True)
class AnnounceRequest(Request, Command[AnnounceReply]):
    """Say that a client uses the store, and what it does.

    Attributes:
        client: The client. Its ``heard_s`` is 0.
        ttl_s: Seconds for which the store lists it, unless it is announced again. 0: the client closes.
    """

    op = "announce"
    reads = True
    client: ClientInfo
    ttl_s: float


@dataclass(slots=True)
class ListClientsRequest(Request, Command[ClientList]):
    """List the clients that use the store.

    Attributes:
        ended: Whether to list also those that closed, or were not heard of, in the last ten minutes.
    """

    op = "list_clients"
    reads = True
    ended: bool = False


@dataclass(slots=True, kw_only=True)
class ListUnitsRequest(Request):
    """List the storage units."""
