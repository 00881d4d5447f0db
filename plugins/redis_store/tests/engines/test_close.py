"""`close` while the server does not answer: its parts share one deadline."""

import contextlib
import os
import signal
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis_servers import wait_until

from dataplane_core import connect
from dataplane_core.client.announcing import Announcer
from dataplane_redis._link import Link
from dataplane_redis._server import PrivateServer
from dataplane_redis._wakes import Wakes
from dataplane_testkit import backend_of


@pytest.fixture
def deadlines(monkeypatch):
    """The deadlines of everything that this thread waits for, in order."""
    found = []

    def note(cls, name, at):
        method = getattr(cls, name)

        def noted(self, *args, **more):
            if args and threading.current_thread() is threading.main_thread():
                found.append(args[at])
            return method(self, *args, **more)

        monkeypatch.setattr(cls, name, noted)

    note(Link, "commands", 1)
    note(Wakes, "close", 0)
    note(PrivateServer, "stop", 0)
    note(Announcer, "end", 0)
    return found


@pytest.fixture(params=["private", "server", "sentinel", "cluster"])
def place(request, start_server, start_sentinel, start_cluster):
    """Options of a store, and the processes that keep it; those of a private server are known later."""
    if request.param == "private":
        return {}, []
    if request.param == "cluster":
        nodes = start_cluster()
        return {"url": nodes[0].url}, [node.process.pid for node in nodes]
    server = start_server()
    if request.param == "server":
        return {"url": server.url}, [server.process.pid]
    sentinel = start_sentinel()
    sentinel.admin("SENTINEL MONITOR", "plane", "127.0.0.1", server.port, 1)
    wait_until(lambda: sentinel.admin("SENTINEL MASTER", "plane")["flags"] == "master")
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/plane"
    return {"url": url}, [sentinel.process.pid, server.process.pid]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_all_that_close_waits_for_has_one_deadline(place, how, deadlines):
    options, pids = place
    client = connect(
        {
            "backend": "redis_store",
            "options": {**options, "namespace": f"close-{uuid.uuid4().hex[:8]}"},
            "op_timeout_s": 60.0,
            "announce_s": 0.01,
        },
        bootstrap=True,
    )
    backend = backend_of(client)
    client.register_partition("p", ["x"], None, ["train"])  # leaves a mark on a server with a url
    (announcer,) = [each for each in client._to_stop if isinstance(each, Announcer)]
    wait_until(lambda: announcer._listed)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.claim_meta, "p", "train", ["x"], 1, timeout_s=300.0)
        wait_until(lambda: any(each.promised for each in list(backend._wakes._waiting.values())))
        pids = pids or [backend._server.pid]
        try:
            for pid in pids:
                os.kill(pid, how)
            deadlines.clear()
            client._config = client.config.model_copy(update={"op_timeout_s": 1.0})
            client.close()
            assert len(deadlines) >= 3
            assert set(deadlines) == {backend.stop_by}
            assert waits.exception(60) is not None
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
