"""Requests with ids: carried out once, kept for their time, forgotten alike in every process."""

from ledgers import ledger

from dataplane_core.ledger import Ledger, StateReader, commands, to_state
from dataplane_core.ledger.done import KEPT_S


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
    shorter = [f"r{number}" for number in range(2500) if number % 5]  # those with the long deadline are kept
    assert due.done == ["p e", *shorter]
    both(due, 100.0)
    third.ledger.apply(due, 1000.0)
    kept = [set(each._done._ends) for each in (asks, late, third.ledger)]
    assert kept[0] == kept[1] == kept[2]
    assert kept[0] == {f"r{number}" for number in range(0, 2500, 5)}


def test_an_expiry_of_what_is_gone_changes_nothing():
    made = Ledger(self_expiring=False)
    made.apply(commands.RegisterRequest("p", ["x"], None, ["t"]), 0.0)
    made.apply(commands.Expire([("gone", "t", "one", ["a"]), ("p", "gone", "one", ["a"])], []), 0.0)
    assert made.apply(commands.Due(), 0.0) is None
