"""`register_partition`: it opens a new, empty partition, or keeps one; puts and claims that open a partition."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from dataplane_core.errors import LeaseExpiredError
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, ids
from dataplane_testkit._store import Store

_ODD_NAMES = [
    "a b",
    "x" * 300,
    "../up",
    "a/b:c@d|e,f;g",
    "0",
    "-1",
    "ünïcode-字-🙂",
    "line\nbreak",
    "nul\0byte",
    "{braces}*?[x]",
    "'quo\"ted'",
    "%s%d",
]


class RegistrationSuite(Suite, chapter="registration"):
    """A new registration leaves nothing of the earlier one; one that keeps leaves all."""

    def test_register_again_drops_rows(self, store: Store) -> None:
        partition = store.filled(3, tags=[{"old": 1}] * 3)
        store.register("x", partition_id=partition)
        for sample_id in ids(3):
            assert not store.has(partition, sample_id), f"row '{sample_id}' is still there after a new registration"
        store.put(partition, ["s1"], [{"new": 2}], x=torch.tensor([7]))
        assert store.get(partition, ["s1"])["x"].tolist() == [7]
        if store.declares(Capability.LISTING) or store.declares(Capability.CLAIMS):
            assert store.tags_of(partition) == {"s1": {"new": 2}}

    def test_register_again_drops_the_schema(self, store: Store) -> None:
        partition = store.register("x")
        store.put(partition, ["a"], x=torch.tensor([1]))
        store.register("x", partition_id=partition)
        store.put(partition, ["a"], x=torch.tensor([[1.5, 2.5]]))
        found = store.get(partition, ["a"])["x"]
        assert found.dtype == torch.float32
        assert found.tolist() == [[1.5, 2.5]]
        store.register("x", partition_id=partition)
        store.put(partition, ["a"], x=as_objects({"kind": "object"}))
        assert store.get(partition, ["a"])["x"] == [{"kind": "object"}]

    def test_register_again_drops_cursors(self, store: Store) -> None:
        partition = store.filled(3, num_samples=3, tasks=["train", "old"])
        assert store.claim(partition, 3).size == 3
        store.register("x", partition_id=partition, num_samples=3)
        assert not store.client.check_consumption_status(partition, ["train"])
        store.put(partition, ids(1), x=torch.arange(1))
        with store.refusal(TimeoutError):
            store.claim(partition, 3, blocking=True, timeout_s=0.05)
        assert store.claim(partition, 3).sample_ids == ids(1)
        with store.refusal(KeyError, "old"):
            store.claim(partition, 1, task="old")

    def test_register_again_ends_leases(self, store: Store) -> None:
        partition = store.filled(2)
        old = store.claim(partition, 2, lease_s=600)
        store.register("x", partition_id=partition)
        store.put(partition, ids(2), x=torch.arange(2))
        new = store.claim(partition, 2, lease_s=600)
        with store.refusal(LeaseExpiredError) as caught:
            store.client.ack(old)
        assert sorted(caught.value.sample_ids) == ids(2)
        store.client.ack(new)

    def test_any_string_is_an_id(self, store: Store) -> None:
        partition = store.register("x", partition_id=f"{store.new_id()} / ü:@|\n", tasks=["t a/b:ü"])
        columns = {f"f{name}": torch.arange(len(_ODD_NAMES)) * 100 + place for place, name in enumerate(_ODD_NAMES)}
        store.put(partition, _ODD_NAMES, columns=columns)
        found = store.get(partition, _ODD_NAMES[::-1], *columns)
        for place, name in enumerate(columns):
            assert found[name].tolist() == [100 * row + place for row in reversed(range(len(_ODD_NAMES)))], name
        if store.declares(Capability.CLAIMS):
            assert store.claim(partition, 99, *columns, task="t a/b:ü").sample_ids == _ODD_NAMES

    def test_enums_refuse_other_words(self, store: Store) -> None:
        partition = store.register("role", "x", enums={"role": ["user", "assistant"]})
        with store.refusal(ValueError, "role", "tool"):
            store.put(partition, ids(2), role=as_objects("user", "tool"), x=torch.arange(2))
        assert not store.has(partition, "s0", "role"), "a refused put wrote a row"
        assert not store.has(partition, "s0", "x"), "a refused put wrote a row"
        store.put(partition, ids(3), role=as_objects(None, 7, "user"))
        assert store.get(partition, ids(3), "role")["role"] == [None, 7, "user"]

    def test_enums_belong_to_one_registration(self, store: Store) -> None:
        partition = store.register("role", enums={"role": ["a"]})
        store.put(partition, ids(1), role=as_objects("a"))
        # as another client would do; this client does not know of it
        store.hooks.register(partition, ["role"], enums={"role": ["b"]})
        store.put(partition, ids(1), role=as_objects("b"))
        with store.refusal(ValueError, "'a'"):
            store.put(partition, ["s9"], role=as_objects("a"))

    # --- the hooks ----------------------------------------------------------------------------------------------------

    def test_register_hook_returns_the_registration(self, store: Store) -> None:
        partition = store.register("x")
        group_size = 2 if store.declares(Capability.GROUPS) else None
        info = store.hooks.register(
            *(partition, ["x", "y"]),
            num_samples=8,
            tasks=["a", "b"],
            group_size=group_size,
            enums={"y": ["u", "v"]},
            followers=["b"],
        )
        assert tuple(info.followers) == ("b",)
        assert (tuple(info.fields), info.num_samples, tuple(info.consumer_tasks)) == (("x", "y"), 8, ("a", "b"))
        assert info.grpo_group_size == group_size
        assert {name: tuple(words) for name, words in info.enums.items()} == {"y": ("u", "v")}
        assert store.hooks.describe(partition) == info

    def test_the_epoch_is_the_one_that_the_registration_drew(self, store: Store) -> None:
        drawn: list[str] = []
        partition = store.new_id()
        with store.faults.before("register_partition", lambda request: drawn.append(request.epoch)):
            for _ in range(3):
                store.register("x", partition_id=partition)
                assert store.hooks.describe(partition).epoch == drawn[-1]
        assert len(set(drawn)) == 3

    # --- keep ---------------------------------------------------------------------------------------------------------

    def test_keep_leaves_rows_tags_and_cursors(self, store: Store) -> None:
        partition = store.filled(3, num_samples=3, tags=[{"n": row} for row in range(3)])
        assert store.claim(partition, 1).sample_ids == ["s0"]
        store.register("x", num_samples=99, tasks=["train"], partition_id=partition, if_exists="keep")
        assert store.get(partition, ids(3))["x"].tolist() == [0, 1, 2]
        with store.refusal(ValueError, "x"):
            store.put(partition, ["s3"], x=torch.zeros(1))
        rest = store.claim(partition, 3, blocking=True, timeout_s=10.0)  # num_samples is still 3
        assert rest.sample_ids == ["s1", "s2"]
        assert rest.tags == [{"n": 1}, {"n": 2}]

    def test_a_finished_partition_has_an_end(self, store: Store) -> None:
        partition = store.filled(4, "x", "y")
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

    def test_keep_adds_num_samples(self, store: Store) -> None:
        partition = store.filled(2)
        store.register("x", num_samples=3, partition_id=partition, if_exists="keep")
        assert store.claim(partition, 2).size == 2
        assert not store.client.check_consumption_status(partition, ["train"])
        store.put(partition, ["s2"], x=torch.arange(1))
        assert store.claim(partition, 2, blocking=True, timeout_s=10.0).sample_ids == ["s2"]
        with store.refusal(ValueError, "3"):
            store.put(partition, ["s3"], x=torch.arange(1))

    def test_keep_adds_tasks_fields_and_enums(self, store: Store) -> None:
        partition = store.register("x", enums={"word": ["a"]})
        store.put(partition, ids(2), x=torch.arange(2), word=as_objects("a", "a"))
        assert store.claim(partition, 2).size == 2
        store.register(
            "y",
            tasks=["late"],
            enums={"word": ["b"]},
            partition_id=partition,
            if_exists="keep",
            followers=["late"],
        )
        assert store.claim(partition, 2, task="late").sample_ids == ids(2)
        assert store.claim(partition, 2).size == 0
        store.put(partition, ["s2"], x=torch.arange(1), word=as_objects("b"))
        assert store.claim(partition, 2).sample_ids == ["s2"]
        with store.refusal(ValueError, "c"):
            store.put(partition, ["s3"], word=as_objects("c"))
        if store.declares(Capability.LISTING):
            info = store.client.describe(partition).info
            assert (info.fields, info.followers) == (("x", "y"), ("late",))

    def test_keep_refuses_another_group_size(self, store: Store) -> None:
        partition = store.filled(["k_g0", "k_g1"], group_size=2)
        for group_size in (None, 4):
            with store.refusal(ValueError, "grpo_group_size"):
                store.register("x", tasks=["late"], group_size=group_size, partition_id=partition, if_exists="keep")
        with store.refusal(KeyError, "late"):
            store.claim(partition, 2, task="late")
        assert store.claim(partition, 2).size == 2

    def test_keep_from_many_clients_at_once(self, store: Store) -> None:
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

    def test_open_partitions(self, store: Store) -> None:
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
