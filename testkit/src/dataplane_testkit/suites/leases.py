"""Leases: what nobody settles goes back to the pool. Requests that are repeated with the same id."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import pytest
import torch

from dataplane_core.errors import LeaseExpiredError
from dataplane_core.spec import Capability, new_id
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import batch, ids
from dataplane_testkit._store import Store
from dataplane_testkit._timing import PROMPT_S, eventually, in_threads

#: Seconds of a lease that does not end during a test, and of one that a test waits for.
_LONG_S, _SHORT_S = 600.0, 0.1
#: Elements of a row: few, and so many that an engine stores them on another way.
_SIZES: Final = {"small": 2, "large": 64 * 1024}


def _wait_out(store: Store, lease_s: float = _SHORT_S) -> None:
    """Waits until leases of this time have ended that were given before: until one has that is given now."""
    partition = store.filled(1)
    assert store.claim(partition, 1, lease_s=lease_s).size == 1
    eventually(lambda: store.claim(partition, 1).size, lease_s + PROMPT_S, "the end of a lease that nobody settles")


def _settlers(store: Store) -> list[Callable[[Any], None]]:
    """ack, nack, renew."""
    return [store.client.ack, store.client.nack, partial(store.client.renew, lease_s=_LONG_S)]


def _rows(count: int, value: int, size: str = "small") -> Any:
    return batch(count, x=torch.full((count, _SIZES[size]), value, dtype=torch.int32))


def _values(store: Store, partition: str, sample_ids: list[str]) -> list[int]:
    return [int(row[0]) for row in store.get(partition, sample_ids)["x"]]


class LeaseSuite(Suite, chapter="leases"):
    """Claims with ``lease_s``, ack, nack, renew, and request ids."""

    def test_only_what_nobody_settles_goes_back(self, store: Store) -> None:
        for lease_s in (_SHORT_S, 1.0, 10.0):  # on a machine that stands still, a short lease may end before the ack
            partition = store.filled(6)
            held = store.claim(partition, 6, lease_s=lease_s)
            with suppress(LeaseExpiredError):
                store.client.renew(held.slice(2, 4), _LONG_S)
                store.client.ack(held.slice(4, 6))
                break
        _wait_out(store, lease_s)
        again = store.claim(partition, 6, lease_s=_LONG_S)
        assert again.sample_ids[:2] == ids(2), "a sample that nobody settled is not handed out again"
        assert not {"s2", "s3"}.intersection(again.sample_ids), "a lease that was renewed ended at its old end"
        assert not {"s4", "s5"}.intersection(again.sample_ids), "an acked sample went back to the pool"
        store.client.ack(held.slice(2, 4))

    def test_two_holders_never_both_succeed(self, store: Store) -> None:
        partition = store.filled(4, tasks=["train", "eval"])
        stranger = store.claim(partition, 2, task="eval", lease_s=_LONG_S)
        stranger.task_name = "train"
        held = store.claim(partition, 2, lease_s=_LONG_S)
        lost = store.claim(partition, 2, lease_s=_SHORT_S)
        _wait_out(store)
        for settle in _settlers(store):
            with store.refusal(LeaseExpiredError):
                settle(stranger)
            with store.refusal(LeaseExpiredError, "'s2'") as caught:
                settle(held.concat(lost))
            assert sorted(caught.value.sample_ids) == ["s2", "s3"], "not exactly the ids whose tokens are invalid"
        again = store.claim(partition, 4, lease_s=_LONG_S)
        assert again.sample_ids == ["s2", "s3"], "a settlement that was refused for some samples changed others"
        for settle in _settlers(store):
            with store.refusal(LeaseExpiredError):
                settle(lost)
        store.client.ack(again)
        store.client.ack(held)
        assert store.client.check_consumption_status(partition, ["train"])

    # --- repeats ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [*_SIZES, "tags"])
    def test_a_repeated_put_leaves_the_newer_value(self, store: Store, size: str) -> None:
        partition, overwrites = store.register("x"), size != "tags" and store.declares(Capability.OVERWRITE)
        store.client.put_samples(ids(3), partition, _rows(3, 0) if size == "tags" else None, [{"n": 0}] * 3)
        fields = None if size == "tags" else _rows(3, 1, size)
        put = partial(store.hooks.put, partition, ids(3), fields, [{"n": 1}] * 3, request_id=new_id())
        first = put()
        store.client.put_samples(ids(2), partition, _rows(2, 2, size) if overwrites else None, [{"n": 2}] * 2)
        assert put() == first, "a repeated put has another outcome"
        assert [tags["n"] for tags in store.tags_of(partition).values()] == [2, 2, 1], "it wrote over newer tags"
        if overwrites:
            assert _values(store, partition, ids(3)) == [2, 2, 1], "it wrote over a newer value"
            store.hooks.put(partition, ids(3), _rows(3, 3, size), request_id=new_id())
            assert _values(store, partition, ids(3)) == [3, 3, 3], "a put with another id was taken for a repeated one"

    @pytest.mark.parametrize("size", list(_SIZES))
    def test_puts_with_the_same_id_at_the_same_time_are_carried_out_once(self, store: Store, size: str) -> None:
        store.require(Capability.OVERWRITE)
        for number in range(10):
            partition = store.register("x")
            put = partial(store.hooks.put, partition, ids(3), _rows(3, 1, size), request_id=new_id())

            def put_and_change(put: Callable[[], Any] = put, partition: str = partition) -> Any:
                reply = put()
                store.client.put_samples(ids(3), partition, _rows(3, 2, size))
                return reply

            replies = in_threads(put_and_change, put, put)
            assert [reply.num_samples for reply in replies] == [3, 3, 3]
            assert _values(store, partition, ids(3)) == [2, 2, 2], f"round {number}: a put was carried out twice"

    @pytest.mark.parametrize("operation", ["ack", "nack", "renew"])
    @pytest.mark.parametrize("count", [4, 2500])
    def test_a_repeated_settlement_gives_the_first_outcome(self, store: Store, count: int, operation: str) -> None:
        partition, hooks = store.filled(count), store.hooks
        mine = list(hooks.claim(partition, count, lease_s=_LONG_S).lease_tokens)
        lease_s = {"lease_s": _LONG_S} if operation == "renew" else {}
        settle = partial(getattr(hooks, operation), partition, ids(count), mine, request_id=new_id(), **lease_s)
        first = settle()
        if operation == "renew":
            hooks.nack(partition, ids(count), mine)
        elif operation == "ack":
            store.client.clear_samples(ids(count), partition)
            store.put(partition, ids(count), x=torch.arange(count))
        theirs = list(hooks.claim(partition, count, lease_s=_LONG_S).lease_tokens)
        assert len(theirs) == count
        assert settle() == first
        assert not hooks.claim(partition, count).sample_ids, "it gave another holder's samples back"
        hooks.ack(partition, ids(count), theirs)
        refused = partial(getattr(hooks, operation), partition, ids(count), mine, request_id=new_id(), **lease_s)
        for _ in range(2):
            with pytest.raises(LeaseExpiredError):
                refused()
