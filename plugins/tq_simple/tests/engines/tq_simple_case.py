"""What the conformance kit needs to know of tq_simple, on a real Ray."""

import time

import pytest
from stored_cells import cell_of

from dataplane_core.hosting import Memory
from dataplane_core.ledger import commands
from dataplane_testkit import AuthorsClass
from dataplane_tq_simple import TQSimpleBackend


class TQSimpleCase(AuthorsClass):
    backend = "tq_simple"
    backend_class = TQSimpleBackend

    @pytest.fixture
    def options(self, ray_address):
        return {"instance": "conformance", "ray_address": ray_address}

    def raw_get(self, backend, partition_id, sample_id, field):
        """The cell, straight from the memory of the storage unit."""
        deadline = time.monotonic() + 30
        located = backend.call_ledger(deadline, commands.Locate(partition_id, [sample_id], [field]))
        ((number, (read,)),) = backend._reads(located, deadline).items()
        (part,) = backend._unit(number, deadline).get([read], located.specs, deadline)
        return cell_of(part.columns[field], part.rows[0]).clone()

    def held_bytes(self, backend):
        """The rows in the memory of the storage units, as the units count them."""
        deadline = time.monotonic() + 30
        backend.refresh(deadline)
        units = [backend._unit(number, deadline) for number in backend.living().values()]
        return sum(unit.session.call("the kit's", deadline, Memory()).held_bytes for unit in units)

    def conflicting_options(self, options):
        return {**options, "unit_bytes": 1 << 30}
