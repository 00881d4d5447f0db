"""What leaves the engine, and puts that wait for room. That a full store refuses and evicts nothing is in "machine"."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import pytest
import torch

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import OperationTimeoutError, RoomTimeoutError
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._hooks import Hooks, backend_of
from dataplane_testkit._store import BOUNDED_BYTES, Store
from dataplane_testkit._timing import PROMPT_S, Background, bounded, eventually

#: The bounded store has room for eight rows of this size and some overhead of the engine, but not for twelve.
_ROW: Final = BOUNDED_BYTES // 10
_ROWS: Final = 8


def _put(client: DataPlaneClient, partition: str, names: list[str]) -> None:
    client.put_samples(names, partition, {"x": torch.zeros(len(names), _ROW, dtype=torch.uint8)})


def _full(store: Store) -> tuple[DataPlaneClient, str]:
    client = store.deployment.bounded("block")
    partition = store.register("x", client=client)
    _put(client, partition, ids(_ROWS))
    return client, partition


def _holds_at_most(held: Callable[[], int], size_bytes: int) -> bool:
    return held() <= size_bytes


class CapacitySuite(Suite, chapter="capacity"):
    """What leaves a store, and puts that wait for room in one that is full."""

    def test_what_is_dropped_leaves_the_engine(self, store: Store) -> None:
        partition, names, all_bytes = store.register("x"), ids(32), 32 * _ROW
        slack_bytes = 3 * all_bytes // 8  # what an engine may keep besides; less than half
        with store.held() as held:
            _put(store.client, partition, names)
            assert held() >= all_bytes - slack_bytes, f"it holds {held()} bytes more after a put of {all_bytes}"
            for dropped, left in ((names[::2], all_bytes // 2), (None, 0)):
                store.client.clear_samples(dropped, partition)
                # the engine may delete in the background
                is_dropped = partial(_holds_at_most, held, left + slack_bytes)
                eventually(is_dropped, what=f"that the engine drops all but {left} bytes")

    def test_a_blocked_put_ends_by_its_deadline(self, store: Store) -> None:
        client, partition = _full(store)
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
        client, partition = _full(store)
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
