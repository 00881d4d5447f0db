"""`FieldSpec`: what a field keeps for the lifetime of a registration, fixed by the first write that says it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from dataplane_core.errors import CorruptDataError

if TYPE_CHECKING:
    import torch

_OBJECTS: Final = "object::0:"
#: The dtype of a field of which only empty lists are known.
_OPEN: Final = "unknown"
_TENSORS: Final = re.compile(r"tensor:([a-z][a-z0-9_]*):([0-9]{1,2}):((?:[0-9]{1,15}(?:,[0-9]{1,15})*)?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """Kind, dtype, rank and trailing shape of a field's cells.

    A cell has rank 0 (one scalar per sample) or the shape ``(L, *trailing)``, where ``L`` may differ from row to row.

    Empty lists say nothing about their type. A field that was given only these is **open** (`of_empty_lists`): the
    first write of another type closes it (`after`).

    Attributes:
        kind: ``tensor`` or ``object``.
        dtype: Name of the torch dtype without its prefix, such as ``bfloat16``; empty for objects; ``unknown`` if open.
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

    @classmethod
    def of_empty_lists(cls) -> FieldSpec:
        """The spec of rows that are empty lists. On the wire they are uint8 cells of shape (0,), which nobody reads."""
        return cls("tensor", _OPEN, 1)

    @property
    def is_open(self) -> bool:
        """Whether only empty lists are known of the field."""
        return self.dtype == _OPEN

    def after(self, written: FieldSpec) -> FieldSpec | None:
        """The spec of a field after a write. None: the write does not fit."""
        if self == written or (written.is_open and (self.rank or self.kind == "object")):
            return self
        return written if self.is_open and (written.rank or written.kind == "object") else None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of a tensor field.

        Raises:
            CorruptDataError: Torch has no such dtype.
        """
        import torch  # here: the ledger uses specs without it

        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptDataError(f"a field has the dtype '{self.dtype}', which torch lacks.")
        return dtype

    def to_text(self) -> str:
        """A compact text form, ``tensor:float32:2:16``, for engines that keep the schema as strings."""
        return f"{self.kind}:{self.dtype}:{self.rank}:{','.join(map(str, self.trailing))}"

    @classmethod
    def from_text(cls, text: str) -> FieldSpec:
        """Reads what `to_text` wrote.

        Raises:
            CorruptDataError: The text is not of that form.
        """
        if text == _OBJECTS:
            return cls("object")
        found = _TENSORS.fullmatch(text)
        if found is None:
            raise CorruptDataError(
                f"{text[:100]!r} is no spec of a field. Expected a text such as 'tensor:float32:2:16' or '{_OBJECTS}'."
            )
        dtype, rank, trailing = found.groups()
        dims = tuple([int(dim) for dim in trailing.split(",") if dim])
        if len(dims) != max(int(rank) - 1, 0):
            raise CorruptDataError(f"{text[:100]!r} is no spec of a field: it has {len(dims)} dims after the first.")
        return cls("tensor", dtype, int(rank), dims)

    def describe(self) -> str:
        """For error messages: ``float32 cells of shape (L, 16)``."""
        if self.kind == "object":
            return "objects"
        if self.is_open:
            return "empty lists"
        if self.rank == 0:
            return f"{self.dtype} scalars"
        dims = ", ".join(["L", *map(str, self.trailing)])
        return f"{self.dtype} cells of shape ({dims}{',' if self.rank == 1 else ''})"
