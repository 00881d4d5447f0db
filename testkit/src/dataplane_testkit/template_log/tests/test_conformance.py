"""AcmeStore keeps the contract."""

import pytest
from dataplane_testkit import BackendConformance, kill_owner

from dataplane_acme_store import AcmeStore


class TestAcmeStore(BackendConformance):
    backend = "acme_store"
    backend_class = AcmeStore

    @pytest.fixture
    def options(self, tmp_path_factory):
        return {"path": str(tmp_path_factory.getbasetemp() / "store")}

    def restart(self, backend):
        """Kills what the store runs, as a crash does. Here that is only the process of the ledger."""
        kill_owner(backend)
