"""`read_columns` pads by what the meta knows; `write_columns` cuts what was declared."""

from __future__ import annotations

import pytest
import torch

from dataplane_core.batch import kv_first_write, read_columns, write_columns
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, MissingDataError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, MULTIMODAL_FIELDS, PAD_TO_MULTIPLE

IDS = ["a", "b", "c"]
LENGTHS = [3, 5, 2]


@pytest.fixture
def meta(client):
    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    batch = {
        "input_ids": torch.arange(1, 16).view(3, 5) * mask,
        "input_lengths": torch.tensor(LENGTHS),
        "features": torch.ones(3, 2),
        "reward": torch.ones(3),
    }
    return kv_first_write(batch, sample_ids=IDS, dp_client=client, partition_id="train")


def shapes(batch):
    return {name: tuple(column.shape) for name, column in batch.items()}


def test_the_meta_says_how_long_every_rank_pads(client, meta):
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 12
    for part in (meta, meta.subset([2]), meta.subset([2, 0])):
        assert read_columns(client, part, ["input_ids"])["input_ids"].shape == (part.size, 12)


def test_an_argument_goes_before_the_meta(client, meta):
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 12
    assert read_columns(client, meta, ["input_ids"], pad_to_seqlen=9)["input_ids"].shape == (3, 9)
    assert read_columns(client, meta, ["input_ids"], pad_to_seqlen=0)["input_ids"].shape == (3, 5)


@pytest.mark.parametrize(
    ("target", "multiple", "width"), [(None, 4, 8), (12, 4, 12), (12, 8, 16), (4, 3, 6), (None, 1, 5), (1, 5, 5)]
)
def test_lengths_are_rounded_up_to_the_multiple(client, meta, target, multiple, width):
    meta.extra_info[PAD_TO_MULTIPLE] = multiple
    assert read_columns(client, meta, ["input_ids"], pad_to_seqlen=target)["input_ids"].shape == (3, width)


def test_the_multiple_is_honoured_without_known_lengths_too(client, meta):
    bare = KVBatchMeta("train", None, IDS, extra_info={PAD_TO_MULTIPLE: 4})
    assert read_columns(client, bare, ["input_ids", "features"])["input_ids"].shape == (3, 8)
    # rows of equal length come as a dense column, which is rounded all the same
    equal = KVBatchMeta("train", None, ["b"], extra_info={PAD_TO_MULTIPLE: 4})
    assert read_columns(client, equal, ["input_ids"])["input_ids"].shape == (1, 8)


def test_only_token_columns_are_padded(client, meta):
    expected = {"input_ids": (3, 8), "input_lengths": (3,), "features": (3, 2), "reward": (3,)}
    assert shapes(read_columns(client, meta, pad_to_seqlen=8)) == expected
    assert shapes(read_columns(client, meta, pad_to_seqlen=8, token_aligned_fields=["input_ids"])) == expected
    named = read_columns(client, meta, pad_to_seqlen=8, token_aligned_fields=["features"])
    assert named["features"].shape == (3, 8)
    assert named["input_ids"].offsets().diff().tolist() == LENGTHS


@pytest.mark.parametrize("lengths", [[3, 6], [6, 6], [1, 2]])
def test_token_columns_of_any_name_have_one_width_whatever_the_lengths_are(client, lengths):
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    batch = {
        "input_ids": torch.ones(2, 6, dtype=torch.int64) * mask,
        "input_lengths": torch.tensor(lengths),
        "position_ids": torch.arange(6).expand(2, 6),  # written whole, since what is beyond the tokens is not zero
        "features": torch.ones(2, 7),
        "embedding": torch.ones(2, 40),
    }
    meta = kv_first_write(batch, sample_ids=["x", "y"], dp_client=client, partition_id="train")
    ragged = {*MULTIMODAL_FIELDS, "features"}
    read = shapes(read_columns(client, meta, pad_to_seqlen=8, ragged_fields=ragged))
    assert read == {
        "input_ids": (2, 8), "input_lengths": (2,), "position_ids": (2, 8), "features": (2, 7), "embedding": (2, 40)
    }  # fmt: skip


