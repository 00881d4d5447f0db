"""What an interrupt or a close in a handler leaves. `tests/interrupts` makes them at every moment of an operation."""

import gc
import signal
import threading
import time

import pytest

from dataplane_core import connect
from dataplane_core.client import claims
from dataplane_core.errors import BackendError, ClientClosedError, UnsupportedOperationError
from dataplane_core.ledger import LedgerThread, commands
from dataplane_core.middleware import Metrics
from dataplane_core.middleware.wire_guard import WireGuard
from dataplane_noop import NoopBackend
from dataplane_testkit import backend_of


@pytest.fixture
def handle():
    """Sets the handler of SIGALRM, which `interrupt_after` sends."""
    gc.disable()  # Python swallows what is raised while it collects
    before, limit = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)  # pytest's time limit
    yield lambda handler: signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *limit)
    gc.enable()


def interrupt_after(seconds):
    signal.setitimer(signal.ITIMER_REAL, seconds)


def fail(error=KeyboardInterrupt):
    raise error


def opened():
    """A client of a store with a sample."""
    client = connect({"backend": "noop", "op_timeout_s": 300})
    client.register_partition("p", ["x"], None, ["t"])
    client.put_samples(["a"], "p", {"x": [1.0]})
    return client


def in_the_middle(client, monkeypatch, command_type, act):
    """Has the ledger act in the middle of a command."""
    ledger = backend_of(client)._service.ledger
    apply = ledger.apply
    monkeypatch.setattr(
        ledger, "apply", lambda command, now: (isinstance(command, command_type) and act(), apply(command, now))[1]
    )


def test_an_interrupt_ends_the_wait_for_the_ledger_whose_command_is_done(handle, monkeypatch):
    struck = threading.Event()

    def strike():  # again, since the first signal may come before the caller waits
        while not struck.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    handle(lambda: struck.is_set() or (struck.set(), fail()))
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        in_the_middle(client, monkeypatch, commands.CommitPut, strike)
        with pytest.raises(KeyboardInterrupt):
            client.put_samples(["a"], "p", {"x": [1.0]})
        assert client.list_samples("p").sample_ids == ["a"]


def test_what_is_deleted_in_the_middle_of_a_command_is_refused_the_same_ledger(monkeypatch):
    with connect({"backend": "noop"}) as client:
        in_the_middle(client, monkeypatch, commands.RegisterRequest, client.list_partitions)
        with pytest.raises(UnsupportedOperationError, match="'__del__'"):
            client.register_partition("p", ["x"], None, ["t"])


@pytest.mark.parametrize("end", [LedgerThread.stop, lambda _: None], ids=["stopped", "deleted"])
def test_the_thread_of_a_ledger_ends_with_it_and_leaves_no_caller_waiting(end):
    ledger = LedgerThread()
    ledger.start()
    thread, question = ledger._thread, commands.ListPartitionsRequest()
    assert ledger.call(question) == []
    end(ledger)
    if end is LedgerThread.stop:
        with pytest.raises(ClientClosedError):
            ledger.call(question)
    del ledger
    thread.join(60)
    assert not thread.is_alive()


def test_a_close_in_a_handler_does_not_wait_for_the_call_below_and_gives_back_what_that_got(handle, monkeypatch):
    client = opened()
    ledger = backend_of(client)._service.ledger
    handle(lambda: (client.close(), fail(SystemExit)))
    with monkeypatch.context() as patch:
        patch.setattr(claims, "claimed", lambda *_: signal.raise_signal(signal.SIGALRM))
        with pytest.raises(SystemExit):
            client.claim_meta("p", "t", ["x"], 1, lease_s=600.0)
    (task,) = ledger.apply(commands.InspectRequest("p"), time.monotonic()).tasks.values()
    assert (task.num_ready, task.num_leased) == (1, 0)

    client = opened()
    with monkeypatch.context() as patch:
        patch.setattr(claims, "claimed", lambda *_: fail())
        with pytest.raises(KeyboardInterrupt):  # with its samples in hand
            client.claim_meta("p", "t", ["x"], 1, lease_s=600.0)
    assert client.claim_meta("p", "t", ["x"], 1, timeout_s=0).sample_ids == ["a"]
    handle(client.close)
    interrupt_after(0.01)
    with pytest.raises(ClientClosedError):
        client.claim_meta("p", "t", ["x"], 1, timeout_s=300)


def test_a_close_that_was_interrupted_while_it_waited_can_be_repeated(monkeypatch):
    client = connect({"backend": "noop"})
    stopped = []
    monkeypatch.setattr(backend_of(client), "stop", lambda: stopped.append(True))
    with monkeypatch.context() as patch:
        patch.setattr(client._connection, "others_run", fail)
        with pytest.raises(KeyboardInterrupt):
            client.close()
    assert stopped == []
    with pytest.raises(ClientClosedError):
        client.list_samples("p")
    for _ in range(2):
        client.close()
    assert stopped == [True]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("no")], ids=repr)
def test_what_a_stop_raises_is_raised_when_all_else_is_stopped(error, monkeypatch):
    """Of a middleware, in `close`, at the end of a ``with`` and in a connect that fails."""
    stopped, stop = [], NoopBackend.stop
    monkeypatch.setattr(NoopBackend, "stop", lambda self: (stop(self), stopped.append(self)))
    expected = type(error) if not isinstance(error, Exception) else BackendError
    client = connect({"backend": "noop", "middleware": ["metrics", "wire_guard"]})
    for each in client.middleware:
        each.stop = lambda: fail(error)
    with pytest.raises(expected), client:
        pass
    client.close()
    assert stopped == [backend_of(client)]

    monkeypatch.setattr(Metrics, "stop", lambda self: fail(error))
    monkeypatch.setattr(WireGuard, "start", lambda self, context: fail(SystemExit(4)), raising=False)
    with pytest.raises((SystemExit, expected)):
        connect({"backend": "noop", "middleware": ["metrics", "wire_guard"]})
    assert len(stopped) == 2
