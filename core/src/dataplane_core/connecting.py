"""Connects clients: loads and checks the backend and middleware that the config names, then bootstraps or attaches.

Trainers call `connect`; the command line lists what is installed.
"""

from __future__ import annotations

import difflib
import inspect
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel

from dataplane_core.arguments import Count, checked_as
from dataplane_core.backends import Backend, spread_over
from dataplane_core.client import DataPlaneClient
from dataplane_core.client.async_client import AsyncDataPlaneClient
from dataplane_core.client.connection import Connection, refuse_in_fork
from dataplane_core.config import ConfigSource, DataPlaneConfig, load_config, validate_model
from dataplane_core.entry_points import BACKEND_GROUP, MIDDLEWARE_GROUP, find_plugins, load_plugin, plugin_code
from dataplane_core.errors import (
    AlreadyRunningError,
    BackendUnavailableError,
    ConfigError,
    InvalidRequestError,
    OperationTimeoutError,
    PluginSignatureError,
)
from dataplane_core.middleware import Middleware
from dataplane_core.spec import Scope
from dataplane_core.spec.operations import CONTRACT_VERSION, OPERATIONS, required_operations

__all__ = ["Bootstrap", "connect", "connect_async", "connect_backend", "load_backend"]

_M = TypeVar("_M", bound=BaseModel)

#: True: start and own what the backend needs. False: attach to what runs. ``"auto"``: what is possible.
Bootstrap: TypeAlias = bool | Literal["auto"]

#: Seconds after which an attach that found nothing is tried again: at first, and at most.
_AGAIN_FIRST_S: Final = 0.02
_AGAIN_MOST_S: Final = 0.25
#: The least number of seconds that a process waits for another one that bootstraps at the same time.
_FASTER_S: Final = 10.0


def load_backend(name: str) -> type[Backend]:
    """Imports the backend of that name and checks its hooks.

    Raises:
        UnknownBackendError: It is not installed.
        DuplicatePluginError: Two distributions register the name.
        PluginImportError: Its import fails. The cause is the original error.
        PluginSignatureError: Its hooks do not fit.
    """
    cls: type[Backend] = load_plugin(BACKEND_GROUP, name, "backend")
    _check_backend(cls, name)
    return cls


def connect(config: ConfigSource, bootstrap: Bootstrap = True) -> DataPlaneClient:
    """Connects a client to the backend that the config names.

    Args:
        config: A `DataPlaneConfig`, a dict, an OmegaConf config, or the path of a YAML file.
        bootstrap: True: start what the backend needs, and own it. False: attach to what another client started, and
            wait for it up to ``attach_wait_s``. ``"auto"``: attach, or bootstrap if nothing runs. Of several processes
            that connect with ``"auto"`` at the same time, one bootstraps and the others attach. The client's
            ``bootstrapped`` says which of the two it did.

    Returns:
        A client, which is a context manager. Blocks up to ``op_timeout_s``.

    Raises:
        ConfigError: The config is refused.
        InvalidRequestError: ``bootstrap`` has another value.
        PluginError: The backend cannot be loaded.
        BackendUnavailableError: There is nothing to attach to, or this process is a fork in which the backend cannot be
            opened.
        AlreadyRunningError: ``bootstrap`` is True, and an instance with other options runs.

    Examples:
        >>> import torch
        >>> from dataplane_core import connect
        >>> with connect({"backend": "noop"}) as client:
        ...     client.register_partition("step-1", ["input_ids", "reward"], 2, ["trainer"])
        ...     columns = {"input_ids": [[5, 6, 7], [8]], "reward": torch.tensor([0.5, 1.0])}
        ...     meta = client.put_samples(["a", "b"], "step-1", columns)
        ...     claimed = client.claim_meta("step-1", "trainer", ["input_ids", "reward"], 2)
        ...     print(client.get_data(claimed)["reward"])
        tensor([0.5000, 1.0000])
    """
    full = load_config(config)
    return connect_backend(load_backend(full.backend), full, bootstrap=bootstrap)


async def connect_async(
    config: ConfigSource,
    bootstrap: Bootstrap = True,
    *,
    threads: int | None = None,
) -> AsyncDataPlaneClient:
    """As `connect`, for a program with an event loop, which is not stopped meanwhile.

    Args:
        config: As for `connect`.
        bootstrap: As for `connect`.
        threads: How many operations may run at the same time, apart from as many puts. None: as many as the machine has
            cores, from 2 to 4. More make small operations slower, since they wait for Python's lock.

    Returns:
        A client whose operations are coroutines. It is an asynchronous context manager.

    Raises:
        DataPlaneError: As `connect`.
        InvalidRequestError: ``threads`` is below 1.

    Examples:
        >>> import asyncio
        >>> async def main():
        ...     async with await connect_async({"backend": "noop"}) as client:
        ...         return client.backend_name
        >>> asyncio.run(main())
        'noop'
    """
    threads = max(2, min(4, os.cpu_count() or 2)) if threads is None else threads
    checked_as("threads", Count, threads)
    return await AsyncDataPlaneClient._open(lambda: connect(config, bootstrap), threads)


