"""The private server: started, found, ended by process id, nothing left."""

import os
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from owners import owning
from redis_servers import wait_until

from dataplane_core.errors import BackendUnavailableError
from dataplane_redis._server import _folder
from dataplane_testkit import backend_of


def test_close_ends_the_server_and_leaves_no_folder(connect, runs):
    client = connect(server="private", namespace="life")
    pid, folder = backend_of(client)._server.pid, _folder("life").path
    assert runs(pid)
    assert folder.stat().st_mode & 0o077 == 0
    client.close()
    assert not runs(pid)
    assert not folder.exists()
    assert not folder.with_name(".life.lock").exists()


def test_a_server_that_was_killed_is_gone_for_good(connect, runs):
    owner = connect(server="private", namespace="killed")
    client = connect(bootstrap=False, server="private", namespace="killed", partition="p")
    columns = {"x": torch.ones(1)}
    client.put_samples(["a"], "p", columns)
    pid = backend_of(owner)._server.pid
    acts = (
        lambda: client.put_samples(["b"], "p", columns),
        lambda: client.get_samples(["a"], "p", ["x"]),
        lambda: client.claim_meta("p", "train", ["x"], 1),
    )
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.claim_meta, "p", "train", ["x"], 2, timeout_s=300.0)
        wait_until(lambda: backend_of(client)._owner._session._waiting)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not runs(pid))
        for act in (*acts, lambda: waits.result(60)):
            with pytest.raises(BackendUnavailableError, match="has ended, and all that it held is gone") as caught:
                act()
            assert not caught.value.retryable
            assert "produce their samples again" in caught.value.hint


def test_a_server_with_too_many_connections_says_how_to_have_more(connect):
    owner = connect(server="private", namespace="many")
    owner.ping()
    link = backend_of(owner)._link
    link.command("test", time.monotonic() + 60, b"", b"CONFIG", b"SET", b"maxclients", b"1")
    with pytest.raises(BackendUnavailableError, match=r"takes no more connections: .*max number of clients") as caught:
        connect(bootstrap=False, server="private", namespace="many")
    assert "ulimit -n" in caught.value.hint


@pytest.fixture
def killed_owner(python, runs):
    """Namespace and server of an owner that was just killed."""
    namespace = f"orphan-{uuid.uuid4().hex[:8]}"
    options = {"server": "private", "namespace": namespace}
    with owning(python, {"backend": "redis_store", "options": options}, "backend._server.pid") as (_, pid):
        assert runs(int(pid))
    return namespace, int(pid)


def test_the_server_ends_with_an_owner_that_is_killed(killed_owner, runs):
    namespace, pid = killed_owner
    folder = _folder(namespace).path
    wait_until(lambda: not runs(pid) and not folder.exists() and not folder.with_name(f".{namespace}.lock").exists())


def test_the_next_owner_need_not_wait_for_one_that_was_killed(connect, killed_owner, runs):
    namespace, pid = killed_owner
    client = connect(server="private", namespace=namespace)
    wait_until(lambda: not runs(pid))
    client.register_partition("p", ["x"], None, ["train"])  # nothing removed what is the new owner's
    assert connect(bootstrap=False, server="private", namespace=namespace).list_samples("p").size == 0
