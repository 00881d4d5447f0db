"""Claims that wait are woken, where the backend declares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from dataplane_core.errors import ClaimTimeoutError, UnknownPartitionError
from dataplane_core.spec import Capability, Claim, ClaimRequest
from dataplane_testkit import _workers
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._nursery import START_S
from dataplane_testkit._store import Store
from dataplane_testkit._timing import Background, eventually

#: The timeout of a claim that a test expects to be woken, in seconds.
_LONG_S: Final = 60.0
#: Claims that know of no lease ask every 10 s.
_SOON_S: Final = 5.0


@contextmanager
def _no_polls(store: Store, *, but_for_leases: bool = False) -> Iterator[list[str]]:
    """Claims that wait ask again only when they are woken, or when their time is over. Lists the tokens of all that
    asked. With ``but_for_leases``, they also ask when the store says that they should ask before long.
    """
    asked: list[str] = []

    def note(request: ClaimRequest, claim: Claim) -> Claim:
        asked.append(request.token)
        soon = but_for_leases and 0 < claim.ask_again_s < _SOON_S
        return claim if soon else replace(claim, ask_again_s=2 * _LONG_S)

    with store.faults.after("claim", note):
        yield asked


def _num_running(claims: list[Background], expected: int) -> bool:
    return sum(each.running for each in claims) == expected


class WakeSuite(Suite, chapter="wakes"):
    """Claims that wait are woken when they can be answered."""

    @pytest.mark.parametrize("change", ["put", "last field", "nack", "tag", "reset"])
    def test_a_claim_is_woken_when_its_samples_are_ready(self, store: Store, change: str) -> None:
        needs = {"nack": Capability.LEASES, "tag": Capability.TAG_FILTERS, "reset": Capability.CURSORS}
        store.require(needs.get(change))
        partition = store.register("x", "y", tasks=["train"])
        options: dict[str, Any] = {}
        fields = ["x"]
        held: Any = None
        if change != "put":
            store.put(partition, ["a"], [{"version": 1}], x=torch.zeros(1))
        if change == "nack":
            held = store.claim(partition, 1, lease_s=10 * _LONG_S)
        elif change == "reset":
            store.claim(partition, 1)
        elif change == "last field":
            fields = ["x", "y"]
        elif change == "tag":
            options = {"tag_filter": {"version": (">=", 2)}}
        client = store.client
        makes_ready: dict[str, Callable[[], Any]] = {
            "put": lambda: store.put(partition, ["a"], x=torch.zeros(1)),
            "last field": lambda: store.put(partition, ["a"], y=torch.zeros(1)),
            "nack": lambda: client.nack(held),
            "tag": lambda: client.put_samples(["a"], partition, tags=[{"version": 2}]),
            "reset": lambda: client.reset_consumption(partition, "train"),
        }
        with _no_polls(store):
            claim = store.waiting_claim(partition, 1, *fields, **options)
            makes_ready[change]()
            assert claim.result(what="the claim").sample_ids == ["a"]

    def test_a_claim_is_woken_when_it_need_not_wait(self, store: Store) -> None:
        with _no_polls(store):
            partition = store.register("x", num_samples=3)
            store.put(partition, ["a", "b"], x=torch.zeros(2))
            rest = store.waiting_claim(partition, 4)
            store.put(partition, ["c"], x=torch.zeros(1))
            assert rest.result(what="the claim of the rest").sample_ids == ["a", "b", "c"]
            partition = store.register("x", num_samples=2)
            store.put(partition, ["a"], x=torch.zeros(1))
            none_left = store.waiting_claim(partition, 2)
            assert store.claim(partition, 1).sample_ids == ["a"]
            store.put(partition, ["b"], x=torch.zeros(1))
            assert none_left.result(what="the claim of what is left").sample_ids == ["b"]
            partition = store.register("x")
            store.put(partition, ["a"], x=torch.zeros(1))
            finished = store.waiting_claim(partition, 2)
            store.client.finish_partition(partition)
            assert finished.result(what="the claim on a finished partition").sample_ids == ["a"]
            partition = store.register("x")
            refused = store.waiting_claim(partition, 1)
            store.client.clear_samples(None, partition)
            with pytest.raises(UnknownPartitionError):
                refused.result(what="the claim on a cleared partition")

    @pytest.mark.parametrize("cleared", ["partition", "samples"])
    def test_claims_with_many_filters_are_woken_when_they_need_not_wait(self, store: Store, cleared: str) -> None:
        partition = store.register("x", "y", num_samples=1)
        store.put(partition, ["a"], [{"version": -1}], x=torch.zeros(1))
        with _no_polls(store):
            claims = [
                store.waiting_claim(partition, 1, "y", tag_filter={"version": ("!=", number)}) for number in range(24)
            ]
            store.client.clear_samples(None if cleared == "partition" else ["a"], partition)
            for claim in claims:
                if cleared == "samples":
                    assert claim.result(what="a claim of a task that can be given no more").size == 0
                else:
                    with pytest.raises(UnknownPartitionError):
                        claim.result(what="a claim on a cleared partition")

    def test_only_as_many_are_woken_as_there_are_samples_for(self, store: Store) -> None:
        partition = store.register("x")
        with _no_polls(store) as asked:
            claims = [store.waiting_claim(partition, 1) for _ in range(8)]
            for number, sample_id in enumerate(ids(8)):
                store.put(partition, [sample_id], x=torch.zeros(1))
                eventually(partial(_num_running, claims, 7 - number), what="the end of one claim")
            assert len(asked) == 8 + 8, f"8 claims that 8 puts could answer one by one asked {len(asked)} times"
        assert sorted(each.result().sample_ids[0] for each in claims) == ids(8)

    @pytest.mark.parametrize("renewed", [False, True], ids=["given_later", "made_shorter_later"])
    def test_a_claim_asks_when_a_lease_has_ended(self, store: Store, renewed: bool) -> None:
        partition = store.register("x")
        store.put(partition, ["s0"], x=torch.zeros(1))
        with _no_polls(store, but_for_leases=True):
            waiting = store.waiting_claim(partition, 2)
            held = store.claim(partition, 1, lease_s=600.0 if renewed else 0.2)
            assert held.sample_ids == ["s0"]
            if renewed:
                store.client.renew(held, 0.2)
            store.put(partition, ["s1"], x=torch.zeros(1))
            assert waiting.result(what="a claim of a sample whose lease has ended").sample_ids == ids(2)

    def test_a_claim_that_timed_out_does_not_stop_the_next(self, store: Store) -> None:
        partition = store.register("x")
        with _no_polls(store):
            with store.refusal(ClaimTimeoutError):
                store.claim(partition, 1, blocking=True, timeout_s=0.05)
            claim = store.waiting_claim(partition, 1)
            store.put(partition, ["a"], x=torch.zeros(1))
            assert claim.result(what="the second claim").sample_ids == ["a"]

    def test_a_claim_of_a_killed_process_does_not_stop_the_next(self, store: Store, tmp_path: Path) -> None:
        partition = store.register("x")
        with _no_polls(store):
            worker = store.deployment.new_worker()
            try:
                worker.wait_ready()
                worker.start(_workers.claim_and_tell, partition, tmp_path / "asked")
                # in a process that has just started, on a loaded machine
                asked = (tmp_path / "asked").exists
                eventually(asked, START_S, "the first question of a claim in another process")
                claim = store.waiting_claim(partition, 1)
                worker.kill()
            finally:
                worker.close()
            store.put(partition, ["a"], x=torch.zeros(1))
            assert claim.result(what="the claim of the client that stays").sample_ids == ["a"]