def test_the_jagged_layout_keeps_rows_at_their_length(client, meta):
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 12
    read = read_columns(client, meta, ["input_ids", "features"], layout="jagged")
    assert read["input_ids"].offsets().diff().tolist() == LENGTHS
    assert read["features"].shape == (3, 2)


def test_fields_must_be_named_somewhere(client, meta):
    meta.fields = None
    with pytest.raises(InvalidRequestError, match=r"neither select_fields nor meta\.fields"):
        read_columns(client, meta)


def test_what_is_missing_is_a_key_error(client, meta):
    with pytest.raises(MissingDataError):
        read_columns(client, meta, ["input_ids", "routed_experts"])
    with pytest.raises(KeyError):
        read_columns(client, KVBatchMeta("train", None, ["z"]), ["input_ids"])


def test_a_target_that_makes_no_sense_is_refused(client, meta):
    with pytest.raises(InvalidRequestError, match="pad_to_seqlen is -1"):
        read_columns(client, meta, pad_to_seqlen=-1)
    meta.extra_info[PAD_TO_MULTIPLE] = -2
    with pytest.raises(InvalidRequestError, match="pad_to_multiple is -2"):
        read_columns(client, meta)


# --- write_columns ----------------------------------------------------------------------------------------------------


def test_declared_columns_are_cut_by_the_lengths_of_the_meta(client, meta):
    logprobs = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))  # wider than the longest row
    embedding = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    fields = {"prev_logprobs": logprobs, "embedding": embedding, "note": ["x", None, [1]]}
    written = write_columns(client, meta, fields, token_aligned_fields=["prev_logprobs", "advantages"])
    assert written.fields == [*meta.fields, "prev_logprobs", "embedding", "note"]
    assert written.sequence_lengths == LENGTHS
    td = client.get_samples(IDS, "train", list(fields))
    assert td.get("prev_logprobs").offsets().diff().tolist() == LENGTHS
    assert torch.equal(td["embedding"], embedding)
    assert td["note"] == ["x", None, [1]]
    read = read_columns(client, written, ["prev_logprobs"])["prev_logprobs"]
    assert torch.equal(read[1], logprobs[1, :5])


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
@pytest.mark.parametrize("named", [None, ["advantages", "prev_logprobs"]], ids=["by default", "declared"])
def test_a_value_per_sample_passes_under_the_name_of_a_token_column(client, meta, shape, named):
    column = torch.arange(3.0).reshape(shape)
    write_columns(client, meta, {"advantages": column}, token_aligned_fields=named)
    assert torch.equal(client.get_samples(IDS, "train", ["advantages"])["advantages"], column)
    without_lengths = KVBatchMeta("train", None, IDS)
    write_columns(client, without_lengths, {"advantages": column + 1}, token_aligned_fields=named)
    assert torch.equal(read_columns(client, meta, ["advantages"])["advantages"], column + 1)


def test_without_fields_nothing_is_written(client, meta):
    assert write_columns(client, meta, {}) == meta


def test_a_meta_without_lengths_cannot_cut(client):
    with pytest.raises(
        InvalidRequestError, match="token_aligned_fields name 'x', but the meta has no sequence_lengths"
    ):
        write_columns(client, KVBatchMeta("train", None, IDS), {"x": torch.ones(3, 5)}, token_aligned_fields=["x"])


@pytest.mark.parametrize(
    ("column", "error", "reason"),
    [
        (torch.ones(3, 4), InvalidRequestError, r"write_columns\('train', 3 samples\) refused: field 'x'.*length 5"),
        (torch.ones(2, 5), InvalidRequestError, r"field 'x' has 2 rows\. Expected 3"),
        ("text", InvalidTypeError, "non-tensor"),
    ],
)
def test_columns_that_do_not_fit_are_refused_with_call_and_field(client, meta, column, error, reason):
    with pytest.raises(error, match=reason):
        write_columns(client, meta, {"x": column}, token_aligned_fields=["x"])


@pytest.mark.parametrize("name", ["x", "input_ids"])
def test_a_wrong_number_of_rows_is_refused_without_declaration_too(client, meta, name):
    for num_rows in (2, 4):
        columns = {name: torch.ones(num_rows, 5), "scores": torch.ones(num_rows, 5)}
        with pytest.raises(InvalidRequestError, match=rf"'{name}' has {num_rows} rows\. Expected 3"):
            write_columns(client, meta, columns)
