"""The reference backend keeps the whole contract."""

from __future__ import annotations

from dataplane_core.testing import BackendConformance
from dataplane_noop import NoopBackend
from dataplane_noop._segments import Ragged


class TestNoop(BackendConformance):
    backend = "noop"

    def raw_get(self, backend, partition_id, sample_id, field):
        assert isinstance(backend, NoopBackend)
        (part,) = backend._service.call("locate", partition_id, [sample_id], [field]).parts
        column, row = backend._segments[part.write_id]._columns[field], part.positions[0]
        if isinstance(column, Ragged):
            return column.values[column.offsets[row] : column.offsets[row + 1]]
        return column[row]
