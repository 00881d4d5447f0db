"""Finds installed backends, middleware and commands by entry-point name. Imports only the one that is asked for."""

from __future__ import annotations

import difflib
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from dataplane_core.errors import DataPlaneError, DuplicatePluginError, PluginImportError, UnknownBackendError

BACKEND_GROUP: Final = "dataplane.backends"
MIDDLEWARE_GROUP: Final = "dataplane.middleware"
COMMAND_GROUP: Final = "dataplane.commands"

#: Backends of this project -> the distribution that contains it.
KNOWN_BACKENDS: Final[dict[str, str]] = {
    "noop": "dataplane-noop",
    "recording": "dataplane-recording",
    "shm_store": "dataplane-shm",
    "redis_store": "dataplane-redis",
    "tq_simple": "dataplane-tq-simple",
    "tq_mooncake": "dataplane-mooncake-backend",
}
#: Middleware of this project that other distributions than core contain.
_KNOWN_MIDDLEWARE: Final = dict.fromkeys(("opentelemetry", "prometheus", "recorder"), "dataplane-observe")
#: Distribution of this project -> its folders in a checkout, from which it is installed. No index has it.
_FOLDERS: Final = {
    "dataplane-core": ("core",),
    "dataplane-observe": ("observe",),
    "dataplane-tools": ("observe", "tools"),
    "dataplane-testkit": ("testkit",),
    **{package: (f"plugins/{name}",) for name, package in KNOWN_BACKENDS.items()},
    "dataplane-recording": ("observe", "plugins/recording"),
    "dataplane-mooncake-backend": ("plugins/tq_mooncake", "plugins/tq_mooncake_non_cuda"),
}
#: Seconds after which it is said what is being imported.
_LONG_S: Final = 5.0

_log = logging.getLogger(__name__)

#: Commands of this project by their purpose, in the order of the help -> the distribution that contains it, and what it
#: does.
KNOWN_COMMANDS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "look at a running store": {
        "top": ("dataplane-tools", "what it holds, how far each task is, who waits: live, or once"),
        "why": ("dataplane-tools", "why tasks get no samples"),
        "read": ("dataplane-tools", "what the model wrote; also of a save or a recording"),
        "export": ("dataplane-tools", "writes rows as Parquet, at once or as they are finished"),
        "metrics": ("dataplane-tools", "serves for Prometheus where a run is, and why it stands still"),
    },
    "look at what was kept": {
        "audit": ("dataplane-tools", "what a recorded run trained on and what went wrong, or a picture"),
    },
    "set up, and write a backend": {
        "doctor": ("dataplane-core", "lists the backends, and checks this machine for them"),
        "conformance": ("dataplane-testkit", "runs the conformance kit against a backend"),
        "new-plugin": ("dataplane-testkit", "writes a project with a backend that passes the kit"),
    },
}
#: Kind -> its known names, each with the distribution that contains it.
_PACKAGES: Final[dict[str, dict[str, str]]] = {
    "backend": KNOWN_BACKENDS,
    "middleware": _KNOWN_MIDDLEWARE,
    "command": {name: package for commands in KNOWN_COMMANDS.values() for name, (package, _) in commands.items()},
}


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One entry point, read from the metadata of an installed distribution without an import."""

    name: str  # what a config calls it
    distribution: str
    version: str
    target: str  # ``module:attribute``

    def __str__(self) -> str:
        return f"'{self.name}' ({self.distribution} {self.version})"


def find_plugins(group: str = BACKEND_GROUP) -> list[PluginRecord]:
    """Lists the installed plugins, sorted by name; twice those that two distributions register. Imports nothing.

    The list is kept until something is installed or removed. Else each client would read the metadata of all installed
    distributions, which takes tens of milliseconds.
    """
    return list(_read_plugins(group, tuple((place, _changed_ns(place)) for place in sys.path)))


@functools.lru_cache(maxsize=16)
def _read_plugins(group: str, _places: tuple[tuple[str, int], ...]) -> Sequence[PluginRecord]:
    records: dict[tuple[str, str, str], PluginRecord] = {}
    for point in entry_points(group=group):
        assert point.dist is not None  # only an entry point that a program makes has none
        # one distribution may be found twice, by an editable install and by a path entry
        key = (point.name, point.dist.name, point.value)
        records.setdefault(key, PluginRecord(point.name, point.dist.name, point.dist.version, point.value))
    return [records[key] for key in sorted(records)]


def _changed_ns(place: str) -> int:
    """When entries of a folder of ``sys.path`` were last added or removed. 0 if it is not there."""
    try:
        return os.stat(place or os.curdir).st_mtime_ns
    except OSError:
        return 0


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of these names that is most similar, or None if none is similar."""
    by_lower = {similar.lower(): similar for similar in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[near[0]] if near else None


def load_plugin(group: str, name: str, kind: str) -> Any:
    """Imports the object that the entry point of that name refers to. ``kind`` is the word for it in messages.

    Raises:
        PluginError: It is not installed, or twice, or its import fails.
    """
    records = [record for record in find_plugins(group) if record.name == name]
    if not records:
        raise unknown_plugin(group, name, kind)
    if len(records) > 1:
        owners = ", ".join(f"{record.distribution} ({record.target})" for record in records)
        raise DuplicatePluginError(
            f"{kind} '{name}' is claimed by {len(records)} installed distributions: {owners}. Expected one.",
            backend=name,
            hint="Uninstall all but one.",
        )
    (record,) = records
    point = EntryPoint(name, record.target, group)
    with plugin_code(kind, record, "imported"), ExitStack() as stack:
        if EntryPoint.pattern.match(point.value) is None:
            raise ValueError(f"its entry point is {point.value!r}. Expected module:attribute.")
        if point.module not in sys.modules:
            text = "%s %s is still being imported, after %g s."
            late = threading.Timer(_LONG_S, _log.warning, (text, kind, record, _LONG_S))
            late.daemon = True
            stack.callback(late.cancel)
            with suppress(RuntimeError):  # the system gives no thread
                late.start()
        return point.load()


@contextmanager
def plugin_code(kind: str, record: PluginRecord, what: str) -> Iterator[None]:
    """Runs code of a plugin, which is ``what``, such as "imported". What goes wrong in it, or ends the program, becomes
    an error that names the plugin."""
    try:
        yield
    except DataPlaneError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginImportError(
            f"{kind} {record} cannot be {what}: {type(error).__name__}: {error}", backend=record.name
        ) from error


def install_command(package: str) -> str:
    """The command that installs a distribution of this project."""
    return f"pip install {' '.join(f'./{folder}' for folder in _FOLDERS[package])}"


def unknown_plugin(group: str, name: str, kind: str) -> UnknownBackendError:
    """The error for a name that is not installed."""
    installed = [record.name for record in find_plugins(group)]
    packages = _PACKAGES.get(kind, {})
    near = nearest(name, [*installed, *packages])
    parts = []
    if near is not None and near != name:
        parts.append(f"Did you mean '{near}'?")
    missing = name if name in packages else near if near not in installed else None
    if missing in packages:
        parts.append(f"Install '{missing}' in a checkout of dataplane: {install_command(packages[missing])}")
    return UnknownBackendError(
        f"{kind} '{name}' is not installed. Found: {', '.join(installed) or 'none'}.", hint=" ".join(parts) or None
    )
