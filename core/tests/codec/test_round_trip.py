"""Every dtype, shape and container comes back bit for bit; a list becomes the type that its field is known to hold."""

import pytest
import torch
from framing import frame_cell, frame_column, unframe_cell, unframe_column

from dataplane_core.codec import decode_item, encode_item
from dataplane_core.codec.cells import copy_item
from dataplane_core.codec.inputs import list_as
from dataplane_core.spec import FieldSpec
from dataplane_testkit._columns import DTYPES, bits, check_column, random_cells

SHAPES = {
    "scalars": [()] * 4,
    "one wide": [(1,)] * 4,
    "dense": [(4,)] * 3,
    "dense and large": [(600, 2)] * 3,
    "dense, three dims": [(4, 2, 3)] * 3,
    "ragged": [(3,), (1,), (4,), (1,), (5,)],
    "ragged and large": [(700,), (0,), (2000,)],
    "ragged, three dims": [(3, 2, 3), (1, 2, 3), (4, 2, 3)],
    "ragged, one wide": [(3, 1), (1, 1)],
    "empty rows": [(0,), (3,), (0,)],
    "only empty rows": [(0,)] * 3,
    "no content": [(2, 0), (0, 0), (1, 0)],
    "no content, dense": [(2, 0, 3)] * 3,
    "odd shape": [(1, 2, 1, 2, 1)],
    "one row": [(3,)],
    "one scalar": [()],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape_comes_back_in_frames_and_in_items(dtype):
    for shapes in SHAPES.values():
        rows = [random_cells(dtype, shape, seed) for seed, shape in enumerate(shapes)]
        frames = frame_column(rows)
        assert [bytes(each) for each in frames] == [frame_cell(row) for row in rows]
        for believed in (FieldSpec.of_cells(dtype, shapes[0]), None):
            check_column(unframe_column(frames, believed), rows)
        for kind in (bytes, bytearray, memoryview):
            check_column(unframe_cell(kind(frames[0]))[None], rows[:1])
        for item in (decode_item(encode_item({"t": rows})), copy_item({"t": rows})):
            for found, row in zip(item["t"], rows, strict=True):
                assert (type(found), found.dtype, found.shape) == (torch.Tensor, dtype, row.shape)
                assert bits(found) == bits(row)
                assert found.numel() == 0 or found.data_ptr() != row.data_ptr()


# --- lists that fit a field -------------------------------------------------------------------------------------------

#: A dtype, the dims of a cell, lists that fit a field of it, and lists that do not: an int would change, or a float
#: become infinite. What the kit does not put.
FORMS = [
    (torch.float64, (), [[0.1, 2]], [[1 << 64], [2**53 + 1, 0.5]]),
    (torch.float32, (), [[1, 2]], [[1e300], [[1]]]),
    (torch.float16, (), [[float("inf"), 1]], []),
    (torch.complex64, (), [[0.5, 1]], []),
    (torch.bool, (), [[True]], [[1]]),
    (torch.uint8, (0,), [[[1, 255]]], [[[256]], [[-1]], [1]]),
    (torch.int64, (), [[1]], [[1, 0.5], [True, 1], ["a"]]),
]


@pytest.mark.parametrize(("dtype", "cell", "fitting", "others"), FORMS, ids=str)
def test_numbers_fit_or_not(dtype, cell, fitting, others):
    known = FieldSpec.of_cells(dtype, cell)
    for items in fitting:
        found = list_as(items, known)
        assert found.dtype == dtype
        assert found.equal(torch.tensor(items, dtype=dtype))
    assert [list_as(items, known) for items in others] == [None] * len(others)
    assert list_as([torch.ones(1)], FieldSpec.of_objects()) is None
