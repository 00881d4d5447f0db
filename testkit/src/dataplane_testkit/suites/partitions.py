"""`register_partition` and `clear_samples`: what they open, keep and drop."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, ids, items_of
from dataplane_testkit._store import Store
from dataplane_testkit._timing import in_threads

_ODD_NAMES: Final = [
    *("a b", "x" * 300, "../up", "a/b:c@d|e,f;g", "0", "-1"),
    *("ünïcode-字-🙂", "line\nbreak", "nul\0byte", "{braces}*?[x]", "'quo\"ted'", "%s%d"),
]


class PartitionSuite(Suite, chapter="partitions"):
    """Registrations and clears."""

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
        assert items_of(store.get(partition, ids(3), "role")["role"]) == [None, 7, "user"]
        # as another client would do; this client does not know of it
        store.hooks.register(partition, ["role"], enums={"role": ["tool"]})
        store.put(partition, ids(1), role=as_objects("tool"))
        with store.refusal(ValueError, "'user'"):
            store.put(partition, ["s9"], role=as_objects("user"))

    # --- registering again --------------------------------------------------------------------------------------------

    def test_register_again_drops_rows(self, store: Store) -> None:
        partition = store.filled(3, tags=[{"old": 1}] * 3)
        store.register("x", partition_id=partition)
        for sample_id in ids(3):
            assert not store.has(partition, sample_id), f"row '{sample_id}' is still there after a new registration"
        store.put(partition, ["s1"], [{"new": 2}], x=torch.tensor([[1.5, 2.5]]))  # with another schema
        assert store.get(partition, ["s1"])["x"].tolist() == [[1.5, 2.5]]
        if store.declares(Capability.LISTING) or store.declares(Capability.CLAIMS):
            assert store.tags_of(partition) == {"s1": {"new": 2}}
        store.register("x", partition_id=partition)
        store.put(partition, ["s1"], x=as_objects({"kind": "object"}))
        assert items_of(store.get(partition, ["s1"])["x"]) == [{"kind": "object"}]

    # --- keeping ------------------------------------------------------------------------------------------------------

    def test_keep_leaves_what_is_there_and_adds_the_rest(self, store: Store) -> None:
        partition = store.register("x", enums={"word": ["a"]})
        store.put(partition, ids(3), [{"n": 1}] * 3, x=torch.arange(3), word=as_objects(*"aaa"))
        assert store.claim(partition, 2).size == 2
        before = store.hooks.describe(partition)
        about: dict[str, Any] = {"tasks": ["late"], "enums": {"word": ["b"]}, "followers": ["late"]}
        for num_samples in (4, 99):  # of which the first stays
            store.register("y", partition_id=partition, if_exists="keep", num_samples=num_samples, **about)
        info = store.hooks.describe(partition)
        assert (info.epoch, tuple(info.fields), info.num_samples) == (before.epoch, ("x", "y"), 4)
        assert (tuple(info.consumer_tasks), tuple(info.followers)) == (("train", "late"), ("late",))
        assert {name: tuple(words) for name, words in info.enums.items()} == {"word": ("a", "b")}
        assert store.get(partition, ids(3))["x"].tolist() == [0, 1, 2]
        assert store.claim(partition, 3, task="late").sample_ids == ids(3)
        store.put(partition, ["s3"], x=torch.arange(1), word=as_objects("b"))
        rest = store.claim(partition, 3, blocking=True, timeout_s=10.0)  # the last of the 4
        assert (rest.sample_ids, rest.tags) == (["s2", "s3"], [{"n": 1}, {}])

    def test_keep_from_many_clients_at_once(self, store: Store) -> None:
        clients = [client for _ in range(3) for client in (store.same_store_client(), store.client)]

        def register(partition: str, place: int) -> None:
            client = clients[place]
            store.register("x", tasks=[f"t{place}"], client=client, partition_id=partition, if_exists="keep")
            client.put_samples([f"s{place}"], partition, {"x": torch.tensor([place])})

        for _ in range(3):
            partition = store.new_id()
            in_threads(*(partial(register, partition, place) for place in range(6)))
            assert store.get(partition, ids(6))["x"].tolist() == list(range(6))
            for place in range(6):
                assert store.claim(partition, 6, task=f"t{place}").size == 6

    def test_open_partitions(self, store: Store) -> None:
        client = store.another_client(open_partitions=True)
        claim = partial(client.claim_meta, required_fields=["x"], batch_size=2, blocking=False)
        first, second = store.owned_id(client), store.owned_id(client)
        client.put_samples(["a"], first, {"x": torch.tensor([1])})
        client.put_samples(["b"], first, tags=[{"n": 1}])
        assert claim(first, "train").sample_ids == claim(first, "other").sample_ids == ["a"]
        assert claim(second, "train").size == 0
        client.put_samples(["c"], second, {"x": torch.tensor([2])})
        assert claim(second, "train").sample_ids == ["c"]
        with store.refusal(KeyError):
            client.get_samples(["a"], store.new_id(), ["x"])

    # --- clearing -----------------------------------------------------------------------------------------------------

    def test_cleared_rows_are_gone(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ids(5), [{"old": 1}] * 5, x=torch.arange(5), y=torch.arange(5))
        if store.declares(Capability.CLAIMS):
            assert store.claim(partition, 4).size == 4
        for names in (["s3", "nobody", "s0", "s3"], ["s3"], []):
            store.client.clear_samples(names, partition)
        for sample_id in ("s0", "s3"):
            for field in ("x", "y"):
                with store.refusal(KeyError, f"'{sample_id}'"):
                    store.get(partition, [sample_id], field)
        assert store.get(partition, ["s4", "s1", "s2"])["x"].tolist() == [4, 1, 2]
        # an id that is written again is a new sample, without the old cells and tags, and last in the order
        store.put(partition, ["s3"], [{"new": 1}], x=torch.arange(1))
        assert not store.has(partition, "s3", "y")
        if store.declares(Capability.CLAIMS):
            given = store.claim(partition, 9)
            assert (given.sample_ids, given.tags) == (["s4", "s3"], [{"old": 1}, {"new": 1}])

    def test_clear_hook_counts_its_rows(self, store: Store) -> None:
        partition = store.filled(5)
        assert store.hooks.clear(partition, ["s0", "nobody"]).num_samples == 1
        assert store.hooks.clear(partition, ["s0"]).num_samples == 0
        assert store.hooks.clear(partition, None).num_samples == 4
        assert store.hooks.clear(partition, None).num_samples == 0
