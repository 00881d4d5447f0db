"""The conformance kit: proves a backend against the contract.

A storage author's test file:

    from dataplane_core.testing import BackendConformance
    from my_store import MyBackend

    class TestMyBackend(BackendConformance):
        backend_class = MyBackend

        @pytest.fixture
        def options(self, my_server):
            return {"url": my_server.url}

Needs the extra ``dataplane-core[testing]``.
"""

from dataplane_core.testing._base import ConformanceError
from dataplane_core.testing._conformance import BackendConformance
from dataplane_core.testing.faults import Faults

__all__ = ["BackendConformance", "ConformanceError", "Faults"]
