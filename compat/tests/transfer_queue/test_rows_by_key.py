"""Rows by key: puts open partitions and merge, reads return what TransferQueue returns."""

from __future__ import annotations

import asyncio
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


def test_columns_of_equal_lengths_can_be_combined(tq: ModuleType) -> None:
    tq.kv_batch_put(KEYS, "p", columns(x=torch.ones(3, 2), y=torch.ones(3, 2)))
    got = tq.kv_batch_get(KEYS, "p")
    assert (got["x"] + got["y"]).values().tolist() == [2.0] * 6


def test_a_put_returns_all_tags_and_the_fields_that_all_its_rows_have(rows: ModuleType) -> None:
    meta = rows.kv_put("a", "train", fields={"late": torch.tensor([1, 2])}, tag={"done": True})
    assert meta.keys == ["a"]
    assert meta.tags == [{"step": 0, "done": True}]
    assert meta.fields == ["dense", "info", "late", "reward", "tokens"]
    meta = rows.kv_batch_put(KEYS, "train", tags=[{}] * 3)
    assert meta.fields == ["dense", "info", "reward", "tokens"]
    assert rows.kv_batch_get_by_meta(meta, "reward").keys() == {"reward"}
    with pytest.raises(ValueError, match="not found in the metadata"):
        rows.kv_batch_get_by_meta(meta, "late")


def test_fields_that_not_all_rows_have_are_left_out(rows: ModuleType) -> None:
    rows.kv_put("a", "train", fields={"late": torch.zeros(1)})
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


