"""What a question costs that is asked again and again: counted in looks at rows, not in time."""

import time
from functools import partial

import pytest

from dataplane_core.errors import CapacityExceededError
from dataplane_core.ledger import (
    LONGEST_PAUSE_S,
    Ledger,
    LedgerService,
    Pacer,
    commands,
    leases,
    service,
    shortfall,
    views,
)
from dataplane_core.ledger.pacing import ASKS_PER_S
from dataplane_core.spec import FieldSpec, Question, matches, new_id

INT = FieldSpec("tensor", "int64", 1)
FRESH = {"version": (">=", 7)}


@pytest.fixture
def looks(monkeypatch):
    """How many rows a filter was held against."""
    count = [0]

    def counted(tags, tag_filter):
        count[0] += 1
        return matches(tags, tag_filter)

    for module in (views, shortfall):
        monkeypatch.setattr(module, "matches", counted)
    return count


def filled(num_rows, group=None, total=None):
    made = Ledger()
    made.apply(commands.RegisterRequest("p", ["x"], total, ["t"], group, {}, new_id()), 0.0)
    size = group or 1
    put(made, [f"q{i // size}_g{i % size}" for i in range(num_rows)], {"version": 1})
    return made


def put(made, ids, tags, fields=("x",)):
    specs = dict.fromkeys(fields, INT)
    rows = [dict(tags)] * len(ids)
    begin = commands.BeginPut("p", ids, specs, [commands.Write(list(specs), [8] * len(ids))], rows, None, ttl_s=9.0)
    made.apply(commands.CommitPut(made.apply(begin, 0.0)), 0.0)


def claim(made, count, tag_filter=None, now=0.0, **options):
    asked = {"all_or_nothing": True, "lease_s": None, "explain": False, "token": new_id(), **options}
    return made.apply(commands.ClaimRequest("p", "t", ["x"], count, tag_filter=tag_filter, **asked), now).sample_ids


@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize("total", [None, 2000], ids=["endless", "all written"])
def test_a_filter_looks_only_at_rows_that_changed(looks, group, total):
    made = filled(2000, group, total)
    size = group or 1
    if total is None:
        assert claim(made, 8, FRESH) == []
    else:
        claim(made, 8, FRESH)  # nothing is left for it, and it says so
    assert looks[0] <= 2 * 2000  # what is ready, and what may be one day
    looks[0] = 0
    for _ in range(50):
        claim(made, 8, dict(FRESH))
    assert looks[0] == 0
    put(made, [f"q{i // size}_g{i % size}" for i in range(8)], {"version": 8}, fields=())
    looks[0] = 0
    assert len(claim(made, 8, FRESH)) == 8
    assert looks[0] <= 2 * 8
    looks[0] = 0
    claim(made, 8, FRESH)
    assert looks[0] <= 2 * 8


def test_a_claim_that_waits_for_its_last_rows_leaves_those_that_are_ready_where_they_are(monkeypatch):
    made = filled(500)
    claim(made, 512)
    touched = []
    for name in ("heappush", "heappop", "heapify", "heapreplace"):
        monkeypatch.setattr(views.heapq, name, lambda *_, name=name: touched.append(name))
    for _ in range(20):
        assert claim(made, 512) == []
    assert touched == []


def test_filters_that_nobody_asks_with_are_forgotten():
    made = filled(100)
    view = made._partitions["p"].tasks["t"].views
    for step in range(3000):
        claim(made, 8, {"version": ("<", step)}, now=step / 1000, all_or_nothing=False, lease_s=1e-9)
    (kept,) = (each.filters for each in view.values() if each.required)
    assert sum(len(each.ready) for each in kept.values()) <= 4 * 100 + views._SLACK + 100
    claim(made, 8, FRESH, now=1000.0)
    assert len(kept) == 1


