"""Rows by key: puts open partitions and merge, reads return what TransferQueue returns."""

import asyncio

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from dataplane_core.errors import SchemaMismatchError

KEYS = ["a", "b", "c"]
ITEMS = [{"idx": 0}, {"idx": 1}, {"idx": 2}]


def columns(**values):
    return TensorDict(values, batch_size=[3])


def jagged(*lengths):
    return torch.nested.as_nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)


#: The four ways to put the rows of a batch.
WAYS = {
    "by key": lambda tq, fields: tq.kv_batch_put(KEYS[: len(fields)], "p", fields),
    "by key, async": lambda tq, fields: asyncio.run(tq.async_kv_batch_put(KEYS[: len(fields)], "p", fields)),
    "by index": lambda tq, fields: tq.get_client().put(fields, partition_id="p"),
    "by index, async": lambda tq, fields: asyncio.run(tq.get_client().async_put(fields, partition_id="p")),
}
#: A column, and the rows that come back. Rows of rank 1 and more are jagged, even if they are equally long.
COLUMNS = {
    "jagged rows": (jagged(2, 4, 1), [[0, 1], [0, 1, 2, 3], [0]]),
    "dense rows": (torch.arange(6.0).view(3, 2), [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]),
    "scalars": (torch.tensor([0.5, 1.0, 2.0]), [0.5, 1.0, 2.0]),
    "objects": (NonTensorStack({"n": 1}, {"n": [2, "x"]}, {}), [{"n": 1}, {"n": [2, "x"]}, {}]),
    "numpy's": (NonTensorStack(np.float32(0.5), (1, np.bool_(True)), None), [0.5, [1, True], None]),
    # data as long as the batch has an item for each row, other data is one for all
    **{f"data {made}": (NonTensorData(made, batch_size=(3,)), ITEMS) for made in (ITEMS, tuple(ITEMS))},
    "data of lists": (NonTensorData([[1], [1, 2], []], batch_size=(3,)), [[1], [1, 2], []]),
    **{
        f"data for all: {value}": (NonTensorData(value, batch_size=(3,)), [value] * 3)
        for value in ("abc", ["a", "b"], {"a": 1, "b": 2, "c": 3}, 3)
    },
}


@pytest.mark.parametrize("put", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("column", "rows"), COLUMNS.values(), ids=COLUMNS)
def test_a_column_comes_back_as_rows_in_the_order_asked_for(tq, column, rows, put):
    meta = put(tq, columns(x=column))
    if isinstance(meta, tq.KVBatchMeta):
        got, rows = tq.kv_batch_get(["c", "a"], "p"), [rows[2], rows[0]]
    else:
        got = tq.get_client().get_data(meta)
    assert got.batch_size == torch.Size([len(rows)])
    found = got.get("x")
    assert getattr(found, "is_nested", False) == (isinstance(column, torch.Tensor) and column.dim() > 1)
    assert ([row.tolist() for row in found.unbind()] if isinstance(found, torch.Tensor) else found.tolist()) == rows


def test_columns_of_equal_lengths_can_be_combined(tq):
    tq.kv_batch_put(KEYS, "p", columns(x=torch.ones(3, 2), y=torch.ones(3, 2)))
    got = tq.kv_batch_get(KEYS, "p")
    assert (got["x"] + got["y"]).values().tolist() == [2.0] * 6


@pytest.fixture
def rows(tq):
    tq.kv_batch_put(KEYS, "train", columns(x=jagged(2, 4, 1), reward=torch.ones(3)), [{"step": n} for n in range(3)])
    return tq


def test_a_put_returns_all_tags_and_the_fields_that_all_its_rows_have_and_a_read_leaves_others_out(rows):
    meta = rows.kv_put("a", "train", fields={"late": torch.tensor([1, 2])}, tag={"done": True})
    assert (meta.keys, meta.tags) == (["a"], [{"step": 0, "done": True}])
    assert meta.fields == ["late", "reward", "x"]
    meta = rows.kv_batch_put(KEYS, "train", tags=[{}] * 3)
    assert meta.fields == ["reward", "x"]
    assert rows.kv_batch_get_by_meta(meta, "reward").keys() == {"reward"}
    with pytest.raises(ValueError, match="not found in the metadata"):
        rows.kv_batch_get_by_meta(meta, "late")
    assert set(rows.kv_batch_get(KEYS, "train", ["reward", "late", "never"]).keys()) == {"reward"}
    assert set(rows.kv_batch_get("a", "train", ["reward", "late"]).keys()) == {"reward", "late"}


@pytest.mark.parametrize(
    ("keys", "partition", "fields"),
    [(["a", "nobody"], "train", None), ("a", "nowhere", None), ("a", "train", "never"), ("tag-only", "train", None)],
)
def test_rows_and_fields_that_are_not_there_raise(rows, keys, partition, fields):
    rows.kv_put("tag-only", "train", tag={"x": 1})
    with pytest.raises(ValueError, match="kv_batch_get") as raised:
        rows.kv_batch_get(keys, partition, fields)
    assert isinstance(raised.value, KeyError)


def test_listing_and_clearing_and_tags_that_the_store_does_not_take_as_they_are(rows):
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
    assert repr(listed["val"]) == repr(stored), "True is not 1"
    assert rows.kv_list("nowhere") == {}
    rows.kv_clear(["a", "nobody"], "train")
    rows.kv_clear("x", "nowhere")
    assert list(rows.kv_list("train")["train"]) == ["b", "c"]


