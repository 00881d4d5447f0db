"""`dataplane export` and `import`: rows come back bit for bit, none is lost or doubled, and damage is noticed.

One long file, since what follows a store and what puts a folder back are tested on the same stores and folders.
"""

import argparse
import gc
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import dataset, parquet
from tensordict import NonTensorStack

from dataplane_core import connect
from dataplane_core.batch import split_message_logs, stack_or_nest
from dataplane_core.codec import object_column
from dataplane_core.errors import (
    BackendUnavailableError,
    CorruptDataError,
    InvalidRequestError,
    InvalidTypeError,
    MissingDataError,
    SaveError,
    SchemaMismatchError,
    StalePartitionError,
    UnknownPartitionError,
    UnsupportedOperationError,
)
from dataplane_core.spec import AnnounceRequest
from dataplane_testkit import backend_of
from dataplane_testkit._timing import STARTS_S, eventually
from dataplane_tools import (
    _columns,
    _follow as follow_module,
    _portions as portions_module,
    _shards as shards_module,
    commands,
    export_partition,
    follow_partition,
    import_folder,
)


def command(of, *arguments):
    parser = argparse.ArgumentParser()
    run = of(parser)
    return run(parser.parse_args([str(each) for each in arguments]))


@pytest.fixture
def client():
    with connect({"backend": "noop"}) as client:
        yield client


@pytest.fixture
def other():
    """A second store."""
    with connect({"backend": "noop"}) as client:
        yield client


def rows(folder):
    """The rows of all shards, in order."""
    paths = sorted(Path(folder).glob("*.parquet"))
    return [row for path in paths for row in parquet.read_table(path).to_pylist()]


def chats(folder):
    """The messages of all rows."""
    return [[json.loads(message) for message in row["messages"]] for row in rows(folder)]


def plain(cell):
    """A cell as values that are equal where dtype, shape and bytes are."""
    if isinstance(cell, torch.Tensor):
        data = cell.contiguous().reshape(-1).view(torch.uint8) if cell.numel() else torch.empty(0)
        return str(cell.dtype), tuple(cell.shape), data.tolist()
    if isinstance(cell, dict):
        return {name: plain(each) for name, each in cell.items()}
    return [plain(each) for each in cell] if isinstance(cell, list) else (type(cell), repr(cell))


def content(client, partition_id):
    """All that a partition holds, in order: ids, tags and cells."""
    listed = client.list_samples(partition_id)
    held = []
    for sample_id, tags, names in zip(
        listed.sample_ids, listed.tags, client.list_fields(listed.sample_ids, partition_id), strict=True
    ):
        columns = client.get_samples([sample_id], partition_id, names) if names else {}
        cells = {}
        for name in sorted(names):
            column = columns[name]
            cells[name] = plain(column[0] if isinstance(column, torch.Tensor) else column.tolist()[0])
        held.append((sample_id, plain(tags), cells))
    return held


def copied(client, other, folder, **options):
    """Exports ``p``, imports it elsewhere, and returns what both hold."""
    export_partition(client, "p", folder, **options)
    import_folder(folder, other)
    return content(client, "p"), content(other, "p")


# --- bit for bit ------------------------------------------------------------------------------------------------------

BITS32 = torch.tensor([0x7FC00001, 0x7F800001, -1, -(2**31), 0, 1], dtype=torch.int32)
EIGHT_BITS = torch.arange(256, dtype=torch.uint8)
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]

#: Columns of 6 rows.
COLUMNS = {
    "float32": BITS32.view(torch.float32),
    "float64": torch.tensor([0.1, float("nan"), float("inf"), -0.0, 5e-324, 1.0], dtype=torch.float64),
    "float16": torch.arange(-3, 3).to(torch.int16).view(torch.float16),
    "bfloat16 every value": torch.arange(-32766, 32766).to(torch.int16).view(6, -1).view(torch.bfloat16),
    **{str(kind): EIGHT_BITS.view(kind).expand(6, 256) for kind in FLOAT8},
    "complex64": torch.view_as_complex(torch.stack((BITS32, BITS32.flip(0)), 1).view(torch.float32)),
    "complex128 jagged": [torch.randn(length, dtype=torch.complex128) for length in (0, 3, 1, 0, 2, 4)],
    "bool": torch.tensor([True, False, True, True, False, False]),
    "int64 that is narrow": torch.arange(6 * 4096).view(6, 4096) % 7 - 3,
    **{str(kind): torch.full((6, 1), torch.iinfo(kind).max, dtype=kind) for kind in (torch.uint16, torch.uint64)},
    "jagged with empty rows": [torch.arange(length) for length in (3, 0, 1, 0, 7, 0)],
    "jagged bfloat16": [torch.randn(length).bfloat16() for length in (3, 0, 1, 0, 7, 2)],
    "all rows empty": torch.zeros(6, 0, dtype=torch.int16),
    "routed experts": [torch.randint(0, 60, (length, 3, 2), dtype=torch.int16) for length in (4, 0, 2, 1, 9, 3)],
    "no elements": torch.zeros(6, 2, 0, 3),
    "images": torch.randint(0, 255, (6, 3, 5, 4), dtype=torch.uint8),
    "lists": [[1, 2], [], [3], [4], [5], []],
    "ints of a list": [1, 2, 3, 4, 5, 6],
    "empty lists": [[], [], [], [], [], []],
    "strings": ["a", "", "\N{GRINNING FACE}", "x" * 100, "null", "é"],
    "strings and None": NonTensorStack("a", None, "null", "", None, "b"),
    "broken strings": NonTensorStack("a", "\ud800", "b", "c", None, "d"),
    "bytes": NonTensorStack(b"", b"\x00\xff", b"PNG", b"a", None, b"b"),
    "only None": NonTensorStack(*[None] * 6),
    "objects": NonTensorStack(
        {"a": [1, 2.0, None, True], "~bytes": "x", "~": {}},
        [b"\x00", {"deep": [torch.arange(3).bfloat16(), b"z"]}],
        float("nan"),
        -(2**63),
        torch.tensor(1.5),
        {"~tensor": {"~~x": "1"}},
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_comes_back_bit_for_bit(client, other, tmp_path, name):
    client.register_partition("p", [name], 6, [])
    ids = [f"s{number}" for number in (3, 1, 2, 0, 5, 4)]
    tags = [
        {"weight_version": 1, "x": float("nan")},
        {},
        {"x": 1},
        {"x": None},
        {"ok": True, "x": "s"},
        {"é": -(2**63)},
    ]
    client.put_samples(ids, "p", {name: COLUMNS[name]}, tags=tags)
    before, after = copied(client, other, tmp_path / "out")
    assert after == before
    assert other.describe("p").specs == client.describe("p").specs


def test_all_columns_at_once_over_many_shards_and_with_missing_fields(client, other, tmp_path, monkeypatch):
    monkeypatch.setattr(portions_module, "_FIRST_ROWS", 4)
    monkeypatch.setattr(portions_module, "_MOST_ROWS", 4)
    client.register_partition("p", ["float32"], None, ["trainer"], 2, {"strings": ["a", "b"]})
    names = [name for name in COLUMNS if name != "strings"]
    for number in range(6):
        ids = [f"p{number}_g{member}" for member in (1, 0)]
        columns = {name: COLUMNS[name][:2] for number_of, name in enumerate(names) if (number + number_of) % 3}
        columns["float32"] = torch.randn(2)
        columns |= {name: NonTensorStack(*["a", "b"]) for name in ("strings",) if number > 2}
        client.put_samples(ids, "p", columns, tags=[{"weight_version": number}] * 2)
    before, after = copied(client, other, tmp_path / "out", shard_bytes=5_000)
    assert after == before
    assert len(list((tmp_path / "out").glob("*.parquet"))) > 2
    info, found = client.describe("p").info, other.describe("p").info
    assert (found.fields, found.grpo_group_size, found.enums) == (info.fields, 2, {"strings": ("a", "b")})
    assert found.consumer_tasks == ("trainer",)


def test_an_empty_partition_and_one_of_tags_alone(client, other, tmp_path):
    client.register_partition("p", [], None, [])
    assert export_partition(client, "p", tmp_path / "none").num_rows == 0
    assert import_folder(tmp_path / "none", other, "none").num_rows == 0
    client.put_samples(["a", "b"], "p", tags=[{"x": 1}, {"y": "z"}])
    before, after = copied(client, other, tmp_path / "out")
    assert after == before


@pytest.mark.parametrize("item", [{1, 2}, {1: "a"}, (1, 2), {"a": [(1,)]}, [{"a": {None: 1}}]], ids=repr)
def test_items_that_only_pickle_can_keep_are_refused(tmp_path, item):
    with connect({"backend": "noop", "allow_pickle": True}) as client:
        client.register_partition("p", ["x"], None, [])
        client.put_samples(["a"], "p", {"x": object_column([item])})
        with pytest.raises(InvalidTypeError, match="field 'x' holds an item that only pickle can keep"):
            export_partition(client, "p", tmp_path / "out")


# --- what is in the folder --------------------------------------------------------------------------------------------


@pytest.fixture
def written(client):
    """A store with ``p``: 4 of 5 rows are finished."""
    client.register_partition("p", ["tokens", "reward"], 5, ["train"])
    columns = {"tokens": [[1, 2, 3], [4], [], [5, 6], [7]], "reward": torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])}
    ids = ["a", "b", "c", "d", "e"]
    tags = [{"weight_version": 7 + number, "reward": "good", "kind": number or "odd"} for number in range(5)]
    client.put_samples(ids, "p", {"tokens": columns["tokens"]}, tags=tags)
    client.put_samples(ids[:4], "p", {"reward": columns["reward"][:4].bfloat16()})
    return client


