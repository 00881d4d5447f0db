"""What the hooks are asked. Requests are mutable, so that middleware can change them.

A request's docstring says what a backend does with it; what its values mean to a user is said by the method of
`DataPlaneClient`. A request that is also a `Command` is sent to the ledger as it is, and checked there by its types and
`Command.check`. Core checks before it calls a hook: ids are unique, non-empty strings; lists are not empty; tags are
valid.
"""

from __future__ import annotations

import functools
import math
import os
import secrets
import socket
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, field

from dataplane_core.arguments import Count, Index, Name, PositiveSeconds, Seconds
from dataplane_core.errors import InvalidRequestError
from dataplane_core.spec.columns import FieldSpec, SharedRows, WireColumn
from dataplane_core.spec.costs import Balance
from dataplane_core.spec.replies import (
    Claim,
    ClientInfo,
    FieldList,
    PartitionDescription,
    PartitionInfo,
    PartitionState,
    SampleList,
)
from dataplane_core.spec.tags import FullTagFilter, TagValue, check_tag_filter

Reply = TypeVar("Reply", covariant=True)
#: Which ready samples a claim gives. ``first_write``: in order of first write. ``freshest``: the last written first.
#: ``balanced``: in order of first write, divided among the ranks so that each gets about as many tokens.
Sampler: TypeAlias = Literal["first_write", "freshest", "balanced"]
#: What a registration does with a partition of the same name: drops it, or keeps it.
IfExists: TypeAlias = Literal["replace", "keep"]
#: The id of a request that is known by it.
RequestId: TypeAlias = Annotated[str, Meta(max_length=64)]
#: An enum has at most so many strings, of so many characters: a put tells the ledger as many of an object field.
MOST_WORDS: Final = 256
MOST_LETTERS: Final = 64
_Word: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MOST_LETTERS)]
#: The strings of an enum.
Words: TypeAlias = Annotated[list[_Word], Meta(max_length=MOST_WORDS)]
#: The most data-parallel ranks of a claim: a ledger has a list of as many.
_MOST_RANKS: Final = 1 << 20


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
    """One operation of a ledger, which answers it with a ``Reply``."""

    __slots__ = ()

    op: ClassVar[str]  # its name in messages
    reads: ClassVar[bool] = False  # whether it changes nothing: a log has no record of it

    def check(self) -> None:
        """The rules that join several of its values: raises `InvalidRequestError` if they do not fit together."""

    def expect(self, good: bool, name: str) -> None:
        """Raises `InvalidRequestError`, which names the value, unless it is good."""
        if not good:
            raise InvalidRequestError(
                f"{self.op} refused: its {name} cannot be right.",
                hint="The command was damaged, or another program made it.",
            )


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The base of all requests.

    Attributes:
        deadline: On `time.monotonic`'s clock of the client, in seconds. The hook returns or raises before it.
    """

    deadline: float = math.inf


class PartitionRequest(Request):
    """A request about a partition. Raises `UnknownPartitionError` if it is not registered, unless it says otherwise."""

    partition_id: Name


class OnceRequest(PartitionRequest, kw_only=True):
    """A request that a ledger carries out once, and answers alike if it comes again since its reply was lost."""

    #: Seconds until the deadline, for the ledger, which has another clock, and knows the request for a minute longer.
    left_s: Seconds = 0.0


class IdentifiedRequest(OnceRequest, kw_only=True):
    """A `OnceRequest` that is known by an id, which middleware leaves as it is. A client whose reply was lost repeats
    the request with the same id."""

    request_id: RequestId | None = field(default_factory=new_id)  # None, for a ledger: it is not repeated


class RegisterRequest(OnceRequest, Command[tuple[PartitionInfo, list[tuple[int, int]]]]):
    """Open a partition. On return, an earlier registration is dropped, or extended, as ``if_exists`` says.

    A ledger replies the registration, and the refs of one that was dropped, which are now free. To finish a partition,
    the client sends ``keep`` with ``num_samples`` 0: if the partition has no ``num_samples``, it gets those of the
    request, but at least as many as it holds samples.

    Attributes:
        epoch: The id of the registration, if it is a new one: random bits drawn by the client (`new_id`).
        registered_by: The process that asks, with its role, for messages.
        registered_at: When, in seconds since 1970 by that process' clock.
        declared: Field -> what its cells must be, as text (`FieldSpec.declared`, `FieldSpec.to_text`).
        rollouts: Whether samples are the rows of rollouts: a claim hands out groups of sealed rollouts.
        cleared_ids: Of a partition that is loaded: samples that were cleared, and count for ``num_samples``.
        broken_groups: Of a partition that is loaded: groups that lost a member, and are never given.

    Raises:
        InvalidRequestError: ``if_exists`` is ``keep``, and the partition has another group size, or is one of rollouts
            and this is not, or a field has other cells than are declared. Nothing changed.
    """

    op = "register"
    fields: list[Name] = field(default_factory=list)
    num_samples: Index | None = None
    consumer_tasks: list[Name] = field(default_factory=list)
    grpo_group_size: Count | None = None
    enums: dict[str, Words] = field(default_factory=dict)
    epoch: str = field(default_factory=new_id)
    if_exists: IfExists = "replace"
    declared: dict[str, str] = field(default_factory=dict)
    registered_by: str = ""
    registered_at: float = 0.0
    cleared_ids: list[Name] = field(default_factory=list)
    broken_groups: list[str] = field(default_factory=list)
    rollouts: bool = False

    def check(self) -> None:
        self.expect(all(map(FieldSpec.is_text, self.declared.values())), "declared")


def check_opens(command: Any) -> None:
    """Checks what a put or a claim registers."""
    if command.opens is not None:
        command.expect(command.opens.partition_id == command.partition_id, "opens")
        command.opens.check()


class DescribeRequest(PartitionRequest, Command[PartitionInfo]):
    """Read a partition's registration."""

    op = "describe"
    reads = True


