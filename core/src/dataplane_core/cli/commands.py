"""Core's own command, and what a command is: `dataplane doctor`.

It imports no backend: `cli._examination` does, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from dataplane_core.cli import _examination
from dataplane_core.entry_points import MIDDLEWARE_GROUP, find_plugins, install_command, unknown_plugin
from dataplane_core.errors import ConfigError, DataPlaneError, printable

if TYPE_CHECKING:
    from dataplane_core.config import DataPlaneConfig

#: What an entry point of ``dataplane.commands`` returns: runs the command, and returns its exit status. The entry point
#: is called with the command's parser, and adds its arguments to it. What the command needs is imported when it runs.
Command: TypeAlias = Callable[[argparse.Namespace], int]

_NO_BACKENDS: Final = f"no backends are installed; for a first one: {install_command('dataplane-noop')}"
_NOTHING: Final = {"level": "ok", "what": "It needs nothing from this machine.", "hint": None}
_WIDTH: Final = 118


def complete_backends(argument: argparse.Action) -> None:
    """Lets a shell complete an argument by the names of the installed backends (argcomplete)."""
    argument.completer = lambda **_: sorted({record.name for record in find_plugins()})  # type: ignore[attr-defined]


def doctor(parser: argparse.ArgumentParser) -> Command:
    """`dataplane doctor`: finds problems of this machine for a backend and its options, and says how to fix them.

    It starts and changes nothing. Each backend defines its own checks in `Backend.diagnose`. Of a backend that is named
    it also says what it declares. With ``--list`` it only lists the installed ones, and imports none. The status is 1
    if a finding is an error, or if nothing is installed.
    """
    name = parser.add_argument(
        "name", nargs="?", help="entry-point name of the backend; default: that of the config, or all"
    )
    complete_backends(name)
    parser.add_argument("--config", metavar="FILE", help="check for the options of this config file")
    parser.add_argument("--list", action="store_true", dest="only_list", help="list the backends, and check nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return _diagnose


def _diagnose(chosen: argparse.Namespace) -> int:
    from dataplane_core.config import load_config

    config = None if chosen.config is None else load_config(chosen.config)
    if config is not None and chosen.name not in (None, config.backend):
        raise ConfigError(
            f"doctor refused: '{chosen.name}' was asked for, but '{chosen.config}' is for '{config.backend}'."
        )
    backend = config.backend if config is not None else chosen.name
    records = find_plugins()
    names = sorted({record.name for record in records}) if backend is None else [backend]
    examined = [[] for _ in names] if chosen.only_list else _examine(names, config)
    reports: list[dict[str, Any]] = []
    for name, findings in zip(names, examined, strict=True):
        owners = [f"{record.distribution} {record.version}" for record in records if record.name == name]
        if len(owners) > 1:
            findings = [_error(f"The name is claimed by {' and '.join(owners)}.", "Uninstall all but one.")]
        elif config is not None:
            findings = [*findings, *_findings_of_config(config)]
        report = {"name": name, "distributions": owners, "findings": findings}
        if backend is not None and not chosen.only_list:
            with suppress(DataPlaneError):  # the findings say that it cannot be loaded
                report["declares"] = _examination.ask("describe", name=name)
        reports.append(report)
    levels = Counter(finding["level"] for report in reports for finding in report["findings"])
    if chosen.json:
        print(json.dumps(reports, indent=2))
    elif not reports:
        print(_NO_BACKENDS)
    else:
        _print_reports(reports, chosen.only_list)
        errors, warnings = levels["error"], levels["warning"]
        if errors or not chosen.only_list:
            print(f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}")
    return int(levels["error"] > 0 or not reports)


def _examine(names: Sequence[str], config: DataPlaneConfig | None) -> list[list[dict[str, Any]]]:
    """The findings about each backend: of all in one process, since most of the work is to import what they share. Only
    if that process fails, each has one of its own.
    """
    options = None if config is None else config.options
    try:
        findings: list[list[dict[str, Any]]] = _examination.ask("diagnose_all", names=names, options=options)
        return findings
    except DataPlaneError as error:
        if len(names) > 1:
            return [findings for name in names for findings in _examine([name], config)]
        return [[_error(error.message, error.hint)]]


def _findings_of_config(config: DataPlaneConfig) -> list[dict[str, Any]]:
    """The findings about the config's middleware and ``allow_pickle``."""
    findings = []
    if config.allow_pickle:
        what = "allow_pickle is on: every reader unpickles what any writer wrote."
        hint = "Leave it out, unless every process that writes is yours."
        findings.append({"level": "warning", "what": what, "hint": hint})
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


def _print_reports(reports: Sequence[Mapping[str, Any]], only_list: bool) -> None:
    # words stay whole, so that commands and paths can be copied
    fill = partial(textwrap.fill, width=_WIDTH, break_long_words=False, break_on_hyphens=False)
    for report in reports:
        print(f"{report['name']}  ({', '.join(report['distributions']) or 'not installed'})")
        for name, value in report.get("declares", {}).items():
            pairs = [f"{key}={default}" for key, default in value.items()] if isinstance(value, dict) else value
            text = pairs if isinstance(pairs, str) else ", ".join(pairs) or "none"
            print(fill(printable(f"{name}: {text}"), initial_indent="  ", subsequent_indent="    "))
        for finding in report["findings"] or ([] if only_list else [_NOTHING]):
            lines = [(f"  {finding['level']:8} ", finding["what"]), (f"{'':11}-> ", finding["hint"])]
            for lead, text in lines[: 2 if finding["hint"] else 1]:
                print(fill(printable(text), initial_indent=lead, subsequent_indent=" " * len(lead)))
