"""The ledger and a naive model of it take the same random steps: see `simulation`."""

import pytest
from simulation import Difference, Schedule, run, simulate

from dataplane_core.ledger import partition


def test_the_ledger_agrees_with_a_naive_model():
    simulate(20_000, seed=0)


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


def test_the_same_seed_gives_the_same_schedule():
    assert Schedule.drawn(7, 300) == Schedule.drawn(7, 300)
    assert run(Schedule.drawn(7, 300)) is None
