"""The backend for AReaL's tensors. `tests/long/areal` pins what it uses of AReaL; AReaL need not be installed here."""

import asyncio
import json
import math
import subprocess
import threading
from types import SimpleNamespace

import pytest
import torch

from dataplane_compat import areal
from dataplane_compat.areal import MissingShardError, RTensorStore
from dataplane_core.codec import DTYPE_CODES
from dataplane_core.errors import BackendUnavailableError, DataPlaneError

SHAPES = [(), (0,), (1,), (3,), (2, 3), (2, 0, 4)]


def shard(shard_id):
    return SimpleNamespace(shard_id=shard_id, node_addr="host:1")


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def any_tensor(dtype, shape):
    # arange of bytes: also NaN payloads
    flat = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.uint8) * 37
    return (flat % 2 if dtype is torch.bool else flat).view(dtype).view(shape)


@pytest.fixture(scope="module", params=["noop", "shm_store", "redis_store"])
def config(request):
    return {"backend": request.param, "options": {} if request.param == "noop" else {"namespace": "areal"}}


@pytest.fixture(scope="module")
def opened(config):
    store = RTensorStore(config, bootstrap=True)
    yield store
    store.close()


@pytest.fixture
def store(opened):
    """An empty store."""
    yield opened
    opened.client.clear_samples(opened.client.list_samples("areal").sample_ids, "areal")


def held(store):
    description = store.client.describe("areal")
    return description.num_samples, description.held_bytes


def test_every_dtype_and_shape_comes_back_bit_for_bit(store):
    tensors = [any_tensor(dtype, shape) for dtype in DTYPE_CODES for shape in SHAPES]
    shards = [shard(store.store(each)) for each in tensors]
    for there, back in zip(tensors, store.fetch(shards), strict=True):
        assert (back.dtype, back.shape, bits(back)) == (there.dtype, there.shape, bits(there))
    one = store.fetch(shards[7:8])[0]
    assert bits(one) == bits(tensors[7])


def test_views_come_back_as_they_look(store):
    pair = torch.tensor([[1 + 2j, 3 - 4j]])
    views = [pair.conj(), pair.conj().imag, pair.T, pair.expand(3, 2)]
    for back, view in zip(store.fetch([shard(store.store(each)) for each in views]), views, strict=True):
        assert torch.equal(back, view)


def test_views_and_tensors_with_gradients_can_be_stored_and_changed_afterwards(store):
    tensor = torch.arange(12.0).view(3, 4)
    grad = torch.ones(2, requires_grad=True)
    first, second = shard(store.store(tensor.t())), shard(store.store(grad))
    tensor.zero_()
    a, b, again = store.fetch([first, second, first])
    assert a.tolist() == torch.arange(12.0).view(3, 4).t().tolist()
    assert b.tolist() == [1.0, 1.0]
    assert not b.requires_grad
    a.zero_()  # each is the caller's own
    assert again[1, 1] == 5.0
    assert store.fetch([first])[0][1, 1] == 5.0


def test_what_is_no_dense_tensor_is_refused_and_a_shard_that_is_not_there_is_named(store):
    for value in ([1.0], None, torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(TypeError):
            store.store(value)
    kept = store.store(torch.ones(1))
    with pytest.raises(MissingShardError, match="Failed to fetch shard: 'never' of 2 shards") as caught:
        store.fetch([shard(kept), shard("never")])
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, KeyError)
    assert caught.value.missing_samples == ("never",)
    assert store.fetch([]) == []


def test_delete_frees_memory_and_may_be_repeated(store):
    async def delete(ids):
        await asyncio.gather(*(store.delete("elsewhere:1", part) for part in (ids[:3], ids[1:], ids, ids * 2, [])))

    for _ in range(5):
        ids = [store.store(torch.ones(1000)) for _ in range(4)]
        assert held(store)[0] == 4
        asyncio.run(delete(ids))
        assert held(store) == (0, 0)
        with pytest.raises(MissingShardError):
            store.fetch(list(map(shard, ids)))


def test_delete_leaves_the_event_loop_free(store, monkeypatch):
    released, went_on = threading.Event(), []
    clear = store.client.clear_samples

    def slow(*arguments):
        assert released.wait(60)  # set by the event loop, so it must go on
        clear(*arguments)

    monkeypatch.setattr(store.client, "clear_samples", slow)

    async def main():
        task = asyncio.create_task(store.delete("", [kept]))
        await asyncio.sleep(0)
        went_on.append(True)
        released.set()
        await task

    kept = store.store(torch.ones(1))
    asyncio.run(main())
    assert went_on
    assert held(store)[0] == 0


PRODUCES = """
import json, sys, time, torch
from dataplane_compat.areal import RTensorStore

store = RTensorStore(json.loads(sys.argv[1]), bootstrap=False)
print(json.dumps([store.store(torch.full((3,), value, dtype=torch.bfloat16)) for value in (1.0, 2.0)]), flush=True)
time.sleep(600)
"""


def test_tensors_outlive_the_worker_that_stored_them(store, config, python):
    if config["backend"] == "noop":
        with pytest.raises(BackendUnavailableError, match="lives in one process"):
            RTensorStore(config, bootstrap=False)
        return
    with python.start("-c", PRODUCES, json.dumps(config), stdout=subprocess.PIPE, text=True) as worker:
        shards = list(map(shard, json.loads(worker.stdout.readline())))
        worker.kill()
    assert [each.tolist() for each in store.fetch(shards)] == [[1.0] * 3, [2.0] * 3]
    asyncio.run(store.delete("", [each.shard_id for each in shards]))
    assert held(store)[0] == 0


def test_after_close_calls_are_refused_and_the_launcher_needs_a_config(monkeypatch):
    store = RTensorStore({"backend": "noop"}, bootstrap=True)
    store.close()
    store.close()
    with pytest.raises(DataPlaneError):
        store.store(torch.ones(1))
    monkeypatch.delenv("DATAPLANE_CONFIG", raising=False)
    monkeypatch.setattr("sys.argv", ["areal", "-m", "somewhere"])
    with pytest.raises(DataPlaneError, match="DATAPLANE_CONFIG"):
        areal.main()
    monkeypatch.setattr("sys.argv", ["areal"])
    with pytest.raises(SystemExit, match="usage"):
        areal.main()
