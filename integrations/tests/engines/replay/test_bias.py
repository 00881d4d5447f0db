"""The bias of the policies, in the simulation that `python -m benchmarks staleness` prints."""

from __future__ import annotations

import pytest
from tiers import in_long

from benchmarks.cases import staleness
from dataplane_integrations.replay import InOrderPolicy, ReadyFirstPolicy, WindowedPolicy


@pytest.fixture(scope="module", params=[2, *in_long(1, 4)])
def results(request):
    lengths = staleness.draw_lengths(4000)
    policies = {"in order": InOrderPolicy, "windowed": WindowedPolicy, "ready first": ReadyFirstPolicy}
    return {
        name: staleness.simulate(policy(max_staleness=request.param, groups_per_version=16), lengths, 40, 1.0, False)
        for name, policy in policies.items()
    }


def test_only_ready_first_trains_less_on_long_answers(results):
    for name in ("in order", "windowed"):
        assert results[name].evicted == 0.0
        assert results[name].length_ratio == pytest.approx(1.0, abs=0.02)
        assert results[name].longest_tenth == pytest.approx(0.1, abs=0.02)
    assert results["ready first"].evicted > 0.05
    assert results["ready first"].length_ratio < 0.9
    assert results["ready first"].longest_tenth < 0.05


def test_what_waiting_costs_is_shown_too(results):
    assert results["ready first"].groups_per_time > results["in order"].groups_per_time
    assert results["ready first"].waits < results["in order"].waits
