"""Errors that the engine raises besides those of core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataplane_core.errors import DataPlaneError

__all__ = ["RowsGoneError"]


class RowsGoneError(DataPlaneError, KeyError):
    """A storage unit does not hold some of the row handles that were read.

    Handles are never used twice, so this means deleted (or never written), not wrong data: ask the controller anew
    where the samples are and read again.

    Attributes:
        handles: The handles that the failed request asked one unit for; at least one of them is not there.
    """

    default_retryable = True

    def __init__(self, message: str, *, handles: Sequence[int] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.handles = tuple(handles)
