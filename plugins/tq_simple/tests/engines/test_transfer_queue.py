"""`storage: transfer_queue`, on a real TransferQueue that was there before: what its users rely on.

The last test but one kills one of its two storage units, and its controller.
"""

import os
import signal
import sys
import time

import numpy as np
import pytest
import ray
import torch
from transfer_queue_case import config_of, found_by_doctor, holds

from dataplane_core import connect
from dataplane_core.backends import Level
from dataplane_core.cli import _examination
from dataplane_core.errors import (
    BackendUnavailableError,
    CapacityExceededError,
    ConfigError,
    LostSamplesError,
    OperationTimeoutError,
)
from dataplane_core.ledger import commands
from dataplane_testkit import backend_of

__all__ = ["holds"]


def test_a_system_that_runs_is_used_and_left_as_it_was(ray_address, holds):
    before, config = holds(), config_of("guest", ray_address)
    threads = torch.get_num_threads()
    with connect(config) as client:
        client.put_samples([f"s{i}" for i in range(9)], "p", {"x": torch.arange(9)})
        with connect(config, bootstrap=False) as attached:
            assert attached.get_samples(["s3"], "p", ["x"])["x"].tolist() == [3]
        with pytest.raises(ConfigError, match="runs with storage: transfer_queue"):
            connect({"backend": "tq_simple", "options": {**config["options"], "storage": "memory"}}, bootstrap=False)
        new = holds().keys() - before
        assert len(new) == 1
        assert next(iter(new)).startswith("dataplane/guest/")
        assert len(holds()[next(iter(new))]) == 9
        client.clear_samples(None, "p")
        assert holds()[next(iter(new))] == []
    assert holds() == before
    assert torch.get_num_threads() == threads, "TransferQueue sets it at each put and get"


def test_rows_of_a_killed_owner_go_when_its_instance_is_bootstrapped_again(ray_address, holds, python):
    program = (
        "import os, signal, sys, torch\n"
        "from dataplane_core import connect\n"
        "client = connect(eval(sys.argv[1]))\n"
        "client.put_samples(['s'], 'p', {'x': torch.ones(1)})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    config, before = config_of("killed", ray_address), holds()
    python.run("-c", program, config, check=False)
    assert len(holds()) == len(before) + 1
    with connect(config):
        assert [name for name in holds() if name.startswith("dataplane/killed/")] == []
    assert holds() == before


def test_what_a_late_put_wrote_is_not_read_as_another_row(ray_address, holds, monkeypatch):
    with connect(config_of("late", ray_address)) as client:
        client.put_samples(["a"], "p", {"x": torch.ones(1)})
        deadline, engine = time.monotonic() + 30, backend_of(client)
        ((handle, _),) = engine.call_ledger(deadline, commands.Locate("p", ["a"], ["x"])).refs
        entries = engine._entries
        with monkeypatch.context() as patch:  # TransferQueue gave its place to the row of handle 1000 before
            patch.setattr(engine, "_entries", lambda *_, **__: entries([handle]))
            engine.put_rows([1000], memoryview(b"late"), np.array([0, 4]), deadline)
        with pytest.raises(LostSamplesError):
            client.get_samples(["a"], "p", ["x"])


def test_a_full_system_is_a_capacity_error_and_keeps_nothing_of_the_put(ray_address, holds):
    with connect(config_of("full", ray_address, on_full="raise")) as client:
        with pytest.raises(CapacityExceededError, match="total_storage_size"):
            client.put_samples([f"s{i}" for i in range(30_000)], "p", {"x": torch.arange(30_000)})
        assert [len(keys) for name, keys in holds().items() if name.startswith("dataplane/full/")] in ([], [0])
        client.put_samples(["s"], "p", {"x": torch.ones(1, dtype=torch.long)})


def test_without_the_package_the_error_names_its_extra(ray_address, monkeypatch):
    monkeypatch.setitem(sys.modules, "transfer_queue", None)
    with pytest.raises(ConfigError, match=r'pip install "dataplane-tq-simple\[transfer_queue\]"'):
        connect(config_of("none", ray_address))
    assert found_by_doctor(config_of("none", ray_address))[-1][0] is Level.ERROR


def test_storage_memory_does_not_import_it(ray_address, python):
    program = (
        "import sys\n"
        "from dataplane_core import connect\n"
        "with connect({'backend': 'tq_simple', 'options': {'instance': 'memory', 'ray_address': sys.argv[1]}}):\n"
        "    print('transfer_queue' in sys.modules)\n"
    )
    assert python.run("-c", program, ray_address).stdout == "False\n"


def pid_of_actor(name, namespace):
    return ray.get(ray.get_actor(name, namespace=namespace).__ray_call__.remote(lambda _: os.getpid()))


@pytest.fixture
def unit_pid(holds):
    """The process of one of the two storage units."""
    return pid_of_actor("TransferQueueStorageUnit#1", "elsewhere")


def test_calls_end_at_their_deadlines_while_a_unit_is_stopped(ray_address, unit_pid):
    with connect({**config_of("stopped", ray_address), "op_timeout_s": 3}) as client:
        client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
        os.kill(unit_pid, signal.SIGSTOP)
        try:
            with pytest.raises(OperationTimeoutError, match="no answer in time from TransferQueue"):
                client.get_samples(["a", "b"], "p", ["x"])
            with pytest.raises(OperationTimeoutError):
                client.put_samples(["c", "d"], "p", {"x": torch.arange(2)})
        finally:
            os.kill(unit_pid, signal.SIGCONT)
        client.put_samples(["e", "f"], "p", {"x": torch.arange(4, 6)})
        assert client.get_samples(["a", "b", "e", "f"], "p", ["x"])["x"].tolist() == [0, 1, 4, 5]


def test_a_unit_or_the_controller_that_dies_ends_the_store(ray_address, unit_pid):
    config = config_of("dies", ray_address)
    ids = [f"s{row}" for row in range(10)]
    with connect({**config, "op_timeout_s": 30}) as client:
        client.put_samples(ids, "p", {"x": torch.arange(10)})
        assert (Level.OK, "TransferQueue runs on the cluster, with 2 storage units.") in found_by_doctor(config)
        os.kill(unit_pid, signal.SIGKILL)
        for call in (
            lambda: client.get_samples(ids, "p", ["x"]),
            lambda: client.put_samples(["a", "b"], "p", {"x": torch.arange(2)}),
            lambda: connect(config_of("another", ray_address)),
        ):
            with pytest.raises(BackendUnavailableError, match="storage units of TransferQueue died") as refused:
                call()
            assert not refused.value.retryable
        assert found_by_doctor(config)[-1][0] is Level.ERROR
        os.kill(pid_of_actor("TransferQueueController", "transfer_queue"), signal.SIGKILL)
        with pytest.raises(BackendUnavailableError, match="the controller of TransferQueue died"):
            client.put_samples(["c"], "p", {"x": torch.arange(1)})


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("memory", "Rows are kept in the memory of storage units, one on each node (storage: memory)."),
        ("transfer_queue", "Rows are kept by TransferQueue 0.1.11 (storage: transfer_queue)."),
    ],
)
def test_the_doctor_says_which_storage_is_used(storage, said, monkeypatch):
    monkeypatch.setenv("TQ_NUM_THREADS", "1")  # else the import of TransferQueue would set it for good
    assert said in [each["what"] for each in _examination.diagnose("tq_simple", {"storage": storage})]
