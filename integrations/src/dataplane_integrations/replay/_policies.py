"""Staleness rules: how far rollouts may run ahead, which groups are trained next, which are dropped.

A rule is a pure function of a `BufferView`: no I/O, no clock, no state. A buffer may call it at any time and
repeatedly, and checks its answers.

The *staleness* of a group is the number of versions between the weights that generated it and those that train on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from dataplane_core.errors import InvalidRequestError

__all__ = ["BufferView", "GroupView", "InOrderPolicy", "ReadyFirstPolicy", "StalenessPolicy", "WindowedPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group, as the rules see it.

    Attributes:
        group: Its name.
        weight_version: The version of the weights that generate it.
        order: Number of its reservation, in ascending order.
        committed: Number of its commit, in ascending order; None while it is being generated.
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
    """A buffer, as the rules see it.

    Attributes:
        weight_version: The trainer's version.
        trained_since: Groups that were consumed since the trainer has this version.
        groups: The groups in the buffer, in the order of their reservations.
    """

    weight_version: int
    trained_since: int
    groups: Sequence[GroupView]


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy(ABC):
    """Decides for a buffer. A subclass defines `select`, and overrides `admit` and `evict` if needed.

    Attributes:
        max_staleness: The largest staleness of a group that is trained on; 0: only groups of the current version.
        groups_per_version: Groups that the trainer consumes per weight version.

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
        """How many more groups may be started now, with the weights of ``view.weight_version``.

        Default: so many that the last of them is not too stale when all groups before it have been trained on.
        """
        ahead = view.trained_since + len(view.groups)
        return max(0, (self.max_staleness + 1) * self.groups_per_version - ahead)

    @abstractmethod
    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """The names of ``num_groups`` ready groups to train on now, or None to wait."""

    def evict(self, view: BufferView) -> Sequence[str]:
        """The names of ready groups to drop; their rows are cleared. Default: those that are too stale."""
        oldest = self.oldest_version(view)
        return [each.group for each in view.groups if each.ready and each.weight_version < oldest]

    def oldest_version(self, view: BufferView) -> int:
        """The oldest weight version that may be trained on now."""
        return view.weight_version - self.max_staleness

    def trainable(self, view: BufferView) -> list[GroupView]:
        """The ready groups that are not too stale, in the order of their reservations."""
        oldest = self.oldest_version(view)
        return [each for each in view.groups if each.ready and each.weight_version >= oldest]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyFirstPolicy(StalenessPolicy):
    """First ready, first trained. Only the number of held groups limits admission.

    The trainer never waits for a slow group while others are ready. The price: other groups overtake groups with long
    answers, which become too stale and are dropped; see ``requeue_evicted`` of the buffer.
    """

    def admit(self, view: BufferView) -> int:
        """At most ``(max_staleness + 1) * groups_per_version`` groups may be held."""
        return max(0, (self.max_staleness + 1) * self.groups_per_version - len(view.groups))

    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """The groups that were committed first."""
        ready = sorted(self.trainable(view), key=_commit)
        return [each.group for each in ready[:num_groups]] if len(ready) >= num_groups else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedPolicy(StalenessPolicy):
    """First ready, first trained; but the trainer waits for groups that would be too stale later.

    Newer groups may overtake a slow group inside its window of ``max_staleness`` versions, as long as the versions left
    in the window have room for all groups that must be trained in it. At the end of the window the trainer waits for
    the slow group. Since admission looks ahead, no group becomes too stale while the trainer consumes
    ``groups_per_version`` groups per version.
    """

    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """First the groups that must be trained now (None until enough are ready), then the first committed."""
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
    """In the order of reservation. Waits for slow groups, so the order of training does not depend on their speed.

    Since admission looks ahead, no group becomes too stale while the trainer consumes ``groups_per_version`` groups per
    version.
    """

    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """The groups that were reserved first, once all of them are committed."""
        oldest = self.oldest_version(view)
        first = [
            each for each in view.groups if not each.selected and (not each.ready or each.weight_version >= oldest)
        ]
        first = first[:num_groups]
        return [each.group for each in first] if len(first) == num_groups and all(e.ready for e in first) else None


def _commit(group: GroupView) -> int:
    assert group.committed is not None, "only ready groups are compared"
    return group.committed
