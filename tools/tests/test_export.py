"""`dataplane export`: the rows are in the folder, none is lost or doubled, and what cannot be kept is refused.

Followers that are killed: engines/test_several_processes.py.
"""

import base64
import gc
import io
import json
import runpy
import sys
import threading
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from contents import changed, rows
from pyarrow import parquet
from tensordict import NonTensorStack

from dataplane_core import connect
from dataplane_core.batch import split_message_logs
from dataplane_core.codec.rows import object_column
from dataplane_core.errors import (
    BackendUnavailableError,
    InvalidRequestError,
    InvalidTypeError,
    SaveError,
    StalePartitionError,
    UnknownPartitionError,
    UnsupportedOperationError,
)
from dataplane_testkit._timing import STARTS_S, eventually
from dataplane_tools import _export as export_module, _shards as shards_module, export_partition, follow_partition


def ids_in(folder):
    return [row["sample_id"] for row in rows(folder)]


def in_json(item):
    """A cell, as JSON and Arrow have it."""
    if isinstance(item, torch.Tensor):
        if 0 in item.shape[1:]:
            return [0] * len(item)  # cells without elements
        return (torch.view_as_real(item) if item.is_complex() else item).tolist()
    if isinstance(item, dict):
        return {name: in_json(each) for name, each in item.items()}
    if isinstance(item, list):
        return [in_json(each) for each in item]
    return {"~bytes": base64.b64encode(item).decode()} if isinstance(item, bytes) else item


def cells_of(column):
    """The cells of a column that is put, as the folder is to have them."""
    cells = column.tolist() if isinstance(column, NonTensorStack) else column
    return [cell if isinstance(cell, bytes) else in_json(cell) for cell in cells]


def written_cells(folder):
    """The cells that a folder has of each of the columns."""
    written = rows(folder)
    cells = {name: [row.get(name) for row in written] for name in COLUMNS}
    for name in AS_JSON:
        cells[name] = [None if cell is None else json.loads(cell) for cell in cells[name]]
    return cells


def follow(client, folder, **options):
    return follow_partition(client, "p", folder, **{"idle_s": 0.0} | options).num_rows


def put(client, *ids, **columns):
    """Puts samples with ``x``, which is 1 unless it is given."""
    client.put_samples(ids, "p", columns or {"x": torch.ones(len(ids))})


# --- columns ----------------------------------------------------------------------------------------------------------

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
        {"a": [1, 2.0, None, True], "~": {}},
        [b"\x00", {"deep": [torch.arange(3).bfloat16(), b"z"]}],
        float("nan"),
        -(2**63),
        torch.tensor(1.5),
        {"x": "1"},
    ),
}
#: Those whose cells the folder has as JSON: objects, and strings that UTF-8 cannot keep.
AS_JSON = ("broken strings", "objects")


TAGS = [{"weight_version": 1, "x": float("nan")}, {}, {"x": 1}, {"x": None}, {"ok": True, "x": "s"}, {"é": -(2**63)}]


def test_every_kind_of_column_has_its_values(client, tmp_path):
    client.register_partition("p", list(COLUMNS), 6, [])
    ids = [f"s{number}" for number in (3, 1, 2, 0, 5, 4)]
    client.put_samples(ids, "p", COLUMNS, tags=TAGS)
    export_partition(client, "p", tmp_path / "out")
    assert ids_in(tmp_path / "out") == ids
    for name, cells in written_cells(tmp_path / "out").items():
        assert repr(cells) == repr(cells_of(COLUMNS[name])), name  # a NaN equals no other
    assert repr([json.loads(row["tags"]) for row in rows(tmp_path / "out")]) == repr(TAGS)


