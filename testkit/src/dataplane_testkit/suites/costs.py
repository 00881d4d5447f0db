"""What an operation costs, in numbers that do not depend on the machine: hook calls, and copies of the payload.

The report holds the times of the tests. No test asserts a time.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dataplane_testkit._base import Suite
from dataplane_testkit._columns import batch, ids, jagged, rows_of
from dataplane_testkit._copies import allocated
from dataplane_testkit._store import Store, not_run
from dataplane_testkit.suites.faults import Case, Scene, each_case

_ROWS = 32


class CostSuite(Suite, chapter="costs"):
    """Hook calls and copies of the payload."""

    @each_case
    def test_an_operation_costs_one_hook_call(self, store: Store, case: Case) -> None:
        scene = Scene(store, case)
        with store.faults.counting() as calls:
            scene.call()
        assert calls == [case.hook]

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
