"""What the commands ask of backends in a new process each, so that the libraries of backends cannot conflict."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from dataplane_core.errors import ConfigError, DataPlaneError, PluginImportError

_TIMEOUT_S: Final = 120
_CODE: Final = "from dataplane_core.cli._examination import answer; answer()"
#: Seconds that the checks of one backend may wait for servers, not counting its imports.
_DEADLINE_S: Final = 20.0


def ask(function: str, **arguments: Any) -> Any:
    """Calls a function of this module in a new process. Arguments and result are plain values. Raises `DataPlaneError`
    if the function did, if it did not return in time, and if it ended its process."""
    try:
        # through a pipe, so that a secret does not show in a list of processes
        question = json.dumps({"function": function, "arguments": arguments})
        run = partial(subprocess.run, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        done = run([sys.executable, "-c", _CODE], input=question)
    except (TypeError, ValueError) as error:
        raise DataPlaneError(f"the arguments must be plain values: {error}.") from error
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
    question = json.load(sys.stdin)
    try:
        reply = {"value": globals()[question["function"]](**question["arguments"])}
    except DataPlaneError as error:
        reply = {"error": str(error)}
    print(f"\n{json.dumps(reply)}")


def describe(name: str) -> dict[str, Any]:
    """What a backend declares. Raises `PluginError` if it cannot be loaded."""
    from dataplane_core.connecting import load_backend

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


def diagnose_all(names: Sequence[str], options: Mapping[str, Any] | None) -> list[list[dict[str, Any]]]:
    """The findings about several backends, each as `diagnose` gives them."""
    from dataplane_core.backends import Finding

    findings = []
    for name in names:
        try:
            findings.append(diagnose(name, options))
        except DataPlaneError as error:
            findings.append([asdict(Finding.error(error.message, error.hint))])
    return findings


def diagnose(name: str, options: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The findings about one backend with these options (None: their defaults, if all have one), as plain values."""
    from dataplane_core.backends import Finding, missing_library
    from dataplane_core.config import validate_model
    from dataplane_core.connecting import load_backend
    from dataplane_core.spec import Capability

    try:
        cls = load_backend(name)
    except PluginImportError as error:
        library = missing_library(error)
        hint = f"Install the package that brings {library}. On Debian and Ubuntu, apt-file search {library} names it."
        return [asdict(Finding.error(error.message, error.hint if library is None else hint))]
    findings = []
    if Capability.NO_PICKLE not in cls.capabilities:
        what = "Its transport unpickles what reaches its sockets: whoever can connect to them can run code here."
        hint = "Keep its ports inside a network that you trust, or use a backend that declares no_pickle."
        findings.append(Finding.warning(what, hint))
    try:
        config = validate_model(cls.Config, options or {}, f"options of backend '{name}'")
    except ConfigError as error:
        what = "It has options without a default, so nothing further was checked."
        hint = "Name a config file: dataplane doctor --config FILE"
        findings.append(Finding.warning(what, hint) if options is None else Finding.error(error.message, error.hint))
    else:
        findings += cls.class_for(config).diagnose(config, deadline=time.monotonic() + _DEADLINE_S)
    return [asdict(finding) for finding in findings]
