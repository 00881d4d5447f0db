"""What a ledger's saved state holds beside what `test_histories` compares: garbage, ages, names."""

import pytest
from histories import saved_and_loaded

from dataplane_core.errors import LeaseExpiredError
from dataplane_core.ledger import Ledger, commands
from dataplane_core.spec import FieldSpec

INT = FieldSpec("tensor", "int64", 1)
LARGE = 1 << 127


@pytest.fixture
def made():
    made = Ledger()
    made.apply(commands.RegisterRequest("p", ["x"], 8, ["t"], None, {"word": ["a", "b"]}, "epoch"), 0.0)
    return made


def begin(made, ids, write_id, now=0.0, tags=None):
    return made.apply(
        commands.BeginPut(
            "p", ids, {"x": INT}, [commands.Write(["x"], [8] * len(ids))], tags, None, write_id=write_id, ttl_s=10.0
        ),
        now,
    )


def test_a_lease_from_before_the_restart_is_older_than_one_from_after_it(made):
    begin(made, ["a", "b"], LARGE)
    made.apply(commands.CommitPut(LARGE), 0.0)

    def claim(ledger, token, lease_s, now):
        options = {"all_or_nothing": False, "lease_s": lease_s, "holder": token, "token": token}
        return ledger.apply(commands.ClaimRequest("p", "t", ["x"], 1, **options), now)

    claim(made, "old", 900.0, 0.0)
    loaded = saved_and_loaded(made, now=1.0, then=1.0)
    claim(loaded, "new", 5.0, 2.0)
    for ledger in (made, loaded):
        assert ledger.apply(commands.InspectRequest("p"), 3.0).tasks["t"].oldest_lease.holder == "old"


def test_garbage_stays_until_it_is_collected(made):
    begin(made, ["a", "b"], LARGE)
    made.apply(commands.CommitPut(LARGE), 0.0)
    made.apply(commands.ClearRequest("p", ["b"]), 0.0)
    loaded = saved_and_loaded(made)
    assert loaded.garbage(0.0) == [(LARGE, 1)]
    loaded.apply(commands.Collected([(LARGE, 1)]), 0.0)
    assert saved_and_loaded(loaded).garbage(0.0) == []


def test_what_an_abandoned_put_left_is_found_by_its_id_after_loading():
    ledger = Ledger()
    ledger.apply(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "e1"), 0.0)
    spec = {"x": FieldSpec("tensor", "int64", 1)}
    write = commands.Write(["x"], [8], [0, 0])
    put = commands.BeginPut("p", ["a", "b"], spec, [write], write_id=100, ttl_s=1.0)
    ledger.apply(put, 0.0)
    ledger.apply(commands.Expire([], [100]), 2.0)
    for each in (ledger, saved_and_loaded(ledger, 2.0)):
        assert each.apply(commands.AbortPut(100), 3.0) == [(100, 0)]


def test_a_ledger_that_is_not_self_expiring_keeps_what_is_due_until_it_is_told():
    made = Ledger(self_expiring=False, capacity_bytes=16)
    made.apply(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "epoch"), 0.0)
    begin(made, ["a", "b"], LARGE)
    made.apply(commands.CommitPut(LARGE), 0.0)

    def claim(token, now):
        options = {"all_or_nothing": False, "lease_s": 5.0, "tag_filter": None, "explain": False}
        return made.apply(commands.ClaimRequest("p", "t", ["x"], 2, **options, token=token), now).sample_ids

    assert claim("one", 0.0) == ["a", "b"]
    made.apply(commands.RenewRequest("p", "t", ["b"], ["one"], 50.0), 1.0)
    assert made.apply(commands.Due(), 4.9) is None
    assert claim("two", 6.0) == []
    due = made.apply(commands.Due(), 6.0)
    assert due.leases == [("p", "t", "one", ["a"])]
    made.apply(due, 6.0)
    assert made.apply(commands.Due(), 6.0) is None
    with pytest.raises(LeaseExpiredError):
        made.apply(commands.AckRequest("p", "t", ["a"], ["one"]), 6.0)
    assert claim("two", 6.0) == ["a"]
    made.apply(commands.Expire(due.leases, []), 0.0)  # told twice: another holds it now
    made.apply(commands.AckRequest("p", "t", ["a"], ["two"]), 6.0)
    made.apply(commands.AckRequest("p", "t", ["b"], ["one"]), 6.0)
    made.apply(commands.Expire([("gone", "t", "one", ["a"]), ("p", "gone", "one", ["a"])], [LARGE + 9]), 0.0)
    assert made.apply(commands.ConsumptionRequest("p", ["t"]), 0.0)
