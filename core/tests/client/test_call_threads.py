"""The threads of an asyncio client: as many calls run at once as there may be threads."""

import asyncio
import threading
from queue import SimpleQueue

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


def test_a_thread_that_has_just_taken_a_call_is_not_counted_on_for_the_next():
    threads = CallThreads("test", 2)
    threads._calls = queue = SlowQueue()
    both = threading.Barrier(2)

    async def main():
        calls = [threads.submit(lambda: both.wait(30))]
        queue.taken.wait(30)
        calls.append(threads.submit(lambda: both.wait(30)))
        queue.go_on.set()
        for call in calls:
            await call.end()
        assert [call.error for call in calls] == [None, None]

    asyncio.run(main())
    assert len(threads._threads) == 2
    threads.close()


def test_one_thread_is_enough_for_calls_one_after_the_other():
    threads = CallThreads("test", 4)

    async def main():
        for number in range(20):
            call = threads.submit(lambda number=number: number)
            await call.end()
            assert call.result == number

    asyncio.run(main())
    assert len(threads._threads) == 1
    threads.close()
