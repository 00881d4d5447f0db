"""AReaL itself with `dataplane_compat.areal`: every name of it that we use, and its tensors over our backend."""

import asyncio
import inspect

import pytest
import torch
from areal.infra.rpc import rtensor
from areal.infra.rpc.rtensor import RTensor, RTensorBackend, TensorShardInfo

from dataplane_compat.areal import RTensorStore, activate


def arguments(function):
    return list(inspect.signature(function).parameters)


def test_the_interface_is_the_one_that_we_implement():
    names = [name for name in vars(RTensorBackend) if not name.startswith("_")]
    assert sorted(names) == ["delete", "fetch", "store"]
    for name in names:
        assert arguments(getattr(RTensorStore, name)) == arguments(getattr(RTensorBackend, name))
    assert inspect.iscoroutinefunction(RTensorBackend.delete)
    assert arguments(TensorShardInfo) == ["shard_id", "node_addr"]
    assert arguments(rtensor.set_backend) == ["backend"]


@pytest.mark.parametrize("backend", ["shm_store", "redis_store"])
def test_nested_results_go_through_the_store(backend):
    store = activate({"backend": backend, "options": {"namespace": "areal-names"}}, bootstrap=True)
    try:
        assert rtensor.get_backend() is store
        given = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "rest": [torch.tensor(True), (torch.empty(0, 4), "text")]}
        sent = RTensor.remotize(given, node_addr="host:1")
        rtensor.clear_fetch_buffer()
        back = RTensor.localize(sent)
        assert torch.equal(back["a"], given["a"])
        assert back["a"].dtype == torch.bfloat16
        assert back["rest"][0].item() is True
        assert back["rest"][1][0].shape == (0, 4)
        assert back["rest"][1][1] == "text"
        for node, ids in RTensor.collect_shards(sent).items():
            asyncio.run(RTensor.clear_node(node, ids))
        assert store.client.list_sample_ids("areal") == []
    finally:
        rtensor.set_backend(None)
        store.close()
