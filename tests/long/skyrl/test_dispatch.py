"""SkyRL itself with `dataplane_compat.skyrl`: every name of it that we use, and its batches through the store."""

import gc
import importlib
import inspect
import time

import pytest
import ray
import torch
from skyrl.backends.skyrl_train.distributed import dispatch as theirs
from skyrl.backends.skyrl_train.training_batch import TensorList, TrainingInputBatch, pad_training_input_batch

from dataplane_compat.skyrl import activate, dispatch_class
from dataplane_core import connect
from dataplane_core.errors import ConfigError, InvalidRequestError

MESH = theirs.MeshDispatch


def arguments(function):
    return list(inspect.signature(function).parameters)


def test_the_names_are_those_that_we_use():
    assert arguments(MESH.dispatch) == ["actor_infos", "method", "data", "kwargs"]
    assert arguments(MESH.stage_chunks) == ["dp_size", "data", "mini_batch_boundaries"]
    assert arguments(MESH.dispatch_from_staged) == ["actor_infos", "method", "chunk_refs", "kwargs"]
    assert arguments(theirs.DispatchRegistry.register) == ["name", "dispatch_class"]
    assert arguments(pad_training_input_batch) == ["unpadded_batch", "pad_size"]
    workers = importlib.import_module("skyrl.backends.skyrl_train.workers.worker_dispatch")
    assert "MeshDispatch.stage_chunks(" in inspect.getsource(workers.WorkerDispatch.stage_data)


@ray.remote(num_cpus=0)
class Actor:
    def echo(self, data, wait=0.0):
        time.sleep(wait)
        return {name: getattr(value, "tensors", value) for name, value in data.items()}, data.metadata


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(params=["shm_store", "redis_store", "tq_simple"])
def client(request, cluster):
    name = "instance" if request.param == "tq_simple" else "namespace"
    client = activate({"backend": request.param, "options": {name: "skyrl"}})
    yield client
    theirs.MeshDispatch = MESH
    theirs.DispatchRegistry.register("mesh", MESH)
    client.close()


def actors(dp_size, copies=1):
    rank = {"tp": 0, "pp": 0, "world_size": dp_size * copies, "dp_size": dp_size, "pp_size": 1}
    return [
        theirs.ActorInfo(Actor.remote(), theirs.MeshRank(dp=dp, sp=sp, **rank))
        for sp in range(copies)
        for dp in range(dp_size)
    ]


def batch():
    made = TrainingInputBatch(
        {
            "sequences": torch.arange(24).view(6, 4),
            "loss_mask": torch.tensor([[True, False]] * 6),
            "advantages": torch.randn(6, 3).to(torch.bfloat16),
            "rewards": torch.arange(6.0),
            "empty": torch.empty(6, 0),
            "values": None,
            "pixel_values": TensorList([torch.full((size, 2), float(size)) for size in (1, 0, 3, 2, 2, 1)]),
            "mixed": TensorList([torch.ones(2, row + 1) for row in range(6)]),
        }
    )
    made.metadata = {"uids": [f"p{row}" for row in range(6)], "global_step": 3}
    return made


def same(back, there):
    if isinstance(there, TensorList):
        return len(back) == len(there) and all(same(*pair) for pair in zip(back, there.tensors, strict=True))
    return back is there is None or (back.dtype == there.dtype and torch.equal(back, there))


def wait_until_empty(client):
    deadline = time.monotonic() + 120
    while client.list_partitions():
        assert time.monotonic() < deadline, client.list_partitions()
        gc.collect()
        time.sleep(0.05)


def test_each_rank_gets_its_rows_bit_for_bit_and_they_are_freed_afterwards(client):
    data, group = batch(), actors(2, copies=2)
    results = theirs.DispatchRegistry.get("mesh").dispatch(group, "echo", data, wait=0.1)
    for info, (values, metadata) in zip(group, ray.get(results), strict=True):
        expected = data[info.rank.dp * 3 : info.rank.dp * 3 + 3]
        assert list(values) == list(data)
        assert metadata == data.metadata
        assert all(same(values[name], expected[name]) for name in data)
    del results
    wait_until_empty(client)


def test_staged_batches_are_padded_read_twice_and_survive_a_killed_worker(client):
    data, group = batch(), actors(2)
    staged = theirs.MeshDispatch.stage_chunks(2, data, [(0, 3), (3, 6)])
    assert [len(each) for each in staged] == [2, 2]
    first = ray.get(theirs.MeshDispatch.dispatch_from_staged(group, "echo", staged[0]))
    padded = pad_training_input_batch(data[0:3], 1)
    assert all(same(first[1][0][name], padded[2:4][name]) for name in data)
    assert first[0][1] == padded.metadata
    ray.kill(group[0].handle)
    group[0] = actors(2)[0]
    again = ray.get(theirs.MeshDispatch.dispatch_from_staged(group, "echo", staged[0]))
    assert all(same(again[0][0][name], padded[0:2][name]) for name in data)
    assert len(client.list_partitions()) == 1
    del staged
    wait_until_empty(client)


def test_a_batch_that_does_not_divide_is_refused(client):
    with pytest.raises(InvalidRequestError, match="6 rows do not divide by 4 ranks"):
        theirs.MeshDispatch.dispatch(actors(4), "echo", batch())
    with pytest.raises(InvalidRequestError, match="no mini-batch"):
        theirs.MeshDispatch.stage_chunks(2, batch(), [(0, 7)])
    wait_until_empty(client)


def test_a_store_of_one_process_is_refused():
    with connect({"backend": "noop"}) as client, pytest.raises(ConfigError, match="lives in one process"):
        dispatch_class(client)
