"""Columns of a partition as Arrow columns.

A tensor field has the type that `dataplane_core.to_arrow` gives it. What Arrow lacks is stored as what holds it:
bfloat16 and float8 as float32; a complex number as a list of its two parts; cells without elements, such as those of
shape (L, 0), as L zeros. An object field is a column of strings, or of binary if its items are bytes. Where not all of
its items are strings (or bytes), each is JSON. A null means that the row lacks the field, or that its item is None.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from dataplane_core import to_arrow
from dataplane_core.codec import dense_or_jagged, ragged_of_nested
from dataplane_core.errors import InvalidTypeError, UnsupportedOperationError
from dataplane_core.spec import FieldSpec, Ragged

try:
    import pyarrow
except ImportError as _error:
    raise UnsupportedOperationError(
        "the package pyarrow is not installed, which export needs.",
        hint="pip install 'dataplane-tools[export]'",
    ) from _error
pa: Any = pyarrow

#: How the items of an object column are stored.
TEXT, BYTES, JSON = "text", "bytes", "json"


def arrow_of_tensors(column: torch.Tensor, spec: FieldSpec) -> Any:
    """The Arrow column of a tensor column."""
    return to_arrow({"column": _mapped(column, lambda values: _stored(values, spec))})["column"]


def arrow_of_empty_lists(items: Sequence[Any]) -> Any:
    """The Arrow column of items that are None or empty lists. They may become lists of any numbers."""
    return pa.array(items, type_of_tensors(FieldSpec("tensor", "int64", 1)))


def type_of_tensors(spec: FieldSpec) -> Any:
    """The type of the Arrow column of a field."""
    shape = (0, 0, *spec.trailing) if spec.rank else (0,)
    return arrow_of_tensors(torch.empty(shape, dtype=spec.torch_dtype, device="cpu"), spec).type


def _mapped(column: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A column with its values changed, which keep their first dim."""
    if not column.is_nested:
        rows = column.flatten(0, 1) if column.dim() > 1 else column
        values = change(rows)
        return values if column.dim() == 1 else values.reshape(*column.shape[:2], *values.shape[1:])
    ragged: Any = ragged_of_nested(column, "a column")
    return dense_or_jagged(Ragged(change(ragged.values), ragged.offsets))


def _stored(values: torch.Tensor, spec: FieldSpec) -> torch.Tensor:
    if 0 in spec.trailing:
        return torch.zeros(len(values), dtype=torch.uint8, device="cpu")
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj())
    return values.float() if values.dtype == torch.bfloat16 or spec.dtype.startswith("float8") else values


# --- objects ----------------------------------------------------------------------------------------------------------


def form_of_items(items: Sequence[Any], former: str | None) -> str | None:
    """How to store the items of an object column, of which some are stored in a form. None: all are None."""
    kinds = {type(item) for item in items} - {type(None)}
    own = None if not kinds else TEXT if kinds == {str} and all(map(_is_unicode, items)) else JSON
    own = BYTES if kinds == {bytes} else own
    return former if own is None else own if former in (None, own) else JSON


def arrow_of_items(name: str, items: Sequence[Any], form: str | None, binary: bool) -> Any:
    """The Arrow column of items: of strings, or of ``binary`` values."""
    if form == JSON:
        items = [None if item is None else _to_json(name, item) for item in items]
        items = [item.encode() if binary and item is not None else item for item in items]
    return pa.array(items, pa.large_binary() if binary else pa.large_string())


def _is_unicode(text: str | None) -> bool:
    """Whether a string has no lone surrogate, which no file of Arrow can hold."""
    return text is None or text.isascii() or text.encode(errors="ignore").decode() == text


def json_text(value: Any) -> str:
    """A value as JSON that Arrow can hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if _is_unicode(text) else json.dumps(value, separators=(",", ":"))


def _to_json(name: str, item: Any) -> str:
    try:
        return json_text(_escaped(item))
    except TypeError as error:
        raise InvalidTypeError(
            f"export refused: field '{name}' holds an item that only pickle can keep: {error}.",
            hint="Leave the field out with --fields.",
        ) from error


def _escaped(item: Any) -> Any:
    """JSON lacks bytes and tensors: bytes are ``{"~bytes": base64}``, tensors lists of their values."""
    if isinstance(item, dict):
        if other := [key for key in item if not isinstance(key, str)]:
            raise TypeError(f"a key is {type(other[0]).__name__}")
        return {key: _escaped(value) for key, value in item.items()}
    if isinstance(item, list):
        return [_escaped(each) for each in item]
    if isinstance(item, bytes):
        return {"~bytes": base64.b64encode(item).decode()}
    if isinstance(item, torch.Tensor):
        return (torch.view_as_real(item.resolve_conj()) if item.is_complex() else item).tolist()
    return item


#: What types a tag's column may have, with the Python types of its values.
_TAG_TYPES: Final = (
    (pa.bool_(), {bool}),
    (pa.int64(), {int}),
    (pa.float64(), {int, float}),
    (pa.large_string(), {str}),
)


def type_of_values(values: Sequence[Any]) -> Any:
    """The type of a column that holds a tag's values. None: they have no common one."""
    kinds = {type(value) for value in values} - {type(None)}
    return next((arrow for arrow, held in _TAG_TYPES if kinds and kinds <= held), None)


def arrow_of_values(values: Sequence[Any], kind: Any) -> Any:
    """A tag's values as a column of a type, null where a value is of another one."""
    held = dict(_TAG_TYPES)[kind]
    fitting = [value if type(value) in held else None for value in values]
    return pa.array([float(each) if held == {int, float} and each is not None else each for each in fitting], kind)
