"""`dataplane doctor`: finds problems of this machine for a backend and its options, and says how to fix them.

It starts and changes nothing. Each backend defines its own checks in `Backend.diagnose`.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from dataplane_core.backends import Finding, Level, missing_library
from dataplane_core.cli._isolated import ask
from dataplane_core.config import DataPlaneConfig, load_config, validate_model
from dataplane_core.entry_points import unknown_plugin
from dataplane_core.errors import ConfigError, DataPlaneError, PluginImportError, printable
from dataplane_core.plugins import MIDDLEWARE_GROUP, find_plugins, load_backend
from dataplane_core.spec import Capability

__all__ = ["diagnose", "run"]

#: Seconds that the checks of one backend may wait for servers, not counting its imports.
_DEADLINE_S: Final = 20.0
_WIDTH: Final = 118


def run(name: str | None, *, config_path: str | None, as_json: bool) -> int:
    """Prints the findings. Returns 1 if one is an error, or if nothing is installed; else 0.

    Args:
        name: Entry-point name of the backend. None: that of the config, else all installed backends.
        config_path: A config file. None: the default options.
        as_json: Print JSON.

    Raises:
        ConfigError: The config cannot be read, or is for another backend than ``name``.
    """
    config = None if config_path is None else load_config(config_path)
    if config is not None and name not in (None, config.backend):
        raise ConfigError(f"doctor refused: '{name}' was asked for, but '{config_path}' is for '{config.backend}'.")
    chosen = config.backend if config is not None else name
    records = find_plugins()
    names = sorted({record.name for record in records}) if chosen is None else [chosen]
    reports: list[dict[str, Any]] = []
    for each in names:
        owners = [f"{record.distribution} {record.version}" for record in records if record.name == each]
        findings = [*_examine(each, config), *(() if config is None else _middleware(config))]
        reports.append({"name": each, "distributions": owners, "findings": [asdict(finding) for finding in findings]})
    if as_json:
        print(json.dumps(reports, indent=2))
    else:
        _print(reports)
    failed = any(finding["level"] == Level.ERROR for report in reports for finding in report["findings"])
    return int(failed or not reports)


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
        findings += cls.diagnose(config, deadline=time.monotonic() + _DEADLINE_S)
    return [asdict(finding) for finding in findings]


def _examine(name: str, config: DataPlaneConfig | None) -> list[Finding]:
    try:
        found = ask(f"{__name__}:diagnose", name=name, options=None if config is None else config.options)
    except DataPlaneError as error:
        return [Finding.error(error.message, error.hint)]
    return [Finding(Level(each["level"]), each["what"], each["hint"]) for each in found]


def _middleware(config: DataPlaneConfig) -> list[Finding]:
    """The findings about the config's middleware and ``allow_pickle``."""
    findings = []
    if config.allow_pickle:
        findings.append(
            Finding.warning(
                "allow_pickle is on: every reader unpickles what any writer wrote.",
                "Leave it out, unless every process that writes is yours.",
            )
        )
    for entry in config.middleware:
        names = list(entry) if isinstance(entry, Mapping) else [entry]
        if len(names) != 1 or not isinstance(names[0], str):
            findings.append(Finding.error(f"A middleware entry must be a name or {{name: options}}, got {entry!r}."))
        elif not any(record.name == names[0] for record in find_plugins(MIDDLEWARE_GROUP)):
            refused = unknown_plugin(MIDDLEWARE_GROUP, names[0], "middleware")
            findings.append(Finding.error(refused.message, refused.hint))
    return findings


def _print(reports: list[dict[str, Any]]) -> None:
    if not reports:
        print("no backends are installed; for a first one: pip install dataplane-noop")
        return
    counts: Counter[str] = Counter()
    for report in reports:
        print(f"{report['name']}  ({', '.join(report['distributions']) or 'not installed'})")
        for finding in report["findings"] or [asdict(Finding.ok("It needs nothing from this machine."))]:
            counts[finding["level"]] += 1
            print(_wrap(f"  {finding['level']:8} ", finding["what"]))
            if finding["hint"]:
                print(_wrap(f"{'':11}-> ", finding["hint"]))
    errors, warnings = counts[Level.ERROR], counts[Level.WARNING]
    print(f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}")


def _wrap(lead: str, text: str) -> str:
    # words stay whole, so that commands and paths can be copied
    return textwrap.fill(
        printable(text),
        _WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )
