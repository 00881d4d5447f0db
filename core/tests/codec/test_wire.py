"""What a backend is handed, what a trainer may hand in, and which replies of a backend are refused."""

import warnings

import numpy as np
import pytest
import torch
from framing import FRAMES, frame_column
from tensordict import NonTensorData, NonTensorStack, TensorDict
from token_rows import jagged
from torch.testing._internal.two_tensor import TwoTensor

from dataplane_core.codec import as_columns, decode_columns, encode_columns, encode_item, num_rows
from dataplane_core.errors import BackendError, FrameError, InvalidRequestError, InvalidTypeError, SchemaMismatchError
from dataplane_core.spec import FieldSpec, Ragged, WireFormat
from dataplane_testkit._columns import check_column

JAGGED, NATIVE, PROMOTED = WireFormat(), WireFormat(objects="native"), WireFormat(promote_1d=True)
FLOATS = FieldSpec.of_cells(torch.float32, (0,))
DEEP = FieldSpec.of_cells(torch.float32, (0, 2))
SCALARS = FieldSpec.of_cells(torch.float32, ())
OBJECTS = FieldSpec.of_objects()


def ragged(lengths, *trailing):
    column = jagged(lengths, *trailing)
    return Ragged(column.values(), column.offsets())


def quietly(make):
    """torch warns of nested tensors that are strided, of csr and of quantised tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


# --- what a backend is handed -----------------------------------------------------------------------------------------


def encoded(column, wire, **kwargs):
    columns, _ = encode_columns({"x": column}, num_rows(column), wire, **kwargs)
    return columns["x"]


def test_rows_travel_dense_if_they_are_equally_long_and_else_end_to_end():
    column = jagged([3, 0, 2], 4)
    sent = encoded(column, JAGGED)
    assert (type(sent), sent.values.data_ptr()) == (Ragged, column.values().data_ptr())
    assert sent.offsets.tolist() == [0, 3, 3, 5]
    assert encoded(jagged([3, 3]), JAGGED).shape == (2, 3)
    assert [encoded(torch.zeros(3, *cell), PROMOTED).shape for cell in ((), (1,))] == [(3, 1)] * 2


def test_objects_travel_as_items_or_as_bytes_and_bytes_wires_get_one_frame_per_cell():
    stack = NonTensorStack("x", [1, 2])
    assert encoded(stack, NATIVE) == ["x", [1, 2]]
    sent = encoded(stack, JAGGED)
    assert (bytes(sent.values), sent.offsets.tolist()) == (encode_item("x") + encode_item([1, 2]), [0, 2, 5])
    for column in (torch.zeros(2), jagged([2, 0]), stack):
        frames = encoded(column, FRAMES)
        assert len(frames) == 2
        assert all(isinstance(frame, (bytes, bytearray, memoryview)) for frame in frames)


# --- what is taken ----------------------------------------------------------------------------------------------------

VALUES, OFFSETS = torch.arange(20.0).view(10, 2), torch.tensor([0, 4, 5, 10])
CONJUGATE = torch.tensor([1 + 2j, 3 - 4j, -5j]).conj()


def nested(values=VALUES, offsets=OFFSETS, **kwargs):
    return torch.nested.nested_tensor_from_jagged(values, offsets, **kwargs)


def strided(*rows):
    return quietly(lambda: torch.nested.nested_tensor(list(rows), layout=torch.strided))


TENSORS = {
    "transposed": torch.arange(24.0).view(8, 3).t(),
    "permuted": torch.arange(24.0).view(2, 3, 4).permute(1, 2, 0),
    "strided": torch.arange(48.0).view(3, 16)[:, ::2],
    "flipped": torch.arange(24.0).view(3, 8).flip(1),
    "expanded": torch.arange(3.0).view(3, 1).expand(3, 5),
    "expanded rows": torch.arange(5.0).expand(3, 5),
    "expanded scalar": torch.tensor(2.0).expand(3),
    "with gradient": torch.ones(3, 2, requires_grad=True),
    "with graph": torch.ones(3, 2, requires_grad=True) * 2,
    "a parameter": torch.nn.Parameter(torch.ones(3, 2)),
    "channels last": torch.arange(24.0).view(3, 2, 2, 2).to(memory_format=torch.channels_last),
    "offset": torch.arange(25, dtype=torch.uint8)[1:].view(3, 8),
    "odd strides of a size 1": torch.arange(6.0).view(3, 2)[:, :1],
    "odd strides of one row": torch.as_strided(torch.arange(30.0), (3, 1, 1), (1, 7, 7)),
    "conjugate": CONJUGATE,
    "negative": CONJUGATE.imag,
    "jagged": nested(),
    "jagged with int32 offsets": nested(offsets=OFFSETS.to(torch.int32)),
    "jagged with holes": nested(lengths=torch.tensor([2, 0, 5])),
    "jagged, equal but for holes": nested(lengths=torch.tensor([1, 1, 1])),
    "jagged, narrowed": torch.nested.narrow(
        torch.arange(24.0).view(3, 8), 1, torch.tensor([0, 1, 2]), torch.tensor([3, 2, 4]), layout=torch.jagged
    ),
    "jagged, values not contiguous": nested(torch.arange(20.0).view(2, 10).t()),
    "jagged, trailing dims transposed": nested(torch.arange(60.0).view(10, 2, 3)).transpose(2, 3),
    "jagged with gradient": nested(VALUES.clone().requires_grad_()),
    "jagged on dim 2, equal rows": nested(torch.arange(18.0).view(9, 2), torch.tensor([0, 3, 6, 9])).transpose(1, 2),
    "nested and strided": strided(torch.ones(2, 3), torch.ones(0, 3), torch.ones(4, 3)),
    "nested and strided, equal rows": strided(*[torch.ones(2, 3)] * 3),
    "nested and strided scalars": strided(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)),
    "nested and strided, transposed": strided(*[torch.arange(6.0).view(2, 3)] * 3).transpose(1, 2),
}


@pytest.mark.parametrize("wire", [JAGGED, FRAMES, PROMOTED], ids=WireFormat.describe)
@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_of_any_kind_are_taken(kind, wire):
    column = TENSORS[kind]
    rows = [row.detach().resolve_conj().resolve_neg() for row in column.unbind()]
    columns, specs = encode_columns({"x": column}, 3, wire)
    found = decode_columns(columns, specs, 3, wire)["x"]
    check_column(found, rows)
    assert not found.is_nested or found.offsets().dtype == torch.int64


# --- what is refused --------------------------------------------------------------------------------------------------

#: What -> column, error, what it names beside the field. The put is of 3 rows.
REFUSED = {
    **{
        f"too many rows of a {type(column).__name__}": (column, InvalidRequestError, "511 rows. Expected 3")
        for column in (torch.zeros(511, 2), NonTensorStack(*["x"] * 511), np.array(["x"] * 511, dtype=object))
    },
    "too many jagged rows": (nested(torch.zeros(511), torch.arange(512)), InvalidRequestError, "511 rows. Expected 3"),
    "a scalar tensor": (torch.tensor(1.0), InvalidRequestError, "scalar tensor. Expected 3 rows"),
    **{
        f"no tensor: {leaf!r}": (leaf, InvalidTypeError, "non-tensor leaf")
        for leaf in (
            *("text", 3, None, {"a": 1}, {1, 2, 3}, np.zeros(3), np.array(["a", "b", "c"])),
            np.empty((3, 1), dtype=object),
            TensorDict({"y": torch.zeros(3)}, batch_size=[3]),
            *(NonTensorData(one, batch_size=[3]) for one in ("one", None)),  # one item for all
        )
    },
    **{
        f"{kind}": (quietly(make), InvalidTypeError, kind)
        for kind, make in (
            ("sparse tensor", lambda: torch.eye(3).to_sparse()),
            ("a sparse tensor", lambda: torch.eye(3).to_sparse_csr()),
            ("quantised tensor", lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8)),
            ("torch.bits8", lambda: torch.zeros(3).byte().view(torch.bits8)),
            ("full_tensor", lambda: TwoTensor(torch.zeros(3), torch.zeros(3))),  # a wrapper
            ("offsets do not lie within its 4 values", lambda: nested(torch.arange(4.0), torch.tensor([0, 1, 2, 9]))),
        )
    },
    "rows that differ in another dim than their first": (
        nested().transpose(1, 2),
        SchemaMismatchError,
        "row 0 is float32 (2, 4), row 1 is float32 (2, 1)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_carried_is_refused_by_field(what):
    column, error, named = REFUSED[what]
    with pytest.raises(error) as caught:
        encode_columns({"good": torch.zeros(3), "x": column}, 3, JAGGED)
    assert "'x'" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_among_the_rows_of_a_list_are_refused(layout):
    row = quietly(lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=layout))
    with pytest.raises(InvalidTypeError, match="'x' is a nested tensor"):
        as_columns("put_samples", {"x": [torch.zeros(2), row]}, 2)


@pytest.mark.parametrize("wire", [JAGGED, NATIVE, FRAMES], ids=WireFormat.describe)
def test_an_object_outside_the_closed_set_names_field_row_and_type_and_may_be_pickled(wire):
    fields = {"x": NonTensorStack("fine", {"deep": [1, (2, 3)]})}
    with pytest.raises(InvalidTypeError, match=r"'x', row 1 at \['deep'\]\[1\].*of type tuple"):
        encode_columns(fields, 2, wire)
    columns, specs = encode_columns(fields, 2, wire, allow_pickle=True)
    assert decode_columns(columns, specs, 2, wire, allow_pickle=True)["x"].tolist() == ["fine", {"deep": [1, (2, 3)]}]
    if wire is not NATIVE:
        with pytest.raises(FrameError, match="pickled"):
            decode_columns(columns, specs, 2, wire)


# --- replies ----------------------------------------------------------------------------------------------------------


def of_offsets(*cuts):
    return Ragged(torch.zeros(6), torch.tensor(cuts))


#: Reply, spec, wire. Three rows were asked for.
WRONG_REPLIES = [
    # fewer or more rows
    (torch.zeros(2), SCALARS, JAGGED),
    (torch.zeros(4, 2), FLOATS, JAGGED),
    (ragged([1, 2]), FLOATS, JAGGED),
    (["a"], OBJECTS, NATIVE),
    (torch.zeros(2, 5, dtype=torch.uint8), OBJECTS, JAGGED),
    (frame_column(torch.zeros(2)), SCALARS, FRAMES),
    (frame_column(["a"]), OBJECTS, FRAMES),
    # another form
    *((column, FLOATS, JAGGED) for column in (jagged([1, 2, 3]), [torch.zeros(1)] * 3, [b"a"] * 3, None)),
    *((column, FLOATS, FRAMES) for column in ([None] * 3, torch.zeros(3, 2))),
    *((column, OBJECTS, FRAMES) for column in (["a", "b", "c"], None)),
    *((column, OBJECTS, NATIVE) for column in (None, "abc", torch.zeros(3))),
    # offsets that are none of these values
    *((of_offsets(*cuts), FLOATS, JAGGED) for cuts in ([0, 1, 3, 5], [1, 2, 3, 6], [0, 4, 2, 6], [0.0, 1.0, 3.0, 6.0])),
    (Ragged(torch.tensor(1.0), torch.tensor([0, 1, 1, 1])), FLOATS, JAGGED),
    # other cells than the spec says
    *((column, SCALARS, JAGGED) for column in (torch.zeros(3).double(), torch.zeros(3, 1), ragged([1, 2, 3]))),
    *((column, FLOATS, JAGGED) for column in (torch.zeros(3), torch.tensor(1.0))),
    *((column, DEEP, JAGGED) for column in (torch.zeros(3, 2, 3), ragged([1, 2, 3], 3), ragged([1, 2, 3]))),
    (torch.zeros(3, 2), SCALARS, PROMOTED),
    (torch.zeros(3, 2), OBJECTS, JAGGED),
    (torch.zeros(3, 2, device="meta"), FLOATS, JAGGED),
    (frame_column(torch.zeros(3)), FLOATS, FRAMES),
    (frame_column(torch.zeros(3)), OBJECTS, FRAMES),
    (frame_column(torch.zeros(3, 2)), DEEP, FRAMES),
    (frame_column(["a", "b", "c"]), SCALARS, FRAMES),
    # damaged, or of a dtype that nobody knows
    ([*frame_column(torch.zeros(2))[:1], b"abc", b"abc"], SCALARS, FRAMES),
    (torch.full((3, 2), 0xC1, dtype=torch.uint8), OBJECTS, JAGGED),  # a byte that msgpack never uses
    (torch.zeros(3), FieldSpec("tensor", "float99"), JAGGED),
]


@pytest.mark.parametrize(("column", "spec", "wire"), WRONG_REPLIES)
def test_a_reply_that_is_not_what_the_spec_says_is_a_backend_error(column, spec, wire):
    with pytest.raises((BackendError, FrameError), match=r"'x'|float99"):
        decode_columns({"x": column}, {"x": spec}, 3, wire)
