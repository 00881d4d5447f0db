"""Payload that was cleared or overwritten is deleted from the engine.

The tests do not trust the ledger: they measure with the author's ``held_bytes``, or read the blobs of a `BlobStore`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch

from dataplane_core.errors import StalePartitionError
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import batch, ids
from dataplane_testkit._store import Store
from dataplane_testkit._timing import eventually

_ROWS: Final = 32
_ROW_BYTES: Final = 64 * 1024
_PUT_BYTES: Final = _ROWS * _ROW_BYTES
#: Bytes that an engine may keep beside the payload: less than half of it, because the tests clear half of the rows.
_SLACK_BYTES: Final = 3 * _PUT_BYTES // 8


def _put(store: Store, partition: str, value: int = 0) -> None:
    store.put(partition, ids(_ROWS), x=torch.full((_ROWS, _ROW_BYTES), value, dtype=torch.uint8))


def _holds(held: Callable[[], int]) -> None:
    """Asserts that the measured bytes grew by the payload of one put."""
    assert held() >= _PUT_BYTES - _SLACK_BYTES, f"held_bytes grew by {held()} for {_PUT_BYTES} bytes that were put"


def _shrinks_to(held: Callable[[], int], payload_bytes: int, what: str) -> None:
    """Asserts that the payload in the engine shrinks to this size. The engine may delete in the background."""
    limit = payload_bytes + _SLACK_BYTES
    try:
        eventually(lambda: held() <= limit)
    except AssertionError:
        raise AssertionError(f"{what}, and the engine still holds {held()} bytes. Expected at most {limit}.") from None


class RoomSuite(Suite, chapter="room"):
    """Payload is deleted from the engine, not only from the ledger."""

    def test_rows_that_are_cleared_leave_the_engine(self, store: Store) -> None:
        partition = store.register("x")
        with store.held() as held:
            _put(store, partition)
            _holds(held)
            store.client.clear_samples(ids(_ROWS)[: _ROWS // 2], partition)
            _shrinks_to(held, _PUT_BYTES // 2, "half of the rows were cleared")
            store.client.clear_samples(ids(_ROWS), partition)
            _shrinks_to(held, 0, "all rows were cleared")

    def test_a_cleared_partition_leaves_the_engine(self, store: Store) -> None:
        partition = store.register("x", "y")
        with store.held() as held:
            _put(store, partition)
            store.put(partition, ids(_ROWS), y=torch.zeros(_ROWS, _ROW_BYTES, dtype=torch.uint8))
            _holds(held)
            store.client.clear_samples(None, partition)
            _shrinks_to(held, 0, "the partition was cleared")

    def test_a_new_registration_leaves_nothing_of_the_old_in_the_engine(self, store: Store) -> None:
        partition = store.register("x")
        with store.held() as held:
            _put(store, partition)
            _holds(held)
            store.register("x", partition_id=partition)
            _shrinks_to(held, 0, "the partition was registered again")

    def test_overwritten_cells_leave_the_engine(self, store: Store) -> None:
        partition = store.register("x")
        with store.held() as held:
            for value in range(4):
                _put(store, partition, value)
            _holds(held)
            _shrinks_to(held, _PUT_BYTES, "the rows were overwritten three times")
            assert store.get(partition, ["s1"])["x"][0, 0].item() == 3

    def test_a_refused_put_leaves_nothing_in_the_engine(self, store: Store) -> None:
        partition = store.register("x")
        old = store.hooks.register(partition).epoch
        store.hooks.register(partition)
        with store.held() as held:
            fields = batch(_ROWS, x=torch.zeros(_ROWS, _ROW_BYTES, dtype=torch.uint8))
            with pytest.raises(StalePartitionError):
                store.hooks.put(partition, ids(_ROWS), fields, epoch=old)
            _shrinks_to(held, 0, "a put was refused")
