"""The base classes of backends: `Backend`, and on a ledger `LedgerBackend` and `RowStoreBackend`. Also checks for
``dataplane doctor`` and processes that a backend owns.

Backend packages derive from these classes; the client calls only `Backend`. What needs torch imports it when it is
first used: a process that hosts a ledger, or only asks, imports the class of its backend.
"""

from dataplane_core.backends.base import Backend, Finding, Level, NoOptions, missing_library
from dataplane_core.backends.extent_client import ExtentClient, StoredRows, read_stored
from dataplane_core.backends.ledger_backend import (
    LEDGER_CAPABILITIES,
    NOT_BEGUN,
    CapacityOptions,
    LedgerBackend,
    columns_of,
)
from dataplane_core.backends.row_store import RowStoreBackend, RowStoreOptions, framed_columns
from dataplane_core.backends.spread import ledger_of, spread_over
from dataplane_core.hosting.extents import RefsGoneError

__all__ = [
    "LEDGER_CAPABILITIES",
    "NOT_BEGUN",
    "Backend",
    "CapacityOptions",
    "ExtentClient",
    "Finding",
    "LedgerBackend",
    "Level",
    "NoOptions",
    "RefsGoneError",
    "RowStoreBackend",
    "RowStoreOptions",
    "StoredRows",
    "columns_of",
    "framed_columns",
    "ledger_of",
    "missing_library",
    "read_stored",
    "spread_over",
]
