"""Large equal cells of a put: they are stored once, and every sample has its own all the same."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict

from dataplane_core.client import DataPlaneClient
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, batch, bits, check_column, ids, items_of, jagged, random_cells
from dataplane_testkit._store import BOUNDED_BYTES, Store, not_declared

#: Elements of a cell that is large enough to be stored once.
_LENGTH = 40_000
#: Which image each sample has.
_IMAGE_OF = (0, 1, 0, 0, 2, 1)
_NAMES = ids(len(_IMAGE_OF))


def _images(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [random_cells(dtype, (_LENGTH - 100 * number, 2), number) for number in range(3)]


def _rows() -> list[torch.Tensor]:
    images = _images()
    return [images[number] for number in _IMAGE_OF]


def _put_images(store: Store, partition: str) -> list[torch.Tensor]:
    rows = _rows()
    store.put(partition, _NAMES, columns={"image": jagged(rows), "n": torch.arange(len(rows))})
    return rows


def _shares_rows(store: Store) -> bool:
    return store.deployment.backend_class.wire.shared_rows


class EqualCellsSuite(Suite, chapter="equal cells"):
    """Puts whose samples have equal large cells, as the samples of a group with one image."""

    def test_equal_cells_come_back_as_they_were_written(self, store: Store) -> None:
        partition = store.register("image", "same", "objects", "n")
        rows = _rows()
        same = torch.full((len(rows), _LENGTH), 3, dtype=torch.int64)
        fields = {"image": jagged(rows), "same": same, "objects": as_objects(*rows), "n": torch.arange(len(rows))}
        store.put(partition, _NAMES, columns=fields)
        for order in ([5, 4, 3, 2, 1, 0], [2], [3, 0], [1, 1, 4]):
            found = store.get(partition, [_NAMES[row] for row in order], "image", "same", "objects", "n")
            check_column(found["image"], [rows[row] for row in order])
            check_column(found["same"], [same[row] for row in order])
            assert [bits(item) for item in items_of(found["objects"])] == [bits(rows[row]) for row in order]
            assert found["n"].tolist() == order

    def test_rows_of_one_memory_come_back_as_they_were_written(self, store: Store) -> None:
        partition = store.register("image", "wide")
        rows = _rows()
        lazy = LazyStackedTensorDict(*[TensorDict({"image": row}, batch_size=[]) for row in rows])
        store.client.put_samples(_NAMES, partition, lazy)
        wide = torch.arange(_LENGTH).expand(len(rows), -1)
        store.put(partition, _NAMES, columns={"wide": wide})
        found = store.get(partition, _NAMES, "image", "wide")
        check_column(found["image"], rows)
        check_column(found["wide"], list(wide))

    def test_rows_of_a_read_are_independent(self, store: Store) -> None:
        partition = store.register("image", "objects")
        rows = _rows()
        store.put(partition, _NAMES, columns={"image": jagged(rows), "objects": as_objects(*rows)})
        found = store.get(partition, _NAMES, "image", "objects")
        found["image"].unbind()[0].zero_()
        items_of(found["objects"])[0].zero_()
        assert [bits(row) for row in found["image"].unbind()[1:]] == [bits(row) for row in rows[1:]]
        assert [bits(row) for row in items_of(found["objects"])[1:]] == [bits(row) for row in rows[1:]]
        check_column(store.get(partition, _NAMES, "image")["image"], rows)

    def test_shared_rows_are_one_object(self, store: Store) -> None:
        partition = store.register("image", "objects", "n", "reply")
        rows = _put_images(store, partition)
        store.put(partition, _NAMES, columns={"objects": as_objects(*rows)})
        for row, name in enumerate(_NAMES):  # each sample's other cells lie elsewhere
            store.put(partition, [name], reply=torch.tensor([row]))
        order = [5, 4, 3, 2, 1, 0, 3, 3]
        names, fields = [_NAMES[row] for row in order], ["image", "objects", "n", "reply"]
        found = store.client.get_samples(names, partition, fields, share_rows=True)
        for name in ("image", "objects"):
            column = found[name]
            some: list[Any] = list(column.unbind()) if isinstance(column, torch.Tensor) else items_of(column)
            assert [bits(row) for row in some] == [bits(rows[row]) for row in order]
            if _shares_rows(store):
                assert len({id(row) for row in some}) == 3, f"{name}: 3 images were read as more than 3 tensors"
        assert found["n"].tolist() == found["reply"].tolist() == order

    def test_clearing_a_sample_leaves_the_others(self, store: Store) -> None:
        partition = store.register("image", "n")
        rows = _put_images(store, partition)
        left = list(range(len(rows)))
        for gone in (0, 1, 3, 4, 2):
            left.remove(gone)
            store.client.clear_samples([_NAMES[gone]], partition)
            check_column(
                store.get(partition, [_NAMES[row] for row in left], "image")["image"], [rows[row] for row in left]
            )

    def test_overwriting_a_sample_leaves_the_others(self, store: Store) -> None:
        partition = store.register("image", "n")
        rows = _put_images(store, partition)
        for row, value in ((3, 1.0), (0, 2.0), (2, 3.0)):
            rows[row] = torch.full((7, 2), value)
            store.put(partition, [_NAMES[row]], columns={"image": rows[row].unsqueeze(0)})
            check_column(store.get(partition, _NAMES, "image")["image"], rows)

    def test_equal_cells_count_once(self, store: Store) -> None:
        if not _shares_rows(store):
            not_declared("a wire format with shared rows")
        client = store.deployment.bounded("raise")
        partition = store.register("image", client=client)
        for _ in range(3):  # what is counted wrongly adds up
            self._fill_with_one_image(store, client, partition)
            client.clear_samples(_NAMES, partition)

    def _fill_with_one_image(self, store: Store, client: DataPlaneClient, partition: str) -> None:
        """Six samples with one cell that takes more than half of the store."""
        size = BOUNDED_BYTES * 6 // 10
        image = torch.arange(size, dtype=torch.int64).to(torch.uint8)
        client.put_samples(_NAMES, partition, batch(len(_NAMES), image=image.expand(len(_NAMES), -1)))
        for last, name in itertools.pairwise(_NAMES):
            client.clear_samples([last], partition)
            with store.refusal(RuntimeError):
                client.put_samples(["new"], partition, batch(1, image=image.unsqueeze(0)))
            found = client.get_samples([name], partition, ["image"])["image"]
            assert torch.equal(found[0], image)
