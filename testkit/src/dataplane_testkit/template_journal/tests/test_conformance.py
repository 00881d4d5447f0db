"""AcmeStore keeps the contract."""

import time

import pytest
from dataplane_testkit import BackendConformance

from dataplane_acme_store import AcmeStore


class TestAcmeStore(BackendConformance):
    backend = "acme_store"
    backend_class = AcmeStore

    @pytest.fixture
    def options(self, tmp_path_factory):
        return {"path": str(tmp_path_factory.getbasetemp() / "store")}

    def restart(self, backend):
        """Ends what the store runs, as a crash does, and starts it again. Files run nothing."""
        backend.__init__(backend.config)
        backend.start(bootstrap=True, deadline=time.monotonic() + 60)
