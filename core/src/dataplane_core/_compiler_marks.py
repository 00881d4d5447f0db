"""Imports tensordict without torch's compiler, and keeps the compiler out of the data plane's own code.

tensordict marks a few of its functions for ``torch.compile`` while it is imported. That imports ``torch._dynamo``,
which takes 1.5 s and 70 MB, also in processes that never compile: controllers, storage units, commands. This module
delays the marks until ``torch._dynamo`` is imported. See docs/decisions/2026-11-29-in-the-clients-process.md.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import wrapt
from torch import compiler

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def load_compiler() -> None:
    """Imports ``torch._dynamo``. torch does so with a process's first jagged tensor, which takes 1 to 2 s."""
    importlib.import_module("torch._dynamo")


def not_compiled(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """A function that runs as it is, also where its caller is compiled with ``torch.compile``.

    It sends bytes and waits, which the compiler cannot follow. `torch.compiler.disable` does the same, but imports the
    compiler.
    """
    runs = [function]
    disable: Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]] = compiler.disable
    wrapt.register_post_import_hook(lambda _: runs.insert(0, disable(function)), "torch._dynamo")

    @functools.wraps(function)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        return runs[0](*args, **kwargs)

    return call


def _deferred(mark: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A mark that is applied once ``torch._dynamo`` is imported. Like the original, it returns the function it got."""

    @functools.wraps(mark)
    def defer(function: Any) -> Any:
        wrapt.register_post_import_hook(lambda _: mark(function), "torch._dynamo")
        return function

    return defer


if "torch._dynamo" not in sys.modules:
    _marks: Final = {name: getattr(compiler, name) for name in ("allow_in_graph", "assume_constant_result")}
    try:
        for _name, _mark in _marks.items():
            setattr(compiler, _name, _deferred(_mark))
        importlib.import_module("tensordict")
    finally:
        for _name, _mark in _marks.items():
            setattr(compiler, _name, _mark)
