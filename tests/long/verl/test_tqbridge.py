"""verl's `tqbridge` in worker groups on Ray: metas go in, workers read and write the store, metas come out."""

import os

import pytest
import ray
import torch
from tensordict import TensorDict
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.transferqueue_utils import batch_meta2kv_batch_meta, kv_batch_meta2batch_meta
from worker_group import Scorer

pytestmark = pytest.mark.timeout(300)

ROWS = [torch.arange(n) for n in (3, 1, 4, 2)]


@pytest.fixture(scope="module", params=[1, 2], ids=["dp2", "dp2-tp2"])
def group(request, store):
    pool = RayResourcePool([2 * request.param], use_gpu=False, max_colocate_count=1)
    workers = RayClassWithInitArgs(ray.remote(Scorer), tensor_parallel=request.param)
    group = RayWorkerGroup(pool, workers, device_name="cpu")
    yield group
    for worker in group.workers:
        ray.kill(worker)
    for placement in pool.get_placement_groups():
        ray.util.remove_placement_group(placement)


@pytest.fixture
def batch(tq):
    tokens = torch.nested.as_nested_tensor(ROWS, layout=torch.jagged)
    tags = [{"seq_len": len(row)} for row in ROWS]
    batch = tq.kv_batch_put(["a", "b", "c", "d"], "train", TensorDict({"input_ids": tokens}, batch_size=4), tags)
    batch.extra_info["temperature"] = 2.0
    return batch


def test_workers_read_their_rows_with_the_config_of_the_driver_and_write_a_column(group, tq, batch):
    ours = "dataplane_compat.transfer_queue.interface"
    assert set(group.seen_by_process()) == {(ours, os.environ["DATAPLANE_CONFIG"])}
    output = group.compute_log_prob(batch)
    assert type(output) is tq.KVBatchMeta
    assert (output.keys, output.partition_id) == (batch.keys, "train")
    assert set(output.fields) == {"input_ids", "log_probs"}
    written = tq.kv_batch_get(output.keys, "train", "log_probs")["log_probs"]
    assert [row.tolist() for row in written.unbind()] == [(row * 2.0).tolist() for row in ROWS]
    output = group.compute_async(batch)  # a coroutine
    assert tq.kv_batch_get(output.keys, "train", "lengths")["lengths"].tolist() == [3, 1, 4, 2]
    tq.kv_batch_put(batch.keys, "train", TensorDict({"more": torch.zeros(4)}, batch_size=4))
    batch.fields = ["input_ids"]  # only these are read
    assert len(group.compute_log_prob(batch)) == 4


def test_metas_convert_both_ways(tq, batch):
    rows = kv_batch_meta2batch_meta(batch)
    assert rows.field_names == ["input_ids"]
    assert rows.is_ready
    assert rows.extra_info == {"temperature": 2.0}
    assert batch_meta2kv_batch_meta(rows).keys == batch.keys