def test_all_columns_at_once_over_many_shards_and_with_missing_fields(client, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "_FIRST_ROWS", 4)
    monkeypatch.setattr(export_module, "_MOST_ROWS", 4)
    client.register_partition("p", ["float32"], None, ["trainer"], 2, {"strings": ["a", "b"]})
    names = [name for name in COLUMNS if name != "strings"]
    expected = {name: [] for name in COLUMNS}
    for number in range(6):
        ids = [f"p{number}_g{member}" for member in (1, 0)]
        columns = {name: COLUMNS[name][:2] for number_of, name in enumerate(names) if (number + number_of) % 3}
        columns["float32"] = torch.randn(2)
        columns |= {name: NonTensorStack(*["a", "b"]) for name in ("strings",) if number > 2}
        client.put_samples(ids, "p", columns, tags=[{"weight_version": number}] * 2)
        for name, cells in expected.items():
            cells += cells_of(columns[name]) if name in columns else [None, None]
    export_partition(client, "p", tmp_path / "out", shard_bytes=5_000)
    assert ids_in(tmp_path / "out") == [f"p{number}_g{member}" for number in range(6) for member in (1, 0)]
    assert repr(written_cells(tmp_path / "out")) == repr(expected)
    assert len(list((tmp_path / "out").glob("*.parquet"))) > 2


def test_an_empty_partition_and_one_of_tags_alone(client, tmp_path):
    client.register_partition("p", [], None, [])
    assert export_partition(client, "p", tmp_path / "none").num_rows == 0
    client.put_samples(["a", "b"], "p", tags=[{"x": 1}, {"y": "z"}])
    assert export_partition(client, "p", tmp_path / "out").num_rows == 2
    assert [json.loads(row["tags"]) for row in rows(tmp_path / "out")] == [{"x": 1}, {"y": "z"}]


def test_rows_of_a_folder_are_put_as_an_arrow_table(written, other, tmp_path):
    export_partition(written, "p", tmp_path / "out")
    table = parquet.read_table(tmp_path / "out" / "part-00000.parquet")
    other.register_partition("q", ["tokens", "reward"], None, ["train"])
    other.put_samples(table["sample_id"].to_pylist(), "q", table.select(["tokens", "reward"]))
    ids = written.list_sample_ids("p")[:4]
    for name in ("tokens", "reward"):
        columns = [client.get_samples(ids, where, [name])[name] for client, where in ((written, "p"), (other, "q"))]
        assert [row.tolist() for row in columns[0].unbind()] == [row.tolist() for row in columns[1].unbind()]


@pytest.mark.parametrize("item", [{1, 2}, {1: "a"}, [{"a": {None: 1}}]], ids=repr)
def test_items_that_only_pickle_can_keep_are_refused(tmp_path, item):
    with connect({"backend": "noop", "allow_pickle": True}) as client:
        client.register_partition("p", ["x"], None, [])
        client.put_samples(["a"], "p", {"x": object_column([item])})
        with pytest.raises(InvalidTypeError, match="field 'x' holds an item that only pickle can keep"):
            export_partition(client, "p", tmp_path / "out")


# --- what is in the folder ------------------------------------------------------------------------------------------


def test_columns_tags_and_what_was_left_out(written, tmp_path):
    done = export_partition(written, "p", tmp_path / "out")
    assert (done.num_rows, done.num_shards, dict(done.lacking), done.num_gone) == (4, 1, {"reward": 1}, 0)
    schema = parquet.read_schema(tmp_path / "out" / "part-00000.parquet")
    names = ["sample_id", "tags", "tokens", "reward", "weight_version", "reward_"]  # the tag kind has no one type
    assert schema.names == names
    assert schema.field("tokens").type == pa.large_list(pa.field("element", pa.int64()))
    assert (schema.field("reward").type, schema.field("weight_version").type) == (pa.float32(), pa.int64())
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


