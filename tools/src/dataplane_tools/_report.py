"""What `dataplane top` asks of a store, and how the answers are drawn. It changes nothing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from io import StringIO
from typing import Any, Final, Literal

from rich import filesize
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    LeaseHolder,
    MissingDataError,
    UnknownPartitionError,
    UnsupportedOperationError,
    printable,
)
from dataplane_core.spec import Capability, ClientInfo, PartitionDescription, PartitionInfo, UnitInfo
from dataplane_tools._store import capacity_of

_STACKS_TIMEOUT_S: Final = 20.0
#: Partitions that are shown live.
_MOST_PARTITIONS: Final = 4
_BAR: Final = 24
#: Lines of a pipe are not broken.
_PIPE_WIDTH: Final = 10_000
#: How many characters wide the screen must be to have room for all columns.
_WIDE: Final = 100
_MOST_CLIENTS: Final = 10
#: The columns of stages and of clients that are shown where the screen has no room for all.
_NARROW_STAGES: Final = (0, 1, 3, 4, 5)
_NARROW_CLIENTS: Final = (2, 5)


class Looks:
    """Asks a store what it holds, again and again. From the second time on, its answers have rates.

    Args:
        client: A client of the store.
        partition_id: The partition to ask for. None: all.
        details: Also why tasks of all partitions wait, and how many samples have each field; and, of a partition that
            is named, which sample each task has not consumed longest. Else why tasks wait of those that are shown live.
    """

    def __init__(self, client: DataPlaneClient, partition_id: str | None = None, *, details: bool = False) -> None:
        self.client = client
        self._partition_id, self._details = partition_id, details
        self._before: dict[str, tuple[float, PartitionDescription]] = {}

    def look(self) -> dict[str, Any]:
        """Asks. Returns the answers as JSON values; clients, units and leases as the store gives them."""
        client, now = self.client, time.monotonic()
        descriptions: dict[str, PartitionDescription] = {}
        for name in client.list_partitions() if self._partition_id is None else [self._partition_id]:
            try:
                descriptions[name] = client.describe(name, count_rows=self._details)
            except UnknownPartitionError:  # cleared meanwhile
                if self._partition_id is not None:
                    raise
        partitions = [self._report(name, description, now) for name, description in descriptions.items()]
        self._before = {name: (now, description) for name, description in descriptions.items()}
        for partition in partitions if self._details else newest(partitions):
            self._judge(partition)
        clients = client.list_clients(ended=True) if Capability.CLIENTS in client.capabilities else None
        units = client.list_units() if Capability.UNITS in client.capabilities else None
        return {
            "backend": client.backend_name,
            "held_bytes": sum(partition["held_bytes"] for partition in partitions),
            "capacity_bytes": capacity_of(client),
            "partitions": partitions,
            "clients": clients and [client for client in clients if client.state != "closed"],
            "units": units,
        }

    def _report(self, name: str, description: PartitionDescription, now: float) -> dict[str, Any]:
        """What is known of a partition, as JSON values."""
        at, before = self._before.get(name, (now, None))
        waiting = _waiting(self.client, description.info, name) if self._details and self._partition_id else {}
        same = before if before is not None and before.info.epoch == description.info.epoch else None
        written = description.num_samples + description.num_cleared

        def per_second(count: int, then: int) -> float:
            return round((count - then) / max(now - at, 1e-3), 1)

        tasks: dict[str, dict[str, Any]] = {}
        for task, counts in description.tasks.items():
            tasks[task] = {
                "left": description.num_samples - counts.num_consumed,
                "ready": counts.num_ready,
                "leased": counts.num_leased,
                "consumed": counts.num_consumed,
                "oldest_lease": counts.oldest_lease,
                "oldest_not_consumed": waiting.get(task),
                "why": None,
            }
            # what a task consumed is not known of samples that were cleared meanwhile
            if same is not None and task in same.tasks and same.num_cleared == description.num_cleared:
                tasks[task]["consumed_per_s"] = per_second(counts.num_consumed, same.tasks[task].num_consumed)
        return {
            "partition_id": name,
            "num_samples": description.info.num_samples,
            "grpo_group_size": description.info.grpo_group_size,
            "written": written,
            "written_per_s": None if same is None else per_second(written, same.num_samples + same.num_cleared),
            "held": description.num_samples,
            "cleared": description.num_cleared,
            "held_bytes": description.held_bytes,
            "oldest_s": description.oldest_s,
            "tasks": tasks,
            "fields": {
                field: _shape(description, field)
                for field in dict.fromkeys((*description.info.fields, *description.specs))
            },
        }

    def _judge(self, partition: dict[str, Any]) -> None:
        """Adds how the tasks of a partition fare, and what is ready by what they claim, if the backend can say it."""
        if {Capability.LISTING, Capability.CLAIMS} <= self.client.capabilities:
            with suppress(UnknownPartitionError):  # cleared meanwhile
                for verdict in self.client.why(partition["partition_id"]):
                    if (task := partition["tasks"].get(verdict.task_name)) is not None:
                        task.update(ready=verdict.num_ready, why=asdict(verdict))


def newest(partitions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports of the few partitions that were written last."""

    def age_s(partition: dict[str, Any]) -> float:
        return float("inf") if partition["oldest_s"] is None else float(partition["oldest_s"])

    return sorted(partitions, key=age_s)[:_MOST_PARTITIONS]


