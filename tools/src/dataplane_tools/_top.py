"""`dataplane top`: what a running store holds, how far each task is, and who waits. It changes nothing."""

from __future__ import annotations

import argparse
import json
import sys
import time
from io import StringIO
from typing import Any

from rich.console import Console

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import InvalidRequestError, UnsupportedOperationError
from dataplane_tools._report import Looks, stacks_of
from dataplane_tools._screen import Screen
from dataplane_tools._store import attach
from dataplane_tools._why import watched

_MOST_INTERVAL_S = 86400.0
#: Lines of a pipe are not broken.
_PIPE_WIDTH = 10_000


def run(chosen: argparse.Namespace) -> int:
    """Shows a store live in a terminal, or prints it once, or each time that the state of a task changed.

    Raises:
        InvalidRequestError: The interval is below 0, or above a day.
        BackendUnavailableError: No store runs.
        UnknownPartitionError: There is no such partition.
        UnsupportedOperationError: ``stacks``, and the clients of this store do not announce themselves, or there is no
            py-spy. Samples are asked for in a pipe.
    """
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
        return watched(chosen, None, lambda client, _: print(_text_of(client, chosen), flush=True))
    with attach(chosen.config) as client:
        print(_text_of(client, chosen))
    return 0


def _text_of(client: DataPlaneClient, chosen: argparse.Namespace) -> str:
    looks = Looks(client, chosen.partition, details=True)
    looks.ask_all()
    if chosen.interval:
        time.sleep(chosen.interval)
        looks.ask_all()
    report: dict[str, Any] = looks.report
    if chosen.stacks:
        report["stacks"] = stacks_of(client.list_clients())
    if chosen.json:
        return json.dumps(report, indent=None if chosen.watch else 2)
    return drawn(Screen(report, fields=chosen.partition is not None))


def drawn(screen: Screen) -> str:
    """A screen as text, for a pipe: no line is broken, and none ends with blanks."""
    text = StringIO()
    Console(width=_PIPE_WIDTH, file=text).print(screen)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())