def test_columns_tags_and_what_was_left_out(written, tmp_path):
    done = export_partition(written, "p", tmp_path / "out")
    assert (done.num_rows, done.num_shards, dict(done.lacking), done.num_gone) == (4, 1, {"reward": 1}, 0)
    schema = parquet.read_schema(tmp_path / "out" / "part-00000.parquet")
    assert schema.names == [
        "sample_id",
        "tags",
        "tokens",
        "reward",
        "weight_version",
        "reward_",
    ]  # kind has no one type
    assert schema.field("tokens").type == pa.large_list(pa.field("element", pa.int64()))
    assert (schema.field("reward").type, schema.field("weight_version").type) == (pa.float32(), pa.int64())
    assert json.loads(schema.metadata[b"dataplane"])["version"] == 2
    first, *_, last = rows(tmp_path / "out")
    assert first == {
        "sample_id": "a",
        "tags": '{"weight_version":7,"reward":"good","kind":"odd"}',
        "tokens": [1, 2, 3],
        "reward": 0.0,
        "weight_version": 7,
        "reward_": "good",
    }
    assert (last["sample_id"], last["reward"]) == ("d", 0.75)


def test_where_fields_and_partial(written, tmp_path):
    export_partition(written, "p", tmp_path / "a", where="reward >= 0.5 or weight_version == 7", fields=["tokens"])
    # the tag reward is "good", and goes before the field
    assert [row["sample_id"] for row in rows(tmp_path / "a")] == ["a"]
    assert set(rows(tmp_path / "a")[0]) == {"sample_id", "tags", "tokens", "weight_version", "reward", "kind"}
    export_partition(written, "p", tmp_path / "b", partial=True)
    assert [row["reward"] for row in rows(tmp_path / "b")] == [0.0, 0.25, 0.5, 0.75, None]
    for options, said in [
        ({"fields": ["rewrad"]}, "no field 'rewrad'. It has: 'tokens', 'reward'"),
        ({"where": "rewrad > 1"}, "rewrad"),
        ({"where": "reward >"}, "refused"),
        ({"shard_bytes": "many"}, "size of a shard is 'many'"),
        ({"shard_bytes": 0}, "must be above 0"),
    ]:
        with pytest.raises(InvalidRequestError, match=said):
            export_partition(written, "p", tmp_path / "c", **options)
    with pytest.raises(UnknownPartitionError):
        export_partition(written, "q", tmp_path / "c")


def test_it_takes_nothing_from_a_task(written, tmp_path):
    written.claim_meta("p", "train", ["tokens"], 2, lease_s=60.0)

    def seen():
        found = written.describe("p")
        counts = [(task.num_ready, task.num_leased, task.num_consumed) for task in found.tasks.values()]
        return found.info, counts, found.num_samples

    before = seen()
    export_partition(written, "p", tmp_path / "out")
    assert seen() == before


def test_names_of_columns_that_are_taken(client, other, tmp_path):
    client.register_partition("p", ["sample_id", "tags", "sample_id_"], None, [])
    columns = {"sample_id": torch.ones(1), "tags": NonTensorStack(None), "sample_id_": ["x"]}
    client.put_samples(["a"], "p", columns, tags=[{"tags": 1, "sample_id": 2, "messages": 3}])
    before, after = copied(client, other, tmp_path / "out")
    assert after == before
    assert rows(tmp_path / "out")[0]["sample_id"] == "a"


def test_bytes_stay_bytes_where_the_first_rows_have_none(client, other, tmp_path, monkeypatch):
    monkeypatch.setattr(portions_module, "_FIRST_ROWS", 1)
    client.register_partition("p", ["x"], None, [])
    client.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
    client.put_samples(["c", "d"], "p", {"x": torch.ones(2), "image": NonTensorStack(b"\x89PNG", b"")})
    before, after = copied(client, other, tmp_path / "out")
    assert after == before
    schemas = [parquet.read_schema(path) for path in (tmp_path / "out").glob("*.parquet")]
    assert {schema.field("image").type for schema in schemas} == {pa.large_binary()}