def test_leases_cost_one_entry_each_however_often_they_are_renewed():
    made = filled(1000)
    partition = made._partitions["p"]
    for turn in range(20):
        ids = claim(made, 1000, lease_s=60.0, token="k", now=turn)
        assert len(ids) == 1000
        for again in range(30):
            made.apply(commands.RenewRequest("p", "t", ids, ["k"] * 1000, 60.0), turn + again / 100)
        assert len(partition.leases.heap) <= 2 * 1000 + leases._SLACK
        made.apply(commands.NackRequest("p", "t", ids, ["k"] * 1000), turn + 0.5)
        assert len(partition.leases.heap) <= leases._SLACK
    ids = claim(made, 1000, lease_s=60.0, token="k", now=30.0)
    made.apply(commands.AckRequest("p", "t", ids, ["k"] * 1000), 30.0)
    made.apply(commands.ClearRequest("p", ids), 0.0)
    assert len(partition.leases.heap) <= leases._SLACK


def test_a_renewed_lease_ends_when_it_was_renewed_to_sooner_or_later():
    made = filled(2)
    assert claim(made, 2, lease_s=10.0, token="k") == ["q0_g0", "q1_g0"]
    made.apply(commands.RenewRequest("p", "t", ["q0_g0"], ["k"], 2.0), 1.0)
    made.apply(commands.RenewRequest("p", "t", ["q1_g0"], ["k"], 20.0), 1.0)
    assert claim(made, 1, now=2.9) == []
    assert claim(made, 1, now=3.1) == ["q0_g0"]
    assert claim(made, 1, now=20.9) == []
    assert claim(made, 1, now=21.1) == ["q1_g0"]


# --- how often they ask -----------------------------------------------------------------------------------------------


class _Clock:
    now = 0.0

    def __call__(self):
        return self.now


def _asks_in(seconds, pauses, clock):
    """How often waiting askers ask, each of which waits as long as it is told."""
    due = dict.fromkeys(pauses, clock.now)
    end, asks = clock.now + seconds, 0
    while min(due.values()) < end:
        asker = min(due, key=due.__getitem__)
        clock.now = due[asker]
        due[asker] = clock.now + max(0.0005, pauses[asker]())
        asks += 1
    return asks


@pytest.mark.parametrize("count", [2, 30, 500])
def test_many_waiting_claims_ask_no_more_often_together_than_few(count):
    clock = _Clock()
    service = LedgerService(clock=clock)
    service._pacer = Pacer(clock=clock)
    service.call(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, new_id()))

    asks = _asks_in(10.0, {each: partial(ask, service, token=str(each)) for each in range(count)}, clock)
    assert 0.9 * 10.0 * ASKS_PER_S <= asks <= 10.0 * ASKS_PER_S + 50 + count


def ask(service, **options):
    """The pause that a claim in vain is told."""
    options = {"all_or_nothing": True, "lease_s": None, "tag_filter": None, "explain": False, **options}
    return service.call(commands.ClaimRequest("p", "t", ["x"], 4, **options)).ask_again_s


@pytest.fixture
def waited():
    clock = _Clock()
    service = LedgerService(clock=clock)
    service._pacer = Pacer(clock=clock)
    service.call(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, new_id()))
    return service, clock


@pytest.mark.parametrize("options", [{"all_or_nothing": False}, {"explain": True}], ids=["polls", "last questions"])
def test_questions_of_those_who_do_not_wait_slow_nobody_down(waited, options):
    service, _ = waited
    for _ in range(2000):
        assert ask(service, token=new_id(), **options) == 0
    assert ask(service, token="waits") == 0
    assert not service._pacer._waiting.keys() - {"waits"}


def test_who_asks_sooner_than_it_was_told_slows_nobody_down(waited):
    service, _ = waited
    for _ in range(10_000):
        ask(service, token="impatient")
    assert ask(service, token="waits") <= 2 / ASKS_PER_S


