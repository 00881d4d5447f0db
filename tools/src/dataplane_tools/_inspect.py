"""`dataplane inspect`: what a running store holds, how far each task is, and who waits. It changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from dataplane_core.backends import spread_over
from dataplane_core.client import DataPlaneClient
from dataplane_core.config import load_config, size_bytes
from dataplane_core.connecting import connect, load_backend
from dataplane_core.errors import (
    BackendUnavailableError,
    InvalidRequestError,
    LeaseHolder,
    MissingDataError,
    UnknownPartitionError,
    UnsupportedOperationError,
    Verdict,
    printable,
)
from dataplane_core.spec import Capability, ClientInfo, FieldSpec, PartitionDescription

_UNITS: Final = ("B", "kB", "MB", "GB", "TB")
_STACKS_TIMEOUT_S: Final = 20.0
_MOST_INTERVAL_S: Final = 86400.0
#: Of what asks again and again: seconds between two looks, and the most of the time that the store spends on them.
PAUSE_S: Final = 1.0
SHARE: Final = 0.02


def run(config_path: str, partition_id: str | None, *, interval_s: float, as_json: bool, stacks: bool) -> int:
    """Prints what the store of a config holds. Its arguments are those of the command.

    Raises:
        InvalidRequestError: The interval is below 0, or above a day.
        BackendUnavailableError: No store runs.
        UnknownPartitionError: There is no such partition.
        UnsupportedOperationError: ``stacks``, and the clients of this store do not announce themselves, or there is no
            py-spy.
    """
    if not 0 <= interval_s <= _MOST_INTERVAL_S:
        raise InvalidRequestError(
            f"inspect refused: --interval {interval_s:g}. Expected a number of seconds from 0 to {_MOST_INTERVAL_S:g}."
        )
    with attach(config_path) as client:
        start = time.monotonic()
        before = look(client, partition_id)
        if interval_s > 0:
            time.sleep(interval_s)
        passed_s = time.monotonic() - start
        after = look(client, partition_id) if interval_s > 0 else before
        waiting = {} if partition_id is None else _waiting(client, partition_id)
        verdicts = verdicts_of(client, partition_id)
        clients = client.list_clients(ended=True) if stacks or Capability.CLIENTS in client.capabilities else None
        report = {
            "backend": client.backend_name,
            "held_bytes": sum(found.held_bytes for found in after.values()),
            "capacity_bytes": capacity_of(client),
            "partitions": [
                partition_report(name, found, before.get(name) if interval_s > 0 else None, passed_s, waiting, verdicts)
                for name, found in after.items()
            ],
            "clients": None if clients is None else [client_report(each) for each in clients if each.state != "closed"],
        }
    if stacks:
        open_here = [each for each in clients or () if each.host == socket.gethostname() and each.state == "open"]
        pids = sorted({each.pid for each in open_here})
        report["stacks"] = {str(pid): _stacks_of(pid) for pid in pids}
    fields = partition_id is not None
    print(json.dumps(report, indent=2) if as_json else "\n".join(map(printable, _lines(report, fields=fields))))
    return 0


def attach(config_path: str, *, announced: bool = False) -> DataPlaneClient:
    """A client of the store of a config: of the running one, or of what an earlier one left, if it outlives its owner.

    Args:
        config_path: The config file.
        announced: Whether it announces itself, and has the middleware of the config.

    Raises:
        BackendUnavailableError: None runs, and none was left. Nothing is made.
    """
    quiet: dict[str, Any] = {} if announced else {"middleware": [], "announce_s": None}
    config = load_config(config_path).model_copy(update={"attach_wait_s": 0.0, **quiet})
    try:
        return connect(config, bootstrap=False)
    except BackendUnavailableError as error:
        cls = load_backend(config.backend)
        checked = cls.Config(**config.options)
        cls = cls.class_for(checked)
        if config.num_ledgers > 1:
            checked = spread_over(cls, config.num_ledgers).first_of(checked)
        if not cls.outlives_owner(checked):
            raise
        journal = _journal_of(checked)
        if journal is not None and not journal.is_dir():
            raise BackendUnavailableError(
                f"no store was reached, and the durable folder holds none: there is no {journal}. {error.message}",
                retryable=error.retryable,
                hint="Correct the path in the config, or bootstrap a store with connect(config). This command makes "
                "none.",
            ) from error
        return connect(config)


def _journal_of(options: Any) -> Path | None:
    """The folder that tells that a store was in a durable folder. None: these options name no such folder."""
    durable = getattr(options, "durable", None)
    if durable is None:
        return None
    # an instance of Ray has a folder of its own in the folder that may be shared
    return Path(getattr(options, "journal", None) or durable, getattr(options, "instance", ""), "journal").absolute()


def pause_s(cost_s: float) -> float:
    """How long to wait after a look that took this long, in seconds."""
    return max(PAUSE_S, cost_s / SHARE)


def capacity_of(client: DataPlaneClient) -> int | None:
    """How many bytes of payload the store may hold, by the config. None: it sets no limit."""
    capacity_bytes = client.config.options.get("capacity_bytes")
    return None if capacity_bytes is None else int(size_bytes(capacity_bytes)) * client.config.num_ledgers


def look(
    client: DataPlaneClient, partition_id: str | None = None, *, count_rows: bool = True
) -> dict[str, PartitionDescription]:
    """What a partition holds, or all of them."""
    found: dict[str, PartitionDescription] = {}
    for name in client.list_partitions() if partition_id is None else [partition_id]:
        try:
            found[name] = client.describe(name, count_rows=count_rows)
        except UnknownPartitionError:
            if partition_id is not None:
                raise
            # cleared between the two calls
    return found


def verdicts_of(client: DataPlaneClient, partition_id: str | None = None) -> dict[tuple[str, str], Verdict]:
    """Partition and task -> how the task fares. Empty if the backend cannot say it."""
    if not {Capability.LISTING, Capability.CLAIMS} <= client.capabilities:
        return {}
    return {(each.partition_id, each.task_name): each for each in client.why(partition_id)}


def _waiting(client: DataPlaneClient, partition_id: str) -> dict[str, dict[str, Any]]:
    """Task -> the oldest sample that it has not consumed, and the registered fields that the sample lacks."""
    if Capability.CURSORS not in client.capabilities:
        return {}
    info = client.describe(partition_id, count_rows=False).info
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


def lag_of(report: Mapping[str, Any]) -> str | None:
    """The task for which most samples of a partition are ready, if it is one alone: others wait for it.

    One that waits for a field does not lag, however many samples it has not consumed.
    """
    left = {name: counts["ready"] for name, counts in report["tasks"].items()}
    most = max(left.values(), default=0)
    lagging = [name for name, count in left.items() if count == most]
    return lagging[0] if most > 0 and len(lagging) == 1 < len(left) else None


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
        "phases": [{"name": each.name, "running_s": round(each.running_s, 1)} for each in client.phases],
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


# --- as text ----------------------------------------------------------------------------------------------------------


def _lines(report: Mapping[str, Any], *, fields: bool) -> list[str]:
    partitions = report["partitions"]
    capacity = report["capacity_bytes"]
    of = "" if capacity is None else f" of {size_text(capacity)}"
    plural = "" if len(partitions) == 1 else "s"
    lines = [f"{report['backend']}: {len(partitions)} partition{plural}, {size_text(report['held_bytes'])}{of}"]
    for found in partitions:
        expected = "" if found["num_samples"] is None else f" of {found['num_samples']}"
        rate = "" if found["written_per_s"] is None else f" ({found['written_per_s']} per s)"
        age = "" if found["oldest_s"] is None else f", the oldest {found['oldest_s']:.1f} s old"
        lines += [
            "",
            f"{found['partition_id']}: {found['written']}{expected} samples written{rate}, {found['held']} held "
            f"({size_text(found['held_bytes'])}{age}), {found['cleared']} cleared",
        ]
        rows = [
            [task, *(str(counts.get(key, "")) for key in ("left", "ready", "leased", "consumed", "consumed_per_s"))]
            for task, counts in found["tasks"].items()
        ]
        if rows:
            lines += table(["task", "left", "ready", "leased", "consumed", "per s"], rows, right=range(1, 6))
        lines += [f"  {line}" for task, counts in found["tasks"].items() for line in starved_lines(task, counts)]
        lines += [
            f"  {task} {_held(lease)}, {lease['left_s']} s left: {lease['holder']}."
            for task, counts in found["tasks"].items()
            if (lease := counts["oldest_lease"]) is not None
        ]
        for task, counts in found["tasks"].items():
            oldest = counts["oldest_not_consumed"]
            if oldest is not None:
                but = f" but {', '.join(oldest['lacks'])}" if oldest["lacks"] else ""
                which = f"The oldest sample that {task} has not consumed is {oldest['sample_id']}"
                lines.append(f"  {which}; it has all registered fields{but}.")
        if fields and found["fields"]:
            shown = [
                [name, str(each["rows"] or 0) if each else "0", each["cells"] if each else "not written"]
                for name, each in found["fields"].items()
            ]
            lines += table(["field", "samples", "cells"], shown, right=(1,))
    if report["clients"]:
        lines += ["", "clients, as they announced themselves:"]
        rows = [
            [
                each["host"],
                str(each["pid"]),
                each["role"],
                f"{each['open_s']:.0f}",
                f"{each['heard_s']:.0f}",
                call_text(each),
            ]
            for each in report["clients"]
        ]
        lines += table(["host", "process", "role", "open s", "heard s ago", "in flight"], rows, right=(1, 3, 4))
    for pid, stacks in report.get("stacks", {}).items():
        lines += ["", f"stacks of process {pid}:", *(f"  {line}" for line in stacks.splitlines())]
    return lines


def _held(lease: Mapping[str, Any]) -> str:
    sample = lease["sample_id"]
    return f"holds {sample}" if lease["held_s"] is None else f"has held {sample} for {lease['held_s']} s"


def call_text(client: Mapping[str, Any]) -> str:
    """The phase that a client has been in longest, the operation that it has had under way longest, and how many
    others. Of one that ended, how.
    """
    told = [f"{each['name']} for {each['running_s']:.0f} s" for each in client["phases"][:1]]
    if client["state"] != "open":
        told = [f"{client['state']}, heard of {client['heard_s']:.0f} s ago", *(f"in {each}" for each in told)]
    elif client["calls"]:
        first = client["calls"][0]
        where = f" {first['partition_id']}" if first["partition_id"] else ""
        others = f", and {client['num_calls'] - 1} more" if client["num_calls"] > 1 else ""
        told.append(f"{first['operation']}{where} for {first['running_s']:.0f} s{others}")
    return ", ".join(told) or "-"


def starved_lines(task: str, counts: Mapping[str, Any]) -> list[str]:
    """What is said of a task that is starved: one line, or none."""
    why = counts["why"]
    if why is None or why["state"] != "starved":
        return []
    waited = f" for {why['waited_s']:.0f} s" if why["waited_s"] else ""
    return [f"{task} is starved{waited}: {why['text']}"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines of a table. ``right``: the columns that are aligned to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def size_text(num_bytes: float) -> str:
    """A number of bytes with its unit, such as ``6.5 MB``."""
    unit = 0
    while num_bytes >= 999.95 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"
