"""What makes the cells of a put smaller: integers in a narrower dtype, and equal large cells once."""

from dataclasses import replace

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from dataplane_core import connect
from dataplane_core.codec import (
    as_columns,
    cell_digests,
    decode_columns,
    encode_columns,
    narrowed,
    widened,
)
from dataplane_core.codec.compact import LEAST_BYTES
from dataplane_core.codec.rows import cell_nbytes
from dataplane_core.errors import BackendError, FrameError
from dataplane_core.spec import FieldSpec, SharedRows, WireFormat
from dataplane_testkit._columns import bits, jagged

FRAMES = WireFormat(bytes=True, shared_rows=True)
JAGGED = WireFormat(shared_rows=True, narrow=True)
#: More elements than are looked at first, and than one part has.
MANY = 300_000
#: From narrow to wide; of two that are as wide, the one without a sign comes first.
DTYPES = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64]
#: The least and the largest value of each, and those just beyond.
EDGES = {edge + step for kind in map(torch.iinfo, DTYPES) for edge in (kind.min, kind.max) for step in (-1, 0, 1)}
EDGES -= {-(2**63) - 1, 2**63}
LIMITS = [(edge, 0) for edge in sorted(EDGES) if edge <= 0]
LIMITS += [(low, edge) for low in (0, -1) for edge in sorted(EDGES) if edge >= 0]


def narrowest(low, high):
    return next(each for each in DTYPES if torch.iinfo(each).min <= low and high <= torch.iinfo(each).max)


def same_rows(column, rows):
    return column.dtype == torch.int64 and all(map(torch.equal, column.unbind(), rows))


