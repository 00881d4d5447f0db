"""What callers give, checked by the types that say what it may be; a wrong one is named in our words."""

from __future__ import annotations

import functools
import inspect
import numbers
import re
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, ParamSpec, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from dataplane_core.errors import InvalidRequestError, InvalidTypeError

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_T = TypeVar("_T")

#: A str that is not empty.
Name: TypeAlias = Annotated[str, Meta(min_length=1)]
#: An int from 1 on, of 64 bits.
Count: TypeAlias = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
#: An int from 0 on, of 64 bits.
Index: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
#: A finite number of seconds from 0 on.
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
#: A finite number of seconds above 0.
PositiveSeconds: TypeAlias = Annotated[float, Meta(gt=0, le=sys.float_info.max)]

_KINDS: Final = {"array": "list", "object": "dict", "null": "None"}
#: What msgspec says of a value of the right type -> what is said of it here.
_BOUNDS: Final = (
    (re.compile(r"Expected `str` of length >= 1"), "must not be empty"),
    (re.compile(r"Expected `\w+` >= ([-\d.e+]+)"), r"must be at least \1"),
    (re.compile(r"Expected `\w+` > ([-\d.e+]+)"), r"must be above \1"),
    (re.compile(r"Expected `\w+` <= ([-\d.e+]+)"), r"must be at most \1"),
)
_encoder: Final = msgspec.msgpack.Encoder()


def checked(where: str, form: type[_T], /, **arguments: Any) -> _T:
    """An object of a type that declares what its values may be, such as a request.

    A list may be given as any iterable but a str, and a str or a number as that of a subclass.

    Args:
        where: The operation. The error's message begins with it.
        form: A `msgspec.Struct`.
        arguments: Its values. They are not changed.

    Raises:
        InvalidTypeError: A value has another type. The message says which was expected.
        InvalidRequestError: A value is out of bounds, a str is not valid Unicode, or values do not fit together.

    Example:
        >>> from dataplane_core.spec import ConsumptionRequest
        >>> checked("check_consumption_status", ConsumptionRequest, partition_id="step-1", task_names=("trainer",))
        ConsumptionRequest(partition_id='step-1', task_names=['trainer'], deadline=inf)
    """
    while True:
        try:
            made = msgspec.convert(arguments, form)
            break
        except msgspec.ValidationError as error:
            place, value = _place_of(error, arguments)
            if "`array" not in str(error) or place not in arguments or _is_listed(value):
                raise _refusal(where, form, place, value, error) from None
            arguments[place] = list(value)
    try:
        _encoder.encode(made)  # as it would go over a socket
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{where} refused: a text is not valid Unicode: {error}.") from error
    except TypeError:  # a subclass of str or of a number
        made = msgspec.msgpack.decode(msgspec.msgpack.encode(made, enc_hook=as_plain), type=form)
    check = getattr(made, "check", None)
    if check is not None:
        check()
    return made


def as_plain(value: Any) -> object:
    """A value of a subclass as Python's own, for an encoder of msgspec.

    Raises:
        NotImplementedError: It is none. That is how msgspec wants to be told.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    raise NotImplementedError(f"a value of {type(value).__name__} cannot be sent")


def _is_listed(value: Any) -> bool:
    return isinstance(value, (str, bytes, list, tuple)) or not hasattr(value, "__iter__")


def _place_of(error: msgspec.ValidationError, arguments: Mapping[str, Any]) -> tuple[str, Any]:
    """Where a wrong value is, such as ``fields[3]``, and the value, as far as its place says."""
    place = str(error).rpartition("`$.")[2].removesuffix("`")
    name, _, indexes = place.partition("[")
    value = arguments.get(name)
    for index in indexes.removesuffix("]").split("]["):
        if index.isdecimal() and isinstance(value, (list, tuple)):
            value = value[int(index)]
    return place, value


def _refusal(where: str, form: Any, place: str, value: Any, error: Exception) -> Exception:
    """The error for a value that is not what its type says."""
    text = str(error).rpartition(" - at ")[0]
    wrong_type = re.fullmatch(r"Expected `(.+)`, got `.+`", text)
    if wrong_type:
        kinds = [_KINDS.get(kind, kind) for kind in wrong_type[1].split(" | ")]
        hint = "For a single one, give a list of it." if "list" in kinds and isinstance(value, str) else None
        said = f"{where} refused: {place} must be {' or '.join(kinds)}, got {type(value).__name__}."
        return InvalidTypeError(said, hint=hint)
    options = _options(get_type_hints(form).get(place))
    words = f"must be one of {', '.join(map(repr, options))}" if options else text
    for pattern, said in _BOUNDS:
        if pattern.fullmatch(text):
            words = pattern.sub(said, text)
    return InvalidRequestError(f"{where} refused: {place} {words}, got {value!r:.100}.")


def _options(form: Any) -> tuple[Any, ...]:
    """What a `Literal`, or a union with one, may be."""
    if get_origin(form) is Literal:
        return get_args(form)
    return next((options for part in get_args(form) if (options := _options(part))), ())


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
