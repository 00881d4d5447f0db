"""Integers are stored as narrow as a put allows, and come back as they were put."""

from __future__ import annotations

import torch

from dataplane_testkit._base import Suite
from dataplane_testkit._columns import check_column, ids, jagged
from dataplane_testkit._store import BOUNDED_BYTES, Store, not_declared

#: The least and the largest value of puts that differ in width: one byte without and with a sign, two, four and eight.
_RANGES = ((0, 127), (-1, 127), (0, 60_000), (-300, 300), (-1, 1 << 20), (-(1 << 62), 1 << 62))
#: Elements of a row; a column of some rows is large enough to be narrowed.
_LENGTH = 1_500


def _rows(low: int, high: int, number: int = 4, dtype: torch.dtype = torch.int64) -> list[torch.Tensor]:
    """Rows of differing length with these extremes."""
    rows = [torch.arange(2 * (_LENGTH - row), dtype=dtype).view(-1, 2) % 100 for row in range(number)]
    rows[0][0, 0], rows[-1][-1, -1] = low, high
    return rows


def _narrows(store: Store) -> bool:
    wire = store.deployment.backend_class.wire
    return store.backend.narrow and (wire.bytes or wire.narrow)


class NarrowSuite(Suite, chapter="narrow integers"):
    """Puts of one field whose integers differ in width."""

    def test_puts_that_differ_in_width_are_read_together(self, store: Store) -> None:
        partition = store.register("ragged", "dense", "scalar")
        kept: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for number, (low, high) in enumerate(_RANGES):
            rows = _rows(low, high)
            most = min(high, 2**31 - 1)
            dense = torch.stack([row[: _LENGTH - 10, 0] for row in _rows(max(low, -most), most, dtype=torch.int32)])
            scalars = torch.tensor([low, high, 0, 1])
            names = [f"{number}_{row}" for row in range(len(rows))]
            store.put(partition, names, columns={"ragged": jagged(rows), "dense": dense, "scalar": scalars})
            kept.update(zip(names, zip(rows, dense, scalars, strict=True), strict=True))
            self._check(store, partition, names, kept)
        names = list(kept)
        for order in (names, names[::-1], names[::5], [names[-1], names[0], names[0]]):
            self._check(store, partition, order, kept)

    def _check(
        self,
        store: Store,
        partition: str,
        names: list[str],
        kept: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> None:
        found = store.get(partition, names, "ragged", "dense", "scalar")
        ragged, dense, scalars = zip(*[kept[name] for name in names], strict=True)
        check_column(found["ragged"], ragged)
        check_column(found["dense"], dense)
        check_column(found["scalar"], scalars)

    def test_an_overwrite_may_be_wider_or_narrower(self, store: Store) -> None:
        partition = store.register("x")
        rows = _rows(0, 100)
        store.put(partition, ids(4), columns={"x": jagged(rows)})
        for (low, high), some in zip(_RANGES[1:], ([1, 2], [0, 1], [3, 2], [2, 0], [1, 3]), strict=True):
            rows = [
                new if row in some else old for row, (new, old) in enumerate(zip(_rows(low, high), rows, strict=True))
            ]
            store.put(partition, [f"s{row}" for row in some], columns={"x": jagged([rows[row] for row in some])})
            check_column(store.get(partition, ids(4), "x")["x"], rows)

    def test_capacity_counts_narrow_integers(self, store: Store) -> None:
        if not _narrows(store):
            not_declared("a wire format with narrow integers")
        client = store.deployment.bounded("raise")
        partition = store.register("x", client=client)
        column = torch.arange(BOUNDED_BYTES // 2).view(8, -1) % 100  # 4 times the capacity, were it not narrow
        client.put_samples(ids(8), partition, {"x": column})
        with store.refusal(RuntimeError):
            client.put_samples(["wide"], partition, {"x": column[:2].view(1, -1) + (1 << 40)})
        assert torch.equal(client.get_samples(ids(8), partition, ["x"])["x"], column)

    def test_narrow_integers_take_less_room(self, store: Store) -> None:
        if not _narrows(store):
            not_declared("a wire format with narrow integers")
        partition = store.register("x")
        column = torch.arange(1 << 18).view(8, -1) % 100
        with store.held() as held:
            store.put(partition, ids(8), columns={"x": column})
            assert held() < column.nbytes // 2, f"{held()} bytes for values that take {column.nbytes // 8}"
