"""How much of the house one operation enters: modules and functions of dataplane packages, in the caller's process.

Two samples with two columns, one of them ragged; no announcements, no middleware. It counts Python's frames in all
threads of the process, so the numbers are exact, and the same on every machine with the same Python: from 3.12 on, most
comprehensions have no frame of their own. Usage, from the root of a checkout:

    python benchmarks/entered.py
    python benchmarks/entered.py --functions put   # and the functions of one operation on noop, in order
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

import torch

from dataplane_core import DataPlaneClient, connect

BACKENDS: dict[str, dict[str, Any]] = {"noop": {}, "shm_store": {"namespace": f"entered-{os.getpid()}"}}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", metavar="OPERATION", choices=["put", "claim", "get", "ack"])
    parser.add_argument("--backend", default="noop", choices=BACKENDS, help="the one whose functions are shown")
    args = parser.parse_args()
    counting = Counting()
    counting.begin()
    print(f"{'backend':12}{'operation':12}{'modules':>8}{'functions':>11}{'calls':>7}")
    for name, options in BACKENDS.items():
        with connect({"backend": name, "announce_s": None, "options": options}) as client:
            operations = count(client, counting)
        for operation, entered in operations.items():
            modules = {module for module, _ in entered}
            print(f"{name:12}{operation:12}{len(modules):8}{len(entered):11}{entered.total():7}")
        if args.functions and name == args.backend:
            for (module, function), calls in operations[args.functions].items():
                print(f"    {module} {function} {calls}")


if __name__ == "__main__":
    main()
