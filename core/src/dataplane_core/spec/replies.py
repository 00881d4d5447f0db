"""What the hooks answer. Replies are frozen."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import field
from msgspec.structs import replace

from dataplane_core.errors import Frozen, LeaseHolder, Shortfall, printable
from dataplane_core.spec.columns import FieldSpec, SharedRows, WireColumn
from dataplane_core.spec.tags import TagValue


class Registration(Frozen, frozen=True, kw_only=True, omit_defaults=False):
    """What `DataPlaneClient.register_partition` was given, besides the id."""

    fields: tuple[str, ...]
    num_samples: int | None
    consumer_tasks: tuple[str, ...]
    grpo_group_size: int | None
    enums: Mapping[str, tuple[str, ...]]
    declared: Mapping[str, str] = {}
    rollouts: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether claims hand out groups."""
        return self.rollouts or self.grpo_group_size is not None


class Replaced(Frozen, frozen=True, kw_only=True):
    """An earlier registration that a new one dropped, and what it held."""

    epoch: str
    registered_by: str
    registered_at: float
    num_samples: int
    num_left: Mapping[str, int]  # task -> how many of the samples it had not consumed


class PartitionInfo(Registration, frozen=True, kw_only=True):
    """A partition's registration. Its ``num_samples`` may be known only since the partition was finished.

    Attributes:
        epoch: The id of the registration, from `RegisterRequest.epoch`. No other registration has it.
        registered_by: The process that opened it, with its role. Empty if unknown.
        registered_at: When, in seconds since 1970 by that process' clock.
        replaced: In the reply to a registration: the one that it dropped, or None.
    """

    epoch: str
    registered_by: str = ""
    registered_at: float = 0.0
    replaced: Replaced | None = None

    @classmethod
    def requested(cls, request: Any) -> PartitionInfo:
        """The registration that a `RegisterRequest`, or an object with the same attributes, asks for."""
        return msgspec.convert(request, cls, from_attributes=True)

    def registration(self) -> dict[str, Any]:
        """What is of a `Registration`, as values that JSON and msgpack can keep."""
        plain: dict[str, Any] = msgspec.to_builtins(msgspec.convert(self, Registration, from_attributes=True))
        return plain

    def extended(
        self,
        fields: Sequence[str],
        consumer_tasks: Sequence[str],
        enums: Mapping[str, Sequence[str]],
        declared: Mapping[str, str] | None = None,
    ) -> PartitionInfo:
        """This registration with what ``if_exists="keep"`` adds: fields, tasks, strings of enums, and so on."""
        names = dict.fromkeys((*self.enums, *enums))
        return replace(
            self,
            fields=_joined(self.fields, fields),
            consumer_tasks=_joined(self.consumer_tasks, consumer_tasks),
            enums={name: _joined(self.enums.get(name, ()), enums.get(name, ())) for name in names},
            declared={**self.declared, **(declared or {})},
        )


def _joined(names: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*names, *others)))


class WireBatch(Frozen, frozen=True):
    """Columns read back, one row per requested id, in the order asked for.

    Attributes:
        columns: Field -> encoded column. Core takes ownership.
        specs: Field -> the spec fixed by the field's first write. If its cells were put while it was open,
            `FieldSpec.reading` of it.
    """

    columns: Mapping[str, WireColumn | SharedRows]
    specs: Mapping[str, FieldSpec]


