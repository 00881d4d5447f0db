"""Requests with ids: carried out once, kept for their time, also by a ledger that is loaded."""

from histories import saved_and_loaded
from ledgers import ledger

from dataplane_core.ledger import commands
from dataplane_core.ledger.queues import KEPT_S


def test_ids_are_forgotten_when_their_time_is_over():
    made = ledger()
    made.apply(commands.ClearRequest("p", ["a"], request_id="clear"), 0.0)
    for number in range(100):
        left_s = 5.0 if number % 5 else 5000.0
        made.apply(commands.PutTags("p", ["a"], [{}], request_id=f"r{number}", left_s=left_s), 0.0)
    now = 5.0 + KEPT_S - 1
    for each in (made, saved_and_loaded(made)):
        each.apply(commands.PutTags("p", ["a"], [{}], request_id="x", left_s=0.0), now)
        assert {f"r{number}" for number in range(100)} < set(each._done._ends)
        each.apply(commands.PutTags("p", ["a"], [{}], request_id="y", left_s=0.0), now + 2)
        assert not each._done._replies
        assert {name for name in each._done._ends if name[0] == "r"} == {f"r{number}" for number in range(0, 100, 5)}
