"""Storage units and the controller die, and units come and go, while several clients put, claim and read.

The tests share an instance, in this order: it goes on after each, but not after the last.
"""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from cluster_load import STARTS_S, TASKS, Load, eventually, put, right

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.errors import (
    BackendUnavailableError,
    InvalidRequestError,
    LostSamplesError,
    MissingDataError,
    OperationTimeoutError,
)
from dataplane_testkit import backend_of
from dataplane_tq_simple._messages import UnitRecords

NAME = "that-dies"


def options(address, **more):
    own = {"instance": NAME, "ray_address": address, "num_storage_units": 2, "near_writer": False, **more}
    return {"backend": "tq_simple", "op_timeout_s": STARTS_S, "options": own}


@pytest.fixture(scope="module")
def config(ray_address, tmp_path_factory):
    return options(ray_address, journal=str(tmp_path_factory.mktemp("journals")), journal_sync=False)


@pytest.fixture(scope="module")
def owner(config):
    with connect(config, bootstrap=True) as client:
        yield client
    assert os.listdir(config["options"]["journal"]) == [], "the journal is deleted with the instance"


@pytest.fixture
def client(owner):
    """The owner, with an empty partition ``p``."""
    owner.register_partition("p", ["x"], None, TASKS)
    yield owner
    owner.clear_samples(None, "p")


@pytest.fixture
def kill(pid_of):
    """Kills the controller, or a unit by its name."""
    return lambda unit="": os.kill(pid_of(f"tq-{NAME}/{unit}" if unit else f"tq-{NAME}"), signal.SIGKILL)


def is_lost(client, sample_id):
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


def unit(client, name):
    return next((each for each in client.list_units() if each.name == name), None)


def names(client):
    return [each.name for each in client.list_units()]


def held(client):
    return [(each.num_rows, each.size_bytes, each.num_lost) for each in client.list_units()]


def test_a_unit_dies_under_load(client, config, kill):
    """Its rows are lost and named, all others are served, claims go on, and new rows use it once it runs again."""
    with Load(client, config) as load:
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
    assert held(client) == [(0, 0, 0)] * 2


def test_a_put_waits_while_no_unit_runs(client, config, kill):
    put(client, ["before-1"])
    for name in names(client):
        kill(name)
    put(client, ["after-2", "after-3"])
    assert right(client, ["after-2", "after-3"])
    assert is_lost(client, "before-1")
    with connect(config, bootstrap=False) as late:
        assert right(late, ["after-2", "after-3"]), "who attaches later learns the addresses too"
        assert is_lost(late, "before-1")
    client.clear_samples(["before-1"], "p")
    with pytest.raises(MissingDataError, match="cleared"):
        client.get_samples(["before-1"], "p", ["x"])


def test_the_controller_dies_twice_under_load(client, config, kill, pid_of):
    """Nothing committed is lost, nothing acked is given again, nothing is given to nobody."""
    eventually(lambda: [each.state for each in client.list_units()] == ["serving"] * 2, "the units are not back")
    pids = set()
    with Load(client, config) as load:
        for _ in range(2):
            pids.add(pid_of(f"tq-{NAME}"))
            kill()
            load.goes_on()
    assert len(pids) == 2
    written = [*load.first, *load.written, *load.last]
    assert sorted(client.list_samples("p")) == sorted(written)
    assert right(client, written)
    assert sum(each.num_rows for each in client.list_units()) == len(written)
    for task, claimed in load.claimed.items():
        rest = client.claim_meta("p", task, ["x"], 10**6, blocking=False).sample_ids
        assert sorted([*claimed, *rest]) == sorted(written), f"{task}: each is given once"
    client.clear_samples(None, "p")
    assert held(client) == [(0, 0, 0)] * 2


def test_a_read_that_waits_for_a_unit_asks_the_new_controller(client, kill, pid_of, monkeypatch):
    ids = [f"a-{row}" for row in range(20)]
    put(client, ids)
    places, asked = backend_of(client)._engine._places, threading.Event()
    refresh = places.refresh
    monkeypatch.setattr(places, "refresh", lambda deadline: (asked.set(), refresh(deadline)))
    process = pid_of(f"tq-{NAME}/unit-0")
    os.kill(process, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(client.get_samples, ids, "p", ["x"])
        assert asked.wait(STARTS_S), "it does not ask the controller whether the unit has ended"
        kill()
        assert [each.state for each in client.list_units()] == ["serving"] * 2
        os.kill(process, signal.SIGKILL)
        with pytest.raises(LostSamplesError):
            reading.result(2 * STARTS_S)


def test_units_come_and_go_under_load(client, config, actors, tmp_path, capsys):
    """By the command: no row is lost with a unit that is drained; those of one that is removed at once are named."""
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))

    def units(*arguments):
        assert main(["units", str(path), *arguments, "--json"]) == 0
        return {each["name"]: each for each in json.loads(capsys.readouterr().out)}

    def left(*expected):
        return lambda: actors(f"tq-{NAME}/") == {f"tq-{NAME}/{name}" for name in expected}

    eventually(lambda: [each.state for each in client.list_units()] == ["serving"] * 2, "the units are not back")
    both = ("unit-1", "unit-2")
    with Load(client, config) as load:
        added = units("add", "1")
        assert {name: each["state"] for name, each in added.items()} == {f"unit-{i}": "serving" for i in range(3)}
        load.eventually(lambda: unit(client, "unit-2").num_rows > 6, "new rows do not use the new unit")
        assert units("remove", "unit-0")["unit-0"]["state"] == "draining"
        held_now = unit(client, "unit-0").num_rows
        load.goes_on()
        assert unit(client, "unit-0").num_rows <= held_now
        assert right(client, load.first), "it serves its rows until they are cleared"
        first = list(load.written)
        assert right(client, first)
        for claimed in load.claimed.values():
            load.eventually(lambda claimed=claimed: {*load.first, *first} <= set(claimed), "what is there is not given")
        client.clear_samples([*load.first, *first], "p")
        eventually(left(*both), "its actor never ends")
        assert unit(client, "unit-0") is None
        load.eventually(lambda: all(unit(client, each).num_rows > 6 for each in both), "one of two gets no rows")

        ids = load.written[len(first) :]
        assert right(client, ids)
        units("remove", "unit-1", "--now")
        eventually(left("unit-2"), "its actor never ends")
        lost = [each for each in ids if is_lost(client, each)]
        assert 0 < len(lost) < len(ids)
        load.goes_on()
        assert main(["units", str(path), "remove", "unit-2"]) == 1
        assert "unit-2 is the only storage unit that takes rows" in capsys.readouterr().err
        assert main(["units", str(path), "list"]) == 0
        assert f"{unit(client, 'unit-1').num_lost} rows were lost with unit-1" in capsys.readouterr().out
    client.clear_samples(None, "p")
    assert list(units("list")) == ["unit-2"]


