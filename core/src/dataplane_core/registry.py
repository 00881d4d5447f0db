"""Finds backends and middleware by entry-point name, lazily, and connects clients.

Listing reads metadata only; only the plugin that the config names is imported.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from dataplane_core.backend import Backend
from dataplane_core.capabilities import Scope
from dataplane_core.client import DataPlaneClient
from dataplane_core.config import DataPlaneConfig, load_config, validate_model
from dataplane_core.errors import (
    BackendUnavailableError,
    ConfigError,
    DuplicatePluginError,
    PluginImportError,
    UnknownBackendError,
)
from dataplane_core.manager import build_manager, check_backend_class
from dataplane_core.middleware import Middleware, MiddlewareContext

__all__ = [
    "BACKEND_GROUP",
    "KNOWN_BACKENDS",
    "MIDDLEWARE_GROUP",
    "PluginRecord",
    "connect",
    "connect_backend",
    "find_plugins",
    "load_backend",
]

BACKEND_GROUP: Final = "dataplane.backends"
MIDDLEWARE_GROUP: Final = "dataplane.middleware"

#: Backends of this project, with the distribution that brings each.
KNOWN_BACKENDS: Final[dict[str, str]] = {
    "noop": "dataplane-noop",
    "redis_store": "dataplane-redis",
    "tq_simple": "dataplane-tq-simple",
    "tq_mooncake": "dataplane-mooncake",
}


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One entry point, read from metadata alone.

    Attributes:
        name: What a config calls it.
        distribution: The installed distribution that registers it.
        version: That distribution's version.
        target: ``module:attribute``.
    """

    name: str
    distribution: str
    version: str
    target: str


def find_plugins(group: str = BACKEND_GROUP) -> list[PluginRecord]:
    """Lists what is installed, by name; imports nothing.

    A name that two distributions claim is listed twice.
    """
    records: dict[tuple[str, str, str], PluginRecord] = {}
    for point in entry_points(group=group):
        record = _record(point)
        # one distribution may be found twice, by an editable install and by a path entry
        records.setdefault((record.name, record.distribution, record.target), record)
    return sorted(records.values(), key=lambda record: (record.name, record.distribution))


def load_backend(name: str) -> type[Backend]:
    """Imports the backend of that name and checks its hooks.

    Raises:
        UnknownBackendError: Not installed; lists the names found and the pip command for known ones.
        DuplicatePluginError: Two distributions claim the name.
        PluginImportError: Its import fails; the cause is the real error.
        PluginSignatureError: Its hooks do not fit.
    """
    cls = _load(BACKEND_GROUP, name, "backend")
    check_backend_class(cls, name)
    loaded: type[Backend] = cls
    return loaded


def connect(
    config: DataPlaneConfig | Mapping[str, Any] | str | os.PathLike[str] | Any, bootstrap: bool = True
) -> DataPlaneClient:
    """Connects a client to the backend that the config names.

    Args:
        config: A `DataPlaneConfig`, a dict, an OmegaConf config, or the path of a YAML file.
        bootstrap: Start what the backend needs and own it, or attach to what another client started.

    Returns:
        A client, which is a context manager. Blocks up to ``op_timeout_s``.

    Raises:
        ConfigError: The config is refused.
        PluginError: The backend cannot be loaded.
        BackendUnavailableError: Nothing to attach to.
        AlreadyRunningError: Bootstrapping over a running instance of other options.
    """
    full = load_config(config)
    return connect_backend(load_backend(full.backend), full, bootstrap=bootstrap)


def connect_backend(cls: type[Backend], config: DataPlaneConfig, *, bootstrap: bool = True) -> DataPlaneClient:
    """As `connect`, for a backend class at hand; ``config.backend`` only names it.

    Raises:
        As `connect`.
    """
    deadline = time.monotonic() + config.op_timeout_s
    options = validate_model(cls.Config, config.options, f"options of backend '{config.backend}'")
    if not bootstrap and cls.scope is Scope.PROCESS:
        raise BackendUnavailableError(
            f"connect(bootstrap=False) refused: backend '{config.backend}' lives in one process, so there is nothing "
            "to attach to.",
            backend=config.backend,
            retryable=False,
            hint="Choose a backend of scope host or cluster.",
        )
    backend = cls(options)
    backend.name = config.backend
    backend.allow_pickle = config.allow_pickle
    middleware = [_middleware(item) for item in config.middleware]
    manager = build_manager(backend, middleware)
    return DataPlaneClient._open(
        config=config,
        backend=backend,
        manager=manager,
        middleware=middleware,
        context=MiddlewareContext(backend=config.backend, wire=cls.wire),
        bootstrap=bootstrap,
        deadline=deadline,
    )


def _middleware(item: Any) -> Any:
    if isinstance(item, str):
        item = {item: {}}
    if not isinstance(item, Mapping):
        return item
    if len(item) != 1:
        raise ConfigError(f"middleware entry must be a name or {{name: options}}, got the keys {sorted(item)}.")
    ((name, options),) = item.items()
    cls = _load(MIDDLEWARE_GROUP, str(name), "middleware")
    if not (isinstance(cls, type) and issubclass(cls, Middleware)):
        raise ConfigError(f"middleware '{name}' gives {cls!r}. Expected a dataplane_core.middleware.Middleware.")
    validated = validate_model(cls.Config, options or {}, f"options of middleware '{name}'")
    return cls(**{key: getattr(validated, key) for key in type(validated).model_fields})


def _load(group: str, name: str, kind: str) -> Any:
    points = {(_record(point).distribution, point.value): point for point in entry_points(group=group, name=name)}
    if not points:
        raise _unknown(group, name, kind)
    if len(points) > 1:
        owners = ", ".join(f"{_record(point).distribution} ({point.value})" for point in points.values())
        raise DuplicatePluginError(
            f"{kind} '{name}' is claimed by {len(points)} installed distributions: {owners}. Expected one.",
            backend=name,
            hint="Uninstall all but one.",
        )
    (point,) = points.values()
    try:
        return point.load()
    except Exception as error:
        record = _record(point)
        raise PluginImportError(
            f"{kind} '{name}' ({record.distribution} {record.version}) cannot be imported: "
            f"{type(error).__name__}: {error}",
            backend=name,
        ) from error


def _unknown(group: str, name: str, kind: str) -> UnknownBackendError:
    found = [record.name for record in find_plugins(group)]
    near = difflib.get_close_matches(name, [*found, *(KNOWN_BACKENDS if kind == "backend" else ())], n=1, cutoff=0.5)
    parts = []
    if near and near[0] != name:
        parts.append(f"Did you mean '{near[0]}'?")
    known = name if name in KNOWN_BACKENDS else near[0] if near and near[0] not in found else None
    if kind == "backend" and known in KNOWN_BACKENDS:
        parts.append(f"Install '{known}' with: pip install {KNOWN_BACKENDS[known]}")
    return UnknownBackendError(
        f"{kind} '{name}' is not installed. Found: {', '.join(found) or 'none'}.", hint=" ".join(parts) or None
    )


def _record(point: EntryPoint) -> PluginRecord:
    dist = point.dist
    return PluginRecord(
        name=point.name,
        distribution="unknown" if dist is None else dist.name,
        version="unknown" if dist is None else dist.version,
        target=point.value,
    )
