"""Rows by key: puts open partitions and merge, reads return what TransferQueue returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from dataplane_core.errors import SchemaMismatchError

KEYS = ["a", "b", "c"]


def columns(**values: object) -> TensorDict:
    return TensorDict(values, batch_size=[3])


@pytest.fixture
def rows(tq: ModuleType) -> ModuleType:
    tokens = torch.nested.as_nested_tensor([torch.arange(n) for n in (2, 4, 1)], layout=torch.jagged)
    items = NonTensorStack({"n": 1}, {"n": [2, "x"]}, {})
    tq.kv_batch_put(
        KEYS,
        "train",
        columns(tokens=tokens, dense=torch.arange(6.0).view(3, 2), reward=torch.tensor([0.5, 1.0, 2.0]), info=items),
        [{"step": n} for n in range(3)],
    )
    return tq


def test_cells_come_back_as_jagged_rows_scalars_as_one_tensor(rows: ModuleType) -> None:
    got = rows.kv_batch_get(["c", "a"], "train")
    assert got.batch_size == torch.Size([2])
    assert [row.tolist() for row in got["tokens"].unbind()] == [[0], [0, 1]]
    assert got["dense"].is_nested
    assert [row.tolist() for row in got["dense"].unbind()] == [[4.0, 5.0], [0.0, 1.0]]
    assert got["reward"].tolist() == [2.0, 0.5]
    assert got.get("info").tolist() == [{}, {"n": 1}]
    rows.kv_batch_put(KEYS, "p", columns(x=torch.ones(3, 2), y=torch.ones(3, 2)))
    got = rows.kv_batch_get(KEYS, "p")
    assert (got["x"] + got["y"]).values().tolist() == [2.0] * 6, "columns of equal lengths can be combined"


def test_a_put_returns_all_tags_and_the_fields_that_all_its_rows_have_and_a_read_leaves_others_out(
    rows: ModuleType,
) -> None:
    meta = rows.kv_put("a", "train", fields={"late": torch.tensor([1, 2])}, tag={"done": True})
    assert (meta.keys, meta.tags) == (["a"], [{"step": 0, "done": True}])
    assert meta.fields == ["dense", "info", "late", "reward", "tokens"]
    meta = rows.kv_batch_put(KEYS, "train", tags=[{}] * 3)
    assert meta.fields == ["dense", "info", "reward", "tokens"]
    assert rows.kv_batch_get_by_meta(meta, "reward").keys() == {"reward"}
    with pytest.raises(ValueError, match="not found in the metadata"):
        rows.kv_batch_get_by_meta(meta, "late")
    assert set(rows.kv_batch_get(KEYS, "train", ["reward", "late", "never"]).keys()) == {"reward"}
    assert set(rows.kv_batch_get("a", "train", ["reward", "late"]).keys()) == {"reward", "late"}


@pytest.mark.parametrize(
    ("keys", "partition", "fields"),
    [(["a", "nobody"], "train", None), ("a", "nowhere", None), ("a", "train", "never"), ("tag-only", "train", None)],
)
def test_rows_and_fields_that_are_not_there_raise(
    rows: ModuleType, keys: list[str] | str, partition: str, fields: str | None
) -> None:
    rows.kv_put("tag-only", "train", tag={"x": 1})
    with pytest.raises(ValueError, match="kv_batch_get") as raised:
        rows.kv_batch_get(keys, partition, fields)
    assert isinstance(raised.value, KeyError)


def test_listing_and_clearing_and_tags_that_the_store_does_not_take_as_they_are(rows: ModuleType) -> None:
    given = {
        "kept": {"status": "running", "more": [1, {"x": None}], "text": "~tq.json:oops", "a": {"b": None}},
        "made plain": {"tensor": torch.tensor(3), "one": torch.tensor([0.5]), "float": np.float32(2.5)},
        "inside": {"bool": np.bool_(True), "pair": (1, [2, np.int64(3)])},
    }
    stored = {
        "kept": given["kept"],
        "made plain": {"tensor": 3, "one": 0.5, "float": 2.5},
        "inside": {"bool": True, "pair": [1, [2, 3]]},
    }
    for key, tag in given.items():
        rows.kv_put(key, "val", tag=tag)
    listed = rows.kv_list()
    assert listed == {"train": {"a": {"step": 0}, "b": {"step": 1}, "c": {"step": 2}}, "val": stored}
    for key, tags in stored.items():
        assert {name: type(value) for name, value in listed["val"][key].items()} == {
            name: type(value) for name, value in tags.items()
        }
    assert rows.kv_list("nowhere") == {}
    rows.kv_clear(["a", "nobody"], "train")
    rows.kv_clear("x", "nowhere")
    assert list(rows.kv_list("train")["train"]) == ["b", "c"]


def test_a_parser_replaces_what_is_stored(tq: ModuleType) -> None:
    def load(batch: dict[str, list[str]]) -> None:
        batch["image"] = [torch.full((len(url),), 7) for url in batch["image"]]

    tq.kv_batch_put(["a", "b"], "p", TensorDict({"image": NonTensorStack("x", "yz")}, batch_size=[2]), data_parser=load)
    assert [row.tolist() for row in tq.kv_batch_get(["a", "b"], "p")["image"].unbind()] == [[7], [7, 7]]
    with pytest.raises(ValueError, match="data_parser"):
        tq.kv_put("a", "p", fields={"x": torch.zeros(1)}, data_parser=lambda batch: batch.clear())


def test_values_that_are_not_per_row_or_not_plain(tq: ModuleType) -> None:
    fields = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    fields.set_non_tensor("step", 3)
    tq.kv_batch_put(["a", "b"], "p", fields)
    tq.kv_put("a", "p", fields={"extra": {"score": np.float32(0.5), "pair": (1, np.bool_(True))}})
    assert tq.kv_batch_get(["a", "b"], "p").get("step").tolist() == [3, 3]
    assert tq.kv_batch_get("a", "p", "extra").get("extra").tolist() == [{"score": 0.5, "pair": [1, True]}]


ITEMS = [{"idx": 0}, {"idx": 1}, {"idx": 2}]


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize(
    ("value", "of_rows"),
    [
        *((made, ITEMS) for made in (ITEMS, tuple(ITEMS))),
        ([[1], [1, 2], []], [[1], [1, 2], []]),
        *((value, [value] * 3) for value in ("abc", ["a", "b"], {"a": 1, "b": 2, "c": 3})),
    ],
    ids=str,
)
def test_data_as_long_as_the_batch_has_an_item_for_each_row_and_other_data_is_one_for_all(
    tq: ModuleType, value: object, of_rows: list[object], use_async: bool
) -> None:
    fields = columns(x=NonTensorData(value, batch_size=(3,)))
    if use_async:
        asyncio.run(tq.async_kv_batch_put(KEYS, "p", fields))
        meta = asyncio.run(tq.get_client().async_put(fields, partition_id="q"))
    else:
        tq.kv_batch_put(KEYS, "p", fields)
        meta = tq.get_client().put(fields, partition_id="q")
    assert tq.kv_batch_get(["c", "a"], "p").get("x").tolist() == [of_rows[2], of_rows[0]]
    assert tq.get_client().get_data(meta).get("x").tolist() == of_rows


def test_position_ids_may_differ_in_their_second_dim_and_are_not_nested_while_they_do_not(tq: ModuleType) -> None:
    def schema(*keys: str) -> dict[str, Any]:
        found: dict[str, Any] = tq.get_client().kv_retrieve_meta(list(keys), "p").field_schema["position_ids"]
        return found

    positions = torch.arange(48).view(2, 4, 6)
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"position_ids": positions}, batch_size=[2]))
    assert (schema("a", "b")["is_nested"], schema("a", "b")["shape"]) == (False, (4, 6))
    other = torch.arange(20).view(4, 5)
    tq.kv_put("c", "p", fields={"position_ids": other})
    assert schema("a", "c")["is_nested"]
    got = tq.kv_batch_get(KEYS, "p")["position_ids"]
    assert got.values().shape == (4, 17)
    assert [row.tolist() for row in got.unbind()] == [*positions.tolist(), other.tolist()]


def test_a_column_of_another_dtype_is_converted_if_no_value_changes(tq: ModuleType) -> None:
    tq.kv_put("a", "p", fields={"x": torch.tensor([0.5])})
    tq.kv_put("b", "p", fields={"x": torch.tensor([1, 2])})
    got = tq.kv_batch_get(["a", "b"], "p")["x"]
    assert got.dtype == torch.float32
    assert got.values().tolist() == [0.5, 1.0, 2.0]
    tq.kv_put("d", "p", fields={"x": torch.tensor([torch.nan, 2.0], dtype=torch.float64)})
    assert tq.kv_batch_get(["d"], "p")["x"].values().isnan().tolist() == [True, False]
    for wrong in (torch.tensor([2**24 + 1]), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="as fixed by its first write"):
            tq.kv_put("c", "p", fields={"x": wrong})


def test_a_lazy_stack_may_have_rows_of_any_length_and_one_that_does_not_fit_leaves_no_partition(tq: ModuleType) -> None:
    def stack(*widths: int, dtype: torch.dtype = torch.int64) -> TensorDictBase:
        rows = [{"x": torch.ones(n, dtype=dtype), "position_ids": torch.ones(4, n), "info": f"n{n}"} for n in widths]
        rows[-1]["x"] = rows[-1]["x"].long()
        return LazyStackedTensorDict(*[TensorDict(row) for row in rows])

    of_two_dims = LazyStackedTensorDict(*[TensorDict({"x": torch.ones(2, n)}) for n in (3, 4)])
    for fields in (of_two_dims, stack(2, 3, dtype=torch.float32)):
        for put in (
            lambda fields=fields: tq.kv_batch_put(["a", "b"], "new", fields),
            lambda fields=fields: asyncio.run(tq.async_kv_batch_put(["a", "b"], "new", fields)),
            lambda fields=fields: tq.get_client().put(fields, partition_id="new"),
            lambda fields=fields: asyncio.run(tq.get_client().async_put(fields, partition_id="new")),
        ):
            with pytest.raises(SchemaMismatchError, match="'x' has rows that do not fit one column"):
                put()
    assert tq.kv_list() == {}
    assert "new" not in tq.get_client().store.list_partitions()
    tq.kv_batch_put(["a", "b"], "p", stack(2, 3))
    got = tq.kv_batch_get(["a", "b"], "p")
    assert [row.shape for row in got["position_ids"].unbind()] == [(4, 2), (4, 3)]
    assert [len(row) for row in got["x"].unbind()] == [2, 3]
    assert got.get("info").tolist() == ["n2", "n3"]
    empty = TensorDict({"position_ids": torch.zeros(0, 4, 3)}, batch_size=[0])
    assert tq.kv_batch_put([], "p", empty).size == 0


JAGGED = torch.nested.as_nested_tensor([torch.zeros(2)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda tq: tq.kv_put("a", "p"), "at least one"),
        (lambda tq: tq.kv_batch_put(["a"], "p"), "at least one"),
        (lambda tq: tq.kv_batch_put(["a"], "p", columns(x=torch.zeros(3))), "does not match"),
        (lambda tq: tq.kv_batch_put(["a"], "p", tags=[]), "does not match"),
        (lambda tq: tq.kv_put("a", "p", fields={"x": JAGGED}), "kv_batch_put"),
        (lambda tq: tq.kv_put("a", "p", tag={"x": object()}), "tag 'x' is a object"),
        (lambda tq: tq.kv_put("~index:x", "p", tag={"n": 1}), "'~index:x'"),
        (lambda tq: tq.kv_batch_put(["a", "~index:3"], "p", tags=[{}, {}]), "'~index:3'"),
        (lambda tq: tq.get_client().kv_retrieve_meta(["~index:3"], "p", create=True), "'~index:3'"),
    ],
)
def test_wrong_arguments_are_refused_and_so_is_a_key_that_looks_like_a_row_without_one(
    tq: ModuleType, call: Callable[[ModuleType], object], named: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        call(tq)
    assert tq.kv_list() == {}


def test_many_coroutines_share_the_threads(tq: ModuleType) -> None:
    async def run() -> None:
        names = [f"k{n}" for n in range(60)]
        await asyncio.gather(*(tq.async_kv_put(name, "p", tag={"n": n}) for n, name in enumerate(names)))
        fields = TensorDict({"x": torch.arange(60)}, batch_size=[60])
        await tq.async_kv_batch_put(names, "p", fields)
        got = await asyncio.gather(*(tq.async_kv_batch_get(name, "p") for name in names))
        assert [int(each["x"]) for each in got] == list(range(60))
        assert len((await tq.async_kv_list("p"))["p"]) == 60
        await tq.async_kv_clear(names, "p")
        assert await tq.async_kv_list("p") == {"p": {}}

    asyncio.run(run())


def test_rows_that_differ_never_count_as_equal_also_after_a_failure(
    tq: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tq.get_client().store
    put = store.put_samples

    def fails(ids: Any, partition_id: str, *arguments: Any, **options: Any) -> Any:
        if partition_id.startswith("~tq:"):
            raise TimeoutError
        return put(ids, partition_id, *arguments, **options)

    tq.kv_batch_put(["a"], "p", TensorDict({"x": torch.ones(1, 4)}, batch_size=[1]))
    monkeypatch.setattr(store, "put_samples", fails)
    with pytest.raises(TimeoutError):
        tq.kv_batch_put(["b"], "p", TensorDict({"x": torch.ones(1, 7)}, batch_size=[1]))
    monkeypatch.undo()
    rows = list(tq.kv_list("p")["p"])
    schema = tq.get_client().kv_retrieve_meta(rows, "p").field_schema["x"]
    assert (rows, schema["is_nested"]) == (["a"], False), "the shape is noted before the rows are there"
    tq.kv_batch_put(["b"], "p", TensorDict({"x": torch.ones(1, 7)}, batch_size=[1]))
    assert tq.get_client().kv_retrieve_meta(["a", "b"], "p").field_schema["x"]["is_nested"]
