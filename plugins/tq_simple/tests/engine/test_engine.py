"""Calls and rows, over a real controller and two real storage units; and processes of these that die or stand still."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import ray
import torch

from dataplane_core import connect
from dataplane_core.backends import RefsGoneError
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
from dataplane_tq_simple._errors import LineBrokenError, UnitsGoneError
from dataplane_tq_simple._messages import Ping

Note = Callable[..., list[str]]
Stopped = Callable[[int], AbstractContextManager[None]]


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


_next_handle = iter(range(0, 10**9, 10_000))

_WORKER = """
import sys, time
from dataplane_core.ledger import commands
from dataplane_tq_simple import TQSimpleConfig
from dataplane_tq_simple._engine import Engine

address, handle = sys.argv[1:]
config, deadline = TQSimpleConfig(instance="engine", ray_address=address), time.monotonic() + 60
with Engine.open(config, bootstrap=False, deadline=deadline) as engine:
    engine.call(commands.RegisterRequest("job", ["x"], None, [], None, {}, "e"), deadline)
    engine.put_rows([int(handle)], b"from another job", [0, 16], deadline=deadline)
    assert bytes(engine.get_rows([int(handle)], deadline=deadline)[0]) == b"from another job"
"""


@pytest.fixture(scope="module")
def engine(ray_cluster: str) -> Iterator[Engine]:
    config = TQSimpleConfig(instance="engine", num_storage_units=2, chunk_size_bytes=64 * 1024)
    with Engine.open(config, bootstrap=True, deadline=soon()) as engine:
        yield engine


def batch(lengths: Any, seed: int = 0) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Fresh handles, a buffer of random bytes, and the offsets of rows of these lengths."""
    first = next(_next_handle)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    buffer = np.random.default_rng(seed).integers(0, 256, offsets[-1], dtype=np.uint8)
    return list(range(first, first + len(lengths))), buffer, offsets


def rows_of(buffer: np.ndarray, offsets: np.ndarray) -> list[bytes]:
    return [buffer[a:b].tobytes() for a, b in itertools.pairwise(offsets)]


# --- calls -----------------------------------------------------------------------------------------------------------


def test_calls_from_threads_tasks_actors_and_other_jobs(
    engine: Engine, ray_cluster: str, python: Any, note: Note
) -> None:
    @ray.remote(num_cpus=0)
    class Client:
        def note(self, name: str) -> None:
            with Engine.open(TQSimpleConfig(instance="engine"), bootstrap=False, deadline=soon()) as engine:
                note(engine, name)

    @ray.remote(num_cpus=0)
    def note_in_task(name: str) -> None:
        with Engine.open(TQSimpleConfig(instance="engine"), bootstrap=False, deadline=soon()) as engine:
            note(engine, name)

    handle = next(_next_handle)
    client = Client.remote()
    with ThreadPoolExecutor(9) as pool:
        other_job = pool.submit(python.run, "-c", _WORKER, ray_cluster, handle)
        in_ray = [client.note.remote("actor"), note_in_task.remote("task")]
        for call in [pool.submit(note, engine, f"thread{number}") for number in range(20)]:
            call.result()
        ray.get(in_ray, timeout=60)
        other_job.result()
    noted = engine.call(commands.ListPartitionsRequest(), soon()).partition_ids
    assert sorted(noted) == sorted(["actor", "task", "job", *(f"thread{number}" for number in range(20))])
    assert bytes(engine.get_rows([handle], deadline=soon())[0]) == b"from another job"


