"""Faults around every operation: an error before the backend gets the request, a lost reply, a deadline that has
passed, a truncated reply. The tests check what the client raises, and that a second call neither loses nor doubles a
sample."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CorruptDataError,
    LeaseExpiredError,
    OperationTimeoutError,
    UnsupportedOperationError,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, ids, items_of
from dataplane_testkit._store import Store, not_declared
from dataplane_testkit._timing import Background, bounded, eventually

_LONG_S = 600.0
_SHORT_S = 0.1


@dataclass
class _Scene:
    """A partition with the samples s0, s1 and s2 (field x and tag n: 0, 1, 2). If asked for, s0 and s1 are leased."""

    store: Store
    partition: str
    held: KVBatchMeta | None = None

    def settle(self, operation: Callable[..., Any], *arguments: Any) -> None:
        """ack, nack or renew of what is held; for one that was settled before: the refusal that says so."""
        assert self.held is not None
        operation(self.held, *arguments)

    def settle_again(self, operation: Callable[..., Any], *arguments: Any) -> None:
        with suppress(LeaseExpiredError):  # the first call succeeded
            self.settle(operation, *arguments)

    def given(self, count: int = 9) -> list[str]:
        """The ids that a claim gives to the task now."""
        return self.store.claim(self.partition, count).sample_ids

    def holds(self, **cells: int) -> None:
        """Asserts that exactly these samples are there, each once, with its cell and its tag."""
        found = self.store.get(self.partition, list(cells))["x"].tolist()
        assert dict(zip(cells, found, strict=True)) == cells
        for name in ("s0", "s1", "s2", "new"):
            assert name in cells or not self.store.has(self.partition, name), f"'{name}' exists, but was not put"
        if self.store.declares(Capability.LISTING):
            meta = self.store.client.list_samples(self.partition)
            assert meta.sample_ids == list(cells), "the list does not hold every sample once"
            assert meta.tags == [{"n": number} for number in cells.values()]


def _register(scene: _Scene) -> None:
    scene.store.client.register_partition(scene.partition, ["x"], None, ["train"])


def _registered(scene: _Scene) -> None:
    _register(scene)
    scene.store.put(scene.partition, ["new"], [{"n": 9}], x=torch.tensor([9]))
    scene.holds(new=9)


def _put(scene: _Scene) -> None:
    scene.store.put(scene.partition, ["new"], [{"n": 3}], x=torch.tensor([3]))


def _was_put(scene: _Scene) -> None:
    try:
        _put(scene)
    except UnsupportedOperationError:  # the first put was committed, and this store does not overwrite
        assert not scene.store.declares(Capability.OVERWRITE)
    scene.holds(s0=0, s1=1, s2=2, new=3)
    if scene.store.declares(Capability.CLAIMS):
        assert scene.given() == [*ids(3), "new"], "consumers are given a sample twice or not at all"


def _put_tags(scene: _Scene) -> None:
    scene.store.put(scene.partition, ids(3), [{"n": number} for number in range(3)])


def _tags_were_put(scene: _Scene) -> None:
    _put_tags(scene)
    scene.holds(s0=0, s1=1, s2=2)


def _get(scene: _Scene) -> None:
    assert scene.store.get(scene.partition, ["s2", "s0", "s2"])["x"].tolist() == [2, 0, 2]


def _claimed(scene: _Scene) -> None:
    # without a lease, the samples of a claim whose reply is lost are lost to the task: all of them, or none
    assert scene.given() in (ids(3), []), "only a part of the claim was given"
    assert scene.given() == []
    assert scene.store.client.check_consumption_status(scene.partition, ["train"])


def _lease(scene: _Scene) -> None:
    scene.store.claim(scene.partition, 9, lease_s=_SHORT_S)


def _was_leased(scene: _Scene) -> None:
    mine: list[str] = []

    def back() -> bool:
        mine.extend(scene.store.claim(scene.partition, 9, lease_s=_LONG_S).sample_ids)
        return len(mine) >= 3

    eventually(back, what="the return of a claim whose reply was lost")
    assert sorted(mine) == ids(3)


def _acked(scene: _Scene) -> None:
    scene.settle_again(scene.store.client.ack)
    assert scene.given() == ["s2"], "an acked sample was given again"
    assert scene.store.client.check_consumption_status(scene.partition, ["train"])


def _nacked(scene: _Scene) -> None:
    scene.settle_again(scene.store.client.nack)
    assert scene.given() == ids(3), "a sample that went back to the pool is given twice or not at all"


def _renewed(scene: _Scene) -> None:
    scene.settle(scene.store.client.renew, _LONG_S)
    scene.settle(scene.store.client.ack)
    assert scene.given() == ["s2"]


def _check(scene: _Scene) -> None:
    assert not scene.store.client.check_consumption_status(scene.partition, ["train"])


def _clear(scene: _Scene) -> None:
    scene.store.client.clear_samples(["s1"], scene.partition)


def _was_cleared(scene: _Scene) -> None:
    _clear(scene)
    scene.holds(s0=0, s2=2)
    if scene.store.declares(Capability.CLAIMS):
        assert scene.given() == ["s0", "s2"]


def _drop(scene: _Scene) -> None:
    scene.store.client.clear_samples(None, scene.partition)


def _was_dropped(scene: _Scene) -> None:
    _drop(scene)
    with scene.store.refusal(KeyError, scene.partition):
        scene.store.get(scene.partition, ["s0"])


def _list(scene: _Scene) -> None:
    assert scene.store.client.list_samples(scene.partition).sample_ids == ids(3)


def _list_fields(scene: _Scene) -> None:
    assert scene.store.client.list_fields(ids(3), scene.partition) == [["x"]] * 3


def _list_clients(scene: _Scene) -> None:
    scene.store.client.list_clients()


def _list_units(scene: _Scene) -> None:
    assert scene.store.client.list_units()


@dataclass(frozen=True)
class _Case:
    """An operation and how to test it under a fault.

    Attributes:
        hook: The hook that fails.
        call: The client's call.
        again: Calls the operation again, and asserts that the result is that of one call.
        needs: The capabilities that it needs.
        holds: Whether it settles leases, so that s0 and s1 must be leased first.
    """

    hook: str
    call: Callable[[_Scene], Any]
    again: Callable[[_Scene], Any]
    needs: Capability | None = None
    holds: bool = False


_CASES: dict[str, _Case] = {
    "register_partition": _Case("register_partition", _register, _registered),
    "put_samples": _Case("put_samples", _put, _was_put),
    "put_samples_of_tags": _Case("put_samples", _put_tags, _tags_were_put),
    "get_samples": _Case("get_samples", _get, _get),
    "claim_meta": _Case("claim", _Scene.given, _claimed, Capability.CLAIMS),
    "claim_meta_on_a_lease": _Case("claim", _lease, _was_leased, Capability.LEASES),
    "ack": _Case("ack", lambda s: s.settle(s.store.client.ack), _acked, Capability.LEASES, holds=True),
    "nack": _Case("nack", lambda s: s.settle(s.store.client.nack), _nacked, Capability.LEASES, holds=True),
    "renew": _Case("renew", lambda s: s.settle(s.store.client.renew, _LONG_S), _renewed, Capability.LEASES, holds=True),
    "check_consumption_status": _Case("check_consumption", _check, _check, Capability.CLAIMS),
    "clear_samples": _Case("clear_samples", _clear, _was_cleared),
    "clear_samples_of_all": _Case("clear_samples", _drop, _was_dropped),
    "list_samples": _Case("list_samples", _list, _list, Capability.LISTING),
    "list_fields": _Case("list_fields", _list_fields, _list_fields, Capability.LISTING),
    "list_clients": _Case("list_clients", _list_clients, _list_clients, Capability.CLIENTS),
    "list_units": _Case("list_units", _list_units, _list_units, Capability.UNITS),
}

#: Operations whose replies hold a number of rows, or one entry per row.
_COUNTED = ["put_samples", "put_samples_of_tags", "get_samples", "claim_meta", "claim_meta_on_a_lease", "ack", "nack"]
_COUNTED += ["renew", "list_samples", "list_fields"]


def _scene(store: Store, case: _Case) -> _Scene:
    store.require(case.needs)
    scene = _Scene(store, store.register("x"))
    store.put(scene.partition, ids(3), [{"n": number} for number in range(3)], x=torch.arange(3))
    if case.holds:
        scene.held = store.claim(scene.partition, 2, lease_s=_LONG_S)
    return scene


class FaultSuite(Suite, chapter="faults"):
    """Errors before and after the commit, late requests, truncated replies."""

    @pytest.mark.parametrize("name", list(_CASES))
    def test_an_error_before_surfaces_and_changes_nothing(self, store: Store, name: str) -> None:
        case = _CASES[name]
        scene = _scene(store, case)
        cause = OSError(104, "Connection reset by peer")
        with (
            store.faults.error_before(case.hook, cause),
            store.refusal(BackendError, case.hook, "Connection reset") as caught,
        ):
            case.call(scene)
        assert caught.value.__cause__ is cause, "the error lost its cause"
        copied = pickle.loads(pickle.dumps(caught.value)).__cause__  # pickled by this process
        assert (type(copied), copied.args) == (type(cause), cause.args), "the cause did not survive pickling"
        case.again(scene)

    @pytest.mark.parametrize("name", list(_CASES))
    def test_an_operation_whose_reply_was_lost_may_be_called_again(self, store: Store, name: str) -> None:
        case = _CASES[name]
        scene = _scene(store, case)
        lost = BackendUnavailableError("the reply was lost.")
        with (
            store.faults.error_after(case.hook, lost),
            store.refusal(ConnectionError, "the reply was lost") as caught,
        ):
            case.call(scene)
        assert caught.value is lost, "a data-plane error was replaced by another error"
        assert caught.value.retryable
        case.again(scene)

    @pytest.mark.parametrize("name", list(_CASES))
    def test_an_operation_that_is_late_may_be_called_again(self, store: Store, name: str) -> None:
        case = _CASES[name]
        scene = _scene(store, case)
        with store.faults.late(case.hook), suppress(TimeoutError):
            bounded(partial(case.call, scene), what=f"{case.hook}, after its deadline,")
        case.again(scene)

    def test_an_error_says_truly_whether_a_put_happened(self, store: Store) -> None:
        partition = store.register("x")
        outcomes: dict[str, str] = {}
        for number in range(40):
            left_s = 0.0002 * (number - 1)  # the deadline passes before the put, and at some moments of it

            def shorten(request: Any, left_s: float = left_s) -> None:
                request.deadline = time.monotonic() + left_s

            with store.faults.before("put_samples", shorten):
                try:
                    store.put(partition, [f"s{number}"], x=torch.tensor([number]))
                    outcomes[f"s{number}"] = "done"
                except (OperationTimeoutError, BackendUnavailableError) as error:
                    outcomes[f"s{number}"] = error.outcome
        there = [name for name in outcomes if store.has(partition, name)]
        lies = [name for name, said in outcomes.items() if said == ("not_done" if name in there else "done")]
        assert not lies, f"{lies[0]} is {'there' if lies[0] in there else 'not there'}: '{outcomes[lies[0]]}'"

    @pytest.mark.parametrize("name", _COUNTED)
    def test_a_reply_that_is_short_is_refused(self, store: Store, name: str) -> None:
        case = _CASES[name]
        scene = _scene(store, case)
        operation = name.partition("_of_")[0].partition("_on_")[0]
        with store.faults.truncation(operation=case.hook), store.refusal(BackendError, operation, "reply"):
            case.call(scene)
        if operation == "get_samples":
            with store.faults.truncation(field="x"), store.refusal(BackendError, operation, "reply"):
                case.call(scene)
        case.again(scene)

    def test_a_missing_reply_is_an_error(self, store: Store) -> None:
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

    def test_a_cell_that_is_cut_is_refused(self, store: Store) -> None:
        if not store.deployment.backend_class.wire.bytes:
            not_declared("cells as framed bytes")  # the test above cuts rows of whole tensors
        partition = store.register("x", "o")
        store.put(partition, ids(2), x=torch.arange(6).view(2, 3), o=as_objects({"a": [1, 2]}, "text"))

        def cut(request: Any, reply: Any) -> Any:
            for column in reply.columns.values():
                if isinstance(column, list):
                    column[1] = column[1][:-1]
            return reply

        with store.faults.after("get_samples", cut), store.refusal(CorruptDataError, "'x'", "'s1'") as caught:
            store.get(partition, ids(2), "x")
        assert caught.value.cells == {"s1": ("x",)}, f"the error's cells are {caught.value.cells}"
        assert caught.value.hint is not None, "the error has no advice"
        with store.faults.after("get_samples", cut), store.refusal(CorruptDataError, "'o'"):
            store.get(partition, ids(2), "o")
        assert items_of(store.get(partition, ids(2), "o")["o"]) == [{"a": [1, 2]}, "text"]

    def test_a_put_that_is_delayed_holds_up_nobody(self, store: Store) -> None:
        scene = _scene(store, _CASES["get_samples"])
        go_on = threading.Event()

        def hold(request: Any) -> None:
            go_on.wait(60)

        with store.faults.before("put_samples", hold):
            delayed = Background(partial(_put, scene))
            for _ in range(3):
                bounded(partial(_get, scene), what="a read beside a put that is delayed")
            assert delayed.running
            go_on.set()
            delayed.result()
        scene.holds(s0=0, s1=1, s2=2, new=3)
