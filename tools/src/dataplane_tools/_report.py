"""What `dataplane top` asks of a store, and its answers as JSON values. It changes nothing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from msgspec import structs

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    LeaseHolder,
    MissingDataError,
    UnknownPartitionError,
    UnsupportedOperationError,
    Verdict,
)
from dataplane_core.spec import Capability, ClientInfo, FieldSpec, PartitionDescription, PartitionInfo
from dataplane_tools._store import capacity_of

_STACKS_TIMEOUT_S: Final = 20.0
#: Partitions that are shown live.
_MOST_PARTITIONS: Final = 4


class Looks:
    """Asks a store one question after the other, and keeps the last answers.

    Args:
        client: A client of the store.
        partition_id: The partition to ask for. None: all, in turns.
        details: Also how many samples have each field; and, of a partition that is named, which sample each task has
            not consumed longest.
        clock: Gives the time in seconds.

    Attributes:
        partitions: Partition -> its report, see `partition_report`.
        clients: The clients that announced themselves, also those that are gone. None: not known yet, or the backend
            does not list them.
        units: The storage units. None: not known yet, or the backend has none.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        partition_id: str | None = None,
        *,
        details: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.partitions: dict[str, dict[str, Any]] = {}
        self.clients: list[dict[str, Any]] | None = None
        self.units: list[dict[str, Any]] | None = None
        self._partition_id, self._details, self._clock = partition_id, details, clock
        self._questions: list[Callable[[], None]] = []
        self._before: dict[str, tuple[float, PartitionDescription]] = {}
        self._verdicts: dict[tuple[str, str], Verdict] = {}

    @property
    def report(self) -> dict[str, Any]:
        """All answers, as JSON values."""
        return {
            "backend": self.client.backend_name,
            "held_bytes": sum(partition["held_bytes"] for partition in self.partitions.values()),
            "capacity_bytes": capacity_of(self.client),
            "partitions": list(self.partitions.values()),
            "clients": self.clients,
            "units": self.units,
        }

    def ask(self) -> None:
        """Asks one question.

        Raises:
            DataPlaneError: The store does not answer.
        """
        if not self._questions:
            self._begin_round()
        self._questions.pop(0)()

    def ask_all(self) -> None:
        """Asks all questions once.

        Raises:
            DataPlaneError: As `ask`. Or there is no such partition.
        """
        self._questions.clear()
        self.ask()
        while self._questions:
            self.ask()

    def _begin_round(self) -> None:
        if self._partition_id is None:
            self._questions.append(self._list)
        else:
            self._questions += self._questions_of(self._partition_id)
        if Capability.CLIENTS in self.client.capabilities:
            self._questions.append(self._ask_for_clients)
        if Capability.UNITS in self.client.capabilities:
            self._questions.append(self._ask_for_units)

    def _list(self) -> None:
        names = self.client.list_partitions()
        self.partitions = {name: self.partitions[name] for name in names if name in self.partitions}
        self._before = {name: seen for name, seen in self._before.items() if name in names}
        self._verdicts = {task: verdict for task, verdict in self._verdicts.items() if task[0] in names}
        self._questions[:0] = [question for name in names for question in self._questions_of(name)]

    def _questions_of(self, name: str) -> list[Callable[[], None]]:
        """What is asked of a partition. Why its tasks wait only if it is shown live, since that may cost more."""
        is_shown = self._details or name not in self.partitions or self.partitions[name] in newest(self.partitions)
        return [*([partial(self._ask_why, name)] if is_shown else []), partial(self._describe, name)]

    def _describe(self, name: str) -> None:
        try:
            found = self.client.describe(name, count_rows=self._details)
            waiting = _waiting(self.client, found.info, name) if self._details and self._partition_id else {}
        except UnknownPartitionError:
            if self._partition_id is not None:
                raise
            self.partitions.pop(name, None)  # cleared meanwhile
            return
        now = self._clock()
        at, before = self._before.get(name, (now, None))
        self.partitions[name] = partition_report(name, found, before, max(now - at, 1e-3), waiting, self._verdicts)
        self._before[name] = now, found

    def _ask_why(self, name: str) -> None:
        """How the tasks of a partition fare, if the backend can say it. The next report of the partition says so."""
        if {Capability.LISTING, Capability.CLAIMS} <= self.client.capabilities:
            with suppress(UnknownPartitionError):  # cleared meanwhile
                self._verdicts |= {(name, verdict.task_name): verdict for verdict in self.client.why(name)}

    def _ask_for_clients(self) -> None:
        clients = self.client.list_clients(ended=True)
        self.clients = [client_report(client) for client in clients if client.state != "closed"]

    def _ask_for_units(self) -> None:
        self.units = [structs.asdict(unit) for unit in self.client.list_units()]


