"""Arrow columns as arrays, without a copy where Arrow's memory can be numpy's. It imports pyarrow: import it late."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dataplane_core.errors import InvalidTypeError

#: Under this name, a column's schema keeps the name of an extension type that this process does not know.
_NAME: Final = b"ARROW:extension:name"
_LISTS: Final = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


def arrays_of(what: str, column: Any, metadata: Any = None) -> Any:
    """What an Arrow array (or chunked array) stands for, as the contract says: an array; for lists of numbers, the
    numbers of all rows and the rows' lengths; else a list of an object per row. ``metadata`` is the schema's."""
    if metadata and _NAME in metadata:
        raise InvalidTypeError(
            f"{what} is an Arrow column of the extension type '{metadata[_NAME].decode(errors='replace')}', which this "
            "process does not know.",
            hint="Import the package that defines it before the column is read, or write its values as a tensor.",
        )
    column = _joined(column)
    kind = innermost = column.type
    while isinstance(innermost, _LISTS):
        innermost = innermost.value_type
    if pa.types.is_temporal(innermost) or pa.types.is_decimal(innermost):
        raise InvalidTypeError(
            f"{what} is an Arrow column of {kind}, which torch lacks.",
            hint="Cast it: column.cast(pyarrow.int64()), or to pyarrow.float64() or pyarrow.string().",
        )
    if isinstance(column, pa.ExtensionArray):
        is_tensor = isinstance(column, pa.FixedShapeTensorArray)
        try:
            return column.to_numpy_ndarray() if is_tensor else column.to_numpy(zero_copy_only=False)
        except (ValueError, TypeError) as error:  # of Ray's tensors with nulls
            raise InvalidTypeError(
                f"{what} is an Arrow column of {kind}, of which there is no array: {error}.",
                hint="Write its values, of which none may be null, as a tensor, an array or a list.",
            ) from error
    if _is_number(kind):
        _refuse_nulls(what, column)
        return column.to_numpy(zero_copy_only=False)
    if not isinstance(kind, _LISTS) or not _has_one_shape(kind.value_type):
        return column.to_pylist()
    _refuse_nulls(what, column)
    cells = arrays_of(what, column.flatten())
    if pa.types.is_fixed_size_list(kind):
        return cells.reshape(len(column), kind.list_size, *cells.shape[1:])
    return cells, pc.list_value_length(column).to_numpy()


def _joined(column: Any) -> Any:
    """One array of plain values: chunks joined, dictionaries and runs decoded."""
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return _joined(column.dictionary_decode()) if pa.types.is_dictionary(column.type) else column


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _has_one_shape(kind: Any) -> bool:
    """Whether values of a type are numbers, or lists of one shape of them, so that lists of them can be joined."""
    return _has_one_shape(kind.value_type) if pa.types.is_fixed_size_list(kind) else _is_number(kind)


def _refuse_nulls(what: str, cells: Any) -> None:
    if cells.null_count:
        raise InvalidTypeError(
            f"{what} is an Arrow column of numbers with nulls: {cells.null_count} of {len(cells)} "
            f"{'lists' if isinstance(cells.type, _LISTS) else 'values'}, the first at {cells.is_null().index(True)}. "
            "Expected a value everywhere.",
            hint="Write column.fill_null(value), or table.drop_null() without these rows and their sample ids, or "
            "NonTensorStack(*column.to_pylist()) for one object per sample.",
        )