class PutRequest(IdentifiedRequest, kw_only=True):
    """Commit cells and tags, then mark the cells as produced. Return once every client sees the commit.

    Replies how many rows were written.

    Attributes:
        columns: Field -> encoded column. It may alias the caller's memory. A backend that keeps it after the hook
            returns must copy it.
        specs: Field -> its spec; the same keys as ``columns``.
        tags: One dict per row, merged key by key into the tags that the sample has, or None.
        strings: Object field -> its different strings, which the enums of the registration must hold. None: more or
            longer ones than an enum can have. Fields without strings are left out.
        strict: Whether fields that nobody registered are refused.
        opens: What registers the partition if it is unknown. None: nothing.

    Raises:
        SchemaMismatchError: A spec differs from what was declared of the field, or from its first write
            (`FieldSpec.after`). Its ``expected`` has the specs of these fields. Nothing is written.
        InvalidRequestError: An id has no ``_g``, a group would have too many members, a rollout more rows than it is
            sealed with, more distinct ids than ``num_samples`` would have been written, or a string is not in its enum.
            Nothing is written.
        StalePartitionError: The partition was cleared or registered again meanwhile. Nothing is written.
        CapacityExceededError: The store is full and configured to raise.
        LostReplyError: The put was sent and its reply is lost.
        OperationTimeoutError: Its ``outcome`` says whether the put is written.
    """

    sample_ids: list[Name]
    columns: dict[str, WireColumn | SharedRows]
    specs: dict[str, FieldSpec]
    tags: list[dict[str, TagValue]] | None
    strings: dict[str, list[str] | None] = field(default_factory=dict)
    strict: bool = False
    opens: RegisterRequest | None = None


class GetRequest(PartitionRequest, kw_only=True):
    """Read exactly one row per id in every column asked for.

    Raises:
        MissingDataError: Names the first missing samples or cells, and counts the rest.
        LostSamplesError: The payload of produced cells is gone from the store.
        OpenCellsError: Cells of one field are stored in different forms, since some were put while it was open
            (`FieldSpec.reading`). The client then reads each group by itself.
    """

    sample_ids: list[Name]
    fields: list[Name]


