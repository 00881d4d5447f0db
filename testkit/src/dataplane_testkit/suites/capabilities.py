"""The declarations of a backend are readable and consistent. Operations that it does not declare are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import UnsupportedOperationError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import OPERATIONS, Capability, Scope, WireFormat
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import batch, ids
from dataplane_testkit._store import Store, not_run
from dataplane_testkit.suites.costs import OPERATIONS as CALLS

#: Capability -> further calls that need it besides those of `CALLS`, on a partition ``p`` with samples s0 and s1.
_ASK: dict[Capability, list[Callable[[DataPlaneClient, str], Any]]] = {
    Capability.CLAIMS: [lambda c, p: c.is_finished(p, ["train"])],
    Capability.GROUPS: [lambda c, p: c.register_partition(p + "-groups", ["x"], None, ["train"], grpo_group_size=2)],
    Capability.LEASES: [lambda c, p: c.claim_meta(p, "train", ["x"], 1, blocking=False, lease_s=1.0)],
    Capability.TAG_FILTERS: [
        lambda c, p: c.claim_meta(p, "train", ["x"], 1, blocking=False, tag_filter={"n": 1}),
        lambda c, p: c.list_samples(p, {"n": 1}),
    ],
    Capability.LISTING: [
        lambda c, p: c.list_sample_ids(p),
        lambda c, p: c.list_partitions(),
        lambda c, p: c.describe(p),
        lambda c, p: c.ping(),
        lambda c, p: c.get_samples(["s0"], p, None),
    ],
    Capability.CURSORS: [
        lambda c, p: c.list_consumed(p, "train"),
        lambda c, p: c.reset_consumption(p, "train"),
    ],
    Capability.SAMPLERS: [
        lambda c, p: c.claim_meta(p, "train", ["x"], 1, 0, blocking=False),
        lambda c, p: c.claim_meta(p, "train", ["x"], 1, blocking=False, sampler="freshest"),
    ],
    Capability.UNITS: [lambda c, p: c.add_units(1), lambda c, p: c.remove_unit("a unit")],
    Capability.OVERWRITE: [lambda c, p: c.put_samples(["s0", "s2"], p, batch(2, x=torch.arange(2) + 7))],
}


class CapabilitySuite(Suite, chapter="capabilities"):
    """What a backend declares, and what it does not declare."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One case per operation that is not declared."""
        if "undeclared" in metafunc.fixturenames:
            names = sorted(OPERATIONS - self.under_test().capabilities)
            metafunc.parametrize("undeclared", names or [None], ids=[str(name) for name in names] or ["none"])

    def test_reasons_are_given_only_for_what_is_not_declared(self, store: Store) -> None:
        cls = store.deployment.backend_class
        departs = {str(each) for each in Capability} - {str(each) for each in cls.capabilities} | {"scope"}
        wrong = sorted(map(str, set(map(str, cls.why_not_declared)) - departs))
        assert not wrong, (
            f"why_not_declared has the keys {', '.join(wrong)}, which are declared or are not capabilities"
        )
        assert all(why.strip() for why in cls.why_not_declared.values())

    def test_undeclared_operations_are_refused(self, store: Store, undeclared: Capability | None) -> None:
        if undeclared is None:
            not_run("the backend declares all operations")
        partition = store.filled(2, tags=[{"n": 1}, {"n": 2}])
        if undeclared is Capability.CAPACITY:
            fields = type(store.backend).Config.model_fields
            assert "capacity_bytes" not in fields, (
                "Config has the option 'capacity_bytes', but the backend does not declare 'capacity'"
            )
            return

        def refused(ask: Callable[..., Any], *more: Any) -> None:
            with store.refusal(UnsupportedOperationError) as caught:
                ask(store.client, partition, *more)
            assert isinstance(caught.value, NotImplementedError)

        for ask in _ASK.get(undeclared, ()):
            refused(ask)
        for call, _, need in CALLS.values():
            if need is undeclared:
                refused(call, KVBatchMeta(partition, "train", ["s0"], lease_tokens=["token"]))
        assert store.get(partition, ids(2))["x"].tolist() == [0, 1], "a refused operation changed data"
        assert not store.has(partition, "s2"), "a refused operation wrote a row"

    def test_declarations_are_readable_without_connecting(self, store: Store) -> None:
        cls = store.deployment.backend_class
        assert isinstance(cls.wire, WireFormat)
        assert isinstance(cls.capabilities, frozenset)
        assert all(isinstance(each, Capability) for each in cls.capabilities)
        assert isinstance(cls.scope, Scope)
        assert issubclass(cls.Config, BaseModel)
        assert (store.client.capabilities, store.client.scope) == (cls.capabilities, cls.scope)
        assert store.client.backend_name == store.name
        assert "closed" in repr(store.deployment.closed_client())

    def test_operations_that_build_on_claims_declare_them(self, store: Store) -> None:
        declared = type(store.backend).capabilities
        for capability in (Capability.GROUPS, Capability.LEASES, Capability.SAMPLERS, Capability.CURSORS):
            assert capability not in declared or Capability.CLAIMS in declared, f"'{capability}' needs 'claims'"
        if Capability.TAG_FILTERS in declared:
            assert declared & {Capability.CLAIMS, Capability.LISTING}, "'tag_filters' needs 'claims' or 'listing'"
        if Capability.ATOMIC_OVERWRITE in declared:
            assert Capability.OVERWRITE in declared, "'atomic_overwrite' needs 'overwrite'"
        if Capability.CAPACITY in declared:
            fields = type(store.backend).Config.model_fields
            assert {"capacity_bytes", "on_full"} <= set(fields), (
                "'capacity' needs the options capacity_bytes and on_full"
            )