def test_where_fields_and_partial_which_take_nothing_from_a_task(written, tmp_path):
    written.claim_meta("p", "train", ["tokens"], 2, lease_s=60.0)

    def seen():
        found = written.describe("p")
        counts = [(task.num_ready, task.num_leased, task.num_consumed) for task in found.tasks.values()]
        return found.info, counts, found.num_samples

    before = seen()
    export_partition(written, "p", tmp_path / "a", where="reward >= 0.5 or weight_version == 7", fields=["tokens"])
    # the tag reward is "good", and goes before the field
    assert ids_in(tmp_path / "a") == ["a"]
    assert set(rows(tmp_path / "a")[0]) == {"sample_id", "tags", "tokens", "weight_version", "reward", "kind"}
    export_partition(written, "p", tmp_path / "b", partial=True)
    assert [row["reward"] for row in rows(tmp_path / "b")] == [0.0, 0.25, 0.5, 0.75, None]
    assert seen() == before
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


def test_names_of_columns_that_are_taken_and_bytes_where_the_first_rows_have_none(client, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "_FIRST_ROWS", 1)
    client.register_partition("p", ["sample_id", "tags", "sample_id_"], None, [])
    columns = {"sample_id": torch.ones(2), "tags": NonTensorStack(None, None), "sample_id_": ["x", "y"]}
    client.put_samples(["a", "b"], "p", columns, tags=[{"tags": 1, "sample_id": 2, "messages": 3}, {}])
    client.put_samples(["c", "d"], "p", {**columns, "image": NonTensorStack(b"\x89PNG", b"")})
    export_partition(client, "p", tmp_path / "out")
    written = [
        (row["sample_id"], row["sample_id_"], row["sample_id__"], row.get("image")) for row in rows(tmp_path / "out")
    ]
    assert written == [("a", 1.0, "x", None), ("b", 1.0, "y", None), ("c", 1.0, "x", b"\x89PNG"), ("d", 1.0, "y", b"")]
    schemas = [parquet.read_schema(path) for path in (tmp_path / "out").glob("*.parquet")]
    assert {schema.field("image").type for schema in schemas} == {pa.large_binary()}


def test_rows_that_are_cleared_meanwhile_are_left_out_also_by_an_export_that_starts_over(written, tmp_path, before):
    export_partition(written, "p", tmp_path / "out", fields=["tokens"])
    before(written, "get_samples", 1, lambda: written.clear_samples(["b"], "p"))
    changed(tmp_path / "out" / ".export.json", closed=False)
    (tmp_path / "out" / "columns.parquet").write_bytes(b"former")
    assert export_partition(written, "p", tmp_path / "out", fields=["tokens"]).num_gone == 1
    assert ids_in(tmp_path / "out") == ["a", "c", "d", "e"]


# --- messages ---------------------------------------------------------------------------------------------------------


def tokenizer_of(ids):
    return bytes(ids).decode()


USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
TOKENS = {"input_ids": [list(b"2+2?4")], "token_mask": [[0, 0, 0, 0, 1]]}
TURNS = [{**USER, "token_ids": torch.tensor([1, 2])}, {**ASSISTANT, "token_ids": torch.tensor([3])}]


@pytest.fixture
def exported(client, tmp_path, monkeypatch):
    """Exports samples as messages, and returns these."""
    monkeypatch.syspath_prepend(Path(__file__).parent)

    def export(columns, tokenizer="test_export:tokenizer_of", **options):
        ids = ["a", "b", "c"][: len(next(iter(columns.values())))]
        client.register_partition("p", list(columns), None, [])
        client.put_samples(ids, "p", columns, tags=[{"weight_version": 1}] * len(ids))
        export_partition(client, "p", tmp_path / "out", messages=True, tokenizer=tokenizer, **options)
        return [[json.loads(message) for message in row["messages"]] for row in rows(tmp_path / "out")]

    return export


