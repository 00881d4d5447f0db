"""Staleness rules: how far rollouts may run ahead, which groups are trained next, which are dropped.

A rule is a pure function of a `BufferView`: no I/O, no clock, no state. A buffer may call it at any time and
repeatedly, and checks its answers.

The *staleness* of a group is the number of versions between the weights that generated it and those that train on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataplane_core.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group, as the rules see it.

    Attributes:
        group: Its name.
        weight_version: The version of the weights that generate it.
        order: Number of its reservation, in ascending order.
        committed: Number of its commit, in ascending order; None while it is being generated.
        selected: Whether it is in training.
        target_step: The weight version that it was started for; None: any.
    """

    group: str
    weight_version: int
    order: int
    committed: int | None = None
    selected: bool = False
    target_step: int | None = None

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
    """Decides for a buffer. A subclass defines `select`, and overrides the other methods if needed.

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

    def abort(self, view: BufferView) -> Sequence[str]:
        """The names of groups whose rollouts are in vain. Default: those being generated that are too stale."""
        oldest = self.oldest_version(view)
        return [each.group for each in view.groups if each.committed is None and each.weight_version < oldest]

    def target_step(self, view: BufferView) -> int | None:
        """The weight version that the next group is started for. Default: None, for any."""
        return None

    def oldest_version(self, view: BufferView) -> int:
        """The oldest weight version that may be trained on now."""
        return view.weight_version - self.max_staleness

    def trainable(self, view: BufferView) -> list[GroupView]:
        """The ready groups that are not too stale, in the order of their reservations."""
        oldest = self.oldest_version(view)
        return [each for each in view.groups if each.ready and each.weight_version >= oldest]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadyOrderPolicy(StalenessPolicy):
    """The base of rules that train on what is ready.

    Attributes:
        sample_freshest_first: Of the ready groups, those of the newest weights first.
    """

    sample_freshest_first: bool = False

    def in_order(self, ready: Iterable[GroupView]) -> list[GroupView]:
        """Ready groups in the order in which they are trained on: by commit."""
        return sorted(
            ready, key=lambda each: (-each.weight_version if self.sample_freshest_first else 0, _commit(each))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyFirstPolicy(_ReadyOrderPolicy):
    """First ready, first trained. Only the number of held groups limits admission.

    The trainer never waits for a slow group while others are ready. The price: other groups overtake groups with long
    answers, which become too stale and are dropped; see ``requeue_evicted`` of the buffer.

    Attributes:
        never_discard: Train on late groups too, however stale: no group is dropped, no rollout is in vain. Then groups
            trained on since the last version count for admission, which still limits how far rollouts run ahead.
    """

    never_discard: bool = False

    def admit(self, view: BufferView) -> int:
        """At most ``(max_staleness + 1) * groups_per_version`` groups may be held."""
        ahead = len(view.groups) + (view.trained_since if self.never_discard else 0)
        return max(0, (self.max_staleness + 1) * self.groups_per_version - ahead)

    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """The groups that were committed first."""
        ready = self.in_order(self.trainable(view))
        return [each.group for each in ready[:num_groups]] if len(ready) >= num_groups else None

    def oldest_version(self, view: BufferView) -> int:
        """The oldest weight version that may be trained on now."""
        return 0 if self.never_discard else view.weight_version - self.max_staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedPolicy(_ReadyOrderPolicy):
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
        ready = self.in_order(each for each in waiting if each.ready)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStepPolicy(StalenessPolicy):
    """Each group is started for one weight version, its target step, and trained on in that step or not at all.

    The next group is for the first step that has too few, so a step whose group failed or was discarded gets another
    one. Groups of steps that are over are dropped, also while they are being generated. ``max_staleness`` is how many
    steps rollouts may run ahead.
    """

    def admit(self, view: BufferView) -> int:
        """How many groups the steps up to ``max_staleness`` ahead still lack. Those of earlier steps do not count."""
        ahead = view.trained_since + sum(_step(each) >= view.weight_version for each in view.groups)
        return max(0, (self.max_staleness + 1) * self.groups_per_version - ahead)

    def target_step(self, view: BufferView) -> int:
        """The first step that has too few groups."""
        counts = Counter(map(_step, view.groups))
        counts[view.weight_version] += view.trained_since
        step = view.weight_version
        while counts[step] >= self.groups_per_version:
            step += 1
        return step

    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """The ready groups of the current step, in the order of their reservations."""
        ready = [each.group for each in view.groups if each.ready and _step(each) == view.weight_version]
        return ready[:num_groups] if len(ready) >= num_groups else None

    def evict(self, view: BufferView) -> Sequence[str]:
        """The ready groups of steps that are over."""
        return [each.group for each in view.groups if each.ready and _step(each) < view.weight_version]

    def abort(self, view: BufferView) -> Sequence[str]:
        """The groups being generated for steps that are over."""
        return [each.group for each in view.groups if each.committed is None and _step(each) < view.weight_version]


def _step(group: GroupView) -> int:
    """The step of a group. One that was started under another rule is for the version that generated it."""
    return group.weight_version if group.target_step is None else group.target_step


def _commit(group: GroupView) -> int:
    assert group.committed is not None, "only ready groups are compared"
    return group.committed
