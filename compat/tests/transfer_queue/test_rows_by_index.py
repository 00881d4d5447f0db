"""Rows by index: numbers for rows without keys, hashes for rows with keys, claims and what they consumed."""

import asyncio
import pickle

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_compat.transfer_queue._indexes import index_of
from dataplane_compat.transfer_queue.client import TransferQueueClient


def column(*values):
    return TensorDict({"x": torch.tensor([[value] for value in values])}, batch_size=[len(values)])


def test_new_rows_are_numbered_without_gaps(tq):
    client = tq.get_client()
    first, second = client.put(column(1, 2), partition_id="p"), client.put(column(3), partition_id="q")
    start = first.global_indexes[0]
    assert first.global_indexes + second.global_indexes == [start, start + 1, start + 2]
    assert first.is_ready
    assert client.get_data(first)["x"].values().tolist() == [1, 2]
    client.put(TensorDict({"y": torch.tensor([5.0, 6.0])}, batch_size=[2]), metadata=first)
    assert client.get_data(first)["y"].tolist() == [5.0, 6.0]
    assert tq.kv_list() == {"p": {}, "q": {}}  # they have no keys


def test_rows_of_several_partitions_in_one_batch(tq):
    client = tq.get_client()
    rows = tq.BatchMeta.concat([client.put(column(n), partition_id=f"p{n % 2}") for n in range(4)])
    rows.reorder([2, 1, 3, 0])
    assert client.get_data(rows)["x"].values().tolist() == [2, 1, 3, 0]
    client.put(TensorDict({"y": torch.arange(4)}, batch_size=[4]), metadata=rows)
    assert client.get_data(rows.select_fields(["y"]))["y"].tolist() == [0, 1, 2, 3]
    client.clear_samples(rows.select_samples([0, 1]))
    with pytest.raises(tq.StorageKeyNotFoundError):
        client.get_data(rows)


def test_images_of_any_size_stay_objects_in_batches_of_several_partitions_also_if_a_parser_gave_them(tq):
    def load(columns):
        columns["image"] = [torch.full((3, len(url), 2), 1.0) for url in columns["image"]]

    client = tq.get_client()
    parts = [
        client.put(TensorDict({"image": NonTensorStack(*urls)}, batch_size=[len(urls)]), None, partition_id, load)
        for partition_id, urls in (("p", ["a", "bcd"]), ("q", ["ef", "g"]))
    ]
    rows = tq.BatchMeta.concat(parts)
    for _ in range(2):
        images = list(client.get_data(rows)["image"])
        assert [image.shape for image in images] == [(3, n, 2) for n in (1, 3, 2, 1)]
        client.put(TensorDict({"image": NonTensorStack(*images)}, batch_size=[4]), metadata=rows)


def schema_of(tq, partition_id, field="x"):
    """What a reader learns of the rows: whether they are nested, and their shape."""
    schema = tq.get_client().get_meta([field], 1, partition_id, mode="force_fetch").field_schema[field]
    return schema["is_nested"], schema["shape"]


JAGGED = torch.nested.as_nested_tensor([torch.ones(4)] * 2, layout=torch.jagged)


@pytest.mark.parametrize("by_another", [False, True], ids=["", "by another process"])
@pytest.mark.parametrize("second", [torch.ones(2, 6), JAGGED], ids=["of another length", "jagged"])
def test_a_field_is_nested_once_its_rows_differ(tq, second, by_another):
    client = tq.get_client()
    other = TransferQueueClient("other", client.store) if by_another else client
    client.put(TensorDict({"x": torch.ones(2, 4), "n": torch.ones(2)}, batch_size=[2]), partition_id="p")
    assert schema_of(tq, "p") == (False, torch.Size([4]))
    assert schema_of(tq, "p", "n") == (False, torch.Size([1]))
    client.put(TensorDict({"x": torch.zeros(2, 4)}, batch_size=[2]), partition_id="p")
    asyncio.run(client.async_put(TensorDict({"x": torch.ones(2, 9)}, batch_size=[2]), partition_id="q"))
    assert schema_of(tq, "p") == (False, torch.Size([4]))
    other.put(TensorDict({"x": second}, batch_size=[2]), partition_id="p")
    assert schema_of(tq, "p") == (True, None)
    assert schema_of(tq, "q") == (False, torch.Size([9]))
    other.clear_partition("p")
    tq.kv_put("a", "p", fields={"x": torch.ones(6)})
    assert schema_of(tq, "p") == (False, torch.Size([6]))
    assert client.kv_retrieve_meta("a", "p").field_schema["x"]["is_nested"] is False


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_strided_column_is_nested_and_so_is_what_the_store_got_otherwise(tq):
    column = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=torch.strided)
    tq.get_client().put(TensorDict({"x": column}, batch_size=[2]), partition_id="p")
    tq.get_client().store.put_samples(["a"], "q", {"x": torch.ones(1, 4)})  # how long its rows are is not known
    assert schema_of(tq, "p") == schema_of(tq, "q") == (True, None)


