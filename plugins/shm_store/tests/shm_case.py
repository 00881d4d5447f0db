"""What the conformance kit needs to know of shm_store."""

import time
import uuid

import pytest
from stored_cells import cell_of

from dataplane_core.ledger import commands
from dataplane_shm import ShmBackend
from dataplane_testkit import AuthorsClass


class ShmCase(AuthorsClass):
    backend = "shm_store"
    backend_class = ShmBackend

    @pytest.fixture(scope="class")
    @classmethod
    def namespace(cls):
        return f"kit-{uuid.uuid4().hex[:8]}"

    @pytest.fixture
    def options(self, namespace):
        return {"namespace": namespace, "capacity_bytes": 256 << 20}

    def conflicting_options(self, options):
        return {**options, "capacity_bytes": 1 << 30}

    def raw_get(self, backend, partition_id, sample_id, field):
        """The cell, straight from the shared memory."""
        deadline = time.monotonic() + 30
        located = backend.call_ledger(deadline, commands.Locate(partition_id, [sample_id], [field]))
        (part,) = backend._extents.get(located.parts, located.specs, deadline)
        return cell_of(part.columns[field], part.rows[0]).clone()


def rows_found(arena, parts, places, num_rows):
    """The bytes of rows of one column where they lie, as `Locate` and `Find` say."""
    rows = [None] * num_rows
    for part, place in zip(parts, places, strict=True):
        (column,) = place.layout.columns
        for row, position in zip(part.rows, place.rows_of(part.positions), strict=True):
            start = place.offset + column.start + position * column.step
            rows[row] = arena.bytes[start : start + column.step]
    return rows
