"""The controller of an instance is killed, its master, or a storage unit. They are started again, and new segments are
mounted. So all tests share an instance."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time

import pytest
import ray
import torch

from dataplane_core.errors import DataPlaneError, LostSamplesError
from dataplane_testkit import backend_of
from dataplane_testkit._timing import eventually

NAMES = [f"s{row}" for row in range(8)]


def values(number, names=NAMES):
    return {"x": torch.full((len(names), 1000), number)}


def instance(client):
    return backend_of(client)._engine._instance


def listening(client):
    return {place for segment in instance(client).segments for place in segment.listening}


def kill_master(client):
    os.kill(instance(client).master_pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def both(connect_for_all, ray_address, runs, tmp_path_factory):
    """The owner of an instance, whose puts are refused when the store is full; and a client that attached to it."""
    options = {"ray_address": ray_address, "instance": "again", "num_storage_units": 2, "on_full": "raise"}
    owner = connect_for_all(journal=str(tmp_path_factory.mktemp("journals")), **options)
    yield owner, connect_for_all(bootstrap=False, **options)
    master = instance(owner).master_pid
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


def test_lost_samples_are_named_and_work_goes_on(two):
    owner, client = two
    client.put_samples(NAMES, "p", values(1))
    held = client.claim_meta("p", "train", ["x"], 4, lease_s=600.0)
    places = listening(owner)

    kill_master(owner)

    client.ack(held)  # needs no row
    with pytest.raises(LostSamplesError) as lost:
        client.get_samples(NAMES, "p", ["x"])
    assert list(lost.value.missing_samples) == NAMES
    later = [f"t{row}" for row in range(8)]
    client.put_samples(later, "p", values(2, later))
    assert torch.equal(owner.get_samples(later, "p", ["x"])["x"], values(2)["x"])
    claimed = client.claim_meta("p", "train", ["x"], 99, blocking=False)
    assert list(claimed.sample_ids) == NAMES[4:] + later
    client.clear_samples(NAMES, "p")
    client.put_samples(NAMES, "p", values(3))
    assert torch.equal(owner.get_samples(NAMES, "p", ["x"])["x"], values(3)["x"])
    # late writes to the old segments find nobody; one unit may mount its new one before the other
    eventually(lambda: not places & listening(owner), 60.0)


def test_puts_and_reads_under_way_go_on(two):
    """The master is killed three times while threads put and read. What is put after the last time is there."""
    owner, client = two
    over, failures, counts = threading.Event(), [], [0, 0]

    def work(number, user):
        while not over.is_set():
            names = [f"{number}-{counts[number]}-{row}" for row in range(4)]
            try:
                user.put_samples(names, "p", values(counts[number], names))
                with contextlib.suppress(LostSamplesError):
                    got = user.get_samples(names, "p", ["x"])["x"]
                    assert torch.equal(got, values(counts[number], names)["x"])
                user.clear_samples(names, "p")
            except Exception as error:
                failures.append(error)
                return
            counts[number] += 1

    threads = [threading.Thread(target=work, args=each) for each in enumerate((owner, client))]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            before, pid = list(counts), instance(owner).master_pid
            kill_master(owner)
            while not failures and (
                instance(owner).master_pid in (pid, None)
                or any(now < then + 3 for now, then in zip(counts, before, strict=True))
            ):
                assert not over.wait(0.02)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert list(client.list_samples("p").sample_ids) == []


@pytest.fixture
def away(two, monkeypatch):
    """The master of ``two`` dies, and is away until ``away`` is called."""
    owner, _ = two
    unmount = instance(owner).unmount_all

    def refuse(deadline):
        raise RuntimeError("not now")

    monkeypatch.setattr(instance(owner), "unmount_all", refuse)
    kill_master(owner)
    return lambda: monkeypatch.setattr(instance(owner), "unmount_all", unmount)


_ATTACHES = """
import json, sys
import ray
from dataplane_core import connect
config = json.loads(sys.argv[1])
ray.init(config["options"]["ray_address"], log_to_driver=False)
print("now", flush=True)
with connect(config, bootstrap=False) as client:
    client.put_samples(["t"], "p", {"x": [[7] * 1000]})
    print(client.get_samples(["t"], "p", ["x"])["x"].sum().item(), flush=True)
"""


def test_a_client_attaches_while_the_master_is_away(two, away, ray_address, python):
    options = {"ray_address": ray_address, "instance": "again", "local_buffer_size_bytes": 4 << 20}
    config = json.dumps({"backend": "tq_mooncake", "options": options, "op_timeout_s": 90.0})
    with python.start("-c", _ATTACHES, config, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "now\n"
            time.sleep(3.0)  # most of the tries fall into the time without a master
            assert process.poll() is None
            away()
            assert process.stdout.readline() == "7000\n"
        finally:
            process.kill()


def test_a_master_that_stays_away_is_named_and_worth_another_try(two, away, connect, ray_address):
    owner, patient = two
    # the engine asks a dead master for about 4 seconds before it says that it is not there
    client = connect(bootstrap=False, op_timeout_s=15.0, ray_address=ray_address, instance="again")
    with pytest.raises(DataPlaneError, match=r"mooncake_master at .* of instance 'again' (died|is dead)") as error:
        client.put_samples(["t"], "p", values(1, ["t"]))
    assert error.value.retryable
    away()
    patient.put_samples(["t"], "p", values(1, ["t"]))
    assert torch.equal(owner.get_samples(["t"], "p", ["x"])["x"], values(1, ["t"])["x"])


@pytest.fixture
def kill_unit(pid_of):
    return lambda client, number: os.kill(pid_of(instance(client).units[number].actor), signal.SIGKILL)


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
