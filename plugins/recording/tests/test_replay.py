"""A recorded run happens again: same claims, same rows, and what differs is named."""

from __future__ import annotations

import pytest
import torch

from dataplane_core import connect


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "recording"


def recorded(folder, payload="all", backend="noop"):
    return connect({"backend": backend, "middleware": [{"recorder": {"folder": str(folder), "payload": payload}}]})


def replayed(folder, **options):
    return connect({"backend": "recording", "options": {"folder": str(folder), **options}})


def roll_out(client, step):
    ids = [f"s{step}_{row}" for row in range(4)]
    tokens = torch.arange(12, dtype=torch.int64).reshape(4, 3) + step
    tags = [{"step": step, "row": row} for row in range(4)]
    client.put_samples(ids, "train", {"tokens": tokens, "text": ["a", {"k": 1}, None, "d"]}, tags=tags)


def train(client, steps=2, loss=0.5, batch_size=2):
    """The trainer's side of the run. Returns what it saw."""
    seen = []
    for step in range(steps):
        for _ in range(2):
            meta = client.claim_meta("train", "trainer", ["tokens"], batch_size, lease_s=60, timeout_s=30)
            rows = client.get_samples(meta.sample_ids, "train", ["tokens", "text"])
            seen.append((meta.sample_ids, meta.tags, rows["tokens"].tolist(), rows["text"].tolist()))
            client.put_samples(meta.sample_ids, "train", {"loss": rows["tokens"].sum(1) * loss})
            client.ack(meta)
        client.mark_step(step, loss=loss)
    return seen


def run(client, **options):
    client.register_partition("train", ["tokens", "text", "loss"], None, ["trainer"])
    roll_out(client, 0)
    roll_out(client, 1)
    return train(client, **options)


@pytest.fixture
def of_run(folder):
    with recorded(folder) as client:
        return run(client)


def test_a_replay_without_rollouts_gets_the_same_batches(folder, of_run):
    with replayed(folder) as client:
        client.register_partition("train", ["tokens", "text", "loss"], None, ["trainer"])
        assert train(client) == of_run
