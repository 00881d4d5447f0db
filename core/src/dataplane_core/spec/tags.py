"""Tags: small primitive values of a sample, stored beside its tensors, and filters on them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_core.schema import WEIGHT_VERSION_TAG

TagValue: TypeAlias = bool | int | float | str | None
#: Tag name -> the value that the tag must equal, or ``(operator, operand)``.
TagFilter: TypeAlias = Mapping[str, Any]
#: A filter in full form: tag name -> ``(operator, operand)``.
FullTagFilter: TypeAlias = dict[str, tuple[str, Any]]

_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, options: value in options,
}
#: Before an operator: of a group, one sample that passes is enough.
_ANY: Final = "any "
_COMPARE.update({f"{_ANY}{symbol}": compare for symbol, compare in _COMPARE.items()})

#: The operators that a tag filter may use.
FILTER_OPERATORS: Final[tuple[str, ...]] = tuple(_COMPARE)


def check_text(what: str, text: str) -> None:
    """Accepts valid Unicode, which has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{what} is not valid Unicode: {error}.") from error


def check_tags(tags: Sequence[Mapping[str, TagValue]], num_samples: int) -> list[dict[str, TagValue]]:
    """Checks and copies one dict of tags per sample."""
    if isinstance(tags, Mapping | str) or not isinstance(tags, Sequence):
        raise InvalidTypeError(
            f"tags must be a list with one dict per sample, got {type(tags).__name__}.",
            hint="To give all samples the same tags, write tags=[{...}] * len(sample_ids).",
        )
    if len(tags) != num_samples:
        raise InvalidRequestError(
            f"tags must align 1:1 with sample_ids, got {len(tags)} entries for {num_samples} ids."
        )
    rows: list[dict[str, TagValue]] = []
    for index, row in enumerate(tags):
        if not isinstance(row, Mapping):
            raise InvalidTypeError(f"tags[{index}] must be a dict of primitives, got {type(row).__name__}.")
        for name, value in row.items():
            if not isinstance(name, str):
                raise InvalidTypeError(f"tags[{index}]: a tag name must be a str, got {type(name).__name__}.")
            if not name.isascii():
                check_text(f"tags[{index}]: the tag name {name!r}", name)
            if value is not None and type(value) not in (bool, int, float, str):
                raise InvalidTypeError(
                    f"tags[{index}]['{name}'] must be None, bool, int, float or str, got {type(value).__name__}. "
                    "Put larger values in a field; turn numpy or torch scalars into Python numbers with .item()."
                )
            if type(value) is int and not -(2**63) <= value < 2**63:
                raise InvalidTypeError(f"tags[{index}]['{name}'] does not fit in 64 bits: {value}.")
            if type(value) is str and name == WEIGHT_VERSION_TAG:
                raise InvalidTypeError(
                    f"tags[{index}]['{name}'] must be a number, got the str {value!r}. Versions are compared, and as "
                    "strings '10' comes before '9'. For other names of weights, use another tag."
                )
            if type(value) is str and not value.isascii():
                check_text(f"tags[{index}]['{name}']", value)
        rows.append(dict(row))
    return rows


def check_tag_filter(tag_filter: TagFilter | None) -> FullTagFilter | None:
    """Checks a filter, and brings it to its full form, ``{name: (operator, operand)}``."""
    if tag_filter is None:
        return None
    if not isinstance(tag_filter, Mapping):
        raise InvalidRequestError(f"tag_filter must be a dict, got {type(tag_filter).__name__}.")
    full: FullTagFilter = {}
    for name, condition in tag_filter.items():
        if not isinstance(condition, (tuple, list)):
            condition = ("==", condition)
        if len(condition) != 2 or type(condition[0]) is not str or condition[0] not in _COMPARE:
            symbols = ", ".join(symbol for symbol in FILTER_OPERATORS if _ANY not in symbol)
            raise InvalidRequestError(
                f"tag_filter['{name}'] must be a value or (operator, operand) with an operator of {symbols}, or 'any ' "
                f"before one of them; got {condition!r}."
            )
        symbol, operand = condition
        is_list = symbol.endswith("in")
        operands = operand if is_list and isinstance(operand, (list, tuple)) else [operand]
        if (is_list and not isinstance(operand, (list, tuple))) or not all(
            value is None or type(value) in (bool, int, float, str) for value in operands
        ):
            raise InvalidRequestError(
                f"tag_filter['{name}']: the operand of '{symbol}' must be "
                f"{'a list of primitives' if is_list else 'a primitive'}, got {operand!r}."
            )
        if not all(-(2**63) <= value < 2**63 for value in operands if type(value) is int):
            raise InvalidRequestError(f"tag_filter['{name}']: the operand does not fit in 64 bits: {operand!r}.")
        check_text(f"tag_filter[{name!r}]", "".join([str(name), *(value for value in operands if type(value) is str)]))
        full[str(name)] = (str(symbol), list(operand) if is_list else operand)
    return full


def matches(tags: Mapping[str, Any], tag_filter: Mapping[str, tuple[str, Any]] | None) -> bool:
    """Whether all conditions of a full-form filter hold. False if a tag is missing or its type cannot be compared."""
    try:
        for name, (symbol, operand) in (tag_filter or {}).items():
            if name not in tags or not _COMPARE[symbol](tags[name], operand):
                return False
    except TypeError:
        return False
    return True


def group_matches(group: Collection[Mapping[str, Any]], tag_filter: Mapping[str, tuple[str, Any]] | None) -> bool:
    """Whether the samples of a group, by their tags, pass a full-form filter: all of them each condition, or after
    ``any`` one of them."""
    if len(group) == 1:
        return all(matches(tags, tag_filter) for tags in group)
    for name, condition in (tag_filter or {}).items():
        some = any if condition[0].startswith(_ANY) else all
        if not some(matches(tags, {name: condition}) for tags in group):
            return False
    return True