@pytest.mark.parametrize(
    ("columns", "chat"),
    [
        (dict(split_message_logs([TURNS])), [USER, ASSISTANT]),
        (TOKENS, [USER, ASSISTANT]),
        ({"chat": [[USER, ASSISTANT]]}, [USER, ASSISTANT]),
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
        ({"input_ids": [[50]]}, None),  # no mask tells what was answered
    ],
)
def test_a_chat_is_made_of_what_a_sample_has_and_none_lacks_its_answer(tmp_path, exported, columns, chat):
    columns = {
        name: cells if not isinstance(cells, list) or isinstance(cells[0][0], int) else NonTensorStack(*cells)
        for name, cells in columns.items()
    }
    if chat:
        assert exported(columns | {"reward": torch.ones(1)}) == [chat]
        (row,) = rows(tmp_path / "out")
        assert (row["sample_id"], row["reward"], row["weight_version"]) == ("a", 1.0, 1)
        assert list(row)[:3] == ["sample_id", "tags", "messages"]
        assert not {"turn_contents", "chat", "prompt", "raw_prompt", "completion", "input_ids"} & row.keys()
    else:
        with pytest.raises(InvalidRequestError, match=r"none of 1 rows is a chat. The first one has no kept turns"):
            exported(columns)


def test_messages_of_tokens_need_a_tokenizer(exported):
    with pytest.raises(InvalidRequestError, match=r"no kept turns .* and no --tokenizer was named"):
        exported(TOKENS, tokenizer=None)


def called(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ASKS = {"role": "assistant", "content": "", "tool_calls": [called("add", a=2, b=2), called("now", zone={"utc": True})]}
TOLD = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "c1"}
CALLS = [USER, ASKS, TOLD, ASSISTANT]


TOOL_CALLS = {
    "as templates take them": ASKS["tool_calls"],
    "flat": [each["function"] for each in ASKS["tool_calls"]],
    "arguments as text": [
        called(each["function"]["name"])
        | {"function": {**each["function"], "arguments": json.dumps(each["function"]["arguments"])}}
        for each in ASKS["tool_calls"]
    ],
}


@pytest.mark.parametrize("calls", TOOL_CALLS.values(), ids=TOOL_CALLS)
@pytest.mark.parametrize("kept", ["turns", "list"])
def test_chats_keep_their_tool_calls(tmp_path, exported, monkeypatch, kept, calls):
    monkeypatch.setattr(export_module, "_FIRST_ROWS", 1)
    asks = {"role": "assistant", "content": None, "tool_calls": calls, "token_ids": torch.tensor([1])}
    logs = [[USER, ASSISTANT], [USER, asks, TOLD, ASSISTANT], [USER, {**asks, "tool_calls": None, "content": "4"}]]
    tools = [None, [{"type": "function", "function": {"name": "add", "parameters": {}}}], [{"name": "now"}]]
    if kept == "turns":
        columns = split_message_logs([[{"role": turn["role"], "content": turn} for turn in log] for log in logs])
    else:
        columns = {"chat": object_column(logs)}
    columns["tools"] = NonTensorStack(*tools)
    assert exported(columns, shard_bytes=1) == [[USER, ASSISTANT], CALLS, [USER, ASSISTANT]]
    assert [json.loads(row["tools"] or "null") for row in rows(tmp_path / "out")] == tools


def test_a_chat_may_end_with_a_tool_call_that_has_a_name(client, tmp_path, exported):
    ends = {"chat": object_column([[USER, {**ASKS, "tool_calls": called("add")}]])}
    assert exported(ends) == [[USER, {**ASKS, "tool_calls": [called("add")]}]]
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


def test_contents_in_parts_and_numbers_that_json_lacks(exported):
    text, image = {"type": "text", "text": "2+2?"}, {"type": "image"}
    asks = {**ASKS, "tool_calls": [{"name": "add", "arguments": '{"a": NaN, "b": 1e999}'}]}
    logs = [[{**USER, "content": parts}, asks] for parts in ([text], [image, text])]
    answer = {**ASKS, "tool_calls": [called("add", a="nan", b="inf")]}
    expected = [[USER, answer], [{**USER, "content": [image, text]}, answer]]
    assert exported({"chat": object_column(logs)}) == expected


