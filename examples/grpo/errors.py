"""Errors that end the program with one clear message instead of a traceback."""

from __future__ import annotations

__all__ = ["RunFailedError", "UserError"]


class UserError(Exception):
    """What the user gave cannot be used: a file, a configuration key, too few CPUs. Exit status 2."""


class RunFailedError(Exception):
    """The run broke while it ran. Exit status 1, as for every `DataPlaneError`, such as that of a failed actor."""
