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
    from dataplane_testkit._hooks import backend_of, kill_owner
    from dataplane_testkit.chaos import Settings, Shim, Verdict, run_chaos, run_shim
    from dataplane_testkit.faults import Faults
    from dataplane_testkit.report import Report
    from dataplane_testkit.suites import BackendConformance, EngineConformance

#: Public name -> the module that has it. It is imported at its first use: the pytest plugin and the commands import
#: this package before pytest can rewrite the kit's assertions, and wherever it is installed.
_FROM: Final = {
    **dict.fromkeys(("AuthorsClass", "ConformanceError", "Disturbance"), "_author"),
    **dict.fromkeys(("BackendConformance", "EngineConformance"), "suites"),
    **dict.fromkeys(("Settings", "Shim", "Verdict", "run_chaos", "run_shim"), "chaos"),
    "Faults": "faults",
    "Report": "report",
    "backend_of": "_hooks",
    "kill_owner": "_hooks",
}
__all__ = [
    "AuthorsClass",
    "BackendConformance",
    "ConformanceError",
    "Disturbance",
    "EngineConformance",
    "Faults",
    "Report",
    "Settings",
    "Shim",
    "Verdict",
    "backend_of",
    "kill_owner",
    "run_chaos",
    "run_shim",
]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562)."""
    if name in _FROM:
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, for completion."""
    return __all__