class ClaimRequest(OnceRequest, Command[Claim]):
    """Hand out ready samples, each at most once per task; with leases, to one holder at a time.

    The hook never waits: the client asks again until its deadline.

    Attributes:
        all_or_nothing: Hand out ``batch_size`` samples or none; but hand out the rest if the partition can give no more
            than that.
        tag_filter: In full form, or None.
        explain: Fill `Claim.num_ready` and `Claim.shortfall`.
        token: The lease token of the samples that this claim hands out: random bits drawn by the client (`new_id`). A
            claim that waits asks repeatedly with the same token.
        holder: Who claims, for the error messages of other clients (`this_process`).
        batch_index: Which batch of this rank it asks for. 0 if ``batch_epoch`` is not the current registration.
        batch_epoch: The registration that ``batch_index`` counts in, or None for the current one.
        wake: Given by a claim that waits, for a backend that declares ``wakes``. If this call hands out nothing, the
            backend calls it, in any thread, when the claim can be answered, until `Backend.stop_waiting`. It does not
            block. False: the claim no longer waits. `Claim.ask_again_s` then says when the claim asks again without
            being called.
        strict: Whether fields are refused that are neither registered nor written.
        opens: What registers the partition if it is unknown, or adds the task if it lacks it. None: nothing.
        balance: By what cost the sampler ``balanced`` divides. None: by tokens.
        max_rows: The most rows to hand out; but one group, or row, at least. None: no limit.
        max_tokens: So of tokens, by the tag ``input_lengths``. A row that lacks it has too many.

    Raises:
        UnknownTaskError: Not registered.
        InvalidRequestError: ``batch_size`` is not a multiple of the group size. Or the batch of the rank was given
            before, and its samples are cleared.
    """

    op = "claim"
    task_name: Name
    required_fields: list[Name]
    batch_size: Count
    all_or_nothing: bool
    lease_s: PositiveSeconds | None = None
    tag_filter: FullTagFilter | None = None
    explain: bool = False
    token: str = field(default_factory=new_id)
    holder: str = field(default_factory=this_process)
    sampler: Sampler = "first_write"
    dp_rank: Annotated[int, Meta(ge=0, lt=_MOST_RANKS)] | None = None
    dp_size: Annotated[int, Meta(ge=1, le=_MOST_RANKS)] | None = None
    batch_index: Index = 0
    batch_epoch: str | None = None
    wake: Callable[[], bool] | None = None
    strict: bool = False
    opens: RegisterRequest | None = None
    balance: Balance | None = None
    max_rows: Count | None = None
    max_tokens: Count | None = None

    def check(self) -> None:
        if self.dp_rank is None and self.dp_size is not None:
            raise InvalidRequestError("claim_meta refused: dp_size needs a dp_rank: a claim gets the part of one rank.")
        if self.dp_rank is not None and self.dp_size is not None and self.dp_rank >= self.dp_size:
            said = f"dp_rank {self.dp_rank} is not below dp_size {self.dp_size}"
            raise InvalidRequestError(f"claim_meta refused: {said}.")
        if self.sampler == "balanced" and self.dp_size is None:
            raise InvalidRequestError("claim_meta refused: sampler 'balanced' needs a dp_rank and a dp_size.")
        if self.balance is not None and self.sampler != "balanced":
            raise InvalidRequestError("claim_meta refused: balance needs the sampler 'balanced'.")
        if self.dp_size is not None and (self.max_rows, self.max_tokens) != (None, None):
            raise InvalidRequestError("claim_meta refused: max_rows and max_tokens are for claims without dp_size.")
        if self.tag_filter is not None:
            check_tag_filter(self.tag_filter)
        if self.opens is not None:
            check_opens(self)


class SettleRequest(IdentifiedRequest, Command[int]):
    """A request about samples that a task has leased: all of the rows, or none. Replies how many they are.

    Attributes:
        lease_tokens: One per id.

    Raises:
        LeaseExpiredError: Names the ids whose token is no longer valid.
    """

    task_name: Name
    sample_ids: list[Name]
    lease_tokens: list[str]

    def check(self) -> None:
        self.expect(len(self.sample_ids) == len(self.lease_tokens), "lease_tokens")


