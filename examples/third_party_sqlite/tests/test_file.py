"""The file: it stays small however long it is used, and nobody writes to one that was replaced."""

import shutil

import pytest
import torch
from dataplane_sqlite_example import SQLiteStore

from dataplane_core import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import BackendUnavailableError, LeaseExpiredError
from dataplane_testkit import backend_of


def open_client(path, bootstrap=True):
    config = DataPlaneConfig(backend="sqlite_example", options={"path": str(path)})
    return connect_backend(SQLiteStore, config, bootstrap=bootstrap)


def step(client, number):
    ids = [f"s{number}_g{i}" for i in range(8)]
    client.put_samples(ids, "p", {"x": torch.zeros(8, 32)})
    client.ack(client.claim_meta("p", "t", ["x"], 8, lease_s=60))
    client.clear_samples(ids, "p")


def test_a_file_in_which_no_row_is_left_does_not_grow(tmp_path, monkeypatch):
    monkeypatch.setattr("dataplane_core.backends.blob_store._TAIL_BYTES", 8_000)
    path = tmp_path / "store.sqlite"
    with open_client(path) as client:
        client.register_partition("p", ["x"], None, ["t"])
        pages = []
        for number in range(90):
            step(client, number)
            if number % 30 == 29:
                rows, _ = backend_of(client)._run("PRAGMA page_count", ())
                pages.append(rows[0][0])
        assert pages[2] <= 1.5 * pages[0]
        ((first, count),), _ = backend_of(client)._run("SELECT min(seq), count(*) FROM journal", ())
        assert first > 300
        assert count < 60
    with open_client(path, bootstrap=False) as late:
        assert late.list_samples("p").sample_ids == []


def test_a_client_whose_file_was_replaced_writes_nothing_and_says_so(tmp_path):
    path, copy = tmp_path / "store.sqlite", tmp_path / "copy.sqlite"
    with open_client(path) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        backend_of(client)._run("PRAGMA wal_checkpoint(TRUNCATE)", ())
        shutil.copy(path, copy)
        held = client.claim_meta("p", "t", ["x"], 1, lease_s=60)
        copy.replace(path)
        for name in ("store.sqlite-wal", "store.sqlite-shm"):
            (tmp_path / name).unlink()
        with pytest.raises(BackendUnavailableError, match="is not the one that this client opened"):
            client.ack(held)
    with open_client(path, bootstrap=False) as again:
        mine = again.claim_meta("p", "t", ["x"], 1, lease_s=60)
        assert mine.sample_ids == ["a"]
        with pytest.raises(LeaseExpiredError):
            again.ack(held)
        again.ack(mine)
