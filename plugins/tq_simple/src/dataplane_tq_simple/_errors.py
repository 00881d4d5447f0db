"""The engine's own error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataplane_core.errors import DataPlaneError

__all__ = ["RowsGoneError"]


class RowsGoneError(DataPlaneError, KeyError):
    """A storage unit does not hold some of the rows that were read.

    Handles are never used twice: the rows were deleted, or never written. Ask the controller again where the samples
    are, and read again.

    Attributes:
        handles: All handles of the failed request to one unit; at least one of them is missing.
    """

    default_retryable = True

    def __init__(self, message: str, *, handles: Sequence[int] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.handles = tuple(handles)
