"""Errors that a hook must raise itself, and a hook that returns nothing.

`Store.refusal`, with which all suites check their refusals, checks what holds for every error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataplane_core.errors import (
    DataPlaneError,
    InvalidRequestError,
    LeaseExpiredError,
    MissingDataError,
    SchemaMismatchError,
    UnknownPartitionError,
    UnknownTaskError,
)
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import batch, ids
from dataplane_testkit._store import Store


def _put(store: Store, partition: str, *names: str, value: float = 1.0) -> None:
    store.hooks.put(partition, names, batch(len(names), x=torch.full((len(names),), value)))


def _settle(store: Store, partition: str, settle: Callable[..., Any], **options: Any) -> None:
    """Settles a lease that is held and one that is not."""
    _put(store, partition, "a")
    claim = store.hooks.claim(partition, 2, lease_s=600)
    settle(partition, ["a", "s0"], [(claim.lease_tokens or ())[0], "no-token"], **options)


#: What is wrong with a call of a hook -> the error that the hook raises, the call on a partition that holds field x of
#: the sample s0, and the capability that the call needs.
_HOOKS: dict[str, tuple[type[DataPlaneError], Callable[[Store, str], Any], Capability | None]] = {
    "put_of_another_dtype": (
        SchemaMismatchError,
        lambda s, p: s.hooks.put(p, ["a"], batch(1, x=torch.tensor([1]))),
        None,
    ),
    "put_into_no_partition": (UnknownPartitionError, lambda s, p: _put(s, s.new_id(), "a"), None),
    "put_of_no_group": (
        InvalidRequestError,
        lambda s, p: _put(s, s.register("x", group_size=1), "plain"),
        Capability.GROUPS,
    ),
    "put_of_a_surplus_member": (
        InvalidRequestError,
        lambda s, p: _put(s, s.register("x", group_size=1), "a_g0", "a_g1"),
        Capability.GROUPS,
    ),
    "get_of_no_sample": (MissingDataError, lambda s, p: s.hooks.get(p, ["s0", "nobody"], ["x"]), None),
    "get_of_no_cell": (MissingDataError, lambda s, p: s.hooks.get(p, ["s0"], ["x", "y"]), None),
    "get_from_no_partition": (UnknownPartitionError, lambda s, p: s.hooks.get(s.new_id(), ["s0"], ["x"]), None),
    "describe_of_no_partition": (UnknownPartitionError, lambda s, p: s.hooks.describe(s.new_id()), None),
    "describe_of_a_cleared_partition": (
        UnknownPartitionError,
        lambda s, p: (s.hooks.clear(p, None), s.hooks.describe(p)),
        None,
    ),
    "listing_of_no_partition": (UnknownPartitionError, lambda s, p: s.hooks.listing(s.new_id()), Capability.LISTING),
    "claim_of_no_task": (UnknownTaskError, lambda s, p: s.hooks.claim(p, 1, task="nobody"), Capability.CLAIMS),
    "claim_from_no_partition": (
        UnknownPartitionError,
        lambda s, p: s.hooks.claim(s.new_id(), 1),
        Capability.CLAIMS,
    ),
    "claim_of_half_a_group": (
        InvalidRequestError,
        lambda s, p: s.hooks.claim(s.register("x", group_size=2), 3),
        Capability.GROUPS,
    ),
    "ack_of_no_lease": (LeaseExpiredError, lambda s, p: _settle(s, p, s.hooks.ack), Capability.LEASES),
    "nack_of_no_lease": (LeaseExpiredError, lambda s, p: _settle(s, p, s.hooks.nack), Capability.LEASES),
    "renew_of_no_lease": (LeaseExpiredError, lambda s, p: _settle(s, p, s.hooks.renew, lease_s=1), Capability.LEASES),
}


class ErrorSuite(Suite, chapter="errors"):
    """What the client makes of a hook's error is tested by every refusal of the kit."""

    @pytest.mark.parametrize("case", list(_HOOKS))
    def test_hooks_raise_their_own_errors(self, store: Store, case: str) -> None:
        """Hook spec: "SchemaMismatchError: A spec differs from the field's first write (FieldSpec.after)." and
        "InvalidRequestError: An id has no _g, or a group would have too many members. Nothing is written." and
        "MissingDataError: Names the first missing samples or cells, and counts the rest." and "UnknownPartitionError,
        UnknownTaskError: Not registered." and "LeaseExpiredError: Names the ids whose token is no longer valid."

        Check first: the hook itself must raise the errors of dataplane_core.errors. Core wraps any other exception in a
        BackendError.
        """
        error_type, call, capability = _HOOKS[case]
        store.require(capability)
        partition = store.register("x", "y")
        _put(store, partition, "s0")
        with pytest.raises(error_type) as caught:
            call(store, partition)
        if isinstance(caught.value, LeaseExpiredError):
            assert list(caught.value.sample_ids) == ["s0"]

    def test_a_missing_reply_is_an_error(self, store: Store) -> None:
        """Contract: "Core does the following once, for all backends: argument checks, empty batches, repeated ids in a
        read, row and field counts of every reply".

        Check first: every hook must return its reply type. None is not a reply.
        """
        partition = store.register("x")
        store.put(partition, ids(1), x=torch.zeros(1))
        calls: dict[str, Callable[[], Any]] = {
            "put_samples": lambda: store.put(partition, ["b"], x=torch.zeros(1)),
            "get_samples": lambda: store.get(partition, ids(1)),
            "clear_samples": lambda: store.client.clear_samples(ids(1), partition),
        }
        for operation, call in calls.items():
            with store.faults.after(operation, lambda request, reply: None), store.refusal(RuntimeError, operation):
                call()
