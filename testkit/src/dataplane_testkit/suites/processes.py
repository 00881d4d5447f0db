"""Several processes on one store, attached with ``bootstrap=False``. For scopes wider than one process."""

from __future__ import annotations

import torch

from dataplane_core.errors import LeaseExpiredError
from dataplane_core.spec import Capability, Scope
from dataplane_testkit import _workers
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, batch, ids, items_of
from dataplane_testkit._marks import lasts, proves
from dataplane_testkit._profiles import is_long
from dataplane_testkit._store import Store
from dataplane_testkit._timing import Background, eventually


class ProcessSuite(Suite, chapter="processes", proof=Scope.HOST):
    """What holds within one client must also hold across processes."""

    def test_a_put_is_visible_in_other_processes(self, store: Store) -> None:
        """Contract: "Returns only when the write is committed and visible to every other client".

        Check first: the put_samples hook must reply only after the commit is confirmed. A client must not cache the
        rows or field specs of other clients.
        """
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
        """Contract: "rows, tags, cursors and schema of an earlier registration are gone when it returns."

        Check first: a client must not use a cached field spec or registration without asking the store.
        """
        (worker,) = store.deployment.workers(1)
        partition = store.register("x")
        store.put(partition, ["a"], x=torch.tensor([1]))
        worker.run(_workers.call, "register_partition", partition, ["x"], None, ["train"])
        assert not store.has(partition, "a")
        store.put(partition, ["a"], x=torch.tensor([1.5]))
        assert worker.run(_workers.read_items, partition, ["a"], "x") == [1.5]

    def test_clears_cross_processes(self, store: Store) -> None:
        """Contract: "With None, it drops the whole partition, schema included, whoever wrote it."

        Check first: a clear must delete what other processes wrote. Claims that wait in other processes must end.
        """
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
    @proves(Scope.HOST, Capability.CLAIMS)
    def test_each_sample_goes_to_one_process(self, store: Store) -> None:
        """Contract: "Across all clients and processes no sample is given to a task twice."

        Check first: the store, not the client, must choose samples and mark them as given, in one atomic step.
        """
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

    @proves(Scope.HOST, Capability.CLAIMS)
    def test_consumption_is_seen_by_every_process(self, store: Store) -> None:
        """Contract: "The answer covers the claims of all processes."

        Check first: check_consumption must use the state of the store, not the claims of this client.
        """
        (worker,) = store.deployment.workers(1)
        partition = store.filled(4)
        store.claim(partition, 3)
        assert not worker.run(_workers.call, "check_consumption_status", partition, ["train"])
        assert worker.run(_workers.claim_leased, partition, "train", 3, None).sample_ids == ["s3"]
        assert store.client.check_consumption_status(partition, ["train"])

    @proves(Scope.HOST, Capability.LEASES)
    def test_a_killed_holder_loses_its_lease(self, store: Store) -> None:
        """Contract: "with lease_s, a claim that is neither acked nor renewed in time is handed out again."

        Check first: the store, not the client that holds a lease, must record the lease and measure its time.
        """
        (worker,) = store.deployment.workers(1)
        partition = store.filled(4)
        lost = worker.run(_workers.claim_leased, partition, "train", 4, 0.5)
        assert lost.sample_ids == ids(4)
        worker.kill()
        found = eventually(lambda: store.claim(partition, 4, lease_s=600).sample_ids, what="the return of a lost claim")
        assert found == ids(4)
        with store.refusal(LeaseExpiredError):
            store.client.ack(lost)

    @proves(Scope.HOST, Capability.LEASES)
    def test_a_lease_may_be_settled_elsewhere(self, store: Store) -> None:
        """Contract: "A meta can be pickled (Ray sends it in this way) and stays small".

        Check first: the lease token alone must prove the lease, whichever process sends it.
        """
        (worker,) = store.deployment.workers(1)
        partition = store.filled(2)
        meta = worker.run(_workers.claim_leased, partition, "train", 2, 600.0)
        store.client.ack(meta)
        assert worker.run(_workers.call, "check_consumption_status", partition, ["train"])
