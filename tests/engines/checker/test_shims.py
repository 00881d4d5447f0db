"""The shims of examples/checker: calls one after the other keep all of the contract. Under load: `conformance --chaos`.

What histories break which rule is in testkit/tests/test_chaos_rules.py.
"""

import uuid
from pathlib import Path

import pytest

from dataplane_core import connect
from dataplane_redis._backend import private_url
from dataplane_testkit.chaos import History, Settings, judged
from dataplane_testkit.chaos.history import read_calls
from dataplane_testkit.chaos.shim import ShimClient, load_shim
from dataplane_testkit.chaos.worker import BASE, TASKS, Hands, Plan

SHIMS = Path(__file__).parents[3] / "examples" / "checker"
NAME = f"checker-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def redis_url():
    with connect({"backend": "redis_store", "options": {"server": "private", "namespace": NAME}}):
        yield private_url(NAME)


@pytest.mark.parametrize(
    "shim",
    ["redis_hash.py:RedisHash", "dataplane_client.py:Dataplane", "transferqueue_client.py:TransferQueue"],
)
def test_calls_one_after_the_other_keep_the_contract(shim, request, tmp_path):
    if "hash" in shim:
        options = {"url": request.getfixturevalue("redis_url")}
    elif "queue" in shim:
        options = {"ray_address": request.getfixturevalue("ray_address")}
    else:
        options = {"backend": "redis_store", "namespace": f"{NAME}-client"}
    cls = load_shim(f"{SHIMS}/{shim}")
    opened = cls({task: fields for task, (fields, _) in TASKS.items()}, **options)
    settings = Settings(seed=0, schedule_s=0.0, lease_s=60.0, op_timeout_s=60.0)
    plan = Plan(settings=settings, folder=tmp_path, epoch_s=0.0, leases="lease" in cls.promises, tags=False)
    with ShimClient(opened, f"{NAME}-", 120.0) as client:
        one, other = (Hands(client, plan, name, 100 * number) for number, name in enumerate(("one", "other"), 1))
        assert one.write("p0", ("s0", "s1", "s2"), BASE)
        assert other.read("p0", ("s2", "s0"), BASE)
        assert other.write("p0", ("s1",), BASE)
        assert one.read("p0", ("s1",), BASE)
        for hands in (one, other):
            hands.claim("p0", "once", 1)
        assert one.clear("p0", ["s0"])
        assert not other.read("p0", ("s0",), BASE)
        meta = one.claim("p0", "train", 64)
        if plan.leases:
            one.settle("ack", meta)
        for hands in (one, other):
            hands.close()
    calls = [call for name in ("one", "other") for call in read_calls(plan.file_of(name), name)]
    assert {call.operation for call in calls} >= {"put", "get", "claim", "clear"}
    assert judged(History(calls=tuple(calls)), cls.promises) == ([], [])
