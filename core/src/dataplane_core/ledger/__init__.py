"""The control plane as one state machine: partitions, claims, leases, groups, tags, capacity.

`LedgerBackend` sends it a command for every operation, wherever a backend hosts it. The conformance kit compares
backends with it.
"""

from dataplane_core.ledger import commands
from dataplane_core.ledger.checks import check_command
from dataplane_core.ledger.commands import Located, Reply
from dataplane_core.ledger.ledger import Ledger
from dataplane_core.ledger.pacing import Pacer
from dataplane_core.ledger.queues import LEAST_ROOM_PAUSE_S, LONGEST_PAUSE_S, backoff_s
from dataplane_core.ledger.rows import Ref, group_of
from dataplane_core.ledger.service import LedgerService, LedgerThread
from dataplane_core.ledger.state import pack_state, unpack_state
from dataplane_core.spec import Command

__all__ = [
    "LEAST_ROOM_PAUSE_S",
    "LONGEST_PAUSE_S",
    "Command",
    "Ledger",
    "LedgerService",
    "LedgerThread",
    "Located",
    "Pacer",
    "Ref",
    "Reply",
    "backoff_s",
    "check_command",
    "commands",
    "group_of",
    "pack_state",
    "unpack_state",
]