def test_units_that_were_added_outlive_the_controller(client, config, kill, actors, pid_of):
    """And one that dies meanwhile is noticed."""
    client.add_units(2)
    dies, removed, kept = names(client)
    first = [f"a-{row}" for row in range(60)]
    put(client, first)
    before = client.list_units()
    assert [each.num_rows for each in before] == [20, 20, 20]
    pids = {name: pid_of(f"tq-{NAME}/{name}") for name in (dies, removed)}

    kill()
    assert client.list_units() == before
    assert pid_of(f"tq-{NAME}/{removed}") == pids[removed]
    assert right(client, first)
    (another,) = client.add_units(1)
    assert another.name not in (dies, removed, kept)

    kill()
    os.kill(pids[dies], signal.SIGKILL)
    eventually(lambda: unit(client, dies).num_starts == before[0].num_starts + 1, "the unit is not started again")
    assert unit(client, dies).num_lost == 20
    with pytest.raises(LostSamplesError) as error:
        client.get_samples(first, "p", ["x"])
    assert len(error.value.missing_samples) == 20
    client.remove_unit(removed, now=True)

    kill()
    lost = {each.name: each.num_lost for each in client.list_units()}
    assert lost == {dies: 20, removed: 20, kept: 0, another.name: 0}
    left = {f"tq-{NAME}", *(f"tq-{NAME}/{name}" for name in (dies, kept, another.name))}
    eventually(lambda: actors(f"tq-{NAME}") == left, "the unit that was removed does not end")
    with connect(config, bootstrap=False) as late:
        put(late, ["late-1"])
        assert right(late, ["late-1"])


def test_a_unit_dies_while_it_is_drained(client, kill):
    first, *_ = names(client)
    ids = [f"a-{row}" for row in range(20)]
    put(client, ids)
    client.remove_unit(first)
    kill(first)
    eventually(lambda: unit(client, first).state == "removed", "it is not noticed")
    lost = [each for each in ids if is_lost(client, each)]
    assert len(lost) == unit(client, first).num_lost > 0
    client.clear_samples(lost, "p")
    assert unit(client, first) is None
    put(client, lost)
    assert right(client, ids)


def test_who_cannot_wait_gets_an_error_to_retry_and_without_its_journal_all_is_lost(owner, config, kill):
    client = owner
    client.register_partition("p", ["x"], None, TASKS)
    put(client, ["a-1"])
    engine = backend_of(client)._engine

    def refused():
        with suppress(OperationTimeoutError):  # the machine is busy
            try:
                engine.call(UnitRecords(), time.monotonic() + 0.1)
            except BackendUnavailableError as error:
                return error
            kill()  # Ray was faster
        return None

    kill()
    refusal = eventually(refused, "it was never away")
    assert "may have been" in str(refusal)
    assert refusal.retryable
    assert right(client, ["a-1"])

    (journal,) = Path(config["options"]["journal"]).iterdir()
    hidden = journal.with_name("hidden")
    journal.rename(hidden)
    kill()
    with pytest.raises(BackendUnavailableError, match=r"dead for good[\s\S]*no journal") as error:
        client.list_samples("p")
    assert not error.value.retryable
    hidden.rename(journal)


# --- instances of their own -------------------------------------------------------------------------------------------


def test_units_of_several_ledgers_have_names_of_their_own(ray_address):
    """Each ledger has a controller and units; new units go where there are the fewest."""
    config = {**options(ray_address, instance="several"), "num_ledgers": 2}
    with connect(config, bootstrap=True) as client, connect(config, bootstrap=False) as other:
        assert names(client) == ["0:unit-0", "0:unit-1", "1:unit-0", "1:unit-1"]
        for number in range(6):
            client.register_partition(f"p{number}", ["x"], None, ["train"])
            client.put_samples(["a"], f"p{number}", {"x": torch.full((1, 50), number)})
        found = [other.get_samples(["a"], f"p{number}", ["x"])["x"][0, 0].item() for number in range(6)]
        assert found == list(range(6))
        assert sum(each.num_rows for each in other.list_units()) == 6
        assert client.remove_unit("1:unit-1").name == "1:unit-1"
        assert sorted(each.name for each in client.add_units(2)) == ["0:unit-2", "1:unit-2"]
        with pytest.raises(InvalidRequestError, match="begins with the number of a store"):
            client.remove_unit("unit-0")
        with pytest.raises(InvalidRequestError):
            client.remove_unit("2:unit-0")
