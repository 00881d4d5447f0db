"""One rule says which columns run along the tokens: reads pad these, writes cut them. Turns of logs are views."""

from dataclasses import replace

import pytest
import torch
from token_rows import form, jagged, rows_of

from dataplane_core.batch import (
    kv_first_write,
    read_columns,
    rebuild_message_logs,
    split_message_logs,
    write_columns,
)
from dataplane_core.errors import InvalidRequestError, MissingDataError
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, MULTIMODAL_FIELDS, PAD_TO_MULTIPLE

IDS = ["a", "b", "c", "d"]
LENGTHS = [3, 5, 2, 4]
PATCHES = [6, 0, 4, 4]
BOXES = [1, 0, 1, 3]
INSIDE = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
COLUMNS = {
    "input_ids": torch.arange(1, 21).view(4, 5) * INSIDE,
    "input_lengths": torch.tensor(LENGTHS),
    "per_token": jagged(LENGTHS, 2),  # rows as long as the tokens are padded with them
    "position_ids": torch.arange(5).expand(4, 5),  # written whole, since what is beyond the tokens is not zero
    "features": torch.ones(4, 2),
    "wide": torch.ones(4, 7),
    "reward": torch.ones(4),
    "pixel_values": jagged(PATCHES, 2, 3),
    "image_grid_thw": jagged([2, 0, 1, 1], 3, dtype=torch.int64),
    "boxes": jagged(BOXES, 4, dtype=torch.bfloat16),
}


@pytest.fixture
def meta(client):
    return kv_first_write(COLUMNS, sample_ids=IDS, dp_client=client, partition_id="train")


# --- reads ------------------------------------------------------------------------------------------------------------

WIDE_8 = {
    "input_ids": (4, 8),
    "per_token": (4, 8, 2),
    "position_ids": (4, 8),
    "features": (4, 2),
    "reward": (4,),
    "pixel_values": PATCHES,
    "image_grid_thw": [2, 0, 1, 1],
    "boxes": BOXES,
}
BARE = {"task_name": None, "sequence_lengths": None, "tags": None}
KNOWN = {"extra_info": {GLOBAL_FORWARD_PAD_SEQLEN: 8}}
BY_4 = {**BARE, "extra_info": {PAD_TO_MULTIPLE: 4}}
TO_8 = {"pad_to_seqlen": 8}
KEPT = {"ragged_fields": {*MULTIMODAL_FIELDS, "wide", "per_token"}}


def only(*names, **more):
    return {"select_fields": list(names), **more}


#: What another meta says, arguments of the read, and the form of columns.
READS = {
    "as the meta says": (KNOWN, {}, WIDE_8 | {"wide": (4, 8)}),
    "an argument goes before the meta": (KNOWN, {"pad_to_seqlen": 9}, {"input_ids": (4, 9)}),
    "none too": (KNOWN, {"pad_to_seqlen": 0}, {"input_ids": (4, 5)}),
    "kept as they are": (KNOWN, KEPT, WIDE_8 | {"wide": (4, 7), "per_token": LENGTHS}),
    "named ones": ({}, TO_8 | {"token_aligned_fields": ["features"]}, {"features": (4, 8), "input_ids": LENGTHS}),
    "jagged": (KNOWN, {"layout": "jagged"}, {"input_ids": LENGTHS, "position_ids": (4, 5), "boxes": BOXES}),
    "in order": (KNOWN, only("boxes", "input_ids", "reward"), {"boxes": BOXES, "input_ids": (4, 8), "reward": (4,)}),
    **{
        f"{least} to {multiple}": (
            {"extra_info": {PAD_TO_MULTIPLE: multiple}},
            {"pad_to_seqlen": least},
            {"input_ids": form},
        )
        for least, multiple, form in [
            *((None, 4, (4, 8)), (12, 4, (4, 12)), (12, 8, (4, 16))),
            *((4, 3, (4, 6)), (None, 1, (4, 5)), (None, 2, (4, 6)), (1, 5, (4, 5))),
        ]
    },
    # without lengths in the meta
    "by lengths": (BARE, TO_8 | only("boxes", "per_token", "input_lengths"), {"boxes": BOXES, "per_token": (4, 8, 2)}),
    "by ids": (BARE, TO_8 | only("boxes", "per_token", "input_ids"), {"boxes": BOXES, "per_token": (4, 8, 2)}),
    "by nothing": (BARE, TO_8 | only("boxes", "pixel_values"), {"boxes": (4, 8, 4), "pixel_values": PATCHES}),
    "without a token": (BARE | {"sample_ids": ["b"]}, only("boxes"), {"boxes": (1, 0, 4)}),
    "rounded": (BY_4, only("input_ids", "pixel_values", "features"), {"input_ids": (4, 8), "features": (4, 2)}),
    "rounded, rows of equal length": (BY_4 | {"sample_ids": ["b"]}, only("input_ids"), {"input_ids": (1, 8)}),
    "rounded beside longer ones": (
        BY_4 | {"sample_ids": ["a", "c"]},
        only("input_ids", "pixel_values"),
        {"input_ids": (2, 4), "pixel_values": [6, 4]},
    ),
    "rounded where named": (BY_4, only("features", token_aligned_fields=["features"]), {"features": (4, 4)}),
}


