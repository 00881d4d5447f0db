"""`dataplane doctor`: finds problems of this machine for a backend and its options, and says how to fix them.

It starts and changes nothing. Each backend defines its own checks in `Backend.diagnose`.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

# nothing that imports torch: a process of its own examines the backends
from dataplane_core.cli._isolated import ask
from dataplane_core.config import DataPlaneConfig, load_config
from dataplane_core.entry_points import MIDDLEWARE_GROUP, find_plugins, install_command, unknown_plugin
from dataplane_core.errors import ConfigError, DataPlaneError, printable

_EXAMINATION: Final = "dataplane_core.cli._examination"
_NOTHING: Final = {"level": "ok", "what": "It needs nothing from this machine.", "hint": None}
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
    for each, found in zip(names, _examine(names, config), strict=True):
        owners = [f"{record.distribution} {record.version}" for record in records if record.name == each]
        findings = [*found, *(() if config is None else _middleware(config))]
        reports.append({"name": each, "distributions": owners, "findings": findings})
    if as_json:
        print(json.dumps(reports, indent=2))
    else:
        _print(reports)
    failed = any(finding["level"] == "error" for report in reports for finding in report["findings"])
    return int(failed or not reports)


def _examine(names: Sequence[str], config: DataPlaneConfig | None) -> list[list[dict[str, Any]]]:
    """The findings about each backend: of all in one process, since most of the work is to import what they share. Only
    if that process fails, each has one of its own.
    """
    if len(names) > 1:
        try:
            found: list[list[dict[str, Any]]] = ask(f"{_EXAMINATION}:diagnose_all", names=names)
            return found
        except DataPlaneError:
            return [each for name in names for each in _examine([name], config)]
    options = None if config is None else config.options
    try:
        return [ask(f"{_EXAMINATION}:diagnose", name=name, options=options) for name in names]
    except DataPlaneError as error:
        return [[_error(error.message, error.hint)]]


def _middleware(config: DataPlaneConfig) -> list[dict[str, Any]]:
    """The findings about the config's middleware and ``allow_pickle``."""
    findings = []
    if config.allow_pickle:
        findings.append(
            {
                "level": "warning",
                "what": "allow_pickle is on: every reader unpickles what any writer wrote.",
                "hint": "Leave it out, unless every process that writes is yours.",
            }
        )
    for entry in config.middleware:
        names = list(entry) if isinstance(entry, Mapping) else [entry]
        if len(names) != 1 or not isinstance(names[0], str):
            findings.append(_error(f"A middleware entry must be a name or {{name: options}}, got {entry!r}.", None))
        elif not any(record.name == names[0] for record in find_plugins(MIDDLEWARE_GROUP)):
            refused = unknown_plugin(MIDDLEWARE_GROUP, names[0], "middleware")
            findings.append(_error(refused.message, refused.hint))
    return findings


def _error(what: str, hint: str | None) -> dict[str, Any]:
    return {"level": "error", "what": what, "hint": hint}


def _print(reports: list[dict[str, Any]]) -> None:
    if not reports:
        print(f"no backends are installed; for a first one: {install_command('dataplane-noop')}")
        return
    counts: Counter[str] = Counter()
    for report in reports:
        print(f"{report['name']}  ({', '.join(report['distributions']) or 'not installed'})")
        for finding in report["findings"] or [_NOTHING]:
            counts[finding["level"]] += 1
            print(_wrap(f"  {finding['level']:8} ", finding["what"]))
            if finding["hint"]:
                print(_wrap(f"{'':11}-> ", finding["hint"]))
    errors, warnings = counts["error"], counts["warning"]
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