def test_no_time_left_means_nothing_is_sent(engine: Engine, note: Note) -> None:
    with pytest.raises(OperationTimeoutError, match="Nothing was sent"):
        note(engine, "never", 0.0)
    with pytest.raises(OperationTimeoutError, match="Nothing was sent"):
        engine.put_rows([next(_next_handle)], b"x", [0, 1], deadline=soon(-1.0))
    assert "never" not in note(engine, "after")


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths",
    [
        [5],
        [0],
        [0, 0, 0],
        [3, 0, 1, 7],
        list(range(300)),
        [200_000, 0, 1, 130_000, 64 * 1024],
        [1] * 1000,
        [5, 300_000, 0, 262_144, 262_143, 7, 500_000],
    ],
    ids=lambda lengths: f"{len(lengths)} rows of {sum(lengths)} bytes",
)
def test_rows_come_back_bit_for_bit(engine: Engine, lengths: list[int]) -> None:
    handles, buffer, offsets = batch(lengths)
    engine.put_rows(handles, buffer, offsets, deadline=soon())
    expected = rows_of(buffer, offsets)
    assert [bytes(row) for row in engine.get_rows(handles, deadline=soon())] == expected

    order = np.random.default_rng(1).permutation(len(handles))
    order = np.concatenate([order, order[:3]])  # repeats
    rows = engine.get_rows(np.asarray(handles)[order], deadline=soon())
    assert [bytes(row) for row in rows] == [expected[i] for i in order]


def test_large_handles(engine: Engine) -> None:
    handles = [2**39, 2**40 - 1]
    engine.put_rows(handles, b"ab", [0, 1, 2], deadline=soon())
    assert [bytes(row) for row in engine.get_rows(handles, deadline=soon())] == [b"a", b"b"]
    engine.delete_rows(handles, deadline=soon())