# --- which dtype ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [(0, 1), (MANY - 2, MANY - 1), (MANY - 1, 0), (200_000, 5_000)], ids=str)
def test_the_narrowest_dtype_is_found_wherever_the_extremes_lie(places):
    values = torch.zeros(MANY, dtype=torch.int64)
    for low, high in LIMITS:
        values[list(places)] = torch.tensor([low, high])
        found = narrowed(values)
        assert found.dtype == narrowest(low, high), (low, high)
        assert torch.equal(widened(found, torch.int64), values)
        assert (found is values) == (found.dtype == torch.int64)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.bool, torch.float64, torch.uint64, torch.int64], ids=str
)
def test_other_columns_and_small_ones_stay_as_they_are(dtype):
    sizes = [(0, 3), (LEAST_BYTES // 8 - 1,), *([(MANY,)] if dtype != torch.int64 else [])]
    for size in sizes:
        column = torch.zeros(size, dtype=dtype)
        assert narrowed(column) is column


# --- over a wire ------------------------------------------------------------------------------------------------------


def test_frames_may_differ_in_their_width_and_in_no_more():
    def frames(*shape, dtype=torch.int64, most=1):
        return encode_columns({"x": torch.full(shape, most, dtype=dtype)}, shape[0], FRAMES)[0]["x"]

    mixed = {"x": [*frames(1, 3_000), *frames(1, 3_000, most=1 << 40), *frames(1, 3_000)]}
    found = decode_columns(mixed, {"x": FieldSpec("tensor", "int64", 1)}, 3, FRAMES)["x"]
    assert found[:, 0].tolist() == found[:, -1].tolist() == [1, 1 << 40, 1]
    first, second = map(bytes, frames(2, 3_000, most=-1))
    for strange, named in (
        (frames(2, 3_000, dtype=torch.float32), "not fit"),
        (frames(2, 3_000, dtype=torch.uint64), "not fit"),
        (frames(2, 300, 10, most=-1), "only the first dim"),
        ([first, second[:-1]], "row 3: frame of 3015 bytes is truncated"),
    ):
        with pytest.raises(FrameError, match=named):
            decode_columns({"x": [*frames(2, 3_000), *strange]}, {"x": FieldSpec("tensor", "int64", 1)}, 4, FRAMES)


@pytest.mark.parametrize(("narrow", "held"), [(True, 2 * 8_000), (False, 2 * 64_000), ({"x": False}, 72_000)], ids=str)
def test_the_config_says_what_is_narrowed(narrow, held):
    with connect({"backend": "noop", "narrow": narrow}) as client:
        client.register_partition("p", ["x", "y"], None, ["train"])
        column = torch.arange(8_000).view(4, -1) % 9
        client.put_samples(["a", "b", "c", "d"], "p", {"x": column, "y": column})
        assert client.describe("p").held_bytes == held
        found = client.get_samples(["c", "a"], "p", ["x", "y"])
        assert same_rows(found["x"], column[[2, 0]])
        assert same_rows(found["y"], column[[2, 0]])


@pytest.mark.parametrize("most", [200, 60_000, 1 << 40])
def test_digests_are_those_of_the_dtype_that_was_put(most):
    rows = [torch.randint(0, most, (size,)) for size in (7, 0, MANY, 40_000, 5)]  # one is longer than a part
    columns = {"jagged": jagged(rows), "dense": torch.randint(0, most, (5, 9, 9_000)), "text": NonTensorStack(*"abcde")}
    found = []
    for wire in (JAGGED, replace(JAGGED, narrow=False)):
        encoded, specs = encode_columns(columns, len(rows), wire)
        found.append({name: cell_digests(encoded[name], specs[name], wire).tolist() for name in encoded})
    assert found[0] == found[1]


# --- equal large cells ------------------------------------------------------------------------------------------------

SHARED = WireFormat(shared_rows=True)
SHARED_WIRES = {
    "jagged": SHARED,
    "bytes": WireFormat(bytes=True, shared_rows=True),
    "native": WireFormat(objects="native", shared_rows=True),
}
EACH_SHARED_WIRE = pytest.mark.parametrize("wire", SHARED_WIRES.values(), ids=SHARED_WIRES.keys())
INDEX = [0, 1, 0, 0, 2, 1]
LENGTH = 50_000
IMAGES = [torch.arange(4 * (LENGTH + 8 * number)).view(-1, 4).float() + number for number in range(3)]
ROWS = [IMAGES[number] for number in INDEX]


def lazy(rows):
    return as_columns("put", LazyStackedTensorDict(*[TensorDict({"x": row}, batch_size=[]) for row in rows]), len(rows))


FORMS = {
    "jagged, equal bytes": lambda rows: {"x": jagged(rows)},
    "dense, equal bytes": lambda rows: {"x": torch.stack([row[:LENGTH] for row in rows])},
    "lazy stack, same memory": lazy,
    "lazy stack, equal bytes": lambda rows: lazy([row.clone() for row in rows]),
    "objects, same memory": lambda rows: {"x": NonTensorStack(*rows)},
}


@EACH_SHARED_WIRE
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_equal_rows_are_sent_once_and_come_back(wire, form):
    columns, specs = encode_columns(form(ROWS), 6, wire)
    sent = columns["x"]
    assert isinstance(sent, SharedRows)
    assert (len(sent), len(sent.rows), list(sent.index)) == (6, 3, INDEX)
    sizes = cell_nbytes(sent, 6)
    assert (sizes[[2, 3, 5]] == 0).all()
    assert sizes.sum() == pytest.approx(sum(row.nbytes for row in IMAGES), rel=0.01)
    expected = [row[:LENGTH] for row in ROWS] if form is FORMS["dense, equal bytes"] else ROWS
    for share in (False, True):
        column = decode_columns(columns, specs, 6, wire, share_rows=share)["x"]
        found = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
        assert all(map(torch.equal, found, expected))
        assert len({row.data_ptr() for row in found}) == (3 if share else 6)


@EACH_SHARED_WIRE
def test_small_equal_rows_are_sent_as_ever_and_columns_with_equal_rows_can_be_combined(wire):
    fields = {"x": torch.arange(10).expand(6, -1), "word": NonTensorStack(*"abaaab")}
    fields |= {
        "one": jagged(ROWS),
        "two": jagged(ROWS),
        "other": jagged([row + at for at, row in enumerate(ROWS)]),
    }
    columns, specs = encode_columns(fields, 6, wire)
    assert [name for name in fields if isinstance(columns[name], SharedRows)] == ["one", "two"]
    found = decode_columns(columns, specs, 6, wire, share_rows=True)
    assert torch.equal(found["x"], fields["x"])
    assert found["word"].tolist() == list("abaaab")
    found = decode_columns(columns, specs, 6, wire)
    assert torch.equal((found["one"] + found["two"]).values(), 2 * torch.cat(ROWS))
    assert torch.equal((found["one"] + 0 * found["other"]).values(), torch.cat(ROWS))


def test_rows_that_differ_in_one_byte_are_not_equal_and_the_first_of_them_has_the_probe():
    wire = WireFormat(shared_rows=True, by_content=True, by_probe=True)
    rows = torch.zeros(4, 200_000, dtype=torch.uint8)
    rows[2, 77_777] = 1
    sent = encode_columns({"x": rows}, 4, wire)[0]["x"]
    assert list(sent.index) == [0, 0, 1, 0]
    assert torch.equal(sent.rows, rows[1:3])
    (alone,), (other,) = (encode_columns({"x": rows[row, None]}, 1, wire)[0]["x"].digests for row in (0, 2))
    first, second = sent.digests
    assert first == alone == other != second


@pytest.mark.parametrize("rows", [torch.zeros(2, 0), torch.zeros(2, 3, 0, dtype=torch.uint8)], ids=str)
def test_rows_without_a_byte_are_never_large(rows):
    assert not isinstance(encode_columns({"x": rows}, 2, SHARED, share_above=0)[0]["x"], SharedRows)


@EACH_SHARED_WIRE
def test_zeros_are_told_apart_by_their_bits_and_so_are_lazy_views_of_one_memory(wire):
    row, zeros = torch.randn(100_000, dtype=torch.complex64), torch.zeros(100_000)
    for rows in ([row, row.conj(), row], [row.imag, row.conj().imag, row.imag], [zeros, -zeros, zeros]):
        stacked = torch.stack([row.resolve_conj().resolve_neg() for row in rows])
        for fields in (lazy(rows), {"x": stacked}):
            columns, specs = encode_columns(fields, 3, wire)
            assert bits(decode_columns(columns, specs, 3, wire)["x"]) == bits(stacked)


@pytest.mark.parametrize(
    ("index", "message"),
    [([0, 1], "2 rows. Expected 3"), *((index, "does not lie within its 2 rows") for index in ([0, 1, 2], [0, -1, 1]))],
)
def test_a_reply_with_a_wrong_index_is_refused(index, message):
    _, specs = encode_columns({"x": torch.zeros(3, 3)}, 3, SHARED)
    with pytest.raises(BackendError, match=message):
        decode_columns({"x": SharedRows(torch.zeros(2, 3), index)}, specs, 3, SHARED)
