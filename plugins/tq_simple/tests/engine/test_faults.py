"""Processes that die or stand still: every operation ends in time and says what happened."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import ray

from dataplane_core import connect
from dataplane_core.errors import (
    AlreadyRunningError,
    BackendUnavailableError,
    ClientClosedError,
    OperationTimeoutError,
)
from dataplane_core.hosting import Session
from dataplane_core.ledger import commands
from dataplane_testkit._timing import eventually
from dataplane_tq_simple import TQSimpleConfig, _cluster
from dataplane_tq_simple._engine import Engine
from dataplane_tq_simple._errors import LineBrokenError
from dataplane_tq_simple._messages import Ping

Stopped = Callable[[int], AbstractContextManager[None]]


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(scope="module")
def engine(ray_cluster: str) -> Iterator[Engine]:
    with Engine.open(TQSimpleConfig(instance="faults", num_storage_units=2), bootstrap=True, deadline=soon()) as engine:
        yield engine


def test_a_controller_that_stands_still(engine: Engine, note: Callable[..., list[str]], stopped: Stopped) -> None:
    note(engine, "before")
    with stopped(engine.call(Ping(), soon())):
        with pytest.raises(OperationTimeoutError, match="no answer in time from") as error:
            note(engine, "while stopped", 2.0)
        assert "did not answer Ray either" in str(error.value)
        with pytest.raises(OperationTimeoutError):
            note(engine, "while stopped", 0.3)
        with pytest.raises(OperationTimeoutError):
            Engine.open(TQSimpleConfig(instance="faults"), bootstrap=False, deadline=soon(0.5))
        engine.put_rows([1, 2], b"ab", [0, 1, 2], deadline=soon())  # the units go on
    assert note(engine, "after") == ["before", "after"]


def test_a_storage_unit_that_stands_still(engine: Engine, pid_of: Callable[[str], int], stopped: Stopped) -> None:
    engine.put_rows([10, 11], b"ab", [0, 1, 2], deadline=soon())
    with stopped(pid_of("tq-faults/unit-1")):
        for operation in (
            lambda: engine.put_rows([12, 13], b"ab", [0, 1, 2], deadline=soon(0.5)),
            lambda: engine.get_rows([10, 11], deadline=soon(0.5)),
            lambda: engine.delete_rows([12, 13], deadline=soon(0.5)),
        ):
            with pytest.raises(OperationTimeoutError, match="storage unit-1"):
                operation()
        assert bytes(engine.get_rows([10], deadline=soon())[0]) == b"a"
        assert engine.call(Ping(), soon())
    # What it received meanwhile it carries out late, and no reply of that is taken for another's.
    assert [bytes(row) for row in engine.get_rows([10, 11], deadline=soon())] == [b"a", b"b"]
    engine.delete_rows([12, 13], deadline=soon())


def test_a_delete_that_overtakes_a_put_which_was_given_up_leaves_none_of_its_rows(
    engine: Engine, pid_of: Callable[[str], int], stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both lie in the buffers of a unit that stood still, which reads its connections in turn."""
    monkeypatch.setattr(engine, "config", engine.config.model_copy(update={"chunk_size_bytes": 1}))  # a message a row
    pid, unit = pid_of("tq-faults/unit-1"), ray.get_actor("tq-faults/unit-1", namespace="dataplane")

    def ask(what: Callable[[Any], Any]) -> Any:
        return ray.get(unit.__ray_call__.remote(what), timeout=30)

    def num_puts() -> int:
        return int(ask(lambda self: self._arrivals_by_op.get("PUT_DATA", 0)))

    def delete(*handles: int) -> None:
        engine.delete_rows(handles, deadline=soon())

    with ThreadPoolExecutor(2) as pool:
        with stopped(pid):  # two connections, which both stand
            both = [pool.submit(delete, 21) for _ in range(2)]
            eventually(lambda: engine._exchange._num_leased == 2, 30.0)
        assert [each.result() for each in both] == [None, None]
        for first in range(101, 201, 20):
            handles, before = list(range(first, first + 8, 2)), num_puts()
            with stopped(pid):
                with pytest.raises(OperationTimeoutError):
                    engine.put_rows(handles, b"abcd", [0, 1, 2, 3, 4], deadline=soon(1.0))
                deleting = pool.submit(delete, *handles)
                eventually(lambda: engine._exchange._num_leased == 1, 30.0)
            deleting.result()
            eventually(lambda before=before: num_puts() == before + 4, 30.0)
            delete(21)  # carried out after them
            assert not set(handles) & ask(lambda self: self.storage_data._active_keys)


