"""Every call that takes, orders, repeats, joins or deals out rows gives those of a list of row numbers."""

import numpy as np
import pytest
import torch

from dataplane_core.batch import BatchedDataDict, SlicedDataDict, stack_or_nest
from dataplane_testkit._columns import check_column


def batch_of(num_rows):
    """A column of each kind; each row shows its number."""
    numbers = np.arange(num_rows)
    objects = np.empty(num_rows, dtype=object)
    objects[:] = [{"row": row} for row in range(num_rows)]
    patches = [torch.full((row % 3, 2), row) for row in range(num_rows)]
    columns = {str(dtype): torch.arange(num_rows).to(dtype) for dtype in (torch.int64, torch.uint16, torch.uint64)}
    return SlicedDataDict(
        columns,
        ids=torch.arange(4 * num_rows).reshape(num_rows, 4),
        names=[f"n{row}" for row in range(num_rows)],
        table=np.stack([numbers, numbers], axis=1).astype(np.float32),
        objects=objects,
        patches=torch.nested.as_nested_tensor(patches, layout=torch.jagged),
    )


def rows_of(batch):
    """The row numbers that a part of `batch_of` holds, once its columns agree on them."""
    rows = batch["torch.int64"].tolist()
    for dtype in (torch.uint16, torch.uint64):
        assert (batch[str(dtype)].tolist(), batch[str(dtype)].dtype) == (rows, dtype)
    assert [ids[:1] for ids in batch["ids"].tolist()] == [[4 * row] for row in rows]
    assert batch["names"] == [f"n{row}" for row in rows]
    assert (batch["table"].tolist(), batch["table"].dtype) == ([[row, row] for row in rows], np.float32)
    assert (list(batch["objects"]), batch["objects"].dtype) == ([{"row": row} for row in rows], object)
    assert [row.tolist() for row in batch["patches"].unbind()] == [[[row, row]] * (row % 3) for row in rows]
    return rows


def planned():
    """Two batches of three rows, the first in two microbatches."""
    shard = batch_of(6)
    shard.micro_batch_indices = [[[0, 1], [1, 3]], [[0, 3]]]
    shard.micro_batch_lengths = [[2, 3], [2]]
    return shard


def join(*batches):
    return SlicedDataDict.from_batches(batches, ragged_fields=["patches"])


