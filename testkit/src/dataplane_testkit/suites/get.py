"""`get_samples` and `get_data`: they return exactly the requested rows, or raise an error."""

from __future__ import annotations

import pytest
import torch

from dataplane_core.errors import LostSamplesError, MissingDataError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, check_column, ids, items_of, jagged, shared
from dataplane_testkit._store import Store
from dataplane_testkit._timing import bounded


class GetSuite(Suite, chapter="get"):
    """Reads."""

    def test_get_keeps_the_order_asked_for(self, store: Store) -> None:
        partition = store.register("x", "o")
        rows = [torch.full((index % 4,), index) for index in range(12)]
        store.put(partition, ids(12), x=jagged(rows), o=as_objects(*range(12)), y=torch.arange(12))
        order = [7, 0, 11, 3, 4, 5, 1]
        found = store.get(partition, [f"s{index}" for index in order], "x", "y", "o")
        assert found.batch_size == torch.Size([7])
        assert found["y"].tolist() == order
        assert items_of(found["o"]) == order
        check_column(found["x"], [rows[index] for index in order])

    def test_get_repeats_rows(self, store: Store) -> None:
        partition = store.register("x", "o")
        rows = [torch.full((index + 1,), index) for index in range(3)]
        store.put(partition, ids(3), x=jagged(rows), y=torch.arange(3), o=as_objects([0], [1], [2]))
        order = [2, 0, 2, 2, 1, 0]
        found = store.get(partition, [f"s{index}" for index in order], "x", "y", "o")
        assert found["y"].tolist() == order
        check_column(found["x"], [rows[index] for index in order])
        items = items_of(found["o"])
        assert items == [[index] for index in order]
        items[0].append("changed")
        assert items[2] == [2], "repeated rows share one item"

    def test_get_joins_rows_of_many_puts(self, store: Store) -> None:
        partition = store.register("x", "y", "o")
        for index in range(6):
            store.put(partition, [f"s{index}"], x=torch.full((1, index % 3), index), y=torch.tensor([index]))
        for index in (3, 1, 5, 0, 2, 4):
            store.put(partition, [f"s{index}"], o=as_objects({"n": index}), z=torch.full((1, 2), float(index)))
        order = [5, 2, 0, 4, 1]
        found = store.get(partition, [f"s{index}" for index in order], "o", "x", "z", "y")
        assert found["y"].tolist() == order
        assert found["z"].tolist() == [[float(index)] * 2 for index in order]
        assert items_of(found["o"]) == [{"n": index} for index in order]
        check_column(found["x"], [torch.full((index % 3,), index) for index in order])

    def test_equal_rows_of_unequal_puts_come_back_dense(self, store: Store) -> None:
        partition = store.register("x")
        rows = [torch.arange(2), torch.arange(3), torch.arange(0), torch.arange(3) + 5]
        store.put(partition, ids(4), x=jagged(rows))
        store.put(partition, ["s4"], x=torch.arange(3).unsqueeze(0) + 9)
        check_column(store.get(partition, ["s4", "s1", "s3"])["x"], [torch.arange(3) + 9, rows[1], rows[3]])
        check_column(store.get(partition, ["s2"])["x"], [rows[2]])
        check_column(store.get(partition, ["s2", "s4"])["x"], [rows[2], torch.arange(3) + 9])

    # --- missing ------------------------------------------------------------------------------------------------------

    def test_get_of_missing_samples_names_them(self, store: Store) -> None:
        partition = store.filled(5)
        with store.refusal(KeyError, "'gone0'"):
            store.get(partition, ["s0", "gone0", "s1"])
        missing = ids(9, "gone")
        with store.refusal(MissingDataError, "'gone0'", "6 more") as caught:
            store.get(partition, ["s4", *missing, "s3"])
        assert caught.value.missing_samples == ("gone0", "gone1", "gone2")

    def test_get_of_only_missing_samples_raises(self, store: Store) -> None:
        partition = store.register("x", "y")
        with store.refusal(KeyError, "'a'"):
            store.get(partition, ["a"])
        store.put(partition, ["a"], x=torch.zeros(1))
        with store.refusal(KeyError, "'b'"):
            store.get(partition, ["b"])
        with store.refusal(KeyError, "y"):
            store.get(partition, ["a"], "y")
        with store.refusal(KeyError, "unheard_of"):
            store.get(partition, ["a"], "x", "unheard_of")

    def test_get_of_missing_cells_names_them(self, store: Store) -> None:
        partition = store.filled(6, "x", "y")
        store.put(partition, ["s1"], y=torch.zeros(1))
        with store.refusal(KeyError, "'s0'", "y"):
            store.get(partition, ["s1", "s0"], "x", "y")
        with store.refusal(MissingDataError, "2 more") as caught:
            store.get(partition, ids(6), "y", "x")
        assert caught.value.missing_cells == {"s0": ("y",), "s2": ("y",), "s3": ("y",)}

    @pytest.mark.parametrize(("count", "length"), [(1, 1 << 16), (999, 1)], ids=["a_large_row", "many"])
    def test_get_names_what_is_missing_behind_others(self, store: Store, count: int, length: int) -> None:
        partition = store.register("x", "y")
        there = ids(count)
        store.put(partition, there, x=torch.zeros(count, length, dtype=torch.uint8))
        store.put(partition, ["bare"], y=torch.zeros(1))
        with store.refusal(MissingDataError, "'gone'") as caught:
            store.get(partition, [*there, "gone"])
        assert caught.value.missing_samples == ("gone",)
        with store.refusal(MissingDataError, "'bare'", "x") as caught:
            store.get(partition, [*there, "bare"])
        assert caught.value.missing_cells == {"bare": ("x",)}

    # --- arguments ----------------------------------------------------------------------------------------------------

    def test_get_all_fields(self, store: Store) -> None:
        partition = store.register("x")
        store.put(partition, ids(3), x=torch.arange(3), y=torch.zeros(3, 2))
        store.put(partition, ids(2), z=as_objects("a", "b"))
        found = store.client.get_samples(["s1", "s0", "s1"], partition, None)
        assert sorted(found.keys()) == ["x", "y", "z"]
        assert found["x"].tolist() == [1, 0, 1]
        assert sorted(store.client.get_samples(["s2", "s0"], partition, None).keys()) == ["x", "y"]
        store.put(partition, ["t"], [{"a": 1}])
        assert store.client.get_samples(["t", "s0"], partition, None).batch_size == (2,)
        with store.refusal(KeyError, "nobody"):
            store.client.get_samples(["s0", "nobody"], partition, None)
        with store.refusal(KeyError, "nowhere"):
            store.client.get_samples(["s0"], "nowhere", None)

    def test_reads_and_listings_advance_no_cursor(self, store: Store) -> None:
        partition = store.filled(3)
        for given in (ids(2), ids(3)[2:], []):
            assert store.get(partition, ids(3))["x"].tolist() == [0, 1, 2], "a claimed sample can no longer be read"
            if store.declares(Capability.LISTING):
                assert store.client.list_samples(partition).sample_ids == ids(3)
            assert store.client.check_consumption_status(partition, ["train"]) == (not given)
            assert store.claim(partition, 2).sample_ids == given

    def test_get_data_reads_by_meta(self, store: Store) -> None:
        partition = store.register("x", "y")
        meta = store.put(partition, ids(3), x=torch.arange(3), y=torch.ones(3))
        found = store.client.get_data(meta)
        assert sorted(found.keys()) == ["x", "y"]
        assert sorted(store.client.get_data(meta, ["y"]).keys()) == ["y"]
        assert store.client.get_data(meta.subset([2, 0, 2]))["x"].tolist() == [2, 0, 2]
        with store.refusal(ValueError, "select_fields"):
            store.client.get_data(KVBatchMeta(partition, None, ["s0"]))

    # --- memory -------------------------------------------------------------------------------------------------------

    def test_what_comes_back_is_owned_by_the_caller(self, store: Store) -> None:
        partition = store.register("x", "y", "o")
        rows = [torch.tensor([1, 2]), torch.tensor([3])]
        store.put(partition, ids(2), x=jagged(rows), y=torch.arange(4).view(2, 2), o=as_objects([1], [2]))
        first, second = (store.get(partition, ids(2), "x", "y", "o") for _ in range(2))
        assert not shared(first["x"], second["x"]), "two reads share memory"
        assert not shared(first["y"], second["y"]), "two reads share memory"
        first["x"].values().fill_(-1)
        first["y"].fill_(-1)
        items_of(first["o"])[0].append("changed")
        for found in (second, store.get(partition, ids(2), "x", "y", "o")):
            check_column(found["x"], rows)
            assert found["y"].tolist() == [[0, 1], [2, 3]]
            assert items_of(found["o"]) == [[1], [2]]
        repeated = store.get(partition, ["s0", "s0", "s1"], "y")["y"]
        repeated[0].fill_(-1)
        assert repeated.tolist() == [[-1, -1], [0, 1], [2, 3]]

    # --- the hook -----------------------------------------------------------------------------------------------------

    def test_get_hook_returns_the_columns_asked_for(self, store: Store) -> None:
        partition = store.register("x", "y", "z")
        store.put(partition, ids(2), x=torch.zeros(2, 3, 4, dtype=torch.bfloat16), y=as_objects(1, 2), z=torch.ones(2))
        reply = store.hooks.get(partition, ids(2), ["y", "x"])
        assert {"x", "y"} <= set(reply.columns)
        assert {"x", "y"} <= set(reply.specs)
        x, y = reply.specs["x"], reply.specs["y"]
        assert (x.kind, x.dtype, x.rank, tuple(x.trailing)) == ("tensor", "bfloat16", 2, (4,))
        assert y.kind == "object"

    def test_lost_payload_is_named(self, store: Store) -> None:
        partition = store.filled(3, "x", "y")
        store.put(partition, ids(3), y=torch.arange(3))
        store.lose(partition, "s1", "x")
        with store.refusal(LostSamplesError, "'s1'", "x") as caught:
            bounded(lambda: store.get(partition, ids(3), "y", "x"), what="a read of lost payload")
        assert not caught.value.retryable
        assert caught.value.missing_cells == {"s1": ("x",)}
        assert store.get(partition, ids(3), "y")["y"].tolist() == [0, 1, 2]
        store.client.clear_samples(["s1"], partition)
        store.put(partition, ["s1"], x=torch.tensor([7]))
        assert store.get(partition, ids(3))["x"].tolist() == [0, 7, 2]
