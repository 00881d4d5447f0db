"""Requests with ids: carried out once, kept for their time, forgotten alike in every process."""

import pytest
from histories import saved_and_loaded
from ledgers import begin, ledger

from dataplane_core.errors import AlreadyDoneError
from dataplane_core.ledger import StateReader, commands, to_state
from dataplane_core.ledger.done import KEPT_S


def begun(made, request_id, now=0.0):
    return made.apply(begin(["a"], ttl_s=30.0, request_id=request_id), now)


def commit(made, write_id, now=0.0):
    return made.apply(commands.CommitPut(write_id), now)


def test_a_put_is_carried_out_once_until_its_time_is_over():
    made = ledger()
    commit(made, begun(made, "r"))
    for now in (0.0, 30.0 + KEPT_S - 0.1):
        for state in (made, saved_and_loaded(made, now)):
            with pytest.raises(AlreadyDoneError):
                begun(state, "r", now)
    assert made.held_bytes == 8
    late = 2 * (30.0 + KEPT_S)
    commit(made, begun(made, "other", late), late)
    commit(made, begun(made, "r", late), late)


def test_of_two_puts_with_one_id_the_second_commit_is_refused_and_its_room_is_free():
    made = ledger()
    one, two = begun(made, "r"), begun(made, "r")
    commit(made, two)
    with pytest.raises(AlreadyDoneError):
        commit(saved_and_loaded(made), one)
    with pytest.raises(AlreadyDoneError):
        commit(made, one)
    assert made.held_bytes == 8
    assert made.apply(commands.AbortPut(one), 0.0) == [(one, 0)]


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
