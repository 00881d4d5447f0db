"""On which side a batch is padded: writes cut by its attention mask; without one, only what looks like padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import tensor

from dataplane_core import kv_first_write, read_columns, write_columns
from dataplane_core.errors import InvalidRequestError

IDS = ["a", "b"]


def padded(rows: list[list[int]], width: int, sides: str, pad: int = 0) -> torch.Tensor:
    """Rows that are padded to a width, each on its side: left, right or both."""
    built = []
    for row, side in zip(rows, sides, strict=True):
        left = {"l": width - len(row), "r": 0, "b": (width - len(row) + 1) // 2}[side]
        built.append([pad] * left + row + [pad] * (width - len(row) - left))
    return tensor(built)


def put(client: Any, batch: dict[str, Any], **more: Any) -> Any:
    return kv_first_write(
        batch, sample_ids=IDS[: len(batch["input_lengths"])], dp_client=client, partition_id="train", **more
    )


def rows_of(client: Any, name: str) -> list[Any]:
    return [row.tolist() for row in client.get_samples(IDS, "train", [name])[name].unbind()]


LEFT = {"input_ids": tensor([[0, 0, 0, 7, 8], [1, 2, 3, 4, 5]]), "input_lengths": tensor([2, 5])}
MASK = tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("sides", ["ll", "lr", "bl", "rb"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_a_mask_says_where_the_tokens_are(client, sides, dtype):
    tokens = [[7, 8], [1, 2, 3, 4]]
    batch = {
        "input_ids": padded(tokens, 6, sides, pad=9),
        "attention_mask": padded([[1] * 2, [1] * 4], 6, sides).to(dtype),
        "input_lengths": tensor([2, 4]),
        "generation_logprobs": padded(tokens, 6, sides).bfloat16(),
        "routed_experts": padded(tokens, 6, sides, pad=-1)[..., None, None].expand(2, 6, 2, 3),
        "position_ids": padded([[0, 1], [0, 1, 2, 3]], 6, sides, pad=1),
        "embedding": torch.arange(16.0).view(2, 8),
    }
    meta = put(client, batch)
    for name in ("input_ids", "generation_logprobs"):
        assert rows_of(client, name) == tokens
    assert [[cell[1][2] for cell in row] for row in rows_of(client, "routed_experts")] == tokens
    if sides != "rr":
        assert rows_of(client, "position_ids") == [[0, 1], [0, 1, 2, 3]]
    assert rows_of(client, "attention_mask") == [[1] * 2, [1] * 4]
    read = read_columns(client, meta)
    assert read["input_ids"].tolist() == [[7, 8, 0, 0], [1, 2, 3, 4]]
    assert torch.equal(read["embedding"], batch["embedding"])


def test_columns_written_later_are_cut_by_the_mask_beside_them(client):
    meta = put(client, {**LEFT, "attention_mask": MASK})
    logprobs = LEFT["input_ids"] / -10
    for named in (None, ["prev_logprobs"]):
        write_columns(client, meta, {"prev_logprobs": logprobs, "attention_mask": MASK}, token_aligned_fields=named)
        assert rows_of(client, "prev_logprobs") == [
            row[5 - n :].tolist() for row, n in zip(logprobs, (2, 5), strict=True)
        ]


def test_without_a_mask_tokens_are_not_cut_off(client):
    with pytest.raises(InvalidRequestError, match=r"row 0 of field 'input_ids' has 2 tokens by its length"):
        put(client, LEFT)
    meta = put(client, {**LEFT, "attention_mask": MASK})
    with pytest.raises(InvalidRequestError, match=r"row 0 of field 'prev_logprobs' .* Put the column 'attention_mask'"):
        write_columns(client, meta, {"prev_logprobs": LEFT["input_ids"] / -10})


@pytest.mark.parametrize(
    ("ids", "lengths", "row"),
    [
        ([[0, 0, 7, 7]], [2], 0),
        ([[1, 2, 3], [0, 7, 8]], [3, 2], 1),
        ([[9, 7, 9], [1, 2, 3]], [2, 3], 0),
        ([[9, 7, 5], [9, 8, 6], [1, 2, 3]], [2, 2, 3], 1),
    ],
    ids=["equal tokens", "one zero", "begins with the padding", "ends differ"],
)
def test_ids_whose_end_may_be_a_token_are_refused(client, ids, lengths, row):
    batch = {"input_ids": tensor(ids), "input_lengths": tensor(lengths)}
    with pytest.raises(InvalidRequestError, match=f"row {row} of field 'input_ids'"):
        kv_first_write(batch, sample_ids=["a", "b", "c"][: len(ids)], dp_client=client, partition_id="train")
    assert client.list_samples("train").size == 0


@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("place", [-1, -2, 255, 256, 300])
def test_every_place_beyond_the_tokens_is_looked_at(client, row, place):
    lengths = tensor([600, 128, 255, 200])
    ids = torch.where(torch.arange(700) < lengths[:, None], 5, 9)
    client.register_partition("train", [], None, [])
    kv_first_write(
        {"input_ids": ids, "input_lengths": lengths}, sample_ids=list("abcd"), dp_client=client, partition_id="train"
    )
    if row == 0 and place > 0:
        place += 355
    ids[row, place] = 8
    with pytest.raises(InvalidRequestError, match=f"row {row} "):
        kv_first_write(
            {"input_ids": ids, "input_lengths": lengths},
            sample_ids=list("efgh"),
            dp_client=client,
            partition_id="train",
        )


def test_right_padded_rows_may_have_any_padding(client):
    ids = tensor([[0, 7, 9, 9, 9], [0, 2, 3, 4, 9]])
    meta = put(client, {"input_ids": ids, "input_lengths": tensor([2, 4])})
    assert rows_of(client, "input_ids") == [[0, 7], [0, 2, 3, 4]]
    write_columns(client, meta, {"advantages": tensor([[0.0, 1.0, 1.0, 1.0, 1.0], [0.0, -2.0, -2.0, 3.0, -0.0]])})
    assert rows_of(client, "advantages") == [[0.0, 1.0], [0.0, -2.0, -2.0, 3.0]]


def test_what_follows_the_tokens_of_other_columns_may_be_anything_where_the_ids_are_right_padded(client):
    garbage = torch.arange(10.0).view(2, 5)
    put(
        client,
        {
            "input_ids": tensor([[7, 8, 0, 0, 0], [1, 2, 3, 0, 0]]),
            "input_lengths": tensor([2, 3]),
            "prev_logprobs": garbage,
        },
    )
    assert rows_of(client, "prev_logprobs") == [[0.0, 1.0], [5.0, 6.0, 7.0]]


def test_a_mask_may_leave_out_tokens_of_right_padded_rows(client):
    mask = tensor([[1, 0, 0, 0, 0], [0, 1, 1, 0, 0]])
    ids = tensor([[7, 8, 0, 0, 0], [1, 2, 3, 0, 0]])
    put(client, {"input_ids": ids, "input_lengths": tensor([2, 3]), "attention_mask": mask})
    assert rows_of(client, "input_ids") == [[7, 8], [1, 2, 3]]


def test_a_mask_that_contradicts_the_lengths_is_refused_with_the_row(client):
    with pytest.raises(InvalidRequestError, match=r"row 0 counts the places 3 to 4, but its length is 1\. Expected 2"):
        put(client, {**LEFT, "attention_mask": MASK, "input_lengths": tensor([1, 5])})


@pytest.mark.parametrize("mask", [torch.ones(2, 1, 5, 5), torch.full((2, 5), -torch.inf), torch.zeros(2, 0), "none"])
def test_what_is_no_mask_of_places_is_not_used_as_one(client, mask):
    batch = {**LEFT, "attention_mask": [mask] * 2 if isinstance(mask, str) else mask}
    with pytest.raises(InvalidRequestError, match="does not look like padding"):
        put(client, batch)


def test_a_column_as_wide_as_left_padded_tokens_that_is_not_padded_with_them_is_refused(client):
    batch = {**LEFT, "attention_mask": MASK, "position_ids": torch.arange(5).expand(2, 5)}
    with pytest.raises(InvalidRequestError, match="field 'position_ids' is as wide as 'input_ids', but in row 0"):
        put(client, batch)
    put(client, batch, token_aligned_fields=["input_ids", "position_ids"])
    assert rows_of(client, "position_ids") == [[3, 4], [0, 1, 2, 3, 4]]


def test_rows_without_tokens(client):
    batch = {
        "input_ids": tensor([[0, 0], [0, 5]]),
        "input_lengths": tensor([0, 1]),
        "attention_mask": tensor([[0, 0], [0, 1]]),
    }
    put(client, batch)
    assert rows_of(client, "input_ids") == [[], [5]]
