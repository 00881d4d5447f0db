"""What callers give, checked by the types that say what it may be; a wrong one is named in our words."""

from __future__ import annotations

import numbers
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from dataplane_core.errors import InvalidRequestError, InvalidTypeError

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

#: msgspec's word for a type -> ours.
_KINDS: Final = {"array": "a list", "object": "a dict", "null": "None", "str": "a str", "int": "an int"}
#: What msgspec says of a value of the right type -> what is said of it here.
_BOUNDS: Final = (
    (re.compile(r"Expected `\w+` of length >= 1"), "must not be empty"),
    (re.compile(r"Expected `\w+` of length <= (\d+)"), r"must have a length of at most \1"),
    (re.compile(r"Expected `\w+` >= ([-\d.e+]+)"), r"must be at least \1"),
    (re.compile(r"Expected `\w+` > ([-\d.e+]+)"), r"must be above \1"),
    (re.compile(re.escape(f"Expected `float` <= {sys.float_info.max}")), "must be finite"),
    (re.compile(r"Expected `\w+` <= ([-\d.e+]+)"), r"must be at most \1"),
)
_encoder: Final = msgspec.msgpack.Encoder()


def checked(where: str, form: type[_T], /, **arguments: Any) -> _T:
    """An object of a `msgspec.Struct` that declares what its values may be, such as a request.

    A list may be given as any iterable but a str, and a str or a number as one of a subclass. If ``form`` has a method
    ``check``, that is called. ``where`` is the operation, for messages.

    Raises:
        InvalidTypeError: A value has another type. The message says which was expected.
        InvalidRequestError: A value is out of bounds, a str is not valid Unicode, or values do not fit together.

    Example:
        >>> from dataplane_core.spec.requests import ConsumptionRequest
        >>> checked("check_consumption_status", ConsumptionRequest, partition_id="step-1", task_names=("trainer",))
        ConsumptionRequest(partition_id='step-1', task_names=['trainer'], deadline=inf)
    """
    while True:
        try:
            made = msgspec.convert(arguments, form)
            break
        except msgspec.ValidationError as error:
            name, bracket, rest = _place_of(error).removeprefix(".").partition("[")
            value: Any = arguments.get(name)
            if bracket or (plain := _plain(value, error)) is None:
                hints = get_type_hints(form, include_extras=True)
                raise _refusal(f"{where}: {name}", bracket + rest, value, hints.get(name), error) from None
            arguments[name] = plain
    made = _sendable(where, form, made)
    check = getattr(made, "check", None)
    if check is not None:
        check()
    return made


def checked_as(what: str, form: Any, value: Any) -> Any:
    """As `checked`, for one value: ``what`` names it, and ``form`` is a type such as ``list[Name]``.

    Example:
        >>> checked_as("stream: prefetch", Count, 2)
        2
    """
    try:
        made = msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        place = _place_of(error)
        if not place and (plain := _plain(value, error)) is not None:
            return checked_as(what, form, plain)
        if get_origin(form) is dict and isinstance(value, Mapping):  # msgspec does not say which item is wrong
            kinds = get_args(form)
            items = ((checked_as(f"{what}: a key", kinds[0], key), item) for key, item in value.items())
            return {key: checked_as(f"{what}[{key!r:.100}]", kinds[1], item) for key, item in items}
        raise _refusal(what, place, value, form, error) from None
    return _sendable(what, form, made)


def check_name(what: str, name: Any) -> None:
    """Accepts a non-empty str of valid Unicode."""
    if not (type(name) is str and name and name.isascii()):
        checked_as(what, Name, name)


def check_names(what: str, names: Any) -> list[str]:
    """Accepts a list of names; returns it without repeats."""
    return list(dict.fromkeys(checked_as(what, list[Name], names)))


def _sendable(what: str, form: Any, made: Any) -> Any:
    """A value that can be sent over a socket: without subclasses of str and numbers, and of valid Unicode."""
    try:
        _encoder.encode(made)
        return made
    except UnicodeEncodeError as error:
        for name in getattr(made, "__struct_fields__", ()):
            _sendable(f"{what}: {name}", Any, getattr(made, name))
        raise InvalidRequestError(f"{what} is not valid Unicode: {error}.") from error
    except TypeError:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(made, enc_hook=as_plain), type=form)


def as_plain(value: Any) -> object:
    """A value of a subclass as Python's own: an ``enc_hook`` of msgspec, whose word for "no such value" is
    `NotImplementedError`."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    raise NotImplementedError(f"a value of {type(value).__name__} cannot be sent")


def _plain(value: Any, error: Exception) -> list[Any] | float | None:
    """An iterable that was given where a list is due, as a list; a number of another type, such as numpy's, as Python's
    own."""
    wanted, is_own = str(error).removeprefix("Expected `"), type(value) in (bool, int, float)
    if isinstance(value, numbers.Integral) and not is_own and wanted.startswith("int"):
        return int(value)
    if isinstance(value, numbers.Real) and not is_own and wanted.startswith("float"):
        return float(value)
    is_other = not isinstance(value, (str, bytes, list, tuple)) and hasattr(value, "__iter__")
    return list(value) if is_other and wanted.startswith("array") else None


def _place_of(error: msgspec.ValidationError) -> str:
    """Where a wrong value is, such as ``.fields[3]``."""
    place = re.search(r" - at `\$(.*)`$", str(error))
    return place[1] if place else ""


def _refusal(what: str, place: str, value: Any, form: Any, error: Exception) -> Exception:
    """The error for a value that is not what its type says."""
    for index in re.findall(r"\[(\d+)\]", place):
        value = list(value)[int(index)]
    text = str(error).partition(" - at ")[0]
    wrong_type = re.fullmatch(r"Expected `(.+)`, got `.+`", text)
    if wrong_type:
        kinds = [_KINDS.get(kind, kind) for kind in wrong_type[1].split(" | ")]
        hint = "For a single one, give a list of it." if "a list" in kinds and isinstance(value, str) else None
        return InvalidTypeError(f"{what}{place} must be {' or '.join(kinds)}, got {type(value).__name__}.", hint=hint)
    options = _options(form)
    said = f"must be one of {', '.join(map(repr, options))}" if options else text
    for pattern, words in _BOUNDS:
        said = pattern.sub(words, said)
    return InvalidRequestError(f"{what}{place} {said}, got {value!r:.100}.")


def _options(form: Any) -> tuple[Any, ...]:
    """What a `Literal`, or a union with one, may be."""
    if get_origin(form) is Literal:
        return get_args(form)
    return next((options for part in get_args(form) if (options := _options(part))), ())


def check_list(what: str, items: Any) -> list[Any]:
    """Accepts any iterable but a string; returns it as a list."""
    if isinstance(items, (str, bytes)) or not hasattr(items, "__iter__"):
        hint = "For a single one, give a list of it." if isinstance(items, str) else None
        raise InvalidTypeError(f"{what} must be a list, got {type(items).__name__}.", hint=hint)
    return list(items)


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
