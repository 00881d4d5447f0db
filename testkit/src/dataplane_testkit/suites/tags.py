"""Tags: what a put writes, and what the tag filters of claims and listings choose."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._store import Store
from dataplane_testkit._timing import bounded

#: Values that are easily changed by an encoding.
_VALUES: Final = {
    "": "",
    "text": "ü\n\0字",
    "none": None,
    **{f"bool {value}": value for value in (True, False)},
    **{f"int {value}": value for value in (0, 1, -(2**63), 2**63 - 1)},
    **{f"float {value}": value for value in (1.0, -0.0, 1e-320, math.inf, -math.inf, math.nan)},
}

_TAGS: Final[list[dict[str, Any]]] = [
    {"version": 5, "score": 0.5, "split": "a", "kept": True},
    {"version": 6, "score": -1.5, "split": "b", "kept": False},
    {"version": 7, "score": 2.0, "split": "a", "kept": None},
    {"version": 8, "score": math.nan, "split": "c"},
    {},
]

#: A filter, and the rows of `_TAGS` that match it.
_FILTERS: Final[list[tuple[dict[str, Any], list[int]]]] = [
    ({"version": (">=", 7)}, [2, 3]),
    ({"version": (">", 7)}, [3]),
    ({"version": ("<", 7)}, [0, 1]),
    ({"version": ("<=", 5)}, [0]),
    ({"version": ("==", 6)}, [1]),
    ({"version": 6}, [1]),
    ({"version": ("!=", 6)}, [0, 2, 3]),
    ({"version": ("in", [5, 8, 99])}, [0, 3]),
    ({"version": ("in", [])}, []),
    ({"version": (">", 6.5)}, [2, 3]),
    ({"score": (">", 0.25)}, [0, 2]),
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


class TagSuite(Suite, chapter="tags"):
    """Tags, and filters by tags."""

    def test_tags_merge_key_by_key(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ids(2), [{"a": 1, "b": 1}, {"a": 2}])
        assert not store.has(partition, "s0"), "a row that was put with tags alone has a cell"
        store.put(partition, ids(2), x=torch.arange(2))
        store.put(partition, ids(2), [{"b": 5}, {"c": None}], y=torch.arange(2))
        store.put(partition, ["s1"], [{"d": True}])
        assert store.tags_of(partition) == {"s0": {"a": 1, "b": 5}, "s1": {"a": 2, "c": None, "d": True}}

    def test_tags_keep_their_types(self, store: Store) -> None:
        partition = store.register("x")
        for client in (store.same_store_client(), store.client):  # which reads what the other has written
            client.put_samples(["a"], partition, {"x": torch.tensor([1])}, [_VALUES])
            assert client.get_samples(["a"], partition, ["x"])["x"].tolist() == [1]
        found = store.tags_of(partition)["a"]
        assert found.keys() == _VALUES.keys()
        for name, value in _VALUES.items():
            read = found[name]
            assert (type(read), repr(read)) == (type(value), repr(value)), f"tag {value!r} was read as {read!r}"
        store.client.clear_samples(["a"], partition)
        store.put(partition, ["a"], x=torch.tensor([7]))

    def test_samples_match_the_filter(self, store: Store) -> None:
        tasks = [f"task {number}" for number in range(len(_FILTERS))]
        partition = store.filled(5, tasks=tasks, tags=_TAGS)
        for task, (tag_filter, expected) in zip(tasks, _FILTERS, strict=True):
            names, rest = [f"s{row}" for row in expected], [f"s{row}" for row in range(5) if row not in expected]
            if store.declares(Capability.LISTING):
                assert store.client.list_samples(partition, tag_filter).sample_ids == names, f"listed for {tag_filter}"
            if store.declares(Capability.CLAIMS):
                given = store.claim(partition, 9, task=task, tag_filter=tag_filter)
                assert given.sample_ids == names, f"given for {tag_filter}"
                assert store.claim(partition, 9, task=task).sample_ids == rest, f"given after {tag_filter}"

    def test_blocking_claims_wait_for_matching_samples(self, store: Store) -> None:
        partition = store.filled(4, num_samples=5, tags=[{"v": 1}, {"v": 2}, {"v": 1}, {"v": 1}])
        with store.refusal(TimeoutError, "1"):
            store.claim(partition, 2, tag_filter={"v": 2}, blocking=True, timeout_s=0.05)
        waiting = store.waiting_claim(partition, 2, tag_filter={"v": 2})
        store.put(partition, ["s0"], [{"v": 2}])
        assert waiting.result(what="a claim of matching samples").sample_ids == ["s0", "s1"]
        store.put(partition, ["s4"], [{"v": 2}], x=torch.tensor([4]))
        tail = bounded(
            lambda: store.claim(partition, 3, tag_filter={"v": 1}, blocking=True), what="a claim of the tail"
        )
        assert tail.sample_ids == ["s2", "s3"]
