"""The conformance kit: tests a backend against the contract.

A storage author's test file:

    from dataplane_core.testing import BackendConformance
    from my_store import MyBackend

    class TestMyBackend(BackendConformance):
        backend_class = MyBackend

        @pytest.fixture
        def options(self, my_server):
            return {"url": my_server.url}

Needs the extra ``dataplane-core[testing]``. Environment variables:

- ``DATAPLANE_HYPOTHESIS_PROFILE=long``: many random examples, 200 kills instead of 20, 100,000 claims by 8 processes.
- ``DATAPLANE_CONFORMANCE_KILLS``: how many clients the chapter "crashes" kills.
- ``DATAPLANE_CONFORMANCE_SEED``: the random seed for the moments of these kills. A failing test prints its seed.
- ``DATAPLANE_CONFORMANCE_PROMPT_S``: the most seconds that a call may take that must not wait. Default: 10.
"""

from dataplane_core.testing._author import AuthorsClass, ConformanceError, Disturbance
from dataplane_core.testing._base import Suite
from dataplane_core.testing._conformance import BackendConformance
from dataplane_core.testing._marks import chapter_of, limit_of, rule_of
from dataplane_core.testing._progress import Progress
from dataplane_core.testing.chaos import Settings, Verdict, run_chaos
from dataplane_core.testing.faults import Faults
from dataplane_core.testing.report import Report, to_json

__all__ = [
    "AuthorsClass",
    "BackendConformance",
    "ConformanceError",
    "Disturbance",
    "Faults",
    "Progress",
    "Report",
    "Settings",
    "Suite",
    "Verdict",
    "chapter_of",
    "limit_of",
    "rule_of",
    "run_chaos",
    "to_json",
]
