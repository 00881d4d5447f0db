"""What each policy admits, selects and evicts, on a view of a buffer alone."""

from __future__ import annotations

import pytest

from dataplane_core.errors import InvalidRequestError
from dataplane_integrations.replay import BufferView, GroupView, InOrderPolicy, ReadyFirstPolicy, WindowedPolicy

POLICIES = [WindowedPolicy, ReadyFirstPolicy, InOrderPolicy]


def view(*groups: tuple[int, int | str], version: int = 0, trained_since: int = 0) -> BufferView:
    """Groups in the order of reservation, each its weight version and its commit (or 'made', or 'training')."""
    return BufferView(
        weight_version=version,
        trained_since=trained_since,
        groups=tuple(
            GroupView(
                group=f"g{order}",
                weight_version=weight_version,
                order=order,
                committed=None if state == "made" else 99 if state == "training" else int(state),
                selected=state == "training",
            )
            for order, (weight_version, state) in enumerate(groups)
        ),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_admission_is_bounded_by_what_the_allowed_versions_use_up(policy: type) -> None:
    rule = policy(max_staleness=2, groups_per_version=4)
    assert rule.admit(view()) == 12
    assert rule.admit(view((0, "made"), (0, 1), (0, "training"))) == 9
    assert rule.admit(view(*[(0, "made")] * 12)) == 0
    assert rule.admit(view(*[(0, "made")] * 20)) == 0


@pytest.mark.parametrize("policy", [WindowedPolicy, InOrderPolicy])
def test_what_was_trained_since_the_last_version_counts_so_that_the_last_admitted_is_not_too_stale(
    policy: type,
) -> None:
    # trained and gone, but the version is not set yet: 4 of 8 places are those of this version
    rule = policy(max_staleness=1, groups_per_version=4)
    assert rule.admit(view(*[(0, 1)] * 4, trained_since=4)) == 0
    assert rule.admit(view(*[(0, 1)] * 4, version=1)) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_only_ready_groups_that_are_too_stale_are_evicted(policy: type) -> None:
    rule = policy(max_staleness=1, groups_per_version=4)
    groups = view((3, 1), (3, "made"), (3, "training"), (4, 2), (5, 3), version=5)
    assert list(rule.evict(groups)) == ["g0"]


def test_ready_first_goes_by_commit_and_waits_for_nobody() -> None:
    rule = ReadyFirstPolicy(max_staleness=1, groups_per_version=4)
    groups = view((0, "made"), (0, 7), (0, 3), (1, 1), version=1)
    assert rule.select(groups, 2) == ["g3", "g2"]
    assert rule.select(groups, 3) == ["g3", "g2", "g1"]
    assert rule.select(groups, 4) is None


def test_in_order_waits_for_the_slow_one() -> None:
    rule = InOrderPolicy(max_staleness=1, groups_per_version=4)
    assert rule.select(view((0, 7), (0, 3), (0, "made"), (0, 1)), 2) == ["g0", "g1"]
    assert rule.select(view((0, "training"), (0, 3), (0, "made"), (0, 1)), 2) is None


def test_windowed_lets_groups_overtake_inside_the_window() -> None:
    rule = WindowedPolicy(max_staleness=1, groups_per_version=4)
    assert rule.select(view((1, "made"), (1, 7), (1, 3), (1, 5), version=1), 2) == ["g2", "g3"]


def test_windowed_waits_for_what_is_at_the_edge_of_the_window() -> None:
    rule = WindowedPolicy(max_staleness=1, groups_per_version=4)
    assert rule.select(view((0, "made"), (1, 1), (1, 2), version=1), 2) is None
    assert rule.select(view((0, 9), (1, 1), (1, 2), version=1), 2) == ["g0", "g1"]
    assert rule.select(view((0, 9), (0, 4), (0, "made"), (1, 2), version=1), 2) == ["g1", "g0"]


def test_windowed_waits_for_no_more_slow_groups_than_later_versions_cannot_take() -> None:
    # 2 a version: of three groups with one version of slack one has to go now, whichever is ready first
    rule = WindowedPolicy(max_staleness=2, groups_per_version=2)
    assert rule.select(view((0, "made"), (0, "made"), (0, "made"), (1, 1), (1, 2), version=1), 2) is None
    assert rule.select(view((0, "made"), (0, "made"), (0, 9), (1, 1), (1, 2), version=1), 2) == ["g2", "g3"]
    assert rule.select(view((0, "made"), (0, "made"), (1, 1), (1, 2), version=1), 2) == ["g2", "g3"]


@pytest.mark.parametrize("policy", POLICIES)
def test_too_stale_groups_are_never_selected(policy: type) -> None:
    rule = policy(max_staleness=1, groups_per_version=4)
    assert rule.select(view((3, 1), (4, 2), version=5), 1) == ["g1"]
    assert rule.select(view((3, 1), (4, 2), version=5), 2) is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("staleness", "groups"), [(-1, 4), (1, 0)])
def test_numbers_that_make_no_sense_are_refused(policy: type, staleness: int, groups: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"Expected at least 0 and at least 1"):
        policy(max_staleness=staleness, groups_per_version=groups)
