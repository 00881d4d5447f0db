"""Several processes on one store, attached with ``bootstrap=False``. For scopes wider than one process."""

from __future__ import annotations

import torch

from dataplane_core.errors import LeaseExpiredError
from dataplane_testkit import _workers
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, batch, ids, items_of
from dataplane_testkit._profiles import is_long
from dataplane_testkit._store import Store
from dataplane_testkit._timing import Background, eventually
from dataplane_testkit.rules import lasts


class ProcessSuite(Suite, chapter="processes"):
    """What holds within one client must also hold across processes."""

    def test_a_put_is_visible_in_other_processes(self, store: Store) -> None:
        (worker,) = store.deployment.workers(1)
        partition = store.register("x")
        for value in range(20):
            store.put(partition, [f"s{value}"], [{"n": value}], x=torch.tensor([value]))
            assert worker.run(_workers.read_items, partition, [f"s{value}"], "x") == [value]
        theirs = batch(2, x=torch.tensor([7, 8]), o=as_objects({"a": 1}, None))
        worker.run(_workers.call, "put_samples", ["w0", "w1"], partition, theirs)
        found = store.get(partition, ["w1", "w0"], "x", "o")
        assert found["x"].tolist() == [8, 7]
        assert items_of(found["o"]) == [None, {"a": 1}]

    def test_registrations_cross_processes(self, store: Store) -> None:
        (worker,) = store.deployment.workers(1)
        partition = store.register("x")
        store.put(partition, ["a"], x=torch.tensor([1]))
        worker.run(_workers.call, "register_partition", partition, ["x"], None, ["train"])
        assert not store.has(partition, "a")
        store.put(partition, ["a"], x=torch.tensor([1.5]))
        assert worker.run(_workers.read_items, partition, ["a"], "x") == [1.5]

    def test_clears_cross_processes(self, store: Store) -> None:
        (worker,) = store.deployment.workers(1)
        partition = store.register("x")
        worker.run(_workers.call, "put_samples", ids(3), partition, batch(3, x=torch.arange(3)))
        store.client.clear_samples(["s1"], partition)
        with store.refusal(KeyError, "'s1'"):
            worker.run(_workers.read_items, partition, ["s0", "s1"], "x")
        worker.run(_workers.call, "clear_samples", None, partition)
        with store.refusal(KeyError, partition):
            store.get(partition, ["s0"])

    @lasts(900.0)
    def test_each_sample_goes_to_one_process(self, store: Store) -> None:
        count, others, batch_size, within_s = (100_000, 7, 64, 600.0) if is_long() else (300, 2, 7, 60.0)
        workers = store.deployment.workers(others)
        partition = store.register("x", num_samples=count)
        names = ids(count)
        for worker in workers:
            worker.start(_workers.claim_all, partition, "train", batch_size, within_s)
        mine = Background(lambda: _workers.claim_all(store.client, partition, "train", batch_size, within_s))
        step = 5000 if is_long() else 50
        for start in range(0, count, step):
            part = names[start : start + step]
            store.put(partition, part, x=torch.arange(len(part)))
        given = [worker.result(within_s + 30) for worker in workers]
        given.append(mine.result(within_s + 30, "the claims of this process"))
        flat = [name for part in given for name in part]
        assert len(flat) == len(set(flat)), "a sample was given to two processes"
        assert sorted(flat) == sorted(names), "samples were lost"

    def test_consumption_is_seen_by_every_process(self, store: Store) -> None:
        (worker,) = store.deployment.workers(1)
        partition = store.filled(4)
        store.claim(partition, 3)
        assert not worker.run(_workers.call, "check_consumption_status", partition, ["train"])
        assert worker.run(_workers.claim_leased, partition, "train", 3, None).sample_ids == ["s3"]
        assert store.client.check_consumption_status(partition, ["train"])

    def test_a_killed_holder_loses_its_lease(self, store: Store) -> None:
        (worker,) = store.deployment.workers(1)
        partition = store.filled(4)
        lost = worker.run(_workers.claim_leased, partition, "train", 4, 0.5)
        assert lost.sample_ids == ids(4)
        worker.kill()
        found = eventually(lambda: store.claim(partition, 4, lease_s=600).sample_ids, what="the return of a lost claim")
        assert found == ids(4)
        with store.refusal(LeaseExpiredError):
            store.client.ack(lost)

    def test_a_lease_may_be_settled_elsewhere(self, store: Store) -> None:
        (worker,) = store.deployment.workers(1)
        partition = store.filled(2)
        meta = worker.run(_workers.claim_leased, partition, "train", 2, 600.0)
        store.client.ack(meta)
        assert worker.run(_workers.call, "check_consumption_status", partition, ["train"])
