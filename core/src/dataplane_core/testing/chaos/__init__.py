"""Chaos runs: random schedules in several processes that are killed and stopped, with a checked history.

The command `dataplane conformance NAME --chaos` and a storage author's own tests call `run_chaos`. The checker
(`check`) is pure: it takes any `History`.
"""

from dataplane_core.testing.chaos.checker import check, shrunk
from dataplane_core.testing.chaos.history import Call, Event, History
from dataplane_core.testing.chaos.rules import RULES, Finding
from dataplane_core.testing.chaos.run import Settings, Verdict, run_chaos

__all__ = ["RULES", "Call", "Event", "Finding", "History", "Settings", "Verdict", "check", "run_chaos", "shrunk"]
