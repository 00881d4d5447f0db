"""Columns beside the tokens that were not registered: images, their grids, and the experts of each token.

Shape legend: ``N`` samples, ``S_i`` tokens, ``P_i`` patches and ``G_i`` images of sample i.
"""

from __future__ import annotations

from typing import Any

import torch

from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, check_column, ids, items_of, jagged, random_cells
from dataplane_testkit._store import Store

#: Images per sample: none, one or several. Each image has at least 4 patches.
_GRIDS: tuple[list[list[int]], ...] = ([[1, 2, 2]], [], [[1, 4, 2], [1, 2, 2], [1, 2, 6]], [[2, 2, 2]], [])
_TOKENS = (7, 3, 12, 9, 1)


def _tokens(seed: int) -> dict[str, list[torch.Tensor]]:
    """Token columns (S_i,), and the experts that each token was routed to, (S_i, layers, k)."""
    return {
        "input_ids": [torch.arange(length) + seed for length in _TOKENS],
        "token_mask": [torch.arange(length) % 2 == 0 for length in _TOKENS],
        "routed_experts": [torch.arange(length * 3 * 2).view(length, 3, 2) % 128 + 2**40 * seed for length in _TOKENS],
    }


def _images(seed: int) -> dict[str, list[torch.Tensor]]:
    """Patches (P_i, C, H, W) in bfloat16, and grids (G_i, 3) in int64."""
    grids = [torch.tensor(grid, dtype=torch.int64).view(-1, 3) for grid in _GRIDS]
    return {
        "pixel_values": [
            random_cells(torch.bfloat16, (int(grid.prod(dim=1).sum()), 3, 4, 4), seed + index)
            for index, grid in enumerate(grids)
        ],
        "image_grid_thw": grids,
    }


class MultimodalSuite(Suite, chapter="multimodal"):
    """Multimodal columns beside the token columns."""

    def test_images_ride_with_the_tokens(self, store: Store) -> None:
        """Contract: "fields is what producers are expected to write; further fields may be written (such as multimodal
        columns)." and "The first dim after the batch may differ per row."

        Check first: columns that were not registered, jagged columns with trailing dims, and rows without any image.
        """
        partition = store.register("input_ids", "token_mask", num_samples=len(_TOKENS))
        names = ids(len(_TOKENS))
        tokens, images = _tokens(0), _images(1)
        turns = [[{"role": "user", "content": "x" * length}] for length in _TOKENS]
        columns: dict[str, Any] = {name: jagged(rows) for name, rows in {**tokens, **images}.items()}
        store.put(partition, names, [{"n": index} for index in range(5)], {**columns, "turns": as_objects(*turns)})
        order = [2, 1, 4, 0, 3, 2]
        found = store.get(partition, [names[place] for place in order], *columns, "turns")
        for name, rows in {**tokens, **images}.items():
            check_column(found[name], [rows[place] for place in order])
        assert items_of(found["turns"]) == [turns[place] for place in order]
        # reads of samples without an image and of one sample: the container depends on the rows that are read
        bare = store.get(partition, ["s1", "s4"], *images)
        for name, rows in images.items():
            check_column(bare[name], [rows[1], rows[4]])
            check_column(store.get(partition, ["s2"], name)[name], [rows[2]])

    def test_images_may_come_later_and_from_another(self, store: Store) -> None:
        """Contract: "A put may add fields to known samples".

        Check first: a claim may require a field that was not registered. It must give a sample once that field is
        produced.
        """
        store.require(Capability.CLAIMS)
        partition = store.register("input_ids", num_samples=len(_TOKENS))
        names = ids(len(_TOKENS))
        tokens, images = _tokens(3), _images(2)
        store.put(partition, names, columns={name: jagged(rows) for name, rows in tokens.items()})
        assert store.claim(partition, 5, "input_ids", "pixel_values").size == 0
        late = {name: jagged([rows[place] for place in (3, 0, 2)]) for name, rows in images.items()}
        store.put(partition, ["s3", "s0", "s2"], columns=late)
        meta = store.claim(partition, 5, "input_ids", "pixel_values", "image_grid_thw")
        assert meta.sample_ids == ["s0", "s2", "s3"], "a claim that requires images gave samples without images"
        found = store.client.get_data(meta)
        for name, rows in {"input_ids": tokens["input_ids"], **images}.items():
            check_column(found[name], [rows[place] for place in (0, 2, 3)])

    def test_routed_experts_come_back_per_token(self, store: Store) -> None:
        """Contract: "Dtype and values come back bit for bit".

        Check first: int64 values of more than 32 bits, and cells of rank 3 whose first dim differs per sample.
        """
        partition = store.register("input_ids", "routed_experts")
        names = ids(len(_TOKENS))
        columns = _tokens(5)
        for start, stop in ((0, 2), (2, 5)):
            store.put(
                partition, names[start:stop], columns={name: jagged(rows[start:stop]) for name, rows in columns.items()}
            )
        found = store.get(partition, names[::-1], *columns)
        for name, rows in columns.items():
            check_column(found[name], rows[::-1])
        assert tuple(store.get(partition, ["s2"], "routed_experts")["routed_experts"].shape) == (1, 12, 3, 2)
