"""Values from bytes that nobody of this package wrote: refused, and without more memory than the bytes are worth."""

import tracemalloc

import pytest
import torch

from dataplane_core.codec import decode_item, encode_item
from dataplane_core.errors import CorruptDataError, FrameError
from dataplane_core.spec import FieldSpec


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
