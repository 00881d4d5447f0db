"""Where the conformance kit finds the cells that a backend has stored."""

import time

from dataplane_core.codec import split_rows
from dataplane_core.ledger import commands
from dataplane_core.spec import Ragged
from dataplane_testkit import AuthorsClass


def cell_of(column, row):
    """A row of a stored column."""
    if isinstance(column, Ragged):
        return column.values[column.offsets[row] : column.offsets[row + 1]]
    return column[row]


class StoresRows(AuthorsClass):
    """A case of a `RowStoreBackend`, whose engine has the frame of a cell in a row."""

    def raw_get(self, backend, partition_id, sample_id, field):
        deadline = time.monotonic() + 60
        (part,) = backend.call_ledger(deadline, commands.Locate(partition_id, [sample_id], [field])).parts
        ((*frames,),) = split_rows(backend.get_rows([part.write_id + part.positions[0]], deadline))
        return bytes(frames[part.slots[0]])
