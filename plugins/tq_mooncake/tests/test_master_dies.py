"""The master of an instance is killed. Its owner starts it again, and the storage units mount new segments."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray
import torch

from dataplane_core.errors import BackendUnavailableError, DataPlaneError, LostSamplesError

NAMES = [f"s{row}" for row in range(8)]


def values(number, names=NAMES):
    return {"x": torch.full((len(names), 1000), number)}


def instance(client):
    return client._backend._engine._instance


def kill_master(client):
    os.kill(instance(client).master_pid, signal.SIGKILL)


@pytest.fixture
def two(connect, ray_address):
    """The owner of an instance, whose puts are refused when the store is full; and a client that attached to it."""
    options = {"ray_address": ray_address, "instance": "again", "num_storage_units": 2, "on_full": "raise"}
    owner = connect(**options)
    owner.register_partition("p", ["x"], None, ["train"])
    return owner, connect(bootstrap=False, **options)


def test_lost_samples_are_named_and_work_goes_on(two, runs, wait_until):
    owner, client = two
    client.put_samples(NAMES, "p", values(1))
    held = client.claim_meta("p", "train", ["x"], 4, lease_s=600.0)
    places = instance(owner).details["listening"]

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
    wait_until(lambda: instance(owner).details["listening"] != places)  # late writes to the old segments find nobody
    assert not set(places) & set(instance(owner).details["listening"])
    master = instance(owner).master_pid
    owner.close()
    assert not runs(master)


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
    keeper = instance(owner)._keeper
    unmount = keeper._unmount

    def refuse(deadline):
        raise RuntimeError("not now")

    monkeypatch.setattr(keeper, "_unmount", refuse)
    kill_master(owner)
    return lambda: monkeypatch.setattr(keeper, "_unmount", unmount)


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


@pytest.mark.long
def test_a_client_attaches_while_the_master_is_away(two, away, ray_address):
    options = {"ray_address": ray_address, "instance": "again", "local_buffer_size_bytes": 4 << 20}
    config = json.dumps({"backend": "tq_mooncake", "options": options, "op_timeout_s": 90.0})
    with subprocess.Popen([sys.executable, "-c", _ATTACHES, config], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "now\n"
            time.sleep(3.0)  # most of the tries fall into the time without a master
            assert process.poll() is None
            away()
            assert process.stdout.readline() == "7000\n"
        finally:
            process.kill()


@pytest.mark.long
def test_a_master_that_stays_away_is_named_and_worth_another_try(two, away, connect, ray_address):
    owner, patient = two
    client = connect(bootstrap=False, op_timeout_s=3.0, ray_address=ray_address, instance="again")
    with pytest.raises(DataPlaneError, match=r"mooncake_master at .* of instance 'again' (died|is dead)") as error:
        client.put_samples(["t"], "p", values(1, ["t"]))
    assert error.value.retryable
    away()
    patient.put_samples(["t"], "p", values(1, ["t"]))
    assert torch.equal(owner.get_samples(["t"], "p", ["x"])["x"], values(1, ["t"])["x"])


def test_a_unit_that_died_with_the_master_is_named(two):
    owner, client = two
    client.put_samples(NAMES, "p", values(1))
    unit = ray.get_actor(instance(owner).units[0].actor, namespace="dataplane")
    pid = ray.get(unit.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
    os.kill(pid, signal.SIGKILL)
    kill_master(owner)
    with pytest.raises(BackendUnavailableError, match="storage unit-0 of instance 'again' is dead"):
        client.get_samples(NAMES, "p", ["x"])
