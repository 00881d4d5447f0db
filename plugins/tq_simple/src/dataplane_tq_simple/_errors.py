"""The engine's own errors."""

from __future__ import annotations

from dataplane_core.errors import BackendUnavailableError, LostReplyError


class UnitsGoneError(BackendUnavailableError):
    """A storage unit has ended, and a request to it was not carried out; or no unit takes rows.

    Units are started again, and others take new rows meanwhile: try again.
    """


class LineBrokenError(LostReplyError):
    """The connection to the controller broke, or leads to a process that is the controller no longer."""
