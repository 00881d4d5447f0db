from shm_case import ShmCase

from dataplane_testkit import BackendConformance


class TestShm(ShmCase, BackendConformance):
    """shm_store keeps the whole contract."""