def test_a_key_has_one_index_in_all_processes(tq):
    """The numbers are part of what other processes and saved batches hold: they must not change."""
    assert index_of("train", "a") == 8933179974885650581
    assert index_of("train", "~index:17") == 17
    tq.kv_batch_put(["a", "b"], "train", column(1, 2))
    client = tq.get_client()
    rows = client.kv_retrieve_meta(["b", "nobody", "a"], "train")
    assert rows.global_indexes == [index_of("train", "b"), index_of("train", "a")]
    assert client.kv_retrieve_keys(rows.global_indexes, "train") == ["b", "a"]
    bare = tq.BatchMeta(rows.global_indexes, ["train"] * 2, rows.field_schema)  # as a program may make it
    assert client.get_data(bare)["x"].values().tolist() == [2, 1]
    with pytest.raises(RuntimeError, match="no row with a key"):
        client.kv_retrieve_keys([5], "train")


def test_retrieving_may_create_rows(tq):
    client = tq.get_client()
    assert client.kv_retrieve_meta("a", "train").size == 0
    assert not client.kv_retrieve_meta(["a", "b"], "train", create=True).is_ready
    assert tq.kv_list() == {"train": {"a": {}, "b": {}}}
    for wrong in ([], ["a", 1]):
        with pytest.raises((ValueError, TypeError)):
            client.kv_retrieve_meta(wrong, "train")


def test_a_put_writes_only_tags_that_changed(tq):
    tq.kv_batch_put(["a"], "p", column(1), [{"status": "running", "n": 1}])
    client = tq.get_client()
    rows = pickle.loads(pickle.dumps(client.kv_retrieve_meta("a", "p")))
    tq.kv_put("a", "p", tag={"status": "finished"})
    rows.update_custom_meta([{"n": 2}])
    client.put(column(7), metadata=rows)
    assert tq.kv_list() == {"p": {"a": {"status": "finished", "n": 2}}}


def test_each_task_gets_each_row_once(tq):
    client = tq.get_client()
    rows = client.put(column(*range(5)), partition_id="p")
    rows.update_custom_meta([{"n": n} for n in range(5)])
    client.set_custom_meta(rows)
    got = client.get_meta(["x"], 3, "p", task_name="t")
    assert got.global_indexes == rows.global_indexes[:3]
    assert got.get_all_custom_meta() == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert client.get_meta(["x"], 3, "p", task_name="t").size == 0  # two are left; polling mode does not wait
    assert client.get_meta(["x"], 5, "p", task_name="other").size == 5
    index, status = client.get_consumption_status("t", "p")
    assert index.tolist() == rows.global_indexes
    assert status.tolist() == [1, 1, 1, 0, 0]
    assert not client.check_consumption_status("t", "p")
    assert client.get_meta(["x"], 2, "p", task_name="t").size == 2
    assert client.check_consumption_status("t", "p")
    assert client.reset_consumption("p", "t")
    assert client.get_meta(["x"], 5, "p", task_name="t").size == 5
    assert client.reset_consumption("nowhere")


def test_what_was_produced(tq):
    client = tq.get_client()
    assert client.get_production_status(["x"], "p") == (None, None)
    rows = client.put(column(1, 2), partition_id="p")
    client.put(TensorDict({"y": torch.zeros(1)}, batch_size=[1]), metadata=rows.select_samples([1]))
    index, status = client.get_production_status(["x", "y"], "p")
    assert index.tolist() == rows.global_indexes
    assert status.tolist() == [[1, 0], [1, 1]]
    assert client.check_production_status(["x"], "p")
    assert not client.check_production_status(["x", "y"], "p")
    everything = client.get_meta(["x", "y"], 2, "p", mode="force_fetch")
    assert everything.production_status.tolist() == [0, 1]
    assert client.get_partition_list() == ["p"]
    client.clear_partition("p")
    assert client.get_partition_list() == []
    assert client.get_consumption_status("t", "p") == (None, None)
