"""The checker on TransferQueue's own client: calls one after the other, and a race in a fixed order."""

import asyncio
import threading

import pytest
from in_turn import Race

from dataplane_testkit.chaos.shim import load_shim
from dataplane_testkit.chaos.worker import BASE, TASKS


@pytest.fixture(scope="module")
def queue(ray_address, shims):
    """A queue of its own."""
    cls = load_shim(f"{shims}/transferqueue_client.py:TransferQueue")
    queue = cls({task: fields for task, (fields, _) in TASKS.items()}, ray_address=ray_address)
    yield queue
    queue.close()


@pytest.fixture
def race(queue, tmp_path):
    """Clients "A", "B" and "audit", which share the connection of this process."""
    race = Race(tmp_path, audit=queue, A=queue, B=queue)
    yield race
    race.stop()


def put(client, *names):
    return client.write("p0", names, BASE)


def read(client, *names):
    return client.read("p0", names, BASE)


@pytest.fixture
def hold(queue, monkeypatch):
    """Holds the next put once it knows where its rows go, until the second event is set."""
    import transfer_queue as tq

    manager = tq.get_client().storage_manager
    right = manager.put_data

    def hold():
        arrived, go = threading.Event(), threading.Event()

        async def put_data(*arguments, **options):
            monkeypatch.undo()
            arrived.set()
            await asyncio.to_thread(go.wait, 60)
            return await right(*arguments, **options)

        monkeypatch.setattr(manager, "put_data", put_data)
        return arrived, go

    return hold


def test_calls_one_after_the_other_keep_the_contract(race):
    assert put(race["A"], "s0", "s1", "s2")
    assert read(race["B"], "s2", "s0")
    assert put(race["B"], "s1")
    assert read(race["A"], "s1")
    for name in ("A", "B"):
        race[name].claim("p0", "once", 1)
    assert race["A"].clear("p0", ["s0"])
    assert not read(race["B"], "s0")
    race.audit("once", "train")
    assert race.rules() == (set(), set())


def test_a_put_that_a_clear_overtakes_is_found_where_it_writes_over_another_sample(race, hold):
    put(race["B"], "a")
    arrived, go = hold()
    late = threading.Thread(target=put, args=(race["A"], "a"))
    late.start()
    assert arrived.wait(60)
    race["B"].clear("p0", ["a"])
    put(race["B"], "b")
    assert read(race["B"], "b")
    go.set()
    late.join()
    read(race["B"], "b")
    assert race.rules() == ({"bits"}, set())
