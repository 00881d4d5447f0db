"""The stages of a running store, as `dataplane top` and `browse` show them: what is asked, and how it is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import UnknownPartitionError, Verdict, printable
from dataplane_core.spec import Capability, PartitionDescription
from dataplane_tools._inspect import (
    call_text,
    capacity_of,
    client_report,
    lag_of,
    partition_report,
    size_text,
    starved_lines,
    verdicts_of,
)

_MOST_PARTITIONS: Final = 4
_MOST_CLIENTS: Final = 10
_BAR: Final = 24
#: How many characters wide the screen must be to have room for all columns.
_WIDE: Final = 100
#: The columns of a stage that are shown where the screen has no room for all.
_NARROW: Final = (0, 1, 3, 4, 5)


class Looks:
    """Asks a store one question after the other, and keeps the last answers.

    Args:
        client: A client of the store.
        partition_id: The partition to ask for. None: all, in turns.
        clock: Gives the time in seconds.

    Attributes:
        partitions: Partition -> its report, see `partition_report`.
        clients: The clients that announced themselves, also those that are gone. None: not known yet, or the backend
            does not list them.
        held_bytes: Payload bytes of the partitions.
    """

    def __init__(
        self, client: DataPlaneClient, partition_id: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.client = client
        self.partitions: dict[str, dict[str, Any]] = {}
        self.clients: list[dict[str, Any]] | None = None
        self._partition_id = partition_id
        self._clock = clock
        self._questions: list[Callable[[], None]] = []
        self._before: dict[str, tuple[float, PartitionDescription]] = {}
        self._verdicts: dict[tuple[str, str], Verdict] = {}

    @property
    def held_bytes(self) -> int:
        """Payload bytes of the partitions, as last seen."""
        return sum(report["held_bytes"] for report in self.partitions.values())

    def ask(self) -> None:
        """Asks one question.

        Raises:
            DataPlaneError: The store does not answer.
        """
        if not self._questions:
            self._begin_round()
        self._questions.pop(0)()

    def _begin_round(self) -> None:
        if self._partition_id is None:
            self._questions.append(self._list)
        else:
            self._questions += self._questions_of(self._partition_id)
        if Capability.CLIENTS in self.client.capabilities:
            self._questions.append(self._ask_for_clients)

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The reports of the partitions that were written last."""
        return sorted(self.partitions.values(), key=_age)[:_MOST_PARTITIONS]

    def _list(self) -> None:
        names = self.client.list_partitions()
        self.partitions = {name: report for name, report in self.partitions.items() if name in names}
        self._before = {name: seen for name, seen in self._before.items() if name in names}
        self._verdicts = {each: verdict for each, verdict in self._verdicts.items() if each[0] in names}
        self._questions[:0] = [question for name in names for question in self._questions_of(name)]

    def _questions_of(self, name: str) -> list[Callable[[], None]]:
        """What is asked of a partition. Why its tasks wait only if it is shown, since that may cost more."""
        is_shown = name not in self.partitions or any(each["partition_id"] == name for each in self.shown)
        return [*([partial(self._ask_why, name)] if is_shown else []), partial(self._describe, name)]

    def _describe(self, name: str) -> None:
        try:
            found = self.client.describe(name, count_rows=False)
        except UnknownPartitionError:
            if self._partition_id is not None:
                raise
            self.partitions.pop(name, None)  # cleared meanwhile
            return
        now = self._clock()
        at, before = self._before.get(name, (now, None))
        self.partitions[name] = partition_report(name, found, before, max(now - at, 1e-3), {}, self._verdicts)
        self._before[name] = now, found

    def _ask_why(self, name: str) -> None:
        """How the tasks of a partition fare. The next report of it says so."""
        with suppress(UnknownPartitionError):  # cleared meanwhile
            self._verdicts |= verdicts_of(self.client, name)

    def _ask_for_clients(self) -> None:
        found = self.client.list_clients(ended=True)
        self.clients = [client_report(each) for each in found if each.state != "closed"]


class _Fitting:
    """The one of two forms for which the screen is wide enough."""

    def __init__(self, wide: RenderableType, narrow: RenderableType) -> None:
        self._wide, self._narrow = wide, narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._wide if options.max_width >= _WIDE else self._narrow


def screen(looks: Looks) -> RenderableType:
    """What is shown. Where there is little room: without bars, rates, leases, hosts and processes."""
    return _Fitting(_screen(looks, False), _screen(looks, True))


