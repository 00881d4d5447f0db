"""One rule says which columns run along the tokens: first writes, reads and microbatches all follow it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from dataplane_core.batch import SlicedDataDict, kv_first_write, read_columns, token_columns
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import MULTIMODAL_FIELDS, PER_TOKEN_FIELDS

IDS = ["a", "b", "c"]
LENGTHS = [3, 5, 2]
WIDTH = 6


def jagged(lengths, *trailing):
    rows = [torch.ones(length, *trailing) for length in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def padded(lengths, width, *trailing):
    inside = torch.arange(width) < torch.tensor(lengths)[:, None]
    return inside.view(*inside.shape, *[1] * len(trailing)).expand(*inside.shape, *trailing).float()


def write(client, **columns):
    batch = {"input_lengths": torch.tensor(LENGTHS), **columns}
    return kv_first_write(batch, sample_ids=IDS, dp_client=client, partition_id="train")


def stored(client, name):
    """The rows' lengths, or the shape of a dense column."""
    column = client.get_samples(IDS, "train", [name]).get(name)
    return column.offsets().diff().tolist() if column.is_nested else tuple(column.shape)


def microbatch(**columns):
    """The whole batch as one microbatch of length 5."""
    batch = SlicedDataDict(columns)
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 3]]], [[5]]
    return batch


@given(
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=4).filter(lambda lengths: len(set(lengths)) > 1),
    names=st.sets(st.sampled_from(["advantages", "routed_experts", "pixel_values", "scores", "boxes"])),
    longer=st.sets(st.sampled_from(["advantages", "scores", "boxes"])),
    ragged=st.sets(st.sampled_from(["advantages", "boxes"])),
)
def test_rows_and_padded_rows_have_the_same_token_columns(lengths, names, longer, ragged):
    """What is told of rows of their own length, as they lie in the store, is told of the padded batch too."""
    more = [length + 1 for length in lengths]
    rows = {name: jagged(more if name in longer else lengths, 2) for name in names}
    batch = {name: torch.zeros(len(lengths), 7 if name in longer else 6, 2) for name in names}
    kept = ragged | MULTIMODAL_FIELDS
    expected = [name for name in rows if name not in kept and (name in PER_TOKEN_FIELDS or name not in longer)]
    assert token_columns(rows, lengths, ragged_fields=kept) == expected
    batch["input_ids"] = torch.zeros(len(lengths), 6)
    assert token_columns(batch, ragged_fields=kept) == [*expected, "input_ids"]
    rows["input_ids"] = jagged(lengths)
    assert token_columns(rows, ragged_fields=kept) == [*expected, "input_ids"]


def test_without_any_lengths_all_that_has_the_dim_counts():
    columns = {"scores": torch.zeros(3, 4), "pixel_values": torch.zeros(3, 4), "reward": torch.zeros(3), "text": ["a"]}
    assert token_columns(columns) == ["scores"]
    assert token_columns(columns, token_aligned_fields=["reward", "not there"]) == ["reward"]


# --- the first write --------------------------------------------------------------------------------------------------


def test_a_first_write_never_cuts_what_the_vocabulary_calls_ragged(client):
    grids = padded(LENGTHS, WIDTH, 3)
    meta = write(client, input_ids=torch.ones(3, WIDTH), image_grid_thw=grids, other=grids)
    assert stored(client, "image_grid_thw") == (3, WIDTH, 3)
    assert stored(client, "other") == LENGTHS
    assert torch.equal(read_columns(client, meta)["image_grid_thw"], grids)


@pytest.mark.parametrize(
    "beside",
    [{"input_ids": torch.ones(3, WIDTH)}, {"input_ids": jagged(LENGTHS)}, {}],
    ids=["padded", "jagged", "none"],
)
def test_a_first_write_cuts_named_columns_of_any_width(client, beside):
    """A forward may round the width up, and a batch may have its tokens elsewhere."""
    write(client, **beside, prev_logprobs=torch.ones(3, 8), embedding=padded(LENGTHS, 8))
    assert stored(client, "prev_logprobs") == LENGTHS
    assert stored(client, "embedding") == (3, 8), "its width says nothing"


def test_the_width_of_a_named_column_is_rounded_up_without_known_lengths(client):
    client.put_samples(IDS, "train", {"mine": torch.ones(3, 5)})
    meta = KVBatchMeta("train", None, IDS, fields=["mine"], extra_info={"pad_to_multiple": 8})
    assert read_columns(client, meta, token_aligned_fields=["mine"])["mine"].shape == (3, 8)


# --- microbatches -----------------------------------------------------------------------------------------------------


def test_microbatches_beside_jagged_tokens_cut_named_columns_only():
    """The rows of ``input_ids`` say how long the samples are, so nothing else is guessed to be as long."""
    batch = microbatch(input_ids=jagged(LENGTHS), advantages=torch.zeros(3, 8), embedding=torch.zeros(3, 16))
    [part] = batch.make_microbatch_iterator_with_dynamic_shapes()
    assert part["advantages"].shape == (3, 5)
    assert part["embedding"].shape == (3, 16)
    assert part["input_ids"].offsets().diff().tolist() == LENGTHS


def test_microbatches_keep_columns_that_a_worker_calls_ragged():
    """As `read_columns` does: a column that it kept must not be cut afterwards."""
    batch = microbatch(input_ids=torch.zeros(3, WIDTH), boxes=torch.zeros(3, WIDTH, 4))
    [part] = batch.make_microbatch_iterator_with_dynamic_shapes(ragged_fields=["boxes"])
    assert (part["input_ids"].shape, part["boxes"].shape) == ((3, 5), (3, WIDTH, 4))
    [part] = batch.make_microbatch_iterator_with_dynamic_shapes()
    assert part["boxes"].shape == (3, 5, 4)
