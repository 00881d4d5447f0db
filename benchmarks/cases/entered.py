"""What an operation enters."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeAlias

import torch

from benchmarks import bench
from benchmarks.bench import Table, case
from dataplane_core import DataPlaneClient, connect

IDS = ["a", "b"]
COLUMNS = {"input_ids": [[1, 2, 3], [4]], "reward": torch.tensor([0.5, 1.0])}

#: (module, function) -> how often it was entered. A generator is entered again each time that it goes on.
Entered: TypeAlias = Counter[tuple[str, str]]


class Counting:
    """Counts what all threads enter that start after `begin`, and the one that calls it, while an operation runs."""

    def __init__(self) -> None:
        self._now: Entered | None = None

    def begin(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def end(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if self._now is not None and event == "call" and module.startswith("dataplane_"):
            self._now[module, frame.f_code.co_qualname] += 1

    def of(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Entered, Any]:
        """What a call enters, and what it returns."""
        entered = self._now = Counter()
        result = operation(*args, **kwargs)
        self._now = None
        return entered, result


def count(client: DataPlaneClient, counting: Counting) -> dict[str, Entered]:
    """What each operation enters, the second time that it runs."""
    entered: dict[str, Entered] = {}
    for partition_id in ("first", "second"):
        client.register_partition(partition_id, list(COLUMNS), 2, ["trainer"])
        entered["put"], _ = counting.of(client.put_samples, IDS, partition_id, COLUMNS)
        claim = (partition_id, "trainer", list(COLUMNS), 2)
        entered["claim"], meta = counting.of(client.claim_meta, *claim, lease_s=60.0)
        entered["get"], _ = counting.of(client.get_data, meta)
        entered["ack"], _ = counting.of(client.ack, meta)
        client.clear_samples(None, partition_id)
    return entered


@case
def entered(functions: str = "", backends: tuple[str, ...] = ("noop", "shm_store")) -> Iterator[Table]:
    """How much of the house one operation enters: modules and functions of its packages, in the caller's process.

    Two samples with two columns, one of them ragged; no announcements, no middleware. It counts Python's frames in all
    threads of the process, so the numbers are exact, and the same on every machine with the same Python: from 3.12 on,
    most comprehensions have no frame of their own. ``--functions put`` lists those of one operation, in order.
    """
    counting = Counting()
    counting.begin()
    rows: list[Any] = []
    for backend in backends:
        with connect({**bench.config_of(backend), "announce_s": None}) as client:
            operations = count(client, counting)
        for operation, calls in operations.items():
            modules = {module for module, _ in calls}
            rows.append([f"{backend}, {operation}", len(modules), len(calls), calls.total()])
        if functions:
            cells = [[module, function, times] for (module, function), times in operations[functions].items()]
            yield Table(f"entered: {functions}", [f"{backend}, {functions}", "function", "calls"], cells)
    counting.end()
    yield Table("entered", ["", "modules", "functions", "calls"], rows)
