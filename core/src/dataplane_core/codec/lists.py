"""Lists and arrays as columns: decides for every call that writes what a list or an array becomes.

A list of numbers, or of lists of numbers of any lengths, becomes a tensor column, and so does a list of tensors or
arrays, or an array of numbers. Any other list becomes one object per row. A list that mixes numbers with None, or
numbers with lists, is refused, since it is not clear what is meant. Empty lists alone leave open what they are, and a
list that fits what its field is known to hold becomes that (`list_as`).

Shape legend: ``N`` rows, ``L`` a row's own length.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from itertools import chain
from types import NoneType
from typing import Any, Final

import numpy as np
import torch

from dataplane_core.codec.cells import MAX_DEPTH
from dataplane_core.codec.compact import LARGE_CELL_BYTES
from dataplane_core.codec.rows import EXACT_IN_FLOAT32, EmptyLists, TensorRows, object_column
from dataplane_core.codec.tensors import dense_or_ragged, offsets_of
from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_core.spec import FieldSpec, Ragged

_NUMBERS: Final = frozenset({bool, int, float})
_LISTS: Final = frozenset({list, tuple})
_TENSORS: Final = (torch.Tensor, np.ndarray)
#: The kinds of numpy's dtypes that hold strings, bytes and objects.
_OBJECTS: Final = "SUTO"
#: float64 holds integers up to this exactly.
_EXACT_IN_FLOAT64: Final = 2**53
_HINT: Final = (
    "Write a tensor (of rows of their own length: torch.nested.as_nested_tensor(rows, layout=torch.jagged)), or "
    "NonTensorStack(*items) for one object per sample."
)


def column_of_list(what: str, items: Sequence[Any]) -> Any:
    """The column that a list (or tuple) of N items stands for.

    - Numbers: a tensor (N,). Lists of numbers: a tensor (N, L) if all rows are equally long, else `Ragged` of rows
      (L,). An empty list is a row of length 0; only empty lists are `EmptyLists`.
    - All int: int64. Float, or int and float: float32, as in torch. All bool: bool. numpy's numbers are as Python's.
    - Tensors or arrays of one dtype and rank, which may differ in their first dim: a tensor (N, ...), or `Ragged`, in
      new memory. They keep their dtype. If they are large, `TensorRows`, in their own memory, to find equal ones.
    - Anything else (strings, dicts, bytes, None, lists of tensors): an object per row.

    Args:
        what: The call and the field. Messages begin with it.
        items: One per row.

    Raises:
        InvalidTypeError: None, bools or lists are mixed with numbers, or tensors with anything of these, or lists of
            numbers are nested deeper.
        InvalidRequestError: The dtype cannot hold a number.
        SchemaMismatchError: Tensors differ in dtype, rank, or a dim other than their first.
    """
    kinds = set(map(type, items))
    if _any_of_numpy(kinds):
        items = _plain(items)
        kinds = set(map(type, items))
    if kinds and kinds <= _NUMBERS:
        return torch.from_numpy(_numbers(what, items, kinds))
    if kinds and kinds <= _LISTS:
        inner = set(map(type, chain.from_iterable(items)))
        if _any_of_numpy(inner):
            items = [_plain(row) for row in items]
            inner = set(map(type, chain.from_iterable(items)))
        if inner and inner <= _NUMBERS:
            values = torch.from_numpy(_numbers(what, list(chain.from_iterable(items)), inner))
            return dense_or_ragged(Ragged(values, _offsets(items)))
        if not inner:
            return EmptyLists(items)
    if kinds and all(issubclass(kind, _TENSORS) for kind in kinds):
        return _column_of_tensors(what, items)
    _refuse_near_numbers(what, items)
    return object_column(items)


def list_as(items: Sequence[Any], spec: FieldSpec) -> Any:
    """A list as the column of a field of which more is known than the list itself says.

    Ints are written to a field of floats, or of smaller ints, if it holds them exactly; floats to one of other floats;
    any list but one of tensors to a field of objects.

    Args:
        items: One per row.
        spec: What the field holds.

    Returns:
        The column, or None if the list does not fit.
    """
    items = _plain(items)
    kinds = set(map(type, items))
    if spec.kind == "object":
        return None if any(issubclass(kind, _TENSORS) for kind in kinds) else object_column(items)
    if spec.rank == 0:
        return _tensor_as(items, spec) if kinds <= _NUMBERS else None
    if not kinds <= _LISTS or spec.rank > 1:
        return None
    values = _tensor_as(_plain(chain.from_iterable(items)), spec)
    return None if values is None else dense_or_ragged(Ragged(values, _offsets(items)))


def misfit_of(items: Sequence[Any], spec: FieldSpec) -> str:
    """The first row of a list that does not fit a field, for a message."""
    row = next((row for row, item in enumerate(items) if list_as([item], spec) is None), 0)
    return f"row {row}, {reprlib.repr(*_plain(items[row : row + 1]))}, does not"


def says_its_dtype(items: Sequence[Any]) -> bool:
    """Whether the dtype of a list is that of its tensors or arrays."""
    return any(isinstance(item, _TENSORS) for item in items[:1])


def _tensor_as(numbers: Sequence[Any], spec: FieldSpec) -> torch.Tensor | None:
    """Numbers, one after the other, in the dtype of a field. None: it does not hold them."""
    dtype, kinds = spec.torch_dtype, set(map(type, numbers))
    is_float = dtype.is_floating_point or dtype.is_complex
    if not kinds <= ({int, float} if is_float else {bool} if dtype == torch.bool else {int}):
        return None
    most = _EXACT_IN_FLOAT64 if float in kinds else (1 << 63) - 1
    if any(type(each) is int and abs(each) > most for each in numbers):
        return None
    given = torch.tensor(numbers, dtype=torch.float64 if float in kinds else torch.int64, device="cpu")
    held = given.to(dtype)
    back = (held.real if dtype.is_complex else held).to(given.dtype)
    whole = torch.tensor([type(each) is int for each in numbers], dtype=torch.bool, device="cpu")
    lost = (back != given) & (whole | given.isfinite() & ~back.isfinite())
    return None if lost.any() else held


def _offsets(lists: Sequence[Any]) -> torch.Tensor:
    return offsets_of(torch.tensor(list(map(len, lists)), dtype=torch.int64, device="cpu"))


def column_of_array(what: str, array: np.ndarray[Any, Any]) -> Any:
    """The column that an array of N rows stands for.

    - Numbers and bools: a tensor of the same shape and dtype. It aliases the array, where that is contiguous and of the
      machine's byte order, also if it is read-only.
    - Strings and bytes: as a list of them.
    - Objects: the array as it is, one object per row. But where every item is an array of numbers, they are rows, as in
      a list.

    Raises:
        InvalidTypeError: torch has no such dtype, or values are masked.
    """
    if np.ma.is_masked(array):
        masked = int(np.ma.getmaskarray(array).sum())
        raise InvalidTypeError(
            f"{what} is an array with {masked} of {array.size} values masked. Expected a value everywhere.",
            hint="Write array.filled(value).",
        )
    if array.dtype.kind in "SUT":
        return column_of_list(what, array.tolist())
    if array.dtype.kind == "O":
        if array.ndim == 1 and len(array) and all(isinstance(item, np.ndarray) for item in array):
            return column_of_list(what, array.tolist())
        return array
    return _tensor_of(what, array)


def _any_of_numpy(kinds: Iterable[type]) -> bool:
    return any(issubclass(kind, (np.generic, np.ndarray)) for kind in kinds)


def _plain(items: Iterable[Any]) -> list[Any]:
    """Python's numbers, strings and lists of objects instead of numpy's. Arrays of numbers stay."""
    return [
        item.item()
        if isinstance(item, np.generic)
        else item.tolist()
        if isinstance(item, np.ndarray) and item.dtype.kind in _OBJECTS
        else item
        for item in items
    ]


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
        large = [each for each in numbers if type(each) is int and abs(each) > EXACT_IN_FLOAT32]
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


def _column_of_tensors(what: str, items: Sequence[Any]) -> torch.Tensor | Ragged | TensorRows:
    rows = TensorRows(
        column_of_array(f"{what}, row {number},", item) if isinstance(item, np.ndarray) else item
        for number, item in enumerate(items)
    )
    if rows.nbytes >= LARGE_CELL_BYTES * len(rows):
        return rows
    joined = rows.joined(what)
    return dense_or_ragged(joined) if isinstance(joined, Ragged) else joined


def _tensor_of(what: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    plain = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    if any(step < 0 for step in plain.strides):  # of a dim of length 1: numpy calls it contiguous, torch refuses it
        plain = plain.copy()
    if not plain.flags.writeable:
        plain = np.asarray(_AsWritable(plain))
    try:
        return torch.from_numpy(plain)
    except TypeError as error:
        raise InvalidTypeError(
            f"{what} is a non-tensor column: an ndarray of dtype {array.dtype}, which torch lacks.",
            hint="Write x.astype(...) with a dtype that torch has, or x.astype(str) for strings.",
        ) from error


class _AsWritable:
    """A read-only array as numpy may write to it. Nobody does, but torch warns of read-only memory."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._kept = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _refuse_near_numbers(what: str, items: Sequence[Any]) -> None:
    """Refuses a list that holds only numbers, None, lists and tensors, and is neither (N,) nor rows of numbers."""
    top = set(map(type, items))
    if any(issubclass(kind, _TENSORS) for kind in top):
        others = {kind for kind in top if not issubclass(kind, _TENSORS)}
        if others <= _NUMBERS | _LISTS | {NoneType}:
            row = next(row for row, item in enumerate(items) if type(item) in others)
            raise InvalidTypeError(
                f"{what} holds a {type(items[row]).__name__} among tensors or arrays (row {row}). Expected one in "
                "every row; a row without values is one of length 0.",
                hint="Write NonTensorStack(*items) for one object per sample.",
            )
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
