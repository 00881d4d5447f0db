"""What people have, as columns: the one way for all that `put_samples`, `write_columns` and `kv_first_write` take.

Arrow tables, DataFrames and data sets are recognized by the names of their classes, so that their packages are not
imported here.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import NoneType
from typing import Any, Final

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from dataplane_core.codec.cells import MAX_DEPTH
from dataplane_core.codec.compact import LARGE_CELL_BYTES
from dataplane_core.codec.rows import EXACT_IN_FLOAT32, Columns, EmptyLists, TensorRows, object_column
from dataplane_core.codec.tensors import dense_or_jagged, dense_or_ragged, offsets_of
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, preview
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


def as_columns(where: str, fields: Any, num_samples: int) -> TensorDictBase | Columns:
    """Columns that `encode_columns` takes, of whatever a caller has: a mapping of columns, or a list of dicts with
    the same keys; a TensorDict; a pyarrow ``Table`` or ``RecordBatch``; a pandas ``DataFrame``; a ``datasets.Dataset``.

    The columns alias ``fields`` where they can. Their numbers of rows are not checked. ``where``, the call, begins
    messages.
    """
    if isinstance(fields, LazyStackedTensorDict) and fields.stack_dim == 0:
        # it gives no columns whose rows differ in shape
        rows = _columns_of_rows(where, fields.tensordicts, num_samples)
        tensors = {name for name, cells in rows if all(isinstance(cell, torch.Tensor) for cell in cells)}
        columns = [(name, cells if name in tensors else fields.get(name)) for name, cells in rows]
    elif isinstance(fields, (TensorDictBase, Columns)):
        return fields
    elif isinstance(fields, Mapping):
        columns = list(fields.items())
    elif isinstance(fields, (list, tuple)):
        columns = _columns_of_rows(where, fields, num_samples)
    elif _is_a(fields, "pyarrow.lib", "Table", "RecordBatch"):
        _check_names(where, fields.schema.names)
        schema = zip(fields.schema, fields.columns, strict=True)
        return Columns(
            {
                field.name: column_of_arrow(f"{where} refused: field '{field.name}'", column, field.metadata)
                for field, column in schema
            }
        )
    elif _is_a(fields, "datasets.arrow_dataset", "Dataset"):
        return as_columns(where, _columns_of_dataset(fields), num_samples)
    elif _is_a(fields, "pandas", "DataFrame"):
        columns = list(fields.items())
        _check_names(where, [name for name, _ in columns])
    else:
        raise InvalidTypeError(
            f"{where} refused: fields are a {type(fields).__name__}. Expected a dict of columns, a TensorDict, a list "
            "of dicts, a datasets.Dataset, an Arrow table or a DataFrame.",
            hint="Write {'name': column} for one column, and list(data.take(n)) for the next rows of a stream.",
        )
    converted: dict[str, Any] = {}
    lists: dict[str, Sequence[Any]] = {}
    ints: list[str] = []
    for name, column in columns:
        converted[name] = _column(f"{where} refused: field '{name}'", column)
        if isinstance(column, (list, tuple)):
            lists[name] = column
            if not (column and isinstance(column[0], _TENSORS)):  # the dtype is not that of its tensors or arrays
                ints.append(name)
    return Columns(converted, lists, ints)


def as_column(what: str, column: Any) -> Any:
    """The tensor or object column that a column stands for. What it does not know, it returns as it is."""
    column = _column(what, column)
    if isinstance(column, EmptyLists):
        return object_column(column)
    rows = column.joined(what) if isinstance(column, TensorRows) else column
    return dense_or_jagged(rows) if isinstance(rows, Ragged) else rows


def _column(what: str, column: Any) -> Any:
    """As `as_column`, in the forms that only the codec takes."""
    if isinstance(column, (torch.Tensor, TensorDictBase, Ragged, TensorRows)):
        return column
    if isinstance(column, (list, tuple)):
        return column_of_list(what, column)
    if isinstance(column, np.ndarray):
        return column_of_array(what, column)
    if _is_a(column, "pyarrow.lib", "Array", "ChunkedArray"):
        return column_of_arrow(what, column)
    if _is_a(column, "datasets.arrow_dataset", "Column"):
        return _column(what, column[:])
    if _is_a(column, "pandas", "Series"):
        if _is_a(column.dtype, "pandas", "ArrowDtype"):
            return column_of_arrow(what, column.array.__arrow_array__())
        if _is_a(column.dtype, "pandas", "CategoricalDtype") and not column.hasnans:
            column = column.astype(column.dtype.categories.dtype)
        # strings and objects, where pandas writes NaN if one is missing; numbers of which some are missing
        if column.dtype.kind == "O" or (hasattr(column.dtype, "na_value") and column.hasnans):
            return column_of_list(what, column.astype(object).where(column.notna(), None).tolist())
        return column_of_array(what, column.to_numpy())
    if _is_a(column, "datasets.arrow_dataset", "Dataset"):
        raise InvalidTypeError(f"{what} is a datasets.Dataset.", hint="Write one split, such as splits['train'].")
    return column


def _check_names(where: str, names: Sequence[Any]) -> None:
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise InvalidRequestError(f"{where} refused: fields have several columns named {preview(repeated)}.")


def _columns_of_dataset(dataset: Any) -> Any:
    """Its columns as Arrow, or, where its features decode what is stored, what they give: the same whatever its format
    is, but for images, audio and the like. With a transform, what that returns."""
    form = dataset.format
    if form["type"] == "custom":
        return dataset[:]
    table = dataset.with_format("arrow", columns=form["columns"])[:]
    columns = dict(zip(table.schema.names, table.columns, strict=True))
    for name in columns:
        shown, kinds = dataset.select_columns([name]), _decoders(dataset.features[name])
        if kinds == {"Json"} or kinds == {"matrix"}:
            shown = shown.with_format(None if kinds == {"Json"} else "numpy")
        if kinds:
            columns[name] = shown[:][name]
    return columns


def _decoders(feature: Any) -> set[str]:
    """The names of the features, inside this one too, whose values are not what is stored."""
    if isinstance(feature, Mapping):
        return set().union(*map(_decoders, feature.values()))
    if isinstance(feature, (list, tuple)):
        return set().union(*map(_decoders, feature))
    if hasattr(feature, "decode_example"):
        return {type(feature).__name__}
    if hasattr(feature, "feature"):
        return _decoders(feature.feature)
    return {"matrix"} if hasattr(feature, "shape") else set()


def _columns_of_rows(where: str, rows: Sequence[Any], num_samples: int) -> list[tuple[str, list[Any]]]:
    if len(rows) != num_samples:
        raise InvalidRequestError(
            f"{where} refused: fields are a list of {len(rows)} rows. Expected {num_samples}, one per sample id."
        )
    names: list[str] = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidTypeError(
                f"{where} refused: fields are a list, but row {number} is a {type(row).__name__}. Expected a dict of "
                "one value per field.",
                hint="Write {'name': values} for one column.",
            )
        keys = list(row.keys())
        names = keys if number == 0 else names
        if keys != names and set(keys) != set(names):
            lacks, has = [name for name in names if name not in keys], [name for name in keys if name not in names]
            difference = (
                f"lacks {preview(lacks)}, which row 0 has" if lacks else f"has {preview(has)}, which row 0 lacks"
            )
            raise InvalidRequestError(
                f"{where} refused: row {number} {difference}. Expected the same keys in every row.",
                hint="Write None where a row has no object, and a list or tensor of length 0 where it has no numbers.",
            )
    return [(name, [row[name] for row in rows]) for name in names]


def _is_a(value: object, module: str, *names: str) -> bool:
    """Whether a value is of one of the classes, or of a class derived from them. Imports nothing."""
    return any(kind.__module__.startswith(module) and kind.__name__ in names for kind in type(value).__mro__)


def column_of_arrow(what: str, column: Any, metadata: Any = None) -> Any:
    """The column that an Arrow array stands for, by `codec.arrow`."""
    from dataplane_core.codec import arrow  # which imports pyarrow: whoever has a column of Arrow has it

    arrays = arrow.arrays_of(what, column, metadata)
    if not isinstance(arrays, tuple):
        return _column(what, arrays)
    cells, lengths = arrays
    return dense_or_ragged(Ragged(_tensor_of(what, cells), offsets_of(torch.tensor(lengths, device="cpu"))))


# --- lists and arrays -------------------------------------------------------------------------------------------------


def column_of_list(what: str, items: Sequence[Any]) -> Any:
    """The column that a list (or tuple) stands for, as the contract says."""
    kinds = set(map(type, items))
    if not kinds <= _NUMBERS | _LISTS and _any_of_numpy(kinds):
        items = _plain(items)
        kinds = set(map(type, items))
    if kinds and kinds <= _NUMBERS:
        return torch.from_numpy(_numbers(what, items, kinds))
    if kinds and kinds <= _LISTS:
        inner = set(map(type, chain.from_iterable(items)))
        if not inner <= _NUMBERS and _any_of_numpy(inner):
            items = [_plain(row) for row in items]
            inner = set(map(type, chain.from_iterable(items)))
        if inner and inner <= _NUMBERS:
            values = torch.from_numpy(_numbers(what, list(chain.from_iterable(items)), inner))
            return dense_or_ragged(Ragged(values, offsets_of(list(map(len, items)))))
        if not inner:
            return EmptyLists(items)
    if kinds and all(issubclass(kind, _TENSORS) for kind in kinds):
        return _column_of_tensors(what, items)
    _refuse_near_numbers(what, items)
    return object_column(items)


def list_as(items: Sequence[Any], spec: FieldSpec) -> Any:
    """A list as the column of a field of which more is known than the list itself says. None: it does not fit."""
    items = _plain(items)
    kinds = set(map(type, items))
    if spec.kind == "object":
        return None if any(issubclass(kind, _TENSORS) for kind in kinds) else object_column(items)
    if spec.rank == 0:
        return _tensor_as(items, spec) if kinds <= _NUMBERS else None
    if not kinds <= _LISTS or spec.rank > 1:
        return None
    values = _tensor_as(_plain(chain.from_iterable(items)), spec)
    return None if values is None else dense_or_ragged(Ragged(values, offsets_of(list(map(len, items)))))


def misfit_of(items: Sequence[Any], spec: FieldSpec) -> str:
    """The first row of a list that does not fit a field, for a message."""
    row = next((row for row, item in enumerate(items) if list_as([item], spec) is None), 0)
    return f"row {row}, {reprlib.repr(*_plain(items[row : row + 1]))}, does not"


def _tensor_as(numbers: Sequence[Any], spec: FieldSpec) -> torch.Tensor | None:
    """Numbers, one after the other, in the dtype of a field. None: it does not hold them."""
    dtype, kinds = spec.torch_dtype, set(map(type, numbers))
    is_float = dtype.is_floating_point or dtype.is_complex
    if not kinds <= ({int, float} if is_float else {bool} if dtype == torch.bool else {int}):
        return None
    most = _EXACT_IN_FLOAT64 if float in kinds else (1 << 63) - 1
    if any(type(number) is int and abs(number) > most for number in numbers):
        return None
    exact = torch.tensor(numbers, dtype=torch.float64 if float in kinds else torch.int64, device="cpu")
    held = exact.to(dtype)
    back = (held.real if dtype.is_complex else held).to(exact.dtype)
    whole = torch.tensor([type(number) is int for number in numbers], dtype=torch.bool, device="cpu")
    lost = (back != exact) & (whole | exact.isfinite() & ~back.isfinite())
    return None if lost.any() else held


def column_of_array(what: str, array: np.ndarray[Any, Any]) -> Any:
    """The column that an array stands for, as the contract says. A tensor aliases it if it can, read-only or not."""
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
        large = [number for number in numbers if type(number) is int and abs(number) > EXACT_IN_FLOAT32]
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
    # `torch.Tensor.nbytes` raises for some that are not carried
    if sum(row.numel() * row.element_size() for row in rows) >= LARGE_CELL_BYTES * len(rows):
        return rows  # in their own memory, to find equal ones
    return dense_or_ragged(rows.joined(what))


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
        fault = f"holds None among numbers (row {row})"
    elif {type(item) in _LISTS for item in items} == {True, False}:
        fault = "holds numbers in some rows and lists of numbers in others"
    else:
        fault = "holds lists of numbers nested more than one deep"
    raise InvalidTypeError(f"{what} {fault}. Expected a number per row, or a list of numbers per row.", hint=_HINT)


def _leaf_kinds(items: Iterable[Any], depth: int = 0) -> set[type]:
    """The types of all values in nested lists. Empty lists add none."""
    kinds = set(map(type, items))
    if not kinds & _LISTS or depth > MAX_DEPTH:
        return kinds
    nested = chain.from_iterable(item for item in items if type(item) in _LISTS)
    return kinds - _LISTS | _leaf_kinds(list(nested), depth + 1)
