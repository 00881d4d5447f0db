"""The base classes of backends: `Backend`, and on a ledger `LedgerBackend`, `RowStoreBackend` and `BlobStore`.
Also checks for ``dataplane doctor`` and processes that a backend owns.

Backend packages derive from these classes; the client calls only `Backend`.
"""

from dataplane_core.backends.base import Backend, NoOptions, required_operations
from dataplane_core.backends.blob_store import BlobStore
from dataplane_core.backends.diagnosis import Finding, Level, check_announced_address, missing_library, never_reachable
from dataplane_core.backends.extent_client import ExtentClient
from dataplane_core.backends.extent_columns import ExtentPlan, StoredRows, read_stored, stored_columns
from dataplane_core.backends.ledger_backend import LEDGER_CAPABILITIES, CapacityOptions, LedgerBackend, RefsGoneError
from dataplane_core.backends.owned_process import OwnedProcess, last_words
from dataplane_core.backends.private_folder import PrivateFolder
from dataplane_core.backends.row_store import RowStoreBackend, framed_columns
from dataplane_core.backends.shared_memory import ExtentRead, SharedMemory
from dataplane_core.backends.spread import ledger_of, spread_over
from dataplane_core.backends.writes import columns_of, writes_of
from dataplane_core.config import SizeBytes

__all__ = [
    "LEDGER_CAPABILITIES",
    "Backend",
    "BlobStore",
    "CapacityOptions",
    "ExtentClient",
    "ExtentPlan",
    "ExtentRead",
    "Finding",
    "LedgerBackend",
    "Level",
    "NoOptions",
    "OwnedProcess",
    "PrivateFolder",
    "RefsGoneError",
    "RowStoreBackend",
    "SharedMemory",
    "SizeBytes",
    "StoredRows",
    "check_announced_address",
    "columns_of",
    "framed_columns",
    "last_words",
    "ledger_of",
    "missing_library",
    "never_reachable",
    "read_stored",
    "required_operations",
    "spread_over",
    "stored_columns",
    "writes_of",
]
