"""Narrow integers: which dtype a column goes in, what it costs in bytes, and that it comes back as it was put."""

from dataclasses import replace

import pytest
import torch
from tensordict import NonTensorStack

from dataplane_core import WireFormat, connect
from dataplane_core.codec import (
    DTYPE_CODES,
    Columns,
    Piece,
    Ragged,
    cell_digests,
    decode_columns,
    encode_columns,
    merge_pieces,
    narrowed,
    offsets_of,
    widened,
)
from dataplane_core.codec.narrow import LEAST_BYTES, NARROWER
from dataplane_core.errors import BackendError, FrameError
from dataplane_core.spec import FieldSpec, SharedRows

FRAMES = WireFormat(bytes=True, shared_rows=True)
JAGGED = WireFormat(shared_rows=True, narrow=True)
ROWS = WireFormat(ragged="rows", promote_1d=True, zero_length_rows=False, narrow=True)
WIRES = pytest.mark.parametrize("wire", [FRAMES, JAGGED, ROWS], ids=["frames", "jagged", "rows"])
#: More elements than are looked at first, and than one part has.
MANY = 300_000
LIMITS = [
    (0, 127, torch.uint8),
    (0, 255, torch.uint8),
    (-1, 127, torch.int8),
    (-128, 0, torch.int8),
    (-1, 128, torch.int16),
    (-129, 0, torch.int16),
    (0, 256, torch.uint16),
    (0, 65_535, torch.uint16),
    (-32_768, 32_767, torch.int16),
    (-1, 32_768, torch.int32),
    (0, 65_536, torch.int32),
    (-(2**31), 2**31 - 1, torch.int32),
    (0, 2**31, torch.int64),
    (-(2**31) - 1, 0, torch.int64),
    (-(2**63), 2**63 - 1, torch.int64),
]


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def dtypes_of(column):
    """The dtypes in which cells were sent."""
    if isinstance(column, SharedRows):
        column = column.rows
    if isinstance(column, torch.Tensor):
        return {column.dtype}
    codes = {code: dtype for dtype, code in DTYPE_CODES.items()}
    return {row.dtype if isinstance(row, torch.Tensor) else codes[bytes(row[:6])[5]] for row in column}


@pytest.mark.parametrize(("low", "high", "dtype"), LIMITS)
@pytest.mark.parametrize("places", [(0, 1), (MANY - 2, MANY - 1), (MANY - 1, 0), (200_000, 5_000)], ids=str)
def test_the_narrowest_dtype_is_found_wherever_the_extremes_lie(low, high, dtype, places):
    values = torch.zeros(MANY, dtype=torch.int64)
    values[list(places)] = torch.tensor([low, high])
    found = narrowed(values)
    assert found.dtype == dtype
    assert torch.equal(widened(found, torch.int64), values)
    assert (found is values) == (dtype == torch.int64)


