"""Core's own commands, and what a command is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

from dataplane_core.entry_points import find_plugins

#: What an entry point of ``dataplane.commands`` returns: runs the command, and returns its exit status. The entry point
#: is called with the command's parser, and adds its arguments to it. What the command needs is imported when it runs.
Command: TypeAlias = Callable[[argparse.Namespace], int]


def complete_backends(argument: argparse.Action) -> None:
    """Lets a shell complete an argument by the names of the installed backends (argcomplete)."""
    argument.completer = lambda **_: sorted({record.name for record in find_plugins()})  # type: ignore[attr-defined]


def backends(parser: argparse.ArgumentParser) -> Command:
    """`dataplane backends`."""
    parser.add_argument(
        "--load", action="store_true", help="import each, in a process of its own, and show what it declares"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")

    def run(chosen: argparse.Namespace) -> int:
        from dataplane_core.cli import _backends

        return _backends.run(load=chosen.load, as_json=chosen.json)

    return run


def doctor(parser: argparse.ArgumentParser) -> Command:
    """`dataplane doctor`."""
    name = parser.add_argument(
        "name", nargs="?", help="entry-point name of the backend; default: that of the config, or all"
    )
    complete_backends(name)
    parser.add_argument("--config", metavar="FILE", help="check for the options of this config file")
    parser.add_argument("--json", action="store_true", help="print JSON")

    def run(chosen: argparse.Namespace) -> int:
        from dataplane_core.cli import _doctor

        return _doctor.run(chosen.name, config_path=chosen.config, as_json=chosen.json)

    return run
