"""The `dataplane` command: lists backends, checks this machine, looks into a store, changes its storage units, draws a
run, runs the kit, starts a plugin.

Operators and storage authors run it. No other module of the package imports it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

from dataplane_core.errors import DataPlaneError

__all__ = ["main"]

#: The exit status of a command that a signal ended is this plus the number of the signal, as in shells.
_ENDED_BY_SIGNAL: Final = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: Without the program's name. Default: those of the process.

    Returns:
        The exit status: 0, or 1 for a failure that was reported, or above 128 if a signal ended it. argparse exits with
        2 for wrong usage.
    """
    parser = argparse.ArgumentParser(
        prog="dataplane",
        description="Lists, checks, tests and creates backends of the data plane, and shows what they do.",
    )
    parser.add_argument("--version", action="version", version=f"dataplane-core {version('dataplane-core')}")
    commands = parser.add_subparsers(dest="command", required=True)

    backends = commands.add_parser("backends", help="list the installed backends")
    backends.add_argument(
        "--load", action="store_true", help="import each, in a process of its own, and show what it declares"
    )
    backends.add_argument("--json", action="store_true", help="print JSON")

    doctor = commands.add_parser("doctor", help="check this machine for a backend, or for all that are installed")
    doctor.add_argument("name", nargs="?", help="entry-point name of the backend; default: that of the config, or all")
    doctor.add_argument("--config", metavar="FILE", help="check for the options of this config file")
    doctor.add_argument("--json", action="store_true", help="print JSON")

    inspect = commands.add_parser("inspect", help="show what a running store holds, and how far each task is")
    inspect.add_argument("config", metavar="CONFIG", help="the config file that its processes use")
    inspect.add_argument("partition", nargs="?", help="show this partition with its fields; default: all")
    inspect.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="measure rates over S seconds; 0: no rates; default: 1"
    )
    inspect.add_argument("--stacks", action="store_true", help="also show what the clients on this host do, by py-spy")
    inspect.add_argument("--json", action="store_true", help="print JSON")

    top = commands.add_parser("top", help="show a running store live: the flow from stage to stage, and who waits")
    top.add_argument("config", metavar="CONFIG", help="the config file that its processes use")
    top.add_argument("partition", nargs="?", help="show this partition; default: those that were written last")

    metrics = commands.add_parser("metrics", help="serve the metrics of all processes of a running store on one page")
    metrics.add_argument("config", metavar="CONFIG", help="the config file that its processes use")
    metrics.add_argument("--host", default="127.0.0.1", help="the address to listen on; default: 127.0.0.1")
    metrics.add_argument("--port", type=int, default=0, help="its port; default: a free one, which is printed")

    units = commands.add_parser("units", help="list, add or remove the storage units of a running store")
    units.add_argument("config", metavar="CONFIG", help="the config file that its processes use")
    actions = units.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="show each unit with the rows that it holds, or that were lost with it")
    adding = actions.add_parser("add", help="start more units, which get new rows")
    adding.add_argument("count", type=int, metavar="N", help="how many")
    removing = actions.add_parser("remove", help="a unit gets no more rows, and ends when its last row is cleared")
    removing.add_argument("unit", metavar="UNIT", help="its name, as list shows it")
    removing.add_argument("--now", action="store_true", help="it ends at once: its rows are lost")
    for action in actions.choices.values():
        action.add_argument("--json", action="store_true", help="print JSON")

    flow = commands.add_parser("flow", help="draw a run, or a running store: an HTML page and an SVG")
    flow.add_argument(
        "sources",
        nargs="+",
        metavar="FILE",
        help="files of events (option events_file of the middleware metrics); or, for a running store, its config file",
    )
    flow.add_argument(
        "--seconds", type=float, metavar="N", help="FILE is the config of a running store: look at it for N seconds"
    )
    flow.add_argument(
        "-o", dest="folder", metavar="DIR", help="where to write flow.html and flow.svg; default: by FILE"
    )

    conformance = commands.add_parser("conformance", help="run the conformance kit against a backend")
    conformance.add_argument("name", help="entry-point name of the backend")
    conformance.add_argument(
        "--options", default="{}", metavar="YAML", help="the backend's options, such as '{url: ...}'"
    )
    conformance.add_argument("--json", dest="json_path", metavar="FILE", help="write the report as JSON")
    conformance.add_argument("--markdown", dest="markdown_path", metavar="FILE", help="write the report as Markdown")
    conformance.add_argument(
        "-k", dest="select", metavar="EXPRESSION", help="only the tests that match, as pytest's -k"
    )
    conformance.add_argument("-x", dest="first_failure", action="store_true", help="stop at the first failure")
    conformance.add_argument(
        "--chaos",
        action="store_true",
        help="instead of the tests, run random calls in processes that are killed and stopped, and check the history",
    )
    conformance.add_argument("--minutes", type=float, metavar="M", help="with --chaos: how long; default: 1")
    conformance.add_argument("--seed", type=int, metavar="N", help="with --chaos: the schedules of this seed again")
    conformance.add_argument(
        "-o", dest="folder", metavar="DIR", help="with --chaos: where a fault is written; default: chaos-NAME-SEED"
    )

    new_plugin = commands.add_parser("new-plugin", help="write a project with a backend that passes the kit")
    new_plugin.add_argument("name", help="entry-point name of the new backend, such as acme_store")
    new_plugin.add_argument("--journal", action="store_true", help="one that several processes share, with a journal")
    new_plugin.add_argument("--dir", dest="folder", help="where to write it; default: dataplane-NAME, here")

    _offer_completion(parser, names=(doctor, conformance))
    chosen = parser.parse_args(arguments)
    try:
        status = _run(parser, chosen)
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


