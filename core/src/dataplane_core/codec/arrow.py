"""Arrow columns as columns, without a copy where Arrow's memory can be a tensor's. Imports pyarrow when it is called.

Shape legend: ``N`` rows, ``T`` elements of all rows together, ``L`` a row's own length.
"""

from __future__ import annotations

from typing import Any

import torch

from dataplane_core.codec.lists import column_of_array, column_of_list
from dataplane_core.codec.tensors import Ragged, dense_or_jagged, offsets_of
from dataplane_core.errors import InvalidTypeError

__all__ = ["column_of_arrow"]


def column_of_arrow(what: str, column: Any) -> Any:
    """The column that an Arrow array (or chunked array) of N rows stands for.

    - Numbers: a tensor (N,) of their dtype. Lists of numbers: a tensor (N, L) if all rows are equally long, else one
      jagged nested tensor. Lists may hold lists of a fixed size, which are trailing dims. Values of one chunk are not
      copied; chunks are joined first. Bools have one bit in Arrow, so they are copied.
    - Dictionaries and run-end encoded arrays: what their values are. Extension types: what they are stored as.
    - Anything else (strings, binary, structs, lists of them): an object per row, by `column_of_list`.

    Raises:
        InvalidTypeError: A column of numbers has nulls, or holds times or decimals.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(column, pa.ExtensionArray):
        return column_of_arrow(what, column.storage)
    if pa.types.is_dictionary(column.type):
        return column_of_arrow(what, column.dictionary_decode())
    kinds = [column.type]  # of the column, and of what its lists hold
    while _is_list(kinds[-1]) and (len(kinds) == 1 or pa.types.is_fixed_size_list(kinds[-1])):
        kinds.append(kinds[-1].value_type)
    if not (pa.types.is_integer(kinds[-1]) or pa.types.is_floating(kinds[-1]) or pa.types.is_boolean(kinds[-1])):
        if pa.types.is_temporal(kinds[-1]) or pa.types.is_decimal(kinds[-1]):
            raise InvalidTypeError(
                f"{what} is an Arrow column of {column.type}, which torch lacks.",
                hint="Cast it: column.cast(pyarrow.int64()), or to pyarrow.float64() or pyarrow.string().",
            )
        return column_of_list(what, column.to_pylist())
    cells = column
    for _ in kinds[1:]:
        _refuse_nulls(what, cells)
        cells = cells.flatten()
    _refuse_nulls(what, cells)
    values = column_of_array(what, cells.to_numpy(zero_copy_only=False))
    if len(kinds) == 1:
        return values
    trailing = [kind.list_size for kind in kinds[1:-1]]
    if pa.types.is_fixed_size_list(column.type):
        return values.view(len(column), column.type.list_size, *trailing)
    offsets = offsets_of(torch.tensor(pc.list_value_length(column).to_numpy(), dtype=torch.int64, device="cpu"))
    return dense_or_jagged(Ragged(values.view(int(offsets[-1]), *trailing), offsets))


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    kinds = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)
    return isinstance(kind, kinds)


def _refuse_nulls(what: str, cells: Any) -> None:
    if cells.null_count:
        raise InvalidTypeError(
            f"{what} is an Arrow column of numbers with nulls: {cells.null_count} of {len(cells)} "
            f"{'lists' if _is_list(cells.type) else 'values'}, the first at {cells.is_null().index(True)}. Expected a "
            "value everywhere.",
            hint="Write column.fill_null(value), or table.drop_null() without these rows and their sample ids, or "
            "NonTensorStack(*column.to_pylist()) for one object per sample.",
        )
