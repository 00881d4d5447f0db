"""`from_batches`: what is padded, and with what."""

import numpy as np
import pytest
import torch

from dataplane_core.batch import BatchedDataDict, SlicedDataDict


def test_lists_and_1d_tensors_join_in_order():
    joined = BatchedDataDict.from_batches(
        [{"t": torch.tensor([1, 2]), "names": ["a", "b"]}, {"t": torch.tensor([3]), "names": ["c"]}]
    )
    assert joined["t"].tolist() == [1, 2, 3]
    assert joined["names"] == ["a", "b", "c"]


def test_2d_tensors_are_right_padded_to_the_widest_with_the_columns_own_pad_value():
    batches = [
        {"ids": torch.tensor([[1, 2, 3]]), "mask": torch.tensor([[True, True, True]])},
        {"ids": torch.tensor([[4], [5]]), "mask": torch.tensor([[True], [True]])},
    ]
    joined = BatchedDataDict.from_batches(batches, pad_value_dict={"ids": -7})
    assert joined["ids"].tolist() == [[1, 2, 3], [4, -7, -7], [5, -7, -7]]
    assert joined["mask"].tolist() == [[True, True, True], [True, False, False], [True, False, False]]


def test_tensors_of_3_and_more_dims_pad_dim_1_and_keep_their_trailing_dims():
    wide, narrow = torch.ones(2, 4, 3, 2), torch.ones(1, 2, 3, 2)
    joined = BatchedDataDict.from_batches([{"e": narrow}, {"e": wide}], pad_value_dict={"e": 9})["e"]
    assert joined.shape == (3, 4, 3, 2)
    assert torch.equal(joined[0, :2], narrow[0])
    assert (joined[0, 2:] == 9).all()
    assert torch.equal(joined[1:], wide)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.int64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.bool, torch.int32),
        (torch.float32, torch.float64, torch.int64),
    ],
    ids=str,
)
@pytest.mark.parametrize("shapes", [[(2,)] * 3, [(2, 3)] * 3, [(2, 3), (1, 5), (1, 2)]], ids=["1-D", "2-D", "padded"])
def test_mixed_dtypes_are_promoted_as_torch_cat_does(dtypes, shapes):
    parts = [torch.ones(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    joined = BatchedDataDict.from_batches([{"x": part} for part in parts], pad_value_dict={"x": 1})["x"]
    assert joined.dtype == torch.cat([part.flatten() for part in parts]).dtype
    assert (joined == 1).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.uint16, torch.complex64], ids=str)
def test_every_dtype_is_kept_by_padding(dtype):
    parts = [torch.tensor([[1, 2]]).to(dtype), torch.tensor([[3]]).to(dtype)]
    joined = BatchedDataDict.from_batches([{"x": part} for part in parts])["x"]
    assert joined.dtype == dtype
    assert joined.to(torch.complex64).real.tolist() == [[1, 2], [3, 0]]


def test_object_arrays_join_and_stay_object_arrays():
    first, second = np.empty(1, dtype=object), np.empty(2, dtype=object)
    first[0], second[0], second[1] = {"a": 1}, None, [1, 2]
    joined = BatchedDataDict.from_batches([{"o": first}, {"o": second}])["o"]
    assert joined.dtype == object
    assert list(joined) == [{"a": 1}, None, [1, 2]]


def test_batches_without_rows_may_lack_keys():
    joined = BatchedDataDict.from_batches([{}, {"a": torch.tensor([1]), "b": ["x"]}, {"a": torch.zeros(0).long()}])
    assert joined["a"].tolist() == [1]
    assert joined["b"] == ["x"]


def test_joining_shards_gives_a_batch_without_their_plans():
    shard = SlicedDataDict({"x": [1, 2]})
    shard.micro_batch_indices, shard.micro_batch_lengths, shard.elem_counts_per_gb = [[[0, 2]]], [[4]], [2]
    joined = SlicedDataDict.from_batches([shard, shard])
    assert type(joined) is SlicedDataDict
    assert joined.micro_batch_indices is None
    assert joined.micro_batch_lengths is None
    assert joined.elem_counts_per_gb is None
