"""What each policy admits, selects and evicts, on a view of a buffer alone."""

import pytest
from replaying import prompts_of

from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_integrations.errors import ReplayTimeoutError
from dataplane_integrations.replay import (
    BufferView,
    GroupView,
    InOrderPolicy,
    ReadyFirstPolicy,
    StalenessPolicy,
    TargetStepPolicy,
    WindowedPolicy,
)

POLICIES = [WindowedPolicy, ReadyFirstPolicy, InOrderPolicy]


def view(*groups, version=0, trained_since=0):
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
                selected_version=weight_version if state == "training" else None,
            )
            for order, (weight_version, state) in enumerate(groups)
        ),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_admission_is_bounded_by_what_the_allowed_versions_use_up(policy):
    rule = policy(max_staleness=2, groups_per_version=4)
    assert rule.admit(view()) == 12
    assert rule.admit(view((0, "made"), (0, 1), (0, "training"))) == 9
    assert rule.admit(view(*[(0, "made")] * 12)) == 0
    assert rule.admit(view(*[(0, "made")] * 20)) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_too_stale_groups_are_evicted_or_made_in_vain_and_never_selected(policy):
    rule = policy(max_staleness=1, groups_per_version=4)
    groups = view((3, 1), (3, "made"), (3, "training"), (4, 2), (5, "made"), version=5)
    assert list(rule.evict(groups)) == ["g0"]
    assert list(rule.abort(groups)) == ["g1"]
    assert rule.select(view((3, 1), (4, 2), version=5), 1) == ["g1"]
    assert rule.select(view((3, 1), (4, 2), version=5), 2) is None


IN_ORDER = InOrderPolicy(max_staleness=1, groups_per_version=4)
READY_FIRST = ReadyFirstPolicy(max_staleness=1, groups_per_version=4)
FRESHEST_FIRST = ReadyFirstPolicy(max_staleness=2, groups_per_version=4, sample_freshest_first=True)
WINDOWED = WindowedPolicy(max_staleness=1, groups_per_version=4)
WIDER = WindowedPolicy(max_staleness=2, groups_per_version=2)
FRESHEST_IN_WINDOW = WindowedPolicy(max_staleness=2, groups_per_version=4, sample_freshest_first=True)
BY_COMMIT = view((0, "made"), (0, 7), (0, 3), (1, 1), version=1)
BY_WEIGHTS = view((0, 1), (1, 7), (1, 3), (2, 9), (2, "made"), version=2)
THREE = [(0, "made")] * 3
#: The rule, the groups, and of how many which it selects.
SELECTIONS = {
    "in order, the first are ready": (IN_ORDER, view((0, 7), (0, 3), (0, "made"), (0, 1)), 2, "g0 g1"),
    "in order, one is slow": (IN_ORDER, view((0, "training"), (0, 3), (0, "made"), (0, 1)), 2, None),
    "ready first, by commit": (READY_FIRST, BY_COMMIT, 2, "g3 g2"),
    "ready first, all that are ready": (READY_FIRST, BY_COMMIT, 3, "g3 g2 g1"),
    "ready first, too few": (READY_FIRST, BY_COMMIT, 4, None),
    "by weights, then by commit": (FRESHEST_FIRST, BY_WEIGHTS, 4, "g3 g2 g1 g0"),
    "inside the window, others overtake": (WINDOWED, view((1, "made"), (1, 7), (1, 3), (1, 5), version=1), 2, "g2 g3"),
    "at its edge, the slow one is waited for": (WINDOWED, view((0, "made"), (1, 1), (1, 2), version=1), 2, None),
    "at its edge, one is ready": (WINDOWED, view((0, 9), (1, 1), (1, 2), version=1), 2, "g0 g1"),
    "at its edge, enough are ready": (WINDOWED, view((0, 9), (0, 4), (0, "made"), (1, 2), version=1), 2, "g1 g0"),
    # 2 a version: of three groups with one version of slack one has to go now, whichever is ready first
    "three with slack, none is ready": (WIDER, view(*THREE, (1, 1), (1, 2), version=1), 2, None),
    "three with slack, one is ready": (WIDER, view(*THREE[1:], (0, 9), (1, 1), (1, 2), version=1), 2, "g2 g3"),
    "two with slack": (WIDER, view(*THREE[1:], (1, 1), (1, 2), version=1), 2, "g2 g3"),
    "by weights, but the edge first": (FRESHEST_IN_WINDOW, BY_WEIGHTS, 4, "g0 g3 g2 g1"),
    "by weights, but the edge is slow": (FRESHEST_IN_WINDOW, view((0, "made"), (1, 1), version=2), 1, None),
}


