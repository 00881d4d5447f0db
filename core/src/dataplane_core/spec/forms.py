"""Whether plain values that were read from bytes have the types that are expected, down to the last item."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

#: A number of seconds from 0 on. NaN is none.
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


def fits(value: Any, form: Any) -> bool:
    """Whether a value is of a type.

    Args:
        value: Of msgpack or JSON: None, bool, int, float, str, bytes, lists and dicts.
        form: A type. ``Sequence[X]`` is a list of any length, ``tuple[X, Y]`` a list with these items,
            ``Mapping[K, V]`` a dict, a ``TypedDict`` a dict with at least its keys. A bool is no int.

    Example:
        >>> from collections.abc import Mapping, Sequence
        >>> fits({"a": [1, 2]}, Mapping[str, Sequence[int]]), fits({"a": [1, "b"]}, Mapping[str, Sequence[int]])
        (True, False)
    """
    try:
        msgspec.convert(value, form, builtin_types=(bytes,))
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter: a key with half of a surrogate pair
        return False
    return True
