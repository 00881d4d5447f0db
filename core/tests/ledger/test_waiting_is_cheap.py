"""What a question costs that is asked again and again: counted in looks at rows, not in time."""

import time

import pytest
from ledgers import claim, ledger, put, register

from dataplane_core.ledger import LedgerService, commands, rows, service
from dataplane_core.spec import Question, matches, new_id

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


def claimed(made, count, tag_filter=None, now=0.0, **options):
    return made.apply(claim(count, tag_filter=tag_filter, **options), now).sample_ids


@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize("total", [None, 2000], ids=["endless", "all written"])
def test_a_filter_looks_only_at_rows_that_changed(looks, group, total):
    made = filled(2000, group, total)
    size = group or 1
    if total is None:
        assert claimed(made, 8, FRESH) == []
    else:
        claimed(made, 8, FRESH)  # nothing is left for it, and it says so
    assert looks[0] <= 2 * 2000  # what is ready, and what may be one day
    looks[0] = 0
    for _ in range(50):
        claimed(made, 8, dict(FRESH))
    assert looks[0] == 0
    fresh = [f"q{i // size}_g{i % size}" for i in range(8)]
    made.apply(commands.PutTags("p", fresh, [{"version": 8}] * 8), 0.0)
    looks[0] = 0
    assert len(claimed(made, 8, FRESH)) == 8
    assert looks[0] <= 2 * 8
    looks[0] = 0
    claimed(made, 8, FRESH)
    assert looks[0] <= 2 * 8


def test_a_claim_that_waits_for_its_last_rows_leaves_those_that_are_ready_where_they_are(monkeypatch):
    made = filled(500)
    claimed(made, 512)
    touched = []
    for name in ("heappush", "heappop", "heapify", "heapreplace"):
        monkeypatch.setattr(rows.heapq, name, lambda *_, name=name: touched.append(name))
    for _ in range(20):
        assert claimed(made, 512) == []
    assert touched == []


def test_filters_that_nobody_asks_with_are_forgotten():
    made = filled(100)
    view = made._partitions["p"].tasks["t"].views
    for step in range(3000):
        claimed(made, 8, {"version": ("<", step)}, now=step / 1000, all_or_nothing=False, lease_s=1e-9)
    (kept,) = (each.filters for each in view.values() if each.required)
    assert sum(len(each.ready.claimables) for each in kept.values()) <= 4 * 100 + rows._VIEW_SLACK + 100
    claimed(made, 8, FRESH, now=1000.0)
    assert len(kept) == 1


def test_leases_cost_one_entry_each_however_often_they_are_renewed():
    made = filled(1000)
    partition = made._partitions["p"]
    for turn in range(20):
        token = f"k{turn}"
        ids = claimed(made, 1000, lease_s=60.0, token=token, now=turn)
        assert len(ids) == 1000
        for again in range(30):
            made.apply(commands.RenewRequest("p", "t", ids, [token] * 1000, 60.0), turn + again / 100)
        assert len(partition.leases.heap) <= 2 * 1000 + rows._SLACK
        made.apply(commands.NackRequest("p", "t", ids, [token] * 1000), turn + 0.5)
        assert len(partition.leases.heap) <= rows._SLACK
    ids = claimed(made, 1000, lease_s=60.0, token="k", now=30.0)
    made.apply(commands.AckRequest("p", "t", ids, ["k"] * 1000), 30.0)
    made.apply(commands.ClearRequest("p", ids), 0.0)
    assert len(partition.leases.heap) <= rows._SLACK


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
