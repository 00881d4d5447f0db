"""A key that was evicted or deleted: each operation answers as if it were there, or says that something was lost."""

import time

import pytest
import redis
import torch
from redis_servers import wait_until

from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import LostSamplesError, StalePartitionError
from dataplane_redis import RedisBackend
from dataplane_redis._scripts import pack_strings
from dataplane_testkit import backend_of

GROUP = 70  # so many members take two lists


def columns(ids, **fields):
    return {name: torch.full((len(ids), 3), float(value)) for name, value in fields.items()}


def starts_waiting(client):
    """A claim that the server is to wake, whose client is gone."""
    required, waiter = pack_strings(["x", "y"]), b"c" * 8 + b"token"
    asked = {"name": "rows", "task_name": "train", "batch_size": 9, "required": required, "filter": b"", "budget": 100}
    asked |= {"all_or_nothing": 1, "lease_s": -1.0, "token": "token", "holder": "holder", "most": 100, "number": b""}
    asked |= {"client": b"c" * 8, "waiter": waiter, "stops": 0}
    reply = backend_of(client)._session.run("test", time.monotonic() + 60, "claim", **asked)
    assert (reply[0], reply[-1]) == (b"wait", 1)


def fill(client):
    """Uses every kind of key. Returns a leased claim of each partition."""
    backend_of(client)._payload.look(time.monotonic() + 60)  # all payload is known to this history of the server
    client.register_partition("rows", ["x", "y"], 12, ["train", "other"])
    client.put_samples(list("abcdef"), "rows", columns("abcdef", x=1), tags=[{"v": each} for each in range(6)])
    shared = {"y": torch.ones(1, 9_000).expand(2, -1)}
    client.put_samples(["a", "b"], "rows", shared)
    client.put_samples(["c", "d"], "rows", columns("cd", y=2))
    client.put_samples(["z"], "rows", columns("z", x=1))
    client.clear_samples(["z"], "rows")
    client.claim_meta("rows", "other", ["x"], 1)
    client.claim_meta("rows", "train", ["x"], 1, tag_filter={"v": (">=", 3)}, lease_s=600)
    with pytest.raises(TimeoutError):
        client.claim_meta("rows", "train", ["x"], 3, tag_filter={"v": (">=", 4)}, timeout_s=0)
    leased = client.claim_meta("rows", "train", ["x"], 2, lease_s=600)
    nacked = client.claim_meta("rows", "train", ["x"], 1, lease_s=600)
    client.nack(nacked)  # it is queued now
    members = [f"q_g{each}" for each in range(GROUP)]
    starts_waiting(client)
    client.register_partition("groups", ["x"], None, ["train"], grpo_group_size=GROUP)
    client.put_samples(members, "groups", columns(members, x=1))
    grouped = client.claim_meta("groups", "train", ["x"], GROUP, lease_s=600)
    more = [f"r_g{each}" for each in range(GROUP)]
    client.put_samples(more, "groups", columns(more, x=1))
    client.put_samples(["s_g0"], "groups", columns(["s_g0"], x=1))
    client.put_samples(["zz"], "rows", {"y": torch.ones(1, 9_000)})
    cleared = {"name": "rows", "epoch": b"", "ids": ["zz"], "whole": 0}  # it is to be deleted
    backend_of(client)._session.run("test", time.monotonic() + 60, "clear", **cleared)
    return leased, grouped


def told(description):
    return [
        description.num_samples,
        description.num_cleared,
        description.held_bytes,
        description.oldest_s is None,
        sorted(map(str, description.specs)),
        {
            name: (task.num_ready, task.num_leased, task.num_consumed, task.oldest_lease is None)
            for name, task in description.tasks.items()
        },
    ]


def ids_of(claim):
    return list(claim.sample_ids), list(claim.tags)