class Claim(Frozen, frozen=True):
    """Samples handed out.

    Attributes:
        sample_ids: In order of first write. May be empty.
        tags: One dict per id.
        lease_tokens: One per id if a lease was asked for, else None.
        exhausted: The partition can give this task no more than this.
        num_ready: How many samples were ready (if ``explain`` was set); of a partition of rollouts, how many groups.
        shortfall: Why the other samples are not handed out (if ``explain`` was set and this claim hands out none).
        epoch: The registration, if the claim has a ``dp_rank``.
        num_ranks: If the claim has a ``dp_size`` and its batch is decided: how many ranks have samples in it. 0: there
            is no such batch, for any rank.
        ask_again_s: The least number of seconds until a waiting client asks again.
        advice: What its user should know of its fields, if this claim hands out none. Empty: nothing.
        counts_groups: Whether ``batch_size`` and ``num_ready`` count groups: the partition is one of rollouts.
    """

    sample_ids: Sequence[str] = ()
    tags: Sequence[Mapping[str, TagValue]] = ()
    lease_tokens: Sequence[str] | None = None
    exhausted: bool = False
    num_ready: int = 0
    shortfall: Shortfall | None = None
    epoch: str | None = None
    num_ranks: int | None = None
    ask_again_s: float = 0.0
    advice: str = ""
    counts_groups: bool = False

    @property
    def answered(self) -> bool:
        """Whether a claim that waits has its answer: samples, or that there will be none."""
        return bool(self.sample_ids) or self.exhausted


class SampleList(Frozen, frozen=True):
    """Ids in order of first write, with their tags."""

    sample_ids: Sequence[str]
    tags: Sequence[Mapping[str, TagValue]]


class CallInfo(Frozen, frozen=True):
    """An operation that a client has under way.

    Attributes:
        operation: The name of the client's method.
        partition_id: The partition, or empty.
        running_s: Seconds since it began, as of the announcement.
    """

    operation: str
    partition_id: str
    running_s: float


class WorkInfo(Frozen, frozen=True):
    """The last put of certain fields, claim for a task, or registration, which may be under way.

    Attributes:
        operation: ``put_samples``, ``claim_meta`` or ``register_partition``.
        partition_id: The partition.
        task_name: The task that it claims for, or empty.
        fields: What it puts, or what its claims require.
        tag_filter: That of the claim, in full form.
        batch_size: That of the claim.
        began_s: Seconds since it began, as of the announcement; or the first of the claims that wait, or that got
            nothing one after the other.
        ended_s: Seconds since a claim ended. None: one waits.
        served_s: Seconds since the last one that put samples, or was given some. None: there was none.
    """

    operation: str
    partition_id: str
    task_name: str = ""
    fields: Sequence[str] = ()
    tag_filter: Mapping[str, tuple[str, Any]] | None = None
    batch_size: int = 0
    began_s: float = 0.0
    ended_s: float | None = None
    served_s: float | None = None


class PhaseInfo(Frozen, frozen=True):
    """What the process of a client does outside of the store, as `DataPlaneClient.phase` was told.

    Attributes:
        name: The name of the phase, such as ``generate``.
        running_s: Seconds since it began, as of the announcement.
        partition_id: The partition of ``groups``, or empty.
        groups: The groups whose samples it makes.
    """

    name: str
    running_s: float
    partition_id: str = ""
    groups: Sequence[str] = ()


class ClientInfo(Frozen, frozen=True):
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
        period_s: Seconds until it announces itself again, as of the announcement.
        work: What it did last, of each kind, what began last first.
        phases: The innermost phase of each thread or task that is in one; those that began first, the first one first.
        state: ``open``; ``closed``; or ``silent``: it did not announce itself for longer than it should, so that its
            process is dead, stopped or cut off. The store sets it. On the host of such a process, `list_clients` knows
            more: it is ``stopped``, or ``gone``.
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
    period_s: float = 0.0
    work: Sequence[WorkInfo] = ()
    phases: Sequence[PhaseInfo] = ()
    state: Literal["open", "closed", "silent", "stopped", "gone"] = "open"


