"""Deadlines and timeouts: no call hangs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from dataplane_core.errors import DataPlaneError
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import batch, ids
from dataplane_testkit._hooks import Hooks
from dataplane_testkit._store import Store
from dataplane_testkit._timing import PROMPT_S, Background, bounded

_HOOKS: Final[dict[str, tuple[Callable[[Hooks, str], Any], Capability | None]]] = {
    "register_partition": (lambda hooks, p: hooks.register(p), None),
    "describe_partition": (lambda hooks, p: hooks.describe(p), None),
    "put_samples": (lambda hooks, p: hooks.put(p, ["z"], batch(1, x=torch.zeros(1))), None),
    "get_samples": (lambda hooks, p: hooks.get(p, ["s0"], ["x"]), None),
    "get_samples_missing": (lambda hooks, p: hooks.get(p, ["nobody"], ["x"]), None),
    "claim": (lambda hooks, p: hooks.claim(p, 1), Capability.CLAIMS),
    "check_consumption": (lambda hooks, p: hooks.consumed(p), Capability.CLAIMS),
    "clear_samples": (lambda hooks, p: hooks.clear(p, ["s0"]), None),
    "list_samples": (lambda hooks, p: hooks.listing(p), Capability.LISTING),
    "list_clients": (lambda hooks, p: hooks.clients(), Capability.CLIENTS),
    "list_units": (lambda hooks, p: hooks.units(), Capability.UNITS),
}


class BoundSuite(Suite, chapter="bounds"):
    """Deadlines and timeouts."""

    def test_deadlines_follow_the_config(self, store: Store) -> None:
        partition = store.register("x")
        left: dict[str, float] = {}

        def seen(operation: str) -> Callable[[Any], None]:
            return lambda request: left.update({operation: request.deadline - time.monotonic()})

        operations = ("register_partition", "put_samples", "get_samples", "clear_samples")
        with contextlib.ExitStack() as stack:
            for operation in operations:
                stack.enter_context(store.faults.before(operation, seen(operation)))
            store.client.register_partition(partition, ["x"], None, ["train"])
            store.put(partition, ["a"], x=torch.zeros(1))
            store.get(partition, ["a"])
            store.client.clear_samples(["a"], partition)
        limit_s = store.client.config.op_timeout_s
        for operation in operations:
            assert 0.5 * limit_s < left[operation] <= limit_s, (
                f"{operation} got a deadline in {left[operation]:.1f} s. Expected about {limit_s} s"
            )

    def test_hooks_heed_their_deadline(self, store: Store) -> None:
        partition = store.filled(1)
        for hook, (call, capability) in _HOOKS.items():
            if capability is None or store.declares(capability):
                late = Background(partial(call, store.hooks.within(-1), partition))
                with contextlib.suppress(DataPlaneError):
                    late.result(what=f"hook '{hook}' with a deadline in the past")
        # the store must still answer
        again = store.register("x")
        bounded(lambda: store.put(again, ["a"], x=torch.zeros(1)), what="a put after a deadline was missed")

    def test_a_read_of_missing_data_does_not_wait(self, store: Store) -> None:
        partition = store.filled(3, "x", "y")

        def reads() -> None:
            for names, fields in ((["s0", "nobody"], ["x"]), (ids(3), ["x", "y"]), (["nobody"], ["x"])):
                with store.refusal(KeyError):
                    store.client.get_samples(names, partition, fields)

        bounded(reads, what="a read of what is not there")

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
            (KeyError, lambda: store.get(store.new_id(), ["a"])),
            (ValueError, lambda: store.put(partition, ["late"], x=torch.zeros(1))),
        ]
        for number in range(10):
            failing = [(error_type, Background(call)) for error_type, call in bad]
            found = bounded(lambda: store.get(partition, ids(2))["x"].tolist(), what="a read next to bad requests")
            assert found == [0, 1]
            for error_type, each in failing:
                with store.refusal(error_type):
                    each.result(what="a bad request")
            store.put(partition, [f"after{number}"], x=torch.tensor([number]))
        store.put(partition, ["late"], x=torch.tensor([7]))
        names = ["late", *ids(10, "after")]
        assert store.get(partition, names)["x"].tolist() == [7, *range(10)]
