"""Storage units that die, come and go while several threads and processes put, claim and read."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

from dataplane_core import connect
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import LostSamplesError, MissingDataError

STARTS_S = 60.0
NAME = "units-that-die"


def options(address: str, **more: Any) -> dict[str, Any]:
    own = {"instance": NAME, "ray_address": address, "num_storage_units": 2, **more}
    return {"backend": "tq_simple", "op_timeout_s": STARTS_S, "options": own}


@pytest.fixture
def client(ray_address: str) -> Iterator[DataPlaneClient]:
    with connect(options(ray_address), bootstrap=True) as client:
        client.register_partition("p", ["x"], None, ["train", "other"])
        yield client


def put(client: DataPlaneClient, ids: list[str], value: int = 0) -> None:
    rows = torch.tensor([[int(each.rpartition("-")[2]) + value] * 50 for each in ids])
    client.put_samples(ids, "p", {"x": rows})


def right(client: DataPlaneClient, ids: list[str], value: int = 0) -> bool:
    found = client.get_samples(ids, "p", ["x"])["x"]
    return found[:, 0].tolist() == [int(each.rpartition("-")[2]) + value for each in ids]


def kill(unit: str) -> None:
    actor = ray.get_actor(f"tq-{NAME}/{unit}", namespace="dataplane")
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=STARTS_S), signal.SIGKILL)


def eventually(holds: Callable[[], Any], what: str) -> Any:
    give_up = time.monotonic() + STARTS_S
    while not (found := holds()):
        assert time.monotonic() < give_up, what
        time.sleep(0.05)
    return found


def is_lost(client: DataPlaneClient, sample_id: str) -> bool:
    """Whether a sample is lost, and its error says all. If it is not lost, it is right."""
    try:
        assert right(client, [sample_id])
    except LostSamplesError as raised:
        error = raised
    else:
        return False
    assert error.missing_samples == (sample_id,)
    assert error.missing_cells == {sample_id: ("x",)}
    assert isinstance(error, MissingDataError)
    assert not error.retryable
    return True


def test_a_unit_dies_under_load(client: DataPlaneClient, ray_address: str) -> None:
    """Its rows are lost and named, all others are served, claims go on, and new rows use it once it runs again."""
    first = [f"a-{row}" for row in range(20)]
    put(client, first)
    stop = threading.Event()
    failures: list[BaseException] = []
    written: list[str] = []
    claimed: list[str] = []
    rounds = [0, 0, 0]

    def forever(number: int, act: Callable[[DataPlaneClient, int], None]) -> threading.Thread:
        def run() -> None:
            try:
                with connect(options(ray_address), bootstrap=False) as mine:
                    while not stop.is_set():
                        act(mine, rounds[number])
                        rounds[number] += 1
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def produce(mine: DataPlaneClient, turn: int) -> None:
        ids = [f"b{turn}-{row}" for row in range(6)]
        put(mine, ids)
        written.extend(ids)
        time.sleep(0.02)

    def consume(mine: DataPlaneClient, turn: int) -> None:
        meta = mine.claim_meta("p", "train", ["x"], 6, timeout_s=STARTS_S)
        claimed.extend(meta.sample_ids)
        for sample_id in meta.sample_ids:
            is_lost(mine, sample_id)  # or it is right

    def read(mine: DataPlaneClient, turn: int) -> None:
        is_lost(mine, first[turn % len(first)])
        time.sleep(0.01)

    threads = [forever(number, act) for number, act in enumerate((produce, consume, read))]
    try:
        eventually(lambda: min(rounds) > 3 or failures, "nothing runs")
        kill("unit-0")
        lost = eventually(lambda: [each for each in first if is_lost(client, each)], "no row is lost")
        seen = list(rounds)
        assert 0 < len(lost) < len(first), "the rows of the other unit are served"
        with pytest.raises(LostSamplesError) as error:
            client.get_samples(first, "p", ["x"])
        assert set(error.value.missing_samples) <= set(lost)
        eventually(lambda: unit(client, "unit-0").num_starts == 2 or failures, "the unit is not started again")
        eventually(lambda: all(now > then + 3 for now, then in zip(rounds, seen, strict=True)) or failures, "it hangs")
        eventually(lambda: unit(client, "unit-0").num_rows or failures, "new rows do not use the unit")
    finally:
        stop.set()
        put(client, [f"end-{row}" for row in range(12)])  # for a claim that waits
        for thread in threads:
            thread.join(STARTS_S)
    assert not failures
    assert len(claimed) == len(set(claimed))
    assert set(claimed) <= {*first, *written, *(f"end-{row}" for row in range(12))}

    assert [each for each in first if is_lost(client, each)] == lost
    put(client, lost, value=7)  # produced again, in place
    assert right(client, lost, value=7)
    gone = [each for each in written if is_lost(client, each)]
    client.clear_samples(gone, "p")
    put(client, gone, value=9)
    assert not gone or right(client, gone, value=9)
    client.clear_samples(None, "p")
    assert [(each.num_rows, each.size_bytes, each.num_lost) for each in records(client)] == [(0, 0, 0)] * 2


def records(client: DataPlaneClient) -> list[Any]:
    return client._backend._engine.units(timeout_s=STARTS_S)[0]  # type: ignore[attr-defined]


def unit(client: DataPlaneClient, name: str) -> Any:
    return next(each for each in records(client) if each.name == name)


def test_a_put_waits_while_no_unit_runs(client: DataPlaneClient) -> None:
    put(client, ["before-1"])
    for name in ("unit-0", "unit-1"):
        kill(name)
    put(client, ["after-2", "after-3"])
    assert right(client, ["after-2", "after-3"])
    assert is_lost(client, "before-1")
    with connect(options(client.config.options["ray_address"]), bootstrap=False) as late:
        assert right(late, ["after-2", "after-3"]), "who attaches later learns the addresses too"
        assert is_lost(late, "before-1")
    client.clear_samples(["before-1"], "p")
    with pytest.raises(MissingDataError, match="cleared"):
        client.get_samples(["before-1"], "p", ["x"])
