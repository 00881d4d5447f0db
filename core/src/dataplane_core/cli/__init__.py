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
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

from dataplane_core.cli.commands import Command, complete_backends
from dataplane_core.entry_points import COMMAND_GROUP, KNOWN_COMMANDS, find_plugins, install_command, load_plugin
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
        parser, run = _parser(words if completed is None else completed)
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


def _parser(words: Sequence[str]) -> tuple[argparse.ArgumentParser, Command | None]:
    """The parser, with the arguments of the command that the words name, and what runs it. Imports no other command."""
    parser = argparse.ArgumentParser(
        prog="dataplane",
        description="Lists, checks, tests and creates backends of the data plane, and shows what they do.",
    )
    parser.add_argument("--version", action="version", version=f"dataplane-core {version('dataplane-core')}")
    offered = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    installed = {record.name: f"of {record.distribution}" for record in find_plugins(COMMAND_GROUP)}
    for name, (package, summary) in KNOWN_COMMANDS.items():
        offered.add_parser(name, help=summary if name in installed else f"{summary} ({install_command(package)})")
    for name in sorted(installed.keys() - KNOWN_COMMANDS.keys()):
        offered.add_parser(name, help=installed[name])

    named = next((word for word in words if not word.startswith("-")), None)
    if named not in offered.choices:
        return parser, None
    return parser, load_plugin(COMMAND_GROUP, named, "command")(offered.choices[named])


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
