"""The threads of an asyncio client: as many calls run at once as there may be threads."""

import asyncio
import threading
from queue import SimpleQueue

import pytest

from dataplane_core.client.call_threads import CallThreads


class SlowQueue(SimpleQueue):
    """Lets a thread hold back what it has taken."""

    def __init__(self):
        super().__init__()
        self.taken, self.go_on = threading.Event(), threading.Event()

    def get(self):
        call = super().get()
        self.taken.set()
        self.go_on.wait(30)
        return call


async def test_a_thread_that_has_just_taken_a_call_is_not_counted_on_for_the_next():
    threads = CallThreads("test", 2)
    threads._calls = queue = SlowQueue()
    both = threading.Barrier(2)

    calls = [threads.submit(lambda: both.wait(30))]
    queue.taken.wait(30)
    calls.append(threads.submit(lambda: both.wait(30)))
    queue.go_on.set()
    for call in calls:
        await call.end()
    assert [call.error for call in calls] == [None, None]
    assert len(threads._threads) == 2
    threads.close()


async def test_one_thread_is_enough_for_calls_one_after_the_other():
    threads = CallThreads("test", 4)

    for number in range(20):
        call = threads.submit(lambda number=number: number)
        await call.end()
        assert call.result == number
    assert len(threads._threads) == 1
    threads.close()


async def test_a_thread_that_cannot_be_started_is_not_counted_on(monkeypatch):
    threads = CallThreads("test", 1)

    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            threads.submit(int)
    call = threads.submit(int)
    await asyncio.wait_for(call.end(), 30)
    assert call.result == 0
    threads.close()


def test_event_loops_that_have_ended_are_not_kept():
    threads = CallThreads("test", 1)
    go_on = threading.Event()

    async def leave():
        threads.submit(lambda: go_on.wait(30))

    async def ask():
        await threads.submit(int).end()

    for _ in range(3):
        asyncio.run(leave())
    go_on.set()
    asyncio.run(ask())
    threads.close()
    assert not threads._ended
