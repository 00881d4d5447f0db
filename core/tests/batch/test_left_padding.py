"""Padding on the left, or on both sides: no token is lost, and what might lose one is refused."""

from __future__ import annotations

import pytest
import torch

from dataplane_core.batch import kv_first_write, read_columns, write_columns
from dataplane_core.errors import InvalidRequestError

IDS = torch.tensor([[0, 0, 0, 7, 8], [1, 2, 3, 4, 5]])
MASK = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
LENGTHS = torch.tensor([2, 5])


def write(client, ids=IDS, lengths=LENGTHS, named=None, **columns):
    batch = {"input_ids": ids, "input_lengths": lengths, **columns}
    names = ["a", "b", "c"][: len(ids)]
    return kv_first_write(batch, sample_ids=names, dp_client=client, partition_id="train", token_aligned_fields=named)


@pytest.mark.parametrize("named", [None, ["input_ids", "prev_logprobs"]], ids=["default", "named"])
@pytest.mark.parametrize("shift", [0, 1, 3], ids=["left", "both sides", "right"])
def test_rows_are_cut_where_the_mask_says(client, shift, named):
    mask = MASK.clone()
    mask[0] = mask[0].roll(-shift)
    ids, logprobs = torch.where(mask != 0, IDS.roll(-shift, 1), 9), torch.arange(10.0).reshape(2, 5) + 1
    ids[1], logprobs = IDS[1], logprobs * mask
    meta = write(client, ids, named=named, attention_mask=mask, prev_logprobs=logprobs)
    read = read_columns(client, meta)
    assert read["input_ids"].tolist() == [[7, 8, 0, 0, 0], [1, 2, 3, 4, 5]]
    assert read["prev_logprobs"][0].tolist() == [*logprobs[0][mask[0] != 0].tolist(), 0, 0, 0]
    if shift != 3:
        assert read["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    meta = write_columns(client, meta, {"advantages": -logprobs, "attention_mask": mask})
    assert torch.equal(read_columns(client, meta, ["advantages"])["advantages"], -read["prev_logprobs"])


@pytest.mark.parametrize(
    ("ids", "lengths", "row"),
    [
        (IDS.tolist(), [2, 5], 0),
        ([[1, 2, 3], [0, 7, 8]], [3, 2], 1),
        ([[9, 7, 9], [1, 2, 3]], [2, 3], 0),
        ([[9, 7, 5], [9, 8, 6], [1, 2, 3]], [2, 2, 3], 1),
    ],
    ids=["several", "one zero", "ends in the padding", "ends differ"],
)
def test_without_a_mask_ids_that_may_be_cut_are_refused(client, ids, lengths, row):
    with pytest.raises(InvalidRequestError, match=rf"'input_ids', row {row}: .*attention_mask"):
        write(client, torch.tensor(ids), torch.tensor(lengths))
    assert client.list_samples("train").size == 0


def test_ids_padded_on_the_right_show_it_for_all_columns(client):
    """A model's outputs at padding are no padding, and a first token may be 0."""
    ids = torch.tensor([[0, 5, 1, 1, 1], [0, 5, 6, 7, 1], [0, 2, 3, 4, 5]])
    meta = write(client, ids, torch.tensor([2, 4, 5]), prev_logprobs=torch.arange(15.0).reshape(3, 5))
    assert read_columns(client, meta)["prev_logprobs"][0].tolist() == [0, 1, 0, 0, 0]


def test_a_later_column_that_may_be_cut_is_refused_unless_it_is_named(client):
    meta = write(client, attention_mask=MASK)
    logprobs = torch.arange(10.0).reshape(2, 5)
    with pytest.raises(InvalidRequestError, match=r"'prev_logprobs', row 0: .*token_aligned_fields"):
        write_columns(client, meta, {"prev_logprobs": logprobs})
    write_columns(client, meta, {"prev_logprobs": logprobs}, token_aligned_fields=["prev_logprobs"])
    assert read_columns(client, meta, ["prev_logprobs"])["prev_logprobs"][0].tolist() == [0, 1, 0, 0, 0]


def test_a_mask_that_contradicts_the_lengths_or_has_holes_is_refused(client):
    for row in ([0, 0, 1, 1, 1], [0, 1, 0, 1, 0]):
        mask = MASK.clone()
        mask[0] = torch.tensor(row)
        with pytest.raises(InvalidRequestError, match="row 0 has 2 tokens, and its 'attention_mask' marks"):
            write(client, attention_mask=mask)


def test_an_unknown_column_beside_left_padding_is_cut_or_refused(client):
    positions = torch.tensor([[1, 1, 1, 0, 1], [0, 1, 2, 3, 4]])
    meta = write(client, attention_mask=MASK, position_ids=positions)
    assert read_columns(client, meta)["position_ids"].tolist() == [[0, 1, 0, 0, 0], [0, 1, 2, 3, 4]]
    with pytest.raises(InvalidRequestError, match="'embedding' is as wide as 'input_ids'"):
        write(client, attention_mask=MASK, embedding=torch.arange(10.0).reshape(2, 5))


@pytest.mark.parametrize("lengths", [[3, 6], [6, 6]], ids=str)
def test_all_token_columns_get_one_width(client, lengths):
    """Whatever the lengths of a step, an undeclared dense column is padded as the tokens are."""
    inside = torch.arange(6) < torch.tensor(lengths)[:, None]
    positions, boxes = torch.arange(6).expand(2, 6), torch.ones(2, 6, 4)
    meta = write(client, (torch.arange(6) + 1) * inside, torch.tensor(lengths), position_ids=positions, boxes=boxes)
    for part in (meta, meta.subset([0])):
        read = read_columns(client, part, pad_to_seqlen=8, ragged_fields=["boxes"])
        assert (read["input_ids"].shape[1], read["position_ids"].shape[1], read["boxes"].shape[1]) == (8, 8, 6)
