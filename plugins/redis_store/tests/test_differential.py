"""Redis' scripts and the ledger take the same random steps, and reply the same: see `differential`."""

import pytest
from differential import Store, run, simulate
from random_history import History
from tiers import in_long

from dataplane_core.ledger import partition


@pytest.fixture(scope="module")
def store(plain):
    """One server for all histories."""
    return Store(f"unix://{plain.socket}?db=0")


#: In the long run, a million steps.
SEEDS = [range(20), *in_long(range(1_000, 6_000))]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.timeout(4 * 3600)
def test_the_scripts_reply_as_the_ledger_does(store, seeds):
    simulate(store, seeds)


def test_a_difference_is_found(store, monkeypatch):
    """A lease that is given back is lost for its task."""
    monkeypatch.setattr(partition.Partition, "_add_if_ready", lambda *arguments: None)
    assert any(run(store, History.drawn(seed)) for seed in range(5))
