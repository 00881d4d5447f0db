"""A column as a backend sees it, and `FieldSpec`: what a field keeps for the lifetime of a registration.

Shape legend: ``N`` rows, ``T`` elements of all rows together on the ragged dim, ``L`` a row's own length.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from msgspec.structs import replace

from dataplane_core.errors import CorruptDataError, Frozen, InvalidRequestError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows that may differ in their first dim, joined end to end. ``len(ragged)`` is N.

    Attributes:
        values: (T, *trailing), contiguous, on the host.
        offsets: (N + 1,) int64 on the host, from 0 to T.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the ragged dim, its trailing dims included."""
        return self.values.dtype.itemsize * math.prod(self.values.shape[1:])

    @property
    def lengths(self) -> Any:
        """(N,) int64, as an array."""
        cuts = self.offsets.numpy()
        return cuts[1:] - cuts[:-1]

    def dense(self) -> torch.Tensor | None:
        """A view (N, L, *trailing) if all rows have length L; else None."""
        lengths = self.lengths
        length = int(lengths[0]) if len(lengths) else 0
        if (lengths != length).any():
            return None
        return self.values.view(len(lengths), length, *self.values.shape[1:])


#: A dense tensor (N, ...); rows that differ in their first dim; or a list of N items, which may be frames.
WireColumn: TypeAlias = "torch.Tensor | Ragged | list[Any]"


@dataclass(frozen=True, slots=True)
class SharedRows:
    """A column whose rows repeat. Only backends with `WireFormat.shared_rows` take and return it.

    Attributes:
        rows: The column without the repeats.
        index: For each row of the column, its row in ``rows``.
        digests: Of a put to a backend with `WireFormat.by_content`: a digest of each of ``rows``, all different.
            Middleware that changes the rows leaves them out.
    """

    rows: WireColumn
    index: Sequence[int]
    digests: Sequence[bytes] | None = None

    def __len__(self) -> int:
        return len(self.index)


# --- what a field keeps -----------------------------------------------------------------------------------------------

_OBJECTS: Final = "object::0:"
#: The dtype of a field of which only empty lists are known.
_UNKNOWN: Final = "unknown"
#: What a field may become of which only ints of lists are known: dtypes that hold all of these exactly.
_OF_INTS: Final = ("int64", "float32", "float64")
_TEXT: Final = re.compile(
    r"(tensor:([a-z][a-z0-9_]*):(-1|[0-9]{1,2}):((?:[0-9]{1,15}(?:,[0-9]{1,15})*)?)|object::0:)(?::(empty|ints))?",
    re.ASCII,
)
#: What lists left open: see `FieldSpec.lists`.
ListsKind: TypeAlias = Literal["", "empty", "ints"]


