"""Registers partitions, and tells of field names that nobody registered."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from dataplane_core.client.announcing import program_name
from dataplane_core.client.connection import ADVICE_S, Connection
from dataplane_core.errors import DataPlaneError, Shortfall, UnknownPartitionError, printable
from dataplane_core.spec import (
    Capability,
    ClaimRequest,
    InspectRequest,
    PartitionDescription,
    PartitionInfo,
    Question,
    RegisterRequest,
    this_process,
)
from dataplane_core.spec.replies import Replaced

_log = logging.getLogger(__name__)


def register(connection: Connection, request: RegisterRequest) -> PartitionInfo:
    """Registers a partition, and says who does. A finished one may have any number of samples."""
    partition_id = request.partition_id
    request.registered_by = f"{this_process()} ({connection.config.role or program_name()})"
    request.registered_at = time.time()
    connection.work.begin("register_partition", partition_id)
    info = connection.remember(partition_id, connection.call(request))
    if (dropped := info.replaced) is not None and dropped.num_samples and dropped.epoch not in connection.registered:
        _log.warning("%s", printable(_dropped(partition_id, dropped)))
    if info.epoch == request.epoch:
        connection.registered.append(info.epoch)
    return info


def open_partition(
    connection: Connection, partition_id: str, fields: Sequence[str], tasks: list[str], deadline: float
) -> None:
    """Registers a partition, or adds tasks to it, as a config with ``open_partitions`` allows."""
    try:
        info = connection.describe(partition_id, deadline)
    except UnknownPartitionError:
        group_size = None
    else:
        if set(tasks) <= set(info.consumer_tasks):
            return
        group_size = info.grpo_group_size
    request = RegisterRequest(
        partition_id,
        fields=list(fields),
        consumer_tasks=tasks,
        grpo_group_size=group_size,
        if_exists="keep",
        deadline=deadline,
    )
    register(connection, request)


def must_prepare(connection: Connection, request: ClaimRequest) -> bool:
    """Whether `prepare_claim` has anything to do, which may take calls."""
    info = connection.infos.get(request.partition_id)
    unknown = connection.field_names.unknown("claim", request.required_fields, info)
    return connection.config.open_partitions or bool(unknown)


def prepare_claim(connection: Connection, request: ClaimRequest) -> None:
    """Registers the task of a claim, if puts and claims do that, and tells of its fields. Blocks."""
    if connection.config.open_partitions:
        open_partition(
            connection, request.partition_id, request.required_fields, [request.task_name], connection.deadline()
        )
    where = f"claim_meta('{request.partition_id}', '{request.task_name}')"
    check_fields(connection, "claim", where, request.partition_id, request.required_fields, connection.deadline())


def check_fields(
    connection: Connection, use: str, where: str, partition_id: str, names: Iterable[str], deadline: float
) -> None:
    """Tells of names that are not registered; see `FieldNames`. Asks the store only if it does not know them."""
    found = connection.field_names
    if not found.unknown(use, names, connection.infos.get(partition_id)):
        return
    until = deadline if found.strict else min(deadline, time.monotonic() + ADVICE_S)
    try:
        info = connection.remember(partition_id, connection.describe(partition_id, until))
        unknown = found.unknown(use, names, info)
        written: Iterable[str] = ()
        if unknown and use == "claim":
            connection.require(Capability.LISTING, "claim_meta with strict_fields")
            request = InspectRequest(partition_id, count_rows=False, deadline=until)
            written = connection.call(request).specs
    except DataPlaneError:
        if found.strict:
            raise
        return  # the put or the claim says it, if it matters
    found.tell(use, where, unknown, info, written)


def tell_short_groups(connection: Connection, partition_id: str, info: PartitionInfo) -> None:
    """Warns of groups that are not whole, if no more samples come."""
    questions = [Question(task_name=name, required_fields=[], explain=True) for name in info.consumer_tasks]
    with suppress(DataPlaneError):  # it is advice
        found: PartitionDescription = connection.call(InspectRequest(partition_id, questions))
        told = [each.shortfall for each in found.answers if each is not None and each.shortfall is not None]
        short = max(told, key=lambda each: each.num_incomplete, default=Shortfall())
        if found.is_complete and short.num_incomplete:
            groups = [f"'{name}' has {count}" for name, count in short.incomplete_groups.items()]
            text = f"groups that lack some of their {info.grpo_group_size} samples are never given"
            left = f"{', '.join(groups)}. Samples in such groups: {short.num_incomplete}."
            _log.warning("%s", printable(f"finish_partition('{partition_id}'): {text}: {left}"))


def _dropped(partition_id: str, replaced: Replaced) -> str:
    """What a registration dropped that another client had made."""
    task, count = max(replaced.num_left.items(), key=lambda each: each[1], default=("", 0))
    left = f", {count} of them not consumed by '{task}'" if task else ""
    by, ago_s = replaced.registered_by or "another client", max(0.0, time.time() - replaced.registered_at)
    return (
        f"register_partition('{partition_id}') dropped {replaced.num_samples} samples{left}: {by} had registered it "
        f"{ago_s:.0f} s ago. Let one process register a partition, or pass if_exists='keep'."
    )
