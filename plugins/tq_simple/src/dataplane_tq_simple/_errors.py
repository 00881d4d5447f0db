"""The engine's own errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataplane_core.errors import BackendUnavailableError, DataPlaneError

__all__ = ["RowsGoneError", "UnitsGoneError"]


class RowsGoneError(DataPlaneError, KeyError):
    """A storage unit does not hold some of the rows that were read.

    Handles are never used twice: the rows were deleted, or never written. Ask the controller again where the samples
    are, and read again.

    Attributes:
        handles: The rows that are gone if ``exact``; else all handles of the failed request to one unit, of which at
            least one is missing.
        exact: Whether all of ``handles`` are gone, as those of a unit that has ended.
    """

    default_retryable = True

    def __init__(self, message: str, *, handles: Sequence[int] = (), exact: bool = False, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.handles = tuple(handles)
        self.exact = exact


class UnitsGoneError(BackendUnavailableError):
    """A storage unit has ended, and a request to it was not carried out; or no unit takes rows.

    Units are started again, and others take new rows meanwhile: try again.
    """
