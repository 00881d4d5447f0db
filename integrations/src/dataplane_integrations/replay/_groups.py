"""`Group`: what a `ReplayBuffer` keeps of a group, and its form in a save. `BufferCounts`."""

from __future__ import annotations

import dataclasses
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataplane_core.codec import decode_item, encode_item, plain
from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.replay._ids import Reservation
from dataplane_integrations.replay._policies import GroupView


@dataclass(slots=True, kw_only=True)
class BufferCounts:
    """How many groups went through each step so far.

    Attributes:
        reserved: Reservations handed out.
        committed: Groups committed.
        trained: Groups consumed.
        discarded: Groups that the trainer selected but did not train on.
        evicted: Groups that became too stale; their rows were cleared.
        abandoned: Reservations given up, including those of dead collectors.
        lost: Groups that were left out of a selection, mostly because the store had lost a row of them.
    """

    reserved: int = 0
    committed: int = 0
    trained: int = 0
    discarded: int = 0
    evicted: int = 0
    abandoned: int = 0
    lost: int = 0


@dataclass(slots=True)
class Group:
    """A group in the buffer: being generated (``meta`` is None), ready, or in training."""

    reservation: Reservation
    view: GroupView
    meta: KVBatchMeta | None = None

    def state(self, meta: KVBatchMeta) -> dict[str, Any]:
        """A committed group as values of JSON; it is ready after a restore. ``meta`` is its meta, not None.

        Raises:
            InvalidTypeError: As for an object column: the meta's ``extra_info`` holds what cannot be saved.
        """
        reservation = dataclasses.asdict(self.reservation)
        del reservation["sample_ids"]  # the meta has them
        values = {field.name: getattr(meta, field.name) for field in dataclasses.fields(meta)}
        values["extra_info"] = b64encode(encode_item(plain(meta.extra_info), "extra_info")).decode()
        return {"reservation": reservation, "committed": self.view.committed, "meta": values}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Group:
        """Makes a group from what `state` returned."""
        reservation = Reservation(**{**state["reservation"], "sample_ids": tuple(state["meta"]["sample_ids"])})
        view = GroupView(
            group=reservation.group,
            weight_version=reservation.weight_version,
            order=reservation.order,
            committed=state["committed"],
            target_step=reservation.target_step,
        )
        values = dict(state["meta"])
        values["extra_info"] = decode_item(b64decode(values["extra_info"]))
        return cls(reservation, view, KVBatchMeta(**values))