@pytest.mark.parametrize(("rule", "groups", "num_groups", "selected"), SELECTIONS.values(), ids=SELECTIONS)
def test_a_rule_selects_or_waits(rule, groups, num_groups, selected):
    assert rule.select(groups, num_groups) == (None if selected is None else selected.split())


def test_ready_first_without_discards_trains_on_late_groups_too():
    rule = ReadyFirstPolicy(max_staleness=1, groups_per_version=4, never_discard=True)
    groups = view((0, "made"), (0, 2), (4, 1), (5, 3), version=5)
    assert rule.select(groups, 3) == ["g2", "g1", "g3"]
    assert list(rule.evict(groups)) == list(rule.abort(groups)) == []
    assert rule.admit(groups) == 4
    assert rule.admit(view((5, 1), (5, 2), version=5, trained_since=4)) == 2


def for_steps(*steps, version, trained_since=0, ready=True):
    """Groups of one version's weights that were started for these steps."""
    groups = [
        GroupView(
            group=f"g{order}", weight_version=0, order=order, committed=order if ready else None, target_step=step
        )
        for order, step in enumerate(steps)
    ]
    return BufferView(weight_version=version, trained_since=trained_since, groups=groups)


def test_a_target_step_gets_groups_until_it_has_enough():
    rule = TargetStepPolicy(max_staleness=2, groups_per_version=2)
    assert rule.target_step(for_steps(version=3)) == 3
    assert rule.target_step(for_steps(3, 3, 4, version=3)) == 4
    assert rule.target_step(for_steps(3, 4, 4, version=3)) == 3, "one that was lost is made up for"
    assert rule.target_step(for_steps(4, 4, version=3, trained_since=2)) == 5
    assert rule.admit(for_steps(3, 3, 4, version=3)) == 3
    assert rule.admit(for_steps(3, 3, 4, version=4)) == 5, "groups of a step that is over take no place"
    assert rule.admit(for_steps(4, 4, 5, 5, version=3, trained_since=2)) == 0


def test_a_target_step_trains_on_its_own_groups_only():
    rule = TargetStepPolicy(max_staleness=2, groups_per_version=2)
    groups = for_steps(3, 4, 3, 4, version=4)
    assert rule.select(groups, 2) == ["g1", "g3"]
    assert rule.select(groups, 3) is None
    assert list(rule.evict(groups)) == ["g0", "g2"]
    assert list(rule.abort(for_steps(3, 4, version=4, ready=False))) == ["g0"]
    assert rule.select(view((4, 1), (3, 2), version=4), 1) == ["g0"], "without a step: that of its weights"


def test_loans_leave_no_step_with_a_group_too_many():
    rule = TargetStepPolicy(max_staleness=2, groups_per_version=2, borrow=True)
    groups = for_steps(3, 4, 4, 5, 5, version=3)
    assert rule.select(groups, 2) == ["g0", "g3"], "the last step has the most time for another one"
    assert rule.target_step(groups) == 5
    repaid = for_steps(3, 4, 4, 5, 5, 5, version=3)
    assert rule.target_step(repaid) == 6
    # of what else was started meanwhile, the step with one too many still is the lender
    assert rule.select(for_steps(3, 4, 4, 5, 5, 5, 6, 6, version=3), 2) == ["g0", "g3"]
    assert rule.select(for_steps(4, 4, 5, version=3), 2) == ["g0", "g2"]
    assert rule.admit(groups) == 1


