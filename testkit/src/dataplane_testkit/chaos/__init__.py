"""Chaos runs: random schedules in several processes that are killed and stopped, with a checked history.

The command `dataplane conformance NAME --chaos` and a storage author's own tests call `run_chaos`. The checker
(`check`) is pure: it takes any `History`. A `Shim` points the same run at a store of any kind (`run_shim`).
"""

from dataplane_testkit.chaos.checker import RULES, Finding, check, judged, shrunk
from dataplane_testkit.chaos.history import Call, Event, History
from dataplane_testkit.chaos.run import Verdict, run_chaos
from dataplane_testkit.chaos.shim import Shim, run_shim
from dataplane_testkit.chaos.worker import Settings

__all__ = [
    "RULES",
    "Call",
    "Event",
    "Finding",
    "History",
    "Settings",
    "Shim",
    "Verdict",
    "check",
    "judged",
    "run_chaos",
    "run_shim",
    "shrunk",
]
