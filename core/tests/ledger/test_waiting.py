"""What waits and asks again: whom LedgerService wakes, in which order, and what a question costs."""

import time

import pytest
from ledgers import begin, claim, ledger, put, register

from dataplane_core.errors import CapacityExceededError
from dataplane_core.ledger import LedgerService, commands, service
from dataplane_core.ledger.queues import LONGEST_PAUSE_S
from dataplane_core.spec import Question, matches, new_id


class Waiting:
    """A service, and who was woken."""

    def __init__(self, capacity_bytes=None, num_samples=None):
        self.now = 0.0
        self.service = LedgerService(capacity_bytes, clock=lambda: self.now)
        self.woken = []
        self.gone = set()
        self.service.call(register(num_samples))

    def wake(self, name):
        def call():
            self.woken.append(name)
            return name not in self.gone

        return call

    def claim(self, name, count=1, fields=("x",), **options):
        return self.service.call(claim(count, fields, token=name, **options), self.wake(name))

    def put(self, *names, fields=("x",)):
        self.service.call(commands.CommitPut(self.service.call(begin(names, fields))))


def test_claims_are_woken_in_the_order_in_which_they_came_as_far_as_the_samples_go():
    made = Waiting()
    for name in "abc":
        made.claim(name, 2)
    made.put("1")
    assert made.woken == []
    made.put("2", "3", "4")
    assert made.woken == ["a", "b"]
    made.put("5")  # the two were woken already, and have not asked since
    assert made.woken == ["a", "b"]
    assert list(made.claim("a", 2).sample_ids) == ["1", "2"]
    assert list(made.claim("b", 2).sample_ids) == ["3", "4"]
    made.put("6")
    assert made.woken == ["a", "b", "c"]


def test_one_who_is_gone_or_stops_waiting_makes_room_for_the_next():
    made = Waiting()
    for name in "abc":
        made.claim(name)
    made.gone.add("a")
    made.put("1")
    assert made.woken == ["a", "b"]
    made.service.stop_waiting("b")
    assert made.woken == ["a", "b", "c"]
    made.service.stop_waiting("never waited")
    assert list(made.claim("c").sample_ids) == ["1"]
    assert not len(made.service._waiting.by_token)


def test_one_who_was_woken_and_does_not_ask_again_keeps_nobody_waiting():
    made = Waiting()
    for name in "ab":
        made.claim(name, 2)
    made.put("1", "2")
    made.now = 0.5
    made.put("3")
    assert made.woken == ["a"]
    made.now = 2.0
    made.put("4", fields=("y",))
    assert made.woken == ["a", "b"]
    assert list(made.claim("b", 2).sample_ids) == ["1", "2"]
    assert made.claim("a", 2).ask_again_s  # it waits again
    made.put("5")
    assert made.woken == ["a", "b", "a"]


def test_questions_are_apart_and_a_put_looks_at_a_few_of_many(monkeypatch):
    made = Waiting()
    for number in range(200):
        made.claim(f"w{number}", tag_filter={"version": (">=", number)})
    made.claim("other field", fields=("y",))
    looks = []
    num_ready = made.service._num_ready
    monkeypatch.setattr(made.service, "_num_ready", lambda claim: looks.append(claim) or num_ready(claim))
    made.put("1")
    assert (len(looks), made.woken) == (16, [])
    made.put("1", fields=("y",))
    for _ in range(20):  # it looks at all of them in turn
        made.put("1", fields=("z",))
    assert made.woken == ["other field"]


def test_a_claim_that_is_woken_asks_by_itself_only_when_a_lease_may_end():
    made = Waiting()
    assert made.claim("a").ask_again_s == LONGEST_PAUSE_S
    made.put("1")
    assert list(made.claim("a", lease_s=4.0).sample_ids) == ["1"]
    assert made.claim("b").ask_again_s == 4.0
    made.now = 4.0
    assert list(made.claim("b").sample_ids) == ["1"]


def test_of_claims_that_ask_the_same_one_learns_of_a_lease_and_only_if_it_would_ask_too_late():
    made = Waiting()
    for name in "abc":
        made.claim(name, 2)
    made.claim("other", 2, fields=("y",))

    def leased(name, lease_s):
        made.put(name)
        assert list(made.claim(f"holder of {name}", lease_s=lease_s).sample_ids) == [name]

    leased("1", 60.0)
    assert made.woken == []  # whoever waits asks long before that
    made.gone.add("a")
    leased("2", 4.0)
    assert made.woken == ["a", "b", "other"]
    assert made.claim("b", 2).ask_again_s == made.claim("other", 2, fields=("y",)).ask_again_s == 4.0
    leased("3", 6.0)
    assert made.woken == ["a", "b", "other"]
    made.service.stop_waiting("b")
    assert made.woken == ["a", "b", "other", "c"]


def test_claims_that_ended_or_are_not_asked_again_are_forgotten():
    made = Waiting()
    made.claim("never asks again")
    for second in range(0, 60, 5):
        made.now = float(second)
        made.claim("a")
    assert len(made.service._waiting.by_token) == 1
    made.claim("a")
    made.claim("a", explain=True)
    made.claim("b")
    made.claim("b", all_or_nothing=False)
    made.claim("c")
    with pytest.raises(KeyError):
        made.service.call(claim(task="absent", token="c"), made.wake("c"))
    assert not len(made.service._waiting.by_token)
    assert not made.service._waiting._lines


