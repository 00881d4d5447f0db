"""`LedgerBackend`: every operation of a backend on top of a `Ledger` (wherever it lives) and a payload store.

A storage author supplies four things: `_ledger` (one call into the ledger service), `_store`, `_fetch` and `_delete`.
Payload is stored before the ledger makes it visible and deleted after the ledger has let go of it, and write ids are
never used again; so a reader never meets half a row or a foreign one, whoever crashes when.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from dataplane_core.backend import Backend
from dataplane_core.capabilities import OPERATIONS, Capability
from dataplane_core.codec.sizes import row_nbytes
from dataplane_core.errors import CapacityExceededError, DataPlaneError, OperationTimeoutError
from dataplane_core.hookspecs import (
    AckRequest,
    Claim,
    ClaimRequest,
    ClearReply,
    ClearRequest,
    ConsumptionReply,
    ConsumptionRequest,
    DescribeRequest,
    GetRequest,
    ListRequest,
    NackRequest,
    PartitionInfo,
    PutReply,
    PutRequest,
    RegisterRequest,
    RenewRequest,
    SampleList,
    SettleReply,
    WireBatch,
    WireColumn,
)
from dataplane_core.ledger import Ledger, Located, Ref
from dataplane_core.tags import TagValue

__all__ = ["LEDGER_CAPABILITIES", "CapacityOptions", "LedgerBackend", "LedgerService", "RefsGoneError"]

#: What the ledger and the order of storing, committing and deleting give to every backend on top of them.
LEDGER_CAPABILITIES: Final[frozenset[Capability]] = OPERATIONS | {Capability.FENCED, Capability.ATOMIC_OVERWRITE}

#: Seconds beyond its deadline after which a put that was not committed counts as abandoned.
_ABANDON_GRACE_S: Final = 30.0
#: Seconds that undoing a failed put may take.
_UNDO_S: Final = 5.0
#: Seconds between two tries of a put that waits for room.
_FULL_POLL_S: Final = 0.01


class CapacityOptions(BaseModel):
    """Options of every backend that bounds what it holds.

    Attributes:
        capacity_bytes: Bound on the payload bytes held, or None.
        on_full: A put that does not fit waits until its deadline, or raises at once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    capacity_bytes: int | None = Field(default=None, gt=0)
    on_full: Literal["block", "raise"] = "block"


class RefsGoneError(DataPlaneError):
    """Payload that was located is no longer there: cleared or overwritten meanwhile. Locate again."""


class LedgerService:
    """A `Ledger` with a clock and a lock: what a host serves.

    Args:
        capacity_bytes: As for `Ledger`.
        clock: Gives the time in seconds.
    """

    def __init__(self, capacity_bytes: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = Ledger(capacity_bytes=capacity_bytes)
        self._clock = clock
        self._lock = threading.Lock()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls one of this class's public methods by name; the one door for remote callers."""
        with self._lock:
            return getattr(self, f"_do_{method}")(*args, **kwargs)

    def _do_register(self, *args: Any) -> tuple[PartitionInfo, list[Ref]]:
        return self._ledger.register(*args)

    def _do_describe(self, partition_id: str) -> PartitionInfo:
        return self._ledger.describe(partition_id)

    def _do_begin_put(self, *args: Any, ttl_s: float) -> int:
        return self._ledger.begin_put(*args, now=self._clock(), ttl_s=ttl_s)

    def _do_check_put(self, *args: Any, capacity_bytes: int | None) -> None:
        self._ledger.check_put(*args, capacity_bytes=capacity_bytes, now=self._clock())

    def _do_commit_put(self, write_id: int) -> list[Ref]:
        return self._ledger.commit_put(write_id)

    def _do_put_tags(
        self, partition_id: str, sample_ids: Sequence[str], tags: Sequence[Mapping[str, TagValue]], epoch: int | None
    ) -> None:
        no_bytes = [0] * len(sample_ids)
        write_id = self._ledger.begin_put(
            partition_id, sample_ids, {}, no_bytes, tags, epoch, now=self._clock(), ttl_s=1.0
        )
        self._ledger.commit_put(write_id)

    def _do_abort_put(self, write_id: int) -> list[Ref]:
        return self._ledger.abort_put(write_id)

    def _do_locate(self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str]) -> Located:
        return self._ledger.locate(partition_id, sample_ids, fields)

    def _do_claim(self, *args: Any, **kwargs: Any) -> Claim:
        return self._ledger.claim(*args, **kwargs, now=self._clock())

    def _do_may_claim(self, *args: Any, **kwargs: Any) -> bool:
        return self._ledger.may_claim(*args, **kwargs, now=self._clock())

    def _do_ack(self, *args: Any) -> None:
        self._ledger.ack(*args, now=self._clock())

    def _do_nack(self, *args: Any) -> None:
        self._ledger.nack(*args, now=self._clock())

    def _do_renew(self, *args: Any) -> None:
        self._ledger.renew(*args, now=self._clock())

    def _do_consumed(self, partition_id: str, task_names: Sequence[str]) -> bool:
        return self._ledger.consumed(partition_id, task_names)

    def _do_clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> tuple[int, list[Ref]]:
        count, _ = self._ledger.clear(partition_id, sample_ids)
        return count, self._ledger.garbage(self._clock())

    def _do_collected(self, refs: Sequence[Ref]) -> None:
        self._ledger.collected(refs)

    def _do_list_samples(self, partition_id: str, tag_filter: Mapping[str, tuple[str, Any]] | None) -> SampleList:
        return self._ledger.list_samples(partition_id, tag_filter)

    def _do_held_bytes(self) -> int:
        return self._ledger.held_bytes


