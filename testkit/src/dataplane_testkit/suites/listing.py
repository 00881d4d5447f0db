"""`list_samples`: ids and tags, no data."""

from __future__ import annotations

import torch

from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._marks import proves
from dataplane_testkit._store import Store


class ListingSuite(Suite, chapter="listing", proof=Capability.LISTING):
    """Lists of the samples of a partition."""

    def test_listing_gives_ids_and_tags(self, store: Store) -> None:
        """Contract: "list_samples(partition_id, tag_filter=None, sample_ids=None) -> meta returns ids and tags, no
        data."

        Check first: SampleList.tags must have one entry per id, in the same order, an empty dict for a sample without
        tags. Samples that lack fields, or have only tags, are listed too. The tags must be copies.
        """
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
        """Contract: "With sample_ids it returns only these, in this order, and leaves out those that are not there."

        Check first: ListRequest.sample_ids must be obeyed. A sample that has only tags, or no tags, is there.
        """
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
        """Contract: "list_fields(sample_ids, partition_id) returns, for each sample, the fields that it has."

        Check first: list_fields must name the sample that is missing. A sample that has only tags has no fields.
        """
        partition = store.register("x", "y")
        store.put(partition, ["a", "b"], x=torch.zeros(2))
        store.put(partition, ["b"], y=torch.zeros(1))
        store.put(partition, ["tags"], [{"n": 3}])
        found = store.client.list_fields(["tags", "b", "a", "b"], partition)
        assert [sorted(names) for names in found] == [[], ["x", "y"], ["x"], ["x", "y"]]
        with store.refusal(KeyError, "nobody"):
            store.client.list_fields(["a", "nobody"], partition)

    def test_listing_of_many_samples(self, store: Store) -> None:
        """Hook spec: "Ids in order of first write, with their tags."

        Check first: the page size of the engine. The hook must read all pages.
        """
        partition = store.register("x")
        store.put(partition, ids(1500)[::-1], [{"n": index} for index in range(1500)], x=torch.arange(1500))
        meta = store.client.list_samples(partition)
        assert meta.sample_ids == ids(1500)[::-1]
        assert meta.tags is not None
        assert [row["n"] for row in meta.tags] == list(range(1500))

    @proves(Capability.LISTING, Capability.CLAIMS)
    def test_listing_advances_no_cursor(self, store: Store) -> None:
        """Contract: "ids and tags, no data."

        Check first: a listing must change nothing. It must also hold samples that a task has already been given.
        """
        partition = store.register("x")
        store.put(partition, ids(3), x=torch.arange(3))
        store.client.list_samples(partition)
        assert store.claim(partition, 2).size == 2
        assert store.client.list_samples(partition).sample_ids == ids(3)
        assert store.claim(partition, 2).size == 1
