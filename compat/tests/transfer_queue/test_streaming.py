"""`StreamingDataset` and `StreamingDataLoader`: each row once, in micro batches, in worker processes too."""

import itertools

import pytest
import torch
from tensordict import TensorDict

from dataplane_compat.transfer_queue import StreamingDataLoader, StreamingDataset
from dataplane_compat.transfer_queue.dataloader import micro_batches


def fill(tq, count):
    rows = torch.nested.as_nested_tensor([torch.full((n % 3 + 1,), n) for n in range(count)], layout=torch.jagged)
    tq.get_client().put(TensorDict({"x": rows, "n": torch.arange(count)}, batch_size=[count]), partition_id="p")


def dataset(**changes):
    arguments = {"batch_size": 4, "micro_batch_size": 2, "data_fields": ["x", "n"], "partition_id": "p"}
    return StreamingDataset(**{"config": None, "task_name": "t", "dp_rank": 0, **arguments, **changes})


def test_a_finite_dataset_ends(tq):
    fill(tq, 8)
    loader = StreamingDataLoader(dataset(should_check_consumption_status=True))
    batches = list(loader)
    assert [columns["n"].tolist() for columns, _ in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [row.tolist() for row in batches[1][0]["x"].unbind()] == [[2, 2, 2], [3]]
    assert [meta.size for _, meta in batches] == [2] * 4
    assert len(loader.get_buffer()) == 2
    loader.reset()
    assert len(list(itertools.islice(loader, 4))) == 4  # from the buffer
    loader.step("q")
    assert (loader.dataset.partition_id, loader.get_buffer()) == ("q", [])


def test_workers_share_the_rows(tq):
    if tq.get_client().store.backend_name == "noop":
        return  # one process
    fill(tq, 16)
    loader = StreamingDataLoader(dataset(should_check_consumption_status=True), num_workers=2)
    assert sorted(int(n) for columns, _ in loader for n in columns["n"]) == list(range(16))


def test_wrong_arguments(tq):
    for wrong in ({"micro_batch_size": 0}, {"data_fields": []}, {"dp_rank": -1}):
        with pytest.raises(ValueError):
            dataset(**wrong)
    columns = TensorDict({"x": torch.zeros(3)}, batch_size=[3])
    with pytest.raises(ValueError, match="exceeds"):
        micro_batches(columns, None, 4)
    with pytest.raises(TypeError):
        micro_batches({}, None, 1)
