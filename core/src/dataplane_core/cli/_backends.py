"""`dataplane backends`: lists installed backends from metadata; with ``--load``, also what each declares."""

from __future__ import annotations

import json
from typing import Any

from dataplane_core.cli._isolated import ask
from dataplane_core.connecting import find_plugins, load_backend
from dataplane_core.entry_points import install_command
from dataplane_core.errors import DataPlaneError, printable


def run(*, load: bool, as_json: bool) -> int:
    """Prints the list. Returns 1 if a backend fails to load or two distributions register a name, else 0."""
    rows: list[dict[str, Any]] = []
    failed = False
    records = find_plugins()
    for record in records:
        row: dict[str, Any] = {
            "name": record.name,
            "distribution": record.distribution,
            "version": record.version,
            "target": record.target,
        }
        if sum(other.name == record.name for other in records) > 1:
            row["error"] = "the name is claimed by more than one distribution"
        elif load:
            try:
                row.update(ask(f"{__name__}:describe", name=record.name))
            except DataPlaneError as error:
                row["error"] = str(error)
        failed = failed or "error" in row
        rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print(rows)
    return int(failed)


def describe(name: str) -> dict[str, Any]:
    """Imports a backend and returns what it declares.

    Raises:
        PluginError: It cannot be loaded.
    """
    cls = load_backend(name)
    return {
        "scope": str(cls.scope),
        "wire": cls.wire.describe(),
        "capabilities": sorted(str(capability) for capability in cls.capabilities),
        "options": {
            key: "required" if info.is_required() else repr(info.default)
            for key, info in cls.Config.model_fields.items()
        },
    }


def _print(rows: list[dict[str, Any]]) -> None:
    if not rows:
        print(f"no backends are installed; for a first one: {install_command('dataplane-noop')}")
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['distribution']} {row['version']}")
        for key in ("scope", "wire"):
            if key in row:
                print(printable(f"{'':<{width}}    {key}: {row[key]}"))
        if "capabilities" in row:
            print(f"{'':<{width}}    capabilities: {', '.join(row['capabilities']) or 'none'}")
            options = ", ".join(f"{name}={default}" for name, default in row["options"].items())
            print(printable(f"{'':<{width}}    options: {options or 'none'}"))
        if "error" in row:
            print(printable(f"{'':<{width}}    error: {row['error']}"))
