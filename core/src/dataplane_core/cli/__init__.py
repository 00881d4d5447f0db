"""The `dataplane` command. Each of its sub-commands is an entry point of the group ``dataplane.commands``.

Operators and storage authors run it. A package adds a command as `cli.commands` does. No other module of core imports
this one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Final

from dataplane_core.cli.commands import Command, complete_backends
from dataplane_core.entry_points import (
    COMMAND_GROUP,
    KNOWN_COMMANDS,
    find_plugins,
    install_command,
    load_plugin,
    nearest,
)
from dataplane_core.errors import DataPlaneError

__all__ = ["Command", "complete_backends", "main"]

#: The exit status of a command that a signal ended is this plus the number of the signal, as in shells.
_ENDED_BY_SIGNAL: Final = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments (None: those of the process), without the program's name.

    Returns:
        The exit status: 0, or 1 for a failure that was reported, or above 128 if a signal ended it. argparse exits with
        2 for wrong usage.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    completed = _line_to_complete()
    try:
        parser, run = _parser(words) if completed is None else _parser(completed, completes=True)
        if completed is not None:
            import argcomplete

            argcomplete.autocomplete(parser)  # prints what fits, and ends the process
        chosen = parser.parse_args(words)
        assert run is not None  # argparse refuses a line that names no command
        status = run(chosen)
        sys.stdout.flush()
        return status
    except DataPlaneError as error:
        print(f"dataplane: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # what reads the output, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails too
        return _ENDED_BY_SIGNAL + signal.SIGPIPE
    except KeyboardInterrupt:
        return _ENDED_BY_SIGNAL + signal.SIGINT


def _parser(words: Sequence[str], *, completes: bool = False) -> tuple[argparse.ArgumentParser, Command | None]:
    """The parser, with the arguments of the command that the words name, and what runs it. Imports no other command."""
    installed = {record.name: f"of {record.distribution}" for record in find_plugins(COMMAND_GROUP)}
    parser = argparse.ArgumentParser(
        prog="dataplane",
        usage="dataplane COMMAND ...",
        epilog=_overview(installed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dataplane-core {version('dataplane-core')}")
    offered = parser.add_subparsers(
        prog="dataplane", dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for commands in KNOWN_COMMANDS.values():
        for name, (_, summary) in commands.items():
            offered.add_parser(name, description=summary)
    for name in sorted(installed.keys() - offered.choices.keys()):
        offered.add_parser(name)
    named = next((word for word in words if not word.startswith("-")), None)
    if named in offered.choices:
        return parser, load_plugin(COMMAND_GROUP, named, "command")(offered.choices[named])
    if named is not None and not completes:
        near = nearest(named, offered.choices)
        hint = f"Did you mean '{near}'?" if near else "dataplane --help lists all."
        parser.error(f"there is no command '{named}'. {hint}")
    return parser, None


def _overview(installed: Mapping[str, str]) -> str:
    """The commands by their purpose, with how to install those that are not."""
    lines: list[str] = []
    others = dict(installed)
    for purpose, commands in KNOWN_COMMANDS.items():
        lines += ["", f"{purpose}:"]
        for name, (package, summary) in commands.items():
            missing = "" if others.pop(name, None) else f" ({install_command(package)})"
            lines.append(f"  {name:<12} {summary}{missing}")
    lines += ["", "of other packages:", *(f"  {name:<12} {others[name]}" for name in sorted(others))] if others else []
    return "\n".join([*lines[1:], "", "dataplane COMMAND --help says what each takes."])


def _line_to_complete() -> list[str] | None:
    """The words after ``dataplane`` if a shell asks to complete them and argcomplete is installed, else None."""
    if "_ARGCOMPLETE" not in os.environ:
        return None
    try:
        import argcomplete  # noqa: F401
    except ImportError:
        return None
    line = os.environ.get("COMP_LINE", "")
    try:
        return shlex.split(line)[1:]
    except ValueError:  # a quote is still open
        return line.split()[1:]
