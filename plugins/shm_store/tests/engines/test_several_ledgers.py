"""Partitions spread over several stores, each with a ledger of its own: `num_ledgers` of the config."""

import os
import signal
import time
import uuid

import pytest
import torch

from dataplane_core import connect
from dataplane_core.backends import Backend, ledger_of, spread_over
from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, ConfigError, UnknownPartitionError
from dataplane_core.spec import ListPartitionsRequest
from dataplane_shm import ShmBackend
from dataplane_testkit import backend_of
from dataplane_testkit._timing import STARTS_S

PARTITIONS = [f"step-{number}" for number in range(12)]


@pytest.fixture(scope="module")
def config():
    options = {"namespace": f"spread-{uuid.uuid4().hex[:8]}", "capacity_bytes": 64 << 20}
    return {"backend": "shm_store", "options": options, "num_ledgers": 3, "op_timeout_s": STARTS_S}


@pytest.fixture(scope="module")
def owner(config):
    with connect(config) as client:
        yield client


@pytest.fixture
def client(owner):
    for name in owner.list_partitions():
        owner.clear_samples(None, name)
    return owner


def fill(client, names=PARTITIONS):
    for number, name in enumerate(names):
        client.register_partition(name, ["x"], 2, ["train"])
        client.put_samples(["a", "b"], name, {"x": torch.full((2, 3), float(number))})


def test_the_class_of_several_stores_says_what_that_of_one_says(tmp_path):
    names = [name for name, kind in Backend.__annotations__.items() if kind.startswith("ClassVar")]
    one = type("One", (ShmBackend,), {name: object() for name in names if name != "capabilities"})
    several = spread_over(one, 3)
    assert [name for name in names if getattr(several, name) is not getattr(one, name)] == []
    for durable in (None, tmp_path / "store"):
        config = ShmBackend.Config(durable=durable)
        assert spread_over(ShmBackend, 3).outlives_owner(config) == ShmBackend.outlives_owner(config)


def test_each_ledger_has_its_partitions_and_a_client_sees_them_all(client, config):
    fill(client)
    with connect({**config, "options": backend_of(client).attach_options()}, bootstrap=False) as another:
        assert client.list_partitions() == another.list_partitions() == sorted(PARTITIONS)
    listing = ListPartitionsRequest(deadline=time.monotonic() + STARTS_S)
    held = [set(store.list_partitions(listing)) for store in backend_of(client)._stores]
    assert held == [{name for name in PARTITIONS if ledger_of(name, 3) == number} for number in range(3)]
    assert all(held)
    for number, name in enumerate(PARTITIONS):
        claimed = client.claim_meta(name, "train", ["x"], 2, lease_s=60.0)
        assert client.get_data(claimed)["x"].tolist() == [[float(number)] * 3] * 2
        client.ack(claimed)
        assert client.check_consumption_status(name, ["train"])
    client.clear_samples(None, "step-3")
    with pytest.raises(UnknownPartitionError):
        client.get_samples(["a"], "step-3", ["x"])


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_client_with_another_number_finds_no_store(client, config, number):
    with pytest.raises(BackendUnavailableError, match="no store runs"):
        connect({**config, "num_ledgers": number, "attach_wait_s": 0.1}, bootstrap=False)


def test_a_dead_ledger_ends_its_partitions_and_no_other(config):
    fresh = {**config, "options": {"namespace": f"dead-{uuid.uuid4().hex[:8]}", "capacity_bytes": 16 << 20}}
    with connect(fresh) as client:
        fill(client)
        os.kill(backend_of(client)._stores[1]._process.pid, signal.SIGKILL)
        for name in PARTITIONS:
            if ledger_of(name, 3) == 1:
                with pytest.raises(BackendUnavailableError):
                    client.get_samples(["a"], name, ["x"])
            else:
                assert client.get_samples(["a"], name, ["x"]).batch_size[0] == 1


def test_a_failed_start_leaves_nothing(config):
    fresh = {**config, "options": {"namespace": f"fail-{uuid.uuid4().hex[:8]}", "capacity_bytes": 16 << 20}}
    third = {"namespace": f"{fresh['options']['namespace']}-2of3", "capacity_bytes": 32 << 20}
    stands_in_the_way = {**config, "options": third, "num_ledgers": 1}
    with connect(stands_in_the_way), pytest.raises(AlreadyRunningError):
        connect(fresh)
    with connect(fresh) as client:
        assert client.list_partitions() == []


def test_what_cannot_be_spread_is_refused(config):
    with pytest.raises(ConfigError, match="isolated_options"):
        connect({"backend": "noop", "num_ledgers": 2})
    with pytest.raises(ConfigError, match="too long"):
        connect({**config, "options": {"namespace": "n" * 64}})
    for number in (0, -1, 1.5, "many", 1025):
        with pytest.raises(ConfigError, match="num_ledgers"):
            connect({**config, "num_ledgers": number})
