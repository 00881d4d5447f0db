"""The client's checks of arguments and replies.

Checks of arguments raise `InvalidTypeError` or `InvalidRequestError`. Checks of replies raise `BackendError`.
"""

from __future__ import annotations

from typing import Any, get_args

from dataplane_core.arguments import check_count, check_list
from dataplane_core.errors import BackendError, InvalidRequestError, InvalidTypeError, preview
from dataplane_core.spec import PartitionInfo, Sampler, check_text


def check_name(what: str, name: Any) -> None:
    """Accepts a non-empty str of valid Unicode."""
    if not isinstance(name, str):
        raise InvalidTypeError(f"{what} must be a str, got {type(name).__name__}.")
    if not name:
        raise InvalidRequestError(f"{what} must not be empty.")
    check_text(what, name)


def check_names(what: str, names: Any) -> list[str]:
    """Accepts a list of names; returns it without repeats, and without subclasses of str."""
    checked = check_list(what, names)
    for name in checked:
        check_name(f"a name in {what}", name)
    return list(dict.fromkeys(map(str.__str__, checked)))


def check_ids(sample_ids: Any) -> list[str]:
    """Accepts a list of non-empty strings; returns it with its repeats, and without subclasses of str."""
    ids = check_list("sample_ids", sample_ids)
    if set(map(type, ids)) != {str} or not all(ids):
        for index, sample_id in enumerate(ids):
            if not isinstance(sample_id, str):
                raise InvalidTypeError(f"sample_ids[{index}] must be a str, got {type(sample_id).__name__}.")
            if not sample_id:
                raise InvalidRequestError(f"sample_ids[{index}] must not be empty.")
        ids = [str.__str__(each) for each in ids]
    check_text("sample_ids", "".join(ids))
    return ids


def check_sampler(sampler: Any, dp_rank: Any, dp_size: Any, batch_index: Any) -> None:
    """Accepts a sampler's name, and the rank that it needs."""
    if sampler not in get_args(Sampler):
        raise InvalidRequestError(f"sampler must be one of {preview(get_args(Sampler))}, got {sampler!r}.")
    if dp_size is not None:
        check_count("dp_size", dp_size)
    for what, number in (("dp_rank", dp_rank), ("batch_index", batch_index)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            raise InvalidRequestError(f"{what} must be an int of at least 0, got {number!r}.")
    if dp_rank is None and dp_size is not None:
        raise InvalidRequestError("dp_size needs a dp_rank: a claim gets the part of one rank.")
    if dp_rank is None and batch_index is not None:
        raise InvalidRequestError("batch_index needs a dp_rank: it counts the batches of a rank.")
    if dp_rank is not None and dp_size is not None and dp_rank >= dp_size:
        raise InvalidRequestError(f"dp_rank {dp_rank} is not below dp_size {dp_size}.")
    if sampler == "balanced" and (dp_rank is None or dp_size is None):
        raise InvalidRequestError("sampler 'balanced' needs a dp_rank and a dp_size.")


def check_seconds(what: str, seconds: Any, *, at_least_zero: bool = False) -> None:
    """Accepts a finite number of seconds above 0, or also 0 with ``at_least_zero``."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise InvalidTypeError(f"{what} must be a number of seconds, got {type(seconds).__name__}.")
    if not (0 <= seconds < float("inf") and (seconds > 0 or at_least_zero)):
        raise InvalidRequestError(f"{what} must be {'at least' if at_least_zero else 'above'} 0 s, got {seconds}.")


def strings_of(column: Any) -> list[str]:
    """The strings among the items of an object column."""
    items = column.tolist() if hasattr(column, "tolist") else column
    return [item for item in items if isinstance(item, str)]


def check_enum(where: str, name: str, strings: list[str], info: PartitionInfo) -> None:
    """Accepts strings that the enum of the field contains, if it has one."""
    words = info.enums.get(name)
    if words is None:
        return
    known = set(words)
    unknown = list(dict.fromkeys(each for each in strings if each not in known))
    if unknown:
        raise InvalidRequestError(
            f"{where} refused: field '{name}' holds {preview(unknown)}. Expected strings of its enum: "
            f"{preview(words, limit=8)}. Nothing was written."
        )


def check_counts(where: str, num_samples: int, **counts: int) -> None:
    """Refuses a backend's reply with a wrong number of items."""
    for what, count in counts.items():
        if count != num_samples:
            raise BackendError(f"{where}: the backend's reply holds {count} {what} for {num_samples} samples.")
