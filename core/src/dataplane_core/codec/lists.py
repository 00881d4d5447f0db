"""Lists as columns: decides for every call that writes what a list becomes.

A list of numbers, or of lists of numbers of any lengths, becomes a tensor column. Any other list becomes one object per
row. A list that mixes numbers with None, or numbers with lists, is refused, since it is not clear what is meant.

Shape legend: ``N`` rows, ``L`` a row's own length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from types import NoneType
from typing import Any, Final

import numpy as np
import torch
from tensordict import NonTensorStack

from dataplane_core.codec.objects import MAX_DEPTH
from dataplane_core.codec.rows import object_column
from dataplane_core.codec.tensors import Ragged, offsets_of, to_nested
from dataplane_core.errors import InvalidRequestError, InvalidTypeError

__all__ = ["column_of_list"]

_NUMBERS: Final = frozenset({bool, int, float})
_LISTS: Final = frozenset({list, tuple})
#: float32 holds integers up to this exactly.
_EXACT_IN_FLOAT32: Final = 2**24
_HINT: Final = (
    "Write a tensor (of rows of their own length: torch.nested.as_nested_tensor(rows, layout=torch.jagged)), or "
    "NonTensorStack(*items) for one object per sample."
)


def column_of_list(what: str, items: Sequence[Any]) -> torch.Tensor | NonTensorStack:
    """The column that a list (or tuple) of N items stands for.

    - Numbers: a tensor (N,). Lists of numbers: a tensor (N, L) if all rows are equally long, else one jagged nested
      tensor of rows (L,). An empty list is a row of length 0.
    - All int: int64. Float, or int and float: float32, as in torch. All bool: bool.
    - Anything else (strings, dicts, bytes, tensors, None, only empty lists): an object per row.

    Args:
        what: The call and the field. Messages begin with it.
        items: One per row.

    Raises:
        InvalidTypeError: None, bools or lists are mixed with numbers, or lists of numbers are nested deeper.
        InvalidRequestError: The dtype cannot hold a number.
    """
    kinds = set(map(type, items))
    if kinds and kinds <= _NUMBERS:
        return torch.from_numpy(_numbers(what, items, kinds))
    if kinds and kinds <= _LISTS:
        inner = set(map(type, chain.from_iterable(items)))
        if inner and inner <= _NUMBERS:
            lengths = list(map(len, items))
            values = torch.from_numpy(_numbers(what, list(chain.from_iterable(items)), inner))
            if len(set(lengths)) == 1:
                return values.view(len(items), lengths[0])
            return to_nested(Ragged(values, offsets_of(torch.tensor(lengths))))
    _refuse_near_numbers(what, items)
    return object_column(items)


def _numbers(what: str, numbers: Sequence[Any], kinds: set[type]) -> np.ndarray[Any, Any]:
    """The numbers, one after the other, in the dtype that holds their kinds."""
    if bool in kinds and len(kinds) > 1:
        raise InvalidTypeError(f"{what} holds bools among numbers. Expected one or the other.", hint=_HINT)
    if kinds == {bool}:
        return np.fromiter(numbers, np.bool_, len(numbers))
    if kinds == {int}:
        try:
            return np.fromiter(numbers, np.int64, len(numbers))
        except OverflowError as error:
            raise InvalidRequestError(f"{what} holds an int that does not fit in 64 bits (signed).") from error
    if int in kinds:
        large = [each for each in numbers if type(each) is int and abs(each) > _EXACT_IN_FLOAT32]
        if large:
            raise InvalidRequestError(
                f"{what} holds ints and floats, which become float32, but the int {large[0]} would lose digits in it.",
                hint=_HINT,
            )
    doubles = np.fromiter(numbers, np.float64, len(numbers))
    with np.errstate(over="ignore"):
        singles = doubles.astype(np.float32)
    lost = np.isinf(singles) & ~np.isinf(doubles)
    if lost.any():
        raise InvalidRequestError(
            f"{what} holds {doubles[lost][0]}. Expected floats that float32 can hold, which a list of them becomes.",
            hint=_HINT,
        )
    return singles


def _refuse_near_numbers(what: str, items: Sequence[Any]) -> None:
    """Refuses a list that holds only numbers, None and lists, and is neither (N,) nor rows of numbers."""
    kinds = _leaf_kinds(items)
    if not kinds & _NUMBERS or not kinds <= _NUMBERS | {NoneType}:
        return
    if NoneType in kinds:
        row = next(row for row, item in enumerate(items) if item is None or NoneType in _leaf_kinds([item]))
        found = f"holds None among numbers (row {row})"
    elif {type(item) in _LISTS for item in items} == {True, False}:
        found = "holds numbers in some rows and lists of numbers in others"
    else:
        found = "holds lists of numbers nested more than one deep"
    raise InvalidTypeError(f"{what} {found}. Expected a number per row, or a list of numbers per row.", hint=_HINT)


def _leaf_kinds(items: Iterable[Any], depth: int = 0) -> set[type]:
    """The types of all values in nested lists. Empty lists add none."""
    kinds = set(map(type, items))
    if not kinds & _LISTS or depth > MAX_DEPTH:
        return kinds
    nested = chain.from_iterable(item for item in items if type(item) in _LISTS)
    return kinds - _LISTS | _leaf_kinds(list(nested), depth + 1)
