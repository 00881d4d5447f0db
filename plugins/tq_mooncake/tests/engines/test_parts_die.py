"""The controller of an instance is killed, or a storage unit: they are started again, so these tests share an instance.
Or its master: that ends the instance."""

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch

from dataplane_core.errors import BackendUnavailableError, LostSamplesError
from dataplane_testkit import backend_of
from dataplane_testkit._timing import eventually

NAMES = [f"s{row}" for row in range(8)]


def values(number, names=NAMES):
    return {"x": torch.full((len(names), 1000), number)}


def instance(client):
    return backend_of(client)._instance


def listening(client):
    return {place for segment in instance(client).segments for place in segment.listening}


@pytest.fixture(scope="module")
def both(connect_for_all, ray_address, runs, tmp_path_factory):
    """The owner of an instance, whose puts are refused when the store is full; and a client that attached to it."""
    options = {"ray_address": ray_address, "instance": "again", "num_storage_units": 2, "on_full": "raise"}
    owner = connect_for_all(journal=str(tmp_path_factory.mktemp("journals")), **options)
    yield owner, connect_for_all(bootstrap=False, **options)
    master = instance(owner)._master.pid
    owner.close()
    assert not runs(master)
    eventually(lambda: ray.util.list_named_actors(all_namespaces=True) == [], 60.0)  # Ray learns of it a moment later


@pytest.fixture
def two(both):
    """The same, with an empty partition ``p``, and with a segment in each unit."""
    owner, _ = both
    eventually(lambda: len(instance(owner).segments) == 2, 60.0)
    owner.register_partition("p", ["x"], None, ["train"])
    yield both
    owner.clear_samples(None, "p")


def test_the_controller_finds_its_ledger(two, pid_of):
    """The rows are in Mooncake's segments."""
    _, client = two
    first, later = torch.arange(20).reshape(10, 2), torch.arange(6).reshape(3, 2)
    ids = [f"s{row}" for row in range(10)]
    client.put_samples(ids, "p", {"x": first})
    held = client.claim_meta("p", "train", ["x"], 4, lease_s=600.0)
    pid = pid_of("tqm-again")

    os.kill(pid, signal.SIGKILL)

    client.ack(held)
    client.put_samples(["t0", "t1", "t2"], "p", {"x": later})
    assert pid_of("tqm-again") != pid
    assert torch.equal(client.get_samples(ids, "p", ["x"])["x"], first)
    assert torch.equal(client.get_samples(["t0", "t1", "t2"], "p", ["x"])["x"], later)
    rest = client.claim_meta("p", "train", ["x"], 9)
    assert list(rest.sample_ids) == [*ids[4:], "t0", "t1", "t2"]


@pytest.fixture
def kill_unit(pid_of):
    return lambda client, number: os.kill(pid_of(instance(client).units[number]), signal.SIGKILL)


def test_a_dead_unit_loses_its_rows_and_others_are_served_on(two, kill_unit):
    """Of 40 samples, each of its own put, both units hold some."""
    owner, client = two
    names = [f"u{number}" for number in range(40)]
    for number, name in enumerate(names):
        client.put_samples([name], "p", values(number, [name]))
    held = client.claim_meta("p", "train", ["x"], 40, lease_s=600.0)
    places = listening(owner)

    kill_unit(owner, 0)

    with pytest.raises(LostSamplesError) as error:
        client.get_samples(names, "p", ["x"])
    lost = list(error.value.missing_samples)
    assert 0 < len(lost) < 40
    rest = [name for name in names if name not in lost]
    got = owner.get_samples(rest, "p", ["x"])["x"]
    assert got[:, 0].tolist() == [names.index(name) for name in rest]
    client.ack(held)
    later = [f"v{number}" for number in range(40)]
    for number, name in enumerate(later):  # at once: the unit may still be away
        client.put_samples([name], "p", values(number, [name]))
    # until its death is known, the old segment is still listed
    eventually(lambda: len(instance(owner).segments) == 2 and len(places & listening(owner)) == len(places) / 2, 60.0)
    client.put_samples(lost, "p", values(7, lost))
    for user in (owner, client):
        assert user.get_samples(later, "p", ["x"])["x"][:, 0].tolist() == list(range(40))
        assert torch.equal(user.get_samples(lost, "p", ["x"])["x"], values(7, lost)["x"])
    client.clear_samples(names + later, "p")
    assert list(client.list_samples("p").sample_ids) == []


def test_a_put_waits_until_a_unit_is_back(two, kill_unit):
    owner, client = two
    client.put_samples(NAMES, "p", values(1))
    for number in range(2):
        kill_unit(owner, number)
    client.put_samples(["t"], "p", values(2, ["t"]))
    with pytest.raises(LostSamplesError) as lost:
        client.get_samples([*NAMES, "t"], "p", ["x"])
    assert list(lost.value.missing_samples) == NAMES
    assert torch.equal(owner.get_samples(["t"], "p", ["x"])["x"], values(2, ["t"])["x"])


#: A process that puts and reads until it cannot, and says why.
_WORKS = """
import itertools, json, sys
import torch
from dataplane_core import connect
from dataplane_core.errors import BackendUnavailableError
with connect(json.loads(sys.argv[1]), bootstrap=False) as client:
    try:
        for number in itertools.count():
            names = [f"other-{number}-{row}" for row in range(4)]
            client.put_samples(names, "p", {"x": torch.full((4, 1000), number)})
            assert client.get_samples(names, "p", ["x"])["x"].sum() == 4000 * number
            client.clear_samples(names, "p")
            if number == 3:
                print("works", flush=True)
    except BackendUnavailableError as error:
        print(json.dumps([error.retryable, str(error)]), flush=True)
"""


def test_the_death_of_the_master_under_load_ends_the_store_for_all_and_it_can_be_bootstrapped_again(
    connect, ray_address, python
):
    options = {"ray_address": ray_address, "instance": "ends", "num_storage_units": 2}
    owner = connect(**options)
    client = connect(bootstrap=False, **options)
    owner.register_partition("p", ["x", "never"], None, ["train"])
    config = {"backend": "tq_mooncake", "options": options | {"local_buffer_size_bytes": 4 << 20}, "op_timeout_s": 90.0}
    with (
        ThreadPoolExecutor(2) as pool,
        python.start("-c", _WORKS, json.dumps(config), stdout=subprocess.PIPE, text=True) as process,
    ):
        waiting = [
            pool.submit(user.claim_meta, "p", "train", ["never"], 1, timeout_s=300.0) for user in (owner, client)
        ]
        try:
            assert process.stdout.readline() == "works\n"
        finally:
            address = instance(owner).details["master"]
            os.kill(instance(owner)._master.pid, signal.SIGKILL)
        told = [json.loads(process.stdout.readline())]
        for act in (
            *(claim.result for claim in waiting),
            lambda: client.get_samples(["t"], "p", ["x"]),
            lambda: owner.put_samples(["t"], "p", values(1, ["t"])),
            lambda: client.list_samples("p"),
            lambda: connect(bootstrap=False, **options),
        ):
            with pytest.raises(BackendUnavailableError) as refused:
                act()
            told.append([refused.value.retryable, str(refused.value)])
    for retryable, said in told:
        assert not retryable
        assert f"the mooncake_master at {address} of instance 'ends' is dead" in said
        assert "bootstrap the instance again" in said

    client.close()
    owner.close()
    again = connect(**options)
    again.register_partition("p", ["x"], None, ["train"])
    again.put_samples(NAMES, "p", values(5))
    assert torch.equal(again.get_samples(NAMES, "p", ["x"])["x"], values(5)["x"])
