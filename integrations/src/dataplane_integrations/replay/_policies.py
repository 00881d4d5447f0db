"""Staleness rules: how far rollouts may run ahead, which groups are trained next, which are dropped.

A rule is a pure function of a `BufferView`: no I/O, no clock, no state. A buffer may call it at any time and
repeatedly, and checks its answers.

The *staleness* of a group is the number of versions between the weights that generated it and those that train on it.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from dataplane_core.arguments import check_dict
from dataplane_core.entry_points import nearest
from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_integrations.errors import StepTooSmallError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group, as the rules see it.

    Attributes:
        group: Its name.
        weight_version: The version of the weights that generate it, when it is started.
        end_weight_version: The version when it was written; None while it is being generated.
        selected_version: The version when it was selected; None: it is not in training.
        order: Number of its reservation, in ascending order.
        committed: Ascending in the order of the commits that the buffer has seen; None while it is being generated.
        target_step: The weight version that it was started for; None: any.
    """

    group: str
    weight_version: int
    order: int
    committed: int | None = None
    target_step: int | None = None
    end_weight_version: int | None = None
    selected_version: int | None = None

    @property
    def selected(self) -> bool:
        """Whether it is in training."""
        return self.selected_version is not None

    @property
    def ready(self) -> bool:
        """Committed and not in training."""
        return self.committed is not None and not self.selected


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferView:
    """A buffer, as the rules see it.

    Attributes:
        weight_version: The trainer's version.
        trained_since: Groups that were selected and consumed since the trainer has this version.
        groups: The groups in the buffer, in the order of their reservations.
        given_up: Target step -> its groups whose prompts were given up; of this version and later ones.
        drained: Whether no more groups will be committed: the prompts are used up, and none is being generated.
        first_waiting: ``order`` of the first prompt that nobody has started, or started again. None: there is none.
    """

    weight_version: int
    trained_since: int
    groups: Sequence[GroupView]
    given_up: Mapping[int, int] = field(default_factory=dict)
    drained: bool = False
    first_waiting: int | None = None

    @property
    def finished(self) -> bool:
        """Drained, and no group is left: none is ready or in training."""
        return self.drained and not self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy(ABC):
    """Decides for a buffer. A subclass defines `select`, and overrides the other methods if needed.

    Attributes:
        max_staleness: The largest staleness of a group that is trained on; 0: only groups of the current version.
        groups_per_version: Groups that the trainer consumes per weight version.

    Raises:
        InvalidRequestError: A negative staleness, or fewer than 1 group; or no whole numbers.
        InvalidTypeError: An option that is on or off is no bool.
    """

    max_staleness: int
    groups_per_version: int

    def __post_init__(self) -> None:
        whole = isinstance(self.max_staleness, int) and isinstance(self.groups_per_version, int)
        if not whole or self.max_staleness < 0 or self.groups_per_version < 1:
            raise InvalidRequestError(
                f"{type(self).__name__} refused: max_staleness is {self.max_staleness!r}, groups_per_version is "
                f"{self.groups_per_version!r}. Expected at least 0 and at least 1."
            )
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(option.default, bool) and not isinstance(value, bool):
                raise InvalidTypeError(f"{type(self).__name__}: {option.name} must be a bool, got {value!r}.")

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> StalenessPolicy:
        """Makes the rule that a config names.

        Args:
            config: ``name``, and the arguments of the rule. The name is ``in_order``, ``windowed``, ``ready_first``,
                ``target_step``, or ``module:Class`` for a subclass of your own, which is imported.

        Raises:
            InvalidRequestError: No such rule, or it does not take these arguments.
            InvalidTypeError: ``config`` is no dict, or an option that is on or off is no bool.
        """
        check_dict("from_config: config", config)
        options = dict(config)
        name = options.pop("name", None)
        rule = _rule_named(name)
        try:
            return rule(**options)
        except InvalidTypeError:
            raise
        except TypeError as error:
            raise InvalidRequestError(
                f"StalenessPolicy.from_config refused: {error}. Expected the arguments of {rule.__name__}."
            ) from error

    def capacity(self, *, weight_version: int = 0, trained_since: int = 0) -> int:
        """How many groups an empty buffer admits. The store needs room for so many."""
        return self.admit(BufferView(weight_version=weight_version, trained_since=trained_since, groups=()))

    def admit(self, view: BufferView) -> int:
        """How many more groups may be started now, with the weights of ``view.weight_version``.

        Default: so many that the last of them is not too stale when all groups before it have been trained on.
        """
        ahead = view.trained_since + len(view.groups)
        return max(0, (self.max_staleness + 1) * self.groups_per_version - ahead)

    @abstractmethod
    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """The names of ``num_groups`` ready groups to train on now, or None to wait.

        A rule that gives a number of groups also gives any smaller one.
        """

    def evict(self, view: BufferView) -> Sequence[str]:
        """The names of ready groups to drop; their rows are cleared. Default: those that are too stale."""
        return [group.group for group in view.groups if group.ready and self._is_too_stale(view, group)]

    def abort(self, view: BufferView) -> Sequence[str]:
        """The names of groups whose rollouts are in vain. Default: those being generated that are too stale."""
        return [group.group for group in view.groups if group.committed is None and self._is_too_stale(view, group)]

    def target_step(self, view: BufferView) -> int | None:
        """The weight version that the next group is started for. Default: None, for any."""
        return None

    def left(self, view: BufferView) -> int | None:
        """How many more groups can be selected with the current weights. Default: None, for any number.

        If ``view.drained``, only those that are ready count.
        """
        return None

    def oldest_version(self, view: BufferView) -> int:
        """The oldest weight version that may be trained on now."""
        return view.weight_version - self.max_staleness

    def _is_too_stale(self, view: BufferView, group: GroupView) -> bool:
        """Whether a group may not be trained on any more. Default: it is of older weights than `oldest_version`."""
        return group.weight_version < self.oldest_version(view)

    def trainable(self, view: BufferView) -> list[GroupView]:
        """The ready groups that are not too stale, in the order of their reservations."""
        return [group for group in view.groups if group.ready and not self._is_too_stale(view, group)]


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
            ready,
            key=lambda group: (-group.weight_version if self.sample_freshest_first else 0, group.committed or 0),
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
        return [group.group for group in ready[:num_groups]] if len(ready) >= num_groups else None

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
        waiting = [group for group in view.groups if group.weight_version >= oldest and not group.selected]
        ready = self.in_order(group for group in waiting if group.ready)
        chosen: list[GroupView] = []
        for slack in range(self.max_staleness + 1):  # earliest deadline first
            newest = oldest + slack
            due = sum(group.weight_version <= newest for group in waiting) - slack * self.groups_per_version
            missing = min(due, num_groups) - len(chosen)
            if missing > 0:
                first = [group for group in ready if group.weight_version <= newest and group not in chosen][:missing]
                if len(first) < missing:
                    return None
                chosen += first
        chosen += [group for group in ready if group not in chosen][: num_groups - len(chosen)]
        return [group.group for group in chosen] if len(chosen) == num_groups else None


