"""Columns of every dtype in every layout, object columns of every type of the contract, images beside tokens.

Shape legend: ``S_i`` tokens, ``P_i`` patches and ``G_i`` images of sample i.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from dataplane_testkit._base import Suite
from dataplane_testkit._columns import (
    DTYPES,
    LAYOUTS,
    NUM_ROWS,
    as_object_array,
    as_objects,
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
from dataplane_testkit._profiles import kit_settings
from dataplane_testkit._store import Store


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_NAMES = [_name(dtype) for dtype in DTYPES]

_ITEMS: dict[str, list[Any]] = {
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


def _nested_item() -> st.SearchStrategy[Any]:
    flat = (
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats()
        | st.text(max_size=8)
        | st.binary(max_size=8)
    )
    return st.recursive(
        flat,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    )


@kit_settings(40)
@given(data=st.data())
def _check_batch(store: Store, data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 6), "rows")
    trailing = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2), "trailing"))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=num_rows, max_size=num_rows), "lengths")
    dtypes = [data.draw(st.sampled_from(DTYPES), "dtype") for _ in range(3)]
    seed = data.draw(st.integers(0, 2**31), "seed")
    items = data.draw(st.lists(_nested_item(), min_size=num_rows, max_size=num_rows), "items")
    ragged = random_cells(dtypes[0], (sum(lengths), *trailing), seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    dense = random_cells(dtypes[1], (num_rows, *trailing), seed + 1)
    scalars = random_cells(dtypes[2], (num_rows,), seed + 2)
    partition = store.register("r")
    store.put(
        partition,
        ids(num_rows),
        r=torch.nested.nested_tensor_from_jagged(ragged, offsets),
        d=dense,
        s=scalars,
        o=as_objects(*items),
    )
    order = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=8), "order")
    found = store.get(partition, [f"s{place}" for place in order], "r", "d", "s", "o")
    rows = ragged.split_with_sizes(lengths)
    check_column(found["r"], [rows[place] for place in order])
    check_column(found["d"], [dense[place] for place in order])
    check_column(found["s"], [scalars[place] for place in order])
    assert all(same_items(read, items[place]) for read, place in zip(items_of(found["o"]), order, strict=True)), (
        "an object item changed"
    )
    store.client.clear_samples(None, partition)


#: Images per sample: none, one or several. Each image has at least 4 patches.
_GRIDS: tuple[list[list[int]], ...] = ([[1, 2, 2]], [], [[1, 4, 2], [1, 2, 2], [1, 2, 6]], [[2, 2, 2]], [])
_TOKENS = (7, 3, 12, 9, 1)


def _tokens() -> dict[str, list[torch.Tensor]]:
    """Token columns (S_i,), and the experts that each token was routed to, (S_i, layers, k)."""
    return {
        "input_ids": [torch.arange(length) for length in _TOKENS],
        "token_mask": [torch.arange(length) % 2 == 0 for length in _TOKENS],
        "routed_experts": [torch.arange(length * 3 * 2).view(length, 3, 2) % 128 + 2**40 for length in _TOKENS],
    }


def _images() -> dict[str, list[torch.Tensor]]:
    """Patches (P_i, C, H, W) in bfloat16, and grids (G_i, 3) in int64."""
    grids = [torch.tensor(grid, dtype=torch.int64).view(-1, 3) for grid in _GRIDS]
    return {
        "pixel_values": [
            random_cells(torch.bfloat16, (int(grid.prod(dim=1).sum()), 3, 4, 4), index)
            for index, grid in enumerate(grids)
        ],
        "image_grid_thw": grids,
    }


class MatrixSuite(Suite, chapter="matrix"):
    """Every dtype, layout and shape."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=_NAMES)
    def test_columns_come_back_bit_for_bit(self, store: Store, dtype: torch.dtype) -> None:
        laid = {layout: LAYOUTS[layout](dtype, 7) for layout in layouts_of(dtype)}
        partition = store.register(*laid)
        for num_rows in sorted({len(rows) for _, rows in laid.values()}):
            names = ids(num_rows, f"{num_rows}_")
            put = {layout: each for layout, each in laid.items() if len(each[1]) == num_rows}
            store.put(partition, names, columns={layout: column for layout, (column, _) in put.items()})
            order = [num_rows - 1, 0, num_rows - 1]
            found = store.get(partition, names, *put)
            picked = store.get(partition, [names[place] for place in order], *put)
            assert list(found.keys()) == list(put)
            for layout, (_, rows) in put.items():
                with naming(layout):
                    check_column(found[layout], rows)
                    check_column(picked[layout], [rows[place] for place in order])
                    if len({tuple(row.shape) for row in rows}) == 1:
                        assert tuple(found[layout].shape) == (num_rows, *rows[0].shape)

    def test_every_dtype_joins_across_puts(self, store: Store) -> None:
        rows = {
            name: [random_cells(dtype, (length, 2), place) for place, length in enumerate((3, 3, 0, 1, 3, 3))]
            for name, dtype in zip(_NAMES, DTYPES, strict=True)
        }
        scalars = {name: random_cells(dtype, (6,), 9) for name, dtype in zip(_NAMES, DTYPES, strict=True)}
        partition = store.register(*_NAMES, *(f"{name}_s" for name in _NAMES))
        for start, stop in ((0, 2), (2, 4), (4, 6)):
            columns = {name: jagged(each[start:stop]) for name, each in rows.items()}
            columns |= {f"{name}_s": each[start:stop].clone() for name, each in scalars.items()}
            store.put(partition, ids(6)[start:stop], columns=columns)
        for order in ([5, 0, 2, 4, 1, 3], [4, 0, 1], [3, 2], [1, 5]):
            found = store.get(partition, [f"s{place}" for place in order], *rows, *(f"{name}_s" for name in rows))
            for name in _NAMES:
                with naming(name):
                    check_column(found[name], [rows[name][place] for place in order])
                    check_column(found[f"{name}_s"], [scalars[name][place] for place in order])

    # --- objects ------------------------------------------------------------------------------------------------------

    def test_objects_come_back_equal(self, store: Store) -> None:
        partition = store.register("stack", "array")
        for kind, items in _ITEMS.items():
            names = ids(len(items), kind)
            store.put(partition, names, stack=as_objects(*items), array=as_object_array(*items))
            found, last = (store.get(partition, some, "stack", "array") for some in (names, names[-1:]))
            for name in ("stack", "array"):
                read = items_of(found[name])
                assert len(read) == len(items)
                for index, (item, written) in enumerate(zip(read, items, strict=True)):
                    assert same_items(item, written), f"{kind} {index} was read as {item!r}, expected {written!r}"
                assert same_items(items_of(last[name])[0], items[-1])

    def test_any_batch_comes_back(self, store: Store) -> None:
        _check_batch(store)

    # --- a second way in ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool, torch.float32], ids=_name)
    def test_the_engine_holds_what_was_put(self, store: Store, dtype: torch.dtype) -> None:
        layouts = ("scalars", "vectors", "jagged_with_empty_rows", "trailing_dims", "expanded")
        laid = {layout: LAYOUTS[layout](dtype, 11) for layout in layouts}
        partition = store.register(*laid)
        names = ids(NUM_ROWS)
        store.put(partition, names, columns={layout: column for layout, (column, _) in laid.items()})
        for layout, (_, rows) in laid.items():
            for name, row in zip(names, rows, strict=True):
                raw = store.raw_payload(partition, name, layout, row.dim())
                assert raw == bits(row), f"the engine's cell of '{name}' in '{layout}' is not the row put"

    def test_the_engine_holds_the_objects_put(self, store: Store) -> None:
        items = [None, {"a": [1, 2.5, "x", b"y"]}, "text"]
        partition = store.register("o")
        store.put(partition, ids(3), o=as_objects(*items))
        for name, item in zip(ids(3), items, strict=True):
            assert same_items(store.raw_item(partition, name, "o"), item)

    # --- columns beside the tokens ------------------------------------------------------------------------------------

    def test_images_ride_with_the_tokens(self, store: Store) -> None:
        partition = store.register("input_ids", "token_mask", num_samples=len(_TOKENS))
        names = ids(len(_TOKENS))
        tokens, images = _tokens(), _images()
        turns = [[{"role": "user", "content": "x" * length}] for length in _TOKENS]
        columns: dict[str, Any] = {name: jagged(rows) for name, rows in {**tokens, **images}.items()}
        store.put(partition, names, [{"n": index} for index in range(5)], {**columns, "turns": as_objects(*turns)})
        order = [2, 1, 4, 0, 3, 2]
        found = store.get(partition, [names[place] for place in order], *columns, "turns")
        for name, rows in {**tokens, **images}.items():
            check_column(found[name], [rows[place] for place in order])
        assert items_of(found["turns"]) == [turns[place] for place in order]
        # reads of samples without an image and of one sample: the container depends on the rows that are read
        bare = store.get(partition, ["s1", "s4"], *images)
        for name, rows in images.items():
            check_column(bare[name], [rows[1], rows[4]])
            check_column(store.get(partition, ["s2"], name)[name], [rows[2]])
