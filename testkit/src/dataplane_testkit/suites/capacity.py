"""The options `capacity_bytes` and `on_full`, and the room of what is dropped: nothing is evicted, nothing leaks.

Two kinds of tests. Those of a full store use a separate one, with room for eight rows. Those of the engine do not trust
the ledger: they measure with the author's ``held_bytes``, or read the rows of a `RowStoreBackend`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    CapacityExceededError,
    DataPlaneError,
    OperationTimeoutError,
    RoomTimeoutError,
    StalePartitionError,
)
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._hooks import Hooks, backend_of
from dataplane_testkit._store import BOUNDED_BYTES, Store, not_declared
from dataplane_testkit._timing import PROMPT_S, Background, bounded, eventually

#: The bounded store has room for eight rows of this size and some overhead of the engine, but not for twelve.
_ROW: Final = BOUNDED_BYTES // 10
_ROWS: Final = 8

#: The rows, and the bytes, of one put into the engine that is measured.
_NAMES: Final = ids(32)
_SIZE: Final = 64 * 1024
_PUT_BYTES: Final = 32 * _SIZE
#: Bytes that an engine may keep beside the payload: less than half of it, because a test clears half of the rows.
_SLACK_BYTES: Final = 3 * _PUT_BYTES // 8


def _put(client: DataPlaneClient, partition: str, names: list[str], value: int = 2, size: int = _ROW) -> None:
    """Puts rows that are full of one value."""
    x = torch.full((len(names), size), value, dtype=torch.uint8)
    client.put_samples(names, partition, {"x": x})


def _full(store: Store, on_full: str = "raise") -> tuple[DataPlaneClient, str]:
    client = store.deployment.bounded(on_full)
    partition = store.register("x", client=client)
    _put(client, partition, ids(_ROWS), 1)
    return client, partition


def _values(client: DataPlaneClient, partition: str, names: list[str]) -> list[int]:
    """What the rows hold: each was put full of one value."""
    column = client.get_samples(names, partition, ["x"])["x"]
    assert torch.equal(column, column[:, :1].expand(-1, _ROW))
    return [int(value) for value in column[:, 0]]


def _put_refused(store: Store, partition: str) -> None:
    old = store.hooks.register(partition).epoch
    store.hooks.register(partition)
    with pytest.raises(StalePartitionError):
        store.hooks.put(partition, _NAMES, {"x": torch.zeros(32, _SIZE, dtype=torch.uint8)}, epoch=old)


def _overwrite(store: Store, partition: str) -> None:
    for value in range(3):
        _put(store.client, partition, _NAMES, value, _SIZE)


#: What is dropped, after a put -> how it is dropped, and the bytes of payload that are left.
_DROPS: Final[dict[str, tuple[Callable[[Store, str], Any], int]]] = {
    "half_of_the_rows": (lambda s, p: s.client.clear_samples(_NAMES[::2], p), _PUT_BYTES // 2),
    "all_rows": (lambda s, p: s.client.clear_samples(_NAMES, p), 0),
    "a_partition": (lambda s, p: s.client.clear_samples(None, p), 0),
    "an_old_registration": (lambda s, p: s.register("x", partition_id=p), 0),
    "a_refused_put": (_put_refused, 0),
    "overwritten_cells": (_overwrite, _PUT_BYTES),
}


class CapacitySuite(Suite, chapter="capacity"):
    """A store that is full, and what leaves it."""

    @pytest.mark.parametrize("what", _DROPS)
    def test_what_is_dropped_leaves_the_engine(self, store: Store, what: str) -> None:
        drop, left = _DROPS[what]
        store.require(Capability.OVERWRITE if what == "overwritten_cells" else None)
        partition = store.register("x")
        with store.held() as held:
            _put(store.client, partition, _NAMES, size=_SIZE)
            assert held() >= _PUT_BYTES - _SLACK_BYTES, f"held_bytes grew by {held()} for a put of {_PUT_BYTES} bytes"
            drop(store, partition)
            # the engine may delete in the background
            eventually(lambda: held() <= left + _SLACK_BYTES, what=f"that the engine drops all but {left} bytes")

    def test_nothing_is_evicted(self, store: Store) -> None:
        client, partition = _full(store)
        for count, retryable in ((4, True), (4, True), (20, False)):  # there will never be room for twenty
            with store.refusal(CapacityExceededError) as caught:
                _put(client, partition, ids(count, "n"))
            assert isinstance(caught.value, RuntimeError)
            assert caught.value.retryable == retryable
        with pytest.raises(KeyError):
            client.get_samples(["n0"], partition, ["x"])
        assert _values(client, partition, ids(_ROWS)) == [1] * _ROWS
        if store.declares(Capability.CLAIMS):
            meta = client.claim_meta(partition, "train", ["x"], 99, blocking=False)
            assert meta.sample_ids == ids(_ROWS)

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
        for each in (client, store.keep(other)):
            assert _values(each, partition, ["n0", "n1", "s7"]) == [2, 3, 1], "a read returned a row of another put"

    # --- puts that wait for room --------------------------------------------------------------------------------------

    def test_a_blocked_put_goes_on_when_there_is_room(self, store: Store) -> None:
        client, partition = _full(store, "block")
        with store.refusal(CapacityExceededError):  # for which there will never be room
            bounded(lambda: _put(client, partition, ids(20, "n")), what="a put of more than capacity_bytes")
        waiting = Background(lambda: _put(client, partition, ids(4, "n")))
        assert waiting.running, "a put into a full store did not wait"
        with pytest.raises(KeyError):
            client.get_samples(["n0"], partition, ["x"])
        client.clear_samples(ids(4), partition)
        waiting.result(what="a put after rows were cleared")
        assert _values(client, partition, ["n0", "s7"]) == [2, 1]

    def test_a_blocked_put_ends_by_its_deadline(self, store: Store) -> None:
        client, partition = _full(store, "block")
        for timeout_s in (0.3, 2.0, 10.0):
            names = ids(4, f"n{timeout_s:g}-")  # a put that was not answered in time may yet be done
            put = partial(
                Hooks(backend_of(client), timeout_s).put,
                partition,
                names,
                {"x": torch.zeros(4, _ROW, dtype=torch.uint8)},
            )
            with pytest.raises(OperationTimeoutError) as caught:
                bounded(put, timeout_s + PROMPT_S, "a put that waits for room")
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
        held = ids(_ROWS)
        try:
            # each row that is cleared would make room for a small put. On a machine that stands still for a second some
            # of them may go first, but together they hold no more than the store
            while large.running and held and len(small) < 4 * _ROWS:
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
                client.clear_samples([*small, *ids(_ROWS), *ids(6, "large")], partition)
                time.sleep(0.01)
        for each in small.values():
            each.result(what="a small put")
