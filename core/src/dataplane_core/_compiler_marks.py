"""Imports tensordict without torch's compiler.

tensordict marks a few of its functions for ``torch.compile`` while it is imported. That imports ``torch._dynamo``,
which takes 1.5 s and 70 MB, also in processes that never compile: controllers, storage units, commands. This module
delays the marks until ``torch._dynamo`` is imported. See docs/decisions/2026-11-22-import-without-the-compiler.md.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import wrapt
from torch import compiler

__all__ = ["load_compiler"]


def load_compiler() -> None:
    """Imports ``torch._dynamo``. torch does so with a process's first jagged tensor, which takes 1 to 2 s."""
    importlib.import_module("torch._dynamo")


def _deferred(mark: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A mark that is applied once ``torch._dynamo`` is imported. Like the original, it returns the function it got."""

    @functools.wraps(mark)
    def defer(function: Any) -> Any:
        wrapt.register_post_import_hook(lambda _: mark(function), "torch._dynamo")
        return function

    return defer


if "torch._dynamo" not in sys.modules:
    with (
        mock.patch.object(compiler, "allow_in_graph", _deferred(compiler.allow_in_graph)),
        mock.patch.object(compiler, "assume_constant_result", _deferred(compiler.assume_constant_result)),
    ):
        importlib.import_module("tensordict")
