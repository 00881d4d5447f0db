"""Every dtype, shape and container comes back bit for bit over every kind of wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from tensordict import NonTensorStack, TensorDict

from dataplane_core.codec import ALL_DTYPES, decode_columns, encode_columns
from dataplane_core.spec import WireFormat

WIRES = {
    "jagged": WireFormat(),
    "bytes": WireFormat(bytes=True),
    "rows": WireFormat(ragged="rows"),
    "native": WireFormat(objects="native"),
    "promoted": WireFormat(promote_1d=True),
    "no empty rows": WireFormat(zero_length_rows=False),
    "uint8 only": WireFormat(dtypes=frozenset({torch.uint8})),
    "everything": WireFormat(
        ragged="rows",
        promote_1d=True,
        zero_length_rows=False,
        dtypes=frozenset({torch.uint8, torch.int64, torch.float32}),
    ),
}
SHAPES = {
    "scalars": [()] * 4,
    "one wide": [(1,)] * 4,
    "dense": [(4,)] * 3,
    "dense, three dims": [(4, 2, 3)] * 3,
    "ragged": [(3,), (1,), (4,), (1,), (5,)],
    "ragged, three dims": [(3, 2, 3), (1, 2, 3), (4, 2, 3)],
    "ragged, one wide": [(3, 1), (1, 1)],
    "empty rows": [(0,), (3,), (0,)],
    "only empty rows": [(0,)] * 3,
    "no content": [(2, 0), (0, 0), (1, 0)],
    "no content, dense": [(2, 0, 3)] * 3,
    "one row": [(3,)],
    "one scalar": [()],
}
DTYPES = sorted(ALL_DTYPES, key=str)


def column_of(rows):
    """Dense or jagged, made without the code under test."""
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows)
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES.keys())
def test_every_shape_comes_back_bit_for_bit(wire, dtype, random_cell, assert_rows):
    for name, shapes in SHAPES.items():
        rows = [random_cell(shape, dtype, seed) for seed, shape in enumerate(shapes)]
        fields = TensorDict({name: column_of(rows)}, batch_size=[len(rows)])
        columns, specs = encode_columns(fields, len(rows), wire)
        assert_rows(decode_columns(columns, specs, len(rows), wire)[name], rows)


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES.keys())
def test_specs_say_what_the_caller_wrote_not_what_travels(wire, random_cell):
    fields = {
        "scalar": random_cell((4,), torch.bfloat16),
        "wide": random_cell((4, 1), torch.bfloat16),
        "deep": random_cell((4, 5, 2, 3), torch.bfloat16),
        "object": NonTensorStack("a", "b", "c", "d"),
    }
    _, specs = encode_columns(fields, 4, wire)
    assert [spec.to_text() for spec in specs.values()] == [
        "tensor:bfloat16:0:",
        "tensor:bfloat16:1:",
        "tensor:bfloat16:3:2,3",
        "object::0:",
    ]


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES.keys())
def test_many_columns_travel_together(wire, random_cell, assert_rows):
    lengths = [4, 1, 3]
    rows = {
        "ids": [random_cell((length,), torch.int64, length) for length in lengths],
        "logprobs": [random_cell((length,), torch.float32, length) for length in lengths],
        "reward": [random_cell((), torch.float16, length) for length in lengths],
    }
    fields = TensorDict({name: column_of(each) for name, each in rows.items()}, batch_size=[3])
    fields["texts"] = NonTensorStack("x", {"y": [1, None]}, b"z")
    columns, specs = encode_columns(fields, 3, wire)
    raised = decode_columns(columns, specs, 3, wire)
    assert list(raised) == ["ids", "logprobs", "reward", "texts"]
    for name, each in rows.items():
        assert_rows(raised[name], each)
    assert raised["texts"].tolist() == ["x", {"y": [1, None]}, b"z"]


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES.keys())
def test_jagged_columns_of_equal_lengths_can_be_combined(wire):
    lengths = torch.tensor([0, 4, 5, 8])
    one = torch.nested.nested_tensor_from_jagged(torch.arange(8.0), lengths)
    two = torch.nested.nested_tensor_from_jagged(torch.arange(8.0), lengths.clone())
    columns, specs = encode_columns({"one": one, "two": two}, 3, wire)
    raised = decode_columns(columns, specs, 3, wire)
    total = raised["one"] + raised["two"]
    assert total.values().tolist() == (torch.arange(8.0) * 2).tolist()


@st.composite
def row_shapes(draw):
    rank = draw(st.integers(0, 3))
    count = draw(st.integers(1, 6))
    if rank == 0:
        return [()] * count
    trailing = tuple(draw(st.lists(st.integers(0, 3), min_size=rank - 1, max_size=rank - 1)))
    return [(draw(st.integers(0, 5)), *trailing) for _ in range(count)]


@st.composite
def wires(draw):
    dtypes = draw(st.frozensets(st.sampled_from(DTYPES)))
    return WireFormat(
        bytes=draw(st.booleans()),
        ragged=draw(st.sampled_from(["jagged", "rows"])),
        promote_1d=draw(st.booleans()),
        objects=draw(st.sampled_from(["native", "encoded"])),
        dtypes=dtypes | {torch.uint8},
        zero_length_rows=draw(st.booleans()),
    )


@given(shapes=row_shapes(), wire=wires(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_any_column_survives_any_wire(shapes, wire, dtype, seed, random_cell, assert_rows):
    rows = [random_cell(shape, dtype, seed + number) for number, shape in enumerate(shapes)]
    columns, specs = encode_columns({"x": column_of(rows)}, len(rows), wire)
    assert_rows(decode_columns(columns, specs, len(rows), wire)["x"], rows)
