"""Which batch of a rank a client asks for, and how much it remembers of partitions that it used."""

import pytest
import torch

from dataplane_core import connect


@pytest.fixture
def client():
    with connect({"backend": "noop"}) as opened:
        opened.register_partition("p", ["x"], None, ["t"])
        opened.put_samples([f"s{i}" for i in range(8)], "p", {"x": torch.arange(8)})
        yield opened


def claim(client, rank=0, **options):
    return client.claim_meta("p", "t", ["x"], 1, rank, timeout_s=5, **options).sample_ids


def test_a_batch_that_is_named_changes_the_next_one_only_if_it_is_that_one(client):
    assert [claim(client) for _ in range(3)] == [["s0"], ["s1"], ["s2"]]
    assert claim(client, batch_index=0) == ["s0"]
    assert claim(client) == ["s3"]
    assert claim(client, batch_index=7) == ["s4"]
    assert claim(client, batch_index=4) == ["s5"]
    assert claim(client) == ["s6"]  # batch 5
    assert claim(client, batch_index=5) == ["s6"]
    assert claim(client) == ["s7"]


def test_a_client_remembers_the_partitions_that_it_used_last(client, monkeypatch):
    monkeypatch.setattr("dataplane_core.client.claims._MOST_COUNTED", 2)
    monkeypatch.setattr("dataplane_core.client.claims._MOST_INFOS", 2)
    for step in range(6):
        client.register_partition(f"step-{step}", ["x", "text"], 1, ["t"])
        client.put_samples(["a"], f"step-{step}", {"x": torch.zeros(1), "text": ["b"]})
        assert client.claim_meta(f"step-{step}", "t", ["x"], 1, 0).sample_ids == ["a"]
        assert claim(client) == [f"s{step}"]  # a rank that it goes on counting is not forgotten
    assert max(len(client._batches), len(client._infos)) <= 2
