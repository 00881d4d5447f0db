"""Columns of every dtype in every layout, objects of every type, large equal cells, and integers of any width."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from dataplane_testkit._base import Suite
from dataplane_testkit._columns import (
    DTYPES,
    LAYOUTS,
    NUM_ROWS,
    as_object_array,
    as_objects,
    batch,
    bits,
    check_column,
    ids,
    items_of,
    jagged,
    layouts_of,
    naming,
    random_cells,
    same_items,
)
from dataplane_testkit._store import Store, not_declared

_NAMES: Final = [str(dtype).removeprefix("torch.") for dtype in DTYPES]

_ITEMS: Final[dict[str, list[Any]]] = {
    "none": [None, None, 0],
    "bool_and_int": [True, 1, False, 0],
    "int_extremes": [2**63 - 1, -(2**63), 0, -1],
    "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.0],
    "strings": ["", "plain", "ünï-字-🙂", "nul\0", "line\n", "\ud800", "x" * 10_000],
    "bytes": [b"", b"\0\xff", bytes(range(256)), b"x" * 10_000],
    "lists": [[], [1, [2, [3, [None]]]], [[], {}], [True, "a", b"b", 1.5]],
    "dicts": [{}, {"a": 1, "": {"b": [1, 2]}}, {"z": 1, "a": 2}, {"ü": None}],
    "tensors": [torch.arange(3), torch.tensor(2.5), torch.zeros(0, 4), torch.ones(2, 2, dtype=torch.bfloat16)],
    "tensors_inside": [{"image": torch.arange(6).view(2, 3), "masks": [torch.tensor([True]), None]}, [torch.zeros(1)]],
    "messages": [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text"}]}], []],
    "mixed_kinds": [None, True, 1, 1.0, "1", b"1", [1], {"1": 1}, torch.tensor(1)],
    "deep": [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]],
}

#: Which of three images each of six samples has.
_IMAGE_OF: Final = (0, 1, 0, 0, 2, 1)
_SAMPLES: Final = ids(len(_IMAGE_OF))


def _images() -> list[torch.Tensor]:
    """The image of each sample: large enough to be stored once."""
    images = [random_cells(torch.float32, (40_000 - 100 * number, 2), number) for number in range(3)]
    return [images[number] for number in _IMAGE_OF]


def _each(column: Any) -> list[torch.Tensor]:
    return list(column.unbind()) if isinstance(column, torch.Tensor) else items_of(column)


def _check_images(
    store: Store, partition: str, samples: Sequence[int], images: list[torch.Tensor], *names: str
) -> None:
    found = store.get(partition, [_SAMPLES[row] for row in samples], *names)
    for name in names:
        with naming(name):
            assert [bits(row) for row in _each(found[name])] == [bits(images[row]) for row in samples]


class ColumnSuite(Suite, chapter="columns"):
    """Every dtype, layout and shape."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=_NAMES)
    def test_columns_come_back_bit_for_bit(self, store: Store, dtype: torch.dtype) -> None:
        partition, rows = store.register(*layouts_of(dtype)), dict[str, list[torch.Tensor]]()
        for layout in layouts_of(dtype):
            with naming(layout):
                puts = [LAYOUTS[layout](dtype, seed) for seed in (7, 8)]
                rows[layout] = [row for _, some in puts for row in some]
                names = ids(len(rows[layout]))
                for place, (column, some) in enumerate(puts):
                    store.put(partition, names[place * len(some) :][: len(some)], columns={layout: column})
        for count in {len(each) // 2 for each in rows.values()}:
            layouts, names = [each for each in rows if len(rows[each]) == 2 * count], ids(2 * count)
            # one put, both puts, and rows of both that may be of one length where others are not
            equal = [1 % count, 3 % count, count + 1 % count]
            for order in (range(count), range(2 * count), range(2 * count)[::-3], equal, [0, 0]):
                found = store.get(partition, [names[row] for row in order], *layouts)
                for layout in layouts:
                    with naming(layout):
                        check_column(found[layout], [rows[layout][row] for row in order])

    def test_objects_come_back_equal(self, store: Store) -> None:
        partition = store.register("stack", "array")
        for kind, items in _ITEMS.items():
            names = ids(len(items), kind)
            store.put(partition, names, stack=as_objects(*items), array=as_object_array(*items))
            for some, expected in ((names, items), (names[-1:], items[-1:])):
                found = store.get(partition, some, "stack", "array")
                for name in ("stack", "array"):
                    read = items_of(found[name])
                    assert len(read) == len(expected)
                    for item, written in zip(read, expected, strict=True):
                        assert same_items(item, written), f"{kind}: {written!r} was read as {item!r}"

    def test_allow_pickle_opens_the_set(self, store: Store) -> None:
        client = store.another_client(allow_pickle=True)
        partition = store.register("o", client=client)
        items = [(1, 2), {3, 4}, 1j, {"inside": datetime.date(2024, 1, 1)}]
        client.put_samples(ids(4), partition, batch(4, o=as_objects(*items)))
        assert items_of(client.get_samples(ids(4), partition, ["o"])["o"]) == items

    def test_the_engine_holds_what_was_put(self, store: Store) -> None:
        partition = store.register("x")
        for dtype in (torch.int64, torch.bfloat16, torch.bool, torch.float32):
            for layout in ("scalars", "vectors", "jagged_with_empty_rows", "trailing_dims", "expanded"):
                column, rows = LAYOUTS[layout](dtype, 11)
                store.put(partition, ids(NUM_ROWS), columns={f"{layout} {dtype}": column})
                for name, row in zip(ids(NUM_ROWS), rows, strict=True):
                    raw = store.raw_cell(partition, name, f"{layout} {dtype}", row.dim())
                    assert raw == bits(row), f"the engine's cell of '{name}' in '{layout} {dtype}' is not the row put"
        items = [None, {"a": [1, 2.5, "x", b"y"]}, "text"]
        store.put(partition, ids(3), o=as_objects(*items))
        assert same_items([store.raw_cell(partition, name, "o", None) for name in ids(3)], items)

    # --- large equal cells, as the one image of a group's samples -----------------------------------------------------

    def test_equal_cells_come_back_as_they_were_written(self, store: Store) -> None:
        partition, images, names = store.register("copies"), _images(), ["copies", "objects", "one_memory"]
        store.put(partition, _SAMPLES, copies=jagged(images), objects=as_objects(*images))
        lazy = LazyStackedTensorDict(*[TensorDict({"one_memory": image}, batch_size=[]) for image in images])
        store.client.put_samples(_SAMPLES, partition, lazy)
        for samples in ([5, 4, 3, 2, 1, 0], [2], [3, 0], [1, 1, 4]):
            _check_images(store, partition, samples, images, *names)
        found = store.get(partition, _SAMPLES, *names)
        shared = store.client.get_samples(_SAMPLES, partition, names, share_rows=True)
        for name in names:
            rows = _each(found[name])
            rows[0].zero_()
            assert [bits(row) for row in rows[1:]] == [bits(row) for row in images[1:]], f"{name}: rows share memory"
            rows = _each(shared[name])
            assert [bits(row) for row in rows] == [bits(row) for row in images]
            if store.deployment.backend_class.wire.shared_rows:
                assert len({id(row) for row in rows}) == 3, f"{name}: 3 images were read as more than 3 tensors"
        _check_images(store, partition, range(6), images, *names)

    # --- integers, which are stored as narrow as a put allows ---------------------------------------------------------

    def test_narrow_integers_take_less_room(self, store: Store) -> None:
        wire = store.deployment.backend_class.wire
        if not (store.backend.narrow and (wire.bytes or wire.narrow)):
            not_declared("a wire format with narrow integers")
        partition = store.register("x")
        column = torch.arange(1 << 18).view(8, -1) % 100
        with store.held() as held:
            store.put(partition, ids(8), x=column)
            assert held() < column.nbytes // 2, f"{held()} bytes for values that take {column.nbytes // 8}"