class UnitInfo(Frozen, frozen=True):
    """A storage unit: a process that holds payload.

    Attributes:
        name: Its name.
        state: ``serving``; ``starting``: its process is started again, or its folder is waited for; ``removed``: no
            node has it any more, and samples that it held are not cleared yet.
        node: The node that it runs on, or empty.
        address: ``host:port`` where it is reached, or empty.
        num_rows: Rows that it holds. One put writes one row of a sample, or a few.
        size_bytes: Their payload.
        num_lost: Rows that ended with it, or with an earlier life of it, and are not cleared yet.
        num_starts: How often it was started.
        path: How rows get from it to this process, and to it: ``memory``, which both share; ``wire``; or empty, if that
            is not known.
    """

    name: str
    state: Literal["serving", "starting", "removed"]
    node: str = ""
    address: str = ""
    num_rows: int = 0
    size_bytes: int = 0
    num_lost: int = 0
    num_starts: int = 1
    path: Literal["", "memory", "wire"] = ""


class FieldList(Frozen, frozen=True):
    """Which fields samples have.

    Attributes:
        patterns: Sets of fields, each in any order.
        index: For each sample, the place of its set in ``patterns``.
    """

    patterns: Sequence[Sequence[str]]
    index: Sequence[int]


class TaskDescription(Frozen, frozen=True):
    """What a consumer task was given of a partition.

    Attributes:
        num_ready: Samples that a claim of all registered fields could give it now.
        num_leased: Samples that it holds under a lease.
        num_consumed: Samples that it was given for good: without a lease, or acked.
        oldest_lease: Who has held a sample longest under its present lease. None if the task holds none.
        is_consumed: Whether `DataPlaneClient.check_consumption_status` is true of the task.
    """

    num_ready: int
    num_leased: int
    num_consumed: int
    oldest_lease: LeaseHolder | None = None
    is_consumed: bool = False


class Answer(Frozen, frozen=True):
    """What a claim would find."""

    num_ready: int  # samples that it could be given now; of a partition of rollouts, groups
    shortfall: Shortfall | None = None  # why it could not be given the others, if that was asked for


class PartitionDescription(Frozen, frozen=True):
    """What a partition holds.

    Attributes:
        info: Its registration.
        specs: Field -> kind, dtype, rank and trailing shape of its cells, for each field that was written.
        num_samples: How many samples it holds.
        num_cleared: How many samples of this registration were cleared.
        held_bytes: Payload bytes of the samples that it holds, as counted for ``capacity_bytes``.
        oldest_s: Seconds since the first write of the oldest sample that it holds, or None if it holds none.
        tasks: Task -> what it was given.
        num_rows: Field -> how many of the samples have it, for each field that was written. May be empty if this was
            not asked for.
        answers: One per question of the request. None: there is no such task.
        full: While puts wait for room: the bytes of payload that the store holds, and may hold.
    """

    info: PartitionInfo
    specs: Mapping[str, FieldSpec]
    num_samples: int
    num_cleared: int
    held_bytes: int
    oldest_s: float | None
    tasks: Mapping[str, TaskDescription]
    num_rows: Mapping[str, int] = field(default_factory=dict)
    answers: Sequence[Answer | None] = ()
    full: tuple[int, int] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether as many samples as were registered have been written."""
        expected = self.info.num_samples
        return expected is not None and self.num_samples + self.num_cleared >= expected

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
    lines += ["".join(f"<td>{html.escape(printable(str(cell)))}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>" if rows else ""


class SampleState(Frozen, frozen=True):
    """A sample at one moment, but for its cells."""

    fields: Mapping[str, int]  # field -> the number of its cell; another cell has another one
    tags: Mapping[str, TagValue]
    consumed_by: Sequence[str]  # the tasks that it was given to for good
    seq: int = 0  # in order of first write; one that is cleared and put again gets another one


class PartitionState(Frozen, frozen=True):
    """What a partition knows besides its registration and its rows; or ``samples`` alone, if samples were asked
    for."""

    consumed: Mapping[str, Sequence[str]] = field(default_factory=dict)  # task -> samples, in order of first write
    cleared_ids: Sequence[str] = ()  # samples that count for ``num_samples``, if there is one
    broken_groups: Sequence[str] = ()  # that lost a member
    samples: Mapping[str, SampleState] = field(default_factory=dict)
