"""What the conformance kit needs to know of shm_store."""

import time
import uuid

import pytest
import torch

from dataplane_core.hosting import offsets_at
from dataplane_core.ledger import commands
from dataplane_shm import ShmBackend
from dataplane_shm._messages import Find
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

    def held_bytes(self, backend):
        """The bytes of all rows that exist, as the ledger's process counts them."""
        return backend.statistics(time.monotonic() + 30).held_bytes

    def raw_get(self, backend, partition_id, sample_id, field):
        """The cell's bytes where the ledger's process says that they lie, with the dtype and shape of its spec."""
        session = backend._memory.session
        pin = session.new_pin()
        locate = commands.Locate(partition_id, [sample_id], [field])
        found = session.call("the kit's", time.monotonic() + 30, Find(locate, pin.number))
        (part,), spec = found.located.parts, found.located.specs[field]
        place, row = found.places[part.write_id], part.positions[0]
        column = place.layout.columns[part.slots[0]]
        extent = backend._memory.arena.bytes[place.offset :]
        if column.table < 0:
            first, count = row, 1
            shape = (column.length, *spec.trailing) if spec.rank else ()
        else:
            first, end = offsets_at(extent, column, place.num_rows)[row : row + 2].tolist()
            count = end - first
            shape = (count, *spec.trailing)
        data = extent[column.start + first * column.step : column.start + (first + count) * column.step].copy()
        pin.release()
        if spec.kind == "object":
            return torch.from_numpy(data)
        return (
            torch.from_numpy(data).view(spec.torch_dtype).view(shape)
            if data.size
            else torch.empty(shape, dtype=spec.torch_dtype)
        )