class AckRequest(SettleRequest):
    """Settle leased samples as consumed. Acking again with the same token is allowed, since a reply may be lost."""

    op = "ack"


class NackRequest(SettleRequest):
    """Give leased samples back to the pool."""

    op = "nack"


class RenewRequest(SettleRequest):
    """Extend leases to ``lease_s`` seconds from now."""

    op = "renew"
    lease_s: PositiveSeconds


class ConsumptionRequest(PartitionRequest, Command[bool]):
    """Ask what `DataPlaneClient.check_consumption_status` does."""

    op = "consumed"
    reads = True
    task_names: list[Name]


class ClearRequest(IdentifiedRequest, Command[tuple[int, list[tuple[int, int]]]]):
    """Drop samples with their tags and cursors, or the whole partition if ``sample_ids`` is None. Ignore those that are
    not there.

    Replies how many samples were there. A ledger also replies all refs that are free and not yet `Collected`: theirs,
    and those that abandoned puts and crashed hosts left.
    """

    op = "clear"
    sample_ids: list[Name] | None


class ListRequest(PartitionRequest, Command[SampleList]):
    """List ids and tags. With unique ``sample_ids``, only these, in this order, as far as they are there.

    Attributes:
        tag_filter: In full form, or None.
    """

    op = "list_samples"
    reads = True
    tag_filter: FullTagFilter | None = None
    sample_ids: list[Name] | None = None

    def check(self) -> None:
        check_tag_filter(self.tag_filter)


class ListPartitionsRequest(Request, Command[list[str]]):
    """List the names of the registered partitions, in any order."""

    op = "list_partitions"
    reads = True


class Question(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a claim would find; with ``explain`` the shortfall too, for which all samples are looked at."""

    task_name: Name
    required_fields: list[Name]
    tag_filter: FullTagFilter | None = None
    explain: bool = False


class InspectRequest(PartitionRequest, Command[PartitionDescription]):
    """Count what a partition holds, and what its tasks were given; answer questions.

    Without ``count_rows``, ``num_rows`` may be left out, if it costs a look at all samples.
    """

    op = "inspect"
    reads = True
    questions: list[Question] = field(default_factory=list)
    count_rows: bool = True

    def check(self) -> None:
        for question in self.questions:
            check_tag_filter(question.tag_filter)


class FieldsRequest(PartitionRequest, Command[FieldList]):
    """Ask which fields of samples are produced. Raises `MissingDataError` as `GetRequest`."""

    op = "list_fields"
    reads = True
    sample_ids: list[Name]


class ExportRequest(PartitionRequest, Command[PartitionState]):
    """Read what a partition knows besides its rows, to save it; or, with ``sample_ids``, what it knows of these."""

    op = "export"
    reads = True
    sample_ids: list[Name] | None = None


class SetCursorRequest(PartitionRequest, Command[int]):
    """Set which samples a task has been given for good, in place of those before. Replies how many of them are there.

    Ids that are not there are ignored. Leases of the task end. Unless it is to ``create`` the task, raises
    `UnknownTaskError` if the partition does not have it.
    """

    op = "set_cursor"
    task_name: Name
    sample_ids: list[Name]
    create: bool = False


class AnnounceRequest(Request, Command[int]):
    """List the client for ``ttl_s`` seconds in place of what it announced before.

    Replies how many clients are listed. The more there are, the less often each announces itself.

    Attributes:
        client: The client. Its ``heard_s`` is 0.
        ttl_s: 0: the client closes, and is listed no longer.
    """

    op = "announce"
    reads = True
    client: ClientInfo
    ttl_s: Seconds


class ListClientsRequest(Request, Command[list[ClientInfo]]):
    """List the clients that were announced and whose time is not over, in any order.

    With ``ended``, also those that closed, or were not heard of, in the last ten minutes.
    """

    op = "list_clients"
    reads = True
    ended: bool = False


class ListUnitsRequest(Request):
    """List the storage units, in order of their first start."""
