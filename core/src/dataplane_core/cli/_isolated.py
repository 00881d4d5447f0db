"""Calls functions that import a backend in a new process each, so that their libraries cannot conflict."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

from dataplane_core.errors import DataPlaneError

_TIMEOUT_S = 120
_CODE = "from dataplane_core.cli._isolated import answer; answer()"


def ask(target: str, **arguments: Any) -> Any:
    """Calls a function in a new process.

    Args:
        target: ``module:function``.
        arguments: Plain values. They are sent through a pipe, so that a secret does not show in a list of processes.

    Returns:
        The function's result, which must be plain values.

    Raises:
        DataPlaneError: The function raised it, did not return within two minutes, or ended its process; or an argument
            is not a plain value.
    """
    try:
        asked = json.dumps({"target": target, "arguments": arguments})
    except (TypeError, ValueError) as error:
        raise DataPlaneError(f"the arguments must be plain values: {error}.") from error
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE], input=asked, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DataPlaneError(f"its process did not end within {_TIMEOUT_S} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = done.stderr.strip().splitlines()
        raise DataPlaneError(f"its process ended with status {done.returncode}: {reason[-1] if reason else ''}")
    reply = json.loads(lines[-1])
    if "error" in reply:
        raise DataPlaneError(reply["error"])
    return reply["value"]


def answer() -> None:
    """Runs in the new process: reads the call from standard input and prints the result as the last line."""
    asked = json.load(sys.stdin)
    module, _, name = asked["target"].partition(":")
    try:
        reply = {"value": getattr(importlib.import_module(module), name)(**asked["arguments"])}
    except DataPlaneError as error:
        reply = {"error": str(error)}
    print(f"\n{json.dumps(reply)}")
