"""Owners and ledger's processes of stores of their own: how they start, and what is left when one is killed."""

import contextlib
import os
import resource
import signal
import time
import uuid
from pathlib import Path

import pytest
import torch
from owners import owning

from dataplane_core import connect
from dataplane_core.errors import BackendUnavailableError
from dataplane_core.host_memory import memory_limit
from dataplane_testkit import backend_of
from dataplane_testkit._timing import eventually

WAIT_S = 60.0


@pytest.fixture
def fresh():
    """The config of a store that nobody has started."""
    return {"backend": "shm_store", "options": {"namespace": f"t-{uuid.uuid4().hex[:8]}", "capacity_bytes": 64 << 20}}


@pytest.mark.parametrize("victim", ["owner", "ledger"])
def test_all_clients_learn_at_once_that_the_store_has_ended(fresh, victim, python):
    with contextlib.ExitStack() as clients:
        with owning(python, fresh, "backend._process.pid") as (owner, said):
            ledger = int(said)
            client = clients.enter_context(connect(fresh, bootstrap=False))
            client.register_partition("p", ["x"], None, ["train"])
            assert client.list_samples("p").sample_ids == []
            os.kill(owner.pid if victim == "owner" else ledger, signal.SIGKILL)
            eventually(lambda: not Path(f"/proc/{ledger}").exists() or victim == "ledger", WAIT_S)
            for _ in range(2):
                with pytest.raises(BackendUnavailableError, match="has ended, and its data with it") as info:
                    client.list_samples("p")
                assert not info.value.retryable
        # nothing is in the way of the next store of this name, and clients of the old one are none of it
        later = clients.enter_context(connect(fresh))
        clients.enter_context(connect(fresh, bootstrap=False))
        later.register_partition("p", ["x", "y"], None, ["train"])
        columns = {"x": torch.ones(1), "y": torch.ones(1)}
        for act in (
            lambda: client.list_samples("p"),
            lambda: client.put_samples(["a"], "p", columns),
            lambda: client.get_samples(["a"], "p", ["y"]),
        ):
            with pytest.raises(BackendUnavailableError, match="has ended, and its data with it"):
                act()
        assert later.list_samples("p").sample_ids == []


def test_a_killed_owners_forks_hold_neither_its_folder_nor_its_process(fresh, python):
    fork = "os.fork() or time.sleep(1000)"  # which sleeps itself
    with owning(python, fresh, f"backend._process.pid, {fork}") as (owner, said):
        ledger, child = map(int, said.split())
        try:
            owner.kill()
            owner.wait()
            eventually(lambda: not Path(f"/proc/{ledger}").exists(), WAIT_S)
            with connect(fresh) as client:
                client.register_partition("p", ["x"], None, [])
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_ledgers_process_may_open_as_many_files_as_the_system_allows(fresh):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        with connect(fresh) as client:
            assert resource.prlimit(backend_of(client)._process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connecting_does_not_wait_for_the_memory(fresh):
    capacity_bytes = memory_limit().most_bytes
    fresh["options"].update(capacity_bytes=capacity_bytes, touch_ahead_bytes=1 << 20)
    with connect(fresh) as client:

        def statistics():
            return backend_of(client).statistics(time.monotonic() + WAIT_S)

        assert statistics().size_bytes > capacity_bytes
        eventually(lambda: statistics().touched_bytes >= 1 << 20, WAIT_S)
        assert statistics().touched_bytes < 1 << 24