OPERATIONS = {
    "list_partitions": lambda client, *_: sorted(client.list_partitions()),
    "list_clients": lambda client, *_: len(client.list_clients()),
    "list": lambda client, *_: ids_of(client.list_samples("rows")),
    "list_filtered": lambda client, *_: ids_of(client.list_samples("rows", {"v": (">", 1)})),
    "list_fields": lambda client, *_: client.list_fields(list("abcdef"), "rows"),
    "get": lambda client, *_: client.get_samples(list("abcdef"), "rows", ["x"])["x"].tolist(),
    "get_large": lambda client, *_: client.get_samples(["a", "b"], "rows", ["y"])["y"].shape,
    "claim": lambda client, *_: ids_of(client.claim_meta("rows", "train", ["x"], 2, timeout_s=0)),
    "claim_new_fields": lambda client, *_: ids_of(client.claim_meta("rows", "other", ["x", "y"], 3, timeout_s=0)),
    "claim_filtered": lambda client, *_: ids_of(
        client.claim_meta("rows", "train", ["x"], 2, tag_filter={"v": (">=", 4)}, timeout_s=0)
    ),
    "claim_group": lambda client, *_: ids_of(client.claim_meta("groups", "train", ["x"], GROUP, timeout_s=0)),
    "ack": lambda client, leased, _: client.ack(leased),
    "ack_group": lambda client, _, grouped: client.ack(grouped),
    "nack": lambda client, leased, _: (
        client.nack(leased),
        ids_of(client.claim_meta("rows", "train", ["x"], 4, timeout_s=0)),
    ),
    "nack_group": lambda client, _, grouped: (
        client.nack(grouped),
        ids_of(client.claim_meta("groups", "train", ["x"], 2 * GROUP, timeout_s=0)),
    ),
    "renew": lambda client, leased, _: client.renew(leased, 600),
    "consumed": lambda client, *_: client.check_consumption_status("rows", ["other"]),
    "list_consumed": lambda client, *_: client.list_consumed("rows", "other"),
    "describe": lambda client, *_: told(client.describe("rows")),
    "describe_groups": lambda client, *_: told(client.describe("groups")),
    "put": lambda client, *_: client.put_samples(["g"], "rows", columns("g", x=3), tags=[{"v": 9}]),
    "put_more": lambda client, *_: client.put_samples(["e", "f"], "rows", columns("ef", y=3), tags=[{"v": 9}] * 2),
    "put_group": lambda client, *_: client.put_samples(["s_g1"], "groups", columns(["s_g1"], x=3)),
    "clear": lambda client, *_: client.clear_samples(["a", "f"], "rows"),
    "clear_group": lambda client, *_: client.clear_samples(["q_g0"], "groups"),
    "clear_all": lambda client, *_: client.clear_samples(None, "rows"),
    "reset": lambda client, *_: client.reset_consumption("rows", "other", ["a", "b"]),
    "register": lambda client, *_: client.register_partition("rows", ["x", "y"], 12, ["train", "other"]),
    "register_task": lambda client, *_: client.register_partition("rows", ["x"], 12, ["new"], if_exists="keep"),
}
#: Runs after each of them: what it did, as later operations see it.
LATER = {
    "list": OPERATIONS["list"],
    "get": lambda client, *_: client.get_samples(["c"], "rows", ["x", "y"])["y"].tolist(),
    "claim": lambda client, *_: ids_of(client.claim_meta("rows", "other", ["x"], 1, timeout_s=0)),
    "describe": OPERATIONS["describe"],
}


def outcome(act, *args):
    """What an operation replied. Or "lost", if it said so and what to do."""
    try:
        return act(*args)
    except (StalePartitionError, LostSamplesError) as error:
        return "lost" if error.hint and not error.retryable else error
    except (KeyError, TimeoutError, RuntimeError, ValueError) as error:
        return type(error).__name__


