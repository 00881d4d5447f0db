"""The checker on TransferQueue's own client: calls one after the other, and a race in a fixed order."""

import asyncio
import threading

import pytest
from in_turn import Race, put, read

from dataplane_testkit.chaos.shim import load_shim
from dataplane_testkit.chaos.worker import TASKS


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
    assert put("s0", "s1", "s2")(race["A"])
    assert read("s2", "s0")(race["B"])
    assert put("s1")(race["B"])
    assert read("s1")(race["A"])
    for name in ("A", "B"):
        race[name].claim("p0", "once", 1)
    assert race["A"].clear("p0", ["s0"])
    assert not read("s0")(race["B"])
    race.audit("once", "train")
    assert race.rules() == (set(), set())


def test_a_put_that_a_clear_overtakes_is_found_where_it_writes_over_another_sample(race, hold):
    put("a")(race["B"])
    arrived, go = hold()
    late = threading.Thread(target=put("a"), args=(race["A"],))
    late.start()
    assert arrived.wait(60)
    race["B"].clear("p0", ["a"])
    put("b")(race["B"])
    assert read("b")(race["B"])
    go.set()
    late.join()
    read("b")(race["B"])
    assert race.rules() == ({"bits"}, set())