@dataclass(frozen=True, slots=True, kw_only=True)
class InOrderPolicy(StalenessPolicy):
    """In the order of reservation. Waits for slow groups, so the order of training does not depend on their speed.

    Since admission looks ahead, no group becomes too stale while the trainer consumes ``groups_per_version`` groups per
    version.
    """

    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """The groups that come first, once all of them are committed, and no prompt before them waits for a collector:
        one that was killed may have had it."""
        stale = set(self.evict(view))
        first = [group for group in view.groups if not group.selected and group.group not in stale][:num_groups]
        if len(first) < num_groups or not all(group.ready for group in first):
            return None
        if view.first_waiting is not None and view.first_waiting < first[-1].order:
            return None
        return [group.group for group in first]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStepPolicy(StalenessPolicy):
    """Each group is started for one weight version, its target step, and trained on in that step or not at all.

    The next group is for the first step that has too few, so a step whose group failed or was discarded gets another
    one. Groups of steps that are over are dropped, also while they are being generated. ``max_staleness`` is how many
    steps rollouts may run ahead.

    Attributes:
        borrow: A step that has too few gets a ready group of a later step, of the last one first. The next group is
            then for the step that lent it. So the trainer does not wait for a new rollout.
        replacements: How many prompts of a step that were given up are replaced by others. For each one more, the step
            has a group less. The buffer's `select` then does not wait for it, and returns no rows once the step has all
            its groups. None: all are replaced.
        min_groups: The fewest groups that a step may have; None: ``groups_per_version``. If it would have fewer,
            `select` raises `StepTooSmallError`. When the prompts are used up, this holds for a step that lost prompts;
            the last step may have fewer.

    Raises:
        InvalidRequestError: Also for negative ``replacements``, or ``min_groups`` below 1 or above
            ``groups_per_version``.
    """

    borrow: bool = False
    replacements: int | None = None
    min_groups: int | None = None

    def __post_init__(self) -> None:
        StalenessPolicy.__post_init__(self)  # super() does not work in a dataclass with slots
        replaced, fewest = 0 if self.replacements is None else self.replacements, self._fewest
        whole = isinstance(replaced, int) and isinstance(fewest, int)
        if not whole or replaced < 0 or not 1 <= fewest <= self.groups_per_version:
            raise InvalidRequestError(
                f"TargetStepPolicy refused: replacements is {self.replacements!r}, min_groups is {self.min_groups!r}, "
                f"groups_per_version is {self.groups_per_version}. Expected at least 0, and from 1 to "
                "groups_per_version."
            )

    def admit(self, view: BufferView) -> int:
        """How many groups the steps up to ``max_staleness`` ahead still lack. Those of earlier steps do not count."""
        ahead = view.trained_since + sum(_step(group) >= view.weight_version for group in view.groups)
        last = view.weight_version + self.max_staleness
        return max(0, sum(self._size(view, step) for step in range(view.weight_version, last + 1)) - ahead)

    def target_step(self, view: BufferView) -> int:
        """The first step that has too few groups."""
        counts = self._counts(view, self._steps(view))
        step = view.weight_version
        while counts[step] >= self._size(view, step):
            step += 1
        return step

    def select(self, view: BufferView, num_groups: int) -> Sequence[str] | None:
        """The ready groups of the current step, in the order of their reservations."""
        steps = self._steps(view)
        ready = [group.group for group in view.groups if group.ready and steps[group.group] == view.weight_version]
        return ready[:num_groups] if len(ready) >= num_groups else None

    def left(self, view: BufferView) -> int | None:
        """With ``replacements``: what the current step still gets, ready or not. Raises if it is too small."""
        if self.replacements is None:
            return None
        step, steps = view.weight_version, self._steps(view)
        size, lost = self._size(view, step), view.given_up.get(step, 0)
        if view.drained:  # no more replacements: it has what it has
            size = min(size, self._counts(view, steps)[step])
        over = view.drained and not size and max(steps.values(), default=step) <= step
        if lost and size < self._fewest and not over:
            raise StepTooSmallError(
                f"step {step} refused: {lost} of its prompts were given up and at most {self.replacements} replaced, "
                f"so it has {size} of {self.groups_per_version} groups. Expected at least {self._fewest} (min_groups).",
                step=step,
                num_groups=size,
            )
        in_training = sum(group.selected and steps[group.group] == step for group in view.groups)
        return size - view.trained_since - in_training

    def _is_too_stale(self, view: BufferView, group: GroupView) -> bool:
        """Whether its step is over."""
        return _step(group) < view.weight_version

    @property
    def _fewest(self) -> int:
        return self.groups_per_version if self.min_groups is None else self.min_groups

    def _size(self, view: BufferView, step: int) -> int:
        """How many groups a step is to have."""
        if self.replacements is None:
            return self.groups_per_version
        return max(0, self.groups_per_version - max(0, view.given_up.get(step, 0) - self.replacements))

    def _counts(self, view: BufferView, steps: Mapping[str, int]) -> Counter[int]:
        """Step -> its groups, those trained on included."""
        counts = Counter(steps.values())
        counts[view.weight_version] += view.trained_since
        return counts

    def _steps(self, view: BufferView) -> dict[str, int]:
        """Group -> the step that it is for, after loans. Follows from the view alone, so there is nothing to save."""
        steps = {group.group: _step(group) for group in view.groups}
        if not self.borrow:
            return steps
        counts = self._counts(view, steps)
        ready: dict[int, list[str]] = {}  # step -> its ready groups, the first reserved one last
        for group in sorted(view.groups, key=lambda group: (-group.order, group.group)):
            if group.ready:
                ready.setdefault(steps[group.group], []).append(group.group)
        for step in range(view.weight_version, max(ready, default=0)):
            while counts[step] < self._size(view, step):
                # first a step with one too many: it has got a group for a loan, and would drop one in the end
                lender = max(
                    (own for own, groups in ready.items() if own > step and groups),
                    key=lambda own: (counts[own] > self._size(view, own), own),
                    default=None,
                )
                if lender is None:
                    return steps
                steps[ready[lender].pop()] = step
                counts[lender] -= 1
                counts[step] += 1
        return steps