def _screen(looks: Looks, narrow: bool) -> RenderableType:
    capacity = capacity_of(looks.client)
    held = size_text(looks.held_bytes)
    plural = "partition" if len(looks.partitions) == 1 else "partitions"
    head = Text.assemble((looks.client.backend_name, "bold"), f"  {len(looks.partitions)} {plural}  {held}")
    if capacity:
        head.append(f" of {size_text(capacity)}  ")
        if not narrow:
            head.append_text(_bar(looks.held_bytes / capacity))
    shown = looks.shown
    parts: list[RenderableType] = [head]
    for report in shown:
        parts += [Text(""), _flow(report, narrow)]
    if len(looks.partitions) > len(shown):
        parts.append(Text(f"\nand {len(looks.partitions) - len(shown)} partitions that were written earlier", "dim"))
    if looks.clients:
        parts += [Text(""), _clients(looks.clients, narrow)]
    return Group(*parts)


def _age(report: dict[str, Any]) -> float:
    return float("inf") if report["oldest_s"] is None else float(report["oldest_s"])


def _flow(report: dict[str, Any], narrow: bool) -> RenderableType:
    """A partition as a line per stage, from the one that is ahead to the one that is behind, and who is starved."""
    name = Text(printable(report["partition_id"]), "bold")
    rows: list[tuple[str | Text, ...]] = [(name, "done", "per s", "left", "ready", "leased", "", "oldest lease")]
    expected = report["num_samples"] or report["written"]
    rate = "" if report["written_per_s"] is None else f"{report['written_per_s']:.1f}"
    part = _bar(report["written"] / expected if expected else 0.0)
    rows.append(("written", _of(report["written"], report["num_samples"]), rate, "", "", "", part, ""))
    lagging = lag_of(report)
    tasks = sorted(report["tasks"].items(), key=lambda item: -item[1]["consumed"])
    for task, counts in tasks:
        done = counts["consumed"] + report["cleared"]  # a sample is cleared after its last stage
        lease = counts["oldest_lease"]
        rate = f"{counts['consumed_per_s']:.1f}" if "consumed_per_s" in counts else ""
        part = _bar(done / expected if expected else 0.0)
        lags = (" lags", "bold red") if task == lagging else ""
        rows.append(
            (
                Text(printable(f"→ {task}"), "bold red" if lags or starved_lines(task, counts) else ""),
                _of(done, report["num_samples"]),
                rate,
                *(str(counts[each]) for each in ("left", "ready", "leased")),
                Text.assemble(part, lags),
                Text("" if lease is None else printable(f"{lease['holder']}, {_seconds(lease['held_s'])}")),
            )
        )
    stages = Table(box=None, pad_edge=False, padding=(0, 1 if narrow else 2), header_style="dim")
    places = _NARROW if narrow else range(len(rows[0]))
    for place, head in ((place, rows[0][place]) for place in places):
        stages.add_column(
            head,
            justify="right" if 0 < place < 6 else "left",
            no_wrap=True,
            overflow="ellipsis",
            max_width=32 if place == 0 else None,
        )
    for row in rows[1:]:
        stages.add_row(*(row[place] for place in places))
    lines = [line for name, counts in tasks for line in starved_lines(name, counts)]
    return Group(stages, *(Text(printable(line), "red") for line in lines))


def _of(count: int, expected: int | None) -> str:
    return str(count) if expected is None else f"{count}/{expected}"


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f} s"


def _bar(part: float) -> Text:
    full = round(min(max(part, 0.0), 1.0) * _BAR)
    return Text.assemble(("━" * full, "green"), ("─" * (_BAR - full), "dim"))


def _clients(clients: list[dict[str, Any]], narrow: bool) -> RenderableType:
    """Those first whose phase or operation has been under way longest."""
    table = Table(box=None, pad_edge=False, padding=(0, 1 if narrow else 2), header_style="dim")
    first = 2 if narrow else 0
    for name in ("host", "process", "role", "in flight")[first:]:
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=40)

    def waits_s(client: dict[str, Any]) -> float:
        first = (*client["phases"][:1], *client["calls"][:1])
        running_s = max((float(each["running_s"]) for each in first), default=0.0)
        return float("inf") if client["state"] != "open" else running_s  # those that ended come first

    waiting = sorted(clients, key=waits_s, reverse=True)
    for each in waiting[:_MOST_CLIENTS]:
        cells = each["host"], str(each["pid"]), each["role"], call_text(each)
        table.add_row(*(Text(printable(cell)) for cell in cells[first:]))
    rest = len(waiting) - _MOST_CLIENTS
    return Group(table, Text(f"and {rest} clients", "dim")) if rest > 0 else table
