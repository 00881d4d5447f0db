"""Converts columns to a backend's wire format and back, bit for bit: dtypes, ragged rows, objects, framed bytes.

The client encodes every put and decodes every read here. Backends that store bytes use its frames.
"""

from dataplane_core import _compiler_marks as _compiler_marks  # before tensordict
from dataplane_core.codec.cells import decode_item, encode_item, join_row, plain, split_rows
from dataplane_core.codec.compact import narrowed, widened
from dataplane_core.codec.inputs import as_column, as_columns
from dataplane_core.codec.rows import (
    Columns,
    Piece,
    copy_column,
    join_parts,
    merge_pieces,
    num_rows,
    object_column,
    take_rows,
    tensor_columns,
)
from dataplane_core.codec.tensors import (
    ALL_DTYPES,
    DTYPE_CODES,
    DTYPE_OF_CODE,
    byte_array,
    dense_or_jagged,
    empty_tensor,
    host_tensor,
    jagged_parts,
    ragged_of_nested,
)
from dataplane_core.codec.wire import cell_digests, column_digests, decode_columns, encode_columns, scalar_of_digest

__all__ = [
    "ALL_DTYPES",
    "DTYPE_CODES",
    "DTYPE_OF_CODE",
    "Columns",
    "Piece",
    "as_column",
    "as_columns",
    "byte_array",
    "cell_digests",
    "column_digests",
    "copy_column",
    "decode_columns",
    "decode_item",
    "dense_or_jagged",
    "empty_tensor",
    "encode_columns",
    "encode_item",
    "host_tensor",
    "jagged_parts",
    "join_parts",
    "join_row",
    "merge_pieces",
    "narrowed",
    "num_rows",
    "object_column",
    "plain",
    "ragged_of_nested",
    "scalar_of_digest",
    "split_rows",
    "take_rows",
    "tensor_columns",
    "widened",
]
