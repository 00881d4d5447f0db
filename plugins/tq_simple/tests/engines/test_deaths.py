"""The storage unit and the controller die: what their clients are told. `test_chaos` kills them under load.

The tests share an instance, in this order: it goes on after each, but not after the last.
"""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from known_rows import STARTS_S, eventually, put, right

from dataplane_core import connect
from dataplane_core.errors import BackendUnavailableError, LostSamplesError, MissingDataError, OperationTimeoutError
from dataplane_testkit import backend_of
from dataplane_tq_simple._messages import UnitRecords

NAME = "that-dies"


def options(address, **more):
    own = {"instance": NAME, "ray_address": address, **more}
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
    owner.register_partition("p", ["x"], None, ["train"])
    yield owner
    owner.clear_samples(None, "p")


@pytest.fixture
def kill(pid_of):
    """Kills the controller, or with ``/`` its unit."""
    return lambda name="": os.kill(pid_of(f"tq-{NAME}{name}"), signal.SIGKILL)


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


def test_a_put_waits_while_no_unit_runs_and_rows_that_were_lost_are_named(client, config, kill):
    put(client, ["before-0", "before-1"])
    kill("/")
    put(client, ["after-2", "after-3"])
    assert right(client, ["after-2", "after-3"])
    assert is_lost(client, "before-1")
    with connect(config, bootstrap=False) as late:
        assert right(late, ["after-2", "after-3"]), "who attaches later learns the addresses too"
        assert is_lost(late, "before-1")
    (unit,) = client.list_units()
    assert (unit.name, unit.num_starts, unit.num_rows, unit.num_lost) == ("unit-0", 2, 2, 2)
    put(client, ["before-0"], value=7)  # produced again, in place
    assert right(client, ["before-0"], value=7)
    client.clear_samples(["before-1"], "p")
    with pytest.raises(MissingDataError, match="cleared"):
        client.get_samples(["before-1"], "p", ["x"])
    client.clear_samples(None, "p")
    (unit,) = client.list_units()
    assert (unit.num_rows, unit.size_bytes, unit.num_lost) == (0, 0, 0)
    client.register_partition("p", ["x"], None, ["train"])


def test_a_read_that_waits_for_a_unit_asks_the_new_controller(client, kill, pid_of, monkeypatch):
    ids = [f"a-{row}" for row in range(20)]
    put(client, ids)
    backend, asked = backend_of(client), threading.Event()
    refresh = backend.refresh
    monkeypatch.setattr(backend, "refresh", lambda deadline: (asked.set(), refresh(deadline)))
    process = pid_of(f"tq-{NAME}/")
    os.kill(process, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(client.get_samples, ids, "p", ["x"])
        assert asked.wait(STARTS_S), "it does not ask the controller whether the unit has ended"
        kill()
        assert [each.state for each in client.list_units()] == ["serving"]
        os.kill(process, signal.SIGKILL)
        with pytest.raises(LostSamplesError):
            reading.result(2 * STARTS_S)


def test_who_cannot_wait_gets_an_error_to_retry_and_without_its_journal_all_is_lost(owner, config, kill):
    client = owner
    client.register_partition("p", ["x"], None, ["train"])
    put(client, ["a-1"])
    engine = backend_of(client)

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
    with pytest.raises(BackendUnavailableError, match=r"dead for good[\s\S]*no log") as error:
        client.list_samples("p")
    assert not error.value.retryable
    hidden.rename(journal)


# --- instances of their own -------------------------------------------------------------------------------------------


def test_units_of_several_ledgers_have_names_of_their_own(ray_address):
    """Each ledger has a controller and units."""
    config = {**options(ray_address, instance="several"), "num_ledgers": 2}
    with connect(config, bootstrap=True) as client, connect(config, bootstrap=False) as other:
        assert [each.name for each in client.list_units()] == ["0:unit-0", "1:unit-0"]
        for number in range(6):
            client.register_partition(f"p{number}", ["x"], None, ["train"])
            client.put_samples(["a"], f"p{number}", {"x": torch.full((1, 50), number)})
        found = [other.get_samples(["a"], f"p{number}", ["x"])["x"][0, 0].item() for number in range(6)]
        assert found == list(range(6))
        assert sum(each.num_rows for each in other.list_units()) == 6
