"""Which columns of a put are stored together, and which apart.

In engines that store rows, each stored row has a cost, so small columns are stored together. But a read of one field
moves the whole row. So the largest columns are stored apart, as far as the cost of their rows stays a small share of
the put: a put of large cells has room for many such columns, a put of small ones for none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dataplane_core.codec import cell_nbytes, num_rows, row_nbytes
from dataplane_core.errors import BackendError
from dataplane_core.spec import SharedRows, WireColumn

#: How much the rows of columns that are apart may cost, as a share of the put.
APART_SHARE: Final = 0.04
#: Columns whose cells have fewer bytes on average are never apart.
_LEAST_APART_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Bundle:
    """Columns of a put whose payload is one write.

    Attributes:
        columns: The columns, in the ledger's order of slots.
        row_bytes: Payload bytes of each of their rows.
        positions: The row that each sample has. None: sample i has row i.
    """

    columns: Mapping[str, WireColumn]
    row_bytes: Sequence[int]
    positions: Sequence[int] | None = None


def bundles_of(
    columns: Mapping[str, WireColumn | SharedRows],
    num_samples: int,
    row_cost_bytes: int | None,
    apart_share: float = APART_SHARE,
) -> list[Bundle]:
    """The writes of a put: first the columns that are stored together, which may be none, then each one that is apart.

    Args:
        columns: The columns of the put, encoded. `SharedRows` are always apart.
        num_samples: N.
        row_cost_bytes: What a stored row costs beside its bytes, as the bytes that are moved in the same time;
            ``benchmarks/columns.py`` prints it. None: only `SharedRows` are apart.
        apart_share: How much the rows of the columns that are apart may cost, as a share of the put.

    Raises:
        BackendError: Shared rows do not give each sample a row, or have rows that no sample has.
    """
    plain = {name: column for name, column in columns.items() if not isinstance(column, SharedRows)}
    if len(plain) == len(columns) and (row_cost_bytes is None or len(plain) < 2):  # the usual case of few columns
        return [Bundle(plain, row_nbytes(plain, num_samples))]
    sizes = {name: np.broadcast_to(cell_nbytes(column, num_samples), num_samples) for name, column in plain.items()}
    apart = _columns_apart(sizes, num_samples, row_cost_bytes, apart_share)
    together = {name: column for name, column in plain.items() if name not in apart}
    row_bytes = sum((sizes[name] for name in together), np.zeros(num_samples, dtype=np.int64))
    bundles = [Bundle(together, row_bytes.tolist())]
    bundles += [Bundle({name: plain[name]}, sizes[name].tolist()) for name in apart]
    for name, column in columns.items():
        if isinstance(column, SharedRows):
            _check_index(name, column, num_samples)
            rows = {name: column.rows}
            bundles.append(Bundle(rows, row_nbytes(rows, num_rows(column.rows)), column.index))
    return bundles


def _check_index(name: str, column: SharedRows, num_samples: int) -> None:
    found = num_rows(column.rows)
    if len(column.index) != num_samples or set(column.index) != set(range(found)):
        raise BackendError(
            f"put_samples refused: column '{name}' has {found} shared rows and an index of {len(column.index)}. "
            f"Expected a row for each of {num_samples} samples, and no other rows. Nothing was written.",
            hint="Middleware that adds or changes a column encodes it to the wire format that it was given.",
        )


def _columns_apart(
    sizes: Mapping[str, Any], num_samples: int, row_cost_bytes: int | None, apart_share: float
) -> list[str]:
    """The largest columns, as many as the budget allows. ``sizes``: the bytes of each column's cells."""
    if row_cost_bytes is None or len(sizes) < 2:
        return []
    totals = {name: int(cells.sum()) for name, cells in sizes.items()}
    most = int(apart_share * sum(totals.values()) / (row_cost_bytes * num_samples))
    largest = sorted(totals, key=lambda name: -totals[name])[: min(most, len(totals) - 1)]
    return [name for name in largest if totals[name] >= _LEAST_APART_BYTES * num_samples]
