"""Storage units that die, come and go while several threads and processes put, claim and read."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import InvalidRequestError, LostSamplesError, MissingDataError, UnsupportedOperationError

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


class Load:
    """Clients that put, claim and read at the same time, each in a thread of its own, until the block ends.

    Attributes:
        first: Samples that were there before.
        last: Samples that are put at the end.
        written: Samples that were put in between.
        claimed: Samples that were claimed.
        rounds: How often each has put, claimed, read.
    """

    def __init__(self, client: DataPlaneClient, address: str) -> None:
        self._client, self._address = client, address
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self.first = [f"a-{row}" for row in range(20)]
        self.last = [f"end-{row}" for row in range(12)]
        self.written: list[str] = []
        self.claimed: list[str] = []
        self.rounds = [0, 0, 0]

    def __enter__(self) -> Load:
        put(self._client, self.first)
        acts = (self._produce, self._consume, self._read)
        self._threads = [threading.Thread(target=self._run, args=each) for each in enumerate(acts)]
        for thread in self._threads:
            thread.start()
        self.goes_on()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        put(self._client, self.last)  # for a claim that waits
        for thread in self._threads:
            thread.join(STARTS_S)
        if kind is None:
            assert not self._failures
            assert len(self.claimed) == len(set(self.claimed))
            assert set(self.claimed) <= {*self.first, *self.written, *self.last}

    def goes_on(self) -> None:
        """Waits until each did more."""
        seen = list(self.rounds)
        self.eventually(lambda: all(now > then + 3 for now, then in zip(self.rounds, seen, strict=True)), "a hang")

    def eventually(self, holds: Callable[[], Any], what: str) -> Any:
        found = eventually(lambda: holds() or self._failures, what)
        assert not self._failures
        return found

    def _run(self, number: int, act: Callable[[DataPlaneClient, int], None]) -> None:
        try:
            with connect(options(self._address), bootstrap=False) as mine:
                while not self._stop.is_set():
                    act(mine, self.rounds[number])
                    self.rounds[number] += 1
        except BaseException as error:
            self._failures.append(error)

    def _produce(self, mine: DataPlaneClient, turn: int) -> None:
        ids = [f"b{turn}-{row}" for row in range(6)]
        put(mine, ids)
        self.written.extend(ids)
        time.sleep(0.02)

    def _consume(self, mine: DataPlaneClient, turn: int) -> None:
        meta = mine.claim_meta("p", "train", ["x"], 6, timeout_s=STARTS_S)
        self.claimed.extend(meta.sample_ids)
        for sample_id in meta.sample_ids:
            with suppress(MissingDataError):  # lost, or cleared by the test
                assert right(mine, [sample_id])

    def _read(self, mine: DataPlaneClient, turn: int) -> None:
        with suppress(MissingDataError):
            assert right(mine, [self.first[turn % len(self.first)]])
        time.sleep(0.01)


def unit(client: DataPlaneClient, name: str) -> Any:
    return next((each for each in client.list_units() if each.name == name), None)


def test_a_unit_dies_under_load(client: DataPlaneClient, ray_address: str) -> None:
    """Its rows are lost and named, all others are served, claims go on, and new rows use it once it runs again."""
    with Load(client, ray_address) as load:
        kill("unit-0")
        lost = load.eventually(lambda: [each for each in load.first if is_lost(client, each)], "no row is lost")
        assert 0 < len(lost) < len(load.first), "the rows of the other unit are served"
        with pytest.raises(LostSamplesError) as error:
            client.get_samples(load.first, "p", ["x"])
        assert set(error.value.missing_samples) <= set(lost)
        load.goes_on()
        load.eventually(lambda: unit(client, "unit-0").num_starts == 2, "the unit is not started again")
        load.eventually(lambda: unit(client, "unit-0").num_rows, "new rows do not use the unit")
        load.goes_on()

    assert [each for each in load.first if is_lost(client, each)] == lost
    put(client, lost, value=7)  # produced again, in place
    assert right(client, lost, value=7)
    gone = [each for each in load.written if is_lost(client, each)]
    client.clear_samples(gone, "p")
    if gone:
        put(client, gone, value=9)
        assert right(client, gone, value=9)
    client.clear_samples(None, "p")
    assert [(each.num_rows, each.size_bytes, each.num_lost) for each in client.list_units()] == [(0, 0, 0)] * 2


def test_a_put_waits_while_no_unit_runs(client: DataPlaneClient, ray_address: str) -> None:
    put(client, ["before-1"])
    for name in ("unit-0", "unit-1"):
        kill(name)
    put(client, ["after-2", "after-3"])
    assert right(client, ["after-2", "after-3"])
    assert is_lost(client, "before-1")
    with connect(options(ray_address), bootstrap=False) as late:
        assert right(late, ["after-2", "after-3"]), "who attaches later learns the addresses too"
        assert is_lost(late, "before-1")
    client.clear_samples(["before-1"], "p")
    with pytest.raises(MissingDataError, match="cleared"):
        client.get_samples(["before-1"], "p", ["x"])


def test_units_come_and_go_under_load(
    client: DataPlaneClient, ray_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command: no row is lost with a unit that is drained; those of one that is removed at once are named."""
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(options(ray_address)))

    def units(*arguments: str) -> dict[str, Any]:
        assert main(["units", str(config), *arguments, "--json"]) == 0
        return {each["name"]: each for each in json.loads(capsys.readouterr().out)}

    def actors() -> set[str]:
        named = ray.util.list_named_actors(all_namespaces=True)
        return {each["name"].rpartition("/")[2] for each in named if each["name"].startswith(f"tq-{NAME}/")}

    both = ("unit-1", "unit-2")
    with Load(client, ray_address) as load:
        added = units("add", "1")
        assert {name: each["state"] for name, each in added.items()} == {f"unit-{i}": "serving" for i in range(3)}
        load.eventually(lambda: unit(client, "unit-2").num_rows > 6, "new rows do not use the new unit")
        assert units("remove", "unit-0")["unit-0"]["state"] == "draining"
        held = unit(client, "unit-0").num_rows
        load.goes_on()
        assert unit(client, "unit-0").num_rows <= held
        assert right(client, load.first), "it serves its rows until they are cleared"
        first = list(load.written)
        assert right(client, first)
        load.eventually(lambda: {*load.first, *first} <= set(load.claimed), "what was written is not claimed")
        client.clear_samples([*load.first, *first], "p")
        eventually(lambda: actors() == set(both), "its actor never ends")
        assert unit(client, "unit-0") is None
        load.eventually(lambda: all(unit(client, each).num_rows > 6 for each in both), "one of two gets no rows")

        ids = load.written[len(first) :]
        assert right(client, ids)
        units("remove", "unit-1", "--now")
        eventually(lambda: actors() == {"unit-2"}, "its actor never ends")
        lost = [each for each in ids if is_lost(client, each)]
        assert 0 < len(lost) < len(ids)
        load.goes_on()
        assert main(["units", str(config), "remove", "unit-2"]) == 1
        assert "unit-2 is the only storage unit that takes rows" in capsys.readouterr().err
        assert main(["units", str(config), "list"]) == 0
        assert f"{unit(client, 'unit-1').num_lost} rows were lost with unit-1" in capsys.readouterr().out
    client.clear_samples(None, "p")
    assert list(units("list")) == ["unit-2"]


