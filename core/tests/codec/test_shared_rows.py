"""Equal large cells: found by memory and by bytes, sent once, and given to every row again."""

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from dataplane_core.codec import (
    as_columns,
    cell_nbytes,
    decode_columns,
    encode_columns,
    num_rows,
    shared as shared_module,
)
from dataplane_core.errors import BackendError, InvalidTypeError, SchemaMismatchError
from dataplane_core.spec import SharedRows, WireFormat

WIRES = {
    "jagged": WireFormat(shared_rows=True),
    "bytes": WireFormat(bytes=True, shared_rows=True),
    "rows": WireFormat(ragged="rows", shared_rows=True),
    "native": WireFormat(objects="native", shared_rows=True),
    "no empty rows": WireFormat(zero_length_rows=False, promote_1d=True, shared_rows=True),
}
INDEX = [0, 1, 0, 0, 2, 1]
LENGTH = 50_000


def images(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (LENGTH + 8 * number, 4), generator=generator).to(dtype) for number in range(3)]


def rows_of(column):
    return list(column.unbind()) if isinstance(column, torch.Tensor) else column.tolist()


def lazy(rows):
    return as_columns("put", LazyStackedTensorDict(*[TensorDict({"x": row}, batch_size=[]) for row in rows]), len(rows))


FORMS = {
    "jagged, equal bytes": lambda rows: {"x": torch.nested.as_nested_tensor(rows, layout=torch.jagged)},
    "dense, equal bytes": lambda rows: {"x": torch.stack([row[:LENGTH] for row in rows])},
    "lazy stack, same memory": lazy,
    "lazy stack, equal bytes": lambda rows: lazy([row.clone() for row in rows]),
    "objects, same memory": lambda rows: {"x": NonTensorStack(*rows)},
}


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES.keys())
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_equal_rows_are_sent_once_and_come_back(wire, form):
    unique = images()
    rows = [unique[number] for number in INDEX]
    fields = form(rows)
    columns, specs = encode_columns(fields, len(rows), wire)
    sent = columns["x"]
    assert isinstance(sent, SharedRows)
    assert (num_rows(sent), num_rows(sent.rows), list(sent.index)) == (6, 3, INDEX)
    sizes = cell_nbytes(sent, 6)
    assert (sizes[[2, 3, 5]] == 0).all()
    assert sizes.sum() == pytest.approx(sum(row.nbytes for row in unique), rel=0.01)
    expected = [row[:LENGTH] for row in rows] if form is FORMS["dense, equal bytes"] else rows
    for share in (False, True):
        found = rows_of(decode_columns(columns, specs, 6, wire, share_rows=share)["x"])
        assert all(torch.equal(row, wanted) for row, wanted in zip(found, expected, strict=True))
        assert len({row.data_ptr() for row in found}) == (3 if share else 6)


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES.keys())
def test_equal_rows_that_are_small_are_sent_as_ever(wire):
    row = torch.arange(10)
    fields = {"x": row.expand(4, -1), "word": NonTensorStack("a", "b", "a", "a")}
    columns, specs = encode_columns(fields, 4, wire)
    assert not any(isinstance(column, SharedRows) for column in columns.values())
    found = decode_columns(columns, specs, 4, wire, share_rows=True)
    assert torch.equal(found["x"], fields["x"])
    assert found["word"].tolist() == ["a", "b", "a", "a"]


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES.keys())
def test_jagged_columns_with_equal_rows_can_be_combined(wire):
    some = [images()[number] for number in INDEX]
    fields = {name: torch.nested.as_nested_tensor(some, layout=torch.jagged) for name in ("one", "two")}
    fields["three"] = torch.nested.as_nested_tensor([row + at for at, row in enumerate(some)], layout=torch.jagged)
    columns, specs = encode_columns(fields, 6, wire)
    assert not isinstance(columns["three"], SharedRows)
    found = decode_columns(columns, specs, 6, wire)
    for total, by in ((found["one"] + found["two"], 2), (found["one"] * found["three"].sign(), 1)):
        assert torch.equal(total.values(), by * torch.cat(some))


def test_a_wire_without_shared_rows_gets_every_row():
    columns, _ = encode_columns(lazy([images()[0]] * 3), 3, WireFormat())
    assert columns["x"].shape == (3, LENGTH, 4)


def test_rows_that_differ_in_one_byte_are_not_equal():
    rows = torch.zeros(4, 200_000, dtype=torch.uint8)
    rows[2, 77_777] = 1  # not one of the bytes that are looked at first
    columns, _ = encode_columns({"x": rows}, 4, WireFormat(shared_rows=True))
    assert list(columns["x"].index) == [0, 0, 1, 0]
    assert torch.equal(columns["x"].rows, rows[1:3])


def test_rows_with_one_hash_are_compared(monkeypatch):
    monkeypatch.setattr(shared_module.xxhash, "xxh3_64_intdigest", lambda data: 7)
    rows = torch.zeros(4, 200_000, dtype=torch.uint8)
    rows[2, 77_777] = 1
    columns, _ = encode_columns({"x": rows}, 4, WireFormat(shared_rows=True))
    assert torch.equal(columns["x"], rows)


def test_nans_and_zeros_are_told_apart_by_their_bits():
    rows = torch.zeros(3, 100_000)
    rows[1] = -0.0
    columns, specs = encode_columns({"x": rows}, 3, WireFormat(shared_rows=True))
    found = decode_columns(columns, specs, 3, WireFormat(shared_rows=True))["x"]
    assert np.array_equal(found.view(torch.int32).numpy(), rows.view(torch.int32).numpy())


def test_errors_name_the_row_of_the_caller():
    wire = WireFormat(bytes=True, shared_rows=True)
    same = images()[0]
    with pytest.raises(SchemaMismatchError, match="row 2 is float64"):
        encode_columns(lazy([same, same, same.double()]), 3, wire)
    with pytest.raises(InvalidTypeError, match="row 2"):
        encode_columns({"x": NonTensorStack(same, same, {1, 2})}, 3, wire)


@pytest.mark.parametrize(
    ("rows", "index", "message"),
    [
        (torch.zeros(2, 3), [0, 1], "2 rows. Expected 3"),
        (torch.zeros(2, 3), [0, 1, 2], "an index that does not lie within its 2 rows"),
        (torch.zeros(2, 3), [0, -1, 1], "an index that does not lie within its 2 rows"),
    ],
)
def test_a_reply_with_a_wrong_index_is_refused(rows, index, message):
    wire = WireFormat(shared_rows=True)
    _, specs = encode_columns({"x": torch.zeros(3, 3)}, 3, wire)
    with pytest.raises(BackendError, match=message):
        decode_columns({"x": SharedRows(rows, index)}, specs, 3, wire)


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES.keys())
def test_lazy_views_of_one_memory_are_told_apart(wire):
    row = torch.randn(100_000, dtype=torch.complex64)
    for rows in ([row, row.conj(), row], [row.imag, row.conj().imag, row.imag]):
        columns, specs = encode_columns(lazy(rows), 3, wire)
        found = decode_columns(columns, specs, 3, wire)["x"]
        assert torch.equal(found, torch.stack([row.resolve_conj().resolve_neg() for row in rows]))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that this layout is in beta state
def test_sparse_tensors_are_refused_as_ever():
    sparse = torch.eye(3).to_sparse()
    for leaf in (sparse, sparse.to_sparse_csr(), NonTensorStack(sparse, sparse, sparse)):
        for wire in WIRES.values():
            with pytest.raises(InvalidTypeError, match="sparse"):
                encode_columns({"x": leaf}, 3, wire)
