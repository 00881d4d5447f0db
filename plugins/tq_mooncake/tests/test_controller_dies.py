"""The process of a controller that keeps a journal is killed; the rows are in Mooncake's segments."""

import os
import signal
import time

import ray
import torch

from dataplane_testkit import backend_of


def test_the_controller_finds_its_ledger(connect, ray_address, tmp_path, runs, wait_until):
    client = connect(instance="dies", ray_address=ray_address, journal=str(tmp_path))
    client.register_partition("p", ["x"], None, ["train"])
    first, later = torch.arange(20).reshape(10, 2), torch.arange(6).reshape(3, 2)
    ids = [f"s{row}" for row in range(10)]
    client.put_samples(ids, "p", {"x": first})
    held = client.claim_meta("p", "train", ["x"], 4, lease_s=600.0)
    pid = backend_of(client)._engine.controller_pid(time.monotonic() + 60)

    os.kill(pid, signal.SIGKILL)

    client.ack(held)
    client.put_samples(["t0", "t1", "t2"], "p", {"x": later})
    assert backend_of(client)._engine.controller_pid(time.monotonic() + 60) != pid
    assert torch.equal(client.get_samples(ids, "p", ["x"])["x"], first)
    assert torch.equal(client.get_samples(["t0", "t1", "t2"], "p", ["x"])["x"], later)
    rest = client.claim_meta("p", "train", ["x"], 9)
    assert list(rest.sample_ids) == [*ids[4:], "t0", "t1", "t2"]
    master = backend_of(client)._engine._instance.master_pid
    client.close()
    wait_until(lambda: not runs(master))
    assert ray.util.list_named_actors(all_namespaces=True) == []
