"""The process of a controller that keeps a journal is killed, and started again by Ray."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from dataplane_core import connect
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import BackendUnavailableError, LostSamplesError, OperationTimeoutError
from dataplane_testkit import backend_of

STARTS_S = 60.0
NAME = "controller-that-dies"
ROWS = 6


def options(address: str, journal: Path, **more: Any) -> dict[str, Any]:
    own = {"instance": NAME, "ray_address": address, "num_storage_units": 2, "journal": str(journal)}
    return {"backend": "tq_simple", "op_timeout_s": STARTS_S, "options": {**own, "journal_sync": False, **more}}


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    """Worker processes cannot import this file."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def client(ray_address: str, tmp_path: Path) -> Iterator[DataPlaneClient]:
    with connect(options(ray_address, tmp_path), bootstrap=True) as client:
        client.register_partition("p", ["x"], None, ["leased", "taken"])
        yield client
    assert os.listdir(tmp_path) == [], "the journal is deleted with the instance"


def pid_of(actor: str) -> int:
    handle = ray.get_actor(actor, namespace="dataplane")
    found: int = ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=STARTS_S)
    return found


def kill_controller() -> None:
    os.kill(pid_of(f"tq-{NAME}"), signal.SIGKILL)


def eventually(holds: Callable[[], Any], what: str) -> Any:
    give_up = time.monotonic() + STARTS_S
    while not (found := holds()):
        assert time.monotonic() < give_up, what
        time.sleep(0.05)
    return found


def rows(ids: list[str]) -> torch.Tensor:
    return torch.tensor([[int(each.rpartition("-")[2]), len(each), *range(48)] for each in ids])


def put(client: DataPlaneClient, ids: list[str]) -> None:
    client.put_samples(ids, "p", {"x": rows(ids)})


def right(client: DataPlaneClient, ids: list[str]) -> bool:
    return torch.equal(client.get_samples(ids, "p", ["x"])["x"], rows(ids))


def actors() -> set[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return {each["name"] for each in named if each["name"].startswith(f"tq-{NAME}")}


class Worker:
    """A process that does one thing again and again."""

    def __init__(self, config: dict[str, Any], act: str) -> None:
        self.done: list[str] = []
        self.rounds = 0
        self.failure: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(config, getattr(self, f"_{act}")))
        self._thread.start()

    def _run(self, config: dict[str, Any], act: Callable[[DataPlaneClient], None]) -> None:
        try:
            with connect(config, bootstrap=False) as client:
                while not self._stop.is_set():
                    act(client)
                    self.rounds += 1
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _put(self, client: DataPlaneClient) -> None:
        ids = [f"a{self.rounds}-{row}" for row in range(ROWS)]
        put(client, ids)
        self.done += ids
        assert right(client, ids)

    def _claim(self, client: DataPlaneClient, task: str, lease_s: float | None) -> None:
        meta = client.claim_meta("p", task, ["x"], ROWS, lease_s=lease_s)
        assert right(client, list(meta.sample_ids))
        if lease_s is not None:
            client.ack(meta)
        self.done += meta.sample_ids

    def _lease(self, client: DataPlaneClient) -> None:
        self._claim(client, "leased", 10 * STARTS_S)

    def _take(self, client: DataPlaneClient) -> None:
        self._claim(client, "taken", None)

    def _read(self, client: DataPlaneClient) -> None:
        ids = [each for each in client.list_samples("p") if each not in self.done][:50]
        if ids:
            assert right(client, ids)
            self.done += ids

    def state(self) -> tuple[int, str | None]:
        return self.rounds, self.failure

    def stop(self) -> list[str]:
        self._stop.set()
        self._thread.join()
        return self.done


def test_it_dies_twice_while_four_processes_put_claim_and_read(
    client: DataPlaneClient, ray_address: str, tmp_path: Path
) -> None:
    """Nothing committed is lost, nothing acked is given again, nothing is given to nobody."""
    actor = ray.remote(Worker).options(num_cpus=0, max_concurrency=2)
    config = options(ray_address, tmp_path)
    workers = [actor.remote(config, act) for act in ("put", "lease", "take", "read")]

    def rounds() -> list[int]:
        states = ray.get([each.state.remote() for each in workers], timeout=STARTS_S)
        assert [failure for _, failure in states if failure] == []
        return [number for number, _ in states]

    def all_go_on() -> None:
        before = rounds()
        eventually(lambda: all(now > then + 2 for now, then in zip(rounds(), before, strict=True)), "a hang")

    pids = set()
    for _ in range(2):
        all_go_on()
        pids.add(pid_of(f"tq-{NAME}"))
        kill_controller()
    all_go_on()
    stopping = [each.stop.remote() for each in workers]
    end = [f"end-{row}" for row in range(ROWS)]
    put(client, end)  # for a claim that waits
    written, leased, taken, seen = ray.get(stopping, timeout=STARTS_S)
    rounds()
    written += end
    assert len(pids) == 2

    assert sorted(client.list_samples("p")) == sorted(written)
    assert right(client, written)
    assert set(seen) <= set(written)
    assert sum(unit.num_rows for unit in client.list_units()) == len(written)
    for task, mine in (("leased", leased), ("taken", taken)):
        rest = client.claim_meta("p", task, ["x"], 10**6, blocking=False).sample_ids
        assert sorted([*mine, *rest]) == sorted(written), f"{task}: each is given once"
    client.clear_samples(None, "p")
    assert [(unit.num_rows, unit.size_bytes, unit.num_lost) for unit in client.list_units()] == [(0, 0, 0)] * 2


