"""Staleness policies: how far rollouts may run ahead, which groups are trained next, which are given up.

Pure functions of a `BufferView`: no I/O, no clock, no state of their own, so that a buffer may ask at any time, any
number of times. The buffer checks what they answer.

The *staleness* of a group is the number of versions between the weights that made it and those that train on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from dataplane_core.errors import InvalidRequestError

__all__ = ["BufferView", "GroupView", "InOrderPolicy", "ReadyFirstPolicy", "StalenessPolicy", "WindowedPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group as policies see it.

    Attributes:
        group: Its name.
        weight_version: The version of the weights that make it.
        order: Number of its reservation; grows.
        committed: Number of its commit; grows. None while it is being made.
        selected: Whether it is in training.
    """

    group: str
    weight_version: int
    order: int
    committed: int | None = None
    selected: bool = False

    @property
    def ready(self) -> bool:
        """Committed and not in training."""
        return self.committed is not None and not self.selected


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferView:
    """A buffer as policies see it.

    Attributes:
        weight_version: The version that the trainer has.
        trained_since: Groups that were trained on, and are gone, since it has that version.
        groups: Those that are held, in the order of their reservations.
    """

    weight_version: int
    trained_since: int
    groups: Sequence[GroupView]


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy(ABC):
    """Decides for a buffer. A subclass says `select`, and `admit` and `evict` where the ones here do not fit.

    Attributes:
        max_staleness: Versions that a group may be behind when it is trained on; 0: only fresh groups.
        groups_per_version: Groups that the trainer uses up between two weight versions.

    Raises:
        InvalidRequestError: A negative staleness, or fewer than 1 group.
    """

    max_staleness: int
    groups_per_version: int

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.groups_per_version < 1:
            raise InvalidRequestError(
                f"{type(self).__name__} refused: max_staleness is {self.max_staleness}, groups_per_version is "
                f"{self.groups_per_version}. Expected at least 0 and at least 1."
            )

    def admit(self, view: BufferView) -> int:
        """How many more groups may be begun now, with the weights of ``view.weight_version``.

        Here: so many that the last of them, trained after all others that are held, is not too stale.
        """
        ahead = view.trained_since + len(view.groups)
        return max(0, (self.max_staleness + 1) * self.groups_per_version - ahead)

    @abstractmethod
    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """The names of ``num_groups`` ready groups to train on now, or None: wait."""

    def evict(self, view: BufferView) -> Sequence[str]:
        """The names of ready groups to give up; their rows are cleared. Here: those that are too stale."""
        oldest = self.oldest_version(view)
        return [each.group for each in view.groups if each.ready and each.weight_version < oldest]

    def oldest_version(self, view: BufferView) -> int:
        """The version that a group must have at least to be trained on now."""
        return view.weight_version - self.max_staleness

    def trainable(self, view: BufferView) -> list[GroupView]:
        """The ready groups that are fresh enough, in the order of their reservations."""
        oldest = self.oldest_version(view)
        return [each for each in view.groups if each.ready and each.weight_version >= oldest]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyFirstPolicy(StalenessPolicy):
    """First ready, first trained; room is all that bounds admission.

    The trainer never waits for a slow group while others are ready. The price: groups of long answers are overtaken
    again and again, and are given up once they are too stale; see ``requeue_evicted`` of the buffer.
    """

    def admit(self, view: BufferView) -> int:
        """As many as there is room for: ``(max_staleness + 1) * groups_per_version`` may be held."""
        return max(0, (self.max_staleness + 1) * self.groups_per_version - len(view.groups))

    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """The first that were committed."""
        ready = sorted(self.trainable(view), key=_commit)
        return [each.group for each in ready[:num_groups]] if len(ready) >= num_groups else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedPolicy(StalenessPolicy):
    """First ready, first trained, but what later versions could not take any more goes now, and is waited for.

    A slow group may be overtaken by newer ones while it is inside the window of ``max_staleness`` versions, and as long
    as the versions left to it have room for all that must be trained by then; not at the window's edge. As admission
    looks ahead, nothing grows too stale while the trainer uses ``groups_per_version`` for each version.
    """

    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """The first committed of those that must go now, waiting for enough of them; then of all others."""
        oldest = self.oldest_version(view)
        waiting = [each for each in view.groups if each.weight_version >= oldest and not each.selected]
        ready = sorted((each for each in waiting if each.ready), key=_commit)
        chosen: list[GroupView] = []
        for slack in range(self.max_staleness + 1):  # earliest deadline first
            newest = oldest + slack
            due = sum(each.weight_version <= newest for each in waiting) - slack * self.groups_per_version
            missing = min(due, num_groups) - len(chosen)
            if missing > 0:
                first = [each for each in ready if each.weight_version <= newest and each not in chosen][:missing]
                if len(first) < missing:
                    return None
                chosen += first
        chosen += [each for each in ready if each not in chosen][: num_groups - len(chosen)]
        return [each.group for each in chosen] if len(chosen) == num_groups else None


@dataclass(frozen=True, slots=True, kw_only=True)
class InOrderPolicy(StalenessPolicy):
    """In the order of reservation, waiting for slow groups: what is trained on does not depend on who is fast.

    As admission looks ahead, nothing grows too stale while the trainer uses ``groups_per_version`` for each version.
    """

    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """The first by reservation, once all of them are committed."""
        oldest = self.oldest_version(view)
        first = [
            each for each in view.groups if not each.selected and (not each.ready or each.weight_version >= oldest)
        ]
        first = first[:num_groups]
        return [each.group for each in first] if len(first) == num_groups and all(e.ready for e in first) else None


def _commit(group: GroupView) -> int:
    assert group.committed is not None, "only ready groups are compared"
    return group.committed
