"""`NamedSharding`: a grid of ranks whose axes have names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataplane_core.errors import InvalidRequestError

#: Axes along which ranks work on the same rows, so that one rank reads and writes for all of them.
REPLICATED_AXES: Final[tuple[str, ...]] = ("tensor_parallel", "context_parallel", "pipeline_parallel")


class NamedSharding:
    """The coordinates of each rank on named axes, such as pipeline, data, context and tensor parallel.

    Immutable and picklable. Grids with the same layout and names are equal.

    Example:
        A grid of 2 x 2 ranks::

            grid = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])
            grid.get_worker_coords(2)  # {"data_parallel": 1, "tensor_parallel": 0}
            grid.get_ranks_by_coord(tensor_parallel=0)  # [0, 2]

    Args:
        layout: Nested sequences or an array of distinct ranks, 0 or more.
        names: One name per axis of the layout.

    Raises:
        InvalidRequestError: The layout is ragged or empty, ranks are not integers, negative or repeated, or names are
            repeated or not one per axis.
    """

    def __init__(self, layout: Sequence[Any] | NDArray[Any], names: Sequence[str]) -> None:
        try:
            ranks = np.array(layout)
        except ValueError as error:
            raise InvalidRequestError("NamedSharding refused: the layout is ragged. Expected a full grid.") from error
        if not ranks.size or not np.issubdtype(ranks.dtype, np.integer):
            raise InvalidRequestError(
                f"NamedSharding refused: the layout has {ranks.size} ranks of type {ranks.dtype}. Expected integers."
            )
        axes = list(names)
        if len(axes) != ranks.ndim or len(set(axes)) != len(axes):
            raise InvalidRequestError(
                f"NamedSharding refused: names are {axes} for a layout of shape {ranks.shape}. Expected {ranks.ndim} "
                "different names, one per axis."
            )
        seen, counts = np.unique(ranks, return_counts=True)
        if int(seen[0]) < 0 or int(counts.max()) > 1:
            wrong = int(seen[0]) if int(seen[0]) < 0 else int(seen[counts > 1][0])
            raise InvalidRequestError(
                f"NamedSharding refused: rank {wrong} is {'negative' if wrong < 0 else 'repeated'}. Expected different "
                "ranks from 0 up."
            )
        self._ranks = ranks.astype(np.int64)
        self._ranks.flags.writeable = False
        self._names = tuple(axes)

    @property
    def names(self) -> list[str]:
        """The axes, in the layout's order."""
        return list(self._names)

    @property
    def shape(self) -> dict[str, int]:
        """Axis -> its number of ranks, in the layout's order."""
        return dict(zip(self._names, self._ranks.shape, strict=True))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._ranks.ndim

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self._ranks.size)

    @property
    def layout(self) -> NDArray[np.int64]:
        """The grid of ranks; a copy."""
        return self._ranks.copy()

    def get_axis_size(self, name: str) -> int:
        """The number of ranks along an axis. Raises `InvalidRequestError` if there is no such axis."""
        return int(self._ranks.shape[self.get_axis_index(name)])

    def get_axis_index(self, name: str) -> int:
        """The place of an axis in the layout. Raises `InvalidRequestError` if there is no such axis."""
        if name not in self._names:
            raise InvalidRequestError(
                f"NamedSharding refused: there is no axis '{name}'. Expected one of {', '.join(self._names)}."
            )
        return self._names.index(name)

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """The coordinates of a rank: axis -> coordinate. Raises `InvalidRequestError` if it is not on the grid."""
        where = np.argwhere(self._ranks == worker_id).tolist()
        if not where:
            raise InvalidRequestError(
                f"NamedSharding.get_worker_coords refused: rank {worker_id} is not on the grid. Expected one of its "
                f"{self.size} ranks, {self._ranks.min()} to {self._ranks.max()}."
            )
        return dict(zip(self._names, where[0], strict=True))

    def get_ranks(self, **coords: int) -> NamedSharding | int:
        """The part of the grid at some coordinates: a grid of the other axes, or the rank if all axes are given.

        Raises:
            InvalidRequestError: No such axis, or a coordinate out of range.
        """
        part = self._ranks[self._index(coords)]
        rest = [name for name in self._names if name not in coords]
        return NamedSharding(part, rest) if rest else int(part)

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """The ranks at some coordinates, ascending: all without any, none if a coordinate is out of range.

        Raises:
            InvalidRequestError: There is no such axis.
        """
        if not all(0 <= coord < self.get_axis_size(name) for name, coord in coords.items()):
            return []
        ranks: list[int] = np.sort(self._ranks[self._index(coords)], axis=None).tolist()
        return ranks

    @staticmethod
    def is_axis_zero(coords: Mapping[str, int], axes: Iterable[str]) -> bool:
        """Whether coordinates are 0 on all ``axes``. A missing axis counts as 0.

        ``is_axis_zero(coords, REPLICATED_AXES)`` is True for the leader of a replica group.
        """
        return all(coords.get(axis, 0) == 0 for axis in axes)

    def _index(self, coords: Mapping[str, int]) -> tuple[int | slice, ...]:
        index: list[int | slice] = [slice(None)] * self.ndim
        for name, coord in coords.items():
            size = self.get_axis_size(name)
            if not 0 <= coord < size:
                raise InvalidRequestError(
                    f"NamedSharding refused: coordinate {coord} is out of range on axis '{name}'. Expected 0 to "
                    f"{size - 1}."
                )
            index[self.get_axis_index(name)] = coord
        return tuple(index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(self._ranks, other._ranks)

    def __hash__(self) -> int:
        return hash((self._names, self._ranks.shape, self._ranks.tobytes()))

    def __repr__(self) -> str:
        return f"NamedSharding({', '.join(f'{name}={size}' for name, size in self.shape.items())})"
