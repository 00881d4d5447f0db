from shm_case import ShmCase

from dataplane_testkit import EngineConformance


class TestShm(ShmCase, EngineConformance):
    """shm_store keeps what core's ledger does not decide."""
