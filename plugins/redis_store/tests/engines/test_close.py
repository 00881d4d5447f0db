"""`close` while the server or the owner does not answer: its parts share one deadline."""

import contextlib
import os
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis_servers import owner_pid, wait_until

from dataplane_core import connect as connect_to
from dataplane_redis._server import PrivateServer
from dataplane_testkit import backend_of


def test_close_ends_all_connections(plain, connect):
    def connected():
        return plain.info("clients")["connected_clients"]

    before = connected()
    client = connect(url=plain.url, partition="p")
    link = backend_of(client)._link
    assert connected() > before
    client.close()
    wait_until(lambda: connected() == before)
    assert link.label  # it is still there, so nobody else has closed them


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("place", ["private", "server"])
def test_close_ends_calls_that_wait(place, how, start_server, monkeypatch):
    deadlines = []
    stop = PrivateServer.stop
    monkeypatch.setattr(PrivateServer, "stop", lambda self, until: (deadlines.append(until), stop(self, until)))
    server = start_server() if place == "server" else None
    options = {"namespace": f"close-{uuid.uuid4().hex[:8]}"} | ({"url": server.url} if server else {})
    client = connect_to({"backend": "redis_store", "options": options, "op_timeout_s": 60.0}, bootstrap=True)
    backend = backend_of(client)
    client.register_partition("p", ["x"], None, ["train"])
    pids = [owner_pid(client), backend._server.pid if server is None else server.process.pid]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.claim_meta, "p", "train", ["x"], 1, timeout_s=300.0)
        wait_until(lambda: backend._owner._session._waiting)
        try:
            for pid in pids:
                os.kill(pid, how)
            client._connection.config = client.config.model_copy(update={"op_timeout_s": 1.0})
            client.close()
            assert deadlines == ([] if server else [backend.stop_by])
            assert waits.exception(60) is not None
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
