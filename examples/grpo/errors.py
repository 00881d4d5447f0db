"""Errors that end the program with one clear message instead of a traceback."""

from __future__ import annotations

__all__ = ["RunFailedError", "UserError"]


class UserError(Exception):
    """What the user gave cannot be used: a file, a configuration key, too few CPUs. Exit status 2."""


class RunFailedError(Exception):
    """The run broke while it ran: an actor died, raised, or did not answer in time. Exit status 1.

    Attributes:
        details: What the actors reported, tracebacks included; too long for a terminal.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details
