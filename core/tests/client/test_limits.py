"""A limit of the process that keeps a client from working is named."""

import errno
import threading

import pytest

from dataplane_core import connect, connect_async
from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import BackendError
from dataplane_noop import NoopBackend

pytestmark = pytest.mark.anyio

NO_THREAD = RuntimeError("can't start new thread")


def refuse(*_, **__):
    raise NO_THREAD


@pytest.mark.parametrize(
    ("error", "hint"),
    [(NO_THREAD, "ulimit -u"), (OSError(errno.ENOMEM, "no"), "ulimit -v"), (MemoryError(), "ulimit -v")],
    ids=repr,
)
@pytest.mark.parametrize("where", ["start", "list_partitions"])
def test_what_a_backend_lacks_is_named(error, hint, where):
    def fail(self, *_, **__):
        raise error

    def use():
        with connect_backend(lacking, DataPlaneConfig(backend="lacking")) as client:
            client.list_partitions()

    lacking = type("lacking", (NoopBackend,), {})
    setattr(lacking, where, fail if where == "start" else lambda self, request: fail(self))
    with pytest.raises(BackendError, match=hint):
        use()


def test_a_client_without_an_announcing_thread_works_and_closes(monkeypatch):
    def start_ledger(thread, start=threading.Thread.start):
        (start if thread.name == "dataplane-ledger" else refuse)(thread)

    monkeypatch.setattr(threading.Thread, "start", start_ledger)
    with connect({"backend": "noop"}) as client:
        assert client.list_partitions() == []


async def test_an_asyncio_client_that_gets_no_thread_says_so(monkeypatch):
    client = await connect_async({"backend": "noop"})
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BackendError, match="ulimit -u"):
            await client.list_partitions()
    assert await client.list_partitions() == []
    await client.close()