def stacks_of(clients: Sequence[ClientInfo]) -> dict[str, str]:
    """Process -> what py-spy prints of it, of the open clients on this host."""
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


def _shape(description: PartitionDescription, field: str) -> dict[str, Any] | None:
    spec = description.specs.get(field)
    if spec is None:
        return None
    rows = description.num_rows.get(field)
    return {"kind": spec.kind, "dtype": spec.dtype, "cells": spec.describe(), "rows": rows}


# --- as text ----------------------------------------------------------------------------------------------------------


class Screen:
    """A report of `Looks`, drawn. Where there is little room: without bars, rates, leases, hosts and processes.

    ``partitions``: those that are shown, with few clients. None: all, with all clients.
    """

    def __init__(
        self, report: Mapping[str, Any], partitions: Sequence[Mapping[str, Any]] | None = None, *, fields: bool = False
    ) -> None:
        self._report, self._fields = report, fields
        self._partitions = report["partitions"] if partitions is None else partitions
        self._most_clients = None if partitions is None else _MOST_CLIENTS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, narrow = self._report, options.max_width < _WIDE
        yield _head(report, narrow)
        for partition in self._partitions:
            yield Group("", _stages(partition, narrow), *(Text(printable(line)) for line in _lines_of(partition)))
            yield from (Text(printable(line), "red") for line in _starved_lines(partition))
            if self._fields:
                yield _fields(partition)
        if others := len(report["partitions"]) - len(self._partitions):
            yield Text(f"\nand {others} partitions that were written earlier", "dim")
        if report["clients"]:
            yield Group("", _clients(report["clients"], narrow, self._most_clients))
        if report["units"]:
            yield Group("", _units(report["units"]))
            for unit in report["units"]:
                if unit.num_lost:
                    text = f"{unit.num_lost} rows were lost with {unit.name}: clear and produce these samples again."
                    yield Text(printable(text), "red")
        for pid, stacks in report.get("stacks", {}).items():
            yield Group("", f"stacks of process {pid}:")
            yield from (Text(printable(f"  {line}")) for line in stacks.splitlines())


def _head(report: Mapping[str, Any], narrow: bool) -> Text:
    held, capacity, count = report["held_bytes"], report["capacity_bytes"], len(report["partitions"])
    plural = "partition" if count == 1 else "partitions"
    head = Text.assemble((printable(report["backend"]), "bold"), f"  {count} {plural}  {filesize.decimal(held)}")
    if capacity:
        head.append(f" of {filesize.decimal(capacity)}")
        if not narrow:
            head.append_text(Text.assemble("  ", _bar(held / capacity)))
    return head


def _stages(report: Mapping[str, Any], narrow: bool) -> Table:
    """A partition as a line per stage, from the one that is ahead to the one that is behind."""
    # a partition that was finished does not count what was cleared before
    total = None if report["num_samples"] is None else max(report["num_samples"], report["written"])

    def bar(done: int) -> Text:
        return _bar(done / (total or report["written"] or 1))

    rate = "" if report["written_per_s"] is None else f"{report['written_per_s']:.1f}"
    written = _of(report["written"], total)
    rows: list[Sequence[str | Text]] = [("written", written, rate, "", "", "", bar(report["written"]), "")]
    lagging = _lag_of(report)
    for task, counts in sorted(report["tasks"].items(), key=lambda item: -item[1]["consumed"]):
        done = counts["consumed"] + report["cleared"]  # a sample is cleared after its last stage
        is_late = task == lagging or _is_starved(counts)
        rate = f"{counts['consumed_per_s']:.1f}" if "consumed_per_s" in counts else ""
        rows.append(
            (
                Text(printable(f"→ {task}"), "bold red" if is_late else ""),
                *(_of(done, total), rate, *(str(counts[name]) for name in ("left", "ready", "leased"))),
                Text.assemble(bar(done), (" lags", "bold red") if task == lagging else ""),
                _lease_text(counts["oldest_lease"]),
            )
        )
    name = Text(printable(report["partition_id"]), "bold")
    head = (name, "done", "per s", "left", "ready", "leased", "", "oldest lease")
    return table(head, rows, right=range(1, 6), places=_NARROW_STAGES if narrow else None)


def _lag_of(report: Mapping[str, Any]) -> str | None:
    """The task for which most samples of a partition are ready, if it is one alone: others wait for it."""
    ready = {task: counts["ready"] for task, counts in report["tasks"].items()}
    most = max(ready.values(), default=0)
    lagging = [task for task, count in ready.items() if count == most]
    return lagging[0] if most > 0 and len(lagging) == 1 < len(ready) else None


