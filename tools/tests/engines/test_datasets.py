"""A folder of `dataplane export` in `datasets`, the library that trainers load rows with."""

import json
from functools import partial

import pytest
import torch
from pyarrow import dataset
from tensordict import NonTensorStack

from dataplane_core.batch import stack_or_nest
from dataplane_core.codec.rows import object_column
from dataplane_tools import _export as export_module, export_partition, follow_partition


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`datasets.load_dataset` of Parquet, without a network."""
    import datasets  # here: the other tests need not wait for it

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread stays
    return partial(datasets.load_dataset, "parquet", cache_dir=str(tmp_path / "cache"), split="train")


def test_datasets_loads_a_folder(client, tmp_path, monkeypatch, load):
    monkeypatch.setattr(export_module, "_FIRST_ROWS", 4)
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


def test_a_folder_whose_columns_came_later_loads(client, tmp_path, load):
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


def test_chats_with_tool_calls_load(client, tmp_path, monkeypatch, load):
    monkeypatch.setattr(export_module, "_FIRST_ROWS", 1)
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": {"utc": True}}}}
    user, answer = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    logs = [[user, answer], [user, {"role": "assistant", "content": "", "tool_calls": [call]}]]
    client.register_partition("p", ["chat"], None, [])
    client.put_samples(["a", "b"], "p", {"chat": object_column(logs), "tools": NonTensorStack(None, [{"name": "now"}])})
    export_partition(client, "p", tmp_path / "out", messages=True, shard_bytes=1)
    loaded = load(data_dir=str(tmp_path / "out"))
    assert list(loaded["messages"]) == logs
    assert [json.loads(each or "null") for each in loaded["tools"]] == [None, [{"name": "now"}]]
