"""What a list becomes: the same whichever call writes it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack

from dataplane_core.batch import kv_first_write, read_columns, rebuild_message_logs, split_message_logs, write_columns
from dataplane_core.errors import DataPlaneError, InvalidRequestError, InvalidTypeError
from dataplane_core.meta import KVBatchMeta

IDS = ["a_g0", "a_g1", "b_g0"]
META = KVBatchMeta("train", "policy", IDS, sequence_lengths=[2, 1, 3])


def put(client, fields):
    client.put_samples(IDS, "train", fields)


def write(client, fields):
    write_columns(client, META, fields)


def write_aligned(client, fields):
    write_columns(client, META, fields, token_aligned_fields=["input_ids"])


def first_write(client, fields):
    kv_first_write(fields, sample_ids=IDS, dp_client=client, partition_id="train")


WRITERS = [put, write, write_aligned, first_write]


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.__name__)
def back(request, client):
    """Writes one column, reads it back."""

    def written(column, name="x"):
        request.param(client, {name: column, "other": torch.zeros(3)})
        return client.get_samples(IDS, "train", [name]).get(name)

    return written


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([[1, 2], [3], [4, 5, 2**62]], torch.int64),
        ([[0.5, 2.0], [-1.0], [float("inf"), float("nan"), 3.0]], torch.float32),
        ([[1, 0.5], [3], [4]], torch.float32),
        ([[True], [False, True], []], torch.bool),
        ([(1, 2), (), (3,)], torch.int64),
        (([1], [2, 3], [4]), torch.int64),
    ],
    ids=["int", "float", "int and float", "bool", "tuples", "a tuple of lists"],
)
def test_ragged_lists_of_numbers_become_a_jagged_column(back, rows, dtype):
    column = back(rows)
    assert isinstance(column, torch.Tensor)
    assert column.layout is torch.jagged
    assert column.dtype == dtype
    expected = [torch.tensor(row, dtype=dtype) for row in rows]
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(column.unbind(), expected, strict=True))


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([1, 2, 3], torch.tensor([1, 2, 3])),
        ([0.5, 1.0, -2.0], torch.tensor([0.5, 1.0, -2.0])),
        ([1, 0.5, 0], torch.tensor([1, 0.5, 0])),
        ([True, False, True], torch.tensor([True, False, True])),
        ([[1, 2], [3, 4], [5, 6]], torch.tensor([[1, 2], [3, 4], [5, 6]])),
        ([[], [], [0.5]], None),
    ],
    ids=["ints", "floats", "ints and floats", "bools", "rows of equal length", "empty rows"],
)
def test_numbers_and_equal_rows_become_a_dense_column(back, items, expected):
    column = back(items)
    if expected is None:
        assert [row.tolist() for row in column.unbind()] == items
        assert column.dtype == torch.float32
    else:
        assert column.dtype == expected.dtype
        assert torch.equal(column, expected)


@pytest.mark.parametrize(
    "items",
    [
        ["text", "", "more"],
        [None, None, "text"],
        [[], [], []],
        [["a"], [], ["b", 1]],
        [{"n": 1}, {"n": [1, 2]}, None],
        [b"1", 1, None],
        [{"a": 1}, [{"b": [1]}], [[1], "a"]],
    ],
    ids=["str", "None", "all empty", "lists of str", "dicts", "bytes and numbers", "nested"],
)
def test_other_lists_are_objects(back, items):
    column = back(items)
    assert isinstance(column, NonTensorStack)
    assert column.tolist() == items


def test_objects_that_are_said_to_be_objects_stay_so(back):
    rows = [[1, 2], [3], [4, 5, 6]]
    array = np.empty(3, dtype=object)
    array[:] = rows
    assert back(NonTensorStack(*rows)).tolist() == rows
    assert back(array, "y").tolist() == rows


@pytest.mark.parametrize(
    ("items", "error", "words"),
    [
        ([1, None, 3], InvalidTypeError, r"holds None among numbers \(row 1\)"),
        ([[1], [2], None], InvalidTypeError, r"holds None among numbers \(row 2\)"),
        ([[1], [2, None], [3]], InvalidTypeError, r"holds None among numbers \(row 1\)"),
        ([[1], 2, [3]], InvalidTypeError, "numbers in some rows and lists of numbers in others"),
        ([[[1, 2]], [[3]], []], InvalidTypeError, "nested more than one deep"),
        ([[1, [2]], [3], []], InvalidTypeError, "nested more than one deep"),
        ([True, 1, 0], InvalidTypeError, "bools among numbers"),
        ([[True], [0.5], []], InvalidTypeError, "bools among numbers"),
        ([1, 2, 2**63], InvalidRequestError, "does not fit in 64 bits"),
        ([[1.0], [1e300], []], InvalidRequestError, r"holds 1e\+300.*float32"),
        ([0.5, 1, 2**24 + 1], InvalidRequestError, "16777217 would lose digits"),
    ],
)
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_what_nearly_is_numbers_is_asked_for_and_not_guessed(client, writer, items, error, words):
    with pytest.raises(error, match=words) as refused:
        writer(client, {"x": items, "other": torch.zeros(3)})
    assert isinstance(refused.value, DataPlaneError)
    assert "field 'x'" in str(refused.value)
    assert client.list_samples("train").size == 0


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_list_of_another_length_is_refused(client, writer):
    with pytest.raises(InvalidRequestError, match=r"2 rows.*(Expected 3|in field 'x')"):
        writer(client, {"x": [[1], [2, 3]]})


def test_token_lists_are_read_back_padded(client):
    batch = {"input_ids": [[5, 6], [7], [8, 9, 1]], "input_lengths": [2, 1, 3], "logprobs": torch.ones(3, 3)}
    meta = kv_first_write(batch, sample_ids=IDS, dp_client=client, partition_id="train")
    assert meta.sequence_lengths == [2, 1, 3]
    assert read_columns(client, meta, ["input_ids"])["input_ids"].tolist() == [[5, 6, 0], [7, 0, 0], [8, 9, 1]]


def test_token_lists_that_are_padded_are_cut_as_tensors_are(client):
    padded = [[5, 6, 0], [7, 0, 0], [8, 9, 1]]
    batch = {"input_ids": padded, "input_lengths": [2, 1, 3], "token_mask": [[1.0, 1.0, 0.0]] * 3}
    meta = kv_first_write(batch, sample_ids=IDS, dp_client=client, partition_id="train")
    columns = client.get_samples(IDS, "train", ["input_ids", "token_mask"])
    assert [row.tolist() for row in columns["input_ids"].unbind()] == [[5, 6], [7], [8, 9, 1]]
    write_columns(client, meta, {"advantages": [[0.5] * 3] * 3}, token_aligned_fields=["advantages"])
    assert client.get_samples(IDS, "train", ["advantages"])["advantages"].offsets().diff().tolist() == [2, 1, 3]


def test_turns_of_message_logs_whose_contents_are_numbers_stay_as_they_are(client):
    logs = [[{"role": "user", "content": number, "token_ids": [number, 8]}] for number in range(3)]
    columns = {**split_message_logs(logs), "input_ids": torch.tensor([[0, 8], [1, 8], [2, 8]])}
    meta = replace(META, sequence_lengths=[2, 2, 2])
    write_columns(client, meta, columns)
    rebuilt = rebuild_message_logs(read_columns(client, meta, list(columns)))
    assert [[turn["content"] for turn in log] for log in rebuilt] == [[0], [1], [2]]