def newest(partitions: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports of the few partitions that were written last."""

    def age_s(partition: dict[str, Any]) -> float:
        return float("inf") if partition["oldest_s"] is None else float(partition["oldest_s"])

    return sorted(partitions.values(), key=age_s)[:_MOST_PARTITIONS]


def stacks_of(clients: Sequence[ClientInfo]) -> dict[str, str]:
    """Process -> what py-spy prints of it, of the open clients on this host.

    Raises:
        UnsupportedOperationError: There is no py-spy.
    """
    here = {client.pid for client in clients if client.host == socket.gethostname() and client.state == "open"}
    return {str(pid): _stacks_of(pid) for pid in sorted(here)}


def _waiting(client: DataPlaneClient, info: PartitionInfo, partition_id: str) -> dict[str, dict[str, Any]]:
    """Task -> the oldest sample that it has not consumed, and the registered fields that the sample lacks."""
    if Capability.CURSORS not in client.capabilities:
        return {}
    ids = client.list_sample_ids(partition_id)
    waiting: dict[str, dict[str, Any]] = {}
    for task in info.consumer_tasks:
        consumed = set(client.list_consumed(partition_id, task))
        oldest = next((sample_id for sample_id in ids if sample_id not in consumed), None)
        if oldest is not None:
            try:
                (fields,) = client.list_fields([oldest], partition_id)
            except MissingDataError:
                continue  # cleared between the calls
            waiting[task] = {"sample_id": oldest, "lacks": [name for name in info.fields if name not in fields]}
    return waiting


def _stacks_of(pid: int) -> str:
    """What py-spy prints of a process."""
    beside_python = os.path.dirname(sys.executable)
    spy = shutil.which("py-spy", path=os.pathsep.join((beside_python, os.environ.get("PATH", os.defpath))))
    if spy is None:
        raise UnsupportedOperationError(
            "there is no py-spy, which reads the stacks of other processes.",
            hint="pip install 'dataplane-tools[stacks]'",
        )
    try:
        found = subprocess.run(
            [spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_STACKS_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"py-spy did not answer within {_STACKS_TIMEOUT_S:g} s"
    return (found.stdout if found.returncode == 0 else found.stderr).strip()


# --- as values --------------------------------------------------------------------------------------------------------


def partition_report(
    name: str,
    found: PartitionDescription,
    before: PartitionDescription | None,
    passed_s: float,
    waiting: Mapping[str, Mapping[str, Any]],
    verdicts: Mapping[tuple[str, str], Verdict],
) -> dict[str, Any]:
    """What is known of a partition, as JSON values.

    Args:
        name: The partition.
        found: What it holds now.
        before: What it held ``passed_s`` seconds ago, for rates. None: there are none.
        passed_s: Seconds.
        waiting: Task -> the oldest sample that it has not consumed, and what the sample lacks.
        verdicts: Partition and task -> how it fares, as far as that is known. ``ready`` then counts the samples with
            the fields that the task claims; else those with all registered fields.
    """
    same = before if before is not None and before.info.epoch == found.info.epoch else None
    written = found.num_samples + found.num_cleared

    def per_second(now: int, then: int) -> float:
        return round((now - then) / passed_s, 1)

    tasks: dict[str, dict[str, Any]] = {}
    for task, counts in found.tasks.items():
        verdict = verdicts.get((name, task))
        tasks[task] = {
            "left": found.num_samples - counts.num_consumed,
            "ready": counts.num_ready if verdict is None else verdict.num_ready,
            "leased": counts.num_leased,
            "consumed": counts.num_consumed,
            "oldest_lease": None if counts.oldest_lease is None else _lease(counts.oldest_lease),
            "oldest_not_consumed": waiting.get(task),
            "why": None if verdict is None else asdict(verdict),
        }
        # what a task consumed is not known of samples that were cleared meanwhile
        if same is not None and task in same.tasks and same.num_cleared == found.num_cleared:
            tasks[task]["consumed_per_s"] = per_second(counts.num_consumed, same.tasks[task].num_consumed)
    return {
        "partition_id": name,
        "num_samples": found.info.num_samples,
        "grpo_group_size": found.info.grpo_group_size,
        "written": written,
        "written_per_s": None if same is None else per_second(written, same.num_samples + same.num_cleared),
        "held": found.num_samples,
        "cleared": found.num_cleared,
        "held_bytes": found.held_bytes,
        "oldest_s": found.oldest_s,
        "tasks": tasks,
        "fields": {
            field: None
            if field not in found.specs
            else {**_shape(found.specs[field]), "rows": found.num_rows.get(field)}
            for field in dict.fromkeys((*found.info.fields, *found.specs))
        },
    }


def client_report(client: ClientInfo) -> dict[str, Any]:
    """What a client announced, as JSON values. Its times are as of then: it may be stopped or dead since."""
    return {
        "host": client.host,
        "pid": client.pid,
        "role": client.role,
        "open_s": round(client.open_s, 1),
        "heard_s": round(client.heard_s, 1),
        "state": client.state,
        "num_calls": client.num_calls,
        "calls": [
            {
                "operation": call.operation,
                "partition_id": call.partition_id,
                "running_s": round(call.running_s, 1),
            }
            for call in client.calls
        ],
        "phases": [{"name": phase.name, "running_s": round(phase.running_s, 1)} for phase in client.phases],
    }


def _lease(lease: LeaseHolder) -> dict[str, Any]:
    return {
        "sample_id": lease.sample_id,
        "holder": lease.holder,
        "held_s": None if lease.held_s is None else round(lease.held_s, 1),
        "left_s": round(lease.left_s, 1),
    }


def _shape(spec: FieldSpec) -> dict[str, Any]:
    return {"kind": spec.kind, "dtype": spec.dtype, "cells": spec.describe()}