@pytest.mark.parametrize("wide", [torch.int16, torch.int32, torch.int64], ids=str)
def test_a_column_is_never_widened_or_cut_off(wide):
    info = torch.iinfo(wide)
    for low, high, dtype in LIMITS:
        if low < info.min or high > info.max:
            continue
        values = torch.full((LEAST_BYTES // wide.itemsize,), low, dtype=wide)
        values[-1] = high
        found = narrowed(values)
        assert found.dtype == (dtype if dtype in NARROWER[wide] else wide)
        assert torch.equal(widened(found, wide), values)


def test_a_width_grows_from_part_to_part():
    values = torch.zeros(1 << 20, dtype=torch.int64)
    for number, most in enumerate((1, 300, -5, 70_000)):
        values[number * 250_000 :] = most
    found = narrowed(values)
    assert found.dtype == torch.int32
    assert torch.equal(found.to(torch.int64), values)


@pytest.mark.parametrize(
    "column",
    [
        torch.zeros(LEAST_BYTES // 8 - 1, dtype=torch.int64),
        torch.zeros(MANY, dtype=torch.uint8),
        torch.zeros(MANY, dtype=torch.int8),
        torch.zeros(MANY, dtype=torch.bool),
        torch.zeros(MANY, dtype=torch.float64),
        torch.zeros(MANY, dtype=torch.uint64),
        torch.zeros(0, 3, dtype=torch.int64),
    ],
    ids=["small", "uint8", "int8", "bool", "float64", "uint64", "empty"],
)
def test_other_columns_stay_as_they_are(column):
    assert narrowed(column) is column


@WIRES
def test_puts_of_every_width_come_back_and_are_sent_narrow(wire):
    rows = [torch.arange(2 * length).view(-1, 2) % 100 for length in (3_000, 1, 2_999)]
    dense, scalars = torch.arange(12_000, dtype=torch.int32).view(3, 4_000), torch.zeros(MANY, dtype=torch.int64)
    columns, specs = encode_columns({"r": jagged(rows), "d": dense}, 3, wire)
    assert dtypes_of(columns["r"]) == {torch.uint8}
    assert dtypes_of(columns["d"]) == {torch.uint16}
    assert (specs["r"].dtype, specs["d"].dtype) == ("int64", "int32")
    found = decode_columns(columns, specs, 3, wire)
    assert found["r"].dtype == torch.int64
    assert all(map(torch.equal, found["r"].unbind(), rows))
    assert torch.equal(found["d"], dense)
    columns, specs = encode_columns({"s": scalars}, MANY, wire)
    assert dtypes_of(columns["s"]) == {torch.uint8}
    assert torch.equal(decode_columns(columns, specs, MANY, wire)["s"], scalars)


@WIRES
@pytest.mark.parametrize("narrow", [False, {"x": False}])
def test_a_column_may_say_that_it_is_not_narrowed(wire, narrow):
    columns, _ = encode_columns({name: torch.zeros(4, 1_000).long() for name in "xy"}, 4, wire, narrow=narrow)
    assert dtypes_of(columns["x"]) == {torch.int64}
    assert dtypes_of(columns["y"]) == ({torch.int64} if narrow is False else {torch.uint8})


def test_a_wire_of_tensors_gets_them_only_if_it_says_so():
    columns, _ = encode_columns({"x": torch.zeros(4, 1_000).long()}, 4, WireFormat())
    assert dtypes_of(columns["x"]) == {torch.int64}
    with pytest.raises(ValueError, match="narrow needs an engine with all dtypes"):
        WireFormat(narrow=True, dtypes=frozenset({torch.uint8}))


@pytest.mark.parametrize("wire", [FRAMES, ROWS], ids=["frames", "rows"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("trailing", [(), (2,)], ids=str)
def test_cells_of_several_widths_are_joined(wire, ragged, trailing):
    cells, column, specs = [], [], {}
    for low in (0, -1, 60_000, 1 << 20, 1 << 40):
        rows = [torch.full((2_100 + ragged * row, *trailing), low) for row in range(2)]
        sent, specs = encode_columns({"x": jagged(rows) if ragged else torch.stack(rows)}, 2, wire)
        cells += rows
        column += sent["x"]
    for order in (list(range(10)), [9, 0, 5, 4, 0]):
        found = decode_columns({"x": [column[row] for row in order]}, specs, len(order), wire)["x"]
        assert found.dtype == torch.int64
        assert all(map(torch.equal, found.unbind(), [cells[row] for row in order]))
    assert len(dtypes_of(column)) == 5


@pytest.mark.parametrize("wire", [FRAMES, ROWS], ids=["frames", "rows"])
def test_scalars_of_several_widths_are_joined(wire):
    column, specs = [], {}
    for most in (1, -1, 1 << 40):
        sent, specs = encode_columns({"x": torch.full((3_000,), most)}, 3_000, wire)
        column += list(sent["x"])
    found = decode_columns({"x": column}, specs, 9_000, wire)["x"]
    assert found.tolist() == [1] * 3_000 + [-1] * 3_000 + [1 << 40] * 3_000


@pytest.mark.parametrize("jagged_rows", [False, True])
def test_pieces_of_several_widths_are_merged(jagged_rows):
    wides, pieces = [], []
    for number, (low, high, _) in enumerate(LIMITS):
        values = torch.arange(4_000).view(-1, 2) % 100
        values[0, 0], values[-1, -1] = low, high
        lengths = torch.tensor([700, 600, 700]) if jagged_rows else torch.tensor([500] * 4)
        stored = narrowed(values)
        column = Ragged(stored, offsets_of(lengths)) if jagged_rows else stored.view(4, 500, 2)
        rows = [2, 0]
        pieces.append(Piece(column, rows, [2 * number + 1, 2 * number]))
        split = values.split(lengths.tolist())
        wides += [split[0], split[2]]
    merged = merge_pieces(pieces, dtype=torch.int64)
    assert merged.dtype == torch.int64
    assert all(map(torch.equal, merged.unbind(), wides))


def test_small_pieces_of_a_narrow_column_are_widened():
    column = narrowed(torch.arange(20_000) % 3)
    assert merge_pieces([Piece(column, [5, 6], [0, 1])], dtype=torch.int64).tolist() == [2, 0]
    assert merge_pieces([Piece(column, [6, 1, 5], [2, 0, 1])], dtype=torch.int64).tolist() == [1, 2, 0]


@WIRES
def test_ints_of_lists_leave_their_field_open(wire):
    given = Columns({"x": torch.arange(20_000).view(4, -1) % 7}, {"x": []}, ints=["x"])
    columns, specs = encode_columns(given, 4, wire)
    assert specs["x"] == FieldSpec.of_ints(1)
    assert dtypes_of(columns["x"]) == {torch.uint8}
    read = {"x": replace(specs["x"], dtype="float32")}
    assert torch.equal(decode_columns(columns, read, 4, wire)["x"], given["x"].float())


@pytest.mark.parametrize("wire", [FRAMES, JAGGED], ids=["frames", "jagged"])
def test_equal_large_cells_are_shared_and_narrow(wire):
    row = torch.arange(40_000) % 50
    columns, specs = encode_columns({"x": row.expand(3, -1)}, 3, wire)
    assert isinstance(columns["x"], SharedRows)
    assert dtypes_of(columns["x"]) == {torch.uint8}
    assert torch.equal(decode_columns(columns, specs, 3, wire)["x"], row.expand(3, -1))


@WIRES
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint32, torch.int64, torch.bool], ids=str)
def test_what_is_no_narrower_integer_is_refused(wire, dtype):
    columns, _ = encode_columns({"x": torch.ones(3, 2, dtype=dtype)}, 3, wire)
    with pytest.raises(BackendError, match=r"'x' has .*Expected int32|Expected int32"):
        decode_columns(columns, {"x": FieldSpec("tensor", "int32", 1)}, 3, wire)


def test_frames_that_differ_in_more_than_their_width_are_refused():
    def frames(*shape, dtype=torch.int64, most=1):
        return encode_columns({"x": torch.full(shape, most, dtype=dtype)}, shape[0], FRAMES)[0]["x"]

    spec = {"x": FieldSpec("tensor", "int64", 1)}
    for strange in (frames(2, 3_000, dtype=torch.float32), frames(2, 3_000, dtype=torch.uint64)):
        with pytest.raises(FrameError, match="not fit"):
            decode_columns({"x": [*frames(2, 3_000), *strange]}, spec, 4, FRAMES)
    with pytest.raises(FrameError):
        decode_columns({"x": [*frames(2, 3_000), *frames(2, 300, 10, most=-1)]}, spec, 4, FRAMES)
    first, second = map(bytes, frames(2, 3_000, most=-1))
    with pytest.raises(FrameError, match="row 3: frame of 3015 bytes is truncated") as caught:
        decode_columns({"x": [*frames(2, 3_000), first, second[:-1]]}, spec, 4, FRAMES)
    assert caught.value.row == 3


@pytest.mark.parametrize("narrow", [True, False, {"x": False}])
def test_the_config_says_what_is_narrowed(narrow):
    with connect({"backend": "noop", "narrow": narrow}) as client:
        client.register_partition("p", ["x", "y"], None, ["train"])
        column = torch.arange(8_000).view(4, -1) % 9
        client.put_samples(["a", "b", "c", "d"], "p", {"x": column, "y": column})
        held = {True: 2 * 8_000, False: 2 * 64_000}.get(narrow if isinstance(narrow, bool) else None, 72_000)
        assert client.describe("p").held_bytes == held
        found = client.get_samples(["c", "a"], "p", ["x", "y"])
        assert torch.equal(found["x"], column[[2, 0]])
        assert found["x"].dtype == found["y"].dtype == torch.int64


@pytest.mark.parametrize("most", [200, 60_000, 1 << 40])
def test_digests_are_those_of_the_dtype_that_was_put(most):
    rows = [torch.randint(0, most, (size,)) for size in (7, 0, MANY, 40_000, 5)]  # one is longer than a part
    columns = {"jagged": jagged(rows), "dense": torch.randint(0, most, (5, 9, 9_000)), "text": NonTensorStack(*"abcde")}
    found = []
    for wire in (JAGGED, replace(JAGGED, narrow=False)):
        encoded, specs = encode_columns(columns, len(rows), wire)
        found.append({name: cell_digests(encoded[name], specs[name], wire).tolist() for name in encoded})
    assert found[0] == found[1]