class Store:
    """A filled store, which can be brought back. It is a cluster of one node, so it has every kind of key."""

    def __init__(self, server):
        self.server = redis.Redis(unix_socket_path=str(server.socket))
        options = {"url": server.url, "namespace": "lost"}
        config = DataPlaneConfig(backend="redis_store", options=options, op_timeout_s=60.0, announce_s=None)
        self.client = connect_backend(RedisBackend, config, bootstrap=True)
        self.leases = fill(self.client)
        keys = [key for key in self.server.keys() if b":why:" not in key]
        self._dumps = {key: (max(0, self.server.pttl(key)), self.server.dump(key)) for key in keys}
        self._epochs = {name: self.server.hget("dp:{lost}:p:" + name, "epoch") for name in ("rows", "groups")}

    def keys(self, operation=""):
        """Those that an operation may need: without the other partition's."""
        other = self._epochs["rows" if "group" in operation else "groups"]
        return [key for key in sorted(self._dumps) if other not in key or not operation]

    def begin(self, key):
        """All is there again, but for a key."""
        with self.server.pipeline(transaction=False) as pipe:
            pipe.flushall()
            for name, dump in self._dumps.items():
                if name != key:
                    pipe.restore(name, *dump)
            pipe.execute()

    def run(self, operation, key):
        """The outcome of an operation, and of what later operations see, without a key."""
        self.begin(key)
        found = [outcome(OPERATIONS[operation], self.client, *self.leases)]
        for act in LATER.values():
            if found[-1] != "lost":  # else what comes later may differ
                found.append(outcome(act, self.client))
        return found


@pytest.fixture(scope="module")
def store(start_servers):
    """One for all operations."""
    server = start_servers(cluster=True)
    server.admin("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    wait_until(server.is_in_cluster)
    made = Store(server)
    yield made
    made.server.close()
    made.client.close()


def test_every_kind_of_key_is_there(store):
    """In common.lua, a key's name follows `base:` at the start of a line, or is a column of its own below `base:e:`."""
    parts = {
        key.decode().split(store._epochs[name].decode() + ":")[-1].split(":")[0]
        for key in store.keys()
        for name in ("rows", "groups")
        if store._epochs[name] in key
    }
    assert parts >= {*"rtoxslunghkqavcf", "li", "uc", "gm", "vw", "fs", "wq", "wk"}
    others = {key.decode().removeprefix("dp:{lost}:").split(":")[0] for key in store.keys()}
    assert others >= {"instance", "parts", "pending", "marks", "p", "w", "gone", "waiters"}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_any_one_key_nothing_is_wrong_in_silence(store, operation):
    whole = store.run(operation, None)
    assert "lost" not in whole
    wrong = {}
    for key in store.keys(operation):
        found = store.run(operation, key)
        for name, expected, got in zip([operation, *LATER], whole, found, strict=False):
            if got not in (expected, "lost"):
                wrong[key, name] = (expected, got)
    assert not wrong, "\n".join(f"{key}: {each}" for key, each in wrong.items())


def test_what_is_left_without_any_one_key_can_be_dropped(store):
    left = {}
    for key in store.keys():
        store.begin(key)
        if outcome(store.client.list_partitions) == "lost":  # another namespace is needed then
            continue
        for name in ("rows", "groups"):
            store.client.clear_samples(None, name)
        backend_of(store.client)._payload.look(time.monotonic() + 60)
        listed = {write.hex().encode() for write in store.server.zrange("dp:{lost}:gone", 0, -1)}  # deleted in a while
        found = [each for each in store.server.keys() if store.server.pttl(each) == -1]
        found = [each for each in found if each.rpartition(b":")[2] not in listed]
        parts = [each for each in found if b":w:" in each or any(epoch in each for epoch in store._epochs.values())]
        held = int(store.server.hget("dp:{lost}:instance", "held") or 0)
        if parts or held:
            left[key] = parts, held
    assert not left, "\n".join(f"{key}: {each}" for key, each in left.items())
