"""A recorded run again, without generation: the rows of each step come from the recording, the rest is computed anew.

The recording (`train.py --record`) has what every process of the run wrote. Here each process opens it by the backend
``recording``. The driver takes what the rollout worker wrote in place of asking it, and the policy workers read their
rows as in the run. What driver and policy workers write is compared with what they wrote in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ray import ObjectRef

from .plane_path import DataPlanePath

__all__ = ["ReplayPath"]


class ReplayPath(DataPlanePath):
    """A data path on which nothing is generated. It needs the backend ``recording``."""

    collecting = "read"

    def hand_over(self, step: int, push: Callable[[], ObjectRef]) -> None:
        """Does nothing: nobody generates with the newest weights."""

    def _answer(self, step: int, arguments: Sequence[Any]) -> None:
        """Does nothing: the answers are in the recording."""
