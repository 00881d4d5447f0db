"""What a ledger's saved state holds beside what `test_ledger_properties` sees: unfinished puts, garbage, names."""

import msgpack
import pytest

from dataplane_core.errors import LeaseExpiredError, StalePartitionError
from dataplane_core.ledger import Ledger, StateReader, to_state
from dataplane_core.spec import FieldSpec

INT = FieldSpec("tensor", "int64", 1)
LARGE = 1 << 127


@pytest.fixture
def made():
    made = Ledger()
    made.register("p", ["x"], 8, ["t"], None, {"word": ["a", "b"]}, "epoch")
    return made


def begin(made, ids, write_id, now=0.0, tags=None):
    return made.begin_put("p", ids, {"x": INT}, [8] * len(ids), tags, None, write_id=write_id, now=now, ttl_s=10.0)


def saved_and_loaded(made, now=0.0, then=0.0):
    reader = StateReader()
    for section in [msgpack.packb(each) for each in to_state(made, now)]:
        reader.take(msgpack.unpackb(section), then)
    return reader.ledger


def test_an_unfinished_put_commits_after_loading(made):
    begin(made, ["a", "b"], LARGE, tags=[{"n": 1}, {"n": None}])
    loaded = saved_and_loaded(made)
    assert loaded.held_bytes == 16
    loaded.commit_put(LARGE)
    listed = loaded.list_samples("p", None)
    assert (listed.sample_ids, listed.tags) == (["a", "b"], [{"n": 1}, {"n": None}])
    assert loaded.locate("p", ["b"], ["x"]).parts[0].write_id == LARGE
    assert loaded.describe("p") == made.describe("p")


def test_an_unfinished_put_of_a_row_that_was_cleared_is_refused_after_loading_too(made):
    for again in (False, True):
        begin(made, ["a"], LARGE)
        made.commit_put(LARGE)
        begin(made, ["a"], LARGE + 1)
        made.clear("p", ["a"])
        if again:
            begin(made, ["a"], LARGE + 2)
            made.commit_put(LARGE + 2)
        with pytest.raises(StalePartitionError, match="sample 'a' was cleared"):
            saved_and_loaded(made).commit_put(LARGE + 1)
        made.abort_put(LARGE + 1)


def test_an_unfinished_put_has_as_long_as_before(made):
    begin(made, ["a"], LARGE, now=0.0)
    loaded = saved_and_loaded(made, now=4.0, then=1000.0)
    assert not loaded.due(1005.9).writes
    assert loaded.due(1006.1).writes == [LARGE]


def test_garbage_stays_until_it_is_collected(made):
    begin(made, ["a", "b"], LARGE)
    made.commit_put(LARGE)
    made.clear("p", ["b"])
    loaded = saved_and_loaded(made)
    assert loaded.garbage(0.0) == [(LARGE, 1)]
    loaded.collected([(LARGE, 1)])
    assert saved_and_loaded(loaded).garbage(0.0) == []


def test_a_ledger_that_is_not_self_expiring_keeps_what_is_due_until_it_is_told():
    made = Ledger(self_expiring=False, capacity_bytes=16)
    made.register("p", ["x"], None, ["t"], None, {}, "epoch")
    begin(made, ["a", "b"], LARGE)
    made.commit_put(LARGE)

    def claim(token, now):
        options = {"all_or_nothing": False, "lease_s": 5.0, "tag_filter": None, "explain": False}
        return made.claim("p", "t", ["x"], 2, **options, token=token, now=now).sample_ids

    assert claim("one", 0.0) == ["a", "b"]
    made.renew("p", "t", ["b"], ["one"], 50.0, now=1.0)
    assert not made.due(4.9)
    assert claim("two", 6.0) == []
    due = made.due(6.0)
    assert due.leases == [("p", "t", "one", ["a"])]
    made.expire(due.leases, due.writes)
    assert not made.due(6.0)
    with pytest.raises(LeaseExpiredError):
        made.ack("p", "t", ["a"], ["one"], now=6.0)
    assert claim("two", 6.0) == ["a"]
    made.expire(due.leases, [])  # told twice: another holds it now
    made.ack("p", "t", ["a"], ["two"], now=6.0)
    made.ack("p", "t", ["b"], ["one"], now=6.0)
    made.expire([("gone", "t", "one", ["a"]), ("p", "gone", "one", ["a"])], [LARGE + 9])
    assert made.consumed("p", ["t"])
