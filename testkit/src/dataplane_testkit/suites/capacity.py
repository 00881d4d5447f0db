"""The options `capacity_bytes` and `on_full`: the store stays within its bytes and evicts nothing."""

from __future__ import annotations

import contextlib
import time
from functools import partial

import pytest
import torch

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import CapacityExceededError, DataPlaneError, OperationTimeoutError, RoomTimeoutError
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import batch, ids
from dataplane_testkit._hooks import backend_of
from dataplane_testkit._store import BOUNDED_BYTES, Store, not_declared
from dataplane_testkit._timing import PROMPT_S, Background

_ROWS_THAT_FIT = 8
#: The store has room for eight rows and some overhead of the engine, but not for twelve rows.
_ROW = BOUNDED_BYTES // 10


def _rows(count: int, value: int = 0) -> torch.Tensor:
    return torch.full((count, _ROW), value, dtype=torch.uint8)


def _full(store: Store, on_full: str = "raise") -> tuple[DataPlaneClient, str]:
    client = store.deployment.bounded(on_full)
    partition = store.register("x", client=client)
    client.put_samples(ids(_ROWS_THAT_FIT), partition, batch(_ROWS_THAT_FIT, x=_rows(_ROWS_THAT_FIT, 1)))
    return client, partition


def _put(client: DataPlaneClient, partition: str, names: list[str], value: int = 2) -> None:
    client.put_samples(names, partition, batch(len(names), x=_rows(len(names), value)))


