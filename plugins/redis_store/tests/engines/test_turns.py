"""Many rows are claimed, settled and cleared by several scripts, so that none holds the server for long."""

import signal

import pytest
from redis_servers import put

from dataplane_core.errors import ClaimTimeoutError, LeaseExpiredError
from dataplane_redis import _backend, _claims, _reads

_COUNT = 1000


@pytest.fixture
def client(plain, connect, monkeypatch):
    """Scripts that give, settle and clear few rows."""
    monkeypatch.setattr(_claims, "_GIVE_ROWS", 100)
    monkeypatch.setattr(_backend, "_CLEAR_ROWS", 100)
    monkeypatch.setattr(_reads, "_LIST_ROWS", 100)
    return connect(url=plain.url)


@pytest.fixture
def other(client, plain, connect):
    return connect(bootstrap=False, url=plain.url, namespace=client.config.options["namespace"])


def fill(client, group_size=None, num_samples=None):
    client.register_partition("p", ["x"], num_samples, ["train"], grpo_group_size=group_size)
    ids = [f"q{number // 4}_g{number % 4}" for number in range(_COUNT)]
    put(client, ids)
    return ids


def test_a_claim_of_many_rows_keeps_others_of_its_task_out(client, other, scripts_of):
    ids = fill(client)
    seen = []

    def meddle():
        with pytest.raises(ClaimTimeoutError, match="100 are leased"):
            other.claim_meta("p", "train", ["x"], 1, timeout_s=0.0)
        seen.append(True)

    scripts_of(client, 1, meddle)
    assert client.claim_meta("p", "train", ["x"], _COUNT, timeout_s=10.0, lease_s=60).sample_ids == ids
    assert seen


def test_a_claim_whose_rows_are_cleared_on_the_way_gives_nothing(client, other, scripts_of):
    ids = fill(client)
    scripts_of(client, 1, lambda: other.clear_samples(ids[-10:], "p"))
    with pytest.raises(ClaimTimeoutError, match=f"{_COUNT - 10} of {_COUNT} samples were ready"):
        client.claim_meta("p", "train", ["x"], _COUNT, timeout_s=0.0)
    assert other.claim_meta("p", "train", ["x"], _COUNT - 10, timeout_s=10.0).sample_ids == ids[:-10]


_DIES = """
import hashlib, os, signal, sys
from dataplane_core import connect
from dataplane_redis import _claims, _scripts
_claims._GIVE_ROWS = 100
claim = _scripts.SCRIPTS["claim"]
text = claim.text.replace(b"local FILL_S = 5", b"local FILL_S = 0.5")
assert text != claim.text
_scripts.SCRIPTS["claim"] = _scripts.Script(text, hashlib.sha1(text).hexdigest().encode(), claim.names)
client = connect({"backend": "redis_store", "options": {"url": sys.argv[1], "namespace": sys.argv[2]}}, bootstrap=False)
script, asked = client._backend._session.link.script, []
def counted(*words, **more):
    reply = script(*words, **more)
    asked.append(reply)
    if len(asked) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return reply
client._backend._session.link.script = counted
client.claim_meta("p", "train", ["x"], 1000, lease_s=3600)
"""


def test_rows_of_a_claim_whose_client_dies_on_the_way_go_back(client, plain, python):
    ids = fill(client)
    died = python.run("-c", _DIES, plain.url, client.config.options["namespace"], check=False)
    assert died.returncode == -signal.SIGKILL
    assert client.claim_meta("p", "train", ["x"], _COUNT, timeout_s=30.0).sample_ids == ids


@pytest.mark.parametrize("at", [2, 5, 9], ids=["before its split", "after its split", "before the commit"])
@pytest.mark.parametrize("action", ["ack", "nack", "renew"])
def test_settling_many_rows_of_which_one_is_lost_changes_none(client, other, scripts_of, action, at):
    fill(client)
    meta = client.claim_meta("p", "train", ["x"], _COUNT, timeout_s=10.0, lease_s=60)
    part = meta.slice(0, 800)
    lost = meta.sample_ids[150]
    replies = scripts_of(client, at, lambda: other.clear_samples([lost], "p"))
    with pytest.raises(LeaseExpiredError) as caught:
        getattr(client, action)(part, *((60,) if action == "renew" else ()))
    assert caught.value.sample_ids == (lost,)
    assert len(replies) > at
    left = meta.drop([150])
    assert left is not None
    assert client.claim_meta("p", "train", ["x"], 1, blocking=False).size == 0  # none went back
    client.ack(left)  # none was settled
    assert client.check_consumption_status("p", ["train"])


@pytest.mark.parametrize("action", ["ack", "nack", "renew"])
def test_rows_are_not_put_beside_those_that_another_settled_meanwhile(client, other, scripts_of, action):
    fill(client)
    meta = client.claim_meta("p", "train", ["x"], _COUNT, timeout_s=10.0, lease_s=60)
    # after the first split of 800 rows another thread settles just the rows that it moved
    replies = scripts_of(client, 2, lambda: other.ack(meta.slice(0, 100)))
    part = meta.slice(0, 800)
    if action == "ack":
        client.ack(part)
    else:
        with pytest.raises(LeaseExpiredError) as caught:
            getattr(client, action)(part, *((60,) if action == "renew" else ()))
        assert caught.value.sample_ids == tuple(meta.sample_ids[:100])
        client.renew(meta.slice(100, 800), 60)  # they are leased still
    assert len(replies) > 10
    client.ack(meta)
    assert client.check_consumption_status("p", ["train"])


@pytest.mark.parametrize("what", ["the partition", "the task"])
def test_a_nack_ends_where_what_it_gives_back_to_goes_on_the_way(client, other, scripts_of, what):
    fill(client)
    meta = client.claim_meta("p", "train", ["x"], _COUNT, timeout_s=10.0, lease_s=60)

    def go():
        if what == "the partition":
            other.clear_samples(None, "p")
        else:
            other.register_partition("p", ["x"], None, ["eval"])

    replies = scripts_of(client, 12, go)
    client.nack(meta)
    assert 12 < len(replies) < 20


def test_a_clear_in_turns_leaves_a_later_registration_alone(client, other, scripts_of):
    ids = fill(client)
    scripts_of(client, 3, lambda: fill(other))
    client.clear_samples(ids, "p")
    assert other.list_samples("p").size == _COUNT


def test_a_list_in_turns_begins_again_where_the_partition_is_registered_anew(client, other, scripts_of):
    fill(client)

    def register_anew():
        other.register_partition("p", ["x"], None, ["train"])
        put(other, ["a", "b"])

    scripts_of(client, 3, register_anew)
    assert client.list_samples("p").sample_ids == ["a", "b"]
