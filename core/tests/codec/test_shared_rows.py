"""Equal large cells: found by memory and by bytes, sent once, and given to every row again."""

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from dataplane_core.codec import as_columns, compact, decode_columns, encode_columns
from dataplane_core.codec.rows import cell_nbytes
from dataplane_core.errors import BackendError
from dataplane_core.spec import SharedRows, WireFormat

SHARED = WireFormat(shared_rows=True)
WIRES = {
    "jagged": SHARED,
    "bytes": WireFormat(bytes=True, shared_rows=True),
    "native": WireFormat(objects="native", shared_rows=True),
}
EACH_WIRE = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES.keys())
INDEX = [0, 1, 0, 0, 2, 1]
LENGTH = 50_000
IMAGES = [torch.arange(4 * (LENGTH + 8 * number)).view(-1, 4).float() + number for number in range(3)]
ROWS = [IMAGES[number] for number in INDEX]


def rows_of(column):
    return list(column.unbind()) if isinstance(column, torch.Tensor) else column.tolist()


def lazy(rows):
    return as_columns("put", LazyStackedTensorDict(*[TensorDict({"x": row}, batch_size=[]) for row in rows]), len(rows))


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


FORMS = {
    "jagged, equal bytes": lambda rows: {"x": jagged(rows)},
    "dense, equal bytes": lambda rows: {"x": torch.stack([row[:LENGTH] for row in rows])},
    "lazy stack, same memory": lazy,
    "lazy stack, equal bytes": lambda rows: lazy([row.clone() for row in rows]),
    "objects, same memory": lambda rows: {"x": NonTensorStack(*rows)},
}


@EACH_WIRE
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
        found = rows_of(decode_columns(columns, specs, 6, wire, share_rows=share)["x"])
        assert all(map(torch.equal, found, expected))
        assert len({row.data_ptr() for row in found}) == (3 if share else 6)


def test_two_equal_rows_are_sent_once():
    columns, _ = encode_columns({"x": torch.stack([IMAGES[0]] * 2)}, 2, SHARED)
    assert len(columns["x"].rows) == 1


@EACH_WIRE
def test_small_equal_rows_are_sent_as_ever_and_columns_with_equal_rows_can_be_combined(wire):
    fields = {"x": torch.arange(10).expand(6, -1), "word": NonTensorStack(*"abaaab")}
    fields |= {"one": jagged(ROWS), "two": jagged(ROWS), "other": jagged([row + at for at, row in enumerate(ROWS)])}
    columns, specs = encode_columns(fields, 6, wire)
    assert [name for name in fields if isinstance(columns[name], SharedRows)] == ["one", "two"]
    found = decode_columns(columns, specs, 6, wire, share_rows=True)
    assert torch.equal(found["x"], fields["x"])
    assert found["word"].tolist() == list("abaaab")
    found = decode_columns(columns, specs, 6, wire)
    assert torch.equal((found["one"] + found["two"]).values(), 2 * torch.cat(ROWS))
    assert torch.equal((found["one"] + 0 * found["other"]).values(), torch.cat(ROWS))


@pytest.mark.parametrize("one_hash", [False, True])
def test_rows_that_differ_in_one_byte_are_not_equal(monkeypatch, one_hash):
    if one_hash:
        monkeypatch.setattr(compact, "fast_digest", lambda data: 7)
    rows = torch.zeros(4, 200_000, dtype=torch.uint8)
    rows[2, 77_777] = 1  # not one of the bytes that are looked at first
    sent = encode_columns({"x": rows}, 4, SHARED)[0]["x"]
    if one_hash:
        assert torch.equal(sent, rows)
    else:
        assert list(sent.index) == [0, 0, 1, 0]
        assert torch.equal(sent.rows, rows[1:3])


def test_nans_and_zeros_are_told_apart_by_their_bits(bits):
    rows = torch.zeros(3, 100_000)
    rows[1] = -0.0
    columns, specs = encode_columns({"x": rows}, 3, SHARED)
    assert bits(decode_columns(columns, specs, 3, SHARED)["x"]) == bits(rows)


@EACH_WIRE
def test_lazy_views_of_one_memory_are_told_apart(wire):
    row = torch.randn(100_000, dtype=torch.complex64)
    for rows in ([row, row.conj(), row], [row.imag, row.conj().imag, row.imag]):
        columns, specs = encode_columns(lazy(rows), 3, wire)
        found = decode_columns(columns, specs, 3, wire)["x"]
        assert torch.equal(found, torch.stack([row.resolve_conj().resolve_neg() for row in rows]))


@pytest.mark.parametrize(
    ("index", "message"),
    [([0, 1], "2 rows. Expected 3"), *((index, "does not lie within its 2 rows") for index in ([0, 1, 2], [0, -1, 1]))],
)
def test_a_reply_with_a_wrong_index_is_refused(index, message):
    _, specs = encode_columns({"x": torch.zeros(3, 3)}, 3, SHARED)
    with pytest.raises(BackendError, match=message):
        decode_columns({"x": SharedRows(torch.zeros(2, 3), index)}, specs, 3, SHARED)
