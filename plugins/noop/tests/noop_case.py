"""What the conformance kit needs to know of noop."""

from __future__ import annotations

from typing import ClassVar

from stored_cells import cell_of

from dataplane_core.ledger import commands
from dataplane_core.spec import Ragged
from dataplane_noop import NoopBackend
from dataplane_testkit import AuthorsClass


class NoopCase(AuthorsClass):
    backend = "noop"
    most_copies: ClassVar = {
        "put_samples": (1.1, "the store keeps one copy of its own, and makes no other"),
        "get_samples": (1.1, "the caller gets one copy of its own, and no other is made"),
    }

    def raw_get(self, backend, partition_id, sample_id, field):
        assert isinstance(backend, NoopBackend)
        (part,) = backend._service.call(commands.Locate(partition_id, [sample_id], [field])).parts
        return cell_of(backend._segments[part.write_id]._columns[field], part.positions[0])

    def held_bytes(self, backend):
        assert isinstance(backend, NoopBackend)
        columns = [column for segment in backend._segments.values() for column in segment._columns.values()]
        tensors = [column.values if isinstance(column, Ragged) else column for column in columns]
        return sum(tensor.nbytes for tensor in tensors if not isinstance(tensor, list))
