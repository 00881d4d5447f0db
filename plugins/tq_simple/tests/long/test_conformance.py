"""tq_simple against the contract: over the wire, with views of memory that is shared, and in a folder."""

from typing import ClassVar

import pytest
from tq_simple_case import TQSimpleCase

from dataplane_testkit import BackendConformance


class TestTQSimpleOverTheWire(TQSimpleCase, BackendConformance):
    """This process does not share memory with the unit."""

    @pytest.fixture
    def options(self, ray_address):
        return {"instance": "wire", "ray_address": ray_address, "share_memory": False}


class TestTQSimpleViews(TQSimpleCase, BackendConformance):
    deviations: ClassVar = {
        "test_what_comes_back_is_owned_by_the_caller": "two reads of the same rows are views of the same memory"
    }

    @pytest.fixture
    def options(self, ray_address):
        return {"instance": "views", "ray_address": ray_address, "views": True}


class TestTQSimpleInAFolder(TQSimpleCase, BackendConformance):
    @pytest.fixture
    def options(self, ray_address, tmp_path_factory):
        folder = tmp_path_factory.getbasetemp() / "conformance-folder"
        return {"instance": "folder", "ray_address": ray_address, "durable": str(folder), "unit_bytes": 256 << 20}
