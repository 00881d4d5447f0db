"""The plugin manager of a client: one backend and the middleware around it, with checked signatures."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any

import pluggy

from dataplane_core.backends import Backend
from dataplane_core.errors import ConfigError, PluginSignatureError
from dataplane_core.spec.operations import CONTRACT_VERSION, OPERATIONS, required_operations


@pluggy.HookspecMarker("dataplane")(firstresult=True)
def _spec(request: Any) -> Any:
    """What pluggy knows of each operation."""


def build_manager(backend: Backend, middleware: Sequence[Any]) -> pluggy.PluginManager:
    """Checks a backend, and registers the middleware around it (outermost first).

    The client registers the backend itself: see `Entrance.guard`.

    Raises:
        PluginSignatureError: A hook's name or signature is wrong. The message names plugin, hook and argument.
        ConfigError: A middleware object is listed twice.
    """
    check_backend_class(type(backend), backend.name)
    manager = pluggy.PluginManager("dataplane")
    manager.add_hookspecs(type("Operations", (), dict.fromkeys(OPERATIONS, _spec)))
    # pluggy calls the wrapper that was registered last first, so the outermost is registered last
    for position, plugin in reversed(list(enumerate(middleware))):
        _check_middleware(plugin)
        if manager.is_registered(plugin):
            raise ConfigError(
                f"middleware lists the same {type(plugin).__name__} object twice. Expected an object for each entry."
            )
        manager.register(plugin, name=f"middleware {position} {type(plugin).__name__}")
    return manager


def check_backend_class(cls: type[Backend], name: str = "") -> None:
    """Checks a backend class against the table of operations.

    Args:
        cls: The class.
        name: Its entry-point name, for messages.

    Raises:
        PluginSignatureError: The class is not a `Backend`, is written for a newer contract, lacks an operation, has an
            operation whose signature is not ``(self, request)``, or a public method with almost an operation's name.
    """
    label = f"backend '{name or getattr(cls, '__name__', cls)}'"
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise PluginSignatureError(
            f"{label}: its entry point gives {cls!r}. Expected a subclass of dataplane_core.Backend."
        )
    if cls.contract_version > CONTRACT_VERSION:
        raise PluginSignatureError(
            f"{label} is written for contract version {cls.contract_version}. This dataplane-core speaks version "
            f"{CONTRACT_VERSION}.",
            hint="Upgrade it: pip install --upgrade dataplane-core.",
        )
    methods = _public_methods(cls)
    for operation in required_operations(cls.capabilities):
        if operation not in methods:
            near = difflib.get_close_matches(operation, methods, n=1, cutoff=0.75)
            raise PluginSignatureError(
                f"{label} does not implement '{operation}', which its capabilities require.",
                hint=f"Did you mean '{operation}' where you wrote '{near[0]}'?" if near else None,
            )
    for method in methods:
        near = [] if hasattr(Backend, method) else difflib.get_close_matches(method, OPERATIONS, n=1, cutoff=0.85)
        if method in OPERATIONS:
            _check_signature(label, method, getattr(cls, method))
        elif near:
            raise PluginSignatureError(
                f"{label} has a public method '{method}', which is not an operation, but similar to '{near[0]}'.",
                hint=f"Rename it to '{near[0]}' if it is meant to be the hook, else begin its name with an underscore.",
            )


def _check_middleware(plugin: Any) -> None:
    cls = type(plugin)
    label = f"middleware '{cls.__name__}'"
    wrappers = 0
    for method in _public_methods(cls):
        member = getattr(cls, method)
        marks = getattr(member, "dataplane_impl", None)
        where = f"{label}, hook '{method}'"
        if marks is None and method not in OPERATIONS:
            continue
        if marks is None or not marks.get("wrapper"):
            raise PluginSignatureError(f"{where}: is not marked as a wrapper. Expected @hookimpl(wrapper=True).")
        if method not in OPERATIONS:
            near = difflib.get_close_matches(method, OPERATIONS, n=1, cutoff=0.6)
            raise PluginSignatureError(
                f"{where}: is not an operation.", hint=f"Did you mean '{near[0]}'?" if near else None
            )
        _check_signature(label, method, member)
        if not inspect.isgeneratorfunction(member):
            raise PluginSignatureError(f"{where}: is no generator. Expected 'reply = yield' where the operation runs.")
        wrappers += 1
    if not wrappers:
        raise PluginSignatureError(f"{label} wraps no operation. Expected methods marked @hookimpl(wrapper=True).")


def _public_methods(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_") and inspect.isroutine(getattr(cls, name, None))]


def _check_signature(label: str, operation: str, member: Any) -> None:
    """Only ``(self, request)`` will do: pluggy would pass an argument with a default, or a keyword-only one, never."""
    where = f"{label}, hook '{operation}'"
    if inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member):
        raise PluginSignatureError(f"{where}: is async. Expected a plain method; run your event loop inside it.")
    parameters = inspect.signature(member).parameters.values()
    shown = inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters])
    if isinstance(inspect.getattr_static(member, "__self__", None), type) or str(shown) != "(self, request)":
        raise PluginSignatureError(f"{where}: takes {shown}. Expected (self, request).")
