"""Whether plain values that were read from bytes have the types that are expected, down to the last item."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_origin

#: Any float, also NaN, which ``float`` does not accept: a time must be a number.
AnyFloat: TypeAlias = Annotated[float, "or NaN"]

_Test: TypeAlias = Callable[[Any], bool]

_LISTS: Final = (list, tuple)
#: Form -> the type that its values have, where that is all to test.
_TYPES: Final[Mapping[Any, type]] = {**{each: each for each in (bool, int, str, bytes, NoneType)}, AnyFloat: float}


def fits(value: Any, form: Any) -> bool:
    """Whether a value is of a type.

    Args:
        value: Of msgpack or JSON: None, bool, int, float, str, bytes, lists and dicts.
        form: A type. ``Sequence[X]`` is a list of any length, ``tuple[X, Y]`` a list with these items,
            ``Mapping[K, V]`` a dict, ``float`` any number but NaN. A bool is no int.

    Example:
        >>> fits({"a": [1, 2]}, Mapping[str, Sequence[int]]), fits({"a": [1, "b"]}, Mapping[str, Sequence[int]])
        (True, False)
    """
    return _test_of(form)(value)


def holds(values: Mapping[str, Any], forms: Mapping[str, Any]) -> bool:
    """Whether a dict has all these names, with values of these types. It may have others too."""
    return all(name in values and fits(values[name], form) for name, form in forms.items())


@functools.cache
def _test_of(form: Any) -> _Test:
    origin, parts = get_origin(form), get_args(form)
    if form is Any:
        return lambda value: True
    if form is None:
        return lambda value: value is None
    if form is float:
        return lambda value: type(value) in (int, float) and value == value
    if isinstance(form, type) and origin is None:
        if issubclass(form, Sequence) and form not in (str, bytes):
            return lambda value: isinstance(value, _LISTS)
        return lambda value: type(value) is form
    if form == AnyFloat:
        return lambda value: type(value) is float
    if origin is Annotated:
        return _test_of(parts[0])
    if origin is Literal:
        return lambda value: type(value) is str and value in parts
    if origin in (Union, UnionType):
        return _any_of(parts)
    if origin is tuple:
        tests = [_test_of(each) for each in parts]
        return lambda value: (
            isinstance(value, _LISTS)
            and len(value) == len(tests)
            and all(test(each) for test, each in zip(tests, value, strict=True))
        )
    if issubclass(origin, Sequence):
        items = _all_are(parts[0])
        return lambda value: isinstance(value, _LISTS) and items(value)
    if issubclass(origin, Mapping):
        keys, values = map(_all_are, parts)
        return lambda value: isinstance(value, dict) and keys(value) and values(value.values())
    raise TypeError(f"{form!r} is no form of plain values")


def _any_of(forms: Sequence[Any]) -> _Test:
    tests = [_test_of(each) for each in forms]
    return lambda value: any(test(value) for test in tests)


def _all_are(form: Any) -> _Test:
    """Whether all items are of a type. For simple types much faster than one by one."""
    some = get_args(form) if get_origin(form) in (Union, UnionType) else (form,)
    if all(each in _TYPES for each in some):
        types = frozenset(_TYPES[each] for each in some)
        return lambda items: types.issuperset(map(type, items))
    if form is Any:
        return lambda items: True
    test = _test_of(form)
    return lambda items: all(map(test, items))
