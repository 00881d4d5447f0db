"""The module with other processes, which attach."""

import pytest
import torch

import dataplane_compat.transfer_queue as tq
from dataplane_compat.transfer_queue import _session
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


def test_an_actor_of_ray_that_is_not_there_in_time_is_an_error_of_ours(ray_address):
    with pytest.raises(OperationTimeoutError, match=r"'TransferQueueController'.* within 0 s"):
        _session.publish({}, 0.0)
    actor = _session.publish({"polling_mode": True}, 120.0)
    assert _session.look_up() is None, "TransferQueue's own controller has another config"
    _session.withdraw(actor)


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
