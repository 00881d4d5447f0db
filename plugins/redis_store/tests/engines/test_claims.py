"""Claims that take more than one script, since each looks at so many rows only."""

import pytest
from redis_servers import put

from dataplane_redis import _claims
from dataplane_testkit import backend_of

_COUNT = 3000
_FRESH = {"v": 1}


@pytest.fixture
def client(plain, connect, monkeypatch):
    """Scripts that look at few rows."""
    monkeypatch.setattr(_claims, "_LOOK_ROWS", 200)
    return connect(url=plain.url)


def test_a_filter_looks_at_many_rows_in_several_scripts_and_at_each_once(plain, client):
    client.register_partition("p", ["x"], None, ["train"])
    ids = [f"s{number}" for number in range(_COUNT)]
    put(client, ids, tags={"v": 0})
    before = plain.num_calls()
    assert client.claim_meta("p", "train", ["x"], 4, blocking=False, tag_filter=_FRESH).size == 0
    assert plain.num_calls() - before > 5
    fresh = [ids[7], ids[8], ids[1500], ids[2999]]
    client.put_samples(fresh, "p", tags=[_FRESH] * 4)
    before = plain.num_calls()
    found = client.claim_meta("p", "train", ["x"], 4, blocking=False, tag_filter=_FRESH)
    assert found.sample_ids == fresh
    assert client.claim_meta("p", "train", ["x"], 4, blocking=False).sample_ids == [*ids[:4]]
    assert plain.num_calls() - before == 2


def test_a_row_given_back_behind_a_claim_is_not_lost_at_the_end(client, plain, connect, scripts_of):
    other = connect(bootstrap=False, url=plain.url, namespace=client.config.options["namespace"])
    client.register_partition("p", ["x"], _COUNT, ["train"])
    ids = [f"s{number}" for number in range(_COUNT)]
    put(client, ids, tags={"v": 0})
    client.put_samples(ids[:1], "p", tags=[_FRESH])
    held = other.claim_meta("p", "train", ["x"], 1, lease_s=60)
    asked = scripts_of(client, 1, lambda: other.nack(held))
    found = client.claim_meta("p", "train", ["x"], 4, timeout_s=10.0, tag_filter=_FRESH)
    assert asked[0][0] == b"again"
    assert found.sample_ids == held.sample_ids == ["s0"]


def test_rows_that_change_between_two_scripts_are_not_given_as_they_were(client, plain, connect, scripts_of):
    other = connect(bootstrap=False, url=plain.url, namespace=client.config.options["namespace"])
    client.register_partition("p", ["x"], None, ["train"])
    ids = [f"s{number}" for number in range(_COUNT)]
    put(client, ids, tags={"v": 0})
    fresh = [*ids[:4], ids[-1]]
    client.put_samples(fresh, "p", tags=[_FRESH] * 5)

    def change():
        assert other.claim_meta("p", "train", ["x"], 1).sample_ids == ["s0"]  # given to another
        other.clear_samples(["s1"], "p")
        other.clear_samples(["s2"], "p")
        put(other, ["s2"], tags=_FRESH)  # a new sample, behind all others
        other.put_samples(["s3"], "p", tags=[{"v": 0}])

    asked = scripts_of(client, 1, change)
    found = client.claim_meta("p", "train", ["x"], 5, blocking=False, tag_filter=_FRESH)
    assert asked[0][0] == b"again"
    assert found.sample_ids == [ids[-1], "s2"]


@pytest.mark.parametrize("piece", [20_000, 3_000])
def test_a_group_may_be_larger_than_what_lua_unpacks(plain, connect, piece):
    client = connect(url=plain.url)
    size = 20_000
    client.register_partition("p", ["x"], size, ["train"], grpo_group_size=size)
    ids = [f"q_g{number}" for number in range(size)]
    for start in range(0, size, piece):
        assert client.claim_meta("p", "train", ["x"], size, blocking=False).size == 0
        put(client, ids[start : start + piece])
    client.nack(client.claim_meta("p", "train", ["x"], size, lease_s=600))
    held = client.claim_meta("p", "train", ["x"], size, lease_s=600)
    assert held.sample_ids == ids
    client.ack(held)
    assert client.check_consumption_status("p", ["train"])
    client.clear_samples(ids[:1], "p")
    with pytest.raises(ValueError, match=f"would have {size + 1} members"):
        put(client, ["q_g0", "q_gz"])
    put(client, ["q_g0"])
    assert client.claim_meta("p", "train", ["x"], size, blocking=False).size == 0  # broken
    client.clear_samples(ids, "p")
    assert client.list_samples("p").size == 0
    base = backend_of(client)._session.base.decode()
    assert [key for key in plain.admin("KEYS", base + ":*") if key.endswith(b":gm")] == []
