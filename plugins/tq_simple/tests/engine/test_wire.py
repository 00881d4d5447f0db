"""How a batch is cut into requests."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane_tq_simple._wire import plan_by_bytes, plan_by_rows


@pytest.mark.parametrize("num_units", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("chunk_bytes", [1, 64, 1000, 10**9])
def test_every_row_travels_once_to_its_unit_in_order(num_units: int, num_rows: int, chunk_bytes: int) -> None:
    rng = np.random.default_rng(num_rows + chunk_bytes)
    handles = rng.permutation(10 * num_rows)[:num_rows].astype(np.int64)
    sizes = rng.integers(0, 100, num_rows)
    plans = plan_by_bytes(handles % num_units, handles, sizes, chunk_bytes)

    chunks = [chunk for plan in plans for chunk in plan]
    assert sorted(position for chunk in chunks for position in chunk.positions) == list(range(num_rows))
    for chunk in chunks:
        assert chunk.positions == sorted(chunk.positions)
        assert chunk.handles == handles[chunk.positions].tolist()
        assert all(type(handle) is int for handle in chunk.handles)  # numpy integers would be pickled one by one
        assert {handle % num_units for handle in chunk.handles} == {chunk.unit}
        assert sizes[chunk.positions[:-1]].sum() <= chunk_bytes + 100
    for plan in plans:
        assert len({chunk.unit for chunk in plan}) == 1


def test_chunks_are_about_as_large_as_asked_for() -> None:
    (plan,) = plan_by_bytes(np.zeros(100, dtype=np.int64), np.arange(100), np.full(100, 10), 95)
    assert [len(chunk.positions) for chunk in plan] == [10, 9, 10, 9, 10, 9, 10, 9, 10, 9, 5]
    (plan,) = plan_by_rows(np.zeros(10, dtype=np.int64), np.arange(10), 4)
    assert [len(chunk.positions) for chunk in plan] == [4, 4, 2]
