"""Ctrl-C at any moment of an operation leaves a client that can be used."""

import threading

import pytest

from dataplane_core import connect
from dataplane_core.client.waiting import Waiters
from dataplane_core.errors import ClientClosedError


def test_an_interrupt_while_a_lock_is_taken_does_not_block_the_next_operation(interrupted):
    """`threading.Condition` takes its lock in Python code, which an interrupt can leave with the lock held."""
    client = connect({"backend": "noop", "op_timeout_s": 2.0})
    errors = []  # with the frames of all calls

    def operate():
        client.check_consumption_status("train", ["trainer"])

    while (error := interrupted(operate, len(errors), threading)) is not None:
        errors.append(error)
        following = threading.Thread(target=operate, daemon=True)
        following.start()
        following.join(30)
        assert not following.is_alive(), f"the operation after the interrupt before instruction {len(errors) - 1} hangs"
    client.close()
    assert errors


def test_a_close_that_was_interrupted_while_it_waited_can_be_repeated(monkeypatch):
    client = connect({"backend": "noop"})
    stopped = []
    monkeypatch.setattr(client._backend, "stop", lambda: stopped.append(True))

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client._idle, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.close()
    assert stopped == []
    with pytest.raises(ClientClosedError):
        client.list_samples("p")
    for _ in range(2):
        client.close()
    assert stopped == [True]


def test_what_begins_to_wait_on_a_client_that_is_closed_is_woken():
    waiters, woken = Waiters(), threading.Event()
    waiters.close()
    with waiters.waiting(woken.set):
        assert woken.is_set()
