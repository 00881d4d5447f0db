"""The control plane as one state machine: partitions, claims, leases, groups, tags, capacity.

`LedgerBackend` sends it a command for every operation, wherever a backend hosts it. The conformance kit compares
backends with it.
"""

from dataplane_core.ledger import commands
from dataplane_core.ledger.commands import Located, Reply
from dataplane_core.ledger.ledger import Ledger
from dataplane_core.ledger.queues import backoff_s
from dataplane_core.ledger.rollouts import rollout_of
from dataplane_core.ledger.rows import Ref, group_of
from dataplane_core.ledger.service import LedgerService, LedgerThread
from dataplane_core.spec.requests import Command

__all__ = [
    "Command",
    "Ledger",
    "LedgerService",
    "LedgerThread",
    "Located",
    "Ref",
    "Reply",
    "backoff_s",
    "commands",
    "group_of",
    "rollout_of",
]