def test_a_parser_replaces_what_is_stored(tq):
    def load(batch):
        batch["image"] = [torch.full((len(url),), 7) for url in batch["image"]]

    tq.kv_batch_put(["a", "b"], "p", TensorDict({"image": NonTensorStack("x", "yz")}, batch_size=[2]), data_parser=load)
    assert [row.tolist() for row in tq.kv_batch_get(["a", "b"], "p")["image"].unbind()] == [[7], [7, 7]]
    with pytest.raises(ValueError, match="data_parser"):
        tq.kv_put("a", "p", fields={"x": torch.zeros(1)}, data_parser=lambda batch: batch.clear())


def test_a_column_of_another_dtype_is_converted_if_no_value_changes(tq):
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


@pytest.mark.parametrize("put", WAYS.values(), ids=WAYS)
def test_a_lazy_stack_may_have_rows_of_any_length_and_one_that_does_not_fit_leaves_no_partition(tq, put):
    def stack(*widths, dtype=torch.int64):
        rows = [{"x": torch.ones(n, dtype=dtype), "position_ids": torch.ones(4, n), "info": f"n{n}"} for n in widths]
        rows[-1]["x"] = rows[-1]["x"].long()
        return LazyStackedTensorDict(*[TensorDict(row) for row in rows])

    of_two_dims = LazyStackedTensorDict(*[TensorDict({"x": torch.ones(2, n)}) for n in (3, 4)])
    for fields in (of_two_dims, stack(2, 3, dtype=torch.float32)):
        with pytest.raises(SchemaMismatchError, match="'x' has rows that do not fit one column"):
            put(tq, fields)
    assert tq.kv_list() == {}
    assert "p" not in tq.get_client().store.list_partitions()
    meta = put(tq, stack(2, 3))
    got = tq.kv_batch_get(["a", "b"], "p") if isinstance(meta, tq.KVBatchMeta) else tq.get_client().get_data(meta)
    assert [row.shape for row in got["position_ids"].unbind()] == [(4, 2), (4, 3)]
    assert [len(row) for row in got["x"].unbind()] == [2, 3]
    assert got.get("info").tolist() == ["n2", "n3"]


def test_a_batch_without_rows_is_put(tq):
    assert tq.kv_batch_put([], "p", TensorDict({"position_ids": torch.zeros(0, 4, 3)}, batch_size=[0])).size == 0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda tq: tq.kv_put("a", "p"), "at least one"),
        (lambda tq: tq.kv_batch_put(["a"], "p"), "at least one"),
        (lambda tq: tq.kv_batch_put(["a"], "p", columns(x=torch.zeros(3))), "does not match"),
        (lambda tq: tq.kv_batch_put(["a"], "p", tags=[]), "does not match"),
        (lambda tq: tq.kv_put("a", "p", fields={"x": jagged(2)}), "kv_batch_put"),
        (lambda tq: tq.kv_put("a", "p", tag={"x": object()}), "tag 'x' is a object"),
        (lambda tq: tq.kv_put("~index:x", "p", tag={"n": 1}), "'~index:x'"),
        (lambda tq: tq.kv_batch_put(["a", "~index:3"], "p", tags=[{}, {}]), "'~index:3'"),
        (lambda tq: tq.get_client().kv_retrieve_meta(["~index:3"], "p", create=True), "'~index:3'"),
    ],
)
def test_wrong_arguments_are_refused_and_so_is_a_key_that_looks_like_a_row_without_one(tq, call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call(tq)
    assert tq.kv_list() == {}


@pytest.mark.anyio
async def test_many_coroutines_share_the_threads(tq):
    names = [f"k{n}" for n in range(60)]
    await asyncio.gather(*(tq.async_kv_put(name, "p", tag={"n": n}) for n, name in enumerate(names)))
    await tq.async_kv_batch_put(names, "p", TensorDict({"x": torch.arange(60)}, batch_size=[60]))
    got = await asyncio.gather(*(tq.async_kv_batch_get(name, "p") for name in names))
    assert [int(each["x"]) for each in got] == list(range(60))
    assert len((await tq.async_kv_list("p"))["p"]) == 60
    await tq.async_kv_clear(names, "p")
    assert await tq.async_kv_list("p") == {"p": {}}


def test_rows_that_differ_never_count_as_equal_also_after_a_failure(tq, monkeypatch):
    def put(key, length):
        tq.kv_batch_put([key], "p", TensorDict({"x": torch.ones(1, length)}, batch_size=[1]))

    def fails(ids, partition_id, *arguments, **options):
        if partition_id.startswith("~tq:"):
            raise TimeoutError
        return put_samples(ids, partition_id, *arguments, **options)

    def is_nested():
        rows = list(tq.kv_list("p")["p"])
        return rows, tq.get_client().kv_retrieve_meta(rows, "p").field_schema["x"]["is_nested"]

    put("a", 4)
    put_samples = tq.get_client().store.put_samples
    monkeypatch.setattr(tq.get_client().store, "put_samples", fails)
    with pytest.raises(TimeoutError):
        put("b", 7)
    monkeypatch.undo()
    assert is_nested() == (["a"], False), "the shape is noted before the rows are there"
    put("b", 7)
    assert is_nested() == (["a", "b"], True)
