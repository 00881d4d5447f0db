"""Columns as frames and back, as the codec makes and reads them on a wire of bytes."""

import torch

from dataplane_core.codec import decode_columns, dense_or_jagged, encode_columns, num_rows
from dataplane_core.codec.cells import KIND_OBJECT, unframe_rows
from dataplane_core.codec.rows import TensorRows, object_column
from dataplane_core.spec import FieldSpec, WireFormat

FRAMES = WireFormat(bytes=True)


def frame_column(column):
    """The frames of a tensor, of a list of row tensors, or of a list of items."""
    if isinstance(column, list):
        is_tensors = all(isinstance(row, torch.Tensor) for row in column)
        column = TensorRows(column) if is_tensors else object_column(column)
    return encode_columns({"x": column}, num_rows(column), FRAMES)[0]["x"]


def frame_cell(cell):
    """One cell as a frame."""
    return bytes(frame_column([cell])[0])


def unframe_column(frames, spec=None):
    """A tensor, or a list of items, of a spec or of what the frames say."""
    kind, rows = unframe_rows(frames)
    if kind == KIND_OBJECT:
        return decode_columns({"x": frames}, {"x": FieldSpec.of_objects()}, len(frames), FRAMES)["x"].tolist()
    if spec is not None:
        return decode_columns({"x": frames}, {"x": spec}, len(frames), FRAMES)["x"]
    return rows if isinstance(rows, torch.Tensor) else dense_or_jagged(rows)


def unframe_cell(frame):
    return unframe_column([frame])[0]
