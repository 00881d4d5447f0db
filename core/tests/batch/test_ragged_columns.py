"""Columns whose rows do not run along the tokens, such as the patches of images: read as they went."""

from __future__ import annotations

import pytest
import torch

from dataplane_core.batch import kv_first_write, read_columns
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN

IDS = ["a", "b", "c", "d"]
LENGTHS = [3, 5, 2, 4]
PATCHES = [6, 0, 4, 4]


def jagged(counts, *trailing, dtype=torch.float32):
    rows = [torch.arange(count * int(torch.tensor(trailing).prod())).view(count, *trailing) + 1 for count in counts]
    return torch.nested.as_nested_tensor([row.to(dtype) for row in rows], layout=torch.jagged)


def rows_of(column):
    return [row.tolist() for row in column.unbind()]


def first_write(client, lengths=LENGTHS, ids=IDS, **extras):
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    batch = {"input_ids": torch.ones(inside.shape, dtype=torch.int64) * inside, "input_lengths": torch.tensor(lengths)}
    return kv_first_write({**batch, **extras}, sample_ids=ids, dp_client=client, partition_id="train")


@pytest.fixture
def meta(client):
    meta = first_write(
        client,
        pixel_values=jagged(PATCHES, 2, 3),
        image_grid_thw=jagged([2, 0, 1, 1], 3, dtype=torch.int64),
        boxes=jagged([1, 2, 1, 3], 4, dtype=torch.bfloat16),
        per_token=jagged(LENGTHS, 2),
    )
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 8
    return meta


def test_ragged_columns_come_back_as_they_went_beside_padded_tokens(client, meta):
    read = read_columns(client, meta)
    assert read["input_ids"].shape == (4, 8)
    assert read["per_token"].shape == (4, 8, 2), "rows as long as the tokens are padded with them"
    assert rows_of(read["pixel_values"]) == rows_of(jagged(PATCHES, 2, 3))
    assert rows_of(read["image_grid_thw"]) == rows_of(jagged([2, 0, 1, 1], 3, dtype=torch.int64))
    assert read["boxes"].dtype is torch.bfloat16
    assert [len(row) for row in read["boxes"].unbind()] == [1, 2, 1, 3]


def test_rows_of_equal_shape_come_dense_and_are_not_padded_either(client, meta):
    read = read_columns(client, meta.subset([3, 2]))
    assert read["pixel_values"].shape == (2, 4, 2, 3)
    assert read["boxes"].is_nested
    assert read["image_grid_thw"].shape == (2, 1, 3)


def test_a_column_that_is_as_long_as_the_tokens_by_chance_is_kept_where_it_is_named(client):
    same = first_write(client, pixel_values=jagged(LENGTHS, 2), boxes=jagged(LENGTHS, 4))
    same.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 8
    read = read_columns(client, same)
    assert [len(row) for row in read["pixel_values"].unbind()] == LENGTHS, "a name of the shared vocabulary"
    assert read["boxes"].shape == (4, 8, 4), "nothing says that this is none of tokens"
    named = read_columns(client, same, ragged_fields=["boxes"])
    assert [len(row) for row in named["boxes"].unbind()] == LENGTHS
    assert named["pixel_values"].shape == (4, 8, 2)


@pytest.mark.parametrize("known_by", ["input_lengths", "input_ids"])
def test_without_lengths_in_the_meta_the_columns_say_them(client, meta, known_by):
    bare = KVBatchMeta("train", None, IDS)
    read = read_columns(client, bare, ["boxes", "per_token", known_by], pad_to_seqlen=8)
    assert read["per_token"].shape == (4, 8, 2)
    assert read["boxes"].is_nested


def test_where_nothing_says_the_lengths_all_but_ragged_fields_are_padded(client, meta):
    bare = KVBatchMeta("train", None, IDS)
    read = read_columns(client, bare, ["boxes", "pixel_values"], pad_to_seqlen=8)
    assert read["boxes"].shape == (4, 8, 4)
    assert read["pixel_values"].is_nested


def test_ragged_rows_play_no_part_in_the_padded_length(client, meta):
    meta.extra_info = {"pad_to_multiple": 4}
    bare = KVBatchMeta("train", None, IDS, extra_info=meta.extra_info)
    assert read_columns(client, bare, ["input_ids", "pixel_values"])["input_ids"].shape == (4, 8)
    short = first_write(client, lengths=[2, 1], ids=["e", "f"], pixel_values=jagged([9, 3], 2, 3))
    bare = KVBatchMeta("train", None, short.sample_ids, extra_info={"pad_to_multiple": 4})
    assert read_columns(client, bare, ["input_ids", "pixel_values"])["input_ids"].shape == (2, 4)


def test_columns_keep_the_order_that_was_asked_for(client, meta):
    names = ["pixel_values", "input_ids", "boxes", "input_lengths"]
    assert list(read_columns(client, meta, names)) == names
