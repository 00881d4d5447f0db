"""Rows without ids, fields that nobody declared, rows that lack a field."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core import connect


@pytest.fixture
def client():
    with connect({"backend": "noop"}) as opened:
        opened.register_partition("p", ["x", "reward"], None, ["t"])
        yield opened


@pytest.mark.parametrize(
    ("fields", "tags"),
    [
        ([{"x": 1}], None),
        ({"x": [1]}, None),
        ({"x": torch.zeros(1)}, None),
        ({"x": NonTensorStack("a")}, None),
        (TensorDict({"x": torch.zeros(1)}, batch_size=[1]), None),
        (pa.table({"x": [1]}), None),
        (None, [{"n": 1}]),
    ],
)
def test_rows_without_ids_are_refused(client, fields, tags):
    with pytest.raises(ValueError, match=r"Expected (\[)?0|1:1"):
        client.put_samples([], "p", fields, tags)


@pytest.mark.parametrize("fields", [None, {}, [], {"x": []}, {"x": torch.zeros(0, 3)}, pa.table({"x": pa.array([])})])
def test_no_rows_without_ids_are_an_empty_put(client, fields):
    assert client.put_samples([], "p", fields, []).sample_ids == []


def test_ids_are_listed_by_the_fields_that_they_have(client):
    client.put_samples(["a", "b", "c"], "p", {"x": torch.arange(3)}, [{"n": 1}, {"n": 2}, {"n": 2}])
    client.put_samples(["a", "c"], "p", {"reward": torch.zeros(2)})
    with pytest.raises(KeyError, match="'b' lacks 'reward'"):
        client.get_samples(client.list_sample_ids("p"), "p", ["reward"])
    assert client.list_sample_ids("p", fields=["reward"]) == ["a", "c"]
    assert client.list_sample_ids("p", {"n": 2}, fields=["x", "reward"]) == ["c"]
    assert client.list_sample_ids("p", fields=["nothing"]) == []


def test_ids_are_listed_while_samples_are_cleared(client, monkeypatch):
    client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
    listed = client.list_samples

    def cleared_after(*args):
        found = listed(*args)
        client.clear_samples(["a"], "p")
        return found

    monkeypatch.setattr(client, "list_samples", cleared_after)
    assert client.list_sample_ids("p", fields=["x"]) == ["b"]