class CapacitySuite(Suite, chapter="capacity"):
    """These tests use a separate store with room for eight rows."""

    def test_nothing_is_evicted(self, store: Store) -> None:
        client, partition = _full(store)
        for _ in range(3):
            with store.refusal(CapacityExceededError) as caught:
                _put(client, partition, ids(4, "n"))
            assert isinstance(caught.value, RuntimeError)
            assert caught.value.retryable
        with pytest.raises(KeyError):
            client.get_samples(["n0"], partition, ["x"])
        found = client.get_samples(ids(_ROWS_THAT_FIT), partition, ["x"])["x"]
        assert torch.equal(found, _rows(_ROWS_THAT_FIT, 1))
        if store.declares(Capability.CLAIMS):
            meta = client.claim_meta(partition, "train", ["x"], 99, blocking=False)
            assert meta.sample_ids == ids(_ROWS_THAT_FIT)

    def test_what_is_cleared_makes_room(self, store: Store) -> None:
        client, partition = _full(store)
        client.clear_samples(ids(4), partition)
        _put(client, partition, ids(4, "n"))
        assert torch.equal(client.get_samples(["n3"], partition, ["x"])["x"], _rows(1, 2))
        client.register_partition(partition, ["x"], None, ["train"])
        _put(client, partition, ids(_ROWS_THAT_FIT, "n"))
        client.clear_samples(None, partition)
        other = store.register("x", client=client)
        _put(client, other, ids(_ROWS_THAT_FIT, "m"))

    def test_a_refused_put_leaves_later_ones_alone_for_clients_with_other_room(self, store: Store) -> None:
        client, partition = _full(store)
        with store.refusal(RuntimeError):
            _put(client, partition, ids(4, "n"))
        client.clear_samples(ids(4), partition)
        _put(client, partition, ["n0"], 2)
        _put(client, partition, ["n1"], 3)
        options = store.case.attach_options(dict(client.config.options), backend_of(client))
        try:
            other = store.deployment.connect({**options, "capacity_bytes": 2 * BOUNDED_BYTES}, bootstrap=False)
        except DataPlaneError:
            not_declared("clients with different capacities")
        with other:
            for each in (client, other):
                found = each.get_samples(["n0", "n1", "s7"], partition, ["x"])["x"]
                assert found[:, 0].tolist() == [2, 3, 1], "a read returned a row of another put"

    def test_room_does_not_leak(self, store: Store) -> None:
        client, partition = _full(store)
        for _ in range(25):
            with store.refusal(RuntimeError):
                _put(client, partition, ids(4, "n"))
            client.clear_samples(["s0"], partition)
            with store.refusal(ValueError):
                client.put_samples(["s0"], partition, batch(1, x=torch.zeros(1, _ROW // 8)))
            _put(client, partition, ["s0"])
        client.clear_samples(ids(_ROWS_THAT_FIT), partition)
        _put(client, partition, ids(_ROWS_THAT_FIT))

    def test_overwrites_take_no_room_for_long(self, store: Store) -> None:
        client, partition = _full(store)
        client.clear_samples(ids(4), partition)
        for value in range(20):
            _put(client, partition, ["s5"], value)
        assert torch.equal(client.get_samples(["s5"], partition, ["x"])["x"], _rows(1, 19))

    def test_a_put_that_can_never_fit_says_so(self, store: Store) -> None:
        for on_full in ("raise", "block"):
            client, partition = _full(store, on_full)
            start = time.monotonic()
            with store.refusal(RuntimeError) as caught:
                _put(client, partition, ids(20, "n"))
            assert isinstance(caught.value, CapacityExceededError)
            assert not caught.value.retryable
            assert time.monotonic() - start < PROMPT_S
            client.clear_samples(None, partition)

    def test_a_blocked_put_goes_on_when_there_is_room(self, store: Store) -> None:
        client, partition = _full(store, "block")
        waiting = Background(lambda: _put(client, partition, ids(4, "n")))
        time.sleep(0.1)
        assert waiting.running, "a put into a full store did not wait"
        with pytest.raises(KeyError):
            client.get_samples(["n0"], partition, ["x"])
        client.clear_samples(ids(4), partition)
        waiting.result(what="a put after rows were cleared")
        assert torch.equal(
            client.get_samples(["n0", "s7"], partition, ["x"])["x"], torch.cat([_rows(1, 2), _rows(1, 1)])
        )

    def test_a_blocked_put_ends_by_its_deadline(self, store: Store) -> None:
        client, partition = _full(store, "block")
        for timeout_s in (0.3, 2.0, 10.0):
            names = ids(4, f"n{timeout_s:g}-")  # a put that was not answered in time may yet be done
            hooks = type(store.hooks)(backend_of(client), timeout_s)
            start = time.monotonic()
            with pytest.raises(OperationTimeoutError) as caught:
                hooks.put(partition, names, batch(4, x=_rows(4)))
            assert time.monotonic() - start < timeout_s + PROMPT_S
            if isinstance(caught.value, RoomTimeoutError):
                break  # else the store did not say in time that it is full, as on a machine that stands still
        assert isinstance(caught.value, RoomTimeoutError)
        assert caught.value.outcome == "not_done"
        client.clear_samples(ids(4), partition)
        with pytest.raises(KeyError):
            client.get_samples(names[:1], partition, ["x"])
        _put(client, partition, names)

    def test_a_large_put_is_not_starved_by_small_ones(self, store: Store) -> None:
        client, partition = _full(store, "block")
        large = Background(lambda: _put(client, partition, ids(6, "large")))
        small: dict[str, Background] = {}
        held = ids(_ROWS_THAT_FIT)
        try:
            # each row that is cleared would make room for a small put. On a machine that stands still for a second some
            # of them may go first, but together they hold no more than the store
            while large.running and held and len(small) < 4 * _ROWS_THAT_FIT:
                client.clear_samples([held.pop(0)], partition)
                name = f"small{len(small)}"
                small[name] = Background(partial(_put, client, partition, [name]))
                with contextlib.suppress(AssertionError):  # the small put must wait
                    small[name].result(0.5)
                    held.append(name)
            large.result(what="a large put among small ones")
        finally:
            give_up = time.monotonic() + PROMPT_S
            while any(each.running for each in [large, *small.values()]) and time.monotonic() < give_up:
                client.clear_samples([*small, *ids(_ROWS_THAT_FIT), *ids(6, "large")], partition)
                time.sleep(0.01)
        for each in small.values():
            each.result(what="a small put")
