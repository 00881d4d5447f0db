"""`dataplane why`: why tasks of a running store get no samples. It changes nothing."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import DataPlaneError, Verdict, printable
from dataplane_tools._store import attach, pause_s

#: Exit statuses: a task is starved, and that was not found out.
STARVED: Final = 1
UNKNOWN: Final = 2
_ORDER: Final = ("starved", "waits", "moves", "idle", "done")


def run(chosen: argparse.Namespace) -> int:
    """Prints how the tasks of the store of a config fare. Returns as `watched`."""

    def tell(_: DataPlaneClient, verdicts: Sequence[Verdict]) -> None:
        print(json.dumps([asdict(verdict) for verdict in verdicts]) if chosen.json else text_of(verdicts), flush=True)

    return watched(chosen, chosen.task, tell)


def watched(
    chosen: argparse.Namespace, task_name: str | None, tell: Callable[[DataPlaneClient, Sequence[Verdict]], None]
) -> int:
    """Tells the verdicts of tasks, the starved ones first: once; or each time that one changed, until a task is starved
    or all are done.

    Returns:
        0, `STARVED` or `UNKNOWN`.
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


def text_of(verdicts: Sequence[Verdict]) -> str:
    """What is printed."""
    lines = []
    for verdict in verdicts:
        waited = f" for {verdict.waited_s:.0f} s" if verdict.waited_s else ""
        left = f"{verdict.backlog} left, {verdict.num_ready} ready"
        lines.append(printable(f"{verdict.partition_id} / {verdict.task_name}: {verdict.state}{waited} ({left})"))
        lines += [printable(f"  {verdict.text}")] if verdict.text else []
    return "\n".join(lines) or "No task is registered."
