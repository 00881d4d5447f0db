"""Tag filters on claims and listings."""

from __future__ import annotations

from typing import Any

import torch

from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._store import Store
from dataplane_testkit._timing import bounded

_TAGS: list[dict[str, Any]] = [
    {"version": 5, "score": 0.5, "split": "a", "kept": True},
    {"version": 6, "score": -1.5, "split": "b", "kept": False},
    {"version": 7, "score": 2.0, "split": "a", "kept": None},
    {"version": 8, "split": "c"},
    {},
]

_FILTERS: list[tuple[dict[str, Any], list[int]]] = [
    ({"version": (">=", 7)}, [2, 3]),
    ({"version": (">", 7)}, [3]),
    ({"version": ("<", 7)}, [0, 1]),
    ({"version": ("<=", 5)}, [0]),
    ({"version": ("==", 6)}, [1]),
    ({"version": 6}, [1]),
    ({"version": ("!=", 6)}, [0, 2, 3]),
    ({"version": ("in", [5, 8, 99])}, [0, 3]),
    ({"version": ("in", [])}, []),
    ({"score": (">", 0.25)}, [0, 2]),
    ({"version": (">", 6.5)}, [2, 3]),
    ({"split": "a"}, [0, 2]),
    ({"split": (">=", "b")}, [1, 3]),
    ({"split": ("in", ["c", "b"])}, [1, 3]),
    ({"kept": True}, [0]),
    ({"kept": ("==", None)}, [2]),
    ({"split": (">", 3)}, []),
    ({"kept": ("<", "x")}, []),
    ({"nobody": ("!=", 1)}, []),
    ({"split": "a", "version": ("<", 7)}, [0]),
    ({}, [0, 1, 2, 3, 4]),
]


class TagFilterSuite(Suite, chapter="tag filters"):
    """Filters that the store applies to the tags."""

    def test_samples_match_the_filter(self, store: Store) -> None:
        tasks = [f"task {number}" for number in range(len(_FILTERS))]
        partition = store.filled(5, tasks=tasks, tags=_TAGS)
        for task, (tag_filter, expected) in zip(tasks, _FILTERS, strict=True):
            matching = [f"s{index}" for index in expected], [_TAGS[index] for index in expected]
            if store.declares(Capability.LISTING):
                listed = store.client.list_samples(partition, tag_filter)
                assert (listed.sample_ids, listed.tags) == matching, f"listed for {tag_filter}"
            if store.declares(Capability.CLAIMS):
                given = store.claim(partition, 9, task=task, tag_filter=tag_filter)
                assert (given.sample_ids, given.tags) == matching, f"given for {tag_filter}"
                rest = store.claim(partition, 9, task=task)
                assert rest.sample_ids == [f"s{index}" for index in range(5) if index not in expected], (
                    f"after a claim with {tag_filter}, one without a filter did not give the rest"
                )

    def test_filters_see_the_newest_tags(self, store: Store) -> None:
        partition = store.filled(3, tags=[{"v": 1}] * 3)
        assert store.claim(partition, 3, tag_filter={"v": 2}).size == 0
        store.put(partition, ["s1"], [{"v": 2}])
        assert store.claim(partition, 3, tag_filter={"v": 2}).sample_ids == ["s1"]
        store.put(partition, ["s0"], [{"v": 3}])
        assert store.claim(partition, 3, tag_filter={"v": 1}).sample_ids == ["s2"]

    def test_skipped_samples_keep_their_place(self, store: Store) -> None:
        partition = store.filled(6, tags=[{"odd": index % 2} for index in range(6)])
        assert store.claim(partition, 2, tag_filter={"odd": 1}).sample_ids == ["s1", "s3"]
        assert store.claim(partition, 3).sample_ids == ["s0", "s2", "s4"]
        assert store.claim(partition, 3).sample_ids == ["s5"]

    def test_blocking_claims_wait_for_matching_samples(self, store: Store) -> None:
        partition = store.filled(3, tags=[{"v": 1}, {"v": 2}, {"v": 1}])
        with store.refusal(TimeoutError, "1"):
            store.claim(partition, 2, tag_filter={"v": 2}, blocking=True, timeout_s=0.05)
        waiting = store.waiting_claim(partition, 2, tag_filter={"v": 2})
        store.put(partition, ["s3"], [{"v": 2}], x=torch.zeros(1, dtype=torch.int64))
        assert waiting.result(what="a claim of matching samples").sample_ids == ["s1", "s3"]

    def test_the_tail_under_a_filter(self, store: Store) -> None:
        partition = store.filled(4, num_samples=4, tags=[{"v": index % 2} for index in range(4)])
        meta = bounded(
            lambda: store.claim(partition, 3, tag_filter={"v": 1}, blocking=True, timeout_s=60),
            what="a claim of the tail",
        )
        assert meta.sample_ids == ["s1", "s3"]

    def test_groups_match_as_a_whole(self, store: Store) -> None:
        partition = store.register("x", group_size=2)
        tags = [{"v": 1}, {"v": 2}, {"v": 2}, {"v": 2}]
        store.put(partition, ["a_g0", "a_g1", "b_g0", "b_g1"], tags, x=torch.arange(4))
        assert store.claim(partition, 4, tag_filter={"v": 2}).sample_ids == ["b_g0", "b_g1"]
        assert store.claim(partition, 4).sample_ids == ["a_g0", "a_g1"]
