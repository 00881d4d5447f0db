"""`dataplane backends`: what is installed, from metadata alone; with ``--load``, what each declares."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from dataplane_core.registry import find_plugins, load_backend

__all__ = ["describe", "run"]

_LOAD_TIMEOUT_S = 120


def run(*, load: bool, as_json: bool) -> int:
    """Prints the list; 1 where a backend fails to load or a name is claimed twice."""
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
            row.update(_load(record.name))
        failed = failed or "error" in row
        rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print(rows)
    return int(failed)


def describe(name: str) -> dict[str, Any]:
    """Imports a backend and says what it declares.

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


def _load(name: str) -> dict[str, Any]:
    """`describe` in a process of its own, so that one backend's libraries cannot disturb another's."""
    code = (
        "import json, sys\n"
        "from dataplane_core.cli._backends import describe\n"
        "from dataplane_core.errors import DataPlaneError\n"
        "try:\n"
        "    reply = describe(sys.argv[1])\n"
        "except DataPlaneError as error:\n"
        "    reply = {'error': str(error)}\n"
        "print('\\n' + json.dumps(reply))\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"its import did not end within {_LOAD_TIMEOUT_S} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = done.stderr.strip().splitlines()
        return {"error": f"its import ended the process with status {done.returncode}: {reason[-1] if reason else ''}"}
    reply: dict[str, Any] = json.loads(lines[-1])
    return reply


def _print(rows: list[dict[str, Any]]) -> None:
    if not rows:
        print("no backends are installed; for a first one: pip install dataplane-noop")
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['distribution']} {row['version']}")
        for key in ("scope", "wire"):
            if key in row:
                print(f"{'':<{width}}    {key}: {row[key]}")
        if "capabilities" in row:
            print(f"{'':<{width}}    capabilities: {', '.join(row['capabilities']) or 'none'}")
            options = ", ".join(f"{name}={default}" for name, default in row["options"].items())
            print(f"{'':<{width}}    options: {options or 'none'}")
        if "error" in row:
            print(f"{'':<{width}}    error: {row['error']}")
