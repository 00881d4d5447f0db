"""The base classes of backends: `Backend`, and on a ledger `LedgerBackend` and `RowStoreBackend`. Also checks for
``dataplane doctor`` and processes that a backend owns.

Backend packages derive from these classes; the client calls only `Backend`. What needs torch is imported when it is
first used: a process that hosts a ledger imports the class of its backend.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

from dataplane_core.backends.base import Backend, NoOptions
from dataplane_core.backends.diagnosis import Finding, Level, check_announced_address, missing_library, never_reachable
from dataplane_core.backends.ledger_backend import (
    LEDGER_CAPABILITIES,
    NOT_BEGUN,
    CapacityOptions,
    LedgerBackend,
    RefsGoneError,
    columns_of,
)
from dataplane_core.backends.row_store import RowStoreBackend, RowStoreOptions, framed_columns
from dataplane_core.backends.spread import ledger_of, spread_over

if TYPE_CHECKING:
    from dataplane_core.backends.extent_client import ExtentClient, StoredRows, read_stored

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
    "check_announced_address",
    "columns_of",
    "framed_columns",
    "ledger_of",
    "missing_library",
    "never_reachable",
    "read_stored",
    "spread_over",
]

#: Names of a module that imports torch.
_LAZY: Final = ("ExtentClient", "StoredRows", "read_stored")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.extent_client"), name)
    return value
