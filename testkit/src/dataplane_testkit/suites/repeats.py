"""A put, ack, nack or renew that is repeated with the same id is carried out once, where the backend declares it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch

from dataplane_core.errors import LeaseExpiredError, LostReplyError, SchemaMismatchError
from dataplane_core.spec import Capability, new_id
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import batch, ids
from dataplane_testkit._hooks import Hooks, backend_of
from dataplane_testkit._store import BOUNDED_BYTES, Store
from dataplane_testkit._timing import in_threads

_LONG_S: Final = 600.0
#: Elements of a row: few, and so many that an engine stores them on another way.
_SIZES: Final = {"small": 2, "large": 64 * 1024}


def _rows(count: int, value: int, size: int = 2) -> Any:
    return batch(count, x=torch.full((count, size), value, dtype=torch.int32))


def _values(store: Store, partition: str, sample_ids: list[str]) -> list[int]:
    return [int(row[0]) for row in store.get(partition, sample_ids)["x"]]


def _claimed(store: Store, count: int = 4) -> tuple[str, list[str], list[str]]:
    """A partition, and the ids and tokens of all its samples, which are leased."""
    partition = store.register("x")
    store.client.put_samples(ids(count), partition, _rows(count, 0))
    claim = store.hooks.claim(partition, count, lease_s=_LONG_S)
    return partition, list(claim.sample_ids), list(claim.lease_tokens or ())


def _claims_again(store: Store, partition: str, count: int = 4) -> list[str]:
    claim = store.hooks.claim(partition, count, lease_s=_LONG_S)
    assert len(claim.sample_ids) == count, f"{len(claim.sample_ids)} of {count} samples could be claimed again"
    return list(claim.lease_tokens or ())


class RepeatSuite(Suite, chapter="repeats"):
    """Requests that are repeated with the same id."""

    @pytest.mark.parametrize("size", list(_SIZES))
    def test_a_put_repeated_after_an_overwrite_leaves_the_newer_value(self, store: Store, size: str) -> None:
        store.require(Capability.OVERWRITE)
        partition, request = store.register("x"), new_id()
        first = store.hooks.put(partition, ids(3), _rows(3, 1, _SIZES[size]), request_id=request)
        store.client.put_samples(ids(2), partition, _rows(2, 2, _SIZES[size]))
        again = store.hooks.put(partition, ids(3), _rows(3, 1, _SIZES[size]), request_id=request)
        assert again == first, "a repeated put has another outcome"
        assert _values(store, partition, ids(3)) == [2, 2, 1], "a repeated put wrote over a newer value"
        store.hooks.put(partition, ids(3), _rows(3, 3, _SIZES[size]), request_id=new_id())
        assert _values(store, partition, ids(3)) == [3, 3, 3], "a put with another id was taken for a repeated one"

    def test_a_put_of_tags_repeated_leaves_the_newer_tags(self, store: Store) -> None:
        partition, request = store.register("x"), new_id()
        store.hooks.put(partition, ids(2), _rows(2, 1), [{"n": 1}] * 2, request_id=request)
        tagged = new_id()
        store.hooks.put(partition, ids(2), None, [{"n": 2}] * 2, request_id=tagged)
        store.hooks.put(partition, ids(1), None, [{"n": 3}], request_id=new_id())
        for again in (tagged, request):
            fields = None if again == tagged else _rows(2, 1)
            store.hooks.put(partition, ids(2), fields, [{"n": 2 if again == tagged else 1}] * 2, request_id=again)
        assert [tags["n"] for tags in store.tags_of(partition).values()] == [3, 2]

    @pytest.mark.parametrize("cleared", ["samples", "partition", "new registration"])
    @pytest.mark.parametrize("size", list(_SIZES))
    def test_a_put_repeated_after_a_clear_writes_nothing(self, store: Store, size: str, cleared: str) -> None:
        partition, request = store.register("x"), new_id()
        put = partial(store.hooks.put, partition, ids(3), _rows(3, 1, _SIZES[size]), request_id=request)
        first = put()
        store.client.clear_samples(ids(2) if cleared == "samples" else None, partition)
        if cleared == "new registration":
            store.client.register_partition(partition, ["x"], None, ["train"])
        assert put() == first, "a repeated put has another outcome"
        if cleared == "partition":
            store.client.register_partition(partition, ["x"], None, ["train"])
        there = [name for name in ids(3) if store.has(partition, name)]
        assert there == (["s2"] if cleared == "samples" else []), "a repeated put brought cleared rows back"

    def test_a_put_repeated_while_the_store_is_full_succeeds(self, store: Store) -> None:
        client = store.deployment.bounded("raise")
        hooks = Hooks(backend_of(client))
        partition = store.register("x", client=client)
        rows = batch(1, x=torch.zeros(1, 6 * BOUNDED_BYTES // 10, dtype=torch.uint8))
        request = new_id()
        first = hooks.put(partition, ["a"], rows, request_id=request)
        assert hooks.put(partition, ["a"], rows, request_id=request) == first

    def test_a_refused_put_repeated_is_tried_anew(self, store: Store) -> None:
        partition, request = store.register("x"), new_id()
        store.client.put_samples(["a"], partition, _rows(1, 0))
        floats = batch(1, x=torch.zeros(1, 2))
        with pytest.raises(SchemaMismatchError):
            store.hooks.put(partition, ["b"], floats, request_id=request)
        with pytest.raises(SchemaMismatchError):
            store.hooks.put(partition, ["b"], floats, request_id=request)
        store.client.clear_samples(None, partition)
        store.client.register_partition(partition, ["x"], None, ["train"])
        store.hooks.put(partition, ["b"], floats, request_id=request)
        assert store.has(partition, "b")

    @pytest.mark.parametrize("size", list(_SIZES))
    def test_puts_with_the_same_id_at_the_same_time_are_carried_out_once(self, store: Store, size: str) -> None:
        store.require(Capability.OVERWRITE)
        for number in range(10):
            partition, request = store.register("x"), new_id()
            put = partial(store.hooks.put, partition, ids(3), _rows(3, 1, _SIZES[size]), request_id=request)

            def put_and_change(put: Callable[[], Any] = put, partition: str = partition) -> Any:
                reply = put()
                store.client.put_samples(ids(3), partition, _rows(3, 2, _SIZES[size]))
                return reply

            replies = in_threads(put_and_change, put, put)
            assert [reply.num_samples for reply in replies] == [3, 3, 3]
            assert _values(store, partition, ids(3)) == [2, 2, 2], f"round {number}: a put was carried out twice"

    @pytest.mark.parametrize("count", [4, 2500])
    def test_a_repeated_nack_leaves_the_next_holder_its_leases(self, store: Store, count: int) -> None:
        partition, claimed, tokens = _claimed(store, count)
        request = new_id()
        first = store.hooks.nack(partition, claimed, tokens, request_id=request)
        theirs = _claims_again(store, partition, count)
        assert store.hooks.nack(partition, claimed, tokens, request_id=request) == first
        assert not store.hooks.claim(partition, count).sample_ids, "a repeated nack gave another holder's samples back"
        store.hooks.ack(partition, claimed, theirs)
        with pytest.raises(LeaseExpiredError):
            store.hooks.nack(partition, claimed, tokens, request_id=new_id())

    @pytest.mark.parametrize("operation", ["ack", "renew"])
    @pytest.mark.parametrize("count", [4, 2500])
    def test_a_repeated_ack_or_renewal_gives_the_first_outcome(self, store: Store, count: int, operation: str) -> None:
        partition, claimed, tokens = _claimed(store, count)
        calls: dict[str, Callable[..., Any]] = {
            "ack": store.hooks.ack,
            "renew": partial(store.hooks.renew, lease_s=_LONG_S),
        }
        settle = partial(calls[operation], partition, claimed, tokens, request_id=new_id())
        first = settle()
        if operation == "renew":
            store.hooks.nack(partition, claimed, tokens)
        else:
            store.client.clear_samples(claimed, partition)
            store.client.put_samples(ids(count), partition, _rows(count, 1))
        theirs = _claims_again(store, partition, count)
        assert settle() == first
        store.hooks.renew(partition, claimed, theirs, lease_s=_LONG_S)  # they still hold them
        store.hooks.ack(partition, claimed, theirs)

    def test_a_refused_ack_repeated_is_refused_again(self, store: Store) -> None:
        partition, claimed, tokens = _claimed(store)
        store.hooks.nack(partition, claimed, tokens)
        request = new_id()
        for _ in range(2):
            with pytest.raises(LeaseExpiredError):
                store.hooks.ack(partition, claimed, tokens, request_id=request)

    def test_the_client_repeats_a_put_whose_reply_was_lost(self, store: Store) -> None:
        store.require(Capability.OVERWRITE)
        partition = store.register("x")
        requests: list[str] = []

        def lose(request: Any, reply: Any) -> Any:
            requests.append(request.request_id)
            if len(requests) == 1:
                store.hooks.put(partition, ids(2), _rows(2, 2))
            if len(requests) < 3:
                raise LostReplyError("put_samples failed: the kit dropped the reply.")
            return reply

        with store.faults.after("put_samples", lose):
            store.client.put_samples(ids(2), partition, _rows(2, 1))
        assert len(requests) == 3
        assert len(set(requests)) == 1, "a repeated put had another id"
        assert _values(store, partition, ids(2)) == [2, 2], "a repeated put wrote over a newer value"
