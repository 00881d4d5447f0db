"""`FieldSpec`: what a field keeps for the lifetime of a registration, fixed by its first write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["FieldSpec"]


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """Kind, dtype, rank and trailing shape of a field's cells.

    A cell has rank 0 (one scalar per sample) or the shape ``(L, *trailing)``, where ``L`` may differ from row to row.

    Attributes:
        kind: ``tensor`` or ``object``.
        dtype: Name of the torch dtype without its prefix, such as ``bfloat16``; empty for objects.
        rank: Number of dims of a cell; 0 for objects.
        trailing: The cell's shape after its first dim.
    """

    kind: Literal["tensor", "object"]
    dtype: str = ""
    rank: int = 0
    trailing: tuple[int, ...] = ()

    @classmethod
    def of_cells(cls, dtype: torch.dtype, cell_shape: tuple[int, ...]) -> FieldSpec:
        """The spec of tensor cells of ``dtype`` and ``cell_shape``, whose first dim is ignored."""
        return cls("tensor", str(dtype).removeprefix("torch."), len(cell_shape), tuple(cell_shape[1:]))

    @classmethod
    def of_objects(cls) -> FieldSpec:
        """The spec of an object column."""
        return cls("object")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of a tensor field."""
        import torch  # here: the ledger uses specs without it

        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def to_text(self) -> str:
        """A compact text form, ``tensor:float32:2:16``, for engines that keep the schema as strings."""
        return f"{self.kind}:{self.dtype}:{self.rank}:{','.join(map(str, self.trailing))}"

    @classmethod
    def from_text(cls, text: str) -> FieldSpec:
        """Reads what `to_text` wrote.

        Raises:
            ValueError: The text is not of that form.
        """
        kind, dtype, rank, trailing = text.split(":")
        if kind == "tensor":
            dims = tuple(int(dim) for dim in trailing.split(",") if dim)
            return cls("tensor", dtype, int(rank), dims)
        if kind == "object":
            return cls("object")
        raise ValueError(f"FieldSpec.from_text: kind must be 'tensor' or 'object', got {kind!r}.")

    def describe(self) -> str:
        """For error messages: ``float32 cells of shape (L, 16)``."""
        if self.kind == "object":
            return "objects"
        if self.rank == 0:
            return f"{self.dtype} scalars"
        dims = ", ".join(["L", *map(str, self.trailing)])
        return f"{self.dtype} cells of shape ({dims}{',' if self.rank == 1 else ''})"
