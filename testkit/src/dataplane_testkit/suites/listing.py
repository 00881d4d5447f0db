"""`list_samples`, `list_partitions`, `describe`, `ping`: what a store holds."""

from __future__ import annotations

import pytest
import torch

from dataplane_core.errors import LeaseHolder
from dataplane_core.spec import Capability, FieldSpec, Question, this_process
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, ids, jagged
from dataplane_testkit._store import Store
from dataplane_testkit._timing import eventually


class ListingSuite(Suite, chapter="listing"):
    """Lists of the samples of a partition."""

    def test_listing_gives_ids_and_tags(self, store: Store) -> None:
        partition = store.register("x", "y")
        assert store.client.list_samples(partition).sample_ids == []
        store.put(partition, ["b", "a"], [{"n": 1, "input_lengths": 3}, {"input_lengths": 4}], x=torch.arange(2))
        store.put(partition, ["c"], y=torch.zeros(1))
        store.put(partition, ["tags"], [{"n": 1}])
        for _ in range(2):
            meta = store.client.list_samples(partition)
            assert (meta.partition_id, meta.sample_ids) == (partition, ["b", "a", "c", "tags"])
            assert meta.tags == [{"n": 1, "input_lengths": 3}, {"input_lengths": 4}, {}, {"n": 1}]
            meta.tags[0]["n"] = 9

    def test_listing_of_given_samples(self, store: Store) -> None:
        partition = store.register("x")
        store.put(partition, ["a", "b"], [{"n": 1}, {"n": 2}], x=torch.zeros(2))
        store.put(partition, ["tags"], [{"n": 3}])
        store.put(partition, ["cells"], x=torch.zeros(1))
        store.client.clear_samples(["a"], partition)
        meta = store.client.list_samples(partition, sample_ids=["cells", "nobody", "tags", "b", "a", "b"])
        assert (meta.sample_ids, meta.tags) == (["cells", "tags", "b"], [{}, {"n": 3}, {"n": 2}])
        if store.declares(Capability.TAG_FILTERS):
            assert store.client.list_samples(partition, {"n": (">", 2)}, ["tags", "b"]).sample_ids == ["tags"]
        assert store.client.list_samples(partition, sample_ids=[]).sample_ids == []
        assert store.client.list_samples(partition, sample_ids=["nobody"]).sample_ids == []

    def test_fields_of_given_samples(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ["a", "b"], x=torch.zeros(2))
        store.put(partition, ["b"], y=torch.zeros(1))
        store.put(partition, ["tags"], [{"n": 3}])
        found = store.client.list_fields(["tags", "b", "a", "b"], partition)
        assert [sorted(names) for names in found] == [[], ["x", "y"], ["x"], ["x", "y"]]
        with store.refusal(KeyError, "nobody"):
            store.client.list_fields(["a", "nobody"], partition)

    def test_listing_of_many_samples(self, store: Store) -> None:
        partition = store.register("x")
        store.put(partition, ids(1500)[::-1], [{"n": index} for index in range(1500)], x=torch.arange(1500))
        meta = store.client.list_samples(partition)
        assert meta.sample_ids == ids(1500)[::-1]
        assert meta.tags is not None
        assert [row["n"] for row in meta.tags] == list(range(1500))

    # --- partitions ---------------------------------------------------------------------------------------------------

    def test_partitions_are_listed(self, store: Store) -> None:
        first, second = sorted([store.register("x"), store.register("x")])
        listed = store.client.list_partitions()
        assert listed == sorted(listed)
        assert [each for each in listed if each in (first, second)] == [first, second]
        assert first in store.same_store_client().list_partitions()
        store.client.clear_samples(None, first)
        listed = store.client.list_partitions()
        assert first not in listed
        assert second in listed

    def test_describe_counts_samples(self, store: Store) -> None:
        partition = store.register("x", "y", num_samples=64, tasks=["a", "b"])
        empty = store.client.describe(partition)
        assert (empty.num_samples, empty.num_cleared, empty.held_bytes, empty.oldest_s) == (0, 0, 0, None)
        assert (empty.info.fields, empty.info.num_samples, empty.info.consumer_tasks) == (("x", "y"), 64, ("a", "b"))
        rows = 64
        store.put(partition, ids(rows), x=torch.zeros(rows, 100, dtype=torch.float64))
        full = store.client.describe(partition)
        assert full.num_samples == rows
        assert rows * 800 <= full.held_bytes <= 2 * rows * 800
        assert full.oldest_s is not None
        assert 0.0 <= full.oldest_s < 600.0
        store.client.clear_samples(ids(rows)[:48], partition)
        less = store.client.describe(partition)
        assert (less.num_samples, less.num_cleared) == (16, 48)
        assert less.held_bytes == full.held_bytes // 4
        store.client.clear_samples(ids(rows), partition)
        none = store.client.describe(partition)
        assert (none.num_samples, none.num_cleared, none.held_bytes, none.oldest_s) == (0, 64, 0, None)
        with store.refusal(KeyError, "nowhere"):
            store.client.describe("nowhere")

    def test_describe_tells_the_schema(self, store: Store) -> None:
        partition = store.register("x", "never")
        store.put(
            partition, ids(2), x=jagged([torch.zeros(3, 2), torch.zeros(1, 2)]), s=torch.zeros(2), o=as_objects(1, 2)
        )
        specs = store.client.describe(partition).specs
        assert sorted(specs) == ["o", "s", "x"]
        assert specs["x"] == FieldSpec("tensor", "float32", 2, (2,))
        assert specs["s"].rank == 0
        assert specs["o"].kind == "object"

    def test_describe_counts_the_samples_that_have_a_field(self, store: Store) -> None:
        partition = store.filled(5, "x", "y")
        store.put(partition, ids(3), y=torch.zeros(3))
        assert store.client.describe(partition).num_rows == {"x": 5, "y": 3}
        if store.declares(Capability.OVERWRITE):
            store.put(partition, ids(2), y=torch.zeros(2))
            assert store.client.describe(partition).num_rows == {"x": 5, "y": 3}
        store.client.clear_samples(ids(4)[1:], partition)
        assert store.client.describe(partition).num_rows == {"x": 2, "y": 1}
        store.client.clear_samples(ids(5), partition)
        assert store.client.describe(partition).num_rows == {"x": 0, "y": 0}

    def test_questions_are_answered(self, store: Store) -> None:
        partition = store.filled(5, "x", "y", tags=[{"v": number} for number in range(5)], tasks=["train"])
        store.put(partition, ids(3), y=torch.zeros(3))
        newest = {"v": (">=", 3)}
        plain, both, filtered, unknown = store.hooks.answers(
            partition,
            Question(task_name="train", required_fields=["x"]),
            Question(task_name="train", required_fields=["x", "y"], explain=True),
            Question(task_name="train", required_fields=[], tag_filter=newest, explain=True),
            Question(task_name="nobody", required_fields=["x"]),
        )
        assert (plain.num_ready, plain.shortfall, unknown) == (5, None, None)
        assert (both.num_ready, both.shortfall.num_lacking) == (3, 2)
        assert both.shortfall.missing_cells == {ids(5)[3]: ("y",), ids(5)[4]: ("y",)}
        assert (filtered.num_ready, filtered.shortfall.num_not_matching) == (2, 3)
        assert list(filtered.shortfall.not_matching) == [ids(5)[2], ids(5)[1], ids(5)[0]]
        assert store.claim(partition, 3, "x", "y", task="train").size == 3

    def test_describe_counts_per_task(self, store: Store) -> None:
        partition = store.filled(8, "x", "y", tasks=["a", "b"])
        store.put(partition, ids(6), y=torch.arange(6))
        store.claim(partition, 2, task="a")
        if store.declares(Capability.LEASES):
            leased = store.claim(partition, 3, task="a", lease_s=600.0)
            store.client.ack(leased.slice(0, 1))
            expected = (1, 2, 3)
        else:
            expected = (4, 0, 2)
        tasks = store.client.describe(partition).tasks
        assert (tasks["a"].num_ready, tasks["a"].num_leased, tasks["a"].num_consumed) == expected
        assert (tasks["b"].num_ready, tasks["b"].num_leased, tasks["b"].num_consumed) == (6, 0, 0)

    def test_describe_names_the_oldest_lease(self, store: Store) -> None:
        partition = store.filled(8, tasks=["a", "b"])

        def oldest(task: str) -> LeaseHolder | None:
            return store.client.describe(partition).tasks[task].oldest_lease

        def holds(sample_ids: list[str]) -> LeaseHolder:
            found = oldest("a")
            assert found is not None
            assert found.sample_id in sample_ids
            return found

        assert oldest("a") is None
        first = store.claim(partition, 2, task="a", lease_s=600.0)
        second = store.claim(partition, 2, task="a", lease_s=60.0)
        store.claim(partition, 1, task="b", lease_s=0.05)
        store.client.renew(first, 900.0)
        found = holds(first.sample_ids)
        assert found.holder == this_process()
        assert 600.0 < found.left_s <= 900.0
        assert found.held_s is not None
        assert 0.0 <= found.held_s < 300.0
        store.client.ack(first.slice(0, 1))
        holds(first.sample_ids[1:])
        store.client.nack(first.slice(1, 2))
        holds(second.sample_ids)
        store.client.ack(second)
        assert oldest("a") is None
        eventually(lambda: oldest("b") is None, what="the end of the lease of the other task")

        def counts() -> tuple[int, int]:
            task = store.client.describe(partition).tasks["b"]
            return task.num_ready, task.num_leased

        eventually(lambda: counts() == (8, 0), what="that a sample whose lease has ended is ready, before any claim")

    @pytest.mark.parametrize("left", [0, 1], ids=["the_renewed_one", "the_other_one"])
    def test_a_renewal_of_a_part_changes_no_age(self, store: Store, left: int) -> None:
        partition = store.filled(2)
        meta = store.claim(partition, 2, lease_s=600.0)

        def age_s() -> float:
            found = store.client.describe(partition).tasks["train"].oldest_lease
            assert found is not None
            assert found.held_s is not None
            return found.held_s

        eventually(lambda: age_s() >= 0.1, what="a lease that is 0.1 s old")
        before_s = age_s()
        store.client.renew(meta.subset([0]), 900.0)
        assert age_s() >= before_s
        store.client.ack(meta.subset([1 - left]))
        assert age_s() >= before_s, "after a renewal of a part of a claim, a lease is younger than before"

    def test_describe_counts_whole_groups(self, store: Store) -> None:
        partition = store.filled(["k_g0", "k_g1", "l_g0", "m_g0", "m_g1"], group_size=2)
        assert store.client.describe(partition).tasks["train"].num_ready == 4
        store.client.clear_samples(["m_g0"], partition)
        assert store.client.describe(partition).tasks["train"].num_ready == 2

    def test_ping(self, store: Store) -> None:
        store.client.ping()
        with store.refusal(RuntimeError, "closed"):
            store.deployment.closed_client().ping()
