"""The commands of this package: `dataplane conformance` and `dataplane new-plugin`."""

from __future__ import annotations

import argparse

from dataplane_core.cli import Command, complete_backends

__all__ = ["conformance", "new_plugin"]


def conformance(parser: argparse.ArgumentParser) -> Command:
    """`dataplane conformance`."""
    complete_backends(
        parser.add_argument("name", help="entry-point name of the backend; with --chaos also FILE.py:Class of a shim")
    )
    parser.add_argument("--options", default="{}", metavar="YAML", help="the backend's options, such as '{url: ...}'")
    parser.add_argument("--json", dest="json_path", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", dest="markdown_path", metavar="FILE", help="write the report as Markdown")
    parser.add_argument("-k", dest="select", metavar="EXPRESSION", help="only the tests that match, as pytest's -k")
    parser.add_argument("-x", dest="first_failure", action="store_true", help="stop at the first failure")
    parser.add_argument(
        "--chaos",
        action="store_true",
        help="instead of the tests, run random calls in processes that are killed and stopped, and check the history",
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="with --chaos: how long; default: 1")
    parser.add_argument("--seed", type=int, metavar="N", help="with --chaos: the schedules of this seed again")
    parser.add_argument(
        "--faults",
        type=_names,
        metavar="A,B",
        help="with --chaos: only these of kill, stop, and what can be done to the store; or none",
    )
    parser.add_argument("--steps", type=_names, metavar="A,B", help="with --chaos: only these steps, such as put,claim")
    parser.add_argument(
        "-o", dest="folder", metavar="DIR", help="with --chaos: where a fault is written; default: chaos-NAME-SEED"
    )

    def run(chosen: argparse.Namespace) -> int:
        from dataplane_testkit import _conformance_command as command

        if chosen.chaos and (chosen.markdown_path or chosen.select or chosen.first_failure):
            parser.error("conformance --chaos takes no --markdown, -k and -x")
        of_chaos = (chosen.minutes, chosen.seed, chosen.faults, chosen.steps, chosen.folder)
        if not chosen.chaos and any(each is not None for each in of_chaos):
            parser.error("conformance takes --minutes, --seed, --faults, --steps and -o only with --chaos")
        if ":" in chosen.name and not chosen.chaos:
            parser.error("conformance runs on a shim only with --chaos")
        return command.run_chaos(chosen) if chosen.chaos else command.run(chosen)

    return run


def _names(text: str) -> frozenset[str]:
    return frozenset(each.strip() for each in text.split(",") if each.strip() not in ("", "none"))


def new_plugin(parser: argparse.ArgumentParser) -> Command:
    """`dataplane new-plugin`."""
    parser.add_argument("name", help="entry-point name of the new backend, such as acme_store")
    parser.add_argument("--log", action="store_true", help="one that several processes share, with a log")
    parser.add_argument("--dir", dest="folder", help="where to write it; default: dataplane-NAME, here")

    def run(chosen: argparse.Namespace) -> int:
        from dataplane_testkit import _new_plugin

        return _new_plugin.run(chosen.name, folder=chosen.folder, log=chosen.log)

    return run