def test_folders_that_have_something_else(written, tmp_path):
    out = tmp_path / "out"
    export_partition(written, "p", out)
    for options, said in (({}, "of 'p' already, and it is complete"), ({"fields": ["tokens"]}, "it has another what")):
        with pytest.raises(InvalidRequestError, match=said):
            export_partition(written, "p", out, **options)
    changed(out / ".export.json", closed=False)  # an unfinished export of other rows is kept
    for keeps in (partial(export_partition, where="weight_version > 8"), follow_partition):
        with pytest.raises(InvalidRequestError, match="another what"):
            keeps(written, "p", out)
    written.register_partition("q", ["x"], None, [])
    with pytest.raises(InvalidRequestError, match="another partition_id"):
        export_partition(written, "q", out)
    assert len(rows(out)) == 4
    assert export_partition(written, "p", out).num_rows == 4
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "part-00000.parquet").touch()
    with pytest.raises(InvalidRequestError, match=r"and no \.export\.json"):
        export_partition(written, "p", tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="cannot be written"):
        export_partition(written, "p", tmp_path / "file")


# --- following --------------------------------------------------------------------------------------------------------


def test_follow_ends_with_the_partition_and_goes_on_after_a_stop(written, tmp_path):
    out, options = tmp_path / "out", {"task": "export:it", "every_s": 3600.0}
    assert follow(written, out, **options) == 4
    with pytest.raises(InvalidRequestError, match="another what"):
        export_partition(written, "p", out)
    with pytest.raises(InvalidRequestError, match="was given samples already"):
        follow(written, tmp_path / "new", **options)
    stop = threading.Event()
    stop.set()
    assert follow(written, out, stop=stop, idle_s=None, **options) == 4
    written.put_samples(["e"], "p", {"reward": torch.ones(1).bfloat16()})
    assert follow(written, out, idle_s=None, **options) == 5  # now the partition is finished
    assert ids_in(out) == ["a", "b", "c", "d", "e"]
    assert written.is_finished("p", ["export:it"])
    assert follow(written, tmp_path / "own", where="weight_version>8", idle_s=None, every_s=3600.0) == 3
    written.register_partition("p", ["tokens"], 5, [])
    with pytest.raises(InvalidRequestError, match="it has another epoch"):
        follow(written, out, **options)


def test_follow_takes_rollouts_of_which_groups_are_made(client, tmp_path):
    client.register_partition("p", ["x"], None, ["train"], rollouts=True)
    client.put_samples(["a_g0/0", "b_g0/0", "a_g0/1", "c_g0/0"], "p", {"x": torch.arange(4)})
    client.seal({"a_g0": 2, "b_g0": 1}, "p", ends_groups=True)
    client.finish_partition("p")
    assert follow(client, tmp_path / "out", task="export:it", idle_s=None, every_s=3600.0) == 3
    assert ids_in(tmp_path / "out") == ["a_g0/0", "a_g0/1", "b_g0/0"]


def test_follow_completes_a_shard_in_time_and_a_folder_has_one_writer(client, tmp_path):
    client.register_partition("p", ["x"], None, [])
    stop, out = threading.Event(), tmp_path / "out"
    follower = threading.Thread(target=follow_partition, args=(client, "p", out), kwargs={"every_s": 0.1, "stop": stop})
    follower.start()
    try:
        for number in range(3):
            put(client, f"s{number}")
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
    monkeypatch.setattr(export_module, "_LEASE_MARGIN_S", -7200.0)  # it takes them for over
    assert follow_partition(client, "p", tmp_path / "out", task="export:it", every_s=3600.0).num_rows == 6
    assert ended
    assert client.is_finished("p", ["export:it"])


