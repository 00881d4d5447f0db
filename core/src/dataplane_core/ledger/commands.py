"""The commands of the ledger: one object per operation, which is sent as it is to the host of the ledger.

`Ledger.apply` runs it. Before that, it may be added to a log. The type in ``Command[...]`` is that of the reply. Most
requests of hooks are commands as they are, and are given on here. A host that reads commands from bytes checks them by
their types, then by `Command.check`: one that clients do not make could leave the ledger in a state in which the calls
of other clients fail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from msgspec import Meta

from dataplane_core.arguments import Index, Name, Seconds
from dataplane_core.errors import Frozen
from dataplane_core.ledger.rows import Ref
from dataplane_core.spec.columns import FieldSpec
from dataplane_core.spec.operations import OPERATIONS
from dataplane_core.spec.requests import (
    AckRequest as AckRequest,
    AnnounceRequest as AnnounceRequest,
    ClaimRequest as ClaimRequest,
    ClearRequest as ClearRequest,
    Command,
    ConsumptionRequest as ConsumptionRequest,
    DescribeRequest as DescribeRequest,
    ExportRequest as ExportRequest,
    FieldsRequest as FieldsRequest,
    InspectRequest as InspectRequest,
    ListClientsRequest as ListClientsRequest,
    ListPartitionsRequest as ListPartitionsRequest,
    ListRequest as ListRequest,
    NackRequest as NackRequest,
    RegisterRequest as RegisterRequest,
    RenewRequest as RenewRequest,
    RequestId,
    SetCursorRequest as SetCursorRequest,
    SettleRequest as SettleRequest,
    check_opens,
)
from dataplane_core.spec.tags import TagValue

Reply = TypeVar("Reply", covariant=True)
#: Payload bytes of a row, or of a put: at most 2**50, so that their sums stay small.
_Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 50)]
#: Stands for the content of a cell, and for what kind of cell it is. One of 8 bytes is a probe: it stands for a few
#: bytes of the cell, and different cells may have the same.
Digest: TypeAlias = Annotated[bytes, Meta(min_length=8, max_length=16)]
PROBE_BYTES: Final = 8


class Write(Frozen, frozen=True):
    """One write of a put: fields whose payload is stored together."""

    fields: Annotated[Sequence[str], Meta(min_length=1)]  # in the order of their slots
    row_bytes: Sequence[_Bytes]  # of each row that is stored
    positions: Sequence[Index] | None = None  # the row that each sample has; each is that of some sample. None: row i
    # of one field that is kept by content: of each row that is stored. Rows of a put with the same probe are equal
    digests: Sequence[Digest] = ()
    known: Sequence[Ref] = ()  # of such a field: rows of other puts with equal cells, which are numbered after these

    @property
    def by_content(self) -> bool:
        """Whether samples of other puts may have its rows, or it those of others."""
        return bool(self.digests or self.known)

    @property
    def num_ids(self) -> int:
        """How many ids it takes: at least one, so that each write of a put has another."""
        return max(1, len(self.row_bytes))


class BeginPut(Frozen, Command[int], frozen=True):
    """Validates a put and reserves its bytes. Reply: the write id. Raises as the hook ``put_samples``.

    Also raises `AlreadyDoneError`: a put of the same ``request_id`` is committed; `ContentGoneError`: a row that the
    put names is gone, or there is one with a probe of the put. The rows that it names stay until it ends. Other
    attributes are as in `PutRequest`.
    """

    op = "begin_put"
    partition_id: Name
    sample_ids: Sequence[str]
    specs: Mapping[str, FieldSpec]
    writes: Sequence[Write]  # each field is in one of them
    tags: Sequence[Mapping[str, TagValue]] | None = None
    write_id: Index | None = None  # of its first write, drawn at random. None: the ledger takes its next number
    ticket: str | None = None  # in the queue for room (`WaitForRoom`). None: it does not queue
    ttl_s: Seconds = 0.0  # after so many seconds, if not committed, it counts as abandoned
    request_id: RequestId | None = None
    strings: Mapping[str, Sequence[str] | None] = {}
    strict: bool = False
    opens: RegisterRequest | None = None

    @property
    def size_bytes(self) -> int:
        return sum(sum(write.row_bytes) for write in self.writes)

    @property
    def num_ids(self) -> int:
        """How many ids the put takes, and at least one."""
        return max(1, sum(write.num_ids for write in self.writes))

    def by_id(self, write_id: int) -> dict[int, Write]:
        """Its writes by their ids, once it is begun with this one. The ids follow one another, row by row."""
        writes: dict[int, Write] = {}
        for write in self.writes:
            writes[write_id] = write
            write_id += write.num_ids
        return writes

    def check(self) -> None:
        rows = self.sample_ids if self.tags is None else self.tags
        self.expect(len(set(self.sample_ids)) == len(self.sample_ids) == len(rows), "sample_ids")
        names = [name for write in self.writes for name in write.fields]
        self.expect(len(names) == len(self.specs) and self.specs.keys() == set(names), "writes")
        for write in self.writes:
            of = range(len(rows)) if write.positions is None else write.positions
            num_rows = len(write.row_bytes)
            self.expect(len(of) == len(rows) and set(of) == set(range(num_rows + len(write.known))), "writes")
            if write.by_content:
                self.expect(len(write.fields) == 1 and len(write.digests) == num_rows, "writes")
        self.expect(self.size_bytes <= 1 << 50, "writes")
        check_opens(self)


class FindContent(Frozen, Command[dict[Digest, Ref]], frozen=True):
    """Asks which cells the store has, by their digests. Reply: those that it has, and their rows."""

    op = "find_content"
    reads = True
    digests: Sequence[Digest]


class ForgetContent(Frozen, Command[None], frozen=True):
    """Says that the payload of these refs is lost: no further put may rely on it."""

    op = "forget_content"
    refs: Sequence[Ref]


class WaitForRoom(Frozen, Command[None], frozen=True):
    """Adds a put that was refused for lack of room to the queue, or says that it still waits.

    Later puts then leave it its room (see `RoomQueue`). A put leaves the queue if it does not repeat this for some
    seconds, or after ``wait_s``; at once if that is 0. Its ``ticket`` is the same in all commands of the put.
    """

    op = "wait_for_room"
    ticket: str
    size_bytes: _Bytes
    wait_s: float

    def check(self) -> None:
        self.expect(not math.isnan(self.wait_s), "wait_s")


class CommitPut(Frozen, Command[list[Ref]], frozen=True):
    """Makes a begun put visible: its cells and tags at once. Reply: the refs that are now free: those that it replaced,
    and its own rows with content that another put committed since `BeginPut`, or that it has twice.

    Raises `StalePartitionError` if the partition or one of the samples was cleared since `BeginPut`, or the put was
    abandoned; else as `BeginPut`, for what was committed since. Nothing is visible then, and the put's refs are free.
    """

    op = "commit_put"
    write_id: Index


class AbortPut(Frozen, Command[list[Ref]], frozen=True):
    """Aborts a begun put, unless it is committed. May be repeated. Reply: the put's refs that are free."""

    op = "abort_put"
    write_id: Index