class LedgerBackend(Backend, ABC):
    """All operations, from a ledger and a payload store. ``Config`` derives from `CapacityOptions`."""

    capabilities = LEDGER_CAPABILITIES
    # annotated, so that an author's options may have fields without a default
    Config: ClassVar[type[CapacityOptions]] = CapacityOptions

    # --- what a storage author supplies -------------------------------------------------------------------------------

    @abstractmethod
    def _ledger(self, deadline: float, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls `LedgerService.call` where the ledger lives, by ``deadline`` (`time.monotonic`'s clock)."""

    @abstractmethod
    def _store(self, write_id: int, columns: Mapping[str, WireColumn], num_samples: int, deadline: float) -> None:
        """Stores the payload of a write; returns when every client can fetch it. Copies what it keeps.

        Raises:
            CapacityExceededError: The engine itself is full, whatever the ledger counts. What was stored is deleted.
        """

    @abstractmethod
    def _fetch(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn]:
        """Fetches columns in the order of the request, in memory of their own.

        Raises:
            RefsGoneError: A ref is no longer there.
        """

    @abstractmethod
    def _delete(self, refs: Sequence[Ref], deadline: float) -> None:
        """Deletes payload; refs that are not there are ignored."""

    # --- operations ---------------------------------------------------------------------------------------------------

    def register_partition(self, request: RegisterRequest) -> PartitionInfo:
        """Opens a partition afresh."""
        info, freed = self._ledger(
            request.deadline,
            "register",
            request.partition_id,
            request.fields,
            request.num_samples,
            request.consumer_tasks,
            request.grpo_group_size,
            request.enums,
        )
        self._collect(freed, request.deadline)
        registered: PartitionInfo = info
        return registered

    def describe_partition(self, request: DescribeRequest) -> PartitionInfo:
        """Reads a registration."""
        info: PartitionInfo = self._ledger(request.deadline, "describe", request.partition_id)
        return info

    def put_samples(self, request: PutRequest) -> PutReply:
        """Reserves, stores, commits; where there is no room, tries again, unless ``on_full`` is ``raise``."""
        num_samples = len(request.sample_ids)
        reply = PutReply(num_samples=num_samples)
        if not request.columns:
            self._ledger(
                request.deadline, "put_tags", request.partition_id, request.sample_ids, request.tags, request.epoch
            )
            return reply
        row_bytes = row_nbytes(request.columns, num_samples)
        while True:
            try:
                freed = self._put(request, row_bytes)
                break
            except CapacityExceededError as error:
                if not error.retryable or self.config.on_full == "raise":
                    raise
                if time.monotonic() + _FULL_POLL_S >= request.deadline:
                    raise OperationTimeoutError(
                        f"put_samples('{request.partition_id}', {num_samples} samples) timed out waiting for room. "
                        f"Nothing was written. {error.message}",
                        hint=error.hint,
                    ) from error
                time.sleep(_FULL_POLL_S)
        self._collect(freed, request.deadline)
        return reply

    def get_samples(self, request: GetRequest) -> WireBatch:
        """Locates, fetches; again where the rows moved meanwhile."""
        while True:
            located: Located = self._ledger(
                request.deadline, "locate", request.partition_id, request.sample_ids, request.fields
            )
            try:
                columns = self._fetch(located, len(request.sample_ids), request.deadline)
            except RefsGoneError as error:
                if time.monotonic() >= request.deadline:
                    raise OperationTimeoutError(
                        f"get_samples('{request.partition_id}', {len(request.sample_ids)} samples) timed out: the rows "
                        "were overwritten faster than they could be read."
                    ) from error
                continue
            return WireBatch(columns=columns, specs=located.specs)

    def claim(self, request: ClaimRequest) -> Claim:
        """Hands out ready samples."""
        claim: Claim = self._ledger(
            request.deadline,
            "claim",
            request.partition_id,
            request.task_name,
            request.required_fields,
            request.batch_size,
            all_or_nothing=request.all_or_nothing,
            lease_s=request.lease_s,
            tag_filter=request.tag_filter,
            explain=request.explain,
        )
        return claim

    def ack(self, request: AckRequest) -> SettleReply:
        """Settles leases."""
        return self._settle("ack", request)

    def nack(self, request: NackRequest) -> SettleReply:
        """Gives leased samples back."""
        return self._settle("nack", request)

    def renew(self, request: RenewRequest) -> SettleReply:
        """Extends leases."""
        return self._settle("renew", request, request.lease_s)

    def check_consumption(self, request: ConsumptionRequest) -> ConsumptionReply:
        """Asks the ledger."""
        consumed = self._ledger(request.deadline, "consumed", request.partition_id, request.task_names)
        return ConsumptionReply(consumed=consumed)

    def clear_samples(self, request: ClearRequest) -> ClearReply:
        """Drops rows, then their payload and what crashed writers left."""
        count, garbage = self._ledger(request.deadline, "clear", request.partition_id, request.sample_ids)
        self._collect(garbage, request.deadline)
        return ClearReply(num_samples=count)

    def list_samples(self, request: ListRequest) -> SampleList:
        """Lists ids and tags."""
        listed: SampleList = self._ledger(request.deadline, "list_samples", request.partition_id, request.tag_filter)
        return listed

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _put(self, request: PutRequest, row_bytes: Sequence[int]) -> Sequence[Ref]:
        """One try of a put; what it frees."""
        write_id: int = self._ledger(
            request.deadline,
            "begin_put",
            request.partition_id,
            request.sample_ids,
            request.specs,
            row_bytes,
            request.tags,
            request.epoch,
            ttl_s=max(0.0, request.deadline - time.monotonic()) + _ABANDON_GRACE_S,
        )
        try:
            self._store(write_id, request.columns, len(request.sample_ids), request.deadline)
            freed: Sequence[Ref] = self._ledger(request.deadline, "commit_put", write_id)
        except BaseException:
            self._undo(write_id)
            raise
        return freed

    def _undo(self, write_id: int) -> None:
        """Best effort after a failed put; what cannot be undone now, the ledger hands to the next clear.

        A put whose commit went through although its reply was lost stays: the ledger then frees nothing.
        """
        deadline = time.monotonic() + _UNDO_S
        try:
            self._collect(self._ledger(deadline, "abort_put", write_id), deadline)
        except Exception:  # whatever the engine raises now, why the put failed is what its caller gets
            return

    def _collect(self, refs: Sequence[Ref], deadline: float) -> None:
        if refs:
            self._delete(refs, deadline)
            self._ledger(deadline, "collected", refs)

    def _settle(self, method: str, request: Any, *extra: Any) -> SettleReply:
        self._ledger(
            request.deadline,
            method,
            request.partition_id,
            request.task_name,
            request.sample_ids,
            request.lease_tokens,
            *extra,
        )
        return SettleReply(num_samples=len(request.sample_ids))
