"""Columns to put, the rows that must be read, and functions that compare both bit for bit, without core's codec.

Shape legend: ``N`` rows (`NUM_ROWS`), ``L`` a row's own length, ``T`` the lengths of all rows together.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core.codec import ALL_DTYPES

#: Every dtype of the contract, in a fixed order.
DTYPES: Final = sorted(ALL_DTYPES, key=str)

NUM_ROWS: Final = 5
_LENGTHS: Final = (3, 1, 4, 1, 6)
_LENGTHS_WITH_EMPTY: Final = (0, 2, 0, 5, 0)


def ids(count: int, prefix: str = "s") -> list[str]:
    return [f"{prefix}{index}" for index in range(count)]


def batch(num_rows: int, **columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[num_rows])


def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of shape (L, ...) as one ``torch.jagged`` nested tensor."""
    return _jagged_of(torch.cat(list(rows)), map(len, rows))


def random_cells(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Random bits as values of ``dtype``. They include NaN payloads, denormals and negative zeros."""
    if dtype == torch.complex32:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that this dtype is experimental
            torch.empty(0, dtype=dtype)
    generator = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(generator.integers(0, 2, size=tuple(shape)).astype(np.bool_))
    count = math.prod(shape) * dtype.itemsize
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(generator.integers(0, 256, size=count, dtype=np.uint8)).view(dtype).view(tuple(shape))


def bits(tensor: torch.Tensor) -> bytes:
    """The content as bytes, in row-major order."""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)  # a dim of size 1 may have odd strides
    if plain.numel() == 0:
        return b""
    return bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes())


def rows_of(column: Any, num_rows: int) -> list[torch.Tensor]:
    assert isinstance(column, torch.Tensor), f"expected a tensor column, got a {type(column).__name__}"
    if column.is_nested:
        assert column.layout == torch.jagged, f"expected the layout torch.jagged, got {column.layout}"
        nested: Any = column
        rows = [nested.values()[start:stop] for start, stop in pairwise(nested.offsets().tolist())]
    else:
        assert column.dim() >= 1, "expected one row per id, got a scalar tensor"
        rows = [column[index] for index in range(column.shape[0])]
    assert len(rows) == num_rows, f"expected {num_rows} rows, got {len(rows)}"
    return rows


@contextmanager
def naming(column: str) -> Iterator[None]:
    """Adds the name of a column, or of another case, to what is wrong with it."""
    try:
        yield
    except (AssertionError, pytest.fail.Exception) as error:
        raise AssertionError(f"'{column}': {error}") from None
    except Exception as error:
        error.add_note(f"in the case '{column}'")
        raise


def check_column(column: Any, expected: Sequence[torch.Tensor] | torch.Tensor) -> None:
    """Asserts that a column that was read holds these rows, in the container that the contract promises."""
    rows = rows_of(column, len(expected))
    uniform = len({tuple(row.shape) for row in expected}) == 1
    shapes = [tuple(row.shape) for row in expected]
    assert column.dtype == expected[0].dtype, f"dtype {column.dtype}, expected {expected[0].dtype}"
    assert [tuple(row.shape) for row in rows] == shapes, (
        f"rows of shapes {[tuple(row.shape) for row in rows]}, expected {shapes}"
    )
    for index, (row, wanted) in enumerate(zip(rows, expected, strict=True)):
        assert bits(row) == bits(wanted), f"row {index}: {row} is not bit for bit {wanted}"
    if uniform:
        assert not column.is_nested, f"rows of one shape {shapes[0]} were read as a nested column, expected a dense one"
        assert type(column) is torch.Tensor, f"a dense column is a {type(column).__name__}"
        assert column.is_contiguous(), "a dense column is not contiguous"
    else:
        assert column.is_nested, "rows of different shapes were not read as one nested tensor"
        assert column.values().is_contiguous(), "the values of a jagged column are not contiguous"
        assert column.offsets().dtype == torch.int64, f"the offsets of a jagged column are {column.offsets().dtype}"
        lengths = [len(row) for row in expected]
        ends = getattr(column, "_maybe_min_seqlen", None), getattr(column, "_maybe_max_seqlen", None)
        assert ends == (min(lengths), max(lengths)), f"min and max length are {ends}, expected those of {lengths}"
    assert column.device.type == "cpu"
    assert not column.requires_grad, "a column that was read requires grad"


def items_of(column: Any) -> list[Any]:
    if isinstance(column, list):  # what older versions of tensordict give for td[name]
        return list(column)
    assert hasattr(column, "tolist"), f"expected a NonTensorStack, got a {type(column).__name__}"
    items: list[Any] = column.tolist()
    return items


def shared(left: Any, right: Any) -> bool:
    """Whether two tensors of any layout share memory."""
    pointers = [
        (tensor.values() if tensor.is_nested and tensor.layout == torch.jagged else tensor).untyped_storage().data_ptr()
        for tensor in (left, right)
    ]
    return bool(pointers[0] == pointers[1] != 0)


def same_items(left: Any, right: Any) -> bool:
    """Equal items of object columns: the same types all the way down, NaN equal to NaN, tensors bit for bit."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        alike = type(left) is type(right) and (left.dtype, left.shape) == (right.dtype, right.shape)
        return alike and bits(left) == bits(right)
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(same_items(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same_items(left[key], right[key]) for key in left)
    if isinstance(left, float):
        return left.hex() == right.hex() or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


def as_objects(*items: Any) -> NonTensorStack:
    return NonTensorStack(*items)


def _jagged_of(values: torch.Tensor, lengths: Iterable[int]) -> torch.Tensor:
    offsets = torch.tensor([0, *accumulate(lengths)])
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return nested


def _dense(*cell: int, rows: int = NUM_ROWS) -> Callable[[torch.dtype, int], torch.Tensor]:
    return lambda dtype, seed: random_cells(dtype, (rows, *cell), seed)


def _ragged(lengths: Sequence[int], *trailing: int) -> Callable[[torch.dtype, int], torch.Tensor]:
    return lambda dtype, seed: _jagged_of(random_cells(dtype, (sum(lengths), *trailing), seed), lengths)


def _nans(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Each with another payload."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    exponent = torch.tensor(math.inf, dtype=dtype).view(whole)
    return (exponent | torch.arange(1, NUM_ROWS + 1, dtype=whole)).view(dtype)


#: Layout -> what makes a column of a dtype and a seed.
LAYOUTS: Final[dict[str, Callable[[torch.dtype, int], torch.Tensor]]] = {
    "scalars": _dense(),
    "column_of_one": _dense(1),
    "vectors": _dense(3),
    "no_width": _dense(0),
    "trailing_dims": _dense(2, 3),
    "deep": _dense(2, 1, 3, 2),
    "trailing_dim_of_0": _dense(2, 0),
    "one_row": _dense(4, rows=1),
    "jagged": _ragged(_LENGTHS),
    "jagged_with_empty_rows": _ragged(_LENGTHS_WITH_EMPTY),
    "jagged_of_equal_lengths": _ragged((3,) * NUM_ROWS),
    "jagged_all_rows_empty": _ragged((0,) * NUM_ROWS),
    "jagged_with_trailing_dims": _ragged(_LENGTHS_WITH_EMPTY, 2, 3),
    "transposed": lambda dtype, seed: random_cells(dtype, (3, NUM_ROWS, 2), seed).transpose(0, 1),
    "expanded": lambda dtype, seed: random_cells(dtype, (1, 1, 3), seed).expand(NUM_ROWS, 2, 3),
    "strided_slice": lambda dtype, seed: random_cells(dtype, (2 * NUM_ROWS + 1, 6), seed)[1::2, 1:5:2],
    "nans": _nans,
}
#: The dtypes whose NaNs have a payload.
_NANS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def layouts_of(dtype: torch.dtype) -> list[str]:
    return [layout for layout in LAYOUTS if layout != "nans" or dtype in _NANS]


def laid(layout: str, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A column, and copies of its rows as torch takes it apart."""
    column = LAYOUTS[layout](dtype, seed)
    return column, [row.clone() for row in column.unbind()]