@pytest.mark.parametrize("put_again", [False, True])
@pytest.mark.parametrize(("call", "number"), [("ack", 1), ("claim_meta", 2)], ids=["after their shard", "while filled"])
def test_rows_that_are_cleared_before_their_ack_do_not_keep_the_others(
    client, tmp_path, before, call, number, put_again
):
    def clears():
        client.clear_samples(["s3"], "p")
        if put_again:
            put(client, "s3", x=torch.tensor([30]))

    client.register_partition("p", ["x"], None, [])
    client.put_samples([f"s{number}" for number in range(6)], "p", {"x": torch.arange(6)})
    client.finish_partition("p")
    before(client, call, number, clears)
    done = follow_partition(client, "p", tmp_path / "out", task="export:it", every_s=3600.0)
    assert [row["x"] for row in rows(tmp_path / "out")] == [*range(6), *([30] * put_again)]
    assert done.num_left == 0
    assert client.is_finished("p", ["export:it"])
    manifest = json.loads((tmp_path / "out" / ".export.json").read_text())
    assert manifest["num_acked"] == len(list((tmp_path / "out").glob("part-*")))  # a restart need not read their ids


@pytest.mark.parametrize("when", ["before a claim", "after it"])
@pytest.mark.parametrize("where", [None, "version > 1"])
def test_follow_does_not_mix_two_registrations(client, tmp_path, before, where, when):
    claim = client.claim_meta

    def register(*ids):
        client.register_partition("p", ["x"], None, ["trainer", "export:it"])
        client.put_samples(ids, "p", {"x": torch.ones(len(ids))}, tags=[{"version": 1}] * len(ids))

    def registers_anew():
        client.put_samples(["a2"], "p", {"x": torch.ones(1)}, tags=[{"version": 1}])
        meta = claim(*claims[-1], blocking=False, lease_s=60.0) if when == "after it" else None
        client.clear_samples(None, "p")
        register("a0", "a1", "a2")
        return meta

    register("a0", "a1")
    claims = before(client, "claim_meta", 2, registers_anew)
    assert follow(client, tmp_path / "out", task="export:it", where=where) == (0 if where else 2)
    assert ids_in(tmp_path / "out") == ([] if where else ["a0", "a1"])
    task = client.describe("p").tasks["export:it"]
    assert (task.num_ready, task.num_leased, task.num_consumed) == (3, 0, 0)


def test_rows_of_a_partition_that_is_registered_anew_while_they_are_read(written, tmp_path, before):
    read = written.get_samples

    def registers_anew():
        found = read(*reads[-1])
        written.clear_samples(None, "p")
        written.register_partition("p", ["tokens"], None, [])
        put(written, "a", tokens=[[9]])
        return found

    reads = before(written, "get_samples", 1, registers_anew)
    with pytest.raises(StalePartitionError, match="registered anew"):
        export_partition(written, "p", tmp_path / "out", fields=["tokens"])
    assert rows(tmp_path / "out") == []


@pytest.mark.filterwarnings("error")
def test_what_was_read_before_the_store_ended_is_kept(client, tmp_path, before):
    def ends():
        raise BackendUnavailableError("the store is gone.")

    out = tmp_path / "out"
    client.register_partition("p", ["x"], None, ["trainer"])
    put(client, "a", "b")
    before(client, "claim_meta", 2, ends)
    with pytest.raises(BackendUnavailableError):
        follow_partition(client, "p", out)
    assert ids_in(out) == ["a", "b"]
    put(client, "c")
    assert follow(client, out) == 3
    assert ids_in(out) == ["a", "b", "c"]


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

    def full(path, *arguments, **options):
        files.append(Full(path, "w"))
        return writer(pa.PythonFile(files[-1], mode="w"), *arguments, **options)

    writer, files = parquet.ParquetWriter, []
    monkeypatch.setattr(parquet, "ParquetWriter", full)
    with pytest.raises(SaveError, match="no space left"):
        follow_partition(written, "p", tmp_path / "out", every_s=0.05)
    gc.collect()
    assert not unraisable
    for file in files:
        file.close()
    monkeypatch.undo()
    assert follow(written, tmp_path / "out") == 4


