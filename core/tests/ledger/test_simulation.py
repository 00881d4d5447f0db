"""The ledger and a naive model of it take the same random steps: see `simulation`."""

import pytest
from simulation import Difference, simulate

from dataplane_core.ledger import leases, partition, views


@pytest.mark.parametrize("slack", [0, 2000], ids=["rebuilt all the time", "never rebuilt"])
def test_the_ledger_agrees_with_a_naive_model(monkeypatch, slack):
    """What the ledger keeps beside its rows is rebuilt all the time, or never."""
    monkeypatch.setattr(views, "_SLACK", slack)
    monkeypatch.setattr(leases, "_SLACK", slack)
    monkeypatch.setattr(views, "_MOST_FILTERS", 2 + slack)
    simulate(10_000, seed=slack)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_steps_agree_with_a_naive_model():
    simulate(1_000_000, seed=1)


def test_a_fault_is_found_and_its_schedule_is_short(monkeypatch):
    """The fault: a lease that is given back is lost for its task."""
    monkeypatch.setattr(partition.Partition, "_add_if_ready", lambda *arguments: None)
    with pytest.raises(Difference) as caught:
        simulate(20_000, seed=0)
    assert str(caught.value).count("('") < 40