@pytest.mark.long
def test_a_unit_dies_while_it_is_drained(client: DataPlaneClient) -> None:
    ids = [f"a-{row}" for row in range(20)]
    put(client, ids)
    client.remove_unit("unit-0")
    kill("unit-0")
    eventually(lambda: unit(client, "unit-0").state == "removed", "it is not noticed")
    lost = [each for each in ids if is_lost(client, each)]
    assert len(lost) == unit(client, "unit-0").num_lost == 10
    client.clear_samples(lost, "p")
    assert unit(client, "unit-0") is None
    put(client, lost)
    assert right(client, ids)


def test_other_stores_have_no_units() -> None:
    with connect({"backend": "noop"}) as client, pytest.raises(UnsupportedOperationError, match="units"):
        client.list_units()


def test_units_of_several_ledgers_have_names_of_their_own(ray_address: str) -> None:
    """Each ledger has a controller and units; new units go where there are the fewest."""
    config = options(ray_address)
    config = {**config, "num_ledgers": 2, "options": {**config["options"], "instance": "several"}}
    with connect(config, bootstrap=True) as client, connect(config, bootstrap=False) as other:
        assert [each.name for each in client.list_units()] == ["0:unit-0", "0:unit-1", "1:unit-0", "1:unit-1"]
        for number in range(6):
            client.register_partition(f"p{number}", ["x"], None, ["train"])
            client.put_samples(["a"], f"p{number}", {"x": torch.full((1, 50), number)})
        assert [other.get_samples(["a"], f"p{number}", ["x"])["x"][0, 0].item() for number in range(6)] == list(
            range(6)
        )
        assert sum(each.num_rows for each in other.list_units()) == 6
        assert client.remove_unit("1:unit-1").name == "1:unit-1"
        assert sorted(each.name for each in client.add_units(2)) == ["0:unit-2", "1:unit-2"]
        with pytest.raises(InvalidRequestError, match="begins with the number of a store"):
            client.remove_unit("unit-0")
        with pytest.raises(InvalidRequestError):
            client.remove_unit("2:unit-0")