@pytest.mark.parametrize("case", READS)
def test_token_columns_have_one_width_and_all_others_come_back_as_they_went(client, meta, case):
    changes, arguments, expected = READS[case]
    read = read_columns(client, replace(meta, **changes), **arguments)
    assert {name: form(read[name]) for name in expected} == expected
    if case == "in order":
        assert list(read) == list(expected)


def test_a_column_that_is_as_long_as_the_tokens_by_chance_is_kept_where_it_is_named(client, meta):
    write_columns(client, meta, {"pixel_values": jagged(LENGTHS, 2, 3), "boxes": jagged(LENGTHS, 4).bfloat16()})
    names = ["pixel_values", "boxes"]
    read = read_columns(client, meta, names, pad_to_seqlen=8)
    assert [form(read[name]) for name in names] == [LENGTHS, (4, 8, 4)], "one has a name of the shared vocabulary"
    read = read_columns(client, meta, names, pad_to_seqlen=8, ragged_fields=["boxes"])
    assert [form(read[name]) for name in names] == [(4, 8, 2, 3), LENGTHS]


def test_reads_that_cannot_be_are_refused(client, meta):
    for changes, arguments, error, named in (
        ({"fields": None}, {}, InvalidRequestError, r"neither select_fields nor meta\.fields"),
        ({}, {"select_fields": ["input_ids", "routed_experts"]}, MissingDataError, "routed_experts"),
        (BARE | {"sample_ids": ["z"]}, {"select_fields": ["input_ids"]}, KeyError, "'z'"),
        ({}, {"pad_to_seqlen": -1}, InvalidRequestError, "pad_to_seqlen must be .*-1"),
        ({"extra_info": {PAD_TO_MULTIPLE: -2}}, {}, InvalidRequestError, "pad_to_multiple must be .*-2"),
    ):
        with pytest.raises(error, match=named):
            read_columns(client, replace(meta, **changes), **arguments)


# --- writes -----------------------------------------------------------------------------------------------------------


def test_declared_columns_are_cut_by_the_lengths_of_the_meta(client, meta):
    logprobs = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))  # wider than the longest row
    embedding = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    fields = {"prev_logprobs": logprobs, "embedding": embedding, "note": ["x", None, [1], 2]}
    written = write_columns(client, meta, fields, token_aligned_fields=["prev_logprobs", "advantages"])
    assert written.fields == [*meta.fields, "prev_logprobs", "embedding", "note"]
    assert written.sequence_lengths == LENGTHS
    td = client.get_samples(IDS, "train", list(fields))
    assert rows_of(td.get("prev_logprobs")) == [row[:n].tolist() for row, n in zip(logprobs, LENGTHS, strict=True)]
    assert torch.equal(td["embedding"], embedding)
    assert td["note"] == ["x", None, [1], 2]
    assert write_columns(client, meta, {}) == meta


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("named", [None, ["advantages", "prev_logprobs"]], ids=["by default", "declared"])
def test_a_value_per_sample_passes_under_the_name_of_a_token_column(client, meta, shape, named):
    for where in (meta, replace(meta, **BARE)):
        column = torch.arange(4.0).reshape(shape) + where.size
        write_columns(client, where, {"advantages": column}, token_aligned_fields=named)
        assert torch.equal(read_columns(client, meta, ["advantages"])["advantages"], column)


def test_columns_that_do_not_fit_are_refused_with_call_and_field(client, meta):
    for changes, shape, named in (
        (BARE, (4, 5), "name 'x', but the meta has no sequence_lengths"),
        ({}, (4, 4), r"write_columns\('train', 4 samples\) refused: field 'x'.*length 5"),
        ({}, (2, 5), "field 'x' has 2 rows. Expected 4"),
    ):
        with pytest.raises(InvalidRequestError, match=named):
            write_columns(client, replace(meta, **changes), {"x": torch.ones(shape)}, token_aligned_fields=["x"])


# --- message logs -----------------------------------------------------------------------------------------------------

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
TOKENS = [6, 5, 0]


def plain(logs):
    """Roles, contents and tokens as plain lists."""
    return [
        [(turn["role"], turn["content"], torch.as_tensor(turn["token_ids"]).tolist()) for turn in log] for log in logs
    ]


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
    batch = {
        "input_ids": INPUT_IDS,
        "input_lengths": torch.tensor(TOKENS),
        "generation_logprobs": -INPUT_IDS.float(),
    }
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
