"""shm_store with views against the contract: all of it holds but that a read is memory of its own."""

import uuid
from typing import ClassVar

import pytest

from dataplane_shm import ShmBackend
from dataplane_testkit import BackendConformance

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def namespace():
    return f"views-{uuid.uuid4().hex[:8]}"


class TestShmViews(BackendConformance):
    backend = "shm_store"
    backend_class = ShmBackend
    deviations: ClassVar = {
        "test_what_comes_back_is_owned_by_the_caller": "two reads of the same rows are views of the same memory"
    }

    @pytest.fixture
    def options(self, namespace):
        return {"namespace": namespace, "capacity_bytes": 256 << 20, "views": True}
