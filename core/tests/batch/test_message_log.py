"""Message logs travel as lengths, roles and contents of turns; their tokens are views into ``input_ids``."""

from __future__ import annotations

import pytest
import torch

from dataplane_core import pack_jagged_fields
from dataplane_core.batch import kv_first_write, read_columns, rebuild_message_logs, split_message_logs

LOGS = [
    [
        {"role": "system", "content": "be brief", "token_ids": torch.tensor([1, 2])},
        {"role": "user", "content": "2+2?", "token_ids": torch.tensor([3, 4, 5])},
        {"role": "assistant", "content": "4", "token_ids": torch.tensor([6]), "generation_logprobs": torch.ones(1)},
    ],
    [
        {"role": "user", "content": [{"type": "text", "text": "look"}], "token_ids": [7, 8]},
        {"role": "assistant", "content": "call", "token_ids": torch.tensor([9])},
        {"role": "tool", "content": "", "token_ids": torch.tensor([], dtype=torch.int64)},
        {"role": "assistant", "content": "done", "token_ids": torch.tensor([10, 11])},
    ],
    [],
]
INPUT_IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 0], [0, 0, 0, 0, 0, 0]])
LENGTHS = [6, 5, 0]


def to_nested_by_length(padded, lengths):
    return pack_jagged_fields({"x": padded}, lengths=lengths, token_aligned_fields=["x"])["x"]


def plain(logs):
    """Roles, contents and tokens as plain lists."""
    return [
        [(turn["role"], turn["content"], torch.as_tensor(turn["token_ids"]).tolist()) for turn in log] for log in logs
    ]


def test_a_log_is_split_into_columns_of_turns():
    columns = split_message_logs(LOGS)
    assert list(columns) == ["turn_lengths", "turn_roles", "turn_contents", "response_token_lengths"]
    assert columns["turn_lengths"] == [[2, 3, 1], [2, 1, 0, 2], []]
    assert columns["turn_roles"] == [["system", "user", "assistant"], ["user", "assistant", "tool", "assistant"], []]
    assert columns["turn_contents"][1] == [[{"type": "text", "text": "look"}], "call", "", "done"]
    assert columns["response_token_lengths"].tolist() == [1, 1, 0]  # of the assistant's first turn
    assert columns["response_token_lengths"].dtype == torch.int64


@pytest.mark.parametrize("jagged", [False, True], ids=["padded", "jagged"])
def test_tokens_are_views_into_input_ids(jagged):
    ids = to_nested_by_length(INPUT_IDS, LENGTHS) if jagged else INPUT_IDS.clone()
    logs = rebuild_message_logs({"input_ids": ids, **split_message_logs(LOGS)})
    assert plain(logs) == plain(LOGS)
    logs[1][3]["token_ids"][0] = 99
    assert (ids.values() if jagged else ids.flatten()).tolist().count(99) == 1


def test_turn_lengths_may_be_a_tensor_padded_or_not():
    columns = {"input_ids": INPUT_IDS, **split_message_logs(LOGS)}
    columns["turn_lengths"] = torch.tensor([[2, 3, 1, 0, 0], [2, 1, 0, 2, 0], [0] * 5])
    assert plain(rebuild_message_logs(columns)) == plain(LOGS)
    columns["turn_lengths"] = to_nested_by_length(columns["turn_lengths"], [3, 4, 0])
    assert plain(rebuild_message_logs(columns)) == plain(LOGS)


def test_a_turn_may_lack_content_and_tokens(client):
    log = [
        {"role": "assistant"},
        {"role": "user", "content": "hi", "token_ids": None},
        {"role": "assistant", "token_ids": torch.tensor([5, 6])},
    ]
    columns = split_message_logs([log])
    assert columns["turn_lengths"] == [[0, 0, 2]]
    assert columns["turn_contents"].tolist() == [["", "hi", ""]]
    assert columns["response_token_lengths"].tolist() == [2], "the first response that has tokens"
    (rebuilt,) = rebuild_message_logs({"input_ids": torch.tensor([[5, 6]]), **columns})
    assert [turn["token_ids"].tolist() for turn in rebuilt] == [[], [], [5, 6]]


@pytest.mark.parametrize("layout", ["padded", "jagged"])
def test_a_log_comes_back_through_the_data_plane_and_a_read_rebuilds_it_where_asked(client, layout):
    batch = {"input_ids": INPUT_IDS, "input_lengths": torch.tensor(LENGTHS), "generation_logprobs": -INPUT_IDS.float()}
    meta = kv_first_write(
        {**batch, **split_message_logs(LOGS)}, sample_ids=["a", "b", "c"], dp_client=client, partition_id="train"
    )
    read = read_columns(client, meta, layout=layout)
    assert "message_log" not in read
    assert plain(rebuild_message_logs(read)) == plain(LOGS)
    assert plain(rebuild_message_logs(read_columns(client, meta.subset([1]), pad_to_seqlen=64))) == plain(LOGS[1:2])
    read = read_columns(client, meta, ["generation_logprobs"], layout=layout, message_logs=True)
    assert plain(read["message_log"]) == plain(LOGS)
    assert read["message_log"][1][3]["generation_logprobs"].tolist() == [-10, -11]
    read["message_log"][0][0]["token_ids"][0] = 99
    ids = read["input_ids"]
    assert (ids.values() if layout == "jagged" else ids.flatten()).tolist().count(99) == 1, "views"
    assert read_columns(client, meta.subset([]), message_logs=True) == {}
