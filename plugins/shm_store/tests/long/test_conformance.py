"""shm_store against the contract, with other options and clients."""

from typing import ClassVar

import pytest
from shm_case import ShmCase

from dataplane_core.backends import ledger_of
from dataplane_testkit import BackendConformance


class TestShmViews(ShmCase, BackendConformance):
    deviations: ClassVar = {
        "test_what_comes_back_is_owned_by_the_caller": "two reads of the same rows are views of the same memory"
    }

    @pytest.fixture
    def options(self, namespace):
        return {"namespace": namespace, "capacity_bytes": 256 << 20, "views": True}


class TestShmInAFolder(ShmCase, BackendConformance):
    @pytest.fixture
    def options(self, namespace, tmp_path_factory):
        folder = tmp_path_factory.getbasetemp() / namespace
        return {"namespace": namespace, "capacity_bytes": 256 << 20, "durable": str(folder)}


class TestShmOnSeveralLedgers(ShmCase, BackendConformance):
    num_ledgers = 3

    def held_bytes(self, backend):
        return sum(store.held_bytes() for store in backend._stores)

    def raw_get(self, backend, partition_id, sample_id, field):
        store = backend._stores[ledger_of(partition_id, 3)]
        return super().raw_get(store, partition_id, sample_id, field)