def test_closing_ends_what_other_threads_wait_for(engine: Engine, stopped: Stopped) -> None:
    attached = Engine.open(TQSimpleConfig(instance="faults"), bootstrap=False, deadline=soon())
    with ThreadPoolExecutor(1) as pool, stopped(engine.call(Ping(), soon())):
        waiting = pool.submit(attached.call, Ping(), soon())
        eventually(lambda: attached._session is not None and len(attached._session._used) == 1, 30.0)
        attached.close()
        with pytest.raises(ClientClosedError):
            waiting.result(timeout=10)
    assert engine.call(Ping(), soon())


def test_a_killed_controller(ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls and new clients are told at once, and an owner that would take its place; later it may."""
    monkeypatch.setattr(_cluster, "_SETTLE_S", 0.5)  # for which a new owner waits for the units to end
    config = TQSimpleConfig(instance="mortal")
    with Engine.open(config, bootstrap=True, deadline=soon()) as engine:
        os.kill(engine.call(Ping(), soon()), signal.SIGKILL)
        dead = "controller of instance 'mortal' is dead"
        with pytest.raises(BackendUnavailableError, match=dead) as error:
            engine.call(Ping(), soon())
        assert not error.value.retryable
        assert isinstance(error.value.__cause__, ray.exceptions.RayActorError)
        with pytest.raises(BackendUnavailableError):
            Engine.open(config, bootstrap=False, deadline=soon(), wait_s=0.5)
        with pytest.raises(AlreadyRunningError, match="its controller is dead, but its storage units"):
            Engine.open(config, bootstrap=True, deadline=soon())
    with Engine.open(config, bootstrap=True, deadline=soon()) as engine:  # once its owner has closed it
        assert engine.call(Ping(), soon())


def test_a_put_whose_connection_to_the_controller_breaks_is_done_once(
    engine: Engine, ray_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[commands.CommitPut] = []
    call = Session.call

    def lose(self: Session, what: str, deadline: float, request: Any, *args: Any) -> Any:
        reply = call(self, what, deadline, request, *args)
        if isinstance(request, commands.CommitPut) and not lost:
            lost.append(request)
            raise LineBrokenError("reset by the test.")
        return reply

    config = {"backend": "tq_simple", "options": {"instance": "faults", "ray_address": ray_cluster}}
    with connect(config, bootstrap=False) as client:
        client.register_partition("p", ["x"], None, ["train"])
        monkeypatch.setattr(Session, "call", lose)
        client.put_samples(["a", "b"], "p", {"x": [[1, 2], [3, 4]]})
        assert len(lost) == 1
        assert client.claim_meta("p", "train", ["x"], 3, blocking=False).sample_ids == ["a", "b"]
        assert client.get_samples(["a", "b"], "p", ["x"])["x"].tolist() == [[1, 2], [3, 4]]
        assert sum(each.num_rows for each in client.list_units()) == 2


_OWN_RAY_LOSES_ITS_HEAD = """
import os, signal, time
import psutil
from dataplane_core.errors import BackendUnavailableError
from dataplane_tq_simple import TQSimpleConfig, _cluster, _session
from dataplane_tq_simple._engine import Engine
from dataplane_tq_simple._messages import Ping

_cluster._END_ACTORS_S = _session._SHUTDOWN_S = 2.0  # Ray's own threads spin all that time
engine = Engine.open(TQSimpleConfig(ray_num_cpus=1), bootstrap=True, deadline=time.monotonic() + 60)
(head,) = [each for each in psutil.Process().children(recursive=True) if each.name() == "gcs_server"]
rest = psutil.Process().children(recursive=True)
head.kill()
head.wait()
engine.put_rows([1], b"a", [0, 1], deadline=time.monotonic() + 60)  # data goes on
os.kill(engine.call(Ping(), time.monotonic() + 60), signal.SIGKILL)
try:
    engine.call(Ping(), time.monotonic() + 60)
except BackendUnavailableError as error:
    print(error.retryable, error, flush=True)
engine.close()
for each in rest:
    try:
        each.kill()
    except psutil.NoSuchProcess:
        pass
os._exit(0)
"""


@pytest.mark.long
def test_closing_ends_though_rays_head_is_dead(python: Any) -> None:
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = python.run("-c", _OWN_RAY_LOSES_ITS_HEAD, timeout=150, env=env)
    assert "within 2 s: its head node is dead or does not respond" in done.stderr
    assert re.search(r"False .* is dead, and so is the head of its Ray: .* in a new process", done.stdout)


def test_actors_run_at_the_priority_of_any_other_process(engine: Engine) -> None:
    """Ray starts workers at nice 15; calls then wait for whatever else runs on the node."""
    actors = [ray.get_actor(f"tq-faults{name}", namespace="dataplane") for name in ("", "/unit-0", "/unit-1")]
    asked = [actor.__ray_call__.remote(lambda _: os.getpriority(os.PRIO_PROCESS, 0)) for actor in actors]
    assert ray.get(asked, timeout=60) == [os.getpriority(os.PRIO_PROCESS, 0)] * 3
