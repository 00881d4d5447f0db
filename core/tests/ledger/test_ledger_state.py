"""What a ledger's saved state holds beside what `test_histories` compares: garbage, ages, names."""

import pytest
from histories import saved_and_loaded
from ledgers import begin, ledger, put
from msgspec.structs import replace

from dataplane_core.ledger import commands

LARGE = 1 << 62


@pytest.fixture
def made():
    """With two samples."""
    made = ledger()
    put(made, ["a", "b"], write_id=LARGE)
    return made


def test_garbage_stays_until_it_is_collected(made):
    made.apply(commands.ClearRequest("p", ["b"]), 0.0)
    loaded = saved_and_loaded(made)
    assert loaded.garbage(0.0) == [(LARGE, 1)]
    loaded.apply(commands.Collected([(LARGE, 1)]), 0.0)
    assert saved_and_loaded(loaded).garbage(0.0) == []


def test_what_an_abandoned_put_left_is_found_by_its_id_after_loading():
    made = ledger()
    write = commands.Write(["x"], [8], [0, 0])
    made.apply(replace(begin(["a", "b"], write_id=100, ttl_s=1.0), writes=[write]), 0.0)
    made.garbage(2.0)
    for each in (made, saved_and_loaded(made)):
        assert each.apply(commands.AbortPut(100), 3.0) == [(100, 0)]
