"""The operations: one table from which hook specs, checks of plugins, commands, messages and routing follow.

Each operation is a hook, which takes one mutable request object. A backend implements it as a plain method, and its
first result is the answer. Middleware wraps it with ``@hookimpl(wrapper=True)``: it may change the request's attributes
before ``yield`` and return another reply after it. Hooks run in the process of the client and in the caller's thread,
possibly in several threads at once, but never in the middle of another hook of the same client and thread. They may
raise any `DataPlaneError`; core wraps every other exception in `BackendError`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pluggy

from dataplane_core.spec import replies, requests
from dataplane_core.spec.capabilities import Capability

#: The version of the contract that this core speaks.
CONTRACT_VERSION: Final = 1

#: Marks middleware wrappers: ``@hookimpl(wrapper=True)``. Backends need no marker.
hookimpl = pluggy.HookimplMarker("dataplane")


class Operation(NamedTuple):
    """What is the same of an operation on every backend. The docstring of its request says what it does."""

    request: type[requests.Request]
    reply: type[Any]  # which is frozen; None is no reply
    needs: Capability | None = None  # whose backends have it; None: every backend has it
    once: bool = False  # whether the client calls it again if its reply was lost, with the same request id
    routed: bool = True  # whether one ledger answers it: that of its partition


OPERATIONS: Final = MappingProxyType(
    {
        "register_partition": Operation(requests.RegisterRequest, replies.PartitionInfo),
        "describe_partition": Operation(requests.DescribeRequest, replies.PartitionInfo),
        "put_samples": Operation(requests.PutRequest, int, once=True),
        "get_samples": Operation(requests.GetRequest, replies.WireBatch),
        "claim": Operation(requests.ClaimRequest, replies.Claim, Capability.CLAIMS),
        "ack": Operation(requests.AckRequest, int, Capability.LEASES, once=True),
        "nack": Operation(requests.NackRequest, int, Capability.LEASES, once=True),
        "renew": Operation(requests.RenewRequest, int, Capability.LEASES, once=True),
        "check_consumption": Operation(requests.ConsumptionRequest, bool, Capability.CLAIMS),
        "clear_samples": Operation(requests.ClearRequest, int),
        "list_samples": Operation(requests.ListRequest, replies.SampleList, Capability.LISTING),
        "list_partitions": Operation(requests.ListPartitionsRequest, list, Capability.LISTING, routed=False),
        "inspect_partition": Operation(requests.InspectRequest, replies.PartitionDescription, Capability.LISTING),
        "list_fields": Operation(requests.FieldsRequest, replies.FieldList, Capability.LISTING),
        "announce": Operation(requests.AnnounceRequest, int, Capability.CLIENTS, routed=False),
        "list_clients": Operation(requests.ListClientsRequest, list, Capability.CLIENTS, routed=False),
        "list_units": Operation(requests.ListUnitsRequest, list, Capability.UNITS, routed=False),
        "export_partition": Operation(requests.ExportRequest, replies.PartitionState, Capability.CURSORS),
        "set_cursor": Operation(requests.SetCursorRequest, int, Capability.CURSORS),
    }
)


def required_operations(capabilities: frozenset[Capability]) -> tuple[str, ...]:
    """The operations that a backend with these capabilities must implement."""
    return tuple(
        name for name, operation in OPERATIONS.items() if operation.needs is None or operation.needs in capabilities
    )