def test_listing_and_clearing(rows: ModuleType) -> None:
    rows.kv_put(
        "v", "val", tag={"status": "running", "more": [1, {"x": None}], "numpy": np.int64(3), "text": "~tq.json:oops"}
    )
    listed = rows.kv_list()
    assert listed == {
        "train": {"a": {"step": 0}, "b": {"step": 1}, "c": {"step": 2}},
        "val": {"v": {"status": "running", "more": [1, {"x": None}], "numpy": 3, "text": "~tq.json:oops"}},
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


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("kind", [list, tuple])
def test_data_as_long_as_the_batch_has_an_item_for_each_row(tq: ModuleType, kind: type, use_async: bool) -> None:
    items = [{"idx": 0}, {"idx": 1}, {"idx": 2}]

    def batch() -> TensorDict:
        return TensorDict({"x": NonTensorData(kind(items), batch_size=(3,))}, batch_size=[3])

    if use_async:
        asyncio.run(tq.async_kv_batch_put(["a", "b", "c"], "p", batch()))
        meta = asyncio.run(tq.get_client().async_put(batch(), partition_id="q"))
    else:
        tq.kv_batch_put(["a", "b", "c"], "p", batch())
        meta = tq.get_client().put(batch(), partition_id="q")
    assert tq.kv_batch_get(["c", "a"], "p").get("x").tolist() == [items[2], items[0]]
    assert tq.get_client().get_data(meta).get("x").tolist() == items


@pytest.mark.parametrize("value", ["abc", ["a", "b"], {"a": 1, "b": 2, "c": 3}])
def test_other_data_is_one_value_for_all_rows(tq: ModuleType, value: object) -> None:
    tq.kv_batch_put(["a", "b", "c"], "p", TensorDict({"x": NonTensorData(value, batch_size=(3,))}, batch_size=[3]))
    assert tq.kv_batch_get(["a", "b", "c"], "p").get("x").tolist() == [value] * 3
    ragged = NonTensorData([[1], [1, 2], []], batch_size=(3,))
    tq.kv_batch_put(["a", "b", "c"], "p", TensorDict({"y": ragged}, batch_size=[3]))
    assert tq.kv_batch_get(["a", "b", "c"], "p", "y").get("y").tolist() == [[1], [1, 2], []]


def test_a_first_put_that_does_not_fit_says_so_and_leaves_no_partition(tq: ModuleType) -> None:
    fields = LazyStackedTensorDict(*[TensorDict({"x": torch.ones(2, n)}) for n in (3, 4)])
    for put in (
        lambda: tq.kv_batch_put(["a", "b"], "new", fields),
        lambda: asyncio.run(tq.async_kv_batch_put(["a", "b"], "new", fields)),
        lambda: tq.get_client().put(fields, partition_id="new"),
        lambda: asyncio.run(tq.get_client().async_put(fields, partition_id="new")),
    ):
        with pytest.raises(SchemaMismatchError, match="'x' has rows that do not fit one column"):
            put()
    assert tq.kv_list() == {}
    assert "new" not in tq.get_client().store.list_partitions()


@pytest.mark.parametrize(
    ("tag", "stored"),
    [
        (torch.tensor(3), 3),
        (torch.tensor([0.5]), 0.5),
        (np.float32(2.5), 2.5),
        (np.bool_(True), True),
        ((1, [2, np.int64(3)]), [1, [2, 3]]),
        ({"a": None}, {"a": None}),
    ],
)
def test_tags_that_the_store_does_not_take_as_they_are(tq: ModuleType, tag: object, stored: object) -> None:
    tq.kv_put("k", "train", tag={"tag": tag})
    (found,) = tq.kv_list("train")["train"].values()
    assert found == {"tag": stored}
    assert type(found["tag"]) is type(stored)


def test_mrope_positions_may_differ_in_their_second_dim(tq: ModuleType) -> None:
    tq.kv_put("a", "p", fields={"position_ids": torch.arange(12).view(4, 3)})
    tq.kv_put("b", "p", fields={"position_ids": torch.arange(8).view(4, 2)})
    got = tq.kv_batch_get(["a", "b"], "p")["position_ids"]
    assert got.values().shape == (4, 5)
    assert [row.tolist() for row in got.unbind()] == [
        torch.arange(12).view(4, 3).tolist(),
        torch.arange(8).view(4, 2).tolist(),
    ]


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


def test_a_lazy_stack_may_have_rows_of_any_length_and_is_refused_as_it_is(tq: ModuleType) -> None:
    def stack(*widths: int, dtype: torch.dtype = torch.int64) -> TensorDictBase:
        rows = [{"x": torch.ones(n, dtype=dtype), "position_ids": torch.ones(4, n), "info": f"n{n}"} for n in widths]
        rows[-1]["x"] = rows[-1]["x"].long()
        return LazyStackedTensorDict(*[TensorDict(row) for row in rows])

    with pytest.raises(SchemaMismatchError, match="'x' has rows that do not fit one column"):
        tq.kv_batch_put(["a", "b"], "p", stack(2, 3, dtype=torch.float32))
    tq.kv_batch_put(["a", "b"], "p", stack(2, 3))
    got = tq.kv_batch_get(["a", "b"], "p")
    assert [row.shape for row in got["position_ids"].unbind()] == [(4, 2), (4, 3)]
    assert [len(row) for row in got["x"].unbind()] == [2, 3]
    assert got.get("info").tolist() == ["n2", "n3"]
    empty = TensorDict({"position_ids": torch.zeros(0, 4, 3)}, batch_size=[0])
    assert tq.kv_batch_put([], "p", empty).size == 0


def test_wrong_arguments(tq: ModuleType) -> None:
    with pytest.raises(ValueError, match="at least one"):
        tq.kv_put("a", "p")
    with pytest.raises(ValueError, match="at least one"):
        tq.kv_batch_put(["a"], "p")
    with pytest.raises(ValueError, match="does not match"):
        tq.kv_batch_put(["a"], "p", columns(x=torch.zeros(3)))
    with pytest.raises(ValueError, match="does not match"):
        tq.kv_batch_put(["a"], "p", tags=[])
    with pytest.raises(ValueError, match="kv_batch_put"):
        tq.kv_put("a", "p", fields={"x": torch.nested.as_nested_tensor([torch.zeros(2)], layout=torch.jagged)})
    with pytest.raises(TypeError, match="tag 'x' is a object"):
        tq.kv_put("a", "p", tag={"x": object()})


def test_a_key_that_looks_like_a_row_without_a_key_is_refused(tq: ModuleType) -> None:
    for key in ("~index:x", "~index:3"):
        with pytest.raises(ValueError, match=f"keys that begin with '~index:' are not allowed: '{key}'"):
            tq.kv_put(key, "p", tag={"n": 1})
        with pytest.raises(ValueError, match="~index:"):
            tq.kv_batch_put(["a", key], "p", tags=[{}, {}])
        with pytest.raises(ValueError, match="~index:"):
            tq.get_client().kv_retrieve_meta([key], "p", create=True)
    tq.kv_put("a", "p", tag={"n": 1})
    assert tq.kv_list("p") == {"p": {"a": {"n": 1}}}


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


def test_position_ids_of_one_shape_are_not_nested(tq: ModuleType) -> None:
    positions = torch.arange(48).view(2, 4, 6)
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"position_ids": positions}, batch_size=[2]))
    schema = tq.get_client().kv_retrieve_meta(["a", "b"], "p").field_schema["position_ids"]
    assert (schema["is_nested"], schema["shape"]) == (False, (4, 6))
    got = tq.kv_batch_get(["a", "b"], "p")["position_ids"]
    assert [row.tolist() for row in got.unbind()] == positions.tolist()
    tq.kv_batch_put(["c"], "p", TensorDict({"position_ids": torch.ones(1, 4, 5).long()}, batch_size=[1]))
    assert tq.get_client().kv_retrieve_meta(["a", "c"], "p").field_schema["position_ids"]["is_nested"]
