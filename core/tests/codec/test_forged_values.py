"""Values from bytes that nobody of this package wrote: refused, and without more memory than the bytes are worth."""

import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import pytest
import torch

from dataplane_core.arguments import Seconds, fits
from dataplane_core.codec import decode_item, encode_item
from dataplane_core.errors import CorruptDataError, FrameError
from dataplane_core.spec import FieldSpec, TagValue


def peak_of(call):
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_forged_lengths_of_nested_lists_allocate_nothing():
    claims = b"\xdd\x00\x03\xff\xff" * 400 + b"\xc0" * 2**18  # 400 lists in each other, each said to have 262,143 items
    assert peak_of(lambda: decode_item(claims)) < 10 * len(
        claims
    )  # the innermost list takes 8 bytes for each of its items
    assert decode_item(encode_item([None] * 2**18)) == [None] * 2**18


#: A type, values that fit it, and values that do not.
FORMS = [
    (int, [1], [True]),
    (float, [1], ["1"]),
    (Seconds, [0.5], [float("nan"), -0.5]),
    (Mapping[str, TagValue], [{"a": float("nan"), "b": 1, "c": None}], [{"a": [1.0]}]),
    (str | None, [None, ""], [b""]),
    (Literal["keep", "replace"], ["keep"], [["keep"], "\ud800"]),
    (Sequence[int], [[1]], [[1, [2]]]),
    (Sequence[str], [["ab"]], ["ab"]),
    (Sequence[tuple[str, Any, int | None]], [[["a", 1, None]]], [[["a", 1]]]),
    (Mapping[str, Sequence[str]], [{"a": ["b"]}], [{1: ["b"]}]),
    (Mapping[str, str], [{"a": "b"}], [[["a"]]]),
]


@pytest.mark.parametrize(("form", "good", "bad"), FORMS, ids=str)
def test_a_value_fits_a_type_or_not(form, good, bad):
    class Whole(TypedDict):
        a: form

    for value, is_good in (*((each, True) for each in good), *((each, False) for each in bad)):
        assert fits(value, form) is is_good
        assert fits({"a": value, "more": 0}, Whole) is is_good
        assert not fits({"a": value, "\ud800": 0}, Whole), "half of a surrogate pair"
    assert not fits({}, Whole)


def test_a_text_that_is_no_spec_is_refused():
    numbers = "tensor:int64:"
    after = ["1", "-2:", "1:3", "3:3", "2:-3", "2:1e3", "2:" + "9" * 30, "999:", "2:\u0663"]
    for text in (
        "",
        "tensor",
        "object:int64:0:",
        "tensor:__doc__:1:",
        "a:b:c:d:e",
        *(numbers + each for each in after),
    ):
        with pytest.raises(CorruptDataError, match="is no spec of a field"):
            FieldSpec.from_text(text)


def test_a_spec_whose_dtype_torch_lacks_says_so():
    assert FieldSpec.from_text("tensor:int64:2:3").torch_dtype is torch.int64
    with pytest.raises(CorruptDataError, match="'save', which torch lacks"):
        _ = FieldSpec.from_text("tensor:save:2:3").torch_dtype
