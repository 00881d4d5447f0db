"""AcmeStore keeps the contract."""

from dataplane_testkit import BackendConformance

from dataplane_acme_store import AcmeStore


class TestAcmeStore(BackendConformance):
    backend = "acme_store"
    backend_class = AcmeStore
