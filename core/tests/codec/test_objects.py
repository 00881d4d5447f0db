"""Object items: a closed set, carried exactly, copied deeply, and refused with the place where they leave the set."""

import collections
import dataclasses
import datetime
import http
import marshal
import math
import pickle

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

from dataplane_core.codec import decode_item, encode_item
from dataplane_core.codec.cells import MAX_DEPTH, check_items, copy_item, decode_items, encode_items
from dataplane_core.errors import FrameError, InvalidTypeError


def nested(depth):
    item = "core"
    for level in range(depth):
        item = [item] if level % 2 else {"k": item}
    return item


def exact(item):
    """Tells 1 from True and 1.0, and has the bits of floats. In this version no item refers to an earlier one."""
    return marshal.dumps(item, 2)


ITEM = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=[]))
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(item=ITEM)
@example(-math.nan)
@example("\ud800 lone surrogate")
@example(list(range(1000)))
@example(nested(MAX_DEPTH))
def test_any_item_of_the_closed_set_comes_back_exactly(item):
    check_items([item], "x")
    assert exact(decode_item(encode_item(item))) == exact(copy_item(item)) == exact(item)


CIRCULAR: list = []
CIRCULAR.append(CIRCULAR)
TEXT = type("Text", (str,), {})("x")
OUTSIDE = {
    "tuple": ((1, 2), "of type tuple"),
    "set": ({1}, "of type set"),
    "bytearray": (bytearray(b"x"), "of type bytearray"),
    "complex": (1j, "of type complex"),
    "numpy float": (np.float64(1.0), "of type numpy.float64"),
    "numpy int": (np.int64(1), "of type numpy.int64"),
    "ndarray": (np.zeros(2), "of type numpy.ndarray"),
    "enum": (http.HTTPStatus.OK, "of type .*HTTPStatus"),
    "subclass of str": (TEXT, "of type .*Text"),
    "subclass of dict": (collections.OrderedDict(), "of type collections.OrderedDict"),
    "dataclass": (dataclasses.make_dataclass("Custom", ["value"])(3), "of type .*Custom"),  # which msgspec would take
    "datetime": (datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), "of type datetime.datetime"),
    "extension": (msgspec.msgpack.Ext(1, b""), "of type msgspec.*Ext"),
    "int of 65 bits": (2**63, "does not fit in 64 bits"),
    "int of 65 bits, negative": (-(2**63) - 1, "does not fit in 64 bits"),
    "int key": ({1: 2}, "a dict with a key of type int"),
    "subclass of str as key": ({TEXT: 2}, "a dict with a key of type .*Text"),
    "circular": (CIRCULAR, "inside itself"),
    "too deep": (nested(MAX_DEPTH + 1), "nested more than"),
    "nested tensor": (torch.nested.nested_tensor_from_jagged(torch.zeros(2), torch.tensor([0, 2])), "a nested tensor"),
    "meta tensor": (torch.zeros(2, device="meta"), "meta-device"),
    "sparse tensor": (torch.eye(2).to_sparse(), "sparse"),
}


@pytest.mark.parametrize(("item", "reason"), OUTSIDE.values(), ids=OUTSIDE.keys())
def test_anything_else_is_refused_with_field_row_and_type(item, reason):
    for refuse in (check_items, encode_items):
        with pytest.raises(InvalidTypeError, match=f"(?s)object field 'x', row 1.*: .*{reason}"):
            refuse(["fine", item], "x")
        with pytest.raises(InvalidTypeError, match=rf"(?s)object field 'x', row 0 at \[1\]\['k'\].*: .*{reason}"):
            refuse([[0, {"k": item}]], "x")


def test_what_can_be_pickled_may_contain_itself_and_what_cannot_is_refused():
    item = decode_item(encode_item(CIRCULAR, allow_pickle=True), allow_pickle=True)
    assert item[0] is item
    with pytest.raises(InvalidTypeError, match="row 0: an item of type function cannot be pickled"):
        encode_item(lambda: None, allow_pickle=True)
    inside = msgspec.msgpack.encode([msgspec.msgpack.Ext(2, pickle.dumps((1, 2)))])  # a pickle counts at the top only
    for allow_pickle in (False, True):
        with pytest.raises(FrameError):
            decode_item(inside, allow_pickle=allow_pickle)


MALFORMED = {
    "never used": b"\xc1",
    "trailing bytes": b"\xc0\xc0",
    "key that is not a str": b"\x81\x01\x02",
    "uint64 beyond int64": b"\xcf" + b"\xff" * 8,
    "unknown extension": b"\xd4\x09\x00",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bytes_are_a_frame_error_that_names_the_row(data):
    for allow_pickle in (False, True):
        for kind in (bytes, bytearray, memoryview):
            with pytest.raises(FrameError, match="object in row 1"):
                decode_items([kind(encode_item("fine")), kind(data)], allow_pickle=allow_pickle)