def _step(group: GroupView) -> int:
    """The step of a group. A loan in training is for the step that got it. One that was started under another rule is
    for the version that generated it."""
    if group.selected_version is not None:
        return group.selected_version
    return group.weight_version if group.target_step is None else group.target_step


#: Name in a config -> rule.
_RULES: Final[dict[str, type[StalenessPolicy]]] = {
    "in_order": InOrderPolicy,
    "windowed": WindowedPolicy,
    "ready_first": ReadyFirstPolicy,
    "target_step": TargetStepPolicy,
}


def _rule_named(name: Any) -> type[StalenessPolicy]:
    if isinstance(name, str) and name in _RULES:
        return _RULES[name]
    text, hint, cause = repr(name), None, None
    if isinstance(name, str) and ":" in name:
        try:
            rule = pkgutil.resolve_name(name)
            if isinstance(rule, type) and issubclass(rule, StalenessPolicy):
                return rule
            text += f", found {rule!r}"
        except (ImportError, AttributeError, ValueError) as error:
            text, cause = f"{text}, which cannot be imported ({error})", error
    elif isinstance(name, str) and (near := nearest(name, _RULES)):
        hint = f"Did you mean '{near}'?"
    raise InvalidRequestError(
        f"StalenessPolicy.from_config refused: name is {text}. Expected one of {', '.join(_RULES)}, or 'module:Class' "
        "of a subclass of StalenessPolicy.",
        hint=hint,
    ) from cause
