"""What `dataplane doctor` runs in another process: the checks of backends, which import them and their libraries."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from dataplane_core.backends import Finding, missing_library
from dataplane_core.config import validate_model
from dataplane_core.connecting import load_backend
from dataplane_core.errors import ConfigError, DataPlaneError, PluginImportError
from dataplane_core.spec import Capability

#: Seconds that the checks of one backend may wait for servers, not counting its imports.
_DEADLINE_S: Final = 20.0


def diagnose_all(names: Sequence[str]) -> list[list[dict[str, Any]]]:
    """The findings about several backends with their default options, each as `diagnose` gives them."""
    found = []
    for name in names:
        try:
            found.append(diagnose(name, None))
        except DataPlaneError as error:
            found.append([asdict(Finding.error(error.message, error.hint))])
    return found


def diagnose(name: str, options: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The findings about one backend, as plain values. Runs in this process.

    Args:
        name: Its entry-point name.
        options: Its options. None: their defaults, if all have one.

    Raises:
        PluginError: It is not installed, or its hooks do not match the hook specs.
    """
    try:
        cls = load_backend(name)
    except PluginImportError as error:
        library = missing_library(error)
        hint = f"Install the package that brings {library}. On Debian and Ubuntu, apt-file search {library} names it."
        return [asdict(Finding.error(error.message, error.hint if library is None else hint))]
    findings = []
    if Capability.NO_PICKLE not in cls.capabilities:
        findings.append(
            Finding.warning(
                "Its transport unpickles what reaches its sockets: whoever can connect to them can run code here.",
                "Keep its ports inside a network that you trust, or use a backend that declares no_pickle.",
            )
        )
    try:
        config = validate_model(cls.Config, options or {}, f"options of backend '{name}'")
    except ConfigError as error:
        if options is None:
            findings.append(
                Finding.warning(
                    "It has options without a default, so nothing further was checked.",
                    "Name a config file: dataplane doctor --config FILE",
                )
            )
        else:
            findings.append(Finding.error(error.message, error.hint))
    else:
        findings += cls.class_for(config).diagnose(config, deadline=time.monotonic() + _DEADLINE_S)
    return [asdict(finding) for finding in findings]
