"""tq_simple against the contract, on a real Ray: with memory that is shared, with views of it, and over the wire."""

import time
from typing import ClassVar

import pytest

from dataplane_core.codec import Ragged
from dataplane_core.hosting import Memory
from dataplane_core.ledger import commands
from dataplane_testkit import BackendConformance
from dataplane_tq_simple import TQSimpleBackend


class TestTQSimple(BackendConformance):
    backend = "tq_simple"
    backend_class = TQSimpleBackend

    @pytest.fixture
    def options(self, ray_address):
        return {"instance": "conformance", "ray_address": ray_address}

    def raw_get(self, backend, partition_id, sample_id, field):
        """The cell, straight from the memory of the storage unit."""
        deadline = time.monotonic() + 30
        located = backend.call_ledger(deadline, commands.Locate(partition_id, [sample_id], [field]))
        (unit, (read,)), *_ = units_of(backend, located, deadline)
        (part,) = unit.get([read], located.specs, deadline)
        column, row = part.columns[field], part.rows[0]
        if isinstance(column, Ragged):
            return column.values[column.offsets[row] : column.offsets[row + 1]].clone()
        return column[row].clone()

    def held_bytes(self, backend):
        """The rows in the memory of the storage units, as the units count them."""
        deadline, engine = time.monotonic() + 30, backend._engine
        engine._places.refresh(deadline)
        units = [engine._unit(number, deadline) for number in engine._places.living().values()]
        return sum(unit.session.call("the kit's", deadline, Memory()).held_bytes for unit in units)

    def conflicting_options(self, options):
        return {**options, "num_storage_units": 2}


def units_of(backend, located, deadline):
    engine = backend._engine
    return [(engine._unit(number, deadline), reads) for number, reads in engine._reads(located, deadline).items()]


@pytest.mark.long
class TestTQSimpleOverTheWire(TestTQSimple):
    """Rows are dealt out over two units, which this process does not share memory with."""

    @pytest.fixture
    def options(self, ray_address):
        return {
            "instance": "wire",
            "ray_address": ray_address,
            "num_storage_units": 2,
            "near_writer": False,
            "share_memory": False,
        }

    def conflicting_options(self, options):
        return {**options, "num_storage_units": 3}


@pytest.mark.long
class TestTQSimpleViews(TestTQSimple):
    deviations: ClassVar = {
        "test_what_comes_back_is_owned_by_the_caller": "two reads of the same rows are views of the same memory"
    }

    @pytest.fixture
    def options(self, ray_address):
        return {"instance": "views", "ray_address": ray_address, "views": True}


@pytest.mark.long
class TestTQSimpleInAFolder(TestTQSimple):
    @pytest.fixture
    def options(self, ray_address, tmp_path_factory):
        folder = tmp_path_factory.getbasetemp() / "conformance-folder"
        return {"instance": "folder", "ray_address": ray_address, "durable": str(folder), "unit_bytes": 256 << 20}
