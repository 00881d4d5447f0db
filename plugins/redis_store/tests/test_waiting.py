"""Claims that wait: what a question costs that has the answer of before, and what wakes them."""

import time

import pytest
from redis_servers import put

from dataplane_core.spec import ClaimRequest
from dataplane_redis import _claims
from dataplane_testkit import backend_of

_COUNT = 3000


@pytest.fixture
def client(plain, connect, monkeypatch):
    """Does not count itself among those that wait, which takes a script now and then."""
    monkeypatch.setattr(_claims, "_COUNT_AFTER_S", 1000.0)
    return connect(url=plain.url)


def request(batch_size, since=None, **more):
    return ClaimRequest(
        partition_id="p",
        task_name="train",
        required_fields=["x"],
        batch_size=batch_size,
        all_or_nothing=True,
        since=since,
        deadline=time.monotonic() + 10,
        **more,
    )


_FILTER = {"v": ("==", 1)}


class Costs:
    """What the server did since: commands by name, and changes of its data."""

    def __init__(self, server):
        self.server = server
        self.before = self.read()

    def read(self):
        stats = self.server.admin("INFO", "commandstats")
        calls = {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
        return calls | {"changes": self.server.admin("INFO", "persistence")["rdb_changes_since_last_save"]}

    def of(self, name):
        return self.read().get(name, 0) - self.before.get(name, 0)


@pytest.mark.parametrize("tag_filter", [None, _FILTER], ids=["all", "filtered"])
@pytest.mark.parametrize("group_size", [None, 2], ids=["rows", "groups"])
def test_a_question_whose_answer_cannot_have_changed_is_one_command(plain, client, tag_filter, group_size):
    client.register_partition("p", ["x"], _COUNT, ["train"], grpo_group_size=group_size)
    put(client, [f"q{number // 2}_g{number % 2}" for number in range(_COUNT - 2)], {"v": 0})
    claim = backend_of(client).claim(request(_COUNT, tag_filter=tag_filter))
    assert claim.sample_ids == ()
    assert claim.version is not None
    costs = Costs(plain)
    for _ in range(20):
        claim = backend_of(client).claim(request(_COUNT, claim.version, tag_filter=tag_filter))
        assert claim.sample_ids == ()
    assert costs.of("evalsha") == 0
    assert costs.of("hmget") == 20
    assert costs.of("changes") == 0  # with every change synced to disk, each would be a sync


def test_a_waiting_filter_looks_only_at_what_changed(plain, client, monkeypatch):
    client.register_partition("p", ["x"], None, ["train"])
    ids = [f"s{number}" for number in range(_COUNT)]
    put(client, ids, {"v": 0})
    claim = backend_of(client).claim(request(4, tag_filter=_FILTER))
    monkeypatch.setattr(_claims, "_LOOK_ROWS", 100)  # more take another script
    for number, change in enumerate(
        [
            lambda: put(client, ["new1", "new2"], {"v": 0}),
            lambda: put(client, ["new3"], {"v": 1}),
            lambda: client.put_samples(ids[7:8], "p", tags=[{"v": 1}]),
            lambda: client.put_samples(ids[8:9], "p", tags=[{"v": 1}]),
            lambda: client.put_samples(ids[8:9], "p", tags=[{"v": 0}]),
            lambda: client.clear_samples(ids[7:8], "p"),
            lambda: client.put_samples(ids[9:11], "p", tags=[{"v": 1}] * 2),
        ]
    ):
        change()
        costs = Costs(plain)
        claim = backend_of(client).claim(request(4, claim.version, tag_filter=_FILTER))
        assert claim.sample_ids == (), number
        assert costs.of("evalsha") == 1, number
    client.put_samples(ids[-1:], "p", tags=[{"v": 1}])
    claim = backend_of(client).claim(request(4, claim.version, tag_filter=_FILTER))
    assert claim.sample_ids == ["s9", "s10", f"s{_COUNT - 1}", "new3"]


def test_the_end_is_asked_for_without_looking_at_all_rows_again(plain, client, monkeypatch):
    client.register_partition("p", ["x", "y"], _COUNT, ["train"])
    ids = [f"s{number}" for number in range(_COUNT)]
    put(client, ids, {"v": 0}, ["y"])
    client.put_samples(ids[-2:], "p", tags=[{"v": 1}] * 2)  # they lack a field
    claim = backend_of(client).claim(request(4, tag_filter=_FILTER))
    monkeypatch.setattr(_claims, "_LOOK_ROWS", 100)
    put(client, ids[:3])
    costs = Costs(plain)
    claim = backend_of(client).claim(request(4, claim.version, tag_filter=_FILTER))
    assert (claim.sample_ids, claim.exhausted) == ((), False)
    assert costs.of("evalsha") == 1
    put(client, ids[-2:-1])
    client.put_samples(ids[-1:], "p", tags=[{"v": 0}])
    claim = backend_of(client).claim(request(4, claim.version, tag_filter=_FILTER))
    assert (claim.sample_ids, claim.exhausted) == (ids[-2:-1], True)


def test_equal_filters_share_what_they_have_seen(plain, client, monkeypatch):
    client.register_partition("p", ["x"], None, ["train"])
    put(client, [f"s{number}" for number in range(_COUNT)], {"v": 0, "w": 1})
    backend_of(client).claim(request(4, tag_filter={"v": ("==", 1), "w": ("==", 1)}))
    monkeypatch.setattr(_claims, "_LOOK_ROWS", 100)
    costs = Costs(plain)
    backend_of(client).claim(request(4, tag_filter={"w": ("==", 1), "v": ("==", 1)}))
    assert costs.of("evalsha") == 1


def test_what_a_filter_has_seen_expires_and_goes_with_the_partition(plain, client):
    client.register_partition("p", ["x"], 4, ["train"])
    put(client, ["a", "b"], {"v": 1})
    put(client, ["c", "d"], {"v": 1}, ["y"])
    backend_of(client).claim(request(4, tag_filter=_FILTER))
    base = backend_of(client)._session.base.decode()
    kept = [key for key in plain.admin("KEYS", f"{base}:e:*") if b":f:" in key or key.endswith(b":c")]
    assert len(kept) == 4
    assert all(0 < plain.admin("PTTL", key) <= 60_000 for key in kept)
    client.clear_samples(None, "p")
    assert plain.admin("KEYS", f"{base}:e:*") == []


def test_clients_that_wait_pace_each_other(client, plain, connect, monkeypatch):
    monkeypatch.setattr(_claims, "_COUNT_AFTER_S", 0.0)
    monkeypatch.setattr(_claims, "_ASKS_PER_S", 10.0)
    client.register_partition("p", ["x"], None, ["train"])
    namespace = client.config.options["namespace"]
    others = [connect(bootstrap=False, url=plain.url, namespace=namespace) for _ in range(4)]
    pauses = [backend_of(each).claim(request(1)).ask_again_s for each in others]
    assert pauses == pytest.approx([0.1, 0.2, 0.3, 0.4])  # each claim and each second, so that all ask ten times


def test_a_pause_that_was_for_a_crowd_ends_with_it(client):
    claims = backend_of(client)
    claims._set_interval(0.25)
    pauses = [claims._pause_s() for _ in range(64)]
    assert max(pauses) < 2.5  # not 64 times a slot
    claims._set_interval(0.004)
    assert claims._pause_s() < 0.1


def test_a_lease_that_is_renewed_to_an_earlier_end_wakes_a_waiting_claim(plain, client):
    client.register_partition("p", ["x"], None, ["train"])
    put(client, ["a"])
    held = client.claim_meta("p", "train", ["x"], 1, lease_s=60.0)
    claim = backend_of(client).claim(request(1))
    for lease_s, scripts in [(90.0, 0), (30.0, 1)]:
        client.renew(held, lease_s)
        costs = Costs(plain)
        claim = backend_of(client).claim(request(1, claim.version))
        assert (claim.sample_ids, costs.of("evalsha")) == ((), scripts)
