"""Rows without ids, fields that nobody declared, rows that lack a field, batches of ranks."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core import KVBatchMeta, connect, connect_async
from dataplane_testkit.faults import Faults

pytestmark = pytest.mark.anyio


@pytest.fixture
def client():
    with connect({"backend": "noop"}) as opened:
        opened.register_partition("p", ["x", "reward"], None, ["t"])
        yield opened


def test_rows_without_ids_are_refused(client):
    for fields in (
        *([{"x": 1}], {"x": [1]}, {"x": torch.zeros(1)}, {"x": NonTensorStack("a")}, pa.table({"x": [1]})),
        TensorDict({"x": torch.zeros(1)}, batch_size=[1]),
    ):
        with pytest.raises(ValueError, match=r"Expected (\[)?0"):
            client.put_samples([], "p", fields)
    with pytest.raises(ValueError, match="1:1"):
        client.put_samples([], "p", None, [{"n": 1}])


@pytest.mark.parametrize("partition_id", ["", None])
def test_an_empty_meta_may_have_no_partition(client, partition_id):
    meta = KVBatchMeta(partition_id, None, [])
    client.ack(meta)
    client.nack(meta)
    client.renew(meta, 60.0)


@pytest.mark.parametrize("fields", [None, {}, [], {"x": []}, {"x": torch.zeros(0, 3)}, pa.table({"x": pa.array([])})])
def test_no_rows_without_ids_are_an_empty_put(client, fields):
    assert client.put_samples([], "p", fields, []).sample_ids == []


def test_a_claim_of_a_field_that_was_put_by_another_name_says_so(client, caplog):
    for sample_id in ("a", "b"):
        client.put_samples([sample_id], "p", {"x": [1], "rewrad": [0.5], "text": ["object"]})
        assert client.claim_meta("p", "t", ["x", "reward"], 1, blocking=False).size == 0
    assert [record.message for record in caplog.records] == [
        "claim_meta('p', 't'): field 'reward' is not written, and 'rewrad' is, which is not registered. If it is "
        "right, register it."
    ]


def test_a_claim_of_a_field_that_nobody_writes_says_so_before_it_waits(client, caplog):
    client.put_samples(["a"], "p", {"x": [1], "written": [2]})
    caplog.clear()
    assert client.claim_meta("p", "t", ["written"], 1).size == 1
    assert not caplog.records
    for _ in range(2):
        assert client.claim_meta("p", "t", ["aa"], 1, blocking=False).size == 0
    assert client.claim_meta("p", "t", ["rewards"], 1, blocking=False).size == 0
    assert [record.message for record in caplog.records] == [
        "claim_meta('p', 't'): field 'aa' is neither registered nor written. Registered: 'x', 'reward'. If it is "
        "right, register it.",
        "claim_meta('p', 't'): field 'rewards' is neither registered nor written. Did you mean 'reward'? If it is "
        "right, register it.",
    ]


def test_puts_and_claims_ask_for_no_registration():
    faults = Faults()
    with connect({"backend": "noop", "middleware": [faults]}) as opened, faults.counting() as calls:
        opened.register_partition("p", ["x"], None, ["t"])
        for number in range(3):
            opened.put_samples([f"s{number}"], "p", {"x": [1], "y": ["text"]})
            opened.claim_meta("p", "t", ["x"], 1)
    assert calls == ["register_partition", *["put_samples", "claim"] * 3]


async def test_strict_fields_refuse_unknown_ones():
    async with await connect_async({"backend": "noop", "strict_fields": True}) as opened:
        await opened.register_partition("p", ["x", "reward"], None, ["t"])
        refused = r"'rewrad' is not registered\. Did you mean 'reward'\? Nothing was written"
        with pytest.raises(ValueError, match=refused):
            await opened.put_samples(["a"], "p", {"x": [1], "rewrad": [0.5]})
        with pytest.raises(ValueError, match="'aa' is neither registered nor written"):
            await opened.claim_meta("p", "t", ["aa"], 1)
        assert await opened.list_sample_ids("p") == []
        await opened.register_partition("p", ["later"], None, [], if_exists="keep")
        await opened.put_samples(["a"], "p", {"later": [1]})
        await opened.register_partition("any", [], None, ["t"])
        await opened.put_samples(["a"], "any", {"whatever": [1]})


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


def put_eight(client):
    client.put_samples([f"s{i}" for i in range(8)], "p", {"x": torch.arange(8)})


def claim(client, rank=0, **options):
    return client.claim_meta("p", "t", ["x"], 1, rank, timeout_s=5, **options).sample_ids


def test_a_batch_that_is_named_changes_the_next_one_only_if_it_is_that_one(client):
    put_eight(client)
    assert [claim(client) for _ in range(3)] == [["s0"], ["s1"], ["s2"]]
    assert claim(client, batch_index=0) == ["s0"]
    assert claim(client) == ["s3"]
    assert claim(client, batch_index=7) == ["s4"]
    assert claim(client, batch_index=4) == ["s5"]
    assert claim(client) == ["s6"]  # batch 5
    assert claim(client, batch_index=5) == ["s6"]
    assert claim(client) == ["s7"]


def test_a_client_remembers_the_partitions_that_it_used_last(client, monkeypatch):
    put_eight(client)
    monkeypatch.setattr("dataplane_core.client.claims._MOST_COUNTED", 2)
    for step in range(6):
        client.register_partition(f"step-{step}", ["x", "text"], 1, ["t"])
        client.put_samples(["a"], f"step-{step}", {"x": torch.zeros(1), "text": ["b"]})
        assert client.claim_meta(f"step-{step}", "t", ["x"], 1, 0).sample_ids == ["a"]
        assert claim(client) == [f"s{step}"]  # a rank that it goes on counting is not forgotten
    assert len(client._connection.batches) <= 2
