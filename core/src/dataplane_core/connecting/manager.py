"""The plugin manager of a client: one backend and the middleware around it, with checked signatures."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any, Final

import pluggy

from dataplane_core.backends import Backend, required_operations
from dataplane_core.errors import ConfigError, PluginSignatureError
from dataplane_core.spec import CONTRACT_VERSION, DataPlaneSpec

#: The names of all hooks.
OPERATION_NAMES: Final[tuple[str, ...]] = tuple(
    name for name, member in vars(DataPlaneSpec).items() if not name.startswith("_") and inspect.isfunction(member)
)


class _Manager(pluggy.PluginManager):
    """Recognises a backend's hooks by operation name, as pytest does for ``pytest_*``."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> pluggy.HookimplOpts | None:
        opts = super().parse_hookimpl_opts(plugin, name)
        if opts is None and isinstance(plugin, Backend) and name in OPERATION_NAMES:
            opts = {
                "wrapper": False,
                "hookwrapper": False,
                "optionalhook": False,
                "tryfirst": False,
                "trylast": False,
                "specname": None,
            }
        return opts


def build_manager(backend: Backend, middleware: Sequence[Any]) -> pluggy.PluginManager:
    """Registers a backend and, around it, middleware (outermost first).

    Raises:
        PluginSignatureError: A hook's name or signature is wrong. The message names plugin, hook and argument.
        ConfigError: A middleware object is listed twice.
    """
    check_backend_class(type(backend), backend.name)
    manager = _Manager("dataplane")
    manager.add_hookspecs(DataPlaneSpec)
    manager.register(backend, name=f"backend {backend.name}")
    # pluggy calls the wrapper that was registered last first, so the outermost is registered last
    for position, plugin in reversed(list(enumerate(middleware))):
        _check_middleware(plugin)
        if manager.is_registered(plugin):
            raise ConfigError(
                f"middleware lists the same {type(plugin).__name__} object twice. Expected an object for each entry."
            )
        manager.register(plugin, name=f"middleware {position} {type(plugin).__name__}")
    manager.check_pending()
    return manager


def check_backend_class(cls: type[Backend], name: str = "") -> None:
    """Checks a backend class against the hook specs.

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
    for operation in required_operations(cls.capabilities):
        if not callable(getattr(cls, operation, None)):
            near = difflib.get_close_matches(operation, _public_methods(cls), n=1, cutoff=0.75)
            raise PluginSignatureError(
                f"{label} does not implement '{operation}', which its capabilities require.",
                hint=f"Did you mean '{operation}' where you wrote '{near[0]}'?" if near else None,
            )
    for method in _public_methods(cls):
        if method in OPERATION_NAMES:
            _check_signature(label, method, getattr(cls, method))
            continue
        near = difflib.get_close_matches(method, OPERATION_NAMES, n=1, cutoff=0.85)
        if near and not hasattr(Backend, method):
            raise PluginSignatureError(
                f"{label} has a public method '{method}', which is not an operation, but similar to '{near[0]}'.",
                hint=f"Rename it to '{near[0]}' if it is meant to be the hook, else begin its name with an underscore.",
            )


def _check_middleware(plugin: Any) -> None:
    label = f"middleware '{type(plugin).__name__}'"
    cls = type(plugin)
    found = 0
    for method in _public_methods(cls):
        member = getattr(cls, method)
        opts = getattr(member, "dataplane_impl", None)
        if opts is None:
            if method in OPERATION_NAMES:
                raise PluginSignatureError(
                    f"{label}: '{method}' is not marked. Expected @hookimpl(wrapper=True) on every hook."
                )
            continue
        if not opts.get("wrapper"):
            raise PluginSignatureError(
                f"{label}: '{method}' is marked @hookimpl, not @hookimpl(wrapper=True). Middleware only wraps."
            )
        if method not in OPERATION_NAMES:
            near = difflib.get_close_matches(method, OPERATION_NAMES, n=1, cutoff=0.6)
            raise PluginSignatureError(
                f"{label}: '{method}' is not an operation.", hint=f"Did you mean '{near[0]}'?" if near else None
            )
        _check_signature(label, method, member)
        if not inspect.isgeneratorfunction(member):
            raise PluginSignatureError(
                f"{label}, hook '{method}': is no generator. Expected 'reply = yield' where the operation is to run."
            )
        found += 1
    if not found:
        raise PluginSignatureError(f"{label} wraps no operation. Expected methods marked @hookimpl(wrapper=True).")


def _public_methods(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_") and inspect.isroutine(getattr(cls, name, None))]


def _check_signature(label: str, operation: str, member: Any) -> None:
    where = f"{label}, hook '{operation}'"
    if inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member):
        raise PluginSignatureError(f"{where}: is async. Expected a plain method; run your event loop inside it.")
    parameters = list(inspect.signature(member).parameters.values())
    for parameter in parameters:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise PluginSignatureError(f"{where}: takes '*{parameter.name}'. Expected (self, request).")
        if parameter.default is not inspect.Parameter.empty:
            raise PluginSignatureError(
                f"{where}: argument '{parameter.name}' has a default, and pluggy would never pass it. "
                "Expected (self, request)."
            )
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            raise PluginSignatureError(
                f"{where}: argument '{parameter.name}' is keyword-only, and pluggy would never pass it. "
                "Expected (self, request)."
            )
    names = [parameter.name for parameter in parameters]
    if isinstance(inspect.getattr_static(member, "__self__", None), type) or names != ["self", "request"]:
        raise PluginSignatureError(f"{where}: takes ({', '.join(names)}). Expected (self, request).")
