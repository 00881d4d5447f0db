"""`register_partition(if_exists="keep")`, and partitions that the first put or claim opens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, ids
from dataplane_testkit._marks import proves
from dataplane_testkit._store import Store


class KeepingSuite(Suite, chapter="keep"):
    """A registration that keeps what is there."""

    @proves(Capability.CLAIMS)
    def test_keep_leaves_rows_tags_and_cursors(self, store: Store) -> None:
        """Contract: "a partition that is there stays as it is: rows, tags, cursors, schema and num_samples."

        Check first: register_partition with if_exists "keep" must not drop anything of a known partition.
        """
        partition = store.register("x", num_samples=3)
        store.put(partition, ids(3), [{"n": row} for row in range(3)], x=torch.arange(3))
        assert store.claim(partition, 1).sample_ids == ["s0"]
        store.register("x", num_samples=99, tasks=["train"], partition_id=partition, if_exists="keep")
        assert store.get(partition, ids(3))["x"].tolist() == [0, 1, 2]
        with store.refusal(ValueError, "x"):
            store.put(partition, ["s3"], x=torch.zeros(1))
        rest = store.claim(partition, 3, blocking=True, timeout_s=10.0)  # num_samples is still 3
        assert rest.sample_ids == ["s1", "s2"]
        assert rest.tags == [{"n": 1}, {"n": 2}]

    @proves(Capability.CLAIMS)
    def test_a_finished_partition_has_an_end(self, store: Store) -> None:
        """Contract: "If the partition has no num_samples, it gets as many as it holds samples: a put of further ids is
        refused, a put to known ids is not, and claims that wait for more return what is left."

        Check first: to finish a partition, the client registers it with if_exists "keep" and num_samples 0. If the
        partition has no num_samples, the store sets it, in one step, to the number of rows, and replies it.
        """
        partition = store.register("x", "y")
        store.put(partition, ids(4), x=torch.arange(4))
        store.client.clear_samples(["s0"], partition)
        waits = store.waiting_claim(partition, 8)
        assert not store.client.is_finished(partition, ["train"])
        store.client.finish_partition(partition)
        assert waits.result(what="the claim of the rest").sample_ids == ["s1", "s2", "s3"]
        assert store.hooks.describe(partition).num_samples == 3
        assert store.client.is_finished(partition, ["train"])
        with store.refusal(ValueError, "3"):
            store.put(partition, ["s4"], x=torch.arange(1))
        store.put(partition, ["s1"], y=torch.arange(1))

    @proves(Capability.CLAIMS)
    def test_keep_adds_num_samples(self, store: Store) -> None:
        """Contract: "If it has no num_samples, it gets those of the call, but at least as many as it holds samples"

        Check first: register_partition with if_exists "keep" must set num_samples if the partition has none.
        """
        partition = store.register("x")
        store.put(partition, ids(2), x=torch.arange(2))
        store.register("x", num_samples=3, partition_id=partition, if_exists="keep")
        assert store.claim(partition, 2).size == 2
        assert not store.client.check_consumption_status(partition, ["train"])
        store.put(partition, ["s2"], x=torch.arange(1))
        assert store.claim(partition, 2, blocking=True, timeout_s=10.0).sample_ids == ["s2"]
        with store.refusal(ValueError, "3"):
            store.put(partition, ["s3"], x=torch.arange(1))

    @proves(Capability.CLAIMS)
    def test_keep_adds_tasks_fields_and_enums(self, store: Store) -> None:
        """Contract: "Fields, tasks and strings of enums that it lacks are added."

        Check first: a task that is added later must be given the rows that are there already.
        """
        partition = store.register("x", enums={"word": ["a"]})
        store.put(partition, ids(2), x=torch.arange(2), word=as_objects("a", "a"))
        assert store.claim(partition, 2).size == 2
        store.register("y", tasks=["late"], enums={"word": ["b"]}, partition_id=partition, if_exists="keep")
        assert store.claim(partition, 2, task="late").sample_ids == ids(2)
        assert store.claim(partition, 2).size == 0
        store.put(partition, ["s2"], x=torch.arange(1), word=as_objects("b"))
        assert store.claim(partition, 2).sample_ids == ["s2"]
        with store.refusal(ValueError, "c"):
            store.put(partition, ["s3"], word=as_objects("c"))
        if store.declares(Capability.LISTING):
            assert store.client.describe(partition).info.fields == ("x", "y")

    @proves(Capability.GROUPS)
    def test_keep_refuses_another_group_size(self, store: Store) -> None:
        """Contract: "Another group size raises ValueError, and nothing changes."

        Check first: register_partition with if_exists "keep" must compare the group sizes before it adds anything.
        """
        partition = store.register("x", group_size=2)
        store.put(partition, ["k_g0", "k_g1"], x=torch.arange(2))
        for group_size in (None, 4):
            with store.refusal(ValueError, "grpo_group_size"):
                store.register("x", tasks=["late"], group_size=group_size, partition_id=partition, if_exists="keep")
        with store.refusal(KeyError, "late"):
            store.claim(partition, 2, task="late")
        assert store.claim(partition, 2).size == 2

    @proves(Capability.CLAIMS)
    def test_keep_from_many_clients_at_once(self, store: Store) -> None:
        """Contract: "Of several clients that register a new partition with keep at the same time, one opens it, and
        no row, task or field of the others is lost."

        Check first: register_partition with if_exists "keep" must be one atomic step of the store. A read of the
        registration, followed by a write of the merged one, loses what another client adds in between.
        """
        count = 6
        clients = [store.client if place % 2 else store.same_store_client() for place in range(count)]
        for _ in range(3):
            partition = store.new_id()

            def register(place: int, partition: str = partition) -> None:
                store.register(
                    "x", tasks=[f"task{place}"], client=clients[place], partition_id=partition, if_exists="keep"
                )
                clients[place].put_samples([f"s{place}"], partition, {"x": torch.tensor([place])})

            with ThreadPoolExecutor(count) as pool:
                list(pool.map(register, range(count)))
            assert sorted(store.get(partition, ids(count))["x"].tolist()) == list(range(count))
            for place in range(count):
                assert store.claim(partition, count, task=f"task{place}").size == count

    @proves(Capability.CLAIMS)
    def test_open_partitions(self, store: Store) -> None:
        """Contract: "a put or a claim that names an unknown partition registers it with keep, without num_samples
        and groups; a claim also adds its task."

        Check first: describe_partition must raise UnknownPartitionError for an unknown partition. register_partition
        with if_exists "keep" must open it.
        """
        client = store.another_client(open_partitions=True)
        first, second = store.owned_id(client), store.owned_id(client)
        client.put_samples(["a"], first, {"x": torch.tensor([1])})
        client.put_samples(["b"], first, tags=[{"n": 1}])
        assert client.claim_meta(first, "train", ["x"], 2, blocking=False).sample_ids == ["a"]
        assert client.claim_meta(first, "other", ["x"], 2, blocking=False).sample_ids == ["a"]
        assert client.claim_meta(second, "train", ["x"], 1, blocking=False).size == 0
        client.put_samples(["c"], second, {"x": torch.tensor([2])})
        assert client.claim_meta(second, "train", ["x"], 1, timeout_s=10.0).sample_ids == ["c"]
        with store.refusal(KeyError):
            client.get_samples(["a"], store.new_id(), ["x"])
