"""`put_samples`, `get_samples` and `get_data`: rows and tags go in as they are, and come back as asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from dataplane_core.errors import LostSamplesError, MissingDataError, SchemaMismatchError
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, batch, check_column, ids, items_of, jagged, rows_of, shared
from dataplane_testkit._copies import allocated
from dataplane_testkit._store import Store, not_run
from dataplane_testkit._timing import bounded
from dataplane_testkit.faults import Faults

_INTS: Final = torch.zeros(2, dtype=torch.int64)
_VECTORS: Final = torch.zeros(2, 3, dtype=torch.int64)
_OBJECTS: Final = as_objects(1, 2)

#: What does not fit -> the first column of a field, and a later one.
_MISMATCHES: Final[Mapping[str, tuple[Any, Any]]] = {
    "dtype": (_INTS, torch.zeros(2)),
    "narrower_dtype": (_INTS, _INTS.int()),
    "signedness": (_INTS, _INTS.to(torch.uint64)),
    "n_to_n1": (_INTS, _INTS.view(2, 1)),
    "lower_rank": (_VECTORS, _INTS),
    "higher_rank": (_VECTORS, _VECTORS.view(2, 3, 1)),
    "dtype_of_vectors": (_VECTORS, _VECTORS.double()),
    "dtype_of_jagged": (_VECTORS, jagged([torch.zeros(1), torch.zeros(2)])),
    "trailing_shape": (torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)),
    "tensor_to_object": (_INTS, _OBJECTS),
    "object_to_tensor": (_OBJECTS, _INTS),
    "texts_to_floats": (torch.zeros(2, 3), [["text"], []]),
    "rows_to_scalars": (torch.zeros(2), [[1], [2]]),
    "empty_to_scalars": (_INTS, [[], []]),
    "large_int": (_INTS.int(), [1 << 40, 0]),
    "int_that_is_no_float": (torch.zeros(2), [0, 2**24 + 1]),
    "float_among_large_ints": ([2**24 + 1, 0], [0.5, 0]),
}

_EMPTY: Final[list[Any]] = [[], []]

#: Lists of a field -> its columns in the order of the puts, and the dtypes in which the first of them is read after its
#: put, and all of them at last. None: as objects.
_LISTS: Final[Mapping[str, tuple[list[Any], torch.dtype | None, torch.dtype | None]]] = {
    "ints_among_doubles": ([torch.tensor([0.1]).double(), [0.1, 1]], torch.float64, torch.float64),
    "ints_among_rows_of_floats": ([torch.tensor([[0.5]]), [[1, 2], []]], torch.float32, torch.float32),
    "ints_among_smaller_ints": ([torch.tensor([7]).int(), [8, 9]], torch.int32, torch.int32),
    "lists_among_objects": ([as_objects({}), [[3], [4]]], None, None),
    "empty_before_ints": ([_EMPTY, [[5, 6], []], [[]]], None, torch.int64),
    "empty_before_tensors": ([_EMPTY, torch.ones(2, 1, 3), [[]]], None, torch.float32),
    "empty_before_objects": ([_EMPTY, [["text"], []], [[]]], None, None),
    "ints_before_floats": ([[1, 0], [0.5, 1.0], [2]], torch.int64, torch.float32),
    "rows_of_ints_before_floats": ([[[1, 2], [3]], [[0.5], []], [[4]]], torch.int64, torch.float32),
    "ints_before_ints": ([[2**24, 8], torch.tensor([9, 10]), [11]], torch.int64, torch.int64),
}

#: Values that are easily changed by an encoding.
_TAGS: Final = {
    "": "",
    "text": "ü\n\0字",
    "none": None,
    **{f"bool {value}": value for value in (True, False)},
    **{f"int {value}": value for value in (0, 1, -(2**63), 2**63 - 1)},
    **{f"float {value}": value for value in (1.0, -0.0, 1e-320, math.inf, -math.inf, math.nan)},
}

#: Rows of a put whose copies are counted.
_NUM_ROWS: Final = 32
#: Rows that a read asks for beside a missing one: how many, and the bytes of each.
_BESIDE: Final = {"nothing": (0, 1), "a_few": (3, 1), "a_large_row": (1, 1 << 16), "many": (999, 1)}


def _check_values(column: Any, values: list[Any], dtype: torch.dtype | None) -> None:
    if dtype is None:
        assert items_of(column) == values
    else:
        assert column.dtype == dtype
        assert [row.tolist() for row in rows_of(column, len(values))] == values


_ODD_NAMES: Final = [
    *("a b", "x" * 300, "../up", "a/b:c@d|e,f;g", "0", "-1"),
    *("ünïcode-字-🙂", "line\nbreak", "nul\0byte", "{braces}*?[x]", "'quo\"ted'", "%s%d"),
]


class RowSuite(Suite, chapter="rows"):
    """Puts and reads of rows."""

    # --- puts ---------------------------------------------------------------------------------------------------------

    def test_put_is_visible_when_it_returns(self, store: Store) -> None:
        partition = store.register("x")
        for number in range(20):
            store.put(partition, [f"s{number}"], x=torch.tensor([number]))
            found = bounded(partial(store.get, partition, [f"s{number}"]))["x"].tolist()
            assert found == [number]

    @pytest.mark.parametrize("lists", _LISTS)
    def test_a_list_becomes_the_type_that_its_field_has(self, store: Store, lists: str) -> None:
        columns, dtype_at_first, dtype = _LISTS[lists]
        partition, values = store.register("x"), list[Any]()
        for column in columns:
            names = [f"s{len(values) + row}" for row in range(len(column))]
            store.client.put_samples(names, partition, {"x": column})
            values += items_of(column)
            if column is columns[0]:
                _check_values(store.get(partition, names)["x"], values, dtype_at_first)
        first, everything = (store.get(partition, ids(count))["x"] for count in (len(columns[0]), len(values)))
        _check_values(everything, values, dtype)
        _check_values(first, values[: len(columns[0])], dtype)
        assert dtype is None or first.shape[2:] == everything.shape[2:]

    @pytest.mark.parametrize("what", _MISMATCHES)
    def test_a_field_keeps_its_schema(self, store: Store, what: str) -> None:
        before, later = _MISMATCHES[what]
        partition = store.register("x", "y")
        store.client.put_samples(["a", "b"], partition, {"x": before}, [{"n": 1}, {"n": 1}])
        kept = items_of(store.get(partition, ["a", "b"])["x"])
        names = ["b", "c"] if store.declares(Capability.OVERWRITE) else ["c", "d"]
        columns = {"y": torch.ones(2), "x": later}
        with store.refusal(SchemaMismatchError, "x"):
            store.client.put_samples(names, partition, columns, [{"n": 2}, {"n": 2}])
        for sample_id, field in (("b", "y"), ("c", "x"), ("c", "y")):
            assert not store.has(partition, sample_id, field), f"the refused put wrote '{field}' of '{sample_id}'"
        assert items_of(store.get(partition, ["a", "b"])["x"]) == kept
        if store.declares(Capability.LISTING):
            assert store.tags_of(partition) == {"a": {"n": 1}, "b": {"n": 1}}, "the refused put wrote rows or tags"
        store.client.clear_samples(["a", "b"], partition)
        with store.refusal(SchemaMismatchError, "x"):
            store.client.put_samples(names, partition, columns)

    def test_a_cell_of_16_mb(self, store: Store) -> None:
        partition = store.register("x")
        big = torch.arange(4 * 1024 * 1024, dtype=torch.int32)
        store.put(partition, ["big"], x=big.unsqueeze(0))
        assert torch.equal(store.get(partition, ["big"])["x"][0], big)

    def test_any_string_is_an_id(self, store: Store) -> None:
        partition = store.register("x", partition_id=f"{store.new_id()} / ü:@|\n", tasks=["t a/b:ü"])
        columns = {f"f{name}": torch.arange(len(_ODD_NAMES)) * 100 + place for place, name in enumerate(_ODD_NAMES)}
        store.put(partition, _ODD_NAMES, columns=columns)
        found = store.get(partition, _ODD_NAMES[::-1], *columns)
        for place, name in enumerate(columns):
            assert found[name].tolist() == [100 * row + place for row in reversed(range(len(_ODD_NAMES)))], name
        if store.declares(Capability.CLAIMS):
            assert store.claim(partition, 99, *columns, task="t a/b:ü").sample_ids == _ODD_NAMES

    def test_thousands_of_samples_in_one_call(self, store: Store) -> None:
        names = [f"q_g{number}" for number in range(9000)]
        tags = [{"n": number} for number in range(9000)]
        partition = store.filled(names, tags=tags, group_size=9000 if store.declares(Capability.GROUPS) else None)
        assert store.get(partition, names[::-1])["x"].tolist() == [*range(9000)][::-1]
        if store.declares(Capability.LISTING):
            meta = store.client.list_samples(partition)
            assert (meta.sample_ids, meta.tags) == (names, tags)
        if store.declares(Capability.LEASES):
            held = store.claim(partition, 9000, blocking=True, lease_s=600.0)
            store.client.renew(held, 600.0)
            store.client.nack(held)
        if store.declares(Capability.CLAIMS):
            assert sorted(store.claim(partition, 9000, blocking=True).sample_ids) == sorted(names)
        store.client.clear_samples(names[1:], partition)
        assert [store.has(partition, name) for name in (names[0], names[-1])] == [True, False]

    # --- tags ---------------------------------------------------------------------------------------------------------

    def test_tags_keep_their_types(self, store: Store) -> None:
        partition = store.register("x")
        store.put(partition, ["a"], [_TAGS], x=torch.tensor([1]))
        for client in (store.same_store_client(), store.client):  # which reads what the other has written
            client.put_samples(["a"], partition, tags=[_TAGS])
            assert client.get_samples(["a"], partition, ["x"])["x"].tolist() == [1]
        found = store.tags_of(partition)["a"]
        assert found.keys() == _TAGS.keys()
        for name, value in _TAGS.items():
            read = found[name]
            assert (type(read), repr(read)) == (type(value), repr(value)), f"tag {value!r} was read as {read!r}"
        store.client.clear_samples(["a"], partition)
        store.put(partition, ["a"], x=torch.tensor([7]))

    # --- reads --------------------------------------------------------------------------------------------------------

    def test_get_keeps_the_order_asked_for(self, store: Store) -> None:
        partition = store.register("x", "o")
        rows = [torch.full((index % 4,), index) for index in range(12)]
        for names in (ids(12)[6:], ids(12)[:6]):
            numbers = [int(name[1:]) for name in names]
            columns = {"x": jagged([rows[number] for number in numbers]), "y": torch.tensor(numbers)}
            store.put(partition, names, columns=columns, o=as_objects(*numbers))
        for order in ([7, 0, 11, 3, 4, 5, 1], [2, 0, 2, 10, 2, 1, 0]):
            found = store.get(partition, [f"s{index}" for index in order], "x", "y", "o")
            assert found.batch_size == (7,)
            assert found["y"].tolist() == order
            assert items_of(found["o"]) == order
            check_column(found["x"], [rows[index] for index in order])

    @pytest.mark.parametrize("beside", _BESIDE)
    def test_what_is_missing_is_named(self, store: Store, beside: str) -> None:
        count, length = _BESIDE[beside]
        partition = store.register("x", "y")
        store.put(partition, ids(count), x=torch.zeros(count, length, dtype=torch.uint8), y=torch.zeros(count))
        with store.refusal(KeyError, "'gone'"):
            store.get(partition, [*ids(count), "gone"])
        with store.refusal(MissingDataError, "'gone0'", "6 more") as caught:
            store.get(partition, [*ids(count), *ids(9, "gone")])
        assert caught.value.missing_samples == ("gone0", "gone1", "gone2")
        store.put(partition, ids(5, "bare"), y=torch.zeros(5))
        with store.refusal(MissingDataError, "'bare0'", "x", "2 more") as caught:
            store.get(partition, [*ids(count), *ids(5, "bare")], "y", "x")
        assert caught.value.missing_cells == {"bare0": ("x",), "bare1": ("x",), "bare2": ("x",)}
        with store.refusal(KeyError, "unheard_of"):
            store.get(partition, ["bare0"], "y", "unheard_of")

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

    # --- memory -------------------------------------------------------------------------------------------------------

    def test_what_was_put_may_be_reused(self, store: Store) -> None:
        partition = store.register("x", "y", "z", "o")
        dense, scalars = torch.arange(4).view(2, 2), torch.tensor([1.0, 2.0])
        ragged: Any = jagged([torch.tensor([1, 2]), torch.tensor([3])])
        item: dict[str, Any] = {"list": [1, 2], "tensor": torch.arange(3)}
        tags = [{"n": 1}, {"n": 2}]
        meta = store.put(partition, ids(2), tags, x=dense, y=scalars, z=ragged, o=as_objects(item, None))
        for mine in (dense, scalars, ragged.values(), ragged.offsets(), item["tensor"]):
            mine.zero_()
        item["list"].append(3)
        assert meta.tags is not None
        tags[0]["n"] = meta.tags[1]["n"] = 9
        found = store.get(partition, ids(2), "x", "y", "z", "o")
        assert found["x"].tolist() == [[0, 1], [2, 3]], "the store uses the caller's memory instead of a copy"
        assert found["y"].tolist() == [1.0, 2.0], "the store uses the caller's memory instead of a copy"
        check_column(found["z"], [torch.tensor([1, 2]), torch.tensor([3])])
        kept, _ = items_of(found["o"])
        assert (kept["list"], kept["tensor"].tolist()) == ([1, 2], [0, 1, 2])
        if store.declares(Capability.LISTING) or store.declares(Capability.CLAIMS):
            assert store.tags_of(partition) == {"s0": {"n": 1}, "s1": {"n": 2}}

    def test_what_comes_back_is_owned_by_the_caller(self, store: Store) -> None:
        partition = store.register("x", "y", "o")
        rows = [torch.tensor([1, 2]), torch.tensor([3])]
        store.put(partition, ids(2), x=jagged(rows), y=torch.arange(4).view(2, 2), o=as_objects([1], [2]))
        for names in (ids(2), ["s0", "s1", "s0"]):
            first, second = (store.get(partition, names, "x", "y", "o") for _ in range(2))
            for field in ("x", "y"):
                assert not shared(first[field], second[field]), "two reads share memory"
        first["x"].values()[:3] = -1
        first["y"][:2] = -1
        items_of(first["o"])[0].append("changed")
        assert first["x"].unbind()[2].tolist() == [1, 2], "repeated rows share memory"
        assert first["y"][2].tolist() == [0, 1], "repeated rows share memory"
        assert items_of(first["o"])[2] == [1], "repeated rows share one item"
        for found in (second, store.get(partition, ["s0", "s1", "s0"], "x", "y", "o")):
            check_column(found["x"], [*rows, rows[0]])
            assert found["y"].tolist() == [[0, 1], [2, 3], [0, 1]]
            assert items_of(found["o"]) == [[1], [2], [1]]

    @pytest.mark.parametrize("operation", ["put_samples", "get_samples"])
    def test_the_payload_is_copied_no_more_than_it_may_be(self, store: Store, operation: str) -> None:
        if store.case.through_asyncio:
            not_run("the hooks run in threads, and the kit counts the tensors of one thread")
        partition = store.register("x", "y")
        rows = [torch.randn(64 + index, 128) for index in range(_NUM_ROWS)]
        fields = batch(_NUM_ROWS, x=torch.randn(_NUM_ROWS, 16384), y=jagged(rows))
        payload_bytes = 4 * (_NUM_ROWS * 16384 + sum(row.numel() for row in rows))
        for names in (
            ids(_NUM_ROWS, "first"),
            ids(_NUM_ROWS),
        ):  # the first calls allocate more
            _, put = allocated(partial(store.client.put_samples, names, partition, fields))
            found, get = allocated(partial(store.get, partition, names[::-1], "x", "y"))
        assert rows_of(found["y"], _NUM_ROWS)[0].equal(rows[-1])
        copies = {"put_samples": put, "get_samples": get}[operation] / payload_bytes
        most, _ = store.case.copies_allowed(operation)
        print(f"{operation}: {copies:.2f} copies of the payload, {most:g} allowed")
        assert copies <= most, f"{operation} holds {copies:.1f} copies of its payload. At most {most:g} are allowed."

    # --- the hooks ----------------------------------------------------------------------------------------------------

    def test_hooks_say_what_they_did(self, store: Store) -> None:
        partition = store.register("x", "y", "z")
        fields = batch(2, x=torch.zeros(2, 3, 4, dtype=torch.bfloat16), y=_OBJECTS, z=torch.ones(2))
        assert store.hooks.put(partition, ids(2), fields).num_samples == 2
        assert store.hooks.put(partition, ids(3), None, [{"n": 1}] * 3).num_samples == 3
        reply = store.hooks.ask("get_samples", partition, sample_ids=ids(2), fields=["y", "x"])
        assert {"x", "y"} <= set(reply.columns)
        x, y = reply.specs["x"], reply.specs["y"]
        assert (x.kind, x.dtype, x.rank, tuple(x.trailing)) == ("tensor", "bfloat16", 2, (4,))
        assert y.kind == "object"
        for names, cleared in ((["s0", "nobody"], 1), (["s0"], 0), (None, 2), (None, 0)):
            assert store.hooks.ask("clear_samples", partition, sample_ids=names).num_samples == cleared

    # --- saves --------------------------------------------------------------------------------------------------------

    def test_a_save_is_loaded(self, store: Store, tmp_path: Path) -> None:
        client, empty = store.client, store.register("x", num_samples=2)
        partition = store.filled(6, num_samples=8, tasks=["train", "b"], tags=[{"n": row} for row in range(6)])
        store.put(partition, ["tagged"], [{"only": True}])
        store.put(partition, ids(4), late=as_objects(*([row, None, b"b"] for row in range(4))))
        store.put(partition, ids(6), large=torch.arange(40_000).expand(6, -1))
        store.claim(partition, 2)
        client.clear_samples(["s0", "s5"], partition)

        def content() -> list[Any]:
            meta = client.list_samples(partition)
            about = [(each.info.registration(), each.num_rows) for each in map(client.describe, (partition, empty))]
            late = items_of(store.get(partition, ["s3", "s1"], "late")["late"])
            return [meta.sample_ids, meta.tags, about, store.get(partition, ids(5)[1:])["x"].tolist(), late]

        before, held_bytes = content(), client.describe(partition).held_bytes
        client.save(tmp_path, {"step": 7}, [partition, empty])
        store.put(partition, ["s0"], x=torch.arange(1))
        store.claim(partition, 8, task="b")
        client.clear_samples(None, empty)
        assert client.load(tmp_path) == {"step": 7}
        assert content() == before
        assert client.describe(partition).held_bytes <= 1.1 * held_bytes, "equal cells are no longer stored once"
        assert client.list_consumed(partition, "train") == ["s1"]
        store.put(partition, ["s6"], x=torch.arange(1))
        client.clear_samples(["tagged"], partition)  # it will never be ready
        rest = store.claim(partition, 8, blocking=True, timeout_s=10.0)
        assert rest.sample_ids == ["s2", "s3", "s4", "s6"], "what was cleared no longer counts for num_samples"
        assert store.claim(partition, 9, task="b").sample_ids == ["s1", "s2", "s3", "s4", "s6"]
        if store.declares(Capability.OVERWRITE):
            moving = store.filled(2, tags=[{"n": 0}] * 2)
            puts = [partial(store.put, moving, ["s1"], [{"n": 7}], x=torch.tensor([7]))]

            def once(request: object) -> None:
                if puts:
                    puts.pop()()

            with Faults.of(client).before("get_samples", once):
                client.save(tmp_path, None, [moving])
            client.load(tmp_path)
            row = ((client.list_samples(moving).tags or [])[1], store.get(moving, ["s1"])["x"].tolist())
            assert row == ({"n": 7}, [7]), "a row that is written during a save has tags and cells of different puts"