class PutTags(Frozen, Command[None], frozen=True):
    """A put without payload, in one step. Raises as `BeginPut`. See `OnceRequest`, `PutRequest`."""

    op = "put_tags"
    partition_id: Name
    sample_ids: Sequence[str]
    tags: Sequence[Mapping[str, TagValue]]
    request_id: RequestId | None = None
    left_s: Seconds = 0.0
    opens: RegisterRequest | None = None

    def check(self) -> None:
        self.expect(len(set(self.sample_ids)) == len(self.sample_ids) == len(self.tags), "sample_ids")
        check_opens(self)


class Part(Frozen, frozen=True):
    """The rows of a read whose payload is in one write."""

    write_id: int
    fields: tuple[str, ...]  # to take from it
    slots: tuple[int, ...]  # the index of each among all fields of the write
    rows: list[int]  # positions in the request
    positions: list[int]  # and in the write
    by_content: bool = False  # other samples may have the same rows


class Located(Frozen, frozen=True):
    """Where the payload of a read is."""

    parts: list[Part]
    specs: dict[str, FieldSpec]

    @property
    def refs(self) -> list[Ref]:
        """The refs to read, part by part."""
        return [(part.write_id, position) for part in self.parts for position in part.positions]


class Locate(Frozen, Command[Located], frozen=True):
    """Finds the payload of a read. Raises `MissingDataError` if a sample or a cell of it is not there, and
    `UnknownPartitionError`."""

    op = "locate"
    reads = True
    partition_id: Name
    sample_ids: Sequence[str]
    fields: Annotated[Sequence[str], Meta(min_length=1)]


class Collected(Frozen, Command[None], frozen=True):
    """Says that the payload of these refs was deleted."""

    op = "collected"
    refs: Sequence[Ref]


#: All commands. Their order is part of the form of messages.
COMMANDS: Final[tuple[type[Command[Any]], ...]] = (
    *(operation.request for operation in OPERATIONS.values() if issubclass(operation.request, Command)),
    *(BeginPut, FindContent, ForgetContent, WaitForRoom, CommitPut, AbortPut, PutTags, Locate, Collected),
)
