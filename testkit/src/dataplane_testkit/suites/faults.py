"""Faults around every operation: a lost reply, a deadline that has passed. A second call must neither lose nor double a
sample."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import pytest
import torch

from dataplane_core.errors import BackendUnavailableError, LeaseExpiredError, UnsupportedOperationError
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._store import Store
from dataplane_testkit._timing import bounded, eventually

_FIELDS: Final = ("x", "y", "z")
_LONG_S: Final = 600.0
_SHORT_S: Final = 0.1


class Case(NamedTuple):
    """An operation: its hook, its call, what must hold however often it was called, and what it needs."""

    hook: str
    call: Callable[[Scene], Any]
    holds: Callable[[Scene], None]
    needs: Capability | None = None


class Scene:
    """A partition with the samples s0, s1 and s2 (field x and tag n: 0, 1, 2). To be settled, s0 and s1 are leased."""

    def __init__(self, store: Store, case: Case) -> None:
        store.require(case.needs)
        self.store, self.client, self.case = store, store.client, case
        self.partition = store.filled(3, *_FIELDS, tags=[{"n": number} for number in range(3)])
        is_held = case.hook in ("ack", "nack", "renew")
        self.held: Any = store.claim(self.partition, 2, lease_s=_LONG_S) if is_held else None

    def call(self) -> Any:
        return self.case.call(self)

    def call_again(self) -> None:
        """Calls the operation once more, which may be refused if it was done, and asserts what must hold then."""
        done: list[type[Exception]] = [LeaseExpiredError]
        if not self.store.declares(Capability.OVERWRITE):
            done.append(UnsupportedOperationError)
        with suppress(*done):
            self.call()
        self.case.holds(self)

    def put(self, name: str, number: int) -> None:
        x = torch.tensor([number])
        self.client.put_samples([name], self.partition, {"x": x, "y": x, "z": x}, [{"n": number}])

    def given(self, **options: Any) -> list[str]:
        """The ids that a claim gives to the task now."""
        return self.client.claim_meta(self.partition, "train", ["x"], 9, blocking=False, **options).sample_ids

    def gives(self, *names: str) -> None:
        """Asserts that the task is given these samples, and has then consumed all."""
        assert self.given() == list(names), "the task is given a sample twice or not at all"
        assert _is_consumed(self)

    def has(self, **cells: int) -> None:
        """Asserts that exactly these samples are there, each once, with its cell and its tag."""
        found = self.store.get(self.partition, list(cells))["x"].tolist()
        assert dict(zip(cells, found, strict=True)) == cells
        for name in ("s0", "s1", "s2", "new"):
            assert name in cells or not self.store.has(self.partition, name), f"'{name}' exists, but was not put"
        if self.store.declares(Capability.LISTING):
            meta = self.client.list_samples(self.partition)
            assert meta.sample_ids == list(cells), "the list does not hold every sample once"
            assert meta.tags == [{"n": number} for number in cells.values()]
        if self.store.declares(Capability.CLAIMS):
            self.gives(*cells)


def _is_consumed(scene: Scene) -> bool:
    return scene.client.check_consumption_status(scene.partition, ["train"])


def _unchanged(scene: Scene) -> None:
    scene.has(s0=0, s1=1, s2=2)


def _opened_anew(scene: Scene) -> None:
    scene.put("new", 9)
    scene.has(new=9)


def _claim(scene: Scene) -> None:
    # without a lease, the samples of a claim whose reply is lost are lost to the task: all of them, or none
    assert scene.given() in (ids(3), []), "only a part of the claim was given"


def _given_on_a_lease(scene: Scene) -> None:
    mine: list[str] = []

    def back() -> bool:
        mine.extend(scene.given(lease_s=_LONG_S))
        return len(mine) >= 3

    eventually(back, what="the return of a claim whose reply was lost")
    assert sorted(mine) == ids(3)


def _renewed(scene: Scene) -> None:
    scene.client.ack(scene.held)
    scene.gives("s2")


def _dropped(scene: Scene) -> None:
    with scene.store.refusal(KeyError, scene.partition):
        scene.store.get(scene.partition, ["s0"])


_TAGS: Final = [{"n": number} for number in range(3)]
CASES: Final[dict[str, Case]] = {
    "register_partition": Case(
        "register_partition", lambda s: s.client.register_partition(s.partition, _FIELDS, None, ["train"]), _opened_anew
    ),
    "put_samples": Case("put_samples", lambda s: s.put("new", 3), lambda s: s.has(s0=0, s1=1, s2=2, new=3)),
    "put_samples_of_tags": Case(
        "put_samples", lambda s: s.client.put_samples(ids(3), s.partition, tags=_TAGS), _unchanged
    ),
    "get_samples": Case("get_samples", lambda s: s.client.get_samples(ids(3) * 2, s.partition, ["x"]), _unchanged),
    "claim_meta": Case("claim", _claim, lambda s: s.gives(), Capability.CLAIMS),
    "claim_meta_on_a_lease": Case("claim", lambda s: s.given(lease_s=_SHORT_S), _given_on_a_lease, Capability.LEASES),
    "ack": Case("ack", lambda s: s.client.ack(s.held), lambda s: s.gives("s2"), Capability.LEASES),
    "nack": Case("nack", lambda s: s.client.nack(s.held), lambda s: s.gives(*ids(3)), Capability.LEASES),
    "renew": Case("renew", lambda s: s.client.renew(s.held, _LONG_S), _renewed, Capability.LEASES),
    "check_consumption_status": Case("check_consumption", _is_consumed, _unchanged, Capability.CLAIMS),
    "clear_samples": Case(
        "clear_samples", lambda s: s.client.clear_samples(["s1"], s.partition), lambda s: s.has(s0=0, s2=2)
    ),
    "clear_samples_of_all": Case("clear_samples", lambda s: s.client.clear_samples(None, s.partition), _dropped),
    "list_samples": Case("list_samples", lambda s: s.client.list_samples(s.partition), _unchanged, Capability.LISTING),
    "list_fields": Case(
        "list_fields", lambda s: s.client.list_fields(ids(3), s.partition), _unchanged, Capability.LISTING
    ),
    "list_clients": Case("list_clients", lambda s: s.client.list_clients(), _unchanged, Capability.CLIENTS),
    "list_units": Case("list_units", lambda s: s.client.list_units(), _unchanged, Capability.UNITS),
}
each_case = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))


class FaultSuite(Suite, chapter="faults"):
    """One table: each operation under each fault."""

    @each_case
    def test_an_operation_whose_reply_was_lost_may_be_called_again(self, store: Store, case: Case) -> None:
        scene, lost = Scene(store, case), BackendUnavailableError("the reply was lost.")
        with store.faults.error_after(case.hook, lost), store.refusal(ConnectionError) as caught:
            scene.call()
        assert caught.value is lost, "a data-plane error was replaced by another error"
        assert caught.value.retryable
        scene.call_again()

    @each_case
    def test_an_operation_that_is_late_may_be_called_again(self, store: Store, case: Case) -> None:
        scene = Scene(store, case)
        with store.faults.late(case.hook), suppress(TimeoutError):
            bounded(scene.call, what=f"{case.hook}, after its deadline,")
        scene.call_again()
