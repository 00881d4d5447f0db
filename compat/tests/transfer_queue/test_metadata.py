"""`KVBatchMeta` and `BatchMeta`: parts, joins and orders keep rows, tags and fields together."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_compat.transfer_queue import BatchMeta, KVBatchMeta

DENSE = {"dtype": torch.int64, "shape": (2,), "is_nested": False, "is_non_tensor": False}


def keyed(*keys, **more):
    return KVBatchMeta(list(keys), [{"key": key} for key in keys], "p", ["x"], **more)


def batch(*indexes, fields=("x",), **more):
    tags = [{"n": index} for index in indexes]
    size = len(indexes)
    return BatchMeta(indexes, ["p"] * size, dict.fromkeys(fields, DENSE), np.ones(size), {}, tags, **more)


def test_keys_with_tags():
    meta = keyed("a", "b", "c", extra_info={"t": 1})
    assert [part.keys for part in meta.chunk(2)] == [["a", "b"], ["c"]]
    assert KVBatchMeta.concat(meta.chunk(4)) == meta
    assert meta.select_keys(["c", "a"]).tags == [{"key": "c"}, {"key": "a"}]
    meta.reorder([2, 0, 1])
    assert (meta.keys, meta.tags[0], len(meta), meta.size) == (["c", "a", "b"], {"key": "c"}, 3, 3)
    assert KVBatchMeta.concat([]).size == 0
    part = meta.chunk(1)[0]
    part.tags[0]["key"] = "changed"
    assert meta.tags[0] == {"key": "c"}


def test_keys_that_do_not_fit():
    for wrong in (
        lambda: KVBatchMeta(["a"], []),
        lambda: keyed("a", "a"),
        lambda: keyed("a").reorder([0, 0]),
        lambda: keyed("a", "b").reorder([0, -1]),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(RuntimeError, match="'b'"):
        keyed("a").select_keys(["b"])
    with pytest.raises(ValueError, match="conflicting"):
        KVBatchMeta.concat([keyed("a", extra_info={"t": 1}), keyed("b", extra_info={"t": 2})])
    with pytest.raises(ValueError, match="Partition"):
        KVBatchMeta.concat([keyed("a"), KVBatchMeta(["b"], [{}], "q", ["x"])])


def test_rows_in_parts_and_joined():
    whole = batch(5, 6, 7)
    assert [part.global_indexes for part in whole.chunk(2)] == [[5, 6], [7]]
    assert BatchMeta.concat(whole.chunk(4)).custom_meta == whole.custom_meta
    assert (whole[-1].global_indexes, whole[1:].global_indexes) == ([7], [6, 7])
    whole.reorder([2, 0, 1])
    assert [row.custom_meta["n"] for row in whole.samples] == [7, 5, 6]
    with pytest.raises(IndexError):
        whole.samples[3]
    with pytest.raises(ValueError, match="field_names"):
        BatchMeta.concat([batch(1), batch(2, fields=("y",))])
    assert pickle.loads(pickle.dumps(whole)).global_indexes == whole.global_indexes


def test_fields_are_added_selected_and_united():
    rows = torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    data = TensorDict({"y": rows, "z": torch.zeros(2), "o": NonTensorStack("a", "b")}, batch_size=[2])
    meta = batch(1, 2)
    meta.production_status[:] = 0
    assert not meta.is_ready
    assert meta.add_fields(data).is_ready
    assert meta.field_names == ["o", "x", "y", "z"]
    assert meta.get_shapes("y") == [(2,), (3,)]
    assert meta.get_dtypes("z") == [torch.float32] * 2
    assert meta.field_schema["o"]["is_non_tensor"]
    assert meta.samples[1].fields["y"]["shape"] == (3,)
    assert meta.select_fields(["y", "never"]).field_names == ["y"]
    united = batch(1, 2).union(meta.select_fields(["y"]))
    assert united.field_names == ["x", "y"]
    with pytest.raises(ValueError, match="global_indexes"):
        batch(1).union(batch(2))
    with pytest.raises(TypeError):
        meta.samples[0].fields["y"]["shape"] = ()
