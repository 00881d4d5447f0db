"""`repeat_interleave`, `truncate_tensors`, `to`, `get_dict`."""

import numpy as np
import torch

from dataplane_core.batch import BatchedDataDict, SlicedDataDict


def test_repeat_interleave_puts_the_copies_of_a_row_side_by_side():
    objects = np.array([{"k": 1}, {"k": 2}], dtype=object)
    table = np.array([[1, 2], [3, 4]], dtype=np.float32)
    batch = BatchedDataDict(t=torch.tensor([[1, 2], [3, 4]]), names=["a", "b"], o=objects, n=table)
    repeated = batch.repeat_interleave(2)
    assert repeated["t"].tolist() == repeated["n"].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert repeated["n"].dtype == np.float32
    assert repeated["names"] == ["a", "a", "b", "b"]
    assert list(repeated["o"]) == [{"k": 1}, {"k": 1}, {"k": 2}, {"k": 2}]
    assert repeated["o"].dtype == object


def test_repeated_list_items_are_deep_copies():
    item = {"turns": ["hi"]}
    repeated = BatchedDataDict(log=[item]).repeat_interleave(2)["log"]
    repeated[0]["turns"].append("changed")
    assert repeated[1] == item == {"turns": ["hi"]}


def test_repeated_items_share_their_media_if_told_and_nothing_else():
    image = torch.ones(4)
    item = [{"role": "user", "content": [{"pixel_values": image, "size": [2, 2]}]}]
    batch = BatchedDataDict(log=[item], pixel_values=[image])
    shared = batch.repeat_interleave(num_repeats=2, share_immutable_media=True)
    for log, pixels in zip(shared["log"], shared["pixel_values"], strict=True):
        assert log[0]["content"][0]["pixel_values"] is pixels is image
        assert log[0]["content"][0]["size"] is not item[0]["content"][0]["size"]
    assert batch.repeat_interleave(2)["pixel_values"][0] is not image


def test_repeat_interleave_by_zero_leaves_no_rows():
    assert BatchedDataDict(t=torch.ones(3, 2), names=["a", "b", "c"]).repeat_interleave(0).size == 0


def test_truncate_cuts_the_tensors_that_have_the_dim_and_no_others():
    batch = BatchedDataDict(
        one=torch.arange(2),
        two=torch.arange(8).reshape(2, 4),
        three=torch.zeros(2, 4, 5),
        short=torch.ones(2, 1),
        l=[1, 2],
    )
    assert batch.truncate_tensors(1, 3) is None
    assert batch["one"].tolist() == [0, 1]
    assert batch["two"].tolist() == [[0, 1, 2], [4, 5, 6]]
    assert batch["three"].shape == (2, 3, 5)
    assert batch["short"].shape == (2, 1)
    batch.truncate_tensors(dim=2, truncated_len=2)
    assert batch["three"].shape == (2, 3, 2)
    assert batch["two"].shape == (2, 3)


def test_to_moves_the_tensors_in_place_and_leaves_the_rest():
    batch = SlicedDataDict(t=torch.ones(2, 3), names=["a", "b"])
    assert batch.to("meta") is batch
    assert batch["t"].device.type == "meta"
    assert batch["names"] == ["a", "b"]


def test_get_dict_gives_the_columns_as_a_plain_dict():
    batch = BatchedDataDict(t=torch.ones(2), names=["a", "b"])
    plain = batch.get_dict()
    assert type(plain) is dict
    assert plain["t"] is batch["t"]
    assert list(plain) == ["t", "names"]
