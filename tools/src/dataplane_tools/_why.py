"""`dataplane why`: why tasks of a running store get no samples. It changes nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import DataPlaneError, Verdict, printable
from dataplane_tools._inspect import attach, pause_s

#: Exit statuses: a task is starved, and that was not found out.
STARVED: Final = 1
UNKNOWN: Final = 2
_ORDER: Final = ("starved", "waits", "moves", "idle", "done")


def run(
    config_path: str,
    task_name: str | None = None,
    *,
    partition_id: str | None = None,
    as_json: bool = False,
    watch: bool = False,
) -> int:
    """Prints how the tasks of the store of a config fare. Its arguments are those of the command.

    Returns:
        0, `STARVED` or `UNKNOWN`.
    """
    try:
        with attach(config_path) as client:
            told: Sequence[tuple[str, ...]] | None = None
            while True:
                start = time.monotonic()
                verdicts = look(client, partition_id, task_name)
                cost_s = time.monotonic() - start
                now = [(each.partition_id, each.task_name, each.state, each.cause, each.culprit) for each in verdicts]
                if now != told:
                    lines = json.dumps([asdict(each) for each in verdicts]) if as_json else text_of(verdicts)
                    print(lines, flush=True)
                    told = now
                if any(each.state == "starved" for each in verdicts):
                    return STARVED
                if not watch or (verdicts and all(each.state == "done" for each in verdicts)):
                    return 0
                time.sleep(pause_s(cost_s))
    except DataPlaneError as error:
        print(f"dataplane: {error}", file=sys.stderr)
        return UNKNOWN
    except KeyboardInterrupt:
        return 0


def look(client: DataPlaneClient, partition_id: str | None = None, task_name: str | None = None) -> list[Verdict]:
    """The verdicts of a store, the starved tasks first."""
    return sorted(client.why(partition_id, task_name), key=lambda each: _ORDER.index(each.state))


def text_of(verdicts: Sequence[Verdict]) -> str:
    """What is printed."""
    lines = []
    for each in verdicts:
        waited = f" for {each.waited_s:.0f} s" if each.waited_s else ""
        left = f"{each.backlog} left, {each.num_ready} ready"
        lines.append(printable(f"{each.partition_id} / {each.task_name}: {each.state}{waited} ({left})"))
        lines += [printable(f"  {each.text}")] if each.text else []
    return "\n".join(lines) or "No task is registered."
