"""The conformance kit: tests a backend against the contract.

A storage author's test file:

    from dataplane_testkit import BackendConformance
    from my_store import MyBackend

    class TestMyBackend(BackendConformance):
        backend_class = MyBackend

        @pytest.fixture
        def options(self, my_server):
            return {"url": my_server.url}

Environment variables:

- ``DATAPLANE_HYPOTHESIS_PROFILE=long``: many random examples, 200 kills instead of 20, 100,000 claims by 8 processes.
  ``brief``: a quarter of the usual.
- ``DATAPLANE_CONFORMANCE_KILLS``: how many clients the chapter "processes" kills.
- ``DATAPLANE_CONFORMANCE_SEED``: the random seed for the moments of these kills. A failing test prints its seed.
- ``DATAPLANE_CONFORMANCE_PROMPT_S``: the most seconds that a call may take that must not wait. Default: 10.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dataplane_testkit._author import AuthorsClass, ConformanceError, Disturbance
    from dataplane_testkit._conformance_command import Progress
    from dataplane_testkit._hooks import backend_of
    from dataplane_testkit._rows import kill_owner
    from dataplane_testkit._store import Suite
    from dataplane_testkit.chaos import Settings, Shim, Verdict, run_chaos, run_shim
    from dataplane_testkit.faults import Faults
    from dataplane_testkit.report import Report, to_json
    from dataplane_testkit.rules import chapter_of, limit_of, rule_of
    from dataplane_testkit.suites import BackendConformance, EngineConformance

__all__ = [
    "AuthorsClass",
    "BackendConformance",
    "ConformanceError",
    "Disturbance",
    "EngineConformance",
    "Faults",
    "Progress",
    "Report",
    "Settings",
    "Shim",
    "Suite",
    "Verdict",
    "backend_of",
    "chapter_of",
    "kill_owner",
    "limit_of",
    "rule_of",
    "run_chaos",
    "run_shim",
    "to_json",
]

#: Module -> public names from it. They are imported at their first use: the pytest plugin and the commands import this
#: package before pytest can rewrite the kit's assertions, and wherever it is installed.
_FROM: Final = {
    "_author": ("AuthorsClass", "ConformanceError", "Disturbance"),
    "_store": ("Suite",),
    "suites": ("BackendConformance", "EngineConformance"),
    "_conformance_command": ("Progress",),
    "_hooks": ("backend_of",),
    "_rows": ("kill_owner",),
    "chaos": ("Settings", "Shim", "Verdict", "run_chaos", "run_shim"),
    "faults": ("Faults",),
    "report": ("Report", "to_json"),
    "rules": ("chapter_of", "limit_of", "rule_of"),
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562)."""
    for module, names in _FROM.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, for completion."""
    return __all__
