"""Calls into the engine that are bounded in time."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from dataplane_mooncake import _calls
from dataplane_mooncake._store import Store
from dataplane_testkit._timing import eventually


def test_an_interrupt_is_not_lost_where_the_call_has_just_ended(monkeypatch):
    wait = _calls.Call.wait

    def interrupted(call, timeout_s):
        assert wait(call, 30.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(_calls.Call, "wait", interrupted)
    monkeypatch.setattr(_calls, "_MAX_IDLE", 0)  # its thread ends with it
    with pytest.raises(KeyboardInterrupt):
        _calls.bounded("a call", lambda _: 1, time.monotonic() + 30)


def test_the_first_call_prepares_the_exit_of_the_process(monkeypatch):
    prepared = []
    monkeypatch.setattr(_calls, "_pid", None)
    monkeypatch.setattr(_calls, "atexit", SimpleNamespace(register=prepared.append))
    for _ in range(2):
        _calls.bounded("a call", lambda _: 1, time.monotonic() + 60)
    assert (prepared, _calls._pid) == ([_calls._end_all], os.getpid())


def test_a_call_that_was_given_up_goes_no_further():
    call, store = _calls.Call(), object.__new__(Store)
    call.give_up()
    store._engine = Mock()
    with pytest.raises(_calls.GivenUp):
        store.delete(call, ["key"])
    assert not store._engine.mock_calls


def test_a_connection_that_was_shut_down_counts_once():
    with socket.create_server(("127.0.0.1", 0)) as peer, socket.create_connection(peer.getsockname()):
        assert [_calls.end_connections([peer.getsockname()]) for _ in range(3)] == [1, 0, 0]


def in_threads(number):
    """The threads of these many calls that run at once."""
    together = threading.Barrier(number)

    def work(_):
        together.wait(60)
        return threading.current_thread()

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(lambda _: _calls.bounded("a call", work, time.monotonic() + 60), range(number)))


def test_calls_share_a_few_threads_and_no_more_are_kept():
    """A thread per call made the process grow: the C library gives each new one another of its heaps."""
    used = {thread for _ in range(300) for thread in in_threads(1)}
    assert len(used) <= _calls._MAX_IDLE
    used |= set(in_threads(4 * _calls._MAX_IDLE))
    eventually(lambda: sum(thread.is_alive() for thread in used) <= _calls._MAX_IDLE, 60.0)