def _run(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> int:
    """Runs the chosen command. Imports no more than it needs."""
    if chosen.command == "backends":
        from dataplane_core.cli._backends import run as list_backends

        return list_backends(load=chosen.load, as_json=chosen.json)
    if chosen.command == "doctor":
        from dataplane_core.cli._doctor import run as examine

        return examine(chosen.name, config_path=chosen.config, as_json=chosen.json)
    if chosen.command == "inspect":
        from dataplane_core.cli._inspect import run as inspect_store

        return inspect_store(
            chosen.config,
            chosen.partition,
            interval_s=chosen.interval,
            as_json=chosen.json,
            stacks=chosen.stacks,
        )
    if chosen.command == "top":
        from dataplane_core.cli._top import run as show_live

        return show_live(chosen.config, chosen.partition)
    if chosen.command == "metrics":
        from dataplane_core.cli._metrics import run as serve_metrics

        return serve_metrics(chosen.config, host=chosen.host, port=chosen.port)
    if chosen.command == "units":
        from dataplane_core.cli._units import run as change_units

        if chosen.action == "add" and chosen.count < 1:
            parser.error(f"units add {chosen.count}: expected a number of 1 or more")
        return change_units(
            chosen.config,
            add=chosen.count if chosen.action == "add" else 0,
            remove=chosen.unit if chosen.action == "remove" else None,
            now=chosen.action == "remove" and chosen.now,
            as_json=chosen.json,
        )
    if chosen.command == "flow":
        from dataplane_core.cli._flow import draw_files, draw_store

        if chosen.seconds is None:
            return draw_files(chosen.sources, folder=chosen.folder)
        if len(chosen.sources) > 1:
            parser.error("flow --seconds takes one config file")
        return draw_store(chosen.sources[0], seconds=chosen.seconds, folder=chosen.folder)
    if chosen.command == "new-plugin":
        from dataplane_core.cli._new_plugin import run as write_project

        return write_project(chosen.name, folder=chosen.folder, journal=chosen.journal)
    given = [chosen.minutes, chosen.seed, chosen.folder]
    if chosen.chaos:
        if chosen.markdown_path or chosen.select or chosen.first_failure:
            parser.error("conformance --chaos takes no --markdown, -k and -x")
        from dataplane_core.cli._conformance import run_chaos

        return run_chaos(
            chosen.name,
            options=chosen.options,
            minutes=1.0 if chosen.minutes is None else chosen.minutes,
            seed=chosen.seed,
            folder=chosen.folder,
            json_path=chosen.json_path,
        )
    if any(each is not None for each in given):
        parser.error("conformance takes --minutes, --seed and -o only with --chaos")
    from dataplane_core.cli._conformance import run as run_kit

    return run_kit(
        chosen.name,
        options=chosen.options,
        json_path=chosen.json_path,
        markdown_path=chosen.markdown_path,
        select=chosen.select,
        first_failure=chosen.first_failure,
    )


def _offer_completion(parser: argparse.ArgumentParser, names: Sequence[argparse.ArgumentParser]) -> None:
    """Answers a shell that completes a command, if argcomplete is installed; then the process ends.

    Args:
        parser: The parser of the command.
        names: Sub-parsers whose argument ``name`` is that of an installed backend.
    """
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    from dataplane_core.entry_points import find_plugins

    installed = sorted({record.name for record in find_plugins()})
    for each in names:
        (action,) = (action for action in each._actions if action.dest == "name")
        action.completer = lambda **_: installed  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)
