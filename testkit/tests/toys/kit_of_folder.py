"""The whole kit on a store of blobs that is right, and for each that is broken the suite that holds the test it must
fail."""

from __future__ import annotations

import time

import pytest
from folder_store import BROKEN, DropsATenth, FolderStore, OneCapacity
from kit_of_broken import suite_of

from dataplane_core.codec import split_rows
from dataplane_core.ledger import commands
from dataplane_testkit import BackendConformance
from dataplane_testkit.suites.capacity import CapacitySuite


class TestFolderStore(BackendConformance):
    backend_class = FolderStore

    @pytest.fixture
    def options(self, tmp_path_factory):
        return {"path": str(tmp_path_factory.getbasetemp() / self.backend_class.__name__)}

    def raw_get(self, backend, partition_id, sample_id, field):
        (part,) = backend.call_ledger(time.monotonic() + 60, commands.Locate(partition_id, [sample_id], [field])).parts
        row = (backend._blobs / f"row{part.write_id + part.positions[0]:x}").read_bytes()
        return split_rows([row])[0][part.slots[0]]


class TestOneCapacity(CapacitySuite):
    backend_class = OneCapacity
    options = TestFolderStore.options


class TestDropsATenthInTheWholeKit(BackendConformance):
    backend_class = DropsATenth
    options = TestFolderStore.options


for _backend, _test in BROKEN.items():
    _name = f"Test{_backend.__name__}"
    _members = {"backend_class": _backend, "__module__": __name__, "options": TestFolderStore.options}
    globals()[_name] = type(_name, (suite_of(_test),), _members)