def test_loans_take_no_more_work_than_there_are_groups(monkeypatch):
    rule = TargetStepPolicy(max_staleness=2, groups_per_version=64, borrow=True)
    asked, size = [], TargetStepPolicy._size
    monkeypatch.setattr(TargetStepPolicy, "_size", lambda *given: asked.append(given) or size(*given))
    groups = for_steps(*[3] * 32, *[4] * 64, *[5] * 64, version=3)
    found = rule.select(groups, 64)
    assert found is not None
    assert found[32:] == [f"g{order}" for order in range(96, 128)], "the first reserved of the last step"
    assert len(asked) <= 3 * len(groups.groups)


class MyPolicy(InOrderPolicy):
    """A rule of a user."""


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("in_order", InOrderPolicy),
        ("windowed", WindowedPolicy),
        ("ready_first", ReadyFirstPolicy),
        ("target_step", TargetStepPolicy),
        (f"{__name__}:MyPolicy", MyPolicy),
    ],
)
def test_a_config_names_a_rule_and_its_capacity_is_what_it_admits(name, rule):
    made = StalenessPolicy.from_config({"name": name, "max_staleness": 2, "groups_per_version": 4})
    assert made == rule(max_staleness=2, groups_per_version=4)
    assert type(made) is rule
    assert made.capacity() == made.capacity(weight_version=7) == 12


CONFIG = {"name": "in_order", "max_staleness": 1, "groups_per_version": 4}
STEPS = CONFIG | {"name": "target_step"}


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ("in_order", InvalidTypeError, "config must be a dict"),
        (None, InvalidTypeError, "config must be a dict"),
        ({}, InvalidRequestError, "name is None. Expected one of in_order, windowed"),
        ({"name": "redy_first"}, InvalidRequestError, "Did you mean 'ready_first'"),
        ({"name": ["in_order"]}, InvalidRequestError, r"name is \['in_order'\]"),
        ({"name": "no_such_module:Rule"}, InvalidRequestError, "cannot be imported .*no_such_module"),
        ({"name": f"{__name__}:Missing"}, InvalidRequestError, "cannot be imported .*Missing"),
        ({"name": f"{__name__}:view"}, InvalidRequestError, "found <function view"),
        ({"name": "in_order"}, InvalidRequestError, "missing 2 required .*the arguments of InOrderPolicy"),
        (CONFIG | {"borrow": True}, InvalidRequestError, "'borrow'"),
        (CONFIG | {"max_staleness": "1"}, InvalidRequestError, "max_staleness is '1'"),
        (CONFIG | {"max_staleness": -1}, InvalidRequestError, "max_staleness is -1.* Expected at least 0"),
        (CONFIG | {"groups_per_version": 0}, InvalidRequestError, "groups_per_version is 0.* at least 1"),
        (STEPS | {"replacements": ""}, InvalidRequestError, "replacements is ''"),
        (STEPS | {"replacements": -1}, InvalidRequestError, "replacements is -1"),
        (STEPS | {"replacements": 0.5}, InvalidRequestError, "replacements is 0.5"),
        (STEPS | {"min_groups": 0}, InvalidRequestError, "min_groups is 0"),
        (STEPS | {"min_groups": 5}, InvalidRequestError, "min_groups is 5, groups_per_version is 4"),
        (STEPS | {"borrow": "no"}, InvalidTypeError, "TargetStepPolicy: borrow must be a bool, got 'no'"),
        (
            CONFIG | {"name": "windowed", "sample_freshest_first": "no"},
            InvalidTypeError,
            "WindowedPolicy: sample_freshest_first must be a bool",
        ),
    ],
)
def test_a_config_that_makes_no_rule_is_refused(config, error, said):
    with pytest.raises(error, match=said):
        StalenessPolicy.from_config(config)


def test_in_order_waits_for_a_prompt_that_a_killed_collector_had_claimed(client, make_buffer, fill):
    buffer = make_buffer()
    prompt = client.claim_meta("replay-prompts", "rollout", [], 1, lease_s=60.0, tag_filter={"order": (">=", 0)})
    fill(buffer, 2)
    with pytest.raises(ReplayTimeoutError):
        buffer.select(2, timeout_s=0)
    client.nack(prompt)  # as the end of its lease
    fill(buffer)
    assert prompts_of(buffer.select(3)) == [0, 1, 2]
