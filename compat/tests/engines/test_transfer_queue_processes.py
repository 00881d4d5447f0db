"""The module with other processes: those that attach, and a checkpoint that a run of TransferQueue saved."""

import subprocess
import sys

import pytest
import torch
from tiers import in_long

import dataplane_compat.transfer_queue as tq
from dataplane_compat.transfer_queue import _directory
from dataplane_core.errors import ConfigError, OperationTimeoutError

ATTACH = """
import sys
sys.modules["transfer_queue"] = sys.modules["ray"] = None  # as if they were not installed
import torch
from tensordict import TensorDict
import dataplane_compat.transfer_queue as tq
tq.init()
client = tq.get_client()
meta = client.kv_retrieve_meta("a", "p")
print(meta.global_indexes, client.get_data(meta)["x"].tolist(), client.get_meta(["x"], 9, "p", task_name="t").size)
tq.kv_put("b", "p", fields={"x": torch.tensor(2)})
tq.close()
"""

RUN = """
import sys, ray, torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
import transfer_queue as tq

ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
units = {"total_storage_size": 200, "num_data_storage_units": 2}
storage = {"storage_backend": "SimpleStorage", "SimpleStorage": units}
tq.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": storage}))
tokens = torch.nested.as_nested_tensor([torch.arange(n) for n in (3, 2, 4)], layout=torch.jagged)
info = NonTensorStack({"n": 1}, {"n": [2, "x"]}, {})
mask = torch.ones(3, 2, dtype=torch.bfloat16)
fields = {"tokens": tokens, "mask": mask, "reward": torch.tensor([0.5, 1.0, 2.0]), "info": info}
tq.kv_batch_put(["a", "b", "c"], "train", TensorDict(fields, batch_size=[3]), [{"step": n, "l": [n]} for n in range(3)])
tq.kv_put("a", "train", fields={"late": torch.ones(5), "position_ids": torch.arange(8).view(4, 2)})
tq.kv_put("z", "train", tag={"only": "tag"})
client = tq.get_client()
client.put(TensorDict({"x": torch.arange(4)}, batch_size=[4]), partition_id="rows")
assert client.get_meta(["tokens"], 2, "train", task_name="t").size == 2
assert client.get_meta(["x"], 1, "rows", task_name="u").size == 1
tq.save_checkpoint(sys.argv[1], metadata={"step": 7})
tq.close()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def of_a_run(tmp_path_factory):
    """A checkpoint that a run of TransferQueue saved."""
    folder = tmp_path_factory.mktemp("theirs") / "checkpoint"
    arguments = [sys.executable, "-W", "ignore", "-c", RUN, str(folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("backend", ["noop", *in_long("shm_store", "redis_store")])
def test_a_job_moves_over_in_the_middle(of_a_run, backend):
    tq.init({"backend": backend, "op_timeout_s": 120, "controller": {"polling_mode": True}})
    try:
        tq.load_checkpoint(of_a_run)
        client = tq.get_client()
        assert tq.kv_list()["train"] == {
            **{key: {"step": n, "l": [n]} for n, key in enumerate("abc")},
            "z": {"only": "tag"},
        }
        read = tq.kv_batch_get(["a", "b", "c"], "train")
        assert [len(row) for row in read["tokens"].unbind()] == [3, 2, 4]
        assert read["mask"].dtype == torch.bfloat16
        assert read["reward"].tolist() == [0.5, 1.0, 2.0]
        assert read.get("info").tolist() == [{"n": 1}, {"n": [2, "x"]}, {}]
        late = tq.kv_batch_get("a", "train")
        assert late["late"].values().tolist() == [1.0] * 5
        assert late["position_ids"].unbind()[0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        given = client.get_meta(["tokens", "mask"], 1, "train", task_name="t")
        assert given.custom_meta == [{"step": 2, "l": [2]}]
        assert {name: schema["is_nested"] for name, schema in given.field_schema.items()} == {
            "tokens": True,
            "mask": False,
        }
        rest = client.get_meta(["x"], 3, "rows", task_name="u")
        assert client.get_data(rest)["x"].tolist() == [1, 2, 3]
    finally:
        tq.close()


def test_an_actor_of_ray_that_is_not_there_in_time_is_an_error_of_ours(ray_address):
    with pytest.raises(OperationTimeoutError, match=r"'TransferQueueController'.* within 0 s"):
        _directory.publish({}, 0.0)


@pytest.fixture
def closing(monkeypatch):
    yield monkeypatch
    tq.close()


def test_a_start_that_fails_leaves_no_store_behind(closing):
    config = {"backend": "shm_store", "op_timeout_s": 120}
    with pytest.raises(ConfigError, match="'Nonesuch' is not known"):
        tq.init({**config, "controller": {"sampler": "Nonesuch"}})
    tq.init({**config, "controller": {"sampler": "GRPOGroupNSampler"}})
    assert tq.get_client().store.bootstrapped, "or its own controller would not count"


def test_a_second_process_finds_the_store_by_the_variable(closing, tmp_path, python):
    """It has neither TransferQueue nor Ray."""
    path = tmp_path / "config.yaml"
    path.write_text("{backend: shm_store, op_timeout_s: 120}\n")
    closing.setenv("DATAPLANE_CONFIG", str(path))
    theirs = {"controller": {"polling_mode": True}, "backend": {"storage_backend": "SimpleStorage"}}
    assert tq.init(theirs) is theirs
    tq.kv_put("a", "p", fields={"x": torch.tensor(1)})
    ran = python.run("-c", ATTACH)
    mine = tq.get_client().kv_retrieve_meta("a", "p").global_indexes
    assert ran.stdout.strip() == f"{mine} [1] 0"  # the polling mode of the process that started the store
    assert tq.kv_batch_get("b", "p")["x"].tolist() == [2]
