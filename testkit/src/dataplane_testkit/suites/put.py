"""`put_samples`: what it writes, when it returns, and what it refuses."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from dataplane_core.errors import SchemaMismatchError, StalePartitionError
from dataplane_core.spec import Capability, PutRequest
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, batch, check_column, ids, items_of, jagged
from dataplane_testkit._store import Store, not_run
from dataplane_testkit._timing import bounded

_FIRST: dict[str, Callable[[], Any]] = {
    "scalars": lambda: torch.zeros(2, dtype=torch.int64),
    "vectors": lambda: torch.zeros(2, 3, dtype=torch.int64),
    "matrices": lambda: torch.zeros(2, 3, 4, dtype=torch.int64),
    "objects": lambda: as_objects(1, 2),
}

#: (first write, later write, why it does not fit)
_MISMATCHES: list[tuple[str, Callable[[], Any], str]] = [
    ("scalars", lambda: torch.zeros(2, dtype=torch.float32), "dtype"),
    ("scalars", lambda: torch.zeros(2, dtype=torch.int32), "narrower_dtype"),
    ("scalars", lambda: torch.zeros(2, dtype=torch.uint64), "signedness"),
    ("scalars", lambda: torch.zeros(2, 1, dtype=torch.int64), "n_to_n1"),
    ("scalars", lambda: as_objects(1, 2), "tensor_to_object"),
    ("vectors", lambda: torch.zeros(2, dtype=torch.int64), "lower_rank"),
    ("vectors", lambda: torch.zeros(2, 3, 1, dtype=torch.int64), "higher_rank"),
    ("vectors", lambda: torch.zeros(2, 3, dtype=torch.float64), "dtype_of_vectors"),
    ("vectors", lambda: jagged([torch.zeros(1), torch.zeros(2)]), "dtype_of_jagged"),
    ("matrices", lambda: torch.zeros(2, 3, 5, dtype=torch.int64), "trailing_shape"),
    ("objects", lambda: torch.zeros(2, dtype=torch.int64), "object_to_tensor"),
]


class PutSuite(Suite, chapter="put"):
    """What a put writes, and what a put that is refused leaves as it was."""

    def test_put_returns_a_receipt(self, store: Store) -> None:
        partition = store.register("x", "y")
        meta = store.put(partition, ids(2), [{"n": 1}, {"n": 2}], x=torch.arange(2), y=torch.ones(2))
        assert (meta.partition_id, meta.sample_ids, meta.size) == (partition, ids(2), 2)
        assert sorted(meta.fields or []) == ["x", "y"]
        assert meta.tags == [{"n": 1}, {"n": 2}]

    def test_put_is_visible_when_it_returns(self, store: Store) -> None:
        partition = store.register("x")
        for number in range(20):
            store.put(partition, [f"s{number}"], x=torch.tensor([number]))
            found = bounded(partial(store.get, partition, [f"s{number}"]))["x"].tolist()
            assert found == [number]

    def test_later_puts_add_fields(self, store: Store) -> None:
        partition = store.filled(3, "x", "y", "z")
        store.put(partition, ["new", "s2", "s0"], y=torch.tensor([9.5, 2.5, 0.5]))
        store.put(partition, ["s1"], y=torch.tensor([1.5]))
        store.put(partition, ["s0"], z=as_objects({"late": True}))
        assert store.get(partition, ids(3))["x"].tolist() == [0, 1, 2]
        assert store.get(partition, ["s1", "new", "s0"], "y")["y"].tolist() == [1.5, 9.5, 0.5]
        assert store.get(partition, ["s0"], "z", "x")["z"] == [{"late": True}]
        assert not store.has(partition, "new", "x")
        assert not store.has(partition, "s1", "z")

    def test_a_list_becomes_the_type_that_its_field_has(self, store: Store) -> None:
        partition = store.register("f", "d", "i", "o", "y")
        narrow = torch.tensor([7], dtype=torch.int32)
        store.put(
            partition,
            ["a"],
            f=jagged([torch.tensor([0.5])]),
            d=torch.tensor([0.1]).double(),
            i=narrow,
            o=as_objects({}),
        )
        columns = {"f": [[1, 2], []], "d": [0.1, 1], "i": [8, 9], "o": [[3], [4]]}
        store.client.put_samples(["b", "c"], partition, columns)
        found = store.get(partition, ["b", "c"], *columns)
        check_column(found["f"], [torch.tensor([1.0, 2.0]), torch.tensor([])])
        assert found["d"].tolist() == [0.1, 1.0]
        assert found["i"].equal(torch.tensor([8, 9], dtype=torch.int32))
        assert items_of(found["o"]) == [[3], [4]]
        for name, strange in {"f": [["text"]], "d": [[1]], "i": [1 << 40]}.items():
            with store.refusal(ValueError, name):
                store.client.put_samples(["d"], partition, {name: strange, "y": [1]})
            assert not store.has(partition, "d", "y")

    def test_empty_lists_leave_a_field_open(self, store: Store) -> None:
        partition = store.register("x", "m", "o", "s")
        put = store.client.put_samples
        put(["a", "b"], partition, {"x": [[], []], "m": [[], []], "o": [[], []]})
        assert items_of(store.get(partition, ["b"], "x")["x"]) == [[]]
        put(["c", "d"], partition, {"x": [[5, 6], []], "m": torch.ones(2, 1, 3), "o": [["text"], []], "s": [1, 2]})
        put(["e"], partition, {"x": [[]], "m": [[]], "o": [[]]})
        found = store.get(partition, ["d", "a", "c", "e", "b"], "x", "m", "o")
        check_column(found["x"], [torch.tensor(row, dtype=torch.int64) for row in ([], [], [5, 6], [], [])])
        check_column(found["m"], [torch.ones(length, 3) for length in (1, 0, 1, 0, 0)])
        assert items_of(found["o"]) == [[], [], ["text"], [], []]
        check_column(store.get(partition, ["a", "b"], "x")["x"], [torch.empty(0, dtype=torch.int64)] * 2)
        with store.refusal(ValueError, "s"):
            put(["e"], partition, {"s": [[]]})
        if store.declares(Capability.OVERWRITE):
            put(["a"], partition, {"x": [[7]]})
            assert store.get(partition, ["a"], "x")["x"].tolist() == [[7]]

    def test_ints_of_a_list_may_become_floats(self, store: Store) -> None:
        partition = store.register("x", "t", "i")
        put = store.client.put_samples
        put(["a", "b"], partition, {"x": [1, 0], "t": [[1, 2], [3]], "i": [2**24, 8]})
        check_column(store.get(partition, ["b", "a"], "x")["x"], torch.tensor([0, 1]))
        put(["c", "d"], partition, {"x": [0.5, 1.0], "t": [[0.5], []], "i": torch.tensor([9, 10])})
        put(["e"], partition, {"x": [2], "t": [[4]], "i": [11]})
        found = store.get(partition, ["d", "a", "c", "e", "b"], "x", "t", "i")
        check_column(found["x"], torch.tensor([1.0, 1.0, 0.5, 2.0, 0.0]))
        check_column(found["t"], [torch.tensor(row) for row in ([], [1.0, 2.0], [0.5], [4.0], [3.0])])
        check_column(found["i"], torch.tensor([10, 2**24, 9, 11, 8]))
        check_column(store.get(partition, ["b", "a"], "x")["x"], torch.tensor([0.0, 1.0]))
        with store.refusal(ValueError, "row 1, 16777217"):
            put(["f", "g"], partition, {"x": [1, 2**24 + 1]})
        large = store.register("x")
        put(["a"], large, {"x": [-(2**24) - 1]})
        with store.refusal(ValueError, "x"):
            put(["b"], large, {"x": [0.5]})

    def test_tags_merge_key_by_key(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ids(2), [{"a": 1, "b": 1}, {"a": 2}])
        assert not store.has(partition, "s0"), "a row that was put with tags alone has a cell"
        store.put(partition, ids(2), x=torch.arange(2))
        store.put(partition, ids(2), [{"b": 5}, {"c": None}])
        store.put(partition, ids(2), [{}, {"d": True}], y=torch.arange(2))
        store.put(partition, ["s0"], z=torch.zeros(1))
        assert store.tags_of(partition) == {"s0": {"a": 1, "b": 5}, "s1": {"a": 2, "c": None, "d": True}}

    def test_tags_keep_their_types(self, store: Store) -> None:
        values = [True, False, 0, 1, -(2**63), 2**63 - 1, 1.0, -0.0, 1e-320, math.inf, -math.inf, "", "ü\n\0字", None]
        partition = store.register("x")
        store.put(partition, ["a"], [{f"t{i}": value for i, value in enumerate(values)} | {"": 1}], x=torch.zeros(1))
        found = store.tags_of(partition)["a"]
        for index, value in enumerate(values):
            read = found[f"t{index}"]
            assert (type(read), repr(read)) == (type(value), repr(value)), f"tag {value!r} was read as {read!r}"
        assert found[""] == 1

    def test_tags_that_are_no_finite_numbers_leave_the_store_usable(self, store: Store) -> None:
        partition = store.filled(
            3, tasks=["train", "filtered"], tags=[{"v": value} for value in (math.nan, math.inf, -math.inf)]
        )
        for client in (store.same_store_client(), store.client):
            client.put_samples(ids(3), partition, tags=[{"again": math.nan}] * 3)
            assert client.get_samples(ids(3), partition, ["x"])["x"].tolist() == [0, 1, 2]
            if store.declares(Capability.LISTING):
                tags = client.list_samples(partition).tags or []
                assert [repr(row["v"]) for row in tags] == ["nan", "inf", "-inf"]
        if store.declares(Capability.CLAIMS) and store.declares(Capability.TAG_FILTERS):
            assert store.claim(partition, 9, task="filtered", tag_filter={"v": (">", 0.0)}).sample_ids == ["s1"]
        found = store.tags_of(partition)
        assert [repr(found[name]["v"]) for name in ids(3)] == ["nan", "inf", "-inf"]
        store.client.clear_samples(["s0"], partition)
        store.put(partition, ["s0"], x=torch.tensor([7]))
        assert store.get(partition, ids(3))["x"].tolist() == [7, 1, 2]

    def test_without_ids_there_is_no_io(self, store: Store) -> None:
        partition = store.register("x")
        with store.faults.counting() as calls:
            meta = store.client.put_samples([], partition, TensorDict({}, batch_size=[0]))
            assert store.client.put_samples([], partition).size == 0
            assert store.client.get_samples([], partition, ["x"]).batch_size == torch.Size([0])
        assert (meta.partition_id, meta.sample_ids, meta.size) == (partition, [], 0)
        assert calls == []

    # --- memory -------------------------------------------------------------------------------------------------------

    def test_what_was_put_may_be_reused(self, store: Store) -> None:
        partition = store.register("x", "y", "z", "o")
        dense, scalars = torch.arange(4).view(2, 2), torch.tensor([1.0, 2.0])
        ragged: Any = jagged([torch.tensor([1, 2]), torch.tensor([3])])
        item: dict[str, Any] = {"list": [1, 2], "deep": {"tensor": torch.arange(3)}}
        tags = [{"n": 1}, {"n": 2}]
        meta = store.put(partition, ids(2), tags, x=dense, y=scalars, z=ragged, o=as_objects(item, None))
        for mine in (dense, scalars, ragged.values(), item["deep"]["tensor"]):
            mine.fill_(-1)
        ragged.offsets().fill_(0)
        item["list"].append(3)
        item["new"] = 1
        tags[0]["n"] = 9
        assert meta.tags is not None
        meta.tags[1]["n"] = 9
        found = store.get(partition, ids(2), "x", "y", "z", "o")
        assert found["x"].tolist() == [[0, 1], [2, 3]], "the store uses the caller's memory instead of a copy"
        assert found["y"].tolist() == [1.0, 2.0], "the store uses the caller's memory instead of a copy"
        check_column(found["z"], [torch.tensor([1, 2]), torch.tensor([3])])
        kept, _ = items_of(found["o"])
        assert list(kept) == ["list", "deep"]
        assert (kept["list"], kept["deep"]["tensor"].tolist()) == ([1, 2], [0, 1, 2])
        if store.declares(Capability.LISTING) or store.declares(Capability.CLAIMS):
            assert store.tags_of(partition) == {"s0": {"n": 1}, "s1": {"n": 2}}

    def test_cuda_tensors_are_copied_to_host(self, store: Store) -> None:
        if not torch.cuda.is_available():
            not_run("this machine has no CUDA device")
        partition = store.register("x")
        store.put(partition, ids(2), x=torch.arange(4, device="cuda").view(2, 2))
        assert store.get(partition, ids(2))["x"].tolist() == [[0, 1], [2, 3]]

    # --- sizes --------------------------------------------------------------------------------------------------------

    def test_no_more_samples_are_written_than_were_registered(self, store: Store) -> None:
        partition = store.register("x", num_samples=4)
        with store.refusal(ValueError, "11", "4"):
            store.put(partition, ids(11), x=torch.arange(11))
        with store.refusal(KeyError):
            store.get(partition, ["s0"])
        store.put(partition, ids(3), x=torch.arange(3))
        store.put(partition, ids(3), y=torch.arange(3))
        store.client.clear_samples(["s0"], partition)
        store.put(partition, ["s0", "s3"], x=torch.arange(2))
        with store.refusal(ValueError, "5", "4"):
            store.put(partition, ["s4"], [{"n": 1}])
        with store.refusal(ValueError, "5", "4"):
            store.put(partition, ["s1", "s5"], x=torch.arange(8, 10))
        assert store.get(partition, ids(4))["x"].tolist() == [0, 1, 2, 1]

    def test_a_cell_of_16_mb(self, store: Store) -> None:
        partition = store.register("x")
        big = torch.arange(4 * 1024 * 1024, dtype=torch.int32)
        store.put(partition, ["big"], x=big.unsqueeze(0))
        assert torch.equal(store.get(partition, ["big"])["x"][0], big)

    # --- the schema ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("first", "later"), [case[:2] for case in _MISMATCHES], ids=[c[2] for c in _MISMATCHES])
    def test_a_field_keeps_its_schema(self, store: Store, first: str, later: Callable[[], Any]) -> None:
        partition = store.register("x", "y")
        before = _FIRST[first]()
        store.put(partition, ["a", "b"], x=before)
        with store.refusal(SchemaMismatchError, "x"):
            store.put(partition, ["c", "d"], [{"n": 1}, {"n": 2}], y=torch.ones(2), x=later())
        for sample_id in ("c", "d"):
            for field in ("x", "y"):
                assert not store.has(partition, sample_id, field), f"the refused put wrote '{field}' of '{sample_id}'"
        if store.declares(Capability.LISTING):
            assert store.client.list_samples(partition).sample_ids == ["a", "b"], "the refused put created rows"
        found = store.get(partition, ["a", "b"])["x"]
        if first == "objects":
            assert items_of(found) == [1, 2]
        else:
            assert torch.equal(found, before)

    def test_the_schema_is_that_of_the_committed_puts(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ["a"], x=torch.tensor([1]))
        store.client.clear_samples(["a"], partition)
        with store.refusal(ValueError, "x"):
            store.put(partition, ["b"], x=torch.tensor([1.0]), y=torch.tensor([1.0]))
        store.put(partition, ["b"], x=torch.tensor([2]), y=torch.tensor([3]))
        assert store.get(partition, ["b"], "y")["y"].dtype == torch.int64

    def test_allow_pickle_opens_the_set(self, store: Store) -> None:
        client = store.another_client(allow_pickle=True)
        partition = store.register("o", client=client)
        items = [(1, 2), {3, 4}, 1j, {"inside": datetime.date(2024, 1, 1)}]
        client.put_samples(ids(4), partition, batch(4, o=as_objects(*items)))
        found = items_of(client.get_samples(ids(4), partition, ["o"])["o"])
        assert found == items

    # --- the hook -----------------------------------------------------------------------------------------------------

    def test_put_hook_counts_its_rows(self, store: Store) -> None:
        partition = store.register("x")
        assert store.hooks.put(partition, ids(3), batch(3, x=torch.arange(3))).num_samples == 3
        assert store.hooks.put(partition, ids(2), None, [{"n": 1}, {"n": 2}]).num_samples == 2

    def test_put_hook_takes_the_current_epoch(self, store: Store) -> None:
        partition = store.register("x")
        old = store.hooks.register(partition).epoch
        store.hooks.put(partition, ["a"], batch(1, x=torch.tensor([1])), epoch=old)
        new = store.hooks.register(partition).epoch
        with pytest.raises(StalePartitionError):
            store.hooks.put(partition, ["b"], batch(1, x=torch.tensor([1])), [{"n": 1}], epoch=old)
        assert not store.has(partition, "b"), "a put with the epoch of an earlier registration was written"
        if store.declares(Capability.LISTING):
            assert store.hooks.listing(partition).sample_ids == []
        store.hooks.put(partition, ["b"], batch(1, x=torch.tensor([2])), epoch=new)
        assert store.get(partition, ["b"])["x"].tolist() == [2]

    def test_middleware_may_add_its_column_first(self, store: Store) -> None:
        partition = store.register("x", "y")

        def add(request: PutRequest) -> None:
            request.columns = {"~mark": request.columns["y"], **request.columns}
            request.specs = {**request.specs, "~mark": request.specs["y"]}

        with store.faults.before("put_samples", add):
            store.put(partition, ids(3), x=torch.arange(3), y=torch.arange(3) + 100)
        found = store.get(partition, ids(3), "x", "y")
        assert (found["x"].tolist(), found["y"].tolist()) == ([0, 1, 2], [100, 101, 102]), (
            "the cells of the two fields were swapped"
        )
        assert store.hooks.read(partition, ["s1"], ["~mark"])["~mark"].tolist() == [101]

    def test_a_put_that_is_sent_again_is_a_request_of_its_own(self, store: Store) -> None:
        partition = store.register("role", enums={"role": ["user"]})
        store.put(partition, ["old"], role=as_objects("user"))
        seen: list[list[str]] = []

        def change(request: PutRequest) -> None:
            seen.append(list(request.sample_ids))
            request.sample_ids.clear()
            request.columns.clear()
            if len(seen) == 1:
                raise StalePartitionError("registered again.")
            request.sample_ids.append("other")
            request.columns.update(kept)

        kept: dict[str, Any] = {}
        with store.faults.before("put_samples", lambda request: kept.update(request.columns)):
            store.put(partition, ["new"], role=as_objects("user"))
        with store.faults.before("put_samples", change):
            store.put(partition, ["again"], role=as_objects("user"))
        assert seen == [["again"], ["again"]]
