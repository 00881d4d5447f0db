"""What an operation costs, in numbers that do not depend on the machine: hook calls, and copies of the payload.

The report holds the times of the tests. No test asserts a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from dataplane_core.client import DataPlaneClient
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import batch, ids, jagged, rows_of
from dataplane_testkit._copies import allocated
from dataplane_testkit._store import Store, not_run

_ROWS = 32

_Call = Callable[[DataPlaneClient, str, Any], Any]

_CLAIMS, _LEASES = Capability.CLAIMS, Capability.LEASES
_WIDE = {f"f{number}": torch.zeros(50) for number in range(8)}

#: Operation -> the client's call on a partition of `_ROWS` samples and the meta of a leased claim, its hook, and the
#: capability that it needs.
OPERATIONS: dict[str, tuple[_Call, str, Capability | None]] = {
    "register_partition": (lambda c, p, m: c.register_partition(p, ["x"], None, ["train"]), "register_partition", None),
    "put_samples": (lambda c, p, m: c.put_samples(ids(50, "new"), p, _WIDE), "put_samples", None),
    "put_samples_of_tags": (lambda c, p, m: c.put_samples(ids(2), p, None, [{"n": 1}] * 2), "put_samples", None),
    "get_samples": (lambda c, p, m: c.get_samples([*ids(_ROWS), *ids(_ROWS)], p, ["x", "y"]), "get_samples", None),
    "clear_samples": (lambda c, p, m: c.clear_samples([*ids(4), *ids(4)], p), "clear_samples", None),
    "clear_samples_of_all": (lambda c, p, m: c.clear_samples(None, p), "clear_samples", None),
    "claim_meta": (lambda c, p, m: c.claim_meta(p, "train", ["x"], 8, blocking=False), "claim", _CLAIMS),
    "claim_meta_that_need_not_wait": (lambda c, p, m: c.claim_meta(p, "train", ["x"], 8), "claim", _CLAIMS),
    "check_consumption_status": (lambda c, p, m: c.check_consumption_status(p, ["a"]), "check_consumption", _CLAIMS),
    "ack": (lambda c, p, m: c.ack(m), "ack", _LEASES),
    "nack": (lambda c, p, m: c.nack(m), "nack", _LEASES),
    "renew": (lambda c, p, m: c.renew(m, 60.0), "renew", _LEASES),
    "list_samples": (lambda c, p, m: c.list_samples(p), "list_samples", Capability.LISTING),
    "list_clients": (lambda c, p, m: c.list_clients(), "list_clients", Capability.CLIENTS),
    "list_units": (lambda c, p, m: c.list_units(), "list_units", Capability.UNITS),
}


class CostSuite(Suite, chapter="costs"):
    """Hook calls and copies of the payload."""

    @pytest.mark.parametrize("operation", list(OPERATIONS))
    def test_an_operation_costs_one_hook_call(self, store: Store, operation: str) -> None:
        call, hook, capability = OPERATIONS[operation]
        store.require(capability)
        partition = store.register("x", "y", *(f"f{i}" for i in range(8)))
        store.put(partition, ids(_ROWS), x=torch.arange(_ROWS), y=torch.zeros(_ROWS, 3))
        held = store.claim(partition, 4, lease_s=600) if capability is Capability.LEASES else None
        with store.faults.counting() as calls:
            call(store.client, partition, held)
        assert calls == [hook]

    @pytest.mark.parametrize("operation", ["put_samples", "get_samples"])
    def test_the_payload_is_copied_no_more_than_it_may_be(self, store: Store, operation: str) -> None:
        if store.case.through_asyncio:
            not_run("the hooks run in threads, and the kit counts the tensors of one thread")
        partition = store.register("x", "y")
        rows = [torch.randn(64 + index, 128) for index in range(_ROWS)]
        fields = batch(_ROWS, x=torch.randn(_ROWS, 16384), y=jagged(rows))
        payload_bytes = 4 * (_ROWS * 16384 + sum(row.numel() for row in rows))
        for names in (ids(_ROWS, "first"), ids(_ROWS)):  # the first calls make allocations that later ones do not
            _, put = allocated(partial(store.client.put_samples, names, partition, fields))
            found, get = allocated(partial(store.get, partition, names[::-1], "x", "y"))
        assert rows_of(found["y"], _ROWS)[0].equal(rows[-1])
        copies = {"put_samples": put, "get_samples": get}[operation].copies_of(payload_bytes)
        most, _ = store.case.copies_allowed(operation)
        print(f"{operation}: {copies:.2f} copies of the payload, {most:g} allowed")
        assert copies <= most, f"{operation} holds {copies:.1f} copies of its payload. At most {most:g} are allowed."
