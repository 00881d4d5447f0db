"""`dataplane top`: what a running store holds, how far each task is, and who waits. `dataplane why`: why tasks get no
samples. They change nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

from msgspec import structs

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    DataPlaneError,
    InvalidRequestError,
    UnsupportedOperationError,
    Verdict,
    printable,
)
from dataplane_tools._store import attach, pause_s

#: Exit statuses: a task is starved, and that was not found out.
STARVED: Final = 1
UNKNOWN: Final = 2
_ORDER: Final = ("starved", "waits", "moves", "idle", "done")
_MOST_INTERVAL_S: Final = 86400.0


def run(chosen: argparse.Namespace) -> int:
    """Shows a store live in a terminal, or prints it once, or each time that the state of a task changed."""
    shows_samples = chosen.samples or any(name is not None for name in (chosen.tokenizer, chosen.where, chosen.sort))
    if not (chosen.once or chosen.json or chosen.watch or chosen.stacks or chosen.interval) and sys.stdout.isatty():
        from dataplane_tools import _live

        return _live.run(chosen, shows_samples)
    if shows_samples:
        raise UnsupportedOperationError(
            "dataplane top shows samples live in a terminal only.", hint="In a pipe, use dataplane read."
        )
    if not 0 <= chosen.interval <= _MOST_INTERVAL_S:
        raise InvalidRequestError(
            f"top refused: --interval {chosen.interval:g}. Expected a number of seconds from 0 to {_MOST_INTERVAL_S:g}."
        )
    if chosen.watch:
        return _watched(chosen, None, lambda client, _: print(_text_of(client, chosen), flush=True))
    with attach(chosen.config) as client:
        print(_text_of(client, chosen))
    return 0


def _text_of(client: DataPlaneClient, chosen: argparse.Namespace) -> str:
    from dataplane_tools._report import Looks, Screen, drawn, stacks_of  # `why` need not wait for rich

    looks = Looks(client, chosen.partition, details=True)
    report = looks.look()
    if chosen.interval:
        time.sleep(chosen.interval)
        report = looks.look()
    if chosen.stacks:
        report["stacks"] = stacks_of(client.list_clients())
    if chosen.json:
        return json.dumps(report, indent=None if chosen.watch else 2, default=structs.asdict)
    return drawn(Screen(report, fields=chosen.partition is not None))


def why(chosen: argparse.Namespace) -> int:
    """Prints how the tasks of a store fare."""

    def tell(_: DataPlaneClient, verdicts: Sequence[Verdict]) -> None:
        print(json.dumps([asdict(verdict) for verdict in verdicts]) if chosen.json else _said(verdicts), flush=True)

    return _watched(chosen, chosen.task, tell)


def _said(verdicts: Sequence[Verdict]) -> str:
    lines = []
    for verdict in verdicts:
        waited = f" for {verdict.waited_s:.0f} s" if verdict.waited_s else ""
        left = f"{verdict.backlog} left, {verdict.num_ready} ready"
        lines.append(printable(f"{verdict.partition_id} / {verdict.task_name}: {verdict.state}{waited} ({left})"))
        lines += [printable(f"  {verdict.text}")] if verdict.text else []
    return "\n".join(lines) or "No task is registered."


def _watched(
    chosen: argparse.Namespace, task_name: str | None, tell: Callable[[DataPlaneClient, Sequence[Verdict]], None]
) -> int:
    """Tells the verdicts of tasks, the starved ones first: once; or each time that one changed, until a task is starved
    or all are done.
    """
    before: Sequence[tuple[str, ...]] | None = None
    try:
        with attach(chosen.config) as client:
            while True:
                start = time.monotonic()
                verdicts = client.why(chosen.partition, task_name)
                verdicts.sort(key=lambda verdict: _ORDER.index(verdict.state))
                now = [(v.partition_id, v.task_name, v.state, v.cause, v.culprit) for v in verdicts]
                if now != before:
                    tell(client, verdicts)
                    before = now
                if any(verdict.state == "starved" for verdict in verdicts):
                    return STARVED
                if not chosen.watch or (verdicts and all(verdict.state == "done" for verdict in verdicts)):
                    return 0
                time.sleep(pause_s(time.monotonic() - start))
    except DataPlaneError as error:
        print(f"dataplane: {error}", file=sys.stderr)
        return UNKNOWN
    except KeyboardInterrupt:
        return 0
