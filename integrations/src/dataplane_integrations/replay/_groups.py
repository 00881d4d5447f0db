"""What a `ReplayBuffer` keeps of a group, as plain values in a save too, and its counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.replay._ids import Reservation
from dataplane_integrations.replay._policies import GroupView

__all__ = ["BufferCounts", "Group"]


@dataclass(slots=True, kw_only=True)
class BufferCounts:
    """What became of the groups so far.

    Attributes:
        reserved: Reservations given.
        committed: Groups committed.
        trained: Groups consumed.
        discarded: Groups that the trainer took and did not want.
        evicted: Groups that had become too stale; their rows were cleared.
        abandoned: Reservations given up, those of dead collectors among them.
    """

    reserved: int = 0
    committed: int = 0
    trained: int = 0
    discarded: int = 0
    evicted: int = 0
    abandoned: int = 0


@dataclass(slots=True)
class Group:
    """A group that is held: being made (``meta`` is None), ready, or in training."""

    reservation: Reservation
    view: GroupView
    meta: KVBatchMeta | None = None

    def state(self, meta: KVBatchMeta) -> dict[str, Any]:
        """A committed group, as ready again; ``meta`` is its own."""
        reservation = dataclasses.asdict(self.reservation)
        del reservation["sample_ids"]  # the meta has them
        return {"reservation": reservation, "committed": self.view.committed, "meta": dataclasses.asdict(meta)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Group:
        """What `state` described."""
        reservation = Reservation(**{**state["reservation"], "sample_ids": tuple(state["meta"]["sample_ids"])})
        view = GroupView(
            group=reservation.group,
            weight_version=reservation.weight_version,
            order=reservation.order,
            committed=state["committed"],
        )
        return cls(reservation, view, KVBatchMeta(**state["meta"]))