def test_a_unit_refuses_what_is_meant_for_an_earlier_life_of_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have got the same port."""
    handles, buffer, offsets = batch([4] * 10)
    engine.put_rows(handles, buffer, offsets, deadline=soon())
    peer = engine._places.peer
    with monkeypatch.context() as patch:
        patch.setattr(engine._places, "peer", lambda life: peer(life)._replace(token="an earlier one"))
        with pytest.raises(UnitsGoneError, match="started again"):
            engine.put_rows(handles, buffer[::-1].copy(), offsets, deadline=soon())
        with pytest.raises(RefsGoneError, match="started again") as caught:
            engine.get_rows(handles, deadline=soon())
        assert set(caught.value.handles) <= set(handles)
        assert caught.value.handles
        with pytest.raises(UnitsGoneError, match="started again"):
            engine.delete_rows(handles, deadline=soon(1))
    assert b"".join(bytes(row) for row in engine.get_rows(handles, deadline=soon())) == bytes(buffer)
    engine.delete_rows(handles, deadline=soon())


def test_reading_what_is_not_there_says_so(engine: Engine) -> None:
    handles, buffer, offsets = batch([4] * 10)
    engine.put_rows(handles, buffer, offsets, deadline=soon())
    engine.delete_rows([handles[3], handles[4], 999_999_999], deadline=soon())
    with pytest.raises(RefsGoneError, match="lacks some of the 5 rows") as caught:
        engine.get_rows(handles, deadline=soon())
    assert not caught.value.handles, "which of them is not known"
    assert len(engine.get_rows(handles[:3] + handles[5:], deadline=soon())) == 8


def test_zero_rows_need_no_engine() -> None:
    engine = object.__new__(Engine)  # connected to nothing
    engine.put_rows([], b"", [0], deadline=soon(0))
    assert engine.get_rows([], deadline=soon(0)) == []
    engine.delete_rows([], deadline=soon(0))


def test_a_unit_holds_independent_bytes_and_lets_go_of_deleted_ones(engine: Engine) -> None:
    handles, buffer, offsets = batch([10, 20, 30, 40])

    def held(unit: Any) -> dict[int, tuple[str, int]]:
        (column,) = unit.storage_data.field_data.values()
        return {handle: (type(column[handle]).__name__, len(column[handle])) for handle in handles if handle in column}

    def ask() -> dict[int, tuple[str, int]]:
        units = [ray.get_actor(f"tq-engine/unit-{i}", namespace="dataplane") for i in range(2)]
        answers = ray.get([unit.__ray_call__.remote(held) for unit in units], timeout=10)
        return {handle: row for answer in answers for handle, row in answer.items()}

    engine.put_rows(handles, buffer, offsets, deadline=soon())
    assert ask() == {handle: ("bytes", size) for handle, size in zip(handles, [10, 20, 30, 40], strict=True)}
    engine.delete_rows(handles[:3], deadline=soon())
    assert ask() == {handles[3]: ("bytes", 40)}


def test_threads_put_get_and_delete_at_once(engine: Engine) -> None:
    def work(seed: int) -> None:
        for round_ in range(5):
            handles, buffer, offsets = batch(np.random.default_rng(seed).integers(0, 3000, 100), seed + round_)
            engine.put_rows(handles, buffer, offsets, deadline=soon())
            rows = engine.get_rows(handles, deadline=soon())
            assert [bytes(row) for row in rows] == rows_of(buffer, offsets)
            engine.delete_rows(handles, deadline=soon())

    with ThreadPoolExecutor(12) as pool:
        for done in [pool.submit(work, seed) for seed in range(12)]:
            done.result()


# --- a good guest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_torchs_thread_count_stays_as_it_was(engine: Engine, num_threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        handles, buffer, offsets = batch([100] * 10)
        engine.put_rows(handles, buffer, offsets, deadline=soon())
        engine.get_rows(handles, deadline=soon())
        engine.delete_rows(handles, deadline=soon())
        engine.call(Ping(), soon())
        with Engine.open(TQSimpleConfig(instance="engine"), bootstrap=False, deadline=soon()):
            pass
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


def test_an_engine_has_no_threads_of_its_own(engine: Engine) -> None:
    before = threading.active_count()
    with Engine.open(TQSimpleConfig(instance="engine"), bootstrap=False, deadline=soon()) as attached:
        attached.call(Ping(), soon())
        assert threading.active_count() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_use_after_a_fork_is_refused(engine: Engine) -> None:
    engine.call(Ping(), soon())
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            engine.call(Ping(), soon(5))
        except ClientClosedError as error:
            os.write(writer, str(error).encode())
            engine.close()  # neither ends the parent's instance nor hangs
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    assert "fork" in message
    assert engine.call(Ping(), soon())


# --- processes that die or stand still --------------------------------------------------------------------------------


def test_a_controller_that_stands_still(engine: Engine, note: Note, stopped: Stopped) -> None:
    note(engine, "before")
    with stopped(engine.call(Ping(), soon())):
        with pytest.raises(OperationTimeoutError, match="no answer in time from") as error:
            note(engine, "while stopped", 2.0)
        assert "did not answer Ray either" in str(error.value)
        with pytest.raises(OperationTimeoutError):
            note(engine, "while stopped", 0.3)
        with pytest.raises(OperationTimeoutError):
            Engine.open(TQSimpleConfig(instance="engine"), bootstrap=False, deadline=soon(0.5))
        engine.put_rows([1, 2], b"ab", [0, 1, 2], deadline=soon())  # the units go on
    noted = note(engine, "after")
    assert {"before", "after"} <= set(noted)
    assert "while stopped" not in noted


def test_a_storage_unit_that_stands_still(engine: Engine, pid_of: Callable[[str], int], stopped: Stopped) -> None:
    engine.put_rows([10, 11], b"ab", [0, 1, 2], deadline=soon())
    with stopped(pid_of("tq-engine/unit-1")):
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
    pid, unit = pid_of("tq-engine/unit-1"), ray.get_actor("tq-engine/unit-1", namespace="dataplane")

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
    attached = Engine.open(TQSimpleConfig(instance="engine"), bootstrap=False, deadline=soon())
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

    config = {"backend": "tq_simple", "options": {"instance": "engine", "ray_address": ray_cluster}}
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
    actors = [ray.get_actor(f"tq-engine{name}", namespace="dataplane") for name in ("", "/unit-0", "/unit-1")]
    asked = [actor.__ray_call__.remote(lambda _: os.getpriority(os.PRIO_PROCESS, 0)) for actor in actors]
    assert ray.get(asked, timeout=60) == [os.getpriority(os.PRIO_PROCESS, 0)] * 3
