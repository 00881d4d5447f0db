"""The control plane as one state machine: partitions, claims, leases, groups, tags, capacity.

`LedgerBackend` sends it a command for every operation, wherever a backend hosts it. The conformance kit compares
backends with it.
"""

from dataplane_core.ledger import commands
from dataplane_core.ledger.checks import check_command
from dataplane_core.ledger.commands import Located, Reply
from dataplane_core.ledger.ledger import Ledger
from dataplane_core.ledger.pacing import LEAST_ROOM_PAUSE_S, LONGEST_PAUSE_S, Pacer, backoff_s
from dataplane_core.ledger.rows import Ref, group_of, too_many_samples
from dataplane_core.ledger.service import ClientRegister, LedgerService, LedgerThread
from dataplane_core.ledger.state import (
    StateReader,
    pack_refs,
    pack_write_id,
    pack_writes,
    to_state,
    unpack_refs,
    unpack_write_id,
    unpack_writes,
)
from dataplane_core.spec import Command

__all__ = [
    "LEAST_ROOM_PAUSE_S",
    "LONGEST_PAUSE_S",
    "ClientRegister",
    "Command",
    "Ledger",
    "LedgerService",
    "LedgerThread",
    "Located",
    "Pacer",
    "Ref",
    "Reply",
    "StateReader",
    "backoff_s",
    "check_command",
    "commands",
    "group_of",
    "pack_refs",
    "pack_write_id",
    "pack_writes",
    "to_state",
    "too_many_samples",
    "unpack_refs",
    "unpack_write_id",
    "unpack_writes",
]
