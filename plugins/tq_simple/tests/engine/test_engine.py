"""Calls and rows, over a real controller and two real storage units."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray
import torch

from dataplane_core.backends import RefsGoneError
from dataplane_core.errors import ClientClosedError, OperationTimeoutError
from dataplane_core.ledger import commands
from dataplane_tq_simple import TQSimpleConfig
from dataplane_tq_simple._engine import Engine
from dataplane_tq_simple._errors import UnitsGoneError
from dataplane_tq_simple._messages import Ping

Note = Callable[..., list[str]]


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
    engine.call(commands.Register("job", ["x"], None, [], None, {}, "e"), deadline)
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
    noted = engine.call(commands.ListPartitions(), soon()).partition_ids
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
