"""Values from bytes that nobody of this package wrote: refused, and without more memory than the bytes are worth."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import pytest
import torch

from dataplane_core.errors import CorruptDataError
from dataplane_core.spec import FieldSpec, Seconds, TagValue, fits

#: A type, values that fit it, and values that do not.
FORMS = [
    (int, [1], [True]),
    (float, [1], ["1"]),
    (Seconds, [0.5], [float("nan"), -0.5]),
    (Mapping[str, TagValue], [{"a": float("nan"), "b": 1, "c": None}], [{"a": [1.0]}]),
    (str | None, [None, ""], [b""]),
    (Literal["keep", "replace"], ["keep"], [["keep"]]),
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
    assert not fits({}, Whole)


def test_a_spec_whose_dtype_torch_lacks_says_so():
    assert FieldSpec.from_text("tensor:int64:2:3").torch_dtype is torch.int64
    with pytest.raises(CorruptDataError, match="'save', which torch lacks"):
        _ = FieldSpec.from_text("tensor:save:2:3").torch_dtype
