"""Converts columns to a backend's wire format and back, bit for bit: dtypes, ragged rows, objects, framed bytes.

The client encodes every put and decodes every read here. Backends that store bytes use its frames.
"""

from dataplane_core import _compiler_marks as _compiler_marks  # before tensordict
from dataplane_core.codec.digests import cell_digests, scalar_of_digest
from dataplane_core.codec.frames import join_row, join_rows, split_rows
from dataplane_core.codec.inputs import as_column, as_columns
from dataplane_core.codec.lists import column_of_array, list_as, misfit_of
from dataplane_core.codec.narrow import is_narrow, narrowed, widened
from dataplane_core.codec.objects import copy_item, decode_item, encode_item
from dataplane_core.codec.pieces import Piece, StoredColumn, merge_pieces, rows_in_order
from dataplane_core.codec.python_values import plain
from dataplane_core.codec.rows import (
    Columns,
    EmptyLists,
    TensorRows,
    empty_columns,
    join_parts,
    num_rows,
    object_column,
    take_rows,
)
from dataplane_core.codec.shared import spread
from dataplane_core.codec.sizes import cell_nbytes, row_nbytes
from dataplane_core.codec.tensors import (
    ALL_DTYPES,
    DTYPE_CODES,
    DTYPE_OF_CODE,
    JaggedColumns,
    Ragged,
    bounds_of,
    byte_array,
    byte_slices,
    carrier,
    dense_or_jagged,
    empty_tensor,
    gather_rows,
    host_tensor,
    is_jagged,
    jagged_parts,
    offsets_of,
    pad_rows,
    ragged_of_dense,
    ragged_of_nested,
    ragged_of_rows,
    to_nested,
)
from dataplane_core.codec.wire import decode_columns, encode_columns

__all__ = [
    "ALL_DTYPES",
    "DTYPE_CODES",
    "DTYPE_OF_CODE",
    "Columns",
    "EmptyLists",
    "JaggedColumns",
    "Piece",
    "Ragged",
    "StoredColumn",
    "TensorRows",
    "as_column",
    "as_columns",
    "bounds_of",
    "byte_array",
    "byte_slices",
    "carrier",
    "cell_digests",
    "cell_nbytes",
    "column_of_array",
    "copy_item",
    "decode_columns",
    "decode_item",
    "dense_or_jagged",
    "empty_columns",
    "empty_tensor",
    "encode_columns",
    "encode_item",
    "gather_rows",
    "host_tensor",
    "is_jagged",
    "is_narrow",
    "jagged_parts",
    "join_parts",
    "join_row",
    "join_rows",
    "list_as",
    "merge_pieces",
    "misfit_of",
    "narrowed",
    "num_rows",
    "object_column",
    "offsets_of",
    "pad_rows",
    "plain",
    "ragged_of_dense",
    "ragged_of_nested",
    "ragged_of_rows",
    "row_nbytes",
    "rows_in_order",
    "scalar_of_digest",
    "split_rows",
    "spread",
    "take_rows",
    "to_nested",
    "widened",
]
