"""`dataplane inspect`: what a running store holds, and how far each task is. It changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dataplane_core.client import DataPlaneClient
from dataplane_core.config import load_config
from dataplane_core.errors import MissingDataError, UnknownPartitionError
from dataplane_core.plugins import connect
from dataplane_core.spec import Capability, FieldSpec, PartitionDescription

__all__ = ["run"]

_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def run(config_path: str, partition_id: str | None, *, interval_s: float, as_json: bool) -> int:
    """Prints what the store of a config holds.

    Args:
        config_path: The config file that its processes use.
        partition_id: A partition, which is shown with its fields and with what its tasks wait for. None: all.
        interval_s: Seconds between the two looks that rates come from. 0: one look, and no rates.
        as_json: Print JSON.

    Raises:
        BackendUnavailableError: No store runs.
        UnknownPartitionError: There is no such partition.
    """
    config = load_config(config_path).model_copy(update={"middleware": [], "attach_wait_s": 0.0})
    with connect(config, bootstrap=False) as client:
        start = time.monotonic()
        before = _look(client, partition_id)
        if interval_s > 0:
            time.sleep(interval_s)
        passed_s = time.monotonic() - start
        after = _look(client, partition_id) if interval_s > 0 else before
        waiting = {} if partition_id is None else _waiting(client, partition_id)
    report = {
        "backend": config.backend,
        "held_bytes": sum(found.held_bytes for found in after.values()),
        "capacity_bytes": config.options.get("capacity_bytes"),
        "partitions": [
            _partition(name, found, before.get(name) if interval_s > 0 else None, passed_s, waiting)
            for name, found in after.items()
        ],
    }
    print(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report, fields=partition_id is not None)))
    return 0


def _look(client: DataPlaneClient, partition_id: str | None) -> dict[str, PartitionDescription]:
    found: dict[str, PartitionDescription] = {}
    for name in client.list_partitions() if partition_id is None else [partition_id]:
        try:
            found[name] = client.describe(name)
        except UnknownPartitionError:
            if partition_id is not None:
                raise
            # cleared between the two calls
    return found


def _waiting(client: DataPlaneClient, partition_id: str) -> dict[str, dict[str, Any]]:
    """Task -> the oldest sample that it has not consumed, and the registered fields that the sample lacks."""
    if Capability.CURSORS not in client.capabilities:
        return {}
    info = client.describe(partition_id).info
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


def _partition(
    name: str,
    found: PartitionDescription,
    before: PartitionDescription | None,
    passed_s: float,
    waiting: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    same = before if before is not None and before.info.epoch == found.info.epoch else None
    written = found.num_samples + found.num_cleared

    def per_second(now: int, then: int) -> float:
        return round((now - then) / passed_s, 1)

    tasks: dict[str, dict[str, Any]] = {}
    for task, counts in found.tasks.items():
        tasks[task] = {
            "ready": counts.num_ready,
            "leased": counts.num_leased,
            "consumed": counts.num_consumed,
            "oldest_not_consumed": waiting.get(task),
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
            field: None if field not in found.specs else _shape(found.specs[field]) for field in found.info.fields
        }
        | {field: _shape(spec) for field, spec in found.specs.items()},
    }


def _shape(spec: FieldSpec) -> dict[str, Any]:
    return {"kind": spec.kind, "dtype": spec.dtype, "cells": spec.describe()}


# --- as text ----------------------------------------------------------------------------------------------------------


def _lines(report: Mapping[str, Any], *, fields: bool) -> list[str]:
    partitions = report["partitions"]
    capacity = report["capacity_bytes"]
    of = "" if capacity is None else f" of {_size(capacity)}"
    plural = "" if len(partitions) == 1 else "s"
    lines = [f"{report['backend']}: {len(partitions)} partition{plural}, {_size(report['held_bytes'])}{of}"]
    for found in partitions:
        expected = "" if found["num_samples"] is None else f" of {found['num_samples']}"
        rate = "" if found["written_per_s"] is None else f" ({found['written_per_s']} per s)"
        age = "" if found["oldest_s"] is None else f", the oldest {found['oldest_s']:.1f} s old"
        lines += [
            "",
            f"{found['partition_id']}: {found['written']}{expected} samples written{rate}, {found['held']} held "
            f"({_size(found['held_bytes'])}{age}), {found['cleared']} cleared",
        ]
        rows = [
            [task, *(str(counts.get(key, "")) for key in ("ready", "leased", "consumed", "consumed_per_s"))]
            for task, counts in found["tasks"].items()
        ]
        if rows:
            lines += _table(["task", "ready", "leased", "consumed", "per s"], rows, right=range(1, 5))
        for task, counts in found["tasks"].items():
            oldest = counts["oldest_not_consumed"]
            if oldest is not None:
                lacks = f"lacks {', '.join(oldest['lacks'])}" if oldest["lacks"] else "has all registered fields"
                lines.append(f"  The oldest sample that {task} has not consumed is {oldest['sample_id']}; it {lacks}.")
        if fields and found["fields"]:
            shown = [[name, each["cells"] if each else "not written"] for name, each in found["fields"].items()]
            lines += _table(["field", "cells"], shown)
    return lines


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def _size(num_bytes: float) -> str:
    unit = 0
    while num_bytes >= 999.95 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"