def test_follow_waits_for_the_fields_of_its_condition_and_leaves_no_export_if_it_is_refused(client, tmp_path):
    client.register_partition("p", [], None, [])
    put(client, "a", "b")
    with pytest.raises(InvalidRequestError, match="registered without fields"):
        follow(client, tmp_path / "out")
    client.register_partition("p", ["x", "reward"], None, [])
    put(client, "a", "b")
    assert follow(client, tmp_path / "out", fields=["x"], where="reward > 0") == 0
    put(client, "a", "b", reward=torch.tensor([1.0, 0.0]))
    assert follow(client, tmp_path / "out", fields=["x"], where="reward > 0") == 1
    assert rows(tmp_path / "out") == [{"sample_id": "a", "tags": "{}", "x": 1.0}]
    assert follow(client, tmp_path / "later", fields=["x"], where="later > 0") == 0


def test_an_id_that_is_put_again_is_followed_again_and_none_twice_after_a_kill(client, tmp_path, before):
    def killed():
        raise KeyboardInterrupt

    client.register_partition("p", ["x"], None, [])
    before(client, "ack", 1, killed)
    for number in range(3):
        put(client, "a", f"b{number}", x=torch.full((2,), number))
        if number == 0:  # what it wrote has no ack
            with pytest.raises(KeyboardInterrupt):
                follow(client, tmp_path / "out")
        assert follow(client, tmp_path / "out") == 2 * (number + 1)
        client.clear_samples(["a"], "p")
    assert [(row["sample_id"], row["x"]) for row in rows(tmp_path / "out")] == [
        (sample_id, number) for number in range(3) for sample_id in ("a", f"b{number}")
    ]


def test_rows_that_came_one_by_one_are_one_row_group(client, tmp_path, monkeypatch):
    claim = client.claim_meta

    def puts_first(*arguments, **options):
        number = client.describe("p").num_samples
        if number < 6:
            put(client, f"s{number}", x=[[number] * (number + 1)])
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


def test_each_folder_gets_all_rows_of_whole_groups(client, tmp_path, monkeypatch):
    client.register_partition("p", ["x"], None, [], 2)
    for folder in ("one", "two"):
        assert follow(client, tmp_path / folder) == 0
    put(client, "q0_g0", "q0_g1", "q1_g0")
    assert [follow(client, tmp_path / folder) for folder in ("one", "two", "one")] == [2, 2, 2]
    assert len(client.describe("p").tasks) == 2
    done = follow_partition(client, "p", tmp_path / "named", task="export:mine", idle_s=0.0)
    assert (done.num_rows, done.num_left) == (2, 1)
    assert follow(client, tmp_path / "named") == 2  # with the task that it had
    assert export_partition(client, "p", tmp_path / "all").num_rows == 3
    with pytest.raises(InvalidRequestError, match="another what"):
        follow(client, tmp_path / "named", task="export:other")
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="'export:mine' of 'p' was given samples already"):
            follow(client, tmp_path / "three", task="export:mine")
    put(client, "q1_g1")
    monkeypatch.setattr(export_module, "_FIRST_ROWS", 1)
    done = follow_partition(client, "p", tmp_path / "one by one", idle_s=0.0, shard_bytes=1)
    assert (done.num_rows, done.num_shards) == (4, 2), "a group at a time, where more rows would be too many"


def test_the_task_of_a_trainer_is_refused(client, tmp_path):
    client.register_partition("p", ["x"], None, ["trainer", "export:copy"])
    put(client, "a", "b")
    for task in ("trainer", "export:"):
        with pytest.raises(InvalidRequestError, match=f"the task '{task}'. Expected one whose name begins with 'exp"):
            follow(client, tmp_path / "out", task=task)
    assert client.claim_meta("p", "trainer", ["x"], 2).size == 2
    assert follow(client, tmp_path / "out", task="export:copy") == 2


def test_without_pyarrow_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedOperationError, match="pip install 'dataplane-tools"):
        runpy.run_path(shards_module.__file__)
