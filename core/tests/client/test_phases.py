"""What a process says that it does outside of the store: nested, in threads and tasks, and how it is announced."""

import asyncio
import contextlib
import threading

import pytest

from dataplane_core import connect
from dataplane_core.client.announcing import Phases
from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_testkit._timing import STARTS_S, eventually

pytestmark = pytest.mark.anyio


def names(phases):
    return [each.name for each in phases.announced(0.0)]


def told(phases):
    return [(each.name, list(each.groups)) for each in phases.announced(0.0)]


@pytest.fixture
def phases():
    return Phases()


@pytest.fixture
def within(phases):
    return lambda name, *groups: phases.within(name, "p" if groups else "", list(groups))


def test_the_innermost_phase_counts_and_the_outer_one_goes_on_after_it(phases, within):
    with within("rollout"):
        assert names(phases) == ["rollout"]
        with contextlib.suppress(ZeroDivisionError), within("generate"):
            assert names(phases) == ["generate"]
            raise ZeroDivisionError
        assert names(phases) == ["rollout"]
    assert names(phases) == []


def test_each_thread_has_its_own_and_what_began_first_comes_first(phases, within):
    with within("drive"), threaded(within("generate")):
        with within("score"):
            assert names(phases) == ["generate", "score"]
        assert names(phases) == ["drive", "generate"]


def test_generators_whose_phases_cross_leave_nothing_behind(phases, within):
    def generate(name):
        with within(name):
            yield name

    first, second = generate("first"), generate("second")
    next(first), next(second)
    first.close()
    assert names(phases) == ["second"]
    asyncio.run(_close(second))  # in another context than it was begun in
    assert names(phases) == []
    with within("after"):
        assert names(phases) == ["after"]


def test_a_phase_has_the_groups_of_the_one_around_it_and_none_of_one_that_has_ended(phases, within):
    first, second = within("first", "q1"), within("second", "q2", "q3")
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    with within("decode"):
        assert told(phases) == [("decode", ["q2", "q3"])]
        assert [each.partition_id for each in phases.announced(0.0)] == ["p"]
    second.__exit__(None, None, None)
    with within("score"):
        assert told(phases) == [("score", [])]


async def test_each_task_has_its_own_and_none_of_the_groups_of_a_phase_that_it_outlives(phases, within):
    inside, leave = asyncio.Event(), asyncio.Event()

    async def upload():
        with within("upload"):
            assert told(phases) == [("upload", ["q1"])]
            inside.set()
            await leave.wait()
            assert told(phases) == [("upload", [])]
        with within("log"):
            assert told(phases) == [("log", [])]
        assert told(phases) == []

    with within("generate", "q1"):
        task = asyncio.create_task(upload())  # within this phase
        await inside.wait()
        assert names(phases) == ["upload"]
    leave.set()
    await task


def test_a_phase_may_be_begun_again(phases, within):
    phase = within("generate", "q1")
    for _ in range(2):
        with phase, phase:
            assert told(phases) == [("generate", ["q1"])]
        assert told(phases) == []


async def _close(generator):
    generator.close()


def test_what_is_told_is_bounded(phases, within):
    with contextlib.ExitStack() as stack:
        for number in range(100):
            stack.enter_context(threaded(within("n" * 1000, *(f"q{number}_{place}" for place in range(50)))))
        told = phases.announced(0.0)
    assert len(told) == 64
    assert sum(len(each.groups) for each in told) == 256
    assert {len(each.name) for each in told} == {80}
    assert told[0].groups[0] == "q0_0"


@contextlib.contextmanager
def threaded(block):
    """Enters and leaves a block in a thread of its own."""
    inside, leave = threading.Event(), threading.Event()

    def run():
        with block:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait()
    yield
    leave.set()
    thread.join()


def test_the_store_lists_the_phase_of_a_client(opened):
    with opened({"backend": "noop", "announce_s": 0.05}) as client:

        def told():
            phases = [each for told in client.list_clients() for each in told.phases]
            return [(each.name, each.partition_id, list(each.groups)) for each in phases]

        with client.phase("generate", partition_id="p", groups=["q1"]):
            eventually(lambda: told() == [("generate", "p", ["q1"])], STARTS_S, "a phase that is announced")
        eventually(lambda: told() == [], STARTS_S, "the end of a phase")


def test_a_phase_has_a_name_and_its_groups_a_partition_and_who_does_not_announce_itself_notes_none():
    with connect({"backend": "noop", "announce_s": None}) as client:
        for name, more, error in (
            ("", {}, InvalidRequestError),
            (7, {}, InvalidTypeError),
            ("generate", {"groups": "q1"}, InvalidTypeError),
            ("generate", {"groups": ["q1"]}, InvalidRequestError),
            ("generate", {"groups": ["q1"], "partition_id": ""}, InvalidRequestError),
        ):
            with pytest.raises(error):
                client.phase(name, **more)
        with client.phase("generate"):
            assert names(client._connection.phases) == []
