"""Registers partitions."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dataplane_core.client.announcing import program_name
from dataplane_core.client.connection import Connection
from dataplane_core.errors import DataPlaneError, Shortfall, printable
from dataplane_core.spec import (
    FieldSpec,
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
    _sign(connection, request)
    connection.work.begin("register_partition", partition_id)
    info: PartitionInfo = connection.call(request)
    if (dropped := info.replaced) is not None and dropped.num_samples and dropped.epoch not in connection.registered:
        _log.warning("%s", printable(_dropped(partition_id, dropped)))
    if info.epoch == request.epoch:
        connection.registered.append(info.epoch)
    return info


def declared_fields(where: str, fields: Any) -> dict[str, str]:
    """What is declared of fields, if they are a dict, as text."""
    forms = fields.items() if isinstance(fields, Mapping) else ()
    declared = {name: FieldSpec.declared(f"{where}: field '{name}'", form) for name, form in forms if form is not None}
    return {name: spec.to_text() for name, spec in declared.items()}


def opening(
    connection: Connection, partition_id: str, fields: Sequence[str], tasks: list[str]
) -> RegisterRequest | None:
    """What registers the partition of a put or a claim, as a config with ``open_partitions`` allows."""
    if not connection.config.open_partitions:
        return None
    request = RegisterRequest(partition_id, fields=list(fields), consumer_tasks=tasks, if_exists="keep")
    return _sign(connection, request)


def _sign(connection: Connection, request: RegisterRequest) -> RegisterRequest:
    request.registered_by = f"{this_process()} ({connection.config.role or program_name()})"
    request.registered_at = time.time()
    return request


def advise(connection: Connection, where: str, advice: str) -> None:
    """Logs what the store says of field names, once. With ``open_partitions``, nobody chose the names."""
    if advice not in connection.advice and not connection.config.open_partitions:
        connection.advice.add(advice)
        _log.warning("%s", printable(f"{where}: {advice} If it is right, register it."))


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
