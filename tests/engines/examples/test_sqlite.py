"""The SQLite example: a full disk, and a file that was replaced."""

import os
import shutil
import time
from pathlib import Path

import dataplane_sqlite_example
import pytest
import torch
from dataplane_sqlite_example import SQLiteStore

from dataplane_core import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import BackendUnavailableError, LeaseExpiredError
from dataplane_testkit import backend_of

SOURCE = Path(dataplane_sqlite_example.__file__).parents[1]

# A limit on the size of files stands for a full disk: the system cuts and refuses writes alike.
JOB = """
import resource, signal, sys
import torch
from dataplane_core import DataPlaneConfig
from dataplane_core.errors import BackendUnavailableError
from dataplane_core.connecting import connect_backend
from dataplane_sqlite_example import SQLiteStore

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with connect_backend(SQLiteStore, DataPlaneConfig(backend="sqlite_example", options={"path": sys.argv[1]})) as client:
    client.register_partition("p", ["x"], None, ["t"])
    client.put_samples(["first"], "p", {"x": torch.zeros(1, 1000)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    written = ["first"]
    try:
        for number in range(1000):
            client.put_samples([f"s{number}"], "p", {"x": torch.full((1, 10_000), float(number))})
            written.append(f"s{number}")
        raise AssertionError("never full")
    except BackendUnavailableError as error:
        assert error.retryable and error.outcome == "not_done" and "full" in str(error), repr(error)
        assert str(error).count("not done") == 1 and "may have been" not in str(error), str(error)
    for call in (
        lambda: client.register_partition("q", ["x"], None, ["t"]),
        lambda: client.claim_meta("p", "t", ["x"], 1, blocking=False),
        lambda: client.clear_samples(["first"], "p"),
    ):
        try:
            call()
        except BackendUnavailableError as error:
            assert error.retryable and "full" in str(error), repr(error)
    assert client.describe("p").num_samples in (len(written), len(written) - 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    client.put_samples(["last"], "p", {"x": torch.ones(1, 10_000)})
    found = client.list_sample_ids("p")
    assert found[-1] == "last" and found[:-1] in (written, written[1:]), found
    client.get_samples(found, "p", ["x"])
"""


def test_a_store_on_a_full_disk_says_so_and_goes_on_with_room(tmp_path, python):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    python.run("-c", JOB, tmp_path / "store.sqlite", env=env)


def open_client(path, bootstrap=True):
    config = DataPlaneConfig(backend="sqlite_example", options={"path": str(path)})
    return connect_backend(SQLiteStore, config, bootstrap=bootstrap)


def test_a_client_whose_file_was_replaced_writes_nothing_and_says_so(tmp_path):
    path, copy = tmp_path / "store.sqlite", tmp_path / "copy.sqlite"
    with open_client(path) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        backend_of(client)._run("PRAGMA wal_checkpoint(TRUNCATE)", (), time.monotonic() + 60)
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
