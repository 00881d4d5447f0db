"""`dataplane inspect` over a store that other clients use."""

import json
import threading

import pytest
import torch

from dataplane_core import connect
from dataplane_core.cli import main


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("{backend: shm_store, options: {capacity_bytes: 50000000}, middleware: [metrics]}")
    return str(path)


@pytest.fixture
def client(config):
    """A store with the partition ``step-1``: 6 of 8 samples written, 2 consumed, 2 leased, one without its reward."""
    with connect(config) as client:
        client.register_partition("step-1", ["tokens", "reward", "later"], 8, ["train", "score"], 2)
        ids = [f"p{row // 2}_g{row % 2}" for row in range(6)]
        client.put_samples(ids, "step-1", {"tokens": torch.arange(60).view(6, 10)})
        client.put_samples(ids[:5], "step-1", {"reward": torch.zeros(5)})
        client.claim_meta("step-1", "train", ["reward"], 2)
        client.claim_meta("step-1", "train", ["reward"], 2, lease_s=60.0)
        yield client


def test_counts_and_what_a_task_waits_for(client, config, capsys):
    assert main(["inspect", config, "step-1", "--interval", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("shm_store: 1 partition, ")
    assert lines[0].endswith(" of 50.0 MB")
    assert lines[2].startswith("step-1: 6 of 8 samples written, 6 held (")
    assert lines[2].endswith(" s old), 0 cleared")
    assert [line.split() for line in lines[3:6]] == [
        ["task", "ready", "leased", "consumed", "per", "s"],
        ["train", "0", "2", "2"],
        ["score", "0", "0", "0"],
    ]
    assert lines[6:8] == [
        "  The oldest sample that train has not consumed is p1_g0; it lacks later.",
        "  The oldest sample that score has not consumed is p0_g0; it lacks later.",
    ]
    assert [" ".join(line.split()) for line in lines[8:]] == [
        "field cells",
        "tokens int64 cells of shape (L,)",
        "reward float32 scalars",
        "later not written",
    ]


def test_json_has_the_same_with_rates(client, config, capsys):
    stop = threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            client.put_samples([f"n{number}"], "other", {"x": torch.ones(1)})
            client.claim_meta("other", "train", ["x"], 1)
            number += 1

    client.register_partition("other", ["x"], None, ["train"])
    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert main(["inspect", config, "--json", "--interval", "0.5"]) == 0
    finally:
        stop.set()
        writer.join()
    report = json.loads(capsys.readouterr().out)
    other, step = report["partitions"]
    assert other["written_per_s"] > 0
    assert other["tasks"]["train"]["consumed_per_s"] > 0
    assert (step["written_per_s"], step["tasks"]["train"]["consumed_per_s"]) == (0.0, 0.0)
    assert step["tasks"]["train"]["leased"] == 2
    assert step["fields"]["tokens"] == {"kind": "tensor", "dtype": "int64", "cells": "int64 cells of shape (L,)"}
    assert report["held_bytes"] == other["held_bytes"] + step["held_bytes"]


def test_it_changes_nothing(client, config, capsys):
    before = client.describe("step-1")
    main(["inspect", config, "step-1", "--interval", "0.01"])
    after = client.describe("step-1")
    assert (after.tasks, after.num_samples, after.info) == (before.tasks, before.num_samples, before.info)


def test_an_empty_store(config, capsys):
    with connect(config):
        assert main(["inspect", config, "--interval", "0"]) == 0
    assert capsys.readouterr().out == "shm_store: 0 partitions, 0 B of 50.0 MB\n"


def test_no_store_no_partition_and_no_config(client, config, tmp_path, capsys):
    assert main(["inspect", config, "step-2"]) == 1
    assert "'step-2'" in capsys.readouterr().err
    client.close()
    assert main(["inspect", config]) == 1
    assert "shm_store" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml" in capsys.readouterr().err
