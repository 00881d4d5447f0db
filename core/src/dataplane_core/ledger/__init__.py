"""The control plane as one state machine: partitions, claims, leases, groups, tags, capacity.

`LedgerBackend` asks it for every operation, wherever a backend hosts it; the conformance kit uses it as its oracle.
"""

from dataplane_core.ledger.ledger import Ledger, Located
from dataplane_core.ledger.pacing import LEAST_ROOM_PAUSE_S, LONGEST_PAUSE_S, Pacer, backoff_s
from dataplane_core.ledger.rows import Ref, group_of
from dataplane_core.ledger.service import LedgerService
from dataplane_core.ledger.state import StateReader, pack_refs, pack_write_id, to_state, unpack_refs, unpack_write_id

__all__ = [
    "LEAST_ROOM_PAUSE_S",
    "LONGEST_PAUSE_S",
    "Ledger",
    "LedgerService",
    "Located",
    "Pacer",
    "Ref",
    "StateReader",
    "backoff_s",
    "group_of",
    "pack_refs",
    "pack_write_id",
    "to_state",
    "unpack_refs",
    "unpack_write_id",
]
