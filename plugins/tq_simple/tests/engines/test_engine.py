"""Calls and rows, over a real controller and a real storage unit; and processes of these that stand still or die."""

import os
import re
import signal
import threading
import time

import pytest
import ray
import torch

from dataplane_core import connect
from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, OperationTimeoutError
from dataplane_core.hosting import HostGoneError, Memory, Session
from dataplane_core.ledger import commands
from dataplane_testkit import backend_of
from dataplane_testkit._timing import eventually
from dataplane_tq_simple import TQSimpleBackend, TQSimpleConfig, _instance
from dataplane_tq_simple._messages import UnitRecords


def soon(seconds=240.0):
    return time.monotonic() + seconds


@pytest.fixture(scope="module")
def engine(ray_address, opened):
    with opened(instance="engine") as engine:
        yield engine


@pytest.fixture(params=[True, False], ids=["memory", "wire"])
def client(request, engine, ray_address):
    """A client with an empty partition."""
    options = {"instance": "engine", "ray_address": ray_address, "share_memory": request.param}
    with connect({"backend": "tq_simple", "options": options}, bootstrap=False) as client:
        client.register_partition("p", ["x"], None, ["train"])
        yield client
        client.clear_samples(None, "p")


IDS = [f"s{row}" for row in range(20)]
ROWS = torch.arange(20 * 5000).view(20, 5000)


def test_rows_go_by_the_path_that_a_client_has(client):
    path = "memory" if backend_of(client).config.share_memory else "wire"
    client.put_samples(IDS, "p", {"x": ROWS})
    assert torch.equal(client.get_samples(IDS[::-1], "p", ["x"])["x"], ROWS.flip(0))
    assert [(each.num_rows, each.path) for each in client.list_units()] == [(20, path)]
    assert backend_of(client).moved_rows == {path: 40}


# --- a good guest ----------------------------------------------------------------------------------------------------


def test_an_engine_has_no_threads_of_its_own(engine, opened):
    before = set(threading.enumerate())  # some may end meanwhile
    with opened(instance="engine", bootstrap=False) as attached:
        attached.call(UnitRecords(), soon())
        assert set(threading.enumerate()) <= before


# --- processes that die or stand still --------------------------------------------------------------------------------


def test_a_controller_that_stands_still(engine, note, pid_of, stopped):
    note(engine, "before")
    with stopped(pid_of("tq-engine")):
        for limit_s in (2.0, 8.0, 30.0):  # on a busy machine it takes longer to ask Ray
            with pytest.raises(OperationTimeoutError) as error:
                note(engine, "while stopped", limit_s)
            if "did not answer Ray either" in str(error.value):
                break
        assert re.search("no answer in time from.*did not answer Ray either", str(error.value))
        with pytest.raises(OperationTimeoutError):
            note(engine, "while stopped", 0.3)
        with pytest.raises(OperationTimeoutError):
            TQSimpleBackend(TQSimpleConfig(instance="engine")).start(bootstrap=False, deadline=soon(0.5))
    noted = note(engine, "after")
    assert {"before", "after"} <= set(noted)
    assert "while stopped" not in noted


def test_a_storage_unit_that_stands_still(client, pid_of, stopped, hurries, told_in_time):
    client.put_samples(IDS, "p", {"x": ROWS})
    config = {"backend": "tq_simple", "options": backend_of(client).config.model_dump()}
    with connect(config, bootstrap=False) as other:
        assert len(other.list_units()) == 1  # it is connected to it
        with stopped(pid_of("tq-engine/")):
            stands_still = r"storage unit-0\..*It has not ended: it is stopped"
            told_in_time(lambda: other.get_samples(IDS, "p", ["x"]), OperationTimeoutError, stands_still, 3.0)
            with hurries(3), pytest.raises(OperationTimeoutError):
                other.put_samples(["more1", "more2"], "p", {"x": ROWS[:2]})
            assert backend_of(other).call(UnitRecords(), soon())
        # What it received meanwhile it carries out late, and no reply of that is taken for another's.
        assert torch.equal(other.get_samples(IDS, "p", ["x"])["x"], ROWS)
        other.clear_samples(None, "p")
        eventually(lambda: held_bytes(backend_of(client)) == 0, 120.0)


def held_bytes(engine):
    units = [engine._unit(number, soon()) for number in engine.living().values()]
    return sum(unit.session.call("held", soon(), Memory()).held_bytes for unit in units)


def test_a_killed_controller(ray_address, pid_of, monkeypatch, opened):
    """Calls and new clients are told at once, and an owner that would take its place; later it may."""
    config = TQSimpleConfig(instance="mortal")
    with opened(instance="mortal") as engine:
        os.kill(pid_of("tq-mortal"), signal.SIGKILL)
        dead = "controller of instance 'mortal' is dead"
        with pytest.raises(BackendUnavailableError, match=dead) as error:
            engine.call(UnitRecords(), soon())
        assert not error.value.retryable
        assert isinstance(error.value.__cause__, ray.exceptions.RayActorError)
        with pytest.raises(BackendUnavailableError):
            TQSimpleBackend(config).start(bootstrap=False, deadline=soon())
        with monkeypatch.context() as patch:
            patch.setattr(_instance, "_SETTLE_S", 0.5)  # for which a new owner waits for the old one to end
            with pytest.raises(AlreadyRunningError, match="its controller is dead, but its storage units"):
                TQSimpleBackend(config).start(bootstrap=True, deadline=soon())
    with opened(instance="mortal") as engine:  # once its owner has closed it
        assert engine.call(UnitRecords(), soon())


def test_a_put_whose_connection_to_the_controller_breaks_is_done_once(engine, ray_address, monkeypatch):
    lost = []
    call = Session.call

    def lose(self, what, deadline, request, *args):
        reply = call(self, what, deadline, request, *args)
        if isinstance(request, commands.CommitPut) and not lost:
            lost.append(request)
            raise HostGoneError("reset by the test.")
        return reply

    config = {"backend": "tq_simple", "options": {"instance": "engine", "ray_address": ray_address}}
    with connect(config, bootstrap=False) as client:
        client.register_partition("p", ["x"], None, ["train"])
        monkeypatch.setattr(Session, "call", lose)
        client.put_samples(["a", "b"], "p", {"x": [[1, 2], [3, 4]]})
        assert len(lost) == 1
        assert client.claim_meta("p", "train", ["x"], 3, blocking=False).sample_ids == ["a", "b"]
        assert client.get_samples(["a", "b"], "p", ["x"])["x"].tolist() == [[1, 2], [3, 4]]
        assert sum(each.num_rows for each in client.list_units()) == 2


def test_actors_run_at_the_priority_of_any_other_process(engine):
    """Ray starts workers at nice 15; calls then wait for whatever else runs on the node."""
    actors = [ray.get_actor(name, namespace="dataplane") for name in ("tq-engine", f"tq-engine/{engine._ray().node}")]
    asked = [actor.__ray_call__.remote(lambda _: os.getpriority(os.PRIO_PROCESS, 0)) for actor in actors]
    assert ray.get(asked, timeout=60) == [os.getpriority(os.PRIO_PROCESS, 0)] * 2