class FieldSpec(Frozen, frozen=True):
    """Kind, dtype, rank and trailing shape of a field's cells, fixed by the first write that says them.

    A cell has rank 0 (one scalar per sample) or the shape ``(L, *trailing)``, where ``L`` may differ from row to row.

    Some lists do not say their type: empty ones, and ints, where floats may follow. A field that was given only these
    is **open**: the first write that says a type closes it (`after`). What was written before is stored as it was, and
    read as what the field has by now (`reading`).

    Attributes:
        kind: ``tensor`` or ``object``.
        dtype: Name of the torch dtype without its prefix, such as ``bfloat16``; empty for objects; ``unknown`` if only
            empty lists are known.
        rank: Number of dims of a cell; 0 for objects. -1: any, of a field of which only the dtype is declared.
        trailing: The cell's shape after its first dim.
        lists: The lists that were written, if they left the type open: ``empty`` or ``ints``. Of an open field, or of
            the cells that a read gives.
    """

    kind: Literal["tensor", "object"]
    dtype: str = ""
    rank: int = 0
    trailing: tuple[int, ...] = ()
    lists: ListsKind = ""

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
        """The spec of rows that are empty lists."""
        return cls("tensor", _UNKNOWN, 1, (), "empty")

    @classmethod
    def of_ints(cls, rank: int) -> FieldSpec:
        """The spec of ints of a list (rank 0), or of lists of ints (1), none of which is beyond 2**24."""
        return cls("tensor", "int64", rank, (), "ints")

    @classmethod
    def declared(cls, where: str, form: Any) -> FieldSpec:
        """What a user declares of a field: ``"object"``, a dtype, or a dtype and the shape of a cell.

        Args:
            where: For messages: what is declared, and for which field.
            form: Such as ``"float32"``: cells of any shape. ``("float32", ())``: scalars. ``("uint8", (3, 224, 224))``:
                cells of this shape, whose first dim may differ from row to row, as in any field.

        Raises:
            InvalidRequestError: It is something else.
        """
        dtype, shape = (form, None) if isinstance(form, str) or not isinstance(form, Sequence) else (*form, None)[:2]
        if dtype == "object" and shape is None:
            return cls("object")
        try:
            trailing = tuple([operator.index(size) for size in shape[1:]]) if shape else ()
            spec = cls("tensor", str(dtype).removeprefix("torch."), -1 if shape is None else len(shape), trailing)
            is_good = min(trailing, default=0) >= 0 and cls.from_text(spec.to_text()).torch_dtype is not None
        except (TypeError, CorruptDataError):
            is_good = False
        if not is_good or (shape is not None and len(form) > 2):
            raise InvalidRequestError(
                f"{where} refused: {form!r}. Expected 'object', the name of a torch dtype such as 'float32', or a "
                "dtype and the shape of a cell, such as ('uint8', (3, 224, 224))."
            )
        return spec

    def for_first(self, written: FieldSpec) -> FieldSpec:
        """What a field of which this is declared keeps, if such cells are the first."""
        return replace(self, rank=written.rank, trailing=written.trailing) if self.rank < 0 else self

    @property
    def is_open(self) -> bool:
        """Whether only lists are known of the field that do not say its type."""
        return self.dtype == _UNKNOWN or (self.dtype == "int64" and self.lists == "ints")

    @property
    def stored(self) -> FieldSpec:
        """The spec of the cells in the store: tensors, or objects. Empty lists are uint8 cells of shape (0,)."""
        if self.lists == "empty":
            return FieldSpec("tensor", "uint8", 1)
        return FieldSpec("tensor", "int64", self.rank) if self.lists else self

    def after(self, written: FieldSpec) -> FieldSpec | None:
        """The spec of a field after a write. None: the write does not fit.

        Ints of a list do not fit a field of floats: they are to be written as floats, which cost less to read.
        """
        if self == written or self._may_become(written):
            return written
        is_stored = written.lists == "empty" or written.stored == self
        return self if is_stored and written._may_become(self) else None

    def _may_become(self, other: FieldSpec) -> bool:
        if self.dtype == _UNKNOWN:
            return bool(other.rank) or other.kind == "object"
        return self.is_open and not other.lists and other.rank == self.rank and other.dtype in _OF_INTS

    def reading(self, lists: ListsKind) -> FieldSpec:
        """The spec in a read's reply of cells of this field that were written with such ``lists``."""
        if lists == self.lists or (lists == "ints" and self.dtype == "int64"):
            return self
        return replace(self, lists=lists)

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
        text = f"{self.kind}:{self.dtype}:{self.rank}:{','.join(map(str, self.trailing))}"
        return f"{text}:{self.lists}" if self.lists else text

    @classmethod
    def from_text(cls, text: str) -> FieldSpec:
        """Reads what `to_text` wrote.

        Raises:
            CorruptDataError: The text is not of that form.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise CorruptDataError(
                f"{text[:100]!r} is no spec of a field. Expected a text such as 'tensor:float32:2:16' or '{_OBJECTS}'."
            )
        form, dtype, rank, trailing = match.groups()[:4]
        lists = cast("ListsKind", match[5] or "")
        if form == _OBJECTS:
            return cls("object", lists=lists)
        dims = tuple([int(dim) for dim in trailing.split(",") if dim])
        if len(dims) != max(int(rank) - 1, 0):
            raise CorruptDataError(f"{text[:100]!r} is no spec of a field: it has {len(dims)} dims after the first.")
        return cls("tensor", dtype, int(rank), dims, lists)

    @staticmethod
    def is_text(text: str) -> bool:
        """Whether `from_text` can read a text."""
        with suppress(CorruptDataError):
            FieldSpec.from_text(text)
            return True
        return False

    def describe(self) -> str:
        """For error messages: ``float32 cells of shape (L, 16)``."""
        if self.kind == "object":
            return "objects"
        if self.dtype == _UNKNOWN:
            return "empty lists"
        dtype = f"{', '.join(_OF_INTS[:-1])} or {_OF_INTS[-1]}" if self.is_open else self.dtype
        if self.rank <= 0:
            return f"{dtype} scalars" if self.rank == 0 else f"{dtype} cells"
        dims = ", ".join(["L", *map(str, self.trailing)])
        return f"{dtype} cells of shape ({dims}{',' if self.rank == 1 else ''})"