def connect_backend(
    cls: type[Backend], config: DataPlaneConfig, *, bootstrap: Bootstrap = True, tensors: bool = True
) -> DataPlaneClient:
    """As `connect`, for a given backend class. ``config.backend`` is then only its name.

    ``tensors``: False for a client that will ask questions only: torch is imported once a call needs it.
    """
    if not (bootstrap is True or bootstrap is False or bootstrap == "auto"):
        raise InvalidRequestError(f"connect refused: bootstrap must be True, False or 'auto', got {bootstrap!r}.")
    options = _validated(cls.Config, config.options, f"options of backend '{config.backend}'")
    cls = cls.class_for(options)
    if config.num_ledgers > 1:
        cls = spread_over(cls, config.num_ledgers)
    if cls.scope is Scope.PROCESS and not bootstrap and not cls.opens_anywhere:
        raise BackendUnavailableError(
            f"connect(bootstrap=False) refused: backend '{config.backend}' lives in one process, so there is nothing "
            "to attach to.",
            backend=config.backend,
            retryable=False,
            hint="Choose a backend of scope host or cluster.",
        )
    refuse_in_fork(cls, config.backend)
    _check_backend(cls, config.backend)
    middleware: list[Any] = []
    for item in config.middleware:
        plugin = _middleware(item)
        _check_middleware(plugin, middleware)
        middleware.append(plugin)
    if tensors:
        from dataplane_core._compiler_marks import load_compiler  # it imports torch

        load_compiler()  # here, so that no deadline includes it
    deadline = time.monotonic() + config.op_timeout_s

    def open_client(bootstrap: bool, *, exclusive: bool = False, attach_wait_s: float = 0.0) -> DataPlaneClient:
        backend = cls(options)
        backend.name = config.backend
        backend.allow_pickle = config.allow_pickle
        backend.exclusive = exclusive
        backend.attach_wait_s = attach_wait_s
        backend.cache_bytes = config.read_cache_bytes
        return DataPlaneClient._of(Connection.open(config, backend, middleware, bootstrap, deadline))

    if bootstrap is True or cls.scope is Scope.PROCESS:
        return open_client(True)
    give_up = min(deadline, time.monotonic() + config.attach_wait_s)
    pause_s, other_until = _AGAIN_FIRST_S, 0.0
    last: BackendUnavailableError | None = None
    while True:
        try:
            wait_s = 0.0 if bootstrap else max(0.0, give_up - time.monotonic())
            return open_client(False, attach_wait_s=wait_s)
        except BackendUnavailableError as error:
            if not error.retryable:
                raise
            last = error
        except OperationTimeoutError as error:
            if last is None or time.monotonic() < give_up:
                raise
            raise last from error  # this try was cut short, so its error says less
        if bootstrap == "auto":
            try:
                return open_client(True, exclusive=True)
            except BackendUnavailableError as error:
                if not error.retryable:
                    raise
                last = error
            except AlreadyRunningError as running:  # another process bootstraps, and can be attached to soon
                if not running.retryable:
                    raise running from last
                other_until = other_until or time.monotonic() + _FASTER_S
                give_up = min(deadline, max(give_up, other_until))
                last.__cause__ = last.__cause__ or running
        if time.monotonic() + pause_s >= give_up:
            raise last
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _AGAIN_MOST_S)


def _middleware(item: Any) -> Any:
    if isinstance(item, str):
        item = {item: {}}
    if not isinstance(item, Mapping):
        return item
    if len(item) != 1:
        raise ConfigError(f"middleware entry must be a name or {{name: options}}, got the keys {sorted(item)}.")
    ((name, options),) = item.items()
    if not isinstance(options, Mapping | None):
        raise ConfigError(
            f"options of middleware '{name}' must be a mapping, got {type(options).__name__}.",
            hint=f"Write only '{name}' if it needs no options.",
        )
    cls = load_plugin(MIDDLEWARE_GROUP, str(name), "middleware")
    record = next(record for record in find_plugins(MIDDLEWARE_GROUP) if record.name == name)
    if not (isinstance(cls, type) and issubclass(cls, Middleware)):
        raise ConfigError(f"middleware '{name}' gives {cls!r}. Expected a dataplane_core.middleware.Middleware.")
    validated = _validated(cls.Config, options or {}, f"options of middleware '{name}'")
    with plugin_code("middleware", record, "made"):
        return cls(**{key: getattr(validated, key) for key in type(validated).model_fields})


def _validated(model: type[_M], options: Mapping[str, Any], label: str) -> _M:
    """Checks options. If a key of the config itself is among them, the error says where it belongs."""
    misplaced = [key for key in options if key in DataPlaneConfig.model_fields and key not in model.model_fields]
    if misplaced:
        names = ", ".join(f"'{key}'" for key in misplaced)
        raise ConfigError(
            f"{label} are refused: {names} {'is a key' if len(misplaced) == 1 else 'are keys'} of the config itself.",
            hint="Write it beside 'backend' and 'options', not inside the options.",
        )
    return validate_model(model, options, label)


# --- the hooks of backends and of middleware --------------------------------------------------------------------------


def _check_backend(cls: type[Backend], name: str) -> None:
    """Checks a backend class against the table of operations. Also refuses a public method with almost the name of
    one."""
    label = f"backend '{name}'"
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


def _check_middleware(plugin: Any, others: Sequence[Any]) -> None:
    cls = type(plugin)
    if plugin in others:
        raise ConfigError(f"middleware lists the same {cls.__name__} object twice. Expected an object for each entry.")
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