def test_a_timeout_tells_nothing_of_an_earlier_registration_and_nothing_old(waited, monkeypatch):
    service, _ = waited

    def shortfall():
        options = {"all_or_nothing": True, "lease_s": None, "tag_filter": None, "explain": True, "token": new_id()}
        return service.call(commands.ClaimRequest("p", "t", ["x"], 4, **options)).shortfall

    monkeypatch.setattr(time, "thread_time", iter(range(0, 10_000, 100)).__next__)  # each explanation took 100 s
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    service.call(commands.PutTags("p", ["a"], [{}], None))
    assert shortfall().num_lacking == 1
    service.call(commands.PutTags("p", ["b"], [{}], None))
    assert shortfall().num_lacking == 1
    now += 2.1
    assert shortfall().num_lacking == 2
    service.call(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, new_id()))
    assert shortfall().num_lacking == 0


def test_no_pause_is_longer_than_the_longest_and_those_who_left_or_died_no_longer_count(waited):
    service, clock = waited
    for each in range(5000):
        assert ask(service, token=str(each)) <= LONGEST_PAUSE_S
    assert ask(service, token="waits") == LONGEST_PAUSE_S
    assert len(service._pacer._waiting) <= 1000
    clock.now += LONGEST_PAUSE_S + 3.1
    assert ask(service, token="waits") == 0
    assert len(service._pacer._waiting) == 1
    for each in range(200):
        ask(service, token=str(each))
        ask(service, token=str(each), explain=True)
    assert len(service._pacer._waiting) == 1


@pytest.mark.parametrize("count", [2, 30, 500])
def test_many_puts_that_wait_for_room_ask_no_more_often_together_than_few(count):
    clock = _Clock()
    service = LedgerService(100, clock=clock)
    service._pacer = Pacer(clock=clock)
    service.call(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, new_id()))

    def begin(name, size, ticket):
        arguments = ("p", [name], {"x": INT}, [commands.Write(["x"], [size])], None, None)
        return service.call(commands.BeginPut(*arguments, write_id=None, ticket=ticket, ttl_s=90.0))

    service.call(commands.CommitPut(begin("full", 100, None)))

    def asker(name):
        def ask():
            with pytest.raises(CapacityExceededError) as caught:
                begin(name, 10, name)
            service.call(commands.WaitForRoom(name, 10, wait_s=60.0))
            return caught.value.ask_again_s

        return ask

    asks = _asks_in(10.0, {name: asker(name) for name in map(str, range(count))}, clock)
    # the first in the queue ask more often, so that no room lies unused for long
    assert asks <= 10.0 * (ASKS_PER_S + 50) + 50 + count
    first = begin_pause(begin, "0")
    assert first == pytest.approx(0.06)


def begin_pause(begin, name):
    with pytest.raises(CapacityExceededError) as caught:
        begin(name, 10, name)
    return caught.value.ask_again_s


def test_a_claim_that_gets_something_is_not_told_to_wait():
    service = LedgerService()
    service.call(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, new_id()))
    service.call(commands.PutTags("p", ["a"], [{}], None))
    options = {"all_or_nothing": True, "lease_s": None, "tag_filter": None, "explain": False}
    for _ in range(200):
        service.call(commands.ClaimRequest("p", "t", ["x"], 4, **options, token=new_id()))
    pause_s = service.call(commands.ClaimRequest("p", "t", ["x"], 4, **options, token=new_id())).ask_again_s
    assert pause_s > 0.1
    write_id = service.call(
        commands.BeginPut("p", ["b"], {"x": INT}, [commands.Write(["x"], [8])], None, None, write_id=None, ttl_s=9.0)
    )
    service.call(commands.CommitPut(write_id))
    assert service.call(commands.ClaimRequest("p", "t", ["x"], 1, **options, token=new_id())).ask_again_s == 0


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
    claim = commands.ClaimRequest(
        "p", "t", ["x"], 1, all_or_nothing=True, lease_s=None, tag_filter=FRESH, explain=True, token="k"
    )
    assert made.call(claim).shortfall == first.shortfall
    assert ask(explain=False).shortfall is None
    assert looks[0] == 0
    made.call(commands.ClearRequest("p", None))
    made.call(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, new_id()))
    assert ask().shortfall.num_not_matching == 0