def test_puts_that_wait_for_room_are_woken_when_it_is_there():
    made = Waiting(100)

    def begun(name, size):
        return made.service.call(begin([name], size=size, ticket=name, ttl_s=90.0))

    made.service.call(commands.CommitPut(begun("full", 100)))
    for name in ("a", "b"):
        with pytest.raises(CapacityExceededError):
            begun(name, 50)
        made.service.call(commands.WaitForRoom(name, 50, wait_s=60.0), made.wake(name))
    made.woken.clear()
    assert made.service.call(commands.InspectRequest("p")).full == (100, 100)
    made.service.call(commands.ClearRequest("p", ["full"]))
    assert made.woken == ["a", "b"]
    begun("a", 50)
    assert made.woken == ["a", "b", "b"]  # its turn
    made.service.call(commands.WaitForRoom("b", 50, wait_s=0.0))
    assert made.service.call(commands.InspectRequest("p")).full is None


def test_puts_whose_clients_are_gone_are_forgotten():
    made = Waiting(100)
    for second in range(0, 300, 10):
        made.now = float(second)
        for name in ("a", f"gone {second}"):
            made.service.call(commands.WaitForRoom(name, 200, wait_s=60.0), made.wake(name))
    assert len(made.service.ledger.room.waiting) < 6
    assert "a" in made.service.ledger.room.waiting


# --- what a question costs, counted in looks at rows and not in time --------------------------------------------------

FRESH = {"version": (">=", 7)}


@pytest.fixture
def looks(monkeypatch):
    """How many rows a filter was held against."""
    count = [0]

    def counted(tags, tag_filter):
        count[0] += 1
        return matches(tags, tag_filter)

    monkeypatch.setattr("dataplane_core.spec.tags.matches", counted)  # `group_matches` calls it for each row
    return count


def filled(num_rows, group=None, total=None):
    made, size = ledger(total, group), group or 1
    put(made, [f"q{i // size}_g{i % size}" for i in range(num_rows)], tags=[{"version": 1}] * num_rows)
    return made


def claimed(made, tag_filter):
    return made.apply(claim(8, tag_filter=tag_filter), 0.0).sample_ids


@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize("total", [None, 2000], ids=["endless", "all written"])
def test_a_filter_looks_only_at_rows_that_changed(looks, group, total):
    made = filled(2000, group, total)
    size = group or 1
    if total is None:
        assert claimed(made, FRESH) == []
    else:
        claimed(made, FRESH)  # nothing is left for it, and it says so
    assert looks[0] <= 2 * 2000  # what is ready, and what may be one day
    looks[0] = 0
    for _ in range(50):
        claimed(made, dict(FRESH))
    assert looks[0] == 0
    fresh = [f"q{i // size}_g{i % size}" for i in range(8)]
    made.apply(commands.PutTags("p", fresh, [{"version": 8}] * 8), 0.0)
    looks[0] = 0
    assert len(claimed(made, FRESH)) == 8
    assert looks[0] <= 2 * 8
    looks[0] = 0
    claimed(made, FRESH)
    assert looks[0] <= 2 * 8


# --- what they are told -----------------------------------------------------------------------------------------------


def test_a_timeout_tells_nothing_of_an_earlier_registration_and_nothing_old(monkeypatch):
    service = LedgerService(100)
    service.call(register())

    def shortfall():
        return service.call(claim(4, explain=True)).shortfall

    monkeypatch.setattr(time, "thread_time", iter(range(0, 10_000, 100)).__next__)  # each explanation took 100 s
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    service.call(commands.PutTags("p", ["a"], [{}]))
    assert shortfall().num_lacking == 1
    service.call(commands.PutTags("p", ["b"], [{}]))
    assert shortfall().num_lacking == 1
    now += 2.1
    assert shortfall().num_lacking == 2
    service.call(register(epoch=new_id()))
    assert shortfall().num_lacking == 0


def test_questions_and_claims_that_ask_the_same_share_a_look_at_all_rows(looks, monkeypatch):
    monkeypatch.setattr(service, "_EXPLAINING_SHARE", 1e-12)
    monkeypatch.setattr(service, "_STALE_AFTER_S", 1e9)
    made = LedgerService(ledger=filled(500))

    def ask(explain=True):
        question = Question(task_name="t", required_fields=["x"], tag_filter=dict(FRESH), explain=explain)
        return made.call(commands.InspectRequest("p", [question])).answers[0]

    assert ask(explain=False).shortfall is None
    first = ask()
    assert first.shortfall.num_not_matching == 500
    looks[0] = 0
    assert [ask() for _ in range(20)] == [first] * 20
    assert made.call(claim(tag_filter=FRESH, explain=True)).shortfall == first.shortfall
    assert ask(explain=False).shortfall is None
    assert looks[0] == 0
    monkeypatch.setattr(service, "_MOST_SHORTFALLS", 1)
    made.call(claim(tag_filter={"other": ("==", 1)}, explain=True))
    looks[0] = 0
    assert ask() == first
    assert looks[0] > 0, "no more looks are kept"
