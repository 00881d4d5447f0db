"""Requests with ids: carried out once, kept for their time, forgotten alike in every process."""

import tracemalloc

import pytest
from histories import saved_and_loaded

from dataplane_core.errors import AlreadyDoneError, LeaseExpiredError, StalePartitionError
from dataplane_core.ledger import Ledger, StateReader, commands, to_state
from dataplane_core.ledger.done import KEPT_S, DoneRequests
from dataplane_core.spec import FieldSpec, new_id

INT = FieldSpec("tensor", "int64", 1)


def ledger(**options):
    made = Ledger(**options)
    made.apply(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "e"), 0.0)
    return made


def begin(made, request_id, now=0.0, ids=("a",), ttl_s=30.0):
    put = commands.BeginPut(
        "p", list(ids), {"x": INT}, [commands.Write(["x"], [8] * len(ids))], ttl_s=ttl_s, request_id=request_id
    )
    return made.apply(put, now)


def commit(made, write_id, now=0.0):
    return made.apply(commands.CommitPut(write_id), now)


def test_a_put_is_carried_out_once_until_its_time_is_over():
    made = ledger()
    commit(made, begin(made, "r"))
    for now in (0.0, 30.0 + KEPT_S - 0.1):
        for state in (made, saved_and_loaded(made, now)):
            with pytest.raises(AlreadyDoneError):
                begin(state, "r", now)
    assert made.held_bytes == 8
    late = 2 * (30.0 + KEPT_S)
    commit(made, begin(made, "other", late), late)
    commit(made, begin(made, "r", late), late)


def test_of_two_puts_with_one_id_the_second_commit_is_refused_and_its_room_is_free():
    made = ledger()
    one, two = begin(made, "r"), begin(made, "r")
    commit(made, two)
    with pytest.raises(AlreadyDoneError):
        commit(saved_and_loaded(made), one)
    with pytest.raises(AlreadyDoneError):
        commit(made, one)
    assert made.held_bytes == 8
    assert made.apply(commands.AbortPut(one), 0.0) == [(one, 0)]


def test_a_put_that_was_refused_at_its_commit_is_not_done():
    made = ledger()
    write_id = begin(made, "r")
    made.apply(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "f"), 0.0)
    with pytest.raises(StalePartitionError):
        commit(made, write_id)
    commit(made, begin(made, "r"))


@pytest.mark.parametrize("kind", [commands.AckRequest, commands.NackRequest, commands.RenewRequest])
def test_settling_again_leaves_the_next_holder_alone(kind):
    made = ledger()
    commit(made, begin(made, None))
    claim = {"all_or_nothing": False, "lease_s": 10.0}
    made.apply(commands.ClaimRequest("p", "t", ["x"], 1, token="one", **claim), 0.0)
    extra = (10.0,) if kind is commands.RenewRequest else ()
    settle = kind("p", "t", ["a"], ["one"], *extra, request_id="r", left_s=30.0)
    made.apply(settle, 1.0)
    made.apply(commands.ClearRequest("p", None), 2.0)
    made.apply(settle, 2.0)  # there is no partition
    made.apply(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "f"), 3.0)
    commit(made, begin(made, None, 3.0), 3.0)
    made.apply(commands.ClaimRequest("p", "t", ["x"], 1, token="two", **claim), 3.0)
    for state in (made, saved_and_loaded(made, 3.0)):
        before = list(to_state(state, 4.0))
        state.apply(settle, 4.0)
        assert list(to_state(state, 4.0)) == before
    with pytest.raises(LeaseExpiredError):
        made.apply(kind("p", "t", ["a"], ["one"], *extra, request_id="s"), 4.0)


def test_what_is_forgotten_depends_on_records_and_not_on_clocks():
    """Three processes replay one journal at different times; one of them was begun with a snapshot."""
    asks, late = ledger(self_expiring=False), ledger(self_expiring=False)

    def both(command, now):
        for each, at in ((asks, now), (late, now + 500.0)):
            each.apply(command, at)

    for number in range(2500):
        now = number / 100  # 25 s in all
        both(commands.PutTags("p", ["a"], [{}], request_id=f"r{number}", left_s=5.0 if number % 5 else 5000.0), now)
    assert asks.apply(commands.Due(), 5.0 + KEPT_S - 1) is None
    third = StateReader(self_expiring=False)
    for section in to_state(asks, 30.0):
        third.take(section, 900.0)
    due = asks.apply(commands.Due(), 30.0 + KEPT_S)
    assert due is not None
    assert due.done == [f"r{number}" for number in range(2500) if number % 5]  # those with the long deadline are kept
    both(due, 100.0)
    third.ledger.apply(due, 1000.0)
    kept = [set(each._done._ends) for each in (asks, late, third.ledger)]
    assert kept[0] == kept[1] == kept[2]
    assert kept[0] == {f"r{number}" for number in range(0, 2500, 5)}


def test_memory_depends_on_the_rate_of_requests_and_not_on_their_number():
    done = DoneRequests()
    tracemalloc.start()
    held = []
    for number in range(60_000):  # ten a second, kept for 90 seconds
        now = number / 10
        done.add(new_id(), 30.0, now)
        done.forget(done.due(now))
        if number % 20_000 == 19_999:
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert len(done) <= 10 * (30 + KEPT_S + 20)
    assert held[-1] <= 1.1 * held[0]


def test_forged_sections_are_refused():
    def take(reader, *ids):
        reader.take({"part": "done", "request_ids": ids, "left_s": [1.0] * len(ids)}, 0.0)

    with pytest.raises(ValueError, match="request"):
        take(StateReader(), "a", "a")
    reader = StateReader()
    take(reader, "a")
    with pytest.raises(ValueError, match="request"):
        take(reader, "a")