def test_rows_that_are_cleared_meanwhile_are_left_out(written, tmp_path, monkeypatch):
    read, cleared = written.list_fields, []

    def clears_first(*arguments):
        if not cleared:
            cleared.append(written.clear_samples(["b"], "p"))
        return read(*arguments)

    monkeypatch.setattr(written, "list_fields", clears_first)
    done = export_partition(written, "p", tmp_path / "out", fields=["tokens"])
    assert done.num_gone == 1
    assert [row["sample_id"] for row in rows(tmp_path / "out")] == ["a", "c", "d", "e"]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`datasets.load_dataset` of Parquet, without a network."""
    import datasets  # here: the other tests need not wait for it

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread stays
    return partial(datasets.load_dataset, "parquet", cache_dir=str(tmp_path / "cache"), split="train")


def test_datasets_loads_a_folder(client, tmp_path, monkeypatch, load):
    monkeypatch.setattr(portions_module, "_FIRST_ROWS", 4)
    client.register_partition("p", ["tokens"], None, [])
    for number in range(4):
        ids = [f"{number}_{row}" for row in range(4)]
        columns = {
            "tokens": stack_or_nest([torch.arange(length) for length in range(4)]),
            "logprobs": stack_or_nest([torch.randn(length).bfloat16() for length in range(4)]),
            "experts": torch.zeros(4, 3, 2, 2, dtype=torch.int16),
            "info": [{"a": [number]}, {}, {"b": "x"}, {"a": None}],
            "name": ["a", "b", "c", "d"],
        }
        client.put_samples(ids, "p", columns, tags=[{"weight_version": number}] * 4)
    done = export_partition(client, "p", tmp_path / "out", shard_bytes=100)
    assert done.num_shards > 1
    for source in ({"data_files": f"{tmp_path}/out/*.parquet"}, {"data_dir": f"{tmp_path}/out"}):
        loaded = load(**source)
        assert loaded.num_rows == 16
        row = loaded.filter(lambda row: row["weight_version"] == 2)[2]
        assert (row["sample_id"], row["tokens"], row["name"]) == ("2_2", [0, 1], "c")
        assert json.loads(row["info"]) == {"b": "x"}


def test_a_folder_whose_columns_came_later_loads(client, other, tmp_path, load):
    client.register_partition("p", ["x"], None, [])
    numbers, empty = torch.ones(1), [[]]
    shards = [
        ({"x": [[1, 2]], "later": empty}, {"late": "tag"}),
        ({"x": [[3]], "later": [[4]]}, {"late": "tag"}),
        ({"x": [[1.5]], "late": numbers, "later": [[1, 2]], "name": ["a"]}, {}),
    ]
    for number, (columns, tags) in enumerate(shards):
        client.put_samples([f"s{number}"], "p", columns, tags=[tags])
        follow_partition(client, "p", tmp_path / "out", idle_s=0.0)
        assert (tmp_path / "out" / "columns.parquet").exists() == (number == 2)  # an empty list has a type of its own
    expected = [
        {"x": [1.0, 2.0], "late": "tag", "late_": None, "later": [], "name": None},
        {"x": [3.0], "late": "tag", "late_": None, "later": [4], "name": None},
        {"x": [1.5], "late": None, "late_": 1.0, "later": [1, 2], "name": "a"},
    ]
    for number, source in enumerate(({"data_dir": f"{tmp_path}/out"}, {"data_files": f"{tmp_path}/out/*.parquet"})):
        loaded = load(**source, streaming=bool(number)).remove_columns(["sample_id", "tags"])
        assert list(loaded) == expected
    table = dataset.dataset(tmp_path / "out").to_table()  # pyarrow's
    assert [{name: row[name] for name in expected[0]} for row in table.to_pylist()] == expected
    import_folder(tmp_path / "out", other)
    assert content(other, "p") == content(client, "p")


def test_an_export_that_starts_over_has_no_former_columns(written, tmp_path):
    export_partition(written, "p", tmp_path / "out")
    changed(tmp_path / "out" / ".export.json", closed=False)
    (tmp_path / "out" / "columns.parquet").write_bytes(b"former")
    assert export_partition(written, "p", tmp_path / "out").num_rows == 4
    assert len(rows(tmp_path / "out")) == 4


# --- messages ---------------------------------------------------------------------------------------------------------


def tokenizer_of(ids):
    return bytes(ids).decode()


def test_messages_of_kept_turns_of_lists_and_of_tokens(client, tmp_path, monkeypatch):
    logs = [
        [
            {"role": "user", "content": "2+2?", "token_ids": torch.tensor([1, 2])},
            {"role": "assistant", "content": "4", "token_ids": torch.tensor([3])},
        ]
    ]
    client.register_partition("turns", ["turn_contents"], None, [])
    client.put_samples(["a"], "turns", split_message_logs(logs), tags=[{"weight_version": 1}])
    export_partition(client, "turns", tmp_path / "turns", messages=True)
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    (row,) = rows(tmp_path / "turns")
    assert (row["sample_id"], row["weight_version"], chats(tmp_path / "turns")) == ("a", 1, [chat])

    client.register_partition("lists", ["chat", "reward"], None, [])
    client.put_samples(["a"], "lists", {"chat": NonTensorStack(chat), "reward": torch.ones(1)})
    export_partition(client, "lists", tmp_path / "lists", messages=True)
    (row,) = rows(tmp_path / "lists")
    assert (row["reward"], list(row), chats(tmp_path / "lists")) == (
        1.0,
        ["sample_id", "tags", "messages", "reward"],
        [chat],
    )

    client.register_partition("tokens", ["input_ids", "token_mask"], None, [])
    client.put_samples(["a"], "tokens", {"input_ids": [list(b"2+2?4")], "token_mask": [[0, 0, 0, 0, 1]]})
    with pytest.raises(InvalidRequestError, match=r"no kept turns .* and no --tokenizer was named"):
        export_partition(client, "tokens", tmp_path / "tokens", messages=True)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    export_partition(client, "tokens", tmp_path / "tokens", messages=True, tokenizer="test_export:tokenizer_of")
    assert chats(tmp_path / "tokens") == [chat]
    with pytest.raises(UnsupportedOperationError, match="has messages instead of fields"):
        import_folder(tmp_path / "tokens", client)
    client.put_samples(["b"], "tokens", {"input_ids": [[50]], "token_mask": [[0]]})
    client.register_partition("text", ["input_ids"], None, [])
    client.put_samples(["a"], "text", {"input_ids": [[50]]})
    with pytest.raises(InvalidRequestError, match=r"no kept turns .* and no mask"):
        export_partition(client, "text", tmp_path / "text", messages=True, tokenizer="test_export:tokenizer_of")


USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
TOKENS = {"input_ids": [list(b"2+2?4")], "token_mask": [[0, 0, 0, 0, 1]]}


@pytest.mark.parametrize(
    ("columns", "chat"),
    [
        ({"prompt": [[USER]], "completion": [[ASSISTANT]]}, [USER, ASSISTANT]),
        ({"completion": [[ASSISTANT]], "prompt": [[USER, ASSISTANT, USER]]}, [USER, ASSISTANT, USER, ASSISTANT]),
        ({"raw_prompt": [[USER]], "chat": [[USER, ASSISTANT]]}, [USER, ASSISTANT]),
        ({"raw_prompt": [[USER]], **TOKENS}, [USER, ASSISTANT]),
        ({"prompt": [[USER, ASSISTANT, USER]], **TOKENS}, [USER, ASSISTANT]),
        ({"turn_roles": [["user"]], "turn_contents": [["2+2?"]], **TOKENS}, [USER, ASSISTANT]),
        ({"turn_roles": [["user"]], "turn_lengths": [[4]], **TOKENS}, [USER, ASSISTANT]),
        ({"raw_prompt": [[USER]]}, None),
        ({"prompt": [[USER, ASSISTANT, USER]]}, None),
        ({"raw_prompt": [[USER]], "input_ids": [[50]]}, None),
    ],
)
def test_no_chat_lacks_its_answer(client, tmp_path, monkeypatch, columns, chat):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    columns = {
        name: cells if isinstance(cells[0][0], int) else NonTensorStack(*cells) for name, cells in columns.items()
    }
    client.register_partition("p", list(columns), None, [])
    client.put_samples(["a"], "p", columns)
    options = {"messages": True, "tokenizer": "test_export:tokenizer_of"}
    if chat:
        export_partition(client, "p", tmp_path / "out", **options)
        assert chats(tmp_path / "out") == [chat]
    else:
        with pytest.raises(InvalidRequestError, match=r"none of 1 rows is a chat. The first one has no kept turns"):
            export_partition(client, "p", tmp_path / "out", **options)


def called(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ASKS = {"role": "assistant", "content": "", "tool_calls": [called("add", a=2, b=2), called("now", zone={"utc": True})]}
TOLD = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "c1"}
CALLS = [USER, ASKS, TOLD, ASSISTANT]


@pytest.mark.parametrize(
    "calls",
    [
        ASKS["tool_calls"],
        [each["function"] for each in ASKS["tool_calls"]],
        [
            {
                "type": "function",
                "function": {**each["function"], "arguments": json.dumps(each["function"]["arguments"])},
            }
            for each in ASKS["tool_calls"]
        ],
    ],
    ids=["as templates take them", "flat", "arguments as text"],
)
@pytest.mark.parametrize("kept", ["turns", "list"])
def test_chats_keep_their_tool_calls_and_load(client, tmp_path, monkeypatch, load, kept, calls):
    monkeypatch.setattr(portions_module, "_FIRST_ROWS", 1)
    asks = {"role": "assistant", "content": None, "tool_calls": calls, "token_ids": torch.tensor([1])}
    logs = [[USER, ASSISTANT], [USER, asks, TOLD, ASSISTANT], [USER, {**asks, "tool_calls": None, "content": "4"}]]
    tools = [None, [{"type": "function", "function": {"name": "add", "parameters": {}}}], [{"name": "now"}]]
    if kept == "turns":
        whole = [[{"role": turn["role"], "content": turn} for turn in log] for log in logs]
        columns = split_message_logs(whole)
    else:
        columns = {"chat": object_column(logs)}
    client.register_partition("p", list(columns), None, [])
    client.put_samples(["a", "b", "c"], "p", {**columns, "tools": NonTensorStack(*tools)})
    export_partition(client, "p", tmp_path / "out", messages=True, shard_bytes=1)
    loaded = load(data_dir=str(tmp_path / "out"))
    assert list(loaded["messages"]) == [[USER, ASSISTANT], CALLS, [USER, ASSISTANT]]
    assert [json.loads(each or "null") for each in loaded["tools"]] == tools


def test_a_chat_may_end_with_a_tool_call_that_has_a_name(client, tmp_path):
    client.register_partition("p", ["chat"], None, [])
    client.put_samples(["a"], "p", {"chat": object_column([[USER, {**ASKS, "tool_calls": called("add")}]])})
    export_partition(client, "p", tmp_path / "out", messages=True)
    assert chats(tmp_path / "out") == [[USER, {**ASKS, "tool_calls": [called("add")]}]]
    client.put_samples(["b"], "p", {"chat": object_column([[USER, {**ASKS, "tool_calls": [{"arguments": {}}]}]])})
    client.put_samples(["c"], "p", {"chat": object_column([[USER]])})
    for export in (export_partition, partial(follow_partition, idle_s=0.0)):
        done = export(client, "p", tmp_path / type(export).__name__, messages=True)
        assert (done.num_rows, done.num_left) == (1, 0)
        lacks = "no kept turns with one of the role 'assistant'"
        assert done.no_chat == {"a tool call without a name": 1, lacks: 1}
    client.clear_samples(["a"], "p")
    for number, export in enumerate((export_partition, partial(follow_partition, idle_s=0.0))):
        with pytest.raises(
            InvalidRequestError, match=r"none of 2 rows is a chat. The first one has a tool call without"
        ):
            export(client, "p", tmp_path / f"none-{number}", messages=True)


def test_contents_in_parts_and_numbers_that_json_lacks(client, tmp_path):
    text, image = {"type": "text", "text": "2+2?"}, {"type": "image"}
    asks = {**ASKS, "tool_calls": [{"name": "add", "arguments": '{"a": NaN, "b": 1e999}'}]}
    logs = [[{**USER, "content": parts}, asks] for parts in ([text], [image, text])]
    client.register_partition("p", ["chat"], None, [])
    client.put_samples(["a", "b"], "p", {"chat": object_column(logs)})
    export_partition(client, "p", tmp_path / "out", messages=True)
    answer = {**ASKS, "tool_calls": [called("add", a="nan", b="inf")]}
    assert chats(tmp_path / "out") == [[USER, answer], [{**USER, "content": [image, text]}, answer]]


# --- import -----------------------------------------------------------------------------------------------------------


def test_import_twice_into_another_partition_and_where_rows_differ(written, other, tmp_path):
    export_partition(written, "p", tmp_path / "out", partial=True)
    first, again = (import_folder(tmp_path / "out", other) for _ in range(2))
    assert (first.num_rows, first.num_new, again.num_new) == (5, 5, 0)
    other.clear_samples(None, "p")
    other.register_partition("q", ["tokens"], None, ["x"])
    other.put_samples(
        ["b"],
        "q",
        {"tokens": [[4]], "reward": torch.tensor([0.25]).bfloat16()},
        tags=[{"weight_version": 8, "reward": "good", "kind": 1, "more": 1}],
    )
    assert import_folder(tmp_path / "out", other, "q").num_new == 4
    assert sorted(other.list_sample_ids("q")) == ["a", "b", "c", "d", "e"]
    assert set(other.describe("q").info.consumer_tasks) == {"x", "train"}
    other.put_samples(["d"], "q", {"tokens": [[5, 7]]})
    with pytest.raises(InvalidRequestError, match="partition 'q' holds 'd' with other values"):
        import_folder(tmp_path / "out", other, "q")


def test_import_registers_for_the_rows_and_fields_of_the_folder(written, other, tmp_path):
    export_partition(written, "p", tmp_path / "out", fields=["reward"])
    import_folder(tmp_path / "out", other)
    info = other.describe("p").info
    assert (info.fields, info.num_samples, info.consumer_tasks) == (("reward",), 4, ("train",))
    assert other.claim_meta("p", "train", ["reward"], 3, timeout_s=5).size == 3
    assert other.claim_meta("p", "train", ["reward"], 3, timeout_s=5).size == 1


@pytest.mark.parametrize(
    ("registration", "columns", "error", "said"),
    [
        ((["tokens"], None, [], 2), None, InvalidRequestError, "its groups have 2 samples, those of the export None"),
        ((["tokens"], 4, []), {"tokens": [[1]]}, InvalidRequestError, "for 4 samples, has 1, and would get 4 more"),
        ((["tokens"], None, []), {"tokens": torch.ones(1)}, SchemaMismatchError, "'tokens' has float32 scalars"),
    ],
)
def test_a_partition_that_does_not_fit_is_left_as_it_is(written, other, tmp_path, registration, columns, error, said):
    export_partition(written, "p", tmp_path / "out")
    other.register_partition("p", *registration)
    if columns:
        other.put_samples(["z"], "p", columns)
    before = content(other, "p"), other.describe("p").info
    with pytest.raises(error, match=said):
        import_folder(tmp_path / "out", other)
    assert (content(other, "p"), other.describe("p").info) == before


def changed(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (lambda out: (out / ".export.json").unlink(), MissingDataError, "no export in"),
        (lambda out: (out / ".export.json").write_bytes(b'{"form'), CorruptDataError, "it is damaged"),
        (lambda out: (out / ".export.json").write_bytes(b"[" * 99999), CorruptDataError, "it is damaged"),
        (
            lambda out: (out / ".export.json").write_text('{"format": "x", "version": 1}'),
            CorruptDataError,
            "format 'x'",
        ),
        (lambda out: changed(out / ".export.json", version=3), UnsupportedOperationError, "version 3. Expected 2"),
        (lambda out: changed(out / ".export.json", shards=[{"name": 1}]), CorruptDataError, "holds what no manifest"),
        (lambda out: changed(out / ".export.json", registration={}), CorruptDataError, "holds what no manifest"),
        (lambda out: changed(out / ".export.json", export="other"), CorruptDataError, "none of this export"),
        (lambda out: changed(out / ".export.json", closed=False), CorruptDataError, "was not completed"),
        (lambda out: (out / "part-00001.parquet").unlink(), CorruptDataError, "lacks part-00001.parquet"),
        (lambda out: flip(out / "part-00001.parquet"), CorruptDataError, "not as it was written"),
        (lambda out: os.truncate(out / "part-00001.parquet", 99), CorruptDataError, "not as it was written: 99 bytes"),
    ],
)
def test_a_damaged_folder_changes_nothing(written, other, tmp_path, monkeypatch, damage, error, said):
    monkeypatch.setattr(portions_module, "_FIRST_ROWS", 2)
    export_partition(written, "p", tmp_path / "out", shard_bytes=1)
    damage(tmp_path / "out")
    with pytest.raises(error, match=said):
        import_folder(tmp_path / "out", other)
    assert other.list_partitions() == []


def test_folders_that_have_something_else(written, tmp_path):
    out = tmp_path / "out"
    export_partition(written, "p", out)
    with pytest.raises(InvalidRequestError, match="export of 'p' already, and it is complete"):
        export_partition(written, "p", out)
    with pytest.raises(InvalidRequestError, match="already, and it has another what"):
        export_partition(written, "p", out, fields=["tokens"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "part-00000.parquet").touch()
    with pytest.raises(InvalidRequestError, match=r"and no \.export\.json"):
        export_partition(written, "p", tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="cannot be written"):
        export_partition(written, "p", tmp_path / "file")
    with pytest.raises(MissingDataError):
        import_folder(tmp_path / "file", written)


def test_an_export_that_was_killed_starts_over(written, tmp_path, monkeypatch):
    monkeypatch.setattr(portions_module, "_FIRST_ROWS", 2)
    real, calls = portions_module.Portions.write, []

    def fails_later(self, tags):
        calls.append(len(tags))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, tags)

    monkeypatch.setattr(portions_module.Portions, "write", fails_later)
    with pytest.raises(KeyboardInterrupt):
        export_partition(written, "p", tmp_path / "out", shard_bytes=1)
    with pytest.raises(CorruptDataError, match="was not completed"):
        import_folder(tmp_path / "out", written, "q")
    (tmp_path / "out" / ".part-00001.parquet.new").write_bytes(b"half")
    assert export_partition(written, "p", tmp_path / "out", shard_bytes=1).num_rows == 4
    assert [row["sample_id"] for row in rows(tmp_path / "out")] == ["a", "b", "c", "d"]
    assert not (tmp_path / "out" / ".part-00001.parquet.new").exists()


# --- following --------------------------------------------------------------------------------------------------------


def test_follow_ends_with_the_partition_and_goes_on_after_a_stop(written, tmp_path):
    out, options = tmp_path / "out", {"task": "export", "every_s": 3600.0}
    assert follow_partition(written, "p", out, idle_s=0.0, **options).num_rows == 4
    with pytest.raises(InvalidRequestError, match="another what"):
        export_partition(written, "p", out)
    with pytest.raises(InvalidRequestError, match="was given samples already"):
        follow_partition(written, "p", tmp_path / "new", **options)
    stop = threading.Event()
    stop.set()
    assert follow_partition(written, "p", out, stop=stop, **options).num_rows == 4
    written.put_samples(["e"], "p", {"reward": torch.ones(1).bfloat16()})
    assert follow_partition(written, "p", out, **options).num_rows == 5  # now the partition is finished
    assert [row["sample_id"] for row in rows(out)] == ["a", "b", "c", "d", "e"]
    assert written.is_finished("p", ["export"])
    assert (
        follow_partition(written, "p", tmp_path / "own", where="weight_version>8", **options | {"task": None}).num_rows
        == 3
    )
    written.register_partition("p", ["tokens"], 5, [])
    with pytest.raises(InvalidRequestError, match="it has another epoch"):
        follow_partition(written, "p", out, **options)


def test_follow_completes_a_shard_in_time_and_a_folder_has_one_writer(client, tmp_path):
    client.register_partition("p", ["x"], None, [])
    stop, out = threading.Event(), tmp_path / "out"
    follower = threading.Thread(target=follow_partition, args=(client, "p", out), kwargs={"every_s": 0.1, "stop": stop})
    follower.start()
    try:
        for number in range(3):
            client.put_samples([f"s{number}"], "p", {"x": torch.ones(1)})
            eventually(lambda number=number: len(rows(out)) == number + 1, within_s=STARTS_S, what="a shard")
        with pytest.raises(InvalidRequestError, match="another process exports into"):
            follow_partition(client, "p", out)
        client.clear_samples(None, "p")
        follower.join(STARTS_S)
        assert not follower.is_alive()
    finally:
        stop.set()
        follower.join()
    assert json.loads((out / ".export.json").read_text())["closed"] is True


@pytest.mark.parametrize("call", ["ack", "claim_meta"], ids=["after their shard", "while it is filled"])
def test_rows_whose_lease_ended_are_not_written_twice(client, tmp_path, monkeypatch, call):
    """A follower that was stopped for long: its rows are handed out again."""
    client.register_partition("p", ["x"], 6, [])
    client.put_samples([f"s{number}" for number in range(6)], "p", {"x": torch.arange(6)})
    claim, real, claims, ended = client.claim_meta, getattr(client, call), [], []

    def noted(*arguments, **options):
        claims.append(claim(*arguments, **options | {"lease_s": 3600.0}))
        return claims[-1]

    def expires_first(*arguments, **options):
        if claims and not ended:
            ended.append(client.nack(claims[0]))
        return (noted if call == "claim_meta" else real)(*arguments, **options)

    monkeypatch.setattr(client, "claim_meta", noted)
    monkeypatch.setattr(client, call, expires_first)
    monkeypatch.setattr(follow_module, "_LEASE_MARGIN_S", -7200.0)  # it takes them for over
    assert follow_partition(client, "p", tmp_path / "out", task="export", every_s=3600.0).num_rows == 6
    assert ended
    assert client.is_finished("p", ["export"])


def test_an_import_has_no_tasks_that_only_follow(client, other, tmp_path):
    client.register_partition("p", ["x"], 2, ["trainer", "copy"], followers=["copy"])
    client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
    follow_partition(client, "p", tmp_path / "followed")
    info = client.describe("p").info
    assert info.followers == tuple(name for name in info.consumer_tasks if name != "trainer")
    assert len(info.followers) == 2
    export_partition(client, "p", tmp_path / "out")
    import_folder(tmp_path / "out", other)
    info = other.describe("p").info
    assert (info.consumer_tasks, info.followers) == (("trainer",), ())


@pytest.mark.parametrize("put_again", [False, True])
@pytest.mark.parametrize("call", ["ack", "claim_meta"], ids=["after their shard", "while it is filled"])
def test_rows_that_are_cleared_before_their_ack_do_not_keep_the_others(client, tmp_path, monkeypatch, call, put_again):
    real, calls = getattr(client, call), []

    def cleared_first(*arguments, **options):
        calls.append(arguments)
        if len(calls) == (1 if call == "ack" else 2):
            client.clear_samples(["s3"], "p")
            if put_again:
                client.put_samples(["s3"], "p", {"x": torch.tensor([30])})
        return real(*arguments, **options)

    client.register_partition("p", ["x"], None, [])
    client.put_samples([f"s{number}" for number in range(6)], "p", {"x": torch.arange(6)})
    client.finish_partition("p")
    monkeypatch.setattr(client, call, cleared_first)
    done = follow_partition(client, "p", tmp_path / "out", task="export", every_s=3600.0)
    assert [row["x"] for row in rows(tmp_path / "out")] == [*range(6), *([30] * put_again)]
    assert done.num_left == 0
    assert client.is_finished("p", ["export"])
    manifest = json.loads((tmp_path / "out" / ".export.json").read_text())
    assert manifest["num_acked"] == len(manifest["shards"])  # a restart need not read their ids


@pytest.mark.parametrize("when", ["before a claim", "after it"])
@pytest.mark.parametrize("where", [None, "version > 1"])
def test_follow_does_not_mix_two_registrations(client, tmp_path, monkeypatch, where, when):
    claim, claims = client.claim_meta, []

    def put(*ids):
        client.register_partition("p", ["x"], None, ["trainer", "export"], followers=["export"])
        client.put_samples(ids, "p", {"x": torch.ones(len(ids))}, tags=[{"version": 1}] * len(ids))

    def registers_anew(*arguments, **options):
        claims.append(arguments)
        if len(claims) != 2:
            return claim(*arguments, **options)
        client.put_samples(["a2"], "p", {"x": torch.ones(1)}, tags=[{"version": 1}])
        meta = claim(*arguments, **options) if when == "after it" else None
        client.clear_samples(None, "p")
        put("a0", "a1", "a2")
        return meta or claim(*arguments, **options)

    put("a0", "a1")
    monkeypatch.setattr(client, "claim_meta", registers_anew)
    done = follow_partition(client, "p", tmp_path / "out", task="export", where=where, idle_s=0.0)
    assert done.num_rows == (0 if where else 2)
    assert [row["sample_id"] for row in rows(tmp_path / "out")] == ([] if where else ["a0", "a1"])
    task = client.describe("p").tasks["export"]
    assert (task.num_ready, task.num_leased, task.num_consumed) == (3, 0, 0)


def test_rows_of_a_partition_that_is_registered_anew_while_they_are_read(written, tmp_path, monkeypatch):
    read = written.get_samples

    def registers_anew(*arguments):
        found = read(*arguments)
        written.clear_samples(None, "p")
        written.register_partition("p", ["tokens"], None, [])
        written.put_samples(["a"], "p", {"tokens": [[9]]})
        return found

    monkeypatch.setattr(written, "get_samples", registers_anew)
    with pytest.raises(StalePartitionError, match="registered anew"):
        export_partition(written, "p", tmp_path / "out", fields=["tokens"])
    assert rows(tmp_path / "out") == []


@pytest.mark.filterwarnings("error")
def test_what_was_read_before_the_store_ended_is_kept(client, other, tmp_path, monkeypatch):
    out, claim, claims = tmp_path / "out", client.claim_meta, []

    def ends(*arguments, **options):
        claims.append(arguments)
        if len(claims) == 2:
            raise BackendUnavailableError("the store is gone.")
        return claim(*arguments, **options)

    client.register_partition("p", ["x"], None, ["trainer"])
    client.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
    with monkeypatch.context() as patch:
        patch.setattr(client, "claim_meta", ends)
        with pytest.raises(BackendUnavailableError):
            follow_partition(client, "p", out)
    assert [row["sample_id"] for row in rows(out)] == ["a", "b"]
    with pytest.raises(CorruptDataError, match="--unfinished"):
        import_folder(out, other)
    assert import_folder(out, other, unfinished=True).num_rows == 2
    client.put_samples(["c"], "p", {"x": torch.ones(1)})
    assert follow_partition(client, "p", out, idle_s=0.0).num_rows == 3
    assert [row["sample_id"] for row in rows(out)] == ["a", "b", "c"]


@pytest.mark.parametrize("room", [0, 4, 300])
def test_a_shard_that_cannot_be_written_ends_quietly(written, tmp_path, monkeypatch, room):
    class Full(io.FileIO):
        def write(self, data):
            if self.tell() + len(data) > room:
                raise OSError("no space left")
            return super().write(data)

    unraisable = []
    gc.collect()  # what other tests left
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def full(path, mode):
        return io.BufferedWriter(Full(path, mode))

    monkeypatch.setattr(shards_module, "open", full, raising=False)
    with pytest.raises(SaveError, match="no space left"):
        follow_partition(written, "p", tmp_path / "out", every_s=0.05)
    gc.collect()
    assert not unraisable
    monkeypatch.undo()
    assert follow_partition(written, "p", tmp_path / "out", idle_s=0.0).num_rows == 4


def test_a_follower_that_is_refused_leaves_no_export(client, tmp_path):
    client.register_partition("p", [], None, [])
    client.put_samples(["a"], "p", {"x": torch.ones(1)})
    with pytest.raises(InvalidRequestError, match="registered without fields"):
        follow(client, tmp_path / "out")
    assert follow(client, tmp_path / "out", fields=["x"]) == 1


def follow(client, folder, **options):
    return follow_partition(client, "p", folder, **{"idle_s": 0.0} | options).num_rows


def test_follow_waits_for_the_fields_of_its_condition(client, tmp_path):
    client.register_partition("p", ["x", "reward"], None, [])
    client.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
    assert follow(client, tmp_path / "out", fields=["x"], where="reward > 0") == 0
    client.put_samples(["a", "b"], "p", {"reward": torch.tensor([1.0, 0.0])})
    assert follow(client, tmp_path / "out", fields=["x"], where="reward > 0") == 1
    assert rows(tmp_path / "out") == [{"sample_id": "a", "tags": "{}", "x": 1.0}]
    assert follow(client, tmp_path / "later", fields=["x"], where="later > 0") == 0


def test_an_id_that_is_put_again_is_followed_again(client, tmp_path):
    client.register_partition("p", ["x"], None, [])
    for number in range(3):
        client.put_samples(["a", f"b{number}"], "p", {"x": torch.full((2,), number)})
        assert follow(client, tmp_path / "out") == 2 * (number + 1)
        client.clear_samples(["a"], "p")
    assert [(row["sample_id"], row["x"]) for row in rows(tmp_path / "out")] == [
        (sample_id, number) for number in range(3) for sample_id in ("a", f"b{number}")
    ]


def test_rows_that_a_kill_left_without_an_ack_are_not_written_twice(client, tmp_path, monkeypatch):
    def killed(*arguments):
        raise KeyboardInterrupt

    client.register_partition("p", ["x"], None, [])
    client.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
    with monkeypatch.context() as patch:
        patch.setattr(client, "ack", killed)
        with pytest.raises(KeyboardInterrupt):
            follow(client, tmp_path / "out")
    client.put_samples(["c"], "p", {"x": torch.ones(1)})
    assert follow(client, tmp_path / "out") == 3
    assert [row["sample_id"] for row in rows(tmp_path / "out")] == ["a", "b", "c"]


def test_rows_that_came_one_by_one_are_one_row_group(client, tmp_path, monkeypatch):
    claim = client.claim_meta

    def puts_first(*arguments, **options):
        number = client.describe("p").num_samples
        if number < 6:
            client.put_samples([f"s{number}"], "p", {"x": [[number] * (number + 1)]})
        return claim(*arguments, **options)

    client.register_partition("p", ["x"], 6, [])
    monkeypatch.setattr(client, "claim_meta", puts_first)
    assert follow(client, tmp_path / "out") == 6
    assert [row["x"] for row in rows(tmp_path / "out")] == [[number] * (number + 1) for number in range(6)]
    assert parquet.ParquetFile(tmp_path / "out" / "part-00000.parquet").num_row_groups == 1
    monkeypatch.setattr(shards_module, "_GROUP_ROWS", 4)
    assert follow(client, tmp_path / "more") == 6
    export_partition(client, "p", tmp_path / "all")
    assert rows(tmp_path / "more") == rows(tmp_path / "all") == rows(tmp_path / "out")


def test_follow_says_how_many_were_left(client, tmp_path):
    client.register_partition("p", ["x"], None, [], 2)
    client.put_samples(["q0_g0", "q0_g1", "q1_g0"], "p", {"x": torch.ones(3)})
    done = follow_partition(client, "p", tmp_path / "out", idle_s=0.0)
    assert (done.num_rows, done.num_left) == (2, 1)
    assert export_partition(client, "p", tmp_path / "all").num_rows == 3


def test_each_folder_gets_all_rows(client, tmp_path):
    client.register_partition("p", ["x"], None, [])
    for folder in ("one", "two"):
        assert follow(client, tmp_path / folder) == 0
    client.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
    assert [follow(client, tmp_path / folder) for folder in ("one", "two", "one")] == [2, 2, 2]
    assert len(client.describe("p").tasks) == 2
    assert follow(client, tmp_path / "named", task="mine") == 2
    assert follow(client, tmp_path / "named") == 2  # with the task that it had
    with pytest.raises(InvalidRequestError, match="another what"):
        follow(client, tmp_path / "named", task="other")
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="'mine' of 'p' was given samples already"):
            follow(client, tmp_path / "three", task="mine")


def test_the_task_of_a_trainer_is_refused(client, tmp_path):
    client.register_partition("p", ["x"], None, ["trainer", "copy"], followers=["copy"])
    client.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
    with pytest.raises(
        InvalidRequestError, match="'trainer' of 'p' was registered as a task that does not follow"
    ) as e:
        follow(client, tmp_path / "out", task="trainer")
    assert "among the followers" in e.value.hint
    assert client.describe("p").info.followers == ("copy",)
    assert client.claim_meta("p", "trainer", ["x"], 2).size == 2
    assert follow(client, tmp_path / "out", task="copy") == 2


def test_a_task_that_another_follower_has_is_refused(python, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("{backend: shm_store, announce_s: 0.1, options: {capacity_bytes: 50MB}}")
    with connect(str(config)) as client:
        client.register_partition("p", ["x"], None, ["mine"], followers=["mine"])
        code = f"from dataplane_core.client import announcing\nannouncing._TIMEOUT_S = {STARTS_S}\n{FOLLOWER}"
        with python.start("-c", code, config, "p", tmp_path / "one", "--follow", "--task", "mine") as follower:
            try:  # it is listed for so long after an announcement
                eventually(lambda: any(each.work for each in client.list_clients()), within_s=STARTS_S, what="a claim")
                with pytest.raises(InvalidRequestError, match=rf"'mine' of 'p' is that of 'process {follower.pid} on "):
                    follow(client, tmp_path / "two", task="mine")
                assert not (tmp_path / "two" / ".export.json").exists()
            finally:
                follower.kill()
        (info,) = (each for each in client.list_clients() if each.pid == follower.pid)
        backend_of(client).announce(AnnounceRequest(client=info, ttl_s=0.1, deadline=time.monotonic() + STARTS_S))
        eventually(
            lambda: "gone" in [each.state for each in client.list_clients(ended=True)],
            within_s=STARTS_S,
            what="its end, which is known a little later",
        )
        assert follow(client, tmp_path / "two", task="mine") == 0
        client.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
        assert follow(client, tmp_path / "two") == 2


def test_an_unfinished_export_of_other_rows_is_kept(written, tmp_path):
    export_partition(written, "p", tmp_path / "out")
    changed(tmp_path / "out" / ".export.json", closed=False)
    for keeps in (partial(export_partition, where="weight_version > 8"), follow_partition):
        with pytest.raises(InvalidRequestError, match="another what"):
            keeps(written, "p", tmp_path / "out")
    written.register_partition("q", ["x"], None, [])
    with pytest.raises(InvalidRequestError, match="another partition_id"):
        export_partition(written, "q", tmp_path / "out")
    assert len(rows(tmp_path / "out")) == 4
    assert export_partition(written, "p", tmp_path / "out").num_rows == 4


FOLLOWER = """
import argparse, sys
from dataplane_tools import _portions, commands
_portions._FIRST_ROWS, _portions._MOST_ROWS = 3, 4
parser = argparse.ArgumentParser()
run = commands.export(parser)
sys.exit(run(parser.parse_args(sys.argv[1:])))
"""


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.long)])
@pytest.mark.parametrize("group_size", [None, 2])
def test_a_follower_that_is_killed_at_any_moment_has_every_row_once(python, tmp_path, group_size, kills):
    config = tmp_path / "config.yaml"
    config.write_text("{backend: shm_store, options: {capacity_bytes: 50MB}}")
    out, total = tmp_path / "out", 60 * (kills + 1)
    arguments = [
        config,
        "p",
        out,
        "--follow",
        "--shard-bytes",
        "1",
        "--every",
        "0.05",
        "--where",
        "keep",
        "--task",
        "export",
    ]
    with connect(str(config)) as client:
        client.register_partition("p", ["x"], total, ["train"], group_size)

        def put(start, stop):
            for number in range(start, stop, 4):
                ids = [f"p{each // 2}_g{each % 2}" for each in range(number, number + 4)]
                tags = [{"keep": each % 8 < 6} for each in range(number, number + 4)]
                client.put_samples(ids, "p", {"x": torch.arange(number, number + 4)}, tags=tags)

        def num_shards():
            return len(list(out.glob("part-*.parquet")))

        for kill in range(kills):
            before = num_shards()
            with python.start("-c", FOLLOWER, *arguments) as follower:
                put(kill * 60, kill * 60 + 60)
                # the next shards come at their own time, so the kill falls between any two steps
                wanted = before + kill % 4
                eventually(lambda wanted=wanted: num_shards() > wanted, within_s=STARTS_S, what="shards")
                follower.send_signal(signal.SIGKILL)
        put(kills * 60, total)
        python.run("-c", FOLLOWER, *arguments)
        written = [(row["sample_id"], row["x"]) for row in rows(out)]
        assert sorted(written, key=lambda row: row[1]) == [
            (f"p{each // 2}_g{each % 2}", each) for each in range(total) if each % 8 < 6
        ]
        assert client.is_finished("p", ["export"])
    with connect({"backend": "noop"}) as other:
        assert import_folder(out, other).num_rows == len(written)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_follower_that_is_told_to_end_keeps_what_it_read(python, tmp_path, sent):
    config, out = tmp_path / "config.yaml", tmp_path / "out"
    config.write_text("{backend: shm_store, options: {capacity_bytes: 50MB}}")
    with connect(str(config)) as client:
        client.register_partition("p", ["x"], None, [])
        client.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
        with python.start(
            "-c", FOLLOWER, config, "p", out, "--follow", "--every", "3600", "--task", "export"
        ) as follower:
            eventually(lambda: list(out.glob(".part-*")), within_s=STARTS_S, what="an open shard")
            follower.send_signal(sent)
            assert follower.wait(STARTS_S) == 0
        assert [row["sample_id"] for row in rows(out)] == ["a", "b"]
        assert client.list_consumed("p", "export") == ["a", "b"]
        assert import_folder(out, client, "q").num_new == 2


# --- the commands -----------------------------------------------------------------------------------------------------


def test_the_commands(tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("{backend: shm_store, options: {capacity_bytes: 50MB}}")
    with connect(str(config)) as client:
        client.register_partition("p", ["x"], None, [])
        client.put_samples(["a", "b"], "p", {"y": torch.ones(2)})
        client.put_samples(["a"], "p", {"x": torch.ones(1)})
        assert command(commands.export, config, "p", tmp_path / "out", "--shard-bytes", "1MB") == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{tmp_path}/out: 1 rows of p in 1 shard, ")
        assert second == "1 were left out, which lack 'x' (--partial takes them)"
        assert command(commands.import_, tmp_path / "out", config, "q") == 0
        assert capsys.readouterr().out == f"q: 1 new rows, of 1 in {tmp_path}/out\n"
        assert client.list_sample_ids("q") == ["a"]
        changed(tmp_path / "out" / ".export.json", closed=False)
        assert command(commands.import_, tmp_path / "out", config, "r", "--unfinished") == 0
        capsys.readouterr()
        before = signal.getsignal(signal.SIGINT)
        assert command(commands.export, config, "p", tmp_path / "more", "--follow", "--idle", "0") == 0
        assert signal.getsignal(signal.SIGINT) is before


def test_without_pyarrow_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedOperationError, match="pip install 'dataplane-tools"):
        runpy.run_path(_columns.__file__)