def _lines_of(report: Mapping[str, Any]) -> list[str]:
    """What is said of a partition below its stages."""
    age = "" if report["oldest_s"] is None else f", the oldest {report['oldest_s']:.0f} s old"
    lines = [f"{report['held']} held ({filesize.decimal(report['held_bytes'])}{age}), {report['cleared']} cleared"]
    for task, counts in report["tasks"].items():
        if oldest := counts["oldest_not_consumed"]:
            but = f" but {', '.join(oldest['lacks'])}" if oldest["lacks"] else ""
            which = f"The oldest sample that {task} has not consumed is {oldest['sample_id']}"
            lines.append(f"{which}; it has all registered fields{but}.")
    return lines


def _is_starved(counts: Mapping[str, Any]) -> bool:
    return counts["why"] is not None and counts["why"]["state"] == "starved"


def _starved_lines(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for task, counts in report["tasks"].items():
        if _is_starved(counts):
            waited_s = counts["why"]["waited_s"]
            waited = f" for {waited_s:.0f} s" if waited_s else ""
            lines.append(f"{task} is starved{waited}: {counts['why']['text']}")
    return lines


def _lease_text(lease: LeaseHolder | None) -> str:
    if lease is None:
        return ""
    held = "" if lease.held_s is None else f" for {lease.held_s:.0f} s"
    return f"{lease.sample_id}{held}, {lease.left_s:.0f} s left: {lease.holder}"


def _fields(report: Mapping[str, Any]) -> Table:
    rows = [
        [name, str(field["rows"] or 0) if field else "0", field["cells"] if field else "not written"]
        for name, field in report["fields"].items()
    ]
    return table(["field", "samples", "cells"], rows, right=(1,))


def _clients(clients: Sequence[ClientInfo], narrow: bool, most: int | None) -> RenderableType:
    """Those first whose phase or operation has been under way longest."""

    def waits_s(client: ClientInfo) -> float:
        running_s = [phase.running_s for phase in client.phases[:1]] + [call.running_s for call in client.calls[:1]]
        return max(running_s, default=0.0) if client.state == "open" else float("inf")  # those that ended come first

    rows = [
        [
            *(client.host, str(client.pid), client.role),
            *(f"{client.open_s:.0f}", f"{client.heard_s:.0f}", _call_text(client)),
        ]
        for client in sorted(clients, key=waits_s, reverse=True)
    ]
    head = ["host", "process", "role", "open s", "heard s ago", "in flight"]
    shown = table(head, rows[:most], right=(1, 3, 4), places=_NARROW_CLIENTS if narrow else None)
    rest = len(rows) - len(rows[:most])
    return Group(shown, Text(f"and {rest} clients", "dim")) if rest else shown


def _call_text(client: ClientInfo) -> str:
    """The phase that a client has been in longest, the operation that it has had under way longest, and how many
    others. Of one that ended, how.
    """
    parts = [f"{phase.name} for {phase.running_s:.0f} s" for phase in client.phases[:1]]
    if client.state != "open":
        parts = [f"{client.state}, heard of {client.heard_s:.0f} s ago", *(f"in {phase}" for phase in parts)]
    elif client.calls:
        first = client.calls[0]
        where = f" {first.partition_id}" if first.partition_id else ""
        others = f", and {client.num_calls - 1} more" if client.num_calls > 1 else ""
        parts.append(f"{first.operation}{where} for {first.running_s:.0f} s{others}")
    return ", ".join(parts) or "-"


def _units(units: Sequence[UnitInfo]) -> Table:
    head = ["unit", "state", "address", "node", "path", "rows", "held", "rows lost", "starts"]
    rows = [
        [
            *(unit.name, str(unit.state), unit.address, unit.node[:8], unit.path, str(unit.num_rows)),
            *(filesize.decimal(unit.size_bytes), str(unit.num_lost), str(unit.num_starts)),
        ]
        for unit in units
    ]
    return table(head, rows, right=range(5, 9))


def table(
    head: Sequence[str | Text],
    rows: Sequence[Sequence[str | Text]],
    right: Sequence[int] = (),
    places: Sequence[int] | None = None,
) -> Table:
    """A table of the columns at some places. None: of all. ``right``: those that are aligned to the right."""
    columns = Table(box=None, pad_edge=False, padding=(0, 2 if places is None else 1, 0, 0), header_style="dim")
    places = range(len(head)) if places is None else places
    head, *rows = ([Text(printable(cell)) if isinstance(cell, str) else cell for cell in row] for row in (head, *rows))
    for place in places:
        justify: Literal["left", "right"] = "right" if place in right else "left"
        columns.add_column(head[place], justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        columns.add_row(*(row[place] for place in places))
    return columns


def drawn(what: RenderableType) -> str:
    """What would be drawn, as text: no line is broken, and none ends with blanks."""
    text = StringIO()
    Console(width=_PIPE_WIDTH, file=text).print(what)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _of(count: int, expected: int | None) -> str:
    return str(count) if expected is None else f"{count}/{expected}"


def _bar(part: float) -> Text:
    full = round(min(max(part, 0.0), 1.0) * _BAR)
    return Text.assemble(("━" * full, "green"), ("─" * (_BAR - full), "dim"))
