"""What a backend declares, the refusal of what it does not, and that no call hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from pydantic import BaseModel

from dataplane_core.errors import UnsupportedOperationError
from dataplane_core.spec import Capability, Scope, WireFormat
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._store import Store, not_run
from dataplane_testkit._timing import PROMPT_S, Background, bounded

#: Capability -> the others of which it needs one.
_NEEDS: Final[dict[Capability, set[Capability]]] = {
    **{each: {Capability.CLAIMS} for each in (Capability.GROUPS, Capability.LEASES, Capability.CURSORS)},
    Capability.SAMPLERS: {Capability.CLAIMS},
    Capability.TAG_FILTERS: {Capability.CLAIMS, Capability.LISTING},
    Capability.ATOMIC_OVERWRITE: {Capability.OVERWRITE},
}


class RefusalSuite(Suite, chapter="refusals"):
    """Calls that are refused, and calls that must end."""

    def test_declarations_are_consistent(self, store: Store) -> None:
        cls = store.deployment.backend_class
        declared = cls.capabilities
        assert isinstance(cls.wire, WireFormat)
        assert isinstance(declared, frozenset)
        assert all(isinstance(each, Capability) for each in declared)
        assert isinstance(cls.scope, Scope)
        assert issubclass(cls.Config, BaseModel)
        assert (store.client.capabilities, store.client.scope) == (declared, cls.scope)
        assert store.client.backend_name == store.name
        wrong = set(map(str, cls.why_not_declared)) - {str(each) for each in {*Capability} - declared} - {"scope"}
        assert not wrong, f"why_not_declared has the keys {sorted(wrong)}, which are declared or are not capabilities"
        assert all(why.strip() for why in cls.why_not_declared.values())
        for capability in declared & _NEEDS.keys():
            needed = _NEEDS[capability]
            assert declared & needed, f"'{capability}' needs {' or '.join(map(repr, sorted(needed)))}"
        has_options = {"capacity_bytes", "on_full"} <= cls.Config.model_fields.keys()
        assert has_options == (Capability.CAPACITY in declared), "'capacity' goes with capacity_bytes and on_full"

    def test_an_overwrite_that_is_not_declared_is_refused(self, store: Store) -> None:
        if store.declares(Capability.OVERWRITE):
            not_run("the backend declares overwrite")
        partition = store.filled(2)
        with store.refusal(UnsupportedOperationError) as caught:
            store.put(partition, ["s0", "s2"], x=torch.arange(2) + 7)
        assert isinstance(caught.value, NotImplementedError)
        assert store.get(partition, ids(2))["x"].tolist() == [0, 1], "a refused put changed data"
        assert not store.has(partition, "s2"), "a refused put wrote a row"

    # --- no call hangs ------------------------------------------------------------------------------------------------

    def test_a_waiting_claim_holds_nobody_up(self, store: Store) -> None:
        partition = store.register("x", tasks=["train", "eval"])
        waiting = [store.waiting_claim(partition, 9) for _ in range(4)]

        def work() -> None:
            for number in range(8):
                store.put(partition, [f"s{number}"], x=torch.tensor([number]))
                assert store.get(partition, [f"s{number}"])["x"].tolist() == [number]
                store.claim(partition, 1, task="eval")

        bounded(work, 2 * PROMPT_S, "work next to waiting claims")
        assert all(each.running for each in waiting)
        store.client.clear_samples(None, partition)
        for each in waiting:
            with store.refusal(KeyError):
                each.result(what="a claim of a partition that was cleared")

    def test_one_bad_request_holds_nobody_up(self, store: Store) -> None:
        partition = store.filled(2)
        bad: list[tuple[type[Exception], Callable[[], Any]]] = [
            (KeyError, lambda: store.get(partition, ["nobody"])),
            (KeyError, lambda: store.get(partition, ids(2), "x", "y")),
            (KeyError, lambda: store.get(store.new_id(), ["a"])),
            (ValueError, lambda: store.put(partition, ["late"], x=torch.zeros(1))),
        ]
        for number in range(10):
            failing = [(error_type, Background(call)) for error_type, call in bad]
            assert bounded(lambda: store.get(partition, ids(2)), what="a read next to bad requests")["x"].tolist() == [
                0,
                1,
            ]
            for error_type, each in failing:
                with store.refusal(error_type):
                    each.result(what="a bad request")
            store.put(partition, [f"after{number}"], x=torch.tensor([number]))
        store.put(partition, ["late"], x=torch.tensor([7]))
        assert store.get(partition, ["late", *ids(10, "after")])["x"].tolist() == [7, *range(10)]
