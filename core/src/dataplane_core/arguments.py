"""Checks of whole arguments that the client and the helpers share, so that a wrong one is named in our words."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from dataplane_core.errors import InvalidRequestError, InvalidTypeError

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def check_iterable(what: str, items: Any) -> None:
    """Accepts any iterable but a string."""
    if isinstance(items, (str, bytes)) or not hasattr(items, "__iter__"):
        hint = "For a single one, give a list of it." if isinstance(items, str) else None
        raise InvalidTypeError(f"{what} must be a list, got {type(items).__name__}.", hint=hint)


def check_list(what: str, items: Any) -> list[Any]:
    """Accepts any iterable but a string; returns it as a list."""
    check_iterable(what, items)
    return list(items)


def check_count(what: str, count: Any) -> None:
    """Accepts an int of at least 1, of 64 bits."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise InvalidTypeError(f"{what} must be an int, got {type(count).__name__}.")
    if count < 1:
        raise InvalidRequestError(f"{what} must be at least 1, got {count}.")
    if count >= 1 << 63:
        raise InvalidRequestError(f"{what} must be below 2**63, got {count}.")


def check_number(what: str, number: Any) -> None:
    """Accepts an integer, one of numpy too. Its range is the function's own affair."""
    if isinstance(number, bool) or not isinstance(number, numbers.Integral):
        raise InvalidTypeError(f"{what} must be an int, got {type(number).__name__}.")


def check_meta(what: str, meta: Any) -> None:
    """Accepts a `KVBatchMeta`, and metas of others that have its attributes."""
    if not (hasattr(meta, "partition_id") and hasattr(meta, "sample_ids")):
        raise InvalidTypeError(f"{what} must be a KVBatchMeta, got {type(meta).__name__}.")


def check_dict(what: str, values: Any) -> None:
    """Accepts a mapping."""
    if not isinstance(values, Mapping):
        raise InvalidTypeError(f"{what} must be a dict, got {type(values).__name__}.")


def check_columns(what: str, columns: Any) -> None:
    """Accepts a mapping and a ``TensorDict``."""
    if not (hasattr(columns, "keys") and hasattr(columns, "get")):
        raise InvalidTypeError(f"{what} must be a dict or a TensorDict, got {type(columns).__name__}.")


def takes(**checks: Callable[[str, Any], Any]) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """A function whose arguments are checked before it runs: name of the argument -> its check.

    An argument that is left out is not checked, and None only where it is not the default.
    """

    def mark(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        parameters = inspect.signature(function).parameters
        places = [
            (place, name, checks[name], parameters[name].default is None)
            for place, name in enumerate(parameters)
            if name in checks
        ]

        @functools.wraps(function)
        def checked(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            for place, name, check, or_none in places:
                if place < len(args):
                    value = args[place]
                elif name in kwargs:
                    value = kwargs[name]
                else:
                    continue
                if value is not None or not or_none:
                    check(f"{function.__name__}: {name}", value)
            return function(*args, **kwargs)

        return checked

    return mark