SIX = batch_of(6)
#: What is asked for, and the rows of each batch that it gives.
TAKEN = {
    "a slice": (lambda: [SIX.slice(2, 5), SIX.slice(6, 6)], [[2, 3, 4], []]),
    "chunks": (lambda: [SIX.chunk(rank, 3) for rank in range(3)], [[0, 1], [2, 3], [4, 5]]),
    "one chunk": (lambda: [SIX.chunk(0, 1)], [[0, 1, 2, 3, 4, 5]]),
    **{
        f"indices in a {form.__name__}": (lambda form=form: [SIX.select_indices(form([3, 0, 3, -1]))], [[3, 0, 3, 5]])
        for form in (list, torch.tensor, np.array)
    },
    "no indices": (lambda: [SIX.select_indices([])], [[]]),
    "repeats": (lambda: [batch_of(3).repeat_interleave(2), SIX.repeat_interleave(0)], [[0, 0, 1, 1, 2, 2], []]),
    "batches of a size": (lambda: [SIX.get_batch(number, 2) for number in range(3)], [[0, 1], [2, 3], [4, 5]]),
    "batches of a plan": (lambda: [planned().get_batch(1, 3), planned().get_batch(0)], [[3, 4, 5], [0, 1, 2]]),
    "equal microbatches": (lambda: list(SIX.make_microbatch_iterator(3)), [[0, 1, 2], [3, 4, 5]]),
    "bins": (lambda: list(planned().get_batch(0).make_microbatch_iterator_for_packable_sequences()), [[0], [1, 2]]),
    "joined": (lambda: [join(SIX, {}, SIX.slice(1, 2), SIX.slice(0, 0))], [[0, 1, 2, 3, 4, 5, 1]]),
    # the parts of each chunk are joined by position
    "shards": (lambda: SIX.shard_by_batch_size(1), [[0, 1, 2, 3, 4, 5]]),
    "shards of chunks": (lambda: batch_of(8).shard_by_batch_size(2, batch_size=4), [[0, 1, 4, 5], [2, 3, 6, 7]]),
    "uneven": (lambda: SIX.shard_by_batch_size(4, allow_uneven_shards=True), [[0, 1], [2, 3], [4, 5], []]),
    "the last is smaller": (
        lambda: batch_of(7).shard_by_batch_size(3, allow_uneven_shards=True),
        [[0, 1, 2], [3, 4, 5], [6]],
    ),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_rows_that_are_taken(kind):
    take, expected = TAKEN[kind]
    parts = take()
    assert [rows_of(part) for part in parts] == expected
    assert {type(part) for part in parts} == {SlicedDataDict}


@pytest.mark.parametrize("indices", [[0, 1], [0, 1, 2, 3], [0, 0, 1], torch.tensor([1, 1, 0])], ids=str)
def test_indices_that_are_not_one_per_row_are_refused(indices):
    batch = batch_of(3)
    with pytest.raises(ValueError, match="each of the 3 rows"):
        batch.reorder_data(indices)
    assert rows_of(batch) == [0, 1, 2]


# --- plans ------------------------------------------------------------------------------------------------------------


def test_planned_microbatches_are_cut_to_their_length_on_dim_1_in_token_columns_only():
    shard = planned()
    wide = {
        "input_ids": torch.arange(48).reshape(6, 8),
        "routed_experts": torch.zeros(6, 12, 2, 3),
        "embedding": torch.zeros(6, 16),
        "image_grid_thw": torch.zeros(6, 8, 3),  # as wide as the tokens by chance
        "mask": torch.zeros(6, 8),
    }
    shard.update(wide)
    batch = shard.get_batch(0)
    assert batch.get_microbatch_iterator_dynamic_shapes_len() == 2
    assert batch.get_microbatch_iterator_for_packable_sequences_len() == (2, 3)
    first, second = batch.make_microbatch_iterator_with_dynamic_shapes()
    assert (rows_of(first), rows_of(second)) == ([0], [1, 2])
    assert {name: tuple(second[name].shape) for name in wide} == {
        "input_ids": (2, 3),
        "routed_experts": (2, 3, 2, 3),
        "embedding": (2, 16),
        "image_grid_thw": (2, 8, 3),
        "mask": (2, 3),
    }
    assert second["input_ids"].tolist() == [[8, 9, 10], [16, 17, 18]]
    assert batch["input_ids"].shape == (3, 8)
    named = next(batch.make_microbatch_iterator_with_dynamic_shapes(token_aligned_fields=["input_ids", "not there"]))
    assert (named["input_ids"].shape, named["mask"].shape) == ((1, 2), (1, 8))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_slice_is_a_view_and_chunks_and_shards_are_copies_that_pickle_small():
    batch = batch_of(6)
    part = batch.slice(2, 5)
    for whole, cut in ((batch["ids"], part["ids"]), (batch["patches"].values(), part["patches"].values())):
        assert cut.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    copies = [
        batch.chunk(0, 6),
        batch.shard_by_batch_size(6)[0],
        batch.shard_by_batch_size(6, allow_uneven_shards=True)[0],
    ]
    batch["ids"].fill_(9)
    batch["table"].fill(9)
    batch["patches"].values().fill_(9)
    batch["names"][0] = "changed"
    for copied in copies:
        assert rows_of(copied) == [0]
        assert copied["ids"].untyped_storage().nbytes() == copied["ids"].nbytes
        copied["ids"].fill_(7)
    assert batch["ids"].unique().tolist() == [9]


def test_repeated_items_share_their_media_if_told_and_nothing_else():
    image = torch.ones(4)
    item = [{"role": "user", "content": [{"pixel_values": image, "size": [2, 2]}]}]
    batch = BatchedDataDict(log=[item], pixel_values=[image])
    shared = batch.repeat_interleave(num_repeats=2, share_immutable_media=True)
    for log, pixels in zip(shared["log"], shared["pixel_values"], strict=True):
        assert log[0]["content"][0]["pixel_values"] is pixels is image
        assert log[0]["content"][0]["size"] is not item[0]["content"][0]["size"]
    assert shared["log"][0][0] is not shared["log"][1][0]
    assert batch.repeat_interleave(2)["pixel_values"][0] is not image


# --- changes in place -------------------------------------------------------------------------------------------------


def test_truncate_cuts_the_dense_tensors_that_have_the_dim_and_no_others():
    batch = batch_of(2)
    batch |= {"three": torch.zeros(2, 4, 5), "short": torch.ones(2, 1)}
    assert batch.truncate_tensors(1, 3) is None
    assert batch["ids"].tolist() == [[0, 1, 2], [4, 5, 6]]
    assert [tuple(batch[name].shape) for name in ("three", "short")] == [(2, 3, 5), (2, 1)]
    assert rows_of(batch) == [0, 1]
    batch.truncate_tensors(dim=2, truncated_len=2)
    assert [tuple(batch[name].shape) for name in ("three", "ids")] == [(2, 3, 2), (2, 3)]


def test_to_moves_the_tensors_in_place_and_get_dict_gives_the_columns_as_they_are():
    batch = batch_of(3)
    assert batch.to("cpu") is batch
    assert rows_of(batch) == [0, 1, 2]
    moved = SlicedDataDict(t=torch.ones(2, 3), names=["a", "b"])
    assert moved.to("meta") is moved
    plain = moved.get_dict()
    assert type(plain) is dict
    assert plain["t"] is moved["t"]
    assert (plain["t"].device.type, plain["names"], list(plain)) == ("meta", ["a", "b"], ["t", "names"])


# --- joining padded columns -------------------------------------------------------------------------------------------


def test_tensors_are_right_padded_on_dim_1_to_the_widest_with_the_columns_own_pad_value():
    wide, narrow = torch.ones(2, 4, 3, 2), torch.ones(1, 2, 3, 2)
    batches = [
        {"ids": torch.tensor([[1, 2, 3]]), "mask": torch.tensor([[True, True, True]]), "deep": narrow},
        {"ids": torch.tensor([[4], [5]]), "mask": torch.tensor([[True], [True]]), "deep": wide},
    ]
    joined = BatchedDataDict.from_batches(batches, pad_value_dict={"ids": -7, "deep": 9})
    assert joined["ids"].tolist() == [[1, 2, 3], [4, -7, -7], [5, -7, -7]]
    assert joined["mask"].tolist() == [[True, True, True], [True, False, False], [True, False, False]]
    assert torch.equal(joined["deep"], torch.cat([torch.cat([narrow, torch.full((1, 2, 3, 2), 9)], dim=1), wide]))


# --- joining ragged columns -------------------------------------------------------------------------------------------

PIXELS = [torch.arange(6 * count).view(count, 3, 2).to(torch.bfloat16) for count in (4, 0, 2, 3)]
IMAGES = BatchedDataDict(input_ids=torch.tensor([[1, 2], [3, 0]]), pixel_values=stack_or_nest(PIXELS[:2]))
MORE = BatchedDataDict(input_ids=torch.tensor([[4, 5, 6], [7, 0, 0]]), pixel_values=stack_or_nest(PIXELS[2:]))
DENSE = [{"input_ids": torch.ones(1, 1).long(), "pixel_values": PIXELS[number][None]} for number in (0, 2)]
TEXT = BatchedDataDict(input_ids=torch.tensor([[8]]))
#: A sample without images, whose row is an empty list.
EMPTY = BatchedDataDict(input_ids=torch.tensor([[9]]), pixel_values=stack_or_nest([None]))
WIDE, NARROW = torch.ones(2, 4, 3), torch.zeros(1, 2, 3)
JOINED = {
    "jagged": ([IMAGES, MORE], PIXELS),
    "dense of two widths": (DENSE, [PIXELS[0], PIXELS[2]]),
    "text first": ([TEXT, IMAGES, MORE], [PIXELS[1], *PIXELS]),
    "text between": ([IMAGES, TEXT, MORE], [*PIXELS[:2], PIXELS[1], *PIXELS[2:]]),
    "text last": ([IMAGES, MORE, TEXT], [*PIXELS, PIXELS[1]]),
    "an empty list": ([EMPTY, MORE], [PIXELS[1], *PIXELS[2:]]),
    "arrays": ([{"pixel_values": WIDE.numpy()}, {"pixel_values": NARROW.numpy()}], [*WIDE, *NARROW]),
    "an array and a tensor": ([{"pixel_values": WIDE.numpy()}, {"pixel_values": NARROW}], [*WIDE, *NARROW]),
    "an array and text": ([{"ids": [1, 2], "pixel_values": WIDE.numpy()}, {"ids": [3]}], [*WIDE, NARROW[0, :0]]),
}


@pytest.mark.parametrize("kind", JOINED)
def test_columns_of_images_are_joined_row_by_row(kind):
    batches, rows = JOINED[kind]
    joined = BatchedDataDict.from_batches(batches, allow_missing_packed_tensors=True)
    check_column(joined["pixel_values"], rows)
    turned = joined.select_indices([1, 0]).slice(0, 2)["pixel_values"].unbind()
    check_column(stack_or_nest(turned), [rows[1], rows[0]])


@pytest.mark.parametrize(
    "empty",
    [
        torch.ones(0, 7, 2, dtype=torch.bfloat16),
        torch.ones(0, 7, 5),
        IMAGES.slice(0, 0)["pixel_values"],
        IMAGES.select_indices([])["pixel_values"],
        [],
        np.ones((0, 7, 2)),
    ],
    ids=["wider", "another form", "a slice", "a selection", "a list", "an array"],
)
def test_a_batch_without_rows_changes_nothing_and_may_lack_columns(empty):
    nothing = {"input_ids": torch.ones(0, 1, dtype=torch.int64), "pixel_values": empty}
    for batches in ([DENSE[0], nothing], [nothing, DENSE[0]], [{}, DENSE[0]]):
        assert torch.equal(BatchedDataDict.from_batches(batches)["pixel_values"], PIXELS[0][None])
    check_column(BatchedDataDict.from_batches([nothing, IMAGES])["pixel_values"], PIXELS[:2])
    assert BatchedDataDict.from_batches([nothing, nothing]).size == 0


def test_other_columns_join_so_if_they_are_named():
    frames = BatchedDataDict(frames=stack_or_nest([torch.ones(2, 4), torch.ones(1, 4)]))
    joined = BatchedDataDict.from_batches(
        [frames, {"frames": torch.ones(1, 3, 4)}, {"other": [1]}],
        ragged_fields=["frames", "other"],
        allow_missing_packed_tensors=True,
    )
    assert [len(row) for row in joined["frames"].unbind()] == [2, 1, 3, 0]
    assert joined["other"] == [[], [], [], 1]
    with pytest.raises(NotImplementedError, match="ragged_fields"):
        BatchedDataDict.from_batches([frames, frames])