def test_units_that_were_added_outlive_it(client: DataPlaneClient, ray_address: str, tmp_path: Path) -> None:
    """And one that dies meanwhile is noticed."""
    (added,) = client.add_units(1)
    first = [f"a-{row}" for row in range(60)]
    put(client, first)
    before = client.list_units()
    assert [each.num_rows for each in before] == [20, 20, 20]
    pids = {name: pid_of(f"tq-{NAME}/{name}") for name in ("unit-0", added.name)}

    kill_controller()
    assert client.list_units() == before
    assert pid_of(f"tq-{NAME}/{added.name}") == pids[added.name]
    assert right(client, first)
    (another,) = client.add_units(1)
    assert another.name == "unit-3"

    kill_controller()
    os.kill(pids["unit-0"], signal.SIGKILL)
    eventually(lambda: client.list_units()[0].num_starts == 2, "the unit is not started again")
    assert client.list_units()[0].num_lost == 20
    with pytest.raises(LostSamplesError) as error:
        client.get_samples(first, "p", ["x"])
    assert len(error.value.missing_samples) == 20
    client.remove_unit(added.name, now=True)

    kill_controller()
    assert {each.name: each.num_lost for each in client.list_units()} == {
        "unit-0": 20,
        "unit-1": 0,
        added.name: 20,
        "unit-3": 0,
    }
    left = {f"tq-{NAME}", *(f"tq-{NAME}/unit-{number}" for number in (0, 1, 3))}
    eventually(lambda: actors() == left, "the unit that was removed does not end")
    with connect(options(ray_address, tmp_path), bootstrap=False) as late:
        put(late, ["late-1"])
        assert right(client, ["late-1"])


def test_a_read_that_waits_for_a_unit_asks_the_new_controller(client: DataPlaneClient) -> None:
    ids = [f"a-{row}" for row in range(20)]
    put(client, ids)
    unit = pid_of(f"tq-{NAME}/unit-0")
    os.kill(unit, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(client.get_samples, ids, "p", ["x"])
        time.sleep(1.0)  # it asks the controller whether the unit has ended
        kill_controller()
        assert [each.state for each in client.list_units()] == ["serving"] * 2
        os.kill(unit, signal.SIGKILL)
        with pytest.raises(LostSamplesError):
            reading.result(2 * STARTS_S)


def test_who_cannot_wait_gets_an_error_to_retry(client: DataPlaneClient, tmp_path: Path) -> None:
    put(client, ["a-1"])
    engine = backend_of(client)._engine

    def refused() -> BackendUnavailableError | None:
        try:
            engine.controller_pid(time.monotonic() + 0.1)
        except BackendUnavailableError as error:
            return error
        except OperationTimeoutError:  # the machine is busy
            pass
        return None

    kill_controller()
    refusal = eventually(refused, "it was never away")
    assert "may have been" in str(refusal)
    assert refusal.retryable
    assert right(client, ["a-1"])

    (journal,) = tmp_path.iterdir()
    hidden = tmp_path / "hidden"
    journal.rename(hidden)
    kill_controller()
    with pytest.raises(BackendUnavailableError, match=r"dead for good[\s\S]*no journal") as error:
        client.list_samples("p")
    assert not error.value.retryable
    hidden.rename(journal)


def test_a_folder_that_cannot_be_used_is_an_error_at_the_start(ray_address: str, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"there is no folder .*nowhere") as error:
        connect(options(ray_address, tmp_path / "nowhere"), bootstrap=True)
    assert not error.value.retryable
    assert not actors(), "nothing is left behind"


class Owner:
    """A process that bootstraps an instance."""

    def start(self, config: dict[str, Any]) -> int:
        self.client = connect(config, bootstrap=True)
        self.client.add_units(1)
        return os.getpid()


def test_no_unit_outlives_the_process_that_bootstrapped(ray_address: str, tmp_path: Path) -> None:
    owner = ray.remote(Owner).options(num_cpus=0).remote()
    pid = ray.get(owner.start.remote(options(ray_address, tmp_path)), timeout=2 * STARTS_S)
    assert f"tq-{NAME}/unit-2" in actors()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not actors(), "the unit that was added does not end")
