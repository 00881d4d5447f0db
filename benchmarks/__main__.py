"""Runs benchmarks, and prints their tables: python -m benchmarks CASE... [options]

A case is one of those below; an option goes to each case that has it. Rounds are interleaved, so that other work on the
machine slows all alike; compare figures only with others of the same run.
"""

from __future__ import annotations

import os
import secrets

# before torch and Ray are loaded, and before processes are started, which have it too
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per process, as in trainers
os.environ.setdefault("TQ_NUM_THREADS", "2")  # else TransferQueue warns at every request
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))

import argparse
import importlib
import inspect
import json
import pkgutil
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases as modules
from benchmarks.bench import CASES, Table, text_of

PAGES = Path(__file__).resolve().parents[1] / "docs"


def options_of(case: Callable[..., Any]) -> dict[str, Any]:
    """Name -> default of each option of a case: its parameters."""
    return {name: parameter.default for name, parameter in inspect.signature(case).parameters.items()}


def help_of(name: str, whole: bool) -> str:
    """The first sentence about a case, or all that there is to say, and its options."""
    text = inspect.getdoc(CASES[name]) or ""
    options = " ".join(
        f"[--{option.replace('_', '-')} {shlex.join(map(str, default if isinstance(default, tuple) else [default]))}]"
        for option, default in options_of(CASES[name]).items()
    )
    return f"{name} {options}\n    " + (text if whole else text.partition("\n")[0]).replace("\n", "\n    ")


def parser_of_all() -> argparse.ArgumentParser:
    """The options of all cases. None has a default, so that a case keeps its own."""
    usage = "python -m benchmarks CASE... [options]; --help lists the cases, and with cases their options"
    parser = argparse.ArgumentParser("benchmarks", usage, add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("cases", nargs="*", default=[])
    for name in ("help", "json", "page"):
        parser.add_argument(f"--{name}", action="store_true", default=False)
    kinds: dict[str, tuple[type, dict[str, str]]] = {}
    for name, case in CASES.items():
        for option, default in options_of(case).items():
            several = isinstance(default, tuple)
            kind = type(default[0] if several else default), {"nargs": "+"} if several else {}
            assert kinds.setdefault(option, kind) == kind, f"{name}: --{option} is of another kind in another case"
    for option, (kind, number) in kinds.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=kind, **number)
    return parser


def lines_of(table: Table, aligned: bool) -> str:
    """A table in Markdown; if it is aligned, its columns stand below each other."""
    rows = [table.head, *([text_of(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) if aligned else 0 for column in zip(*rows, strict=True)]
    head, *lines = ("| " + " | ".join(map(str.ljust, row, widths)) + " |\n" for row in rows)
    return "".join([head, "|" + "|".join("-" * max(3, width + 2) for width in widths) + "|\n", *lines])


def write(table: Table) -> None:
    """Replaces the table below the line ``<!-- name -->`` of a page, if one has this line."""
    for path in PAGES.glob("*.md"):
        page = path.read_text(encoding="utf-8")
        place = re.search(rf"(?<=^<!-- {re.escape(table.name)} -->\n\n)(\|.*\n)*", page, re.M)
        if place:
            lines = lines_of(table, aligned=False).replace("  ", " ")  # an empty cell is one space
            text = page[: place.start()] + lines + page[place.end() :]
            path.write_text(text, encoding="utf-8")


def main() -> None:
    """Runs the cases that are named."""
    for module in pkgutil.iter_modules(modules.__path__):
        importlib.import_module(f"{modules.__name__}.{module.name}")
    parser = parser_of_all()
    options = vars(parser.parse_intermixed_args())
    names, as_json, to_page, asks = (options.pop(name) for name in ("cases", "json", "page", "help"))
    if unknown := set(names) - CASES.keys():
        parser.error(f"no case {', '.join(unknown)}. Expected some of {', '.join(CASES)}.")
    if asks or not names:
        print(__doc__ if not names else "", *(help_of(name, bool(names)) for name in names or CASES), sep="\n")
        print("\n--json prints the figures as JSON; --page writes the tables into docs/*.md.")
        return
    unused = options.keys() - {option for name in names for option in options_of(CASES[name])}
    if unused:
        parser.error(f"{', '.join(names)}: no --{unused.pop().replace('_', '-')}")
    torch.set_num_threads(1)
    figures: dict[str, list[Any]] = {}
    for name in names:
        case = CASES[name]
        chosen = {option: value for option, value in options.items() if option in options_of(case)}
        for table in case(**{option: tuple(v) if isinstance(v, list) else v for option, v in chosen.items()}):
            figures.setdefault(name, []).append({"name": table.name, "head": table.head, "rows": table.rows})
            if not as_json:
                print(f"\n{table.name}\n\n{lines_of(table, aligned=True)}", flush=True)
            if to_page:
                write(table)
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    if as_json:
        json.dump({**machine, "tables": figures}, sys.stdout, indent=1)
    print("\n{cpus} CPUs, load {load:.1f}".format_map(machine), file=sys.stderr)


if __name__ == "__main__":
    main()
