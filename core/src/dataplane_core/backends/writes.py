"""Which columns of a put are stored together, and which apart.

In engines that store rows, each stored row has a cost, so small columns are stored together. But a read of one field
moves the whole row. So the largest columns are stored apart, as far as the cost of their rows stays a small share of
the put: a put of large cells has room for many such columns, a put of small ones for none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from dataplane_core.errors import BackendError
from dataplane_core.ledger import commands
from dataplane_core.spec import SharedRows, WireColumn

#: How much the rows of columns that are apart may cost, as a share of the put.
APART_SHARE: Final = 0.04
#: Columns whose cells have fewer bytes on average are never apart.
_LEAST_APART_BYTES: Final = 1024


def writes_of(
    columns: Mapping[str, WireColumn | SharedRows],
    num_samples: int,
    row_cost_bytes: int | None,
    apart_share: float = APART_SHARE,
) -> list[commands.Write]:
    """The writes of a put: first the columns that are stored together, if there are any, then each one that is apart.

    Args:
        columns: The columns of the put, encoded. `SharedRows` are always apart.
        num_samples: N.
        row_cost_bytes: What a stored row costs beside its bytes, as the bytes that are moved in the same time;
            ``benchmarks/columns.py`` prints it. None: only `SharedRows` are apart.
        apart_share: How much the rows of the columns that are apart may cost, as a share of the put.

    Raises:
        BackendError: Shared rows do not give each sample a row, or have rows that no sample has.
    """
    from dataplane_core.codec.rows import cell_nbytes, row_nbytes  # it imports torch

    plain = {name: column for name, column in columns.items() if not isinstance(column, SharedRows)}
    if len(plain) == len(columns) and (row_cost_bytes is None or len(plain) < 2):  # the usual case of few columns
        return [commands.Write(tuple(plain), row_nbytes(plain, num_samples))] if plain else []
    sizes = {name: np.broadcast_to(cell_nbytes(column, num_samples), num_samples) for name, column in plain.items()}
    apart = _columns_apart(sizes, num_samples, row_cost_bytes, apart_share)
    together = tuple(name for name in plain if name not in apart)
    row_bytes = sum((sizes[name] for name in together), np.zeros(num_samples, dtype=np.int64))
    writes = [commands.Write(together, row_bytes.tolist())] if together else []
    writes += [commands.Write((name,), sizes[name].tolist()) for name in apart]
    for name, column in columns.items():
        if isinstance(column, SharedRows):
            num_shared = len(column.rows)
            _check_index(name, column, num_shared, num_samples)
            writes.append(commands.Write((name,), row_nbytes({name: column.rows}, num_shared), column.index))
    return writes


def columns_of(write: commands.Write, columns: Mapping[str, WireColumn | SharedRows]) -> dict[str, WireColumn]:
    """The columns of a write among those of its put, each with the rows of the write."""
    found = {name: columns[name] for name in write.fields}
    return {name: column.rows if isinstance(column, SharedRows) else column for name, column in found.items()}


def _check_index(name: str, column: SharedRows, found: int, num_samples: int) -> None:
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
