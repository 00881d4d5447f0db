"""Claims that take more than one script, since each looks at so many rows only."""

import threading

import pytest
import torch
from tensordict import TensorDict

from dataplane_core.errors import ClaimTimeoutError
from dataplane_redis import _backend

_COUNT = 3000
_FRESH = {"v": 1}


@pytest.fixture
def client(plain, connect, monkeypatch):
    """Scripts that look at few rows."""
    monkeypatch.setattr(_backend, "_SCAN_ROWS", 200)
    return connect(url=plain.url)


def put(client, ids, field="x", tags=None):
    columns = TensorDict({field: torch.ones(len(ids))}, batch_size=[len(ids)])
    client.put_samples(ids, "p", columns, None if tags is None else [tags] * len(ids))


def scripts_run(server):
    """How many the server was asked for."""
    return server.admin("INFO", "commandstats")["cmdstat_evalsha"]["calls"]


def between_scripts(client, monkeypatch, act):
    """Calls `act` once, after the first script of a claim."""
    script, asked = client._backend._link.script, []

    def counted(*words):
        reply = script(*words)
        asked.append(reply)
        if len(asked) == 1:
            act()
        return reply

    monkeypatch.setattr(client._backend._link, "script", counted)
    return asked


def test_a_filter_that_passes_over_many_ready_rows_takes_several_scripts(plain, client):
    client.register_partition("p", ["x"], None, ["train"])
    ids = [f"s{number}" for number in range(_COUNT)]
    put(client, ids, tags={"v": 0})
    assert client.claim_meta("p", "train", ["x"], 4, blocking=False, tag_filter=_FRESH).size == 0  # all are ready now
    fresh = [ids[7], ids[8], ids[1500], ids[2999]]
    client.put_samples(fresh, "p", tags=[_FRESH] * 4)
    before = scripts_run(plain)
    found = client.claim_meta("p", "train", ["x"], 4, blocking=False, tag_filter=_FRESH)
    assert found.sample_ids == fresh
    assert scripts_run(plain) - before > 5
    before = scripts_run(plain)
    assert client.claim_meta("p", "train", ["x"], 4, blocking=False).sample_ids == [*ids[:4]]
    assert scripts_run(plain) - before == 1  # what is given is not looked at in vain


@pytest.mark.parametrize("group_size", [None, 2], ids=["rows", "groups"])
def test_the_end_is_found_by_several_scripts(plain, client, group_size):
    client.register_partition("p", ["x", "y"], _COUNT, ["train"], grpo_group_size=group_size)
    ids = [f"q{number // 2}_g{number % 2}" for number in range(_COUNT)]
    put(client, ids, "y", {"v": 0})
    put(client, [*ids[:10], *ids[12:-2]])
    client.put_samples(ids[-4:], "p", tags=[_FRESH] * 4)
    before = scripts_run(plain)
    with pytest.raises(ClaimTimeoutError, match=f"2 of 4 samples were ready.*'{ids[-2]}' lacks 'x'"):
        client.claim_meta("p", "train", ["x"], 4, timeout_s=0.0, tag_filter=_FRESH)  # two of them lack a field
    assert scripts_run(plain) - before > 5
    put(client, ids[-2:])
    claim = {"timeout_s": 10.0, "tag_filter": _FRESH}
    assert client.claim_meta("p", "train", ["x"], 4, **claim).sample_ids == ids[-4:]
    assert client.claim_meta("p", "train", ["x"], 4, **claim).size == 0  # two lack the field still, but do not match


def test_a_row_given_back_behind_a_claim_is_not_lost_at_the_end(client, plain, connect, monkeypatch):
    other = connect(bootstrap=False, url=plain.url, namespace=client.config.options["namespace"])
    client.register_partition("p", ["x"], _COUNT, ["train"])
    ids = [f"s{number}" for number in range(_COUNT)]
    put(client, ids, tags={"v": 0})
    client.put_samples(ids[:1], "p", tags=[_FRESH])
    held = other.claim_meta("p", "train", ["x"], 1, lease_s=60)
    asked = between_scripts(client, monkeypatch, lambda: other.nack(held))
    found = client.claim_meta("p", "train", ["x"], 4, timeout_s=10.0, tag_filter=_FRESH)
    assert asked[0][0] == b"again"
    assert found.sample_ids == held.sample_ids == ["s0"]


def test_rows_that_change_between_two_scripts_are_not_given_as_they_were(client, plain, connect, monkeypatch):
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

    asked = between_scripts(client, monkeypatch, change)
    found = client.claim_meta("p", "train", ["x"], 5, blocking=False, tag_filter=_FRESH)
    assert asked[0][0] == b"again"
    assert found.sample_ids == [ids[-1], "s2"]


def test_claimers_with_a_filter_get_each_row_once(client):
    client.register_partition("p", ["x"], _COUNT, ["train"])
    ids = [f"s{number}" for number in range(_COUNT)]
    put(client, ids, tags={"v": 0})
    fresh = ids[::50]
    client.put_samples(fresh, "p", tags=[_FRESH] * len(fresh))
    given = []

    def consume():
        while meta := client.claim_meta("p", "train", ["x"], 7, timeout_s=20.0, tag_filter=_FRESH).sample_ids:
            given.extend(meta)

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(given) == sorted(fresh)
